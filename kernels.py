"""Operations of the model that are faster here than in plain PyTorch: most have a backward pass written by hand.

Autograd would read and write memory more often than these need. Each one is tested against the plain formula.
"""

import contextlib
import functools
import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.optim.adamw import adamw as torch_adamw

from hardware.footprint import SHORT, rows_at_a_time
from settings import ModelConfig

# Where bits may differ from run to run, FlashAttention 3 goes first, or else cuDNN's attention: 632 TFLOP/s on an H100, where
# PyTorch's own has 329 (pytorch/pytorch#142132). PyTorch's own order depends on the GPU and on cuDNN's version. Under
# --deterministic=true PyTorch never takes cuDNN's.
FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# What models and optimizers take from here or, under --numerics=portable, from portable.py, besides the functions below.
Linear, LayerNorm, embed, dropout = nn.Linear, nn.LayerNorm, F.embedding, F.dropout
silu, gelu_erf, logits, norm_parts, norm_of = F.silu, F.gelu, F.linear, torch._foreach_norm, nn.utils.get_total_norm
cos, sin, cosine, power, normal_, multinomial = torch.cos, torch.sin, math.cos, torch.pow, Tensor.normal_, torch.multinomial
softmax, matrix_norm = functools.partial(F.softmax, dim=-1), functools.partial(Tensor.norm, dim=(1, 2), keepdim=True)
matmul, baddbmm, lerp_, add_ = torch.matmul, torch.baddbmm, torch._foreach_lerp_, torch._foreach_add_
# The function inside torch.optim.AdamW: constructing that class imports PyTorch's compiler, which takes a second.
adamw = functools.partial(torch_adamw, max_exp_avg_sqs=[], fused=True, amsgrad=False, maximize=False)


def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, mask: "Tensor | BlockMask | None" = None) -> Tensor:
    """Causal attention of queries `q` [B, H, T, D] over keys and values `k`, `v` [B, n_kv_head, S, D]. Returns [B, H, T, D].

    The T queries belong to the last T of the S tokens, so each of them sees S - T earlier tokens, and itself, and no later one.
    Dropout acts on the attention weights. mask: what `document_mask` returns, where T = S.
    """
    T, S, grouped = q.shape[2], k.shape[2], k.shape[1] != q.shape[1]
    if isinstance(mask, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    if q.device.type == "cpu" and q.dtype is torch.bfloat16 and T == S <= SHORT:
        return short_attention(q, k, v, dropout_p, mask)
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, enable_gqa=grouped)
    if T not in (1, S):
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    free = q.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
    order = FLASH_FIRST if has_flash_attention_3() else CUDNN_FIRST
    with sdpa_kernel(order, set_priority=True) if free else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=T == S, enable_gqa=grouped)


def has_flash_attention_3() -> bool:
    """Whether `activate_attention_kernel` has put FlashAttention 3 in the place of PyTorch's own."""
    return bool(getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)())


def document_mask(document_starts: Tensor, dtype: torch.dtype, dropout_p: float, flexible=True) -> "Tensor | BlockMask":
    """What keeps `attention` within documents. document_starts [B, T]: the position where the document of each token starts.

    On CUDA a `flexible` one is for FlexAttention (Dong et al. 2024), which skips blocks between documents. FlexAttention has no
    dropout, so with dropout, and on other devices, it is an additive mask of 0 and -inf, [B, 1, T, T] in `dtype`.
    """
    B, T = document_starts.shape
    if document_starts.device.type == "cuda" and flexible and not dropout_p:

        def seen(b, h, query, key):
            return (key <= query) & (key >= document_starts[b, query])

        return create_block_mask(seen, B, None, T, T, device=document_starts.device)
    positions = torch.arange(T, device=document_starts.device)
    seen = (positions <= positions[:, None]) & (positions >= document_starts[:, :, None])  # [B, T queries, T keys]
    return torch.where(seen, 0.0, float("-inf")).to(dtype)[:, None]


@functools.cache
def compiled_flex_attention():
    """FlexAttention for code that is not compiled. Eager, it would keep all scores."""
    return torch.compile(flex_attention, dynamic=False)


