"""The operations of `native.py`, with the same bits on every processor, number of threads and version of torch.

The bits of a sum depend on its order, and so on vector width, threads and library. The bits of an exact sum, or of a single
IEEE 754 operation, do not. So products and sums first round their terms to a grid so coarse that float64 adds them exactly
(`to_grid`). Everything else is separate additions, multiplications and divisions. Nothing is compiled, because a fused
multiply-add rounds once, not twice. exp, log, sine and roots are our own, because torch's depend on the processor.

Shapes are as in model.py; tensors are float32 unless stated. Functions without a docstring match their `native` namesakes.
"""

import functools
import math

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.numerics import native
from lockstep.numerics.native import rotate

TERMS = 1 << 13  # terms of a product per exact sum
BLOCK = 1 << 16  # elements computed in float64 at a time, to stay in a core's cache
causal_mask = functools.lru_cache(16)(native.causal_mask)


def to_grid(x: Tensor, bits: int, dim: int | tuple[int, ...]) -> Tensor:
    """Round each row of `x` (along `dim`) to multiples of 2^(e - bits), in float64, with 2^e just above its largest element.

    A float64 of 1.5 * 2^52 grid steps has no digits below the grid. Adding it therefore rounds half to even, and subtracting it
    is exact.
    """
    e = (x.abs().amax(dim, keepdim=True).view(torch.int32) >> 23) - 126  # read from the exponent bits of a float32
    magic = ((e.to(torch.int64) + (1023 + 52 - bits)) << 52).view(torch.float64) * 1.5
    return x.double().add_(magic).sub_(magic)


