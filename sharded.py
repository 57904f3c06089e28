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

from model import GPT
from optim import Muon, Optimizers
from world import World


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


@dataclass(frozen=True)
class ShardedOptimizers(Optimizers):
    """`Optimizers` where each rank updates only the rows that it owns, and holds only their state.

    Gradients must be equal on all ranks. After the step the updated rows are gathered, all those of one shape at once.
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
        for shape in dict.fromkeys(rows.values.shape for rows in self.rows):
            self.gather_updated([rows for rows in self.rows if rows.values.shape == shape])

    def gather_updated(self, same: list[Rows]) -> None:
        """Give every rank what the owners of these `rows`, which have one shape, have updated."""
        by_owner = [[rows.values for rows in same if rows.owner == rank] for rank in range(self.world.size)]
        most, mine = max(map(len, by_owner)), by_owner[self.world.rank]
        sent = same[0].values.new_zeros(most, *same[0].values.shape)
        if mine:
            torch.stack(mine, out=sent[: len(mine)])
        received = [torch.empty_like(sent) for _ in by_owner]
        dist.all_gather(received, sent)
        for values, updated in zip(by_owner, received, strict=True):
            if values:
                torch._foreach_copy_(values, updated[: len(values)].unbind())

    def state(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """As in `Optimizers`, with full tensors that are gathered one at a time. All ranks must iterate to the end."""
        state_of = {values: state for part in self.parts for values, state in part.state.items()}
        owned = {i: state_of[rows.values] for i, rows in enumerate(self.rows) if rows.values in state_of}
        shapes_by_rank: list = [None] * self.world.size
        owned_shapes = {i: {key: value.shape for key, value in state.items()} for i, state in owned.items()}
        dist.all_gather_object(shapes_by_rank, owned_shapes)
        shapes = ChainMap(*shapes_by_rank)
        for _, group in itertools.groupby(range(len(self.rows)), key=lambda i: id(self.rows[i].parameter)):
            indices = list(group)
            parameter = self.rows[indices[0]].parameter
            for key in shapes.get(indices[0], ()):
                pieces = []
                for i in indices:
                    piece = owned[i][key] if i in owned else torch.empty(shapes[i][key])
                    pieces.append(piece.to(parameter.device))
                    dist.broadcast(pieces[-1], self.rows[i].owner)
                yield parameter, key, torch.cat(pieces) if pieces[0].ndim else pieces[0]

    def load_state(self, state: dict[Tensor, dict]) -> None:
        for rows in self.owned:
            whole = state.get(rows.parameter, {})
            super().load_state({rows.values: {key: rows.select(value) for key, value in whole.items()}})


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
