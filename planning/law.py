"""How the loss depends on the weights and the tokens of a run: a law that is fitted to small runs, with its uncertainty.

loss = E + A / weights^a + B / tokens^b (Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models").
"""

from dataclasses import dataclass

import numpy as np

PRIOR_EXPONENT, PRIOR_SPREAD = 0.33, 0.4  # of a and b, and of their logarithm (arXiv 2404.10102)
NOISE, NOISE_RUNS = 0.01, 3  # what is expected of the loss between seeds, which counts as much as so many runs
EXTRAPOLATION_ERROR = 0.013  # nats for each doubling of the FLOPs beyond the largest run of the law: docs/dial.md
HALF_LIFE = 15.4  # of repeated tokens, in epochs (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models")
QUANTILE = 1.645  # of 90 % in the middle of a normal distribution


def effective_tokens(tokens: float, unique_tokens: float) -> float:
    """The fresh tokens that `tokens` from a text of `unique_tokens` are worth, which repeat it where they are more.

    A repetition is worth less than the one before: Muennighoff et al. 2023, equation 5.
    """
    repetitions = max(0.0, tokens / unique_tokens - 1)
    return min(tokens, unique_tokens) + unique_tokens * HALF_LIFE * (1 - np.exp(-repetitions / HALF_LIFE))


@dataclass(frozen=True)
class Law:
    """Many laws, one for each pair of exponents, and how likely each is. The prediction is their mixture."""

    exponents: np.ndarray  # [G, 2]: a and b
    coefficients: np.ndarray  # [G, 3]: E, A and B, for weights and tokens in units of `scale`
    covariance: np.ndarray  # [G, 3, 3] of the coefficients
    noise: np.ndarray  # [G]: variance of the loss of a run
    probability: np.ndarray  # [G]: adds up to 1
    scale: np.ndarray  # [2]
    largest: float  # weights times tokens of the largest run

    def predict(self, weights: float, tokens: float) -> tuple[float, float]:
        """The loss of a run, and half the width of the interval in which it lies with 90 %."""
        x = design(np.array([[weights, tokens]]) / self.scale, self.exponents)[:, 0]  # [G, 3]
        losses = (x * self.coefficients).sum(1)
        variances = self.noise + np.einsum("gi,gij,gj->g", x, self.covariance, x)
        mean = float(self.probability @ losses)
        beyond = EXTRAPOLATION_ERROR * max(0.0, np.log2(weights * tokens / self.largest))
        return mean, QUANTILE * float(self.probability @ (variances + (losses - mean) ** 2) + beyond**2) ** 0.5

    def text(self) -> str:
        """The likeliest law as a formula."""
        best = self.probability.argmax()
        (a, b), (E, A, B) = self.exponents[best], self.coefficients[best]
        A, B = A * self.scale[0] ** a, B * self.scale[1] ** b
        return f"loss = {E:.3f} + {A:.4g} / weights^{a:.2f} + {B:.4g} / tokens^{b:.2f}"


def design(sizes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """What the coefficients are multiplied with, [G, n, 3], for `sizes` [n, 2] and `exponents` [G, 2]."""
    powers = sizes[None] ** -exponents[:, None]
    return np.concatenate((np.ones_like(powers[..., :1]), powers), axis=2)


def fit(weights: list[float], tokens: list[float], losses: list[float]) -> Law:
    """The law of runs with these weights, `effective_tokens` and losses. A run that is far off counts less."""
    sizes, y = np.array([weights, tokens], float).T, np.array(losses)
    scale = np.exp(np.log(sizes).mean(0))
    grid = np.geomspace(0.08, 1.2, 48)
    exponents = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    x, trust = design(sizes / scale, exponents), np.ones((len(exponents), len(y)))
    for _ in range(10):  # Huber's estimate, by weighted least squares
        inverse = np.linalg.inv(np.einsum("gni,gn,gnj->gij", x, trust, x) + 1e-9 * np.eye(3))
        coefficients = np.einsum("gij,gnj,gn,n->gi", inverse, x, trust, y)
        residuals = np.abs(y - np.einsum("gni,gi->gn", x, coefficients))
        limit = 1.345 * np.maximum(NOISE, 1.4826 * np.median(residuals, axis=1, keepdims=True))
        trust = np.minimum(1, limit / np.maximum(residuals, 1e-12))
    squares = (trust * residuals**2).sum(1) + NOISE_RUNS * NOISE**2
    noise = squares / max(1, len(y) + NOISE_RUNS - 5)
    negative_log_posterior = 0.5 * (len(y) + NOISE_RUNS) * np.log(squares)
    negative_log_posterior += 0.5 * ((np.log(exponents / PRIOR_EXPONENT) / PRIOR_SPREAD) ** 2).sum(1)
    negative_log_posterior[(coefficients < 0).any(1)] += 1e3  # the loss falls with size, and not below zero
    probability = np.exp(negative_log_posterior.min() - negative_log_posterior)
    largest = float(sizes.prod(axis=1).max())
    return Law(exponents, coefficients, inverse * noise[:, None, None], noise, probability / probability.sum(), scale, largest)
