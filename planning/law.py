"""How the loss depends on the weights and the tokens of a run: a law that is fitted to small runs, with its uncertainty.

loss = E + A / weights^a + B / tokens^b (Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models").
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np

from common import files

EXPONENT, SPREAD = 0.33, 0.4  # what is expected of a and b: this, and within so much of its logarithm (arXiv 2404.10102)
NOISE, NOISE_RUNS = 0.01, 3  # what is expected of the loss between seeds, which counts as much as so many runs
DRIFT = 0.013  # nats by which runs leave the law, for each doubling of their FLOPs beyond the largest run: docs/dial.md
HALF_LIFE = 15.4  # of repeated tokens, in epochs (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models")
QUANTILE = 1.645  # of 90 % in the middle of a normal distribution


def worth(tokens: float, available: float) -> float:
    """The fresh tokens that `tokens` from a text of `available` ones are worth, which repeat it where they are more.

    A repetition is worth less than the one before: Muennighoff et al. 2023, equation 5.
    """
    repetitions = max(0.0, tokens / available - 1)
    return min(tokens, available) + available * HALF_LIFE * (1 - np.exp(-repetitions / HALF_LIFE))


@dataclass(frozen=True)
class Law:
    """Many laws, one for each pair of exponents, and how likely each is. The prediction is their mixture."""

    exponents: np.ndarray  # [G, 2]: a and b
    factors: np.ndarray  # [G, 3]: E, A and B, for weights and tokens in units of `scale`
    covariance: np.ndarray  # [G, 3, 3] of the factors
    noise: np.ndarray  # [G]: variance of the loss of a run
    chance: np.ndarray  # [G]: adds up to 1
    scale: np.ndarray  # [2]
    largest: float  # weights times tokens of the largest run

    def predict(self, weights: float, tokens: float) -> tuple[float, float]:
        """The loss of a run, and half the width of the interval in which it lies with 90 %."""
        x = design(np.array([[weights, tokens]]) / self.scale, self.exponents)[:, 0]  # [G, 3]
        losses = (x * self.factors).sum(1)
        variances = self.noise + np.einsum("gi,gij,gj->g", x, self.covariance, x)
        mean = float(self.chance @ losses)
        drift = DRIFT * max(0.0, np.log2(weights * tokens / self.largest))
        return mean, QUANTILE * float(self.chance @ (variances + (losses - mean) ** 2) + drift**2) ** 0.5

    def text(self) -> str:
        """The likeliest law as a formula."""
        best = self.chance.argmax()
        (a, b), (E, A, B) = self.exponents[best], self.factors[best]
        A, B = A * self.scale[0] ** a, B * self.scale[1] ** b
        return f"loss = {E:.3f} + {A:.4g} / weights^{a:.2f} + {B:.4g} / tokens^{b:.2f}"


def design(sizes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """What the factors are multiplied with, [G, n, 3], for `sizes` [n, 2] and `exponents` [G, 2]."""
    powers = sizes[None] ** -exponents[:, None]
    return np.concatenate((np.ones_like(powers[..., :1]), powers), axis=2)


def fit(weights: list[float], tokens: list[float], losses: list[float]) -> Law:
    """The law of runs with these weights, tokens (fresh ones, see `worth`) and losses. A run that is far off counts less."""
    sizes, y = np.array([weights, tokens], float).T, np.array(losses)
    scale = np.exp(np.log(sizes).mean(0))
    grid = np.geomspace(0.08, 1.2, 48)
    exponents = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    x, trust = design(sizes / scale, exponents), np.ones((len(exponents), len(y)))
    for _ in range(10):  # Huber's estimate, by weighted least squares
        inverse = np.linalg.inv(np.einsum("gni,gn,gnj->gij", x, trust, x) + 1e-9 * np.eye(3))
        factors = np.einsum("gij,gnj,gn,n->gi", inverse, x, trust, y)
        residuals = np.abs(y - np.einsum("gni,gi->gn", x, factors))
        limit = 1.345 * np.maximum(NOISE, 1.4826 * np.median(residuals, axis=1, keepdims=True))
        trust = np.minimum(1, limit / np.maximum(residuals, 1e-12))
    squares = (trust * residuals**2).sum(1) + NOISE_RUNS * NOISE**2
    noise = squares / max(1, len(y) + NOISE_RUNS - 5)
    surprise = 0.5 * (len(y) + NOISE_RUNS) * np.log(squares) + 0.5 * ((np.log(exponents / EXPONENT) / SPREAD) ** 2).sum(1)
    surprise[(factors < 0).any(1)] += 1e3  # the loss falls with size, and not below zero
    chance = np.exp(surprise.min() - surprise)
    largest = float(sizes.prod(axis=1).max())
    return Law(exponents, factors, inverse * noise[:, None, None], noise, chance / chance.sum(), scale, largest)


@dataclass(frozen=True)
class Rung:
    """A run of a ladder that is done."""

    depth: int
    weights: int
    tokens: int
    flops: float
    loss: float  # of its last evaluation
    speed: float  # FLOP/s


class Facts(TypedDict):
    """What the runs of a ladder share."""

    tokens: str  # the sha256 of the dataset
    command: list[str]  # the preset and the flags of train.py
    preset: NotRequired[str]  # the sha256 of the preset


class Foretold(TypedDict):
    """What a ladder says of the run that it finds."""

    val_loss: float
    margin: float  # half of the interval in which the loss lies with 90 %
    depth: int
    tokens: float


class Record(TypedDict):
    """ladder.json."""

    facts: Facts
    available: float  # tokens until the text has been read once
    rungs: NotRequired[list[Rung]]
    foretold: NotRequired[Foretold]


def of_rungs(rungs: list[Rung], available: float) -> Law:
    """The law of the runs of a ladder on a text of `available` tokens."""
    fresh = [worth(rung.tokens, available) for rung in rungs]
    return fit([rung.weights for rung in rungs], fresh, [rung.loss for rung in rungs])


def read(path: Path) -> Record:
    """A ladder.json. Raises UserError if it is damaged."""
    return files.read_json(path, Record)
