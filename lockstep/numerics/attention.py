"""Attention, across or within documents: which kernel to use, and whether its results are bitwise reproducible.

Kernels differ in speed and reproducibility, and PyTorch's own order of preference is not always the best.
"""

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lockstep.hardware.device import kind
from lockstep.hardware.footprint import FLEX_BLOCK
from lockstep.settings import ModelConfig

SHORT = 512  # longest context for which bfloat16 attention on a CPU stores all its weights

# If `deterministic` is set, PyTorch never uses cuDNN. Otherwise we prefer cuDNN's attention, because PyTorch's default order
# depends on the GPU and the cuDNN version. On an H100, cuDNN reaches 632 TFLOP/s and PyTorch's own kernel 329
# (pytorch/pytorch#142132).
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, mask: "Tensor | BlockMask | None" = None) -> Tensor:
    """Return causal attention [B, H, T, D] of queries `q` [B, H, T, D] over keys `k` and values `v`, both [B, n_kv_head, S, D].

    The queries belong to the last T of the S tokens, and each sees its own token and all earlier ones. Dropout applies to the
    attention weights. mask: from `document_mask`; requires T = S.
    """
    T, S, grouped = q.shape[2], k.shape[2], k.shape[1] != q.shape[1]
    if isinstance(mask, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    if q.device.type == "cpu" and q.dtype is torch.bfloat16 and T == S <= SHORT:
        return short_attention(q, k, v, dropout_p, mask)
    free = q.device.type == "cuda" and mask is None and not torch.are_deterministic_algorithms_enabled()
    if T not in (1, S):
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    # On CUDA, only FlashAttention accepts fewer keys than queries, and it needs 16 bits, no mask, and a GPU with bfloat16.
    # Otherwise, PyTorch would fall back to a kernel that keeps all attention scores.
    if grouped and q.device.type == "cuda" and (mask is not None or q.dtype is not torch.bfloat16):
        k, v = (x[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).flatten(1, 2) for x in (k, v))
        grouped = False
    with sdpa_kernel(CUDNN_FIRST, set_priority=True) if free else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=mask is None and T == S, enable_gqa=grouped)


def document_mask(document_starts: Tensor, dtype: torch.dtype, dropout_p: float, flexible=True) -> "Tensor | BlockMask":
    """Return the mask that keeps `attention` within documents. document_starts [B, T]: where each token's document starts.

    If `flexible`, the mask on a GPU is for FlexAttention (Dong et al. 2024), which skips the blocks between documents but does
    not support dropout. With dropout, and on other devices, the mask is additive: 0 or -inf, [B, 1, T, T] in `dtype`.
    """
    # On AMD GPUs, FlexAttention's gradients differ from run to run (pytorch/torchtitan#3960). Before Ampere, it has no kernel.
    own = kind(document_starts.device)
    works = own == "cuda" or (own == "rocm" and not torch.are_deterministic_algorithms_enabled())
    if works and flexible and not dropout_p:
        return document_blocks(document_starts)
    T = document_starts.shape[1]
    positions = torch.arange(T, device=document_starts.device)
    seen = (positions <= positions[:, None]) & (positions >= document_starts[:, :, None])  # [B, T queries, T keys]
    return torch.where(seen, 0.0, float("-inf")).to(dtype)[:, None]


def document_blocks(document_starts: Tensor) -> BlockMask:
    """Return the mask for FlexAttention: which blocks of FLEX_BLOCK keys each block of queries sees, in part or in full.

    Documents follow one another, so a block of queries sees the key blocks from the start of its first query's document up to
    its own. Of the earlier ones, it sees in full those that begin no earlier than its last query's document. (PyTorch's
    create_block_mask would allocate a [T, T] mask.)
    """
    B, T = document_starts.shape

    def seen(b, h, query, key):
        return (key <= query) & (key >= document_starts[b, query])

    starts = F.pad(document_starts, (0, -T % FLEX_BLOCK), value=T).view(B, 1, -1, FLEX_BLOCK)  # padding sees no full block
    own = torch.arange(starts.shape[2], device=starts.device)  # the number of each block
    first = starts[..., 0] // FLEX_BLOCK  # [B, 1, blocks]
    whole = (starts[..., -1] + FLEX_BLOCK - 1).div(FLEX_BLOCK, rounding_mode="floor").minimum(own)
    # Seen in part: blocks from `first` up to but excluding `whole`, and the block itself. Entries after these are ignored.
    in_part = torch.where(own < (whole - first)[..., None], first[..., None] + own, own[:, None])  # [B, 1, blocks, blocks]
    in_whole = (whole[..., None] + own).clamp(max=len(own) - 1)
    numbers = (whole - first + 1, in_part, own - whole, in_whole)
    return BlockMask.from_kv_blocks(*(x.int() for x in numbers), FLEX_BLOCK, seen, (T, T))


@functools.cache
def compiled_flex_attention():
    """Return a compiled FlexAttention for eager code. Uncompiled, it would store all attention scores."""
    return torch.compile(flex_attention, dynamic=False)


@functools.cache  # because the banner calls this again
def attention_kernel(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Return the name of the kernel that `attention` uses across documents. dtype: precision of matmuls."""
    q = torch.zeros(1, config.n_head, config.seq_len, config.head_dim, dtype=dtype, device=device)
    k = q[:, : config.n_kv_head]
    # The backward function that autograd records identifies the kernel.
    kernels = {
        "ScaledDotProductFlashAttentionForCpuBackward0": "PyTorch's flash attention for CPUs",
        "ScaledDotProductFlashAttentionBackward0": "FlashAttention 2",
        "ScaledDotProductCudnnAttentionBackward0": "cuDNN's attention",
        "ScaledDotProductEfficientAttentionBackward0": "memory-efficient attention",
    }
    return kernels.get(attention(q.detach().requires_grad_(), k, k, config.dropout).grad_fn.name(), "matmuls and softmax")


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Drop elements as `F.dropout` does. On a CPU, the mask is a hash of each element's index.

    There, PyTorch's own masks take three times as long, and ten times as long when compiled. The hash is lowbias32 (Chris
    Wellons, Hash Prospector).
    """
    if x.device.type != "cpu" or not (p and training):
        return F.dropout(x, p, training)
    h = torch.arange(x.numel(), dtype=torch.int32).view(x.shape) ^ torch.randint(2**31 - 1, (), dtype=torch.int32)
    h = (h ^ (h >> 16 & 0xFFFF)) * 0x7FEB352D
    h = (h ^ (h >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x * (h >= round(p * (2**32 - 1)) - 2**31).to(x.dtype).mul_(1 / (1 - p))


def short_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, mask: Tensor | None = None) -> Tensor:
    """Compute `attention` for S = T up to SHORT with two matmuls and a softmax, keeping the [T, T] weights in memory.

    For bfloat16 on a CPU, PyTorch's flash attention is two to four times slower, because its backward pass does not use the
    matrix unit.
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
    return torch.bmm(dropout(scores.softmax(dim=-1), dropout_p), v).view(B, H, T, D)


def causal_mask(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive causal mask [T, T]: -inf if the key comes after the query, else 0."""
    return torch.full((length, length), float("-inf"), dtype=dtype, device=device).triu(1)


@torch.library.custom_op("lockstep::causal_mask", mutates_args=())
def mask_table(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `causal_mask` for compiled code, as an operation that is opaque to the compiler.

    Otherwise the compiler would recompute the mask for every score inside the softmax, which is a third slower than a table.
    """
    return causal_mask(length, dtype, device)


@mask_table.register_fake
def _(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((length, length), dtype=dtype, device=device)