@functools.cache  # it is asked again for what the console says
def activate_attention_kernel(config: ModelConfig, batch: int, dtype: torch.dtype, device: torch.device) -> str:
    """Let `attention`, in this process, use FlashAttention 3 if it is installed and fits the run. Says which kernel runs.

    PyTorch's own kernel with a deterministic backward pass is FlashAttention 2, at 166 TFLOP/s on an H100. FlashAttention 3
    reaches 474 (Dao-AILab/flash-attention#1893), but not every build of it repeats its bits (the same, #2244), so it is tried.
    batch: sequences of a micro-batch. dtype: of the matrix products.
    """
    flash, problem = "FlashAttention 2", ""
    q = torch.zeros(1, config.n_head, config.seq_len, config.head_dim, dtype=dtype, device=device)
    k = q[:, : config.n_kv_head]
    if device.type == "cuda" and importlib.util.find_spec("flash_attn_interface"):
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
            same = gradients_repeat(q.expand(batch, -1, -1, -1), k.expand(batch, -1, -1, -1), config.dropout)
            if torch.are_deterministic_algorithms_enabled() and not same:
                raise RuntimeError("its gradients have other bits every time; --deterministic=false takes it all the same")
            flash = "FlashAttention 3"
        except (AttributeError, ImportError, RuntimeError) as error:  # an older PyTorch, a broken package, another GPU, dropout
            problem = f" (FlashAttention 3 is installed but does not work here: {error})"
            if has_flash_attention_3():
                torch.nn.attention.restore_flash_attention_impl()
    # Autograd records which backward function belongs to the kernel that has run.
    kernels = {
        "ScaledDotProductFlashAttentionForCpuBackward0": "PyTorch's flash attention for CPUs",
        "ScaledDotProductFlashAttentionBackward0": flash,
        "ScaledDotProductCudnnAttentionBackward0": "cuDNN's attention",
        "ScaledDotProductEfficientAttentionBackward0": "memory-efficient attention",
    }
    backward = attention(q.detach().requires_grad_(), k, k, config.dropout).grad_fn.name()
    return kernels.get(backward, "matrix products and softmax") + problem


def gradients_repeat(q: Tensor, k: Tensor, dropout_p: float, times: int = 4) -> bool:
    """Whether FlashAttention gives the same gradients every time, for queries of the shape of `q` and keys of that of `k`."""
    torch.manual_seed(0)
    upstream, *inputs = (torch.randn(x.shape, dtype=x.dtype, device=x.device, requires_grad=True) for x in (q, q, k, k))
    found = []
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):  # alone, or another kernel might be tried in its place
        for _ in range(times):
            torch.manual_seed(0)  # dropout's
            found.append(torch.autograd.grad(attention(*inputs, dropout_p), inputs, upstream))
    return all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def fused_linear(x: Tensor, layers: list[nn.Linear]) -> list[Tensor]:
    """What each of several linear `layers` makes of the same `x` [..., C]. On a GPU one product with all weights does it."""
    if not fuses(x, layers):
        return [layer(x) for layer in layers]
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    together = F.linear(x, torch.cat([layer.weight for layer in layers]), bias)
    return list(together.split([layer.out_features for layer in layers], dim=-1))


def fuses(x: Tensor, layers: list[nn.Linear]) -> bool:
    """Whether to fuse the products of `layers`: on CUDA, where narrow ones leave units idle, unless they are float8 layers.

    A CPU gains nothing (bench/LOG.md), and fusing would change its bits: the gradient of `x` is then added up in one product.
    """
    return x.device.type == "cuda" and all(type(layer) is nn.Linear for layer in layers)


def short_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, mask: Tensor | None = None) -> Tensor:
    """`attention` for S = T up to SHORT, as two matrix products and a softmax, with the [T, T] weights in memory.

    For bfloat16 on a CPU, PyTorch's flash attention takes two to four times as long, because its backward pass does not use
    the matrix unit.
    """
    B, H, T, D = q.shape
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) if x.shape[1] != H else x for x in (k, v))
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    if mask is not None:
        scores = (torch.bmm(q, k.transpose(1, 2)) * D**-0.5).unflatten(0, (B, H)).add(mask).flatten(0, 1)
    elif torch.compiler.is_compiling():  # the compiler fuses scale, mask and softmax into one pass over memory
        scores = torch.bmm(q, k.transpose(1, 2)) * D**-0.5 + mask_table(T, q.dtype, q.device)
    else:
        scores = torch.baddbmm(causal_mask(T, q.dtype, q.device).expand(B * H, T, T), q, k.transpose(1, 2), alpha=D**-0.5)
    return torch.bmm(F.dropout(scores.softmax(dim=-1), dropout_p), v).view(B, H, T, D)


