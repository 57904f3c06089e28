"""Training state divided among the ranks, so that W ranks can train a model that one cannot hold: ZeRO stages 1 and 3.

In plain data parallelism every rank keeps 4 bytes a parameter of weights, 4 of gradients and 8 of AdamW's state, and all ranks
keep the same. ZeRO (Rajbhandari et al. 2020) divides them, so that the ranks together hold one copy instead of W:

    strategy    fraction that each rank holds    bytes a parameter      each rank sends in an update
                weights   gradients   state      (float32, AdamW)       (n: bytes of gradients or weights)
    ddp         1         1           1          16                     2 n of gradients
    zero1       1         1           1 / W      8 + 8 / W              2 n of gradients, 1 n of weights
    fsdp        1 / W     1 / W       1 / W      16 / W                 1 n of gradients, 2 n of weights a micro-batch

Under `fsdp` the whole weights of a block exist only while it computes. Gradients are sent once an update; between its
micro-batches every rank keeps them whole. Muon sends 4 bytes more a parameter of the rank's share (`optim.py` says how).
"""

import itertools
import math
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hardware.gpus import GATHERED_BYTES
from model import GPT
from optim import Muon, Optimizers, local
from parallel.world import World

GATHERED = GATHERED_BYTES // 4  # elements that every rank receives at once


