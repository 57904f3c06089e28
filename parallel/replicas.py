"""Are the copies of a model on all ranks equal, bit for bit? They must be, or training goes wrong without any error."""

import hashlib
import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn


def check_replicas(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError on all ranks if any parameter or buffer is not the same on all of them, bit for bit.

    The error names the first tensor that differs and, if more than half of the ranks agree on it, the ranks that do not. The
    ranks exchange a sha256 of each tensor (32 bytes, over its name, shape, dtype and bits), not the tensor itself. So
    models of different shapes are told apart, too, where a comparison of tensors would hang.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    tensors = [*module.named_parameters(), *module.named_buffers()]
    digests: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, [digest(name, tensor) for name, tensor in tensors], group=group)
    for i, copies in enumerate(itertools.zip_longest(*digests)):
        if len(set(copies)) > 1:
            name = tensors[i][0] if i < len(tensors) else f"number {i}, which this rank does not have"
            raise ValueError(f"the replicas differ: parameter or buffer {name} {vote(copies)}")


def vote(copies: tuple[bytes | None, ...]) -> str:
    """Which ranks are outvoted, as the end of a sentence. `copies[rank]` is what that rank holds; they are not all equal."""
    ranks_by_copy: dict[bytes | None, list[int]] = {}
    for rank, copy in enumerate(copies):
        ranks_by_copy.setdefault(copy, []).append(rank)
    *others, most = sorted(ranks_by_copy.values(), key=len)
    if 2 * len(most) > len(copies):
        outvoted = sorted(sum(others, []))
        return f"of rank{'s' * (len(outvoted) > 1)} {', '.join(map(str, outvoted))} is not that of the other {len(most)} ranks"
    groups = " and ".join(map(str, sorted(ranks_by_copy.values())))
    return f"is not the same on ranks {groups}; no majority tells which is right"


def digest(name: str, tensor: Tensor) -> bytes:
    """The sha256 of a tensor's name, shape, dtype and bits."""
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode() + bits.tobytes()).digest()
