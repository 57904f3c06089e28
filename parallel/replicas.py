"""Are the copies of a model on all ranks equal, bit for bit? They must be, or training goes wrong without any error."""

import hashlib

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
    device = tensors[0][1].device if tensors else "cpu"
    count = torch.tensor(len(tensors), device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    hashes = torch.zeros(int(count), 32, dtype=torch.uint8)
    for i, (name, tensor) in enumerate(tensors):
        hashes[i] = torch.frombuffer(bytearray(digest(name, tensor)), dtype=torch.uint8)
    hashes = hashes.to(device)
    hashes_of_ranks = [torch.empty_like(hashes) for _ in range(dist.get_world_size(group))]
    dist.all_gather(hashes_of_ranks, hashes, group=group)
    gathered = torch.stack(hashes_of_ranks).cpu()  # (W, tensors, 32)
    differing = (gathered != gathered[0]).any(dim=2).any(dim=0).nonzero()
    if len(differing):
        first = int(differing[0])
        name = tensors[first][0] if first < len(tensors) else f"number {first}, which this rank does not have"
        raise ValueError(f"the replicas differ: parameter or buffer {name} {vote(gathered[:, first].tolist())}")


def vote(copies: list) -> str:
    """Which ranks are outvoted, as the end of a sentence. `copies[rank]` is what that rank holds; they are not all equal."""
    ranks_by_copy: dict[str, list[int]] = {}
    for rank, copy in enumerate(copies):
        ranks_by_copy.setdefault(str(copy), []).append(rank)
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
