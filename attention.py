"""Attention: which kernel computes it, within documents or not, and whether that kernel repeats its bits.

Not every kernel is as fast, or the same twice: PyTorch's order is not always the best one.
"""

import contextlib
import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hardware.footprint import FLEX_BLOCK, SHORT
from settings import ModelConfig

# Where bits may differ from run to run, FlashAttention 3 goes first, or else cuDNN's attention: 632 TFLOP/s on an H100, where
# PyTorch's own has 329 (pytorch/pytorch#142132). PyTorch's own order depends on the GPU and on cuDNN's version. Under
# --deterministic=true PyTorch never takes cuDNN's.
FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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
    # On AMD's GPUs its gradients have other bits every time (pytorch/torchtitan#3960).
    flexible = flexible and not (torch.version.hip and torch.are_deterministic_algorithms_enabled())
    if document_starts.device.type == "cuda" and flexible and not dropout_p:
        return document_blocks(document_starts)
    T = document_starts.shape[1]
    positions = torch.arange(T, device=document_starts.device)
    seen = (positions <= positions[:, None]) & (positions >= document_starts[:, :, None])  # [B, T queries, T keys]
    return torch.where(seen, 0.0, float("-inf")).to(dtype)[:, None]


def document_blocks(document_starts: Tensor) -> BlockMask:
    """`document_mask` for FlexAttention: which blocks of FLEX_BLOCK keys each block of queries sees, in part or whole.

    Documents are consecutive. So a block of queries sees the blocks from the start of its first query's document to its own,
    and whole those from the start of its last query's document to before its own. create_block_mask would make a [T, T] mask.
    """
    B, T = document_starts.shape

    def seen(b, h, query, key):
        return (key <= query) & (key >= document_starts[b, query])

    starts = F.pad(document_starts, (0, -T % FLEX_BLOCK), value=T).view(B, 1, -1, FLEX_BLOCK)  # a padded block sees none whole
    own = torch.arange(starts.shape[2], device=starts.device)  # the blocks
    first = starts[..., 0] // FLEX_BLOCK  # [B, 1, blocks]
    whole = (starts[..., -1] + FLEX_BLOCK - 1).div(FLEX_BLOCK, rounding_mode="floor").minimum(own)
    # Those seen in part are from `first` to before `whole`, and their own. What stands behind them is not read.
    in_part = torch.where(own < (whole - first)[..., None], first[..., None] + own, own[:, None])  # [B, 1, blocks, blocks]
    in_whole = (whole[..., None] + own).clamp(max=len(own) - 1)
    numbers = (whole - first + 1, in_part, own - whole, in_whole)
    return BlockMask.from_kv_blocks(*(x.int() for x in numbers), FLEX_BLOCK, seen, (T, T))


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
