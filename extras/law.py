"""Fit a scaling law to small runs: how the loss depends on the numbers of weights and tokens, and how certain that is.

loss = E + A / weights^a + B / tokens^b (Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models").
"""

import numpy as np

PRIOR_EXPONENT, PRIOR_SPREAD = 0.33, 0.4  # prior mean of a and b, and the spread of their logarithms (arXiv 2404.10102)
NOISE, NOISE_RUNS = 0.01, 3  # prior for the spread of the loss across seeds, and how many runs it counts as
EXTRAPOLATION_ERROR = 0.013  # nats per doubling of FLOPs beyond the largest fitted run; see docs/dial.md
HALF_LIFE = 15.4  # epochs of repetition (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models")
QUANTILE = 1.645  # half-width of a 90 % interval, in standard deviations


def effective_tokens(tokens: np.ndarray, unique_tokens: float) -> np.ndarray:
    """Return the number of fresh tokens that `tokens` are worth if the text has only `unique_tokens` and must be repeated.

    Each repetition is worth less than the one before (Muennighoff et al. 2023, equation 5).
    """
    repetitions = np.maximum(0, tokens / unique_tokens - 1)
    return np.minimum(tokens, unique_tokens) + unique_tokens * HALF_LIFE * (1 - np.exp(-repetitions / HALF_LIFE))


def terms(sizes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return the factors of E, A and B, [G, n, 3], for `sizes` [n, 2] and `exponents` [G, 2]."""
    powers = sizes[None] ** -exponents[:, None]
    return np.concatenate((np.ones_like(powers[..., :1]), powers), axis=2)


def predict(runs: list, losses: list[float], wanted: list, unique_tokens: float) -> tuple[np.ndarray, np.ndarray, str]:
    """Predict the losses [m] of the `wanted` runs. Also returns the half-widths [m] of their 90 % intervals, and a formula.

    runs: [n, 2], the weights and tokens of runs with these `losses`, on a text of `unique_tokens`. wanted: [m, 2], likewise.
    For each pair of exponents, a law is fitted robustly, so that outliers count less. The prediction averages these laws,
    weighted by their probability; the formula is the most probable one.
    """
    (weights, tokens), y = np.array([*runs, *wanted], float).T, np.array(losses)
    sizes, wanted = np.split(np.stack((weights, effective_tokens(tokens, unique_tokens)), axis=1), [len(y)])
    scale = np.exp(np.log(sizes).mean(0))
    grid = np.geomspace(0.08, 1.2, 48)
    exponents = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)  # [G, 2]: a and b
    x, trust = terms(sizes / scale, exponents), np.ones((len(exponents), len(y)))
    for _ in range(10):  # Huber's estimate, by iteratively reweighted least squares
        inverse = np.linalg.inv(np.einsum("gni,gn,gnj->gij", x, trust, x) + 1e-9 * np.eye(3))
        coefficients = np.einsum("gij,gnj,gn,n->gi", inverse, x, trust, y)  # [G, 3]: E, A and B
        residuals = np.abs(y - np.einsum("gni,gi->gn", x, coefficients))
        limit = 1.345 * np.maximum(NOISE, 1.4826 * np.median(residuals, axis=1, keepdims=True))
        trust = np.minimum(1, limit / np.maximum(residuals, 1e-12))
    squares = (trust * residuals**2).sum(1) + NOISE_RUNS * NOISE**2
    noise = squares / max(1, len(y) + NOISE_RUNS - 5)  # [G]: variance of one run's loss
    unlikely = 0.5 * (len(y) + NOISE_RUNS) * np.log(squares)  # the negative logarithm of the posterior
    unlikely += 0.5 * ((np.log(exponents / PRIOR_EXPONENT) / PRIOR_SPREAD) ** 2).sum(1)
    unlikely[(coefficients < 0).any(1)] += 1e3  # the loss must fall with size, and stay above zero
    probability = np.exp(unlikely.min() - unlikely)
    probability /= probability.sum()

    x = terms(wanted / scale, exponents)  # [G, m, 3]
    each = np.einsum("gmi,gi->gm", x, coefficients)
    variances = noise[:, None] * (1 + np.einsum("gmi,gij,gmj->gm", x, inverse, x))
    mean = probability @ each
    beyond = EXTRAPOLATION_ERROR * np.maximum(0, np.log2(wanted.prod(1) / sizes.prod(1).max()))
    margin = QUANTILE * (probability @ (variances + (each - mean) ** 2) + beyond**2) ** 0.5

    (a, b), (E, A, B) = exponents[probability.argmax()], coefficients[probability.argmax()]
    A, B = A * scale[0] ** a, B * scale[1] ** b
    return mean, margin, f"loss = {E:.3f} + {A:.4g} / weights^{a:.2f} + {B:.4g} / tokens^{b:.2f}"
