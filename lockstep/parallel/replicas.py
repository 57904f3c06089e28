"""Check that all ranks hold the same model, bit for bit. If they don't, training silently goes wrong."""

import hashlib
import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn


def check_replicas(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError on all ranks if any parameter or buffer differs between them by even one bit.

    The error names the first tensor that differs and the ranks that disagree with the majority. The ranks exchange only a
    sha256 of each tensor's name, shape, dtype and bits. This also catches models of different shapes, where comparing the
    tensors themselves would hang.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    tensors = [*module.named_parameters(), *module.named_buffers()]
    digests: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, [digest(name, tensor) for name, tensor in tensors], group=group)
    for i, copies in enumerate(itertools.zip_longest(*digests)):
        if len(set(copies)) > 1:
            name = tensors[i][0] if i < len(tensors) else f"number {i} (missing on this rank)"
            ranks_by_copy = {copy: [rank for rank, other in enumerate(copies) if other == copy] for copy in copies}
            *others, most = sorted(ranks_by_copy.values(), key=len)
            found = f"differs between ranks {', '.join(map(str, others))} and the other {len(most)}"
            found += largest_difference(tensors[i][1] if i < len(tensors) else None, group)
            raise ValueError(
                f"the replicas are not identical: parameter or buffer {name} {found}; if they should start equal, "
                "set the same seed on every rank before building the model"
            )


def largest_difference(tensor: Tensor | None, group: dist.ProcessGroup | None) -> str:
    """Return in words how much a tensor differs between the ranks; nothing if their shapes differ."""
    shapes: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, None if tensor is None else tuple(tensor.shape), group=group)
    if tensor is None or len(set(shapes)) > 1:
        return ""
    high, low = (tensor.detach().clone().double() for _ in range(2))
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    return f" (max diff {(high - low).max().item():.2g})"


def digest(name: str, tensor: Tensor) -> bytes:
    """Return the sha256 of a tensor's name, shape, dtype and bits."""
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode() + bits.tobytes()).digest()
