"""Training state sharded over the ranks, so that W ranks can train a model that one cannot hold: ZeRO stage 3, FSDP.

In plain data parallelism every rank keeps 4 bytes a parameter of weights, 4 of gradients and 8 of AdamW's state, and all ranks
keep the same. ZeRO (Rajbhandari et al. 2020) shards them, so that the ranks together hold one copy instead of W:

    strategy    fraction that each rank holds    bytes a parameter      each rank sends in an update
                weights   gradients   state      (float32, AdamW)       (n: bytes of gradients or weights)
    ddp         1         1           1          16                     2 n of gradients
    fsdp        1 / W     1 / W       1 / W      16 / W                 1 n of gradients, 2 n of weights a micro-batch

Under `fsdp` the whole weights of a block exist only while it computes. Gradients are sent once an update; between its
micro-batches every rank keeps them whole. Muon sends 4 bytes more a parameter of the rank's share (`optim.py` says how).
"""

import itertools
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from model import GPT
from optim import local
from parallel.world import World


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