def causal_mask(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What to add to attention scores [T, T]: 0, and -inf where the key is later than the query."""
    return torch.full((length, length), float("-inf"), dtype=dtype, device=device).triu(1)


@torch.library.custom_op("lockstep::causal_mask", mutates_args=())
def mask_table(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`causal_mask` for compiled code, as an operation that the compiler does not look into.

    It would fuse `causal_mask` into the softmax and compute it again for every score, which makes the softmax a third slower
    than reading a table.
    """
    return causal_mask(length, dtype, device)


@mask_table.register_fake
def _(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((length, length), dtype=dtype, device=device)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, part=None, rows: int | None = None) -> Tensor:
    """Mean cross-entropy, a float32 scalar, of the logits `x` [N, C] @ `weight` [V, C] transposed, at `targets` [N] int64.

    The whole [N, V] logits never exist. Some rows of them are computed at a time, and their share of the gradients right
    after, as in Liger Kernel (Hsu et al. 2024). Matrix products are in autocast's dtype, sums in float32.
    part: a compiled `cross_entropy_part` (None: the plain function). rows: at a time, at most.
    """
    # Equal parts where possible, because the compiler makes new code for another number of rows.
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
        return loss / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x_grad, weight_grad = ctx.saved_tensors
        grad = grad / len(x_grad)
        return x_grad * grad, weight_grad * grad, None, None, None, None


def cross_entropy_part(x: Tensor, weight: Tensor, targets: Tensor, weight_grad: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The sum of the losses of some rows `x` [rows, C] at `targets` [rows], and its gradient with respect to `x`.

    Adds its gradient with respect to `weight` [V, C] to `weight_grad`. None: no gradients are wanted.
    """
    logits = (x @ weight.T).float()  # [rows, V]
    log_probabilities = logits.log_softmax(1)
    loss = -log_probabilities.gather(1, targets[:, None]).sum()
    if weight_grad is None:
        return loss, None
    logits_grad = subtract_one_hot(log_probabilities.exp_(), targets).to(x.dtype)
    weight_grad += sum_of_rows(logits_grad, x)
    return loss, logits_grad @ weight


def sum_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """`a` [rows, V] transposed @ `b` [rows, C], in their dtype; for float16 in float32.

    float16 ends at 65504. The sum over thousands of rows may pass that, and no smaller loss scale would help, because the
    gradients are scaled after it.
    """
    if a.dtype is not torch.float16:
        return a.T @ b
    if a.device.type == "cuda":
        return torch.mm(a.T, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):  # it would cast them back
        return a.T.float() @ b.float()


def subtract_one_hot(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Subtract 1 from `probabilities` [rows, V], in place, at `targets` [rows]: the gradient of the loss by the logits."""
    if on_eager_cpu(probabilities):
        return probabilities.scatter_add_(1, targets[:, None], probabilities.new_full((len(targets), 1), -1))
    # The compiler fuses a comparison with what is around it, and on a GPU it is deterministic without sorting the targets.
    is_target = torch.arange(probabilities.shape[1], device=targets.device) == targets[:, None]
    return probabilities.sub_(is_target.to(probabilities.dtype))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with `x`: autocast's where autocast is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def on_eager_cpu(x: Tensor) -> bool:
    """Whether `x` is on a CPU and this code is not being compiled: passes over memory are then worth saving by hand."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., C] divided by its root mean square (Zhang & Sennrich 2019), times `weight` [C].

    On an eager CPU the result is in autocast's dtype, and the backward pass is by hand: PyTorch's own needs a dozen passes
    over memory there.
    """
    return RMSNormFunction.apply(x, weight, eps) if on_eager_cpu(x) else F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that computes with `rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:  # `x` [B, T, C] to the same shape
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
    """1 / root mean square of `x` [..., C] over its last dimension, as [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(norm.new_tensor(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): rotate each pair of `x` [B, T, H, D] by the angle of its position and frequency.

    A pair is element i of the first half of D and element i of the second. `rope` [2, T, 1, D / 2] holds cosines and sines in
    float32, so the result is float32.
    """
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def norm_and_rotate(x: Tensor, weight: Tensor, eps: float, rope: Tensor) -> Tensor:
    """`rotate(rms_norm(x))` for `x` [B, T, H, D] and `weight` [D], in the dtype of `x`."""
    if on_eager_cpu(x):
        return NormAndRotate.apply(x, weight, eps, rope)
    # F.rms_norm has a fused kernel only where x and weight have the same dtype.
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
        normed_grad = torch.empty_like(normed)  # before the weight: the gradient rotated back
        rotate_into(normed_grad, grad.float(), (cos, -sin), (cos, -sin))
        product = normed_grad * normed
        weight_grad = product.flatten(0, 2).sum(0)
        mean = (product @ weight)[..., None] / len(weight)
        x_grad = normed_grad.mul_(weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return x_grad.to(grad.dtype), weight_grad, None, None


def rotate_into(out: Tensor, x: Tensor, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    """Write (a first[0] - b first[1], b second[0] + a second[1]) into the halves of `out`, where a, b are the halves of `x`."""
    (a, b), (out_a, out_b) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    out_a.copy_((a * first[0]).addcmul_(b, first[1], value=-1))
    out_b.copy_((b * second[0]).addcmul_(a, second[1]))


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks & Gimpel 2016).

    Compiled code computes it with a sigmoid, which takes less than half the time of tanh on a CPU. tanh takes as long as the
    matrix product before it. The backward pass by hand saves only `x`; the compiler would save three tensors.
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
