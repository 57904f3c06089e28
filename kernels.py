"""Pieces of the model with a backward written by hand, where autograd's would read and write memory needlessly."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, a float32 scalar, of the logits `x` [N, C] @ `weight` [V, C] transposed, at `targets` [N] int64.

    The logits never exist as a whole: they are made for some rows at a time, and with them at once their part of the
    gradients, as in Liger Kernel (Hsu et al. 2024). Products are in autocast's dtype, sums in float32.
    """
    rows = rows_at_a_time(len(weight), x.device)
    return LinearCrossEntropy.apply(x, weight, targets, rows, torch.is_grad_enabled())


def rows_at_a_time(vocab_size: int, device: torch.device) -> int:
    """Of the logits: a CPU's caches hold four megabytes of them, but each part reads all weights; a GPU wants more."""
    return max(256, (1 << 20 if device.type == "cpu" else 1 << 27) // vocab_size)


class LinearCrossEntropy(torch.autograd.Function):
    """See `linear_cross_entropy`. Forward computes the gradients of the sum of the losses, backward scales them."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, rows: int, with_gradients: bool) -> Tensor:
        dtype = compute_dtype(x)
        x, weight = x.to(dtype), weight.to(dtype)
        loss = x.new_zeros((), dtype=torch.float32)
        x_grad, weight_grad = [], torch.zeros_like(weight, dtype=torch.float32) if with_gradients else None
        for part, target in zip(x.split(rows), targets[:, None].split(rows), strict=True):
            logits = (part @ weight.T).float()
            log_probabilities = logits.log_softmax(1)
            loss = loss - log_probabilities.gather(1, target).sum()
            if with_gradients:
                logits_grad = log_probabilities.exp_()
                logits_grad = logits_grad.scatter_add_(1, target, logits_grad.new_full(target.shape, -1)).to(x.dtype)
                x_grad.append(logits_grad @ weight)
                weight_grad += logits_grad.T @ part
        if with_gradients:
            ctx.save_for_backward(torch.cat(x_grad), weight_grad)
        return loss / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x_grad, weight_grad = ctx.saved_tensors
        grad = grad / len(x_grad)
        return x_grad * grad, weight_grad * grad, None, None, None


def compute_dtype(x: Tensor) -> torch.dtype:
    """That of matrix products with `x`: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def on_eager_cpu(x: Tensor) -> bool:
    """Where neither a fused kernel nor the compiler saves what a backward by hand saves."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., C] over its root mean square (Zhang & Sennrich 2019), times `weight` [C]; on an eager CPU in autocast's dtype.

    torch has a fused kernel for GPUs, and its compiler makes one; on an eager CPU its backward is a dozen passes over memory.
    """
    return RMSNorm.apply(x, weight, eps) if on_eager_cpu(x) else F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(torch.autograd.Function):
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
        # LayerNorm's fused backward for a mean of 0 is RMSNorm's but for the mean of the gradient, which it takes off.
        x_grad, weight_grad, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(scale), scale, weight, None, (True, True, False)
        )
        return x_grad.add_((grad @ weight)[..., None] * (scale / len(weight))), weight_grad, None


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square over the last dimension, which stays with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(norm.new_tensor(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the halves of `x` [B, T, H, D] by `rope` [2, T, 1, D / 2]; float32 because the table is."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def norm_and_rotate(x: Tensor, weight: Tensor, eps: float, rope: Tensor) -> Tensor:
    """`rotate(rms_norm(x))` for `x` [B, T, H, D] and `weight` [D], in the dtype of `x`."""
    if on_eager_cpu(x):
        return NormAndRotate.apply(x, weight, eps, rope)
    # In the dtype of the weight: autocast alone would leave RMSNorm's fused kernel.
    return rotate(rms_norm(x.to(weight.dtype), weight, eps), rope).to(x.dtype)


class NormAndRotate(torch.autograd.Function):
    """See `norm_and_rotate`. The result lies in memory as [B, H, T, D], which attention reads."""

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
        turn(normed, (cos * first, sin * second), (cos * second, sin * first), out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        normed, weight, scale, (cos, sin) = ctx.saved_tensors
        turned = torch.empty_like(normed)
        turn(grad.float(), (cos, -sin), (cos, -sin), turned)
        product = turned * normed
        weight_grad = product.flatten(0, 2).sum(0)
        mean = (product @ weight)[..., None] / len(weight)
        x_grad = turned.mul_(weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return x_grad.to(grad.dtype), weight_grad, None, None


def turn(x: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], out: Tensor) -> None:
    """With the halves a, b of `x`: out = (a first[0] - b first[1], b second[0] + a second[1])."""
    (a, b), (out_a, out_b) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    out_a.copy_((a * first[0]).addcmul_(b, first[1], value=-1))
    out_b.copy_((b * second[0]).addcmul_(a, second[1]))


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks & Gimpel 2016), which is `x` times a sigmoid.

    Of a sigmoid torch's compiler makes code for CPUs in less than half the time of its tanh, which takes as long as the matrix
    product before it; left to its own it would also keep three tensors for backward in place of `x`.
    """
    return Gelu.apply(x) if torch.compiler.is_compiling() else F.gelu(x, approximate="tanh")


class Gelu(torch.autograd.Function):
    """See `gelu`: x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3), for (1 + tanh u) / 2 = sigmoid(2 u)."""

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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of `x` [B, T, in], but in compiled code on a CPU the bias is added behind the product.

    There the product's own addition copies the bias to every row before, and the gradient of the bias, a sum over columns,
    computes anew, column by column, what the gradient of `x` was computed from.
    """
    if bias is None or x.device.type != "cpu" or not torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return AddBias.apply(F.linear(x.flatten(0, 1), weight), bias).view(*x.shape[:2], -1)


class AddBias(torch.autograd.Function):
    """`x` [N, C] plus `bias` [C], in the dtype of `x`; see `linear`."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor) -> Tensor:
        return (x + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, grad.sum(0, dtype=torch.float32)
