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
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hardware.gpus import GATHERED_BYTES
from model import GPT
from optim import Optimizers, local
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


@dataclass(frozen=True)
class ShardedOptimizers(Optimizers):
    """`Optimizers` of this rank's rows of each parameter, which hold only their state. See `shard_optimizers`.

    Gradients must be equal on all ranks. After the step the updated rows are gathered, about GATHERED elements at a time.
    """

    rows: dict[nn.Parameter, DTensor]  # of each parameter, all ranks' rows; this rank's share its memory
    group: dist.ProcessGroup

    @torch.no_grad()
    def step(self) -> None:
        for parameter, rows in self.rows.items():
            rows.grad = divide(parameter.grad, rows.device_mesh)
        super().step()
        for rows in self.rows.values():
            rows.grad = None
        for batch in batches([parameter.detach() for parameter in self.rows], GATHERED):
            gather_updated(batch, self.group)

    def state(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        parameters = {rows: parameter for parameter, rows in self.rows.items()}
        for rows, key, value in super().state():
            yield parameters[rows], key, value

    def load_state(self, state: dict[Tensor, dict]) -> None:
        super().load_state({rows: state[parameter] for parameter, rows in self.rows.items()})


def divide(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """`tensor`, which all ranks have, as a DTensor of which each rank holds its rows, in the same memory."""
    most = math.ceil(len(tensor) / mesh.size())
    mine = tensor.detach()[mesh.get_rank() * most :][:most]
    return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def shard_optimizers(optimizers: Optimizers, mesh: DeviceMesh) -> ShardedOptimizers:
    """Let the new `optimizers` update this rank's rows of each parameter, divided among the ranks as under fsdp."""
    rows = {}
    for part in optimizers.parts:
        for group in part.param_groups:
            rows |= {parameter: nn.Parameter(divide(parameter, mesh)) for parameter in group["params"]}
            group["params"] = [rows[parameter] for parameter in group["params"]]
    return ShardedOptimizers(optimizers.parts, rows, mesh.get_group())


def gather_updated(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks the rows of `tensors` that each rank of `group` has updated, in one exchange."""
    shares = [math.ceil(len(tensor) / group.size()) * math.prod(tensor.shape[1:]) for tensor in tensors]
    sent = tensors[0].new_zeros(sum(shares))  # the last ranks may have fewer rows, or none
    for part, tensor, share in zip(sent.split(shares), tensors, shares, strict=True):
        mine = tensor.view(-1)[group.rank() * share :][:share]
        part[: len(mine)] = mine
    received = sent.new_empty(group.size(), len(sent))
    dist.all_gather(list(received), sent, group=group)
    for tensor, parts in zip(tensors, received.split(shares, dim=1), strict=True):
        tensor.view(-1).copy_(parts.flatten()[: tensor.numel()])


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
