"""Tensors that are split across ranks, and how to gather them.

FSDP2 uses DTensors, with some rows on each rank, and `exact` uses `Share`s. `optim.py` works on both.
"""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.numerics.optim import local, share_size

# Elements in a cache line. Share sizes are multiples of it, because AdamW's CPU kernel rounds full vectors and remainders
# differently.
UNIT = 16
AT_ONCE = 1 << 20  # maximum number of elements that a rank receives per exchange, unless a single tensor is larger


class Share:
    """This rank's flat share of a tensor of `shape`: `size` elements from index rank * size. The last ranks may have fewer.

    torch.zeros_like and torch.empty_like of a Share return a Share.
    """

    def __init__(self, values: Tensor, shape: torch.Size, size: int, rank: int):
        self.values, self.shape, self.size, self.rank = values, shape, size, rank
        self.ndim, self.device, self.grad = len(shape), values.device, None

    def to_local(self) -> Tensor:
        """Return the elements, flat."""
        return self.values

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> "Share":
        (share,) = args
        return cls(function(share.values, **kwargs or {}), share.shape, share.size, share.rank)


def share_of(whole: Tensor, rank: int, ranks: int) -> Share:
    """Return the share of `rank` as a view of `whole`, which must be contiguous."""
    size = math.ceil(whole.numel() / ranks / UNIT) * UNIT
    return Share(whole.detach().view(-1)[rank * size :][:size], whole.shape, size, rank)


def gather_own(tensors: dict, owners: dict[str, int], group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and full value of each tensor that this rank of `group` owns. tensors: DTensors or Shares.

    All ranks must pass the same tensors and owners, and iterate to the end. To limit memory, each exchange gives every owner
    one tensor, or several small ones.
    """
    queues = [[name for name in tensors if owners[name] == rank] for rank in range(group.size())]
    while any(queues):
        yield from exchange(tensors, [take(queue, tensors) for queue in queues], group)


def take(queue: list[str], tensors: dict) -> list[str]:
    """Pop the names of one tensor, or of several small ones, from the front of `queue`."""
    count, elements = 0, 0
    while count < len(queue) and (not count or elements + math.prod(tensors[queue[count]].shape) <= AT_ONCE):
        elements += math.prod(tensors[queue[count]].shape)
        count += 1
    taken, queue[:] = queue[:count], queue[count:]
    return taken


def exchange(tensors: dict, names: list[list[str]], group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Assemble the tensors names[r] on each rank r of `group`. Yields the names and full values of this rank's tensors."""
    mine, ranks = names[group.rank()], range(group.size())
    shares = [[local(tensors[name]).reshape(-1) for name in each] for each in names]
    sent = torch.cat([share for each in shares for share in each])
    sizes = [[held(tensors[name], rank) for name in mine] for rank in ranks]  # of each rank's share of this rank's tensors
    received = sent.new_empty(sum(map(sum, sizes)))
    numbers = [sum(each) for each in sizes], [sum(map(len, each)) for each in shares]
    dist.all_to_all_single(received, sent, *numbers, group=group)
    pieces = received.split([size for each in sizes for size in each])
    for i, name in enumerate(mine):
        whole = received if len(mine) == 1 else torch.cat(pieces[i :: len(mine)])
        yield name, whole.view(tensors[name].shape)


def held(tensor, rank: int) -> int:
    """Return the number of elements of a DTensor or Share on `rank`."""
    size, elements = share_size(tensor), math.prod(tensor.shape)
    return max(0, min(size, elements - rank * size))
