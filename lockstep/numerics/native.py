"""The model's operations, faster than in plain PyTorch, most with a hand-written backward pass.

They read and write memory less often than autograd would, and each is tested against the plain formula.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.adamw import adamw as torch_adamw

from lockstep.hardware.device import ONEDNN_IS_FASTER, ONEDNN_IS_WIDE
from lockstep.hardware.footprint import rows_at_a_time
from lockstep.numerics.attention import attention, causal_mask, document_mask, dropout  # noqa: F401  these are part of this module's interface

# Models and optimizers use these names and the functions below, or under --numerics=portable, the same names from portable.py.
LayerNorm, embed = nn.LayerNorm, F.embedding
silu, gelu_erf, logits, norm_parts, norm_of = F.silu, F.gelu, F.linear, torch._foreach_norm, nn.utils.get_total_norm
cos, sin, cosine, power, normal_, multinomial = torch.cos, torch.sin, math.cos, torch.pow, Tensor.normal_, torch.multinomial
softmax, matrix_norm = functools.partial(F.softmax, dim=-1), functools.partial(Tensor.norm, dim=(1, 2), keepdim=True)
matmul, baddbmm, lerp_, add_ = torch.matmul, torch.baddbmm, torch._foreach_lerp_, torch._foreach_add_
# The function inside torch.optim.AdamW: constructing that class imports PyTorch's compiler, which takes a second.
adamw = functools.partial(torch_adamw, max_exp_avg_sqs=[], fused=True, amsgrad=False, maximize=False)


FEWEST_ROWS = 32  # for oneDNN; MKL multiplies fewer, as in sampling


class Linear(nn.Linear):
    """nn.Linear that computes with `linear`."""

    def forward(self, x: Tensor) -> Tensor:  # maps [..., C] to [..., D]
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x` [..., C] @ `weight` [D, C].T + `bias` [D]."""
    return OneDNNLinear.apply(x, weight, bias) if uses_onednn(x) else F.linear(x, weight, bias)


def uses_onednn(x: Tensor) -> bool:
    """Return whether to multiply many rows `x` by oneDNN: in float32 on CPUs where MKL, which PyTorch prefers, is slower."""
    is_float32 = ONEDNN_IS_FASTER and x.device.type == "cpu" and x.dtype == compute_dtype(x) == torch.float32
    return is_float32 and x.numel() >= FEWEST_ROWS * x.shape[-1]


class OneDNNLinear(torch.autograd.Function):
    """See `linear`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        bias_grad = rows.sum(0) if ctx.has_bias else None
        return onednn_linear(grad, weight.T, None), sum_of_rows(rows, x.flatten(0, -2)), bias_grad


# Operators of our own, because the compiler cannot trace oneDNN's.
@torch.library.custom_op("lockstep::linear", mutates_args=())
def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x` [..., C] @ `weight` [D, C].T + `bias` [D], multiplied by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@onednn_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op("lockstep::linear_sum_of_rows", mutates_args=())
def onednn_sum_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return `a` [rows, V] transposed @ `b` [rows, C], multiplied by oneDNN."""
    # PyTorch only checks the third tensor's type and device.
    return torch.ops.aten.mkldnn_linear_backward_weights(a.to_mkldnn(), b.to_mkldnn(), b, False)[0]


@onednn_sum_of_rows.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return b.new_empty(a.shape[1], b.shape[1])