def factor(x: Tensor, dim: int) -> Tensor:
    """Put `x` on the grid for a `product` that adds along `dim`. A float64 `x` is already on it and returned unchanged."""
    return x if x.dtype is torch.float64 else to_grid(x, (53 - (min(x.shape[dim], TERMS) - 1).bit_length()) // 2, dim)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a` [..., n, k] @ `b` [..., k, m]: within k A B 2^-18 of the exact value, then rounded once to float32.

    A and B are the largest |element| in the row of `a` and the column of `b`. Every number is at most 2^bits grid steps, so
    float64 adds 2^(53 - 2 bits) products exactly, in any order. Longer sums are split into pieces of TERMS, so bits >= 20.
    Rounding moves a number by at most half a step, 2^-bits A. So it moves a term by at most A B (2 * 2^-20 + 2^-40).
    """
    pieces = factor(a, -1).split(TERMS, -1), factor(b, -2).split(TERMS, -2)
    return functools.reduce(torch.add, map(torch.matmul, *pieces)).float()


def total(x: Tensor, dim: int) -> Tensor:
    """Return the sum of n elements of `x` along `dim` (kept), in float64. Each keeps 51 - log2(n) bits below the largest."""
    return to_grid(x, 51 - (x.shape[dim] - 1).bit_length(), dim).sum(dim, keepdim=True)


def norm_parts(gradients: list[Tensor]) -> list[Tensor]:
    """Return the input of `norm_of` for each of the `gradients`: the sum of squares of each row."""
    return [total(gradient * gradient, -1).flatten() for gradient in gradients]


def norm_of(parts: list[Tensor]) -> Tensor:
    """Return the global norm of the gradients, from their `norm_parts`."""
    return torch.tensor(math.sqrt(math.fsum(torch.cat(parts).tolist())), dtype=torch.float64)


# Functions of float64 numbers. Rounded to float32, their error is at most 0.55 units in the last place.
LOG2E, LN2, LOG = 1.4426950408889634, 0.6931471805599453, [2 / n for n in range(19, 0, -2)]
HALF_PI_HIGH, HALF_PI_LOW = 1.57079632673412561417, 6.07710050650619224932e-11  # n * HALF_PI_HIGH is exact below 2^20
SINE, COSINE = ([(-1) ** n / math.factorial(2 * n + odd) for n in range(8, -1, -1)] for odd in (1, 0))
# Polynomials fitted at Chebyshev points. POWER: 2^x for |x| <= 1/2, with an error of 2^-28.5. TAIL: the probability that a
# normal number exceeds x >= 0, divided by exp(-x^2 / 2), in powers of t = 1 / (1 + x / sqrt(8)). Its error is 2^-31.6.
POWER = [0.00015469731979732033, 0.0013400432165314982, 0.009618025602947949, 0.05550327214209315, 0.24022651213595256,
         0.6931472067106205, 0.9999999999595484]  # fmt: skip
TAIL = [-0.0164420067507, 0.122017403884, -0.387703650265, 0.669334940232, -0.652539514947, 0.354775591213, -0.164704498724,
        0.090438872559, 0.0779874559053, 0.124866888539, 0.14091428399, 0.141054391307, -1.56962654402e-07]  # fmt: skip


def polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Evaluate a polynomial by Horner's scheme. coefficients: highest power first."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[-1])


def exp(x: Tensor) -> Tensor:
    """Return e^x for `x` up to 700; 0 below -709."""
    x = x.clamp(-709, 700).mul_(LOG2E)
    n = x.round()
    return polynomial(x.sub_(n), POWER).mul_(((n.to(torch.int64) + 1023) << 52).view(torch.float64))  # times 2^n


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive normal `x`; -709 for 0."""
    bits = x.view(torch.int64)
    n = (bits - 0x3FE6A09E667F3BCD) >> 52  # x = m 2^n with sqrt(1/2) <= m < sqrt(2)
    m = (bits - (n << 52)).view(torch.float64)
    s = (m - 1) / (m + 1)  # log m = 2 atanh s
    return polynomial(s * s, LOG) * s + n.double() * LN2


def sin(x: Tensor, turns: int = 0) -> Tensor:
    """Return the sine of `x` plus `turns` quarter turns, for `x` up to 2^20, in float64."""
    n = (x * (2 / math.pi)).round_()
    r = (x - n * HALF_PI_HIGH).sub_(n * HALF_PI_LOW)
    square, turns = r * r, (n.to(torch.int64) + turns) & 3
    value = torch.where(turns % 2 == 0, polynomial(square, SINE) * r, polynomial(square, COSINE))
    return torch.where(turns < 2, value, -value)


def inverse_root(x: Tensor) -> Tensor:
    """Return 1 / square root of `x`, finite for 0, by Newton's iteration from a guess that halves the exponent."""
    y, half = (0x5FE6EB50C7B537A9 - (x.view(torch.int64) >> 1)).view(torch.float64), x * -0.5
    for _ in range(4):
        y = (half * y).mul_(y).add_(1.5).mul_(y)
    return y


def gated(x: Tensor, a: float, b: float) -> tuple[Tensor, Tensor]:
    """Return x sigmoid(a x + b x^3) and its slope: SiLU, or GELU's tanh form, since (1 + tanh u) / 2 = sigmoid(2 u)."""
    square = x * x
    gate = 1 / exp((square * -b).sub_(a).mul_(x)).add_(1)
    value = x * gate
    return value, (1 - gate).mul_(value).mul_(square.mul_(3 * b).add_(a)).add_(gate)


def normal_gated(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return exact GELU and its slope: x times the probability (1 + erf(x / sqrt(2))) / 2 that a normal number is below x."""
    density = exp(x * x * -0.5)
    tail = polynomial(1 / (x.abs() * math.sqrt(1 / 8) + 1), TAIL).mul_(density)
    probability = torch.where(x > 0, 1 - tail, tail)
    return x * probability, probability + x * density * math.sqrt(0.5 / math.pi)


def pointwise(function, x: Tensor) -> Tensor:
    """Apply `function`, which returns value and slope, elementwise to `x`."""
    value, slope = (found.float() for found in function(x.detach().double()))
    return value + slope * (x - x.detach())  # x - x.detach() is 0, but has a gradient


def stacked(parts: list[Tensor], dim: int) -> Tensor:
    """Stack the `parts` [..., m, k]. Weights become a `factor` for sums along `dim`, cached until the weights change."""
    if not isinstance(parts[0], nn.Parameter):  # not a weight: from attention, or saved by activation checkpointing
        return torch.cat(parts, -2)
    kept, versions = vars(parts[0]).setdefault("factors", {}), [part._version for part in parts]
    if kept.get(dim, ())[:1] != (versions,):
        kept[dim] = versions, factor(torch.cat(parts), dim)
    return kept[dim][1]


class Product(torch.autograd.Function):
    """`a` [..., n, k] times the transpose of the stacked `parts` [..., m, k]."""

    @staticmethod
    def forward(ctx, a: Tensor, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(a, *parts)
        return product(a, stacked(parts, -1).mT)

    @staticmethod
    def backward(ctx, grad: Tensor):
        a, *parts = ctx.saved_tensors
        return product(grad, stacked(parts, -2)), *product(grad.mT, a).split([part.shape[-2] for part in parts], -2)


def logits(x: Tensor, *weights: Tensor) -> Tensor:
    """Return `x` [..., C] times the transpose of the stacked `weights` [M, C]."""
    return Product.apply(x.flatten(0, -2), *weights).unflatten(0, x.shape[:-1])


def linears(x: Tensor, layers: list[nn.Linear]) -> list[Tensor]:
    """Return the outputs of several linear `layers` for the same `x` [..., C], from one product."""
    together = logits(x, *(layer.weight for layer in layers))
    if layers[0].bias is not None:
        together = together + repeat(torch.cat([layer.bias for layer in layers]), x)
    return list(together.split([layer.out_features for layer in layers], dim=-1))


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linears(x, [self])[0]


class Lookup(torch.autograd.Function):
    """The rows of `weight` [V, C] at `tokens` [...] int64."""

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return weight[tokens]

    @staticmethod
    def backward(ctx, grad: Tensor):
        tokens, weight = ctx.saved_tensors
        rows = to_grid(grad.flatten(0, -2), 51 - tokens.numel().bit_length(), (0, 1))  # so that all rows add up exactly
        found, places = tokens.flatten().unique(return_inverse=True)
        sums = rows.new_zeros(len(found), rows.shape[1]).index_add_(0, places, rows)
        return None, torch.zeros_like(weight).index_copy_(0, found, sums.float())


def repeat(weight: Tensor, x: Tensor) -> Tensor:
    """Repeat `weight` [M] for each row of `x` [..., C]. It is looked up in a table of one row, to make its gradient exact."""
    return Lookup.apply(x.new_zeros(x.shape[:-1], dtype=torch.int64), weight[None])


class Normalize(torch.autograd.Function):
    """`x` [..., C] divided by its root mean square; if `centered`, after subtracting the mean."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float, centered: bool) -> Tensor:
        ctx.centered, x = centered, x - (total(x, -1) * (1 / x.shape[-1])).float() if centered else x
        scale = inverse_root(total(x * x, -1) * (1 / x.shape[-1]) + eps).float()
        ctx.save_for_backward(normed := x * scale, scale)
        return normed

    @staticmethod
    def backward(ctx, grad: Tensor):
        normed, scale = ctx.saved_tensors
        along = (total(grad * normed, -1) * (1 / grad.shape[-1])).float()
        grad = grad - (total(grad, -1) * (1 / grad.shape[-1])).float() if ctx.centered else grad
        return (grad - normed * along).mul_(scale), None, None


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return Normalize.apply(x, self.eps, False) * repeat(self.weight, x)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return Normalize.apply(x, self.eps, True) * repeat(self.weight, x) + repeat(self.bias, x)


def norm_and_rotate(x: Tensor, weight: Tensor, eps: float, rope: Tensor) -> Tensor:
    """Compute `rotate(rms_norm(x))` for `x` [B, T, H, D] and `weight` [D]."""
    return rotate(Normalize.apply(x, eps, False) * repeat(weight, x), rope)


class Softmax(torch.autograd.Function):
    """Softmax of `x` [..., n] over its last dimension, in place."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        n = x.shape[-1]
        magic = 1.5 * (2 << n.bit_length())  # no term exceeds 1, so n of them add up exactly on this grid
        for rows in x.view(-1, n).split(max(1, BLOCK // n)):
            terms = exp(rows.double().sub_(rows.amax(1, keepdim=True)))
            rows.copy_(terms.mul_(1 / (terms + magic).sub_(magic).sum(1, keepdim=True)))
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        return (grad - total(grad * (weights := ctx.saved_tensors[0]), -1).float()).mul_(weights)


def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, mask: Tensor | None = None) -> Tensor:
    """Compute causal attention of `q` [B, H, T, D] over `k`, `v` [B, n_kv_head, S, D]. mask: from `document_mask`."""
    (T, D), S, first = q.shape[2:], k.shape[2], []
    mask = causal_mask(S, q.dtype, q.device)[None, None, S - T :] if mask is None else mask
    if T > 128:  # the first half of the queries does not need the later keys
        half, end = T // 2, S - T + T // 2
        first = [attention(q[:, :, :half], k[:, :, :end], v[:, :, :end], dropout_p, mask[..., :half, :end])]
        q, mask = q[:, :, half:], mask[..., half:, :]
    queries = (q * (1 / math.sqrt(D))).unflatten(1, (k.shape[1], -1))  # one product for the heads that share keys
    scores = Product.apply(queries.flatten(2, 3), k).view(*queries.shape[:4], -1) + mask[:, None]
    weights = dropout(Softmax.apply(scores).flatten(2, 3), dropout_p, True)
    return torch.cat((*first, Product.apply(weights, v.mT).view(q.shape)), dim=2)


def cross_entropy_part(x: Tensor, weight: Tensor, targets: Tensor, weight_grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """See `native.cross_entropy_part`."""
    probabilities, targets = Softmax.apply(product(x, stacked([weight], -1).T)), targets[:, None]  # [rows, V], [rows, 1]
    losses = -log(probabilities.gather(1, targets).double()).float()
    if weight_grad is not None:
        probabilities.scatter_add_(1, targets, torch.full_like(losses, -1))
        weight_grad += product(probabilities.T, x)
    return total(losses, 0)[0, 0].float(), None if weight_grad is None else product(probabilities, stacked([weight], -2))


def power(base: float, exponents: Tensor) -> Tensor:
    """Return `base` to the power of `exponents`, in float64."""
    return exp(exponents.double() * log(torch.tensor(base, dtype=torch.float64, device=exponents.device)))


embed, softmax, matmul, gelu_erf = Lookup.apply, Softmax.apply, product, functools.partial(pointwise, normal_gated)
cos = cosine = functools.partial(sin, turns=1)
silu = functools.partial(pointwise, functools.partial(gated, a=1.0, b=0.0))
gelu = functools.partial(pointwise, functools.partial(gated, a=1.5957691216057308, b=0.07135481627260025))
document_mask = functools.partial(native.document_mask, flexible=False)
linear_cross_entropy = functools.partial(native.linear_cross_entropy, rows=256)  # the same on any device


# Random numbers come from numpy's Philox (Salmon et al. 2011). Its key is an integer drawn from torch's generator.
def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """In training, drop elements of `x` with probability `p` (in steps of 2^-16) and divide the rest by 1 - p."""
    if not (p and training):
        return x
    philox = np.random.Philox(key=int(torch.randint(1 << 62, ())))
    keep = philox.random_raw(-(-x.numel() // 4)).view(np.uint16)[: x.numel()] >= round(p * 65536)
    return x * torch.from_numpy(keep).view(x.shape).to(x.device, x.dtype).mul_(1 / (1 - p))


def normal_(value: Tensor, mean: float, std: float, *, generator: torch.Generator) -> Tensor:
    """Fill `value`, on the CPU, with approximately normal numbers: sums of twelve uniform numbers."""
    philox = np.random.Philox(key=int(torch.randint(1 << 62, (), generator=generator)))
    for piece in value.view(-1).split(BLOCK):
        sums = philox.random_raw(3 * len(piece)).view(np.uint16).reshape(-1, 12).sum(1, dtype=np.int64)
        piece.copy_(torch.from_numpy(sums - 6 * 65535) * (std / 65536) + mean)
    return value


def multinomial(probabilities: Tensor, _, generator: torch.Generator | None) -> Tensor:
    """Sample an index [B, 1] from each row of `probabilities` [B, V], using uniform numbers in steps of 2^-30."""
    sums = to_grid(probabilities, 51 - probabilities.shape[-1].bit_length(), -1).cumsum(-1)
    uniform = torch.randint(1 << 30, (len(sums), 1), generator=generator).double().mul_(1 / (1 << 30))
    return (sums <= uniform * sums[:, -1:]).sum(-1, keepdim=True)


def adamw(params, grads, exp_avgs, exp_avg_sqs, state_steps, *, lr, beta1, beta2, eps, weight_decay) -> None:
    """Update as PyTorch's AdamW does. This function and the next two work in place, on lists of tensors."""
    for *tensors, step in zip(params, grads, exp_avgs, exp_avg_sqs, state_steps, strict=True):
        step += 1
        first, second = (1 / (1 - exp(log(torch.tensor([beta1, beta2], dtype=torch.float64)) * step.item()))).tolist()
        for p, g, m, v in zip(*(tensor.view(-1).split(BLOCK) for tensor in tensors), strict=True):
            m.mul_(beta1).add_(g * (1 - beta1))
            v.mul_(beta2).add_(g * g * (1 - beta2))
            root = inverse_root(square := v.double().mul_(second)).mul_(square)
            p.mul_(1 - lr * weight_decay).sub_(m.double().mul_(lr * first).div_(root.add_(eps)).float())


def add_(values: list[Tensor], terms: list[Tensor], alpha: float) -> None:
    """Add `alpha` times the `terms` to `values`."""
    torch._foreach_add_(values, torch._foreach_mul(terms, alpha))


def lerp_(values: list[Tensor], targets: list[Tensor], weight: float) -> None:
    """Move `values` towards their `targets` by the fraction `weight` of the distance."""
    torch._foreach_mul_(values, 1 - weight)
    add_(values, targets, weight)


def baddbmm(x: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
    """Return `beta` x + `alpha` a @ b."""
    return x * beta + product(a, b) * alpha


def matrix_norm(x: Tensor) -> Tensor:
    """Return the norm [N, 1, 1] of each matrix of `x` [N, rows, columns]."""
    return torch.stack([norm_of(norm_parts([matrix])) for matrix in x]).float()[:, None, None]