class FullyShard(nn.Module):
    """torch's FSDP2 with the interface of DDP. Each block of `module` is gathered as a unit; the other parameters are one more.

    With `replicas` > 1 (hybrid sharding) there are that many copies of the weights, each held by a group of consecutive ranks.
    If a group fits into a node, weights travel within nodes, and only gradients travel between them. `module` may be on the
    meta device. Then it is divided before it takes any memory, and each rank fills its shards afterwards.

    `dtype` is the type of the gathered weights (and, if it is bfloat16, of the residual stream). Gradients are reduced in
    float32. Autocast alone would gather float32, which is twice the bytes, and would keep whole casts of the weights until
    backward.
    """

    def __init__(self, module: GPT, dtype: torch.dtype, world: World, replicas: int):
        super().__init__()
        shape, names = (replicas, world.size // replicas), ("replicate", "shard")
        dims = slice(None) if replicas > 1 else slice(1, None)
        self.mesh = init_device_mesh(world.device.type, shape[dims], mesh_dim_names=names[dims])
        # Inputs are not cast, because the table of rotary positions must stay float32.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in (*module.blocks, module):
            fully_shard(part, mesh=self.mesh, mp_policy=policy)
        self.module = module
        self.require_backward_grad_sync = True

    def forward(self, *args, **kwargs):
        """Run the module. As in DDP, the forward decides whether the backward that follows communicates gradients."""
        if torch.is_grad_enabled():
            self.module.set_requires_gradient_sync(self.require_backward_grad_sync)
        return self.module(*args, **kwargs)


def gather_own(tensors: dict[str, DTensor], owners: dict[str, int], group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole of each tensor that this rank of `group` owns.

    All ranks must pass the same tensors and owners, and iterate to the end. In each exchange every owner receives one tensor,
    so no rank ever holds more of what it does not keep.
    """
    queues = [[name for name in tensors if owners[name] == rank] for rank in range(group.size())]
    for names in itertools.zip_longest(*queues):
        received = gather_rows([tensors.get(name) for name in names], group)
        if received is not None:
            yield names[group.rank()], received


def gather_rows(tensors: list[DTensor | None], group: dist.ProcessGroup) -> Tensor | None:
    """Give each rank i of `group` the whole tensors[i], in one exchange. Returns this rank's, if it has one.

    Every rank has some rows of each, divided as torch.chunk does.
    """
    mine, ranks = tensors[group.rank()], group.size()
    rows = [local(tensor).reshape(-1) if tensor is not None else None for tensor in tensors]
    sent = torch.cat([part for part in rows if part is not None])
    numbers_sent = [0 if part is None else len(part) for part in rows]
    numbers_received = [0] * ranks
    if mine is not None:
        most = math.ceil(len(mine) / ranks) * math.prod(mine.shape[1:])
        numbers_received = [max(0, min(most, mine.numel() - rank * most)) for rank in range(ranks)]
    received = sent.new_empty(sum(numbers_received))
    dist.all_to_all_single(received, sent, numbers_received, numbers_sent, group=group)
    return None if mine is None else received.view(mine.shape)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a parameter, from row `first` on, that rank `owner` updates for all. `values` shares the parameter's memory."""

    parameter: nn.Parameter
    first: int
    owner: int
    values: nn.Parameter

    def select(self, tensor) -> Tensor:
        """These rows of a tensor shaped like the parameter, or of one in a file. A scalar belongs to all rows."""
        return tensor[self.first : self.first + len(self.values)] if tensor.shape else tensor[...]


@dataclass(frozen=True, eq=False)
class Divided:
    """A tensor whose rows are divided among the ranks.

    Each of the `pieces` has consecutive rows: the rank that owns them, their shape, and the rows themselves on that rank only.
    """

    shape: torch.Size
    device: torch.device
    pieces: list[tuple[int, torch.Size, Tensor | None]]

    def full_tensor(self) -> Tensor:
        """The whole, as a DTensor gives it. All ranks must call this."""
        received = []
        for owner, shape, piece in self.pieces:
            received.append(torch.empty(shape, device=self.device) if piece is None else piece.to(self.device))
            dist.broadcast(received[-1], owner)
        return torch.cat(received) if self.shape else received[0]


@dataclass(frozen=True)
class ShardedOptimizers(Optimizers):
    """`Optimizers` where each rank updates only the rows that it owns, and holds only their state.

    Gradients must be equal on all ranks. After the step the updated rows are gathered, GATHERED elements at a time.
    """

    rows: list[Rows]  # of one parameter after another, each from its first row to its last
    world: World

    @property
    def owned(self) -> list[Rows]:
        """The rows of this rank."""
        return [rows for rows in self.rows if rows.owner == self.world.rank]

    @torch.no_grad()
    def step(self) -> None:
        for rows in self.owned:
            rows.values.grad = rows.select(rows.parameter.grad)
        super().step()
        for rows in self.owned:
            rows.values.grad = None
        by_owner = [[rows.values for rows in self.rows if rows.owner == rank] for rank in range(self.world.size)]
        limit = GATHERED // self.world.size
        # All owners have the largest first and as much as each other. So what they send together is of like size.
        for batch_by_owner in itertools.zip_longest(*(batches(values, limit) for values in by_owner), fillvalue=[]):
            self.gather(batch_by_owner)

    def gather(self, values_by_owner: tuple[list[Tensor], ...]) -> None:
        """Copy what each owner has of its `values` to all other ranks."""
        sizes = [[values.numel() for values in owned] for owned in values_by_owner]
        sent = self.rows[0].values.new_zeros(max(map(sum, sizes)))
        if mine := values_by_owner[self.world.rank]:
            torch.cat([values.flatten() for values in mine], out=sent[: sum(sizes[self.world.rank])])
        received = sent.new_empty(self.world.size, len(sent))
        dist.all_gather(list(received), sent)
        for owned, each, flat in zip(values_by_owner, sizes, received, strict=True):
            if owned:
                updated = flat[: sum(each)].split(each)
                torch._foreach_copy_(owned, [new.view_as(old) for old, new in zip(owned, updated, strict=True)])

    def state(self) -> Iterator[tuple[Tensor, str, "Divided"]]:
        """As in `Optimizers`, with tensors that are divided among the ranks. All ranks must call it."""
        state_of = {values: state for part in self.parts for values, state in part.state.items()}
        owned = {i: state_of[rows.values] for i, rows in enumerate(self.rows) if rows.values in state_of}
        shapes_by_rank: list = [None] * self.world.size
        owned_shapes = {i: {key: value.shape for key, value in state.items()} for i, state in owned.items()}
        dist.all_gather_object(shapes_by_rank, owned_shapes)
        shapes = ChainMap(*shapes_by_rank)
        for _, group in itertools.groupby(range(len(self.rows)), key=lambda i: id(self.rows[i].parameter)):
            indices = list(group)
            parameter = self.rows[indices[0]].parameter
            for key, shape in shapes.get(indices[0], {}).items():
                pieces = [(self.rows[i].owner, shapes[i][key], owned[i][key] if i in owned else None) for i in indices]
                yield parameter, key, Divided(parameter.shape if shape else shape, parameter.device, pieces)

    def load_state(self, state: dict[Tensor, dict]) -> None:
        for rows in self.owned:
            whole = state.get(rows.parameter, {})
            super().load_state({rows.values: {key: rows.select(value) for key, value in whole.items()}})


def batches(tensors: list[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Divide `tensors`, in their order, into lists of at most `limit` elements, or of one tensor."""
    batch, size = [], 0
    for tensor in tensors:
        if batch and size + tensor.numel() > limit:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.numel()
    yield batch


def shard_optimizers(optimizers: Optimizers, world: World) -> ShardedOptimizers:
    """Divide the parameters of the new `optimizers` among the ranks: the largest first, each to the rank with the least so far.

    A tensor that is more than a rank's share (an embedding may be a third of a model) is cut between rows. Muon's matrices
    are never cut, because it must see a matrix whole. So the work of orthogonalizing them is divided as well.
    """
    all_rows = []
    for part in optimizers.parts:
        share = sum(p.numel() for group in part.param_groups for p in group["params"]) / world.size
        loads = [0] * world.size
        for group in part.param_groups:
            parameters, group["params"] = sorted(group["params"], key=Tensor.numel, reverse=True), []
            for parameter in parameters:
                pieces = 1 if isinstance(part, Muon) else math.ceil(parameter.numel() / share)
                first = 0
                for block in parameter.detach().tensor_split(min(pieces, len(parameter))):
                    rows = Rows(parameter, first, loads.index(min(loads)), nn.Parameter(block))
                    all_rows.append(rows)
                    loads[rows.owner] += block.numel()
                    first += len(block)
                    if rows.owner == world.rank:
                        group["params"].append(rows.values)
    return ShardedOptimizers(optimizers.parts, all_rows, world)