def linears(x: Tensor, layers: list[nn.Linear]) -> list[Tensor]:
    """Return the outputs of several linear `layers` for the same `x` [..., C]. In portable.py, they come from one product."""
    return [layer(x) for layer in layers]


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, part=None, rows: int | None = None) -> Tensor:
    """Return the mean cross-entropy, a float32 scalar, of logits `x` [N, C] @ `weight` [V, C].T at `targets` [N] int64.

    The full [N, V] logits never exist. They are computed a few rows at a time, together with the gradients of those rows, as
    in Liger Kernel (Hsu et al. 2024). Matmuls run in autocast's dtype, sums in float32.
    part: a compiled `cross_entropy_part` (None: the plain function). rows: the maximum number of rows at a time.
    """
    # Equal parts if possible, because the compiler recompiles for a different number of rows.
    parts = math.ceil(len(x) / (rows or rows_at_a_time(len(weight), x.device.type)))
    rows = math.ceil(len(x) / parts / 128) * 128
    return LinearCrossEntropy.apply(x, weight, targets, rows, torch.is_grad_enabled(), part or cross_entropy_part)


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`. The forward pass computes the gradients of the summed loss; backward only scales them."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, rows: int, with_gradients: bool, part) -> Tensor:
        dtype = compute_dtype(x)
        x, weight = x.to(dtype), weight.to(dtype)
        loss = x.new_zeros((), dtype=torch.float32)
        x_grad, weight_grad = [], torch.zeros_like(weight, dtype=torch.float32) if with_gradients else None
        for x_rows, target in zip(x.split(rows), targets.split(rows), strict=True):
            part_loss, part_grad = part(x_rows, weight, target, weight_grad)
            loss = loss + part_loss
            x_grad.append(part_grad)
        if with_gradients:
            ctx.save_for_backward(torch.cat(x_grad), weight_grad)
        return loss / loss.new_full((), len(x))  # CUDA would multiply by the reciprocal of a Python number

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x_grad, weight_grad = ctx.saved_tensors
        grad = grad / grad.new_full((), len(x_grad))
        return x_grad * grad, weight_grad * grad, None, None, None, None


def cross_entropy_part(x: Tensor, weight: Tensor, targets: Tensor, weight_grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of some rows `x` [rows, C] at `targets` [rows], and its gradient with respect to `x`.

    Adds the gradient with respect to `weight` [V, C] to `weight_grad`. If that is None, computes no gradients.
    """
    logits = linear(x, weight).float()  # [rows, V]
    log_probabilities = logits.log_softmax(1)
    loss = -log_probabilities.gather(1, targets[:, None]).sum()
    if weight_grad is None:
        return loss, None
    logits_grad = subtract_one_hot(log_probabilities.exp_(), targets).to(x.dtype)
    weight_grad += sum_of_rows(logits_grad, x)
    return loss, linear(logits_grad, weight.T)


def sum_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return `a` [rows, V] transposed @ `b` [rows, C], in their dtype, or in float32 if they are float16.

    A sum over thousands of rows may exceed float16's largest number, 65504. A smaller loss scale would not help, because the
    gradients are scaled afterwards.
    """
    if uses_onednn(a) and ONEDNN_IS_WIDE:
        return onednn_sum_of_rows(a, b)
    if a.dtype is not torch.float16:
        return a.T @ b
    if a.device.type == "cuda":
        return torch.mm(a.T, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):  # autocast would cast them back
        return a.T.float() @ b.float()


def subtract_one_hot(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Subtract 1, in place, from `probabilities` [rows, V] at `targets` [rows]: the gradient with respect to the logits."""
    if on_eager_cpu(probabilities):
        return probabilities.scatter_add_(1, targets[:, None], probabilities.new_full((len(targets), 1), -1))
    # The compiler can fuse a comparison, and on a GPU a comparison is deterministic without sorting the targets.
    is_target = torch.arange(probabilities.shape[1], device=targets.device) == targets[:, None]
    return probabilities.sub_(is_target.to(probabilities.dtype))


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matmuls with `x`: autocast's if autocast is on, else `x.dtype`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def on_eager_cpu(x: Tensor) -> bool:
    """Return whether `x` is on a CPU and this code runs uncompiled, where hand-fused passes over memory pay off."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x` [..., C] divided by its root mean square (Zhang & Sennrich 2019), times `weight` [C].

    In eager mode on a CPU, the result is in autocast's dtype, and the backward pass is hand-written: PyTorch's own needs a
    dozen passes over memory.
    """
    if on_eager_cpu(x):
        return RMSNormFunction.apply(x, weight, eps)
    # Since torch 2.12, autocast on a GPU converts the inputs to float32 (pytorch/pytorch#188955). Under fsdp they are bfloat16,
    # and the kernel adds in float32 anyway.
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that computes with `rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:  # maps [B, T, C] to the same shape
        return rms_norm(x, self.weight, self.eps)


class RMSNormFunction(torch.autograd.Function):
    """See `rms_norm`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype, x, weight = compute_dtype(x), x.float(), weight.float()
        scale = inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        grad = grad.float()
        # LayerNorm has a fused backward kernel. With a mean of 0 it computes RMSNorm's gradient, but also subtracts the mean
        # of grad * weight, which the last line adds back.
        x_grad, weight_grad, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(scale), scale, weight, None, (True, True, False)
        )
        return x_grad.add_((grad @ weight)[..., None] * (scale / len(weight))), weight_grad, None


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / root mean square of `x` [..., C] over its last dimension, as [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(norm.new_tensor(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair of `x` [B, T, H, D] by the angle of its position and frequency: rotary positions (Su et al. 2021).

    A pair is element i of the first half of D and element i of the second. `rope` [2, T, 1, D / 2] holds cosines and sines in
    float32, so the result is float32.
    """
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def norm_and_rotate(x: Tensor, weight: Tensor, eps: float, rope: Tensor) -> Tensor:
    """Compute `rotate(rms_norm(x))` for `x` [B, T, H, D] and `weight` [D], in the dtype of `x`."""
    if on_eager_cpu(x):
        return NormAndRotate.apply(x, weight, eps, rope)
    # F.rms_norm has a fused kernel only if x and weight have the same dtype.
    return rotate(rms_norm(x.to(weight.dtype), weight, eps), rope).to(x.dtype)


class NormAndRotate(torch.autograd.Function):
    """See `norm_and_rotate`. The result's memory is laid out as [B, H, T, D], the order in which attention reads it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, rope: Tensor) -> Tensor:
        B, T, H, D = x.shape
        normed, weight = x.float(), weight.float()
        scale = inverse_rms(normed, eps)
        normed = normed * scale
        ctx.save_for_backward(normed, weight, scale, rope)
        out = torch.empty((B, H, T, D), dtype=x.dtype).transpose(1, 2)
        cos, sin = rope
        first, second = weight.chunk(2)
        rotate_into(out, normed, (cos * first, sin * second), (cos * second, sin * first))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        normed, weight, scale, (cos, sin) = ctx.saved_tensors
        normed_grad = torch.empty_like(normed)  # the gradient of normed * weight: `grad` rotated back
        rotate_into(normed_grad, grad.float(), (cos, -sin), (cos, -sin))
        product = normed_grad * normed
        weight_grad = product.flatten(0, 2).sum(0)
        mean = (product @ weight)[..., None] / len(weight)
        x_grad = normed_grad.mul_(weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return x_grad.to(grad.dtype), weight_grad, None, None


def rotate_into(out: Tensor, x: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    """Rotate `x`, with halves a and b, into the halves of `out`: a first[0] - b first[1] and b second[0] + a second[1]."""
    (a, b), (out_a, out_b) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    out_a.copy_((a * first[0]).addcmul_(b, first[1], value=-1))
    out_b.copy_((b * second[0]).addcmul_(a, second[1]))


def gelu(x: Tensor) -> Tensor:
    """Compute GELU in its tanh form (Hendrycks & Gimpel 2016).

    On a CPU, tanh takes as long as the matmul before it. So compiled code uses a sigmoid, which takes less than half that time.
    The hand-written backward pass saves only `x`, while the compiler would save three tensors.
    """
    return Gelu.apply(x) if torch.compiler.is_compiling() else F.gelu(x, approximate="tanh")


class Gelu(torch.autograd.Function):
    """See `gelu`: x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), because (1 + tanh u) / 2 = sigmoid(2 u)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * torch.sigmoid(wide * (1.5957691216 + 0.0713548163 * wide * wide))).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        wide = ctx.saved_tensors[0].float()
        square = wide * wide
        gate = torch.sigmoid(wide * (1.5957691216 + 0.0713548163 * square))
        slope = wide * (1.5957691216 + 0.2140644488 * square)
        return (grad.float() * (gate + slope * gate * (1 - gate))).to(grad.dtype)
