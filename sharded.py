"""Training state shared out over the ranks, so that W of them hold what one cannot: ZeRO stages 1 and 3.

Every rank of plain data parallelism keeps 4 bytes a parameter of weights, 4 of gradients and 8 of AdamW's state, all of it
the same as on the other ranks. ZeRO (Rajbhandari et al. 2020) keeps one copy of a thing in all instead of W:

    strategy    each rank holds of            bytes a parameter        sends, in parameters an update
                weights  gradients  state     (float32, AdamW)         (accumulation is free)
    ddp         1        1          1         16                       2 gradients
    zero1       1        1          1 / W     8 + 8 / W                2 gradients, 1 weights
    fsdp        1 / W    1 / W      1 / W     16 / W                   1 gradients, 2 weights a micro-batch

Under `fsdp` a block's whole weights exist only while it computes, and between the micro-batches of one update the gradients
are whole too, for they are sent once an update.
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
from torch.distributed.tensor import DTensor, distribute_tensor

from model import GPT
from optim import Muon, Optimizers
from world import World


class FullyShard(nn.Module):
    """torch's FSDP2 behind DDP's surface: each block of `module` is a group of parameters, and the rest is another.

    With `replicas` > 1 (hybrid sharding) that many groups of ranks hold a copy each: consecutive ranks, so that weights stay
    within a node where a replica does, and only gradients travel between nodes. `module` may still be on the CPU: its
    blocks go to the device, and are cut there, one by one.

    `dtype` is that of the gathered weights, and with bfloat16 of the residual stream too; gradients are reduced in float32.
    Autocast alone would gather float32, twice the bytes, and keep every weight that it casts, whole, until backward.
    """

    def __init__(self, module: GPT, dtype: torch.dtype, world: World, replicas: int):
        super().__init__()
        shape, names = (replicas, world.size // replicas), ("replicate", "shard")
        dims = slice(None) if replicas > 1 else slice(1, None)
        mesh = init_device_mesh(world.device.type, shape[dims], mesh_dim_names=names[dims])
        # Inputs are not cast: the table of rotary positions must stay float32.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for part in (*module.blocks, module):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        self.module = module
        self.require_backward_grad_sync = True

    def forward(self, *args, **kwargs):
        """The module's own; it decides, as in DDP, whether the backward that follows communicates gradients."""
        if torch.is_grad_enabled():
            self.module.set_requires_gradient_sync(self.require_backward_grad_sync)
        return self.module(*args, **kwargs)


def shard_like(tensor: Tensor, parameter: DTensor) -> Tensor:
    """This rank's shard of the full `tensor`, cut as the sharded `parameter` is, without communication."""
    shard = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return shard.clone()  # the shard is a view, which would keep the full tensor in memory


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a parameter from `first` on, which rank `owner` updates for all. `values` is their memory in the parameter."""

    parameter: nn.Parameter
    first: int
    owner: int
    values: nn.Parameter

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor shaped like the parameter; a scalar is everybody's."""
        return tensor[self.first : self.first + len(self.values)] if tensor.ndim else tensor


@dataclass(frozen=True)
class ShardedOptimizers(Optimizers):
    """`Optimizers` of which every rank steps its part of all `rows`, and holds the state of no more.

    Gradients must be equal on all ranks. After the step each owner broadcasts the rows that it has updated.
    """

    rows: list[Rows]  # those of one parameter after another, from its first to its last
    world: World

    @property
    def mine(self) -> list[Rows]:
        """What this rank owns."""
        return [rows for rows in self.rows if rows.owner == self.world.rank]

    @torch.no_grad()
    def step(self) -> None:
        for rows in self.mine:
            rows.values.grad = rows.of(rows.parameter.grad)
        super().step()
        for rows in self.mine:
            rows.values.grad = None
        for sent in [dist.broadcast(rows.values.detach(), rows.owner, async_op=True) for rows in self.rows]:
            sent.wait()

    def state(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """As in `Optimizers`, with full tensors, made one after another; all ranks must exhaust it."""
        owned = {values: state for part in self.parts for values, state in part.state.items()}
        mine = {i: owned[rows.values] for i, rows in enumerate(self.rows) if rows.values in owned}
        told: list = [None] * self.world.size
        dist.all_gather_object(told, {i: {key: value.shape for key, value in state.items()} for i, state in mine.items()})
        shapes = ChainMap(*told)
        for _, group in itertools.groupby(range(len(self.rows)), key=lambda i: id(self.rows[i].parameter)):
            indices = list(group)
            parameter = self.rows[indices[0]].parameter
            for key in shapes.get(indices[0], ()):
                pieces = []
                for i in indices:
                    piece = mine[i][key] if i in mine else torch.empty(shapes[i][key])
                    pieces.append(piece.to(parameter.device))
                    dist.broadcast(pieces[-1], self.rows[i].owner)
                yield parameter, key, torch.cat(pieces) if pieces[0].ndim else pieces[0]

    def load_state(self, state: dict[Tensor, dict[str, Tensor]]) -> None:
        cut = {rows.values: {k: rows.of(v).clone() for k, v in state[rows.parameter].items()} for rows in self.mine}
        super().load_state(cut)  # of copies: a view would keep the full tensor in memory


def shard_optimizers(optimizers: Optimizers, world: World) -> ShardedOptimizers:
    """Share the parameters of each of the new `optimizers` out over the ranks, the largest first to the least loaded.

    A tensor that is more than a rank's share (an embedding may be a third of a model) is cut between rows. A matrix of Muon,
    which must see it whole, is not; its orthogonalization is thus shared out as well.
    """
    shared = []
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
                    shared.append(rows)
                    loads[rows.owner] += block.numel()
                    first += len(block)
                    if rows.owner == world.rank:
                        group["params"].append(rows.values)
    return ShardedOptimizers(optimizers.parts, shared, world)
