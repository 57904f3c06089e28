"""Training state sharded across ranks, so that W ranks can train a model that one rank cannot hold (ZeRO stage 3, FSDP).

In plain data parallelism every rank holds the same state: per parameter, 4 bytes of weights, 4 of gradients and 8 of AdamW's
moments. ZeRO (Rajbhandari et al. 2020) shards this state, so that the ranks together hold one copy instead of W:

    strategy    fraction that each rank holds    bytes per parameter    each rank sends in an update
                weights   gradients   state      (float32, AdamW)       (n: bytes of gradients or weights)
    ddp         1         1           1          16                     2 n of gradients
    fsdp        1 / W     1 / W       1 / W      16 / W                 1 n of gradients, 2 n of weights per micro-batch

Under `fsdp` the full weights of a block exist only while the block computes. Gradients are sent once per update, and every rank
keeps full gradients between its micro-batches. With --shard_gradients=on, they are sent after each micro-batch, and ranks keep
only shards. With Muon, a rank sends 4 more bytes per parameter of its share (see `optim.py`).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lockstep.numerics import optim
from lockstep.parallel.engine import Strategy
from lockstep.parallel.world import World
from lockstep.settings import ParallelConfig


class FullyShard(nn.Module):
    """torch's FSDP2 with DDP's interface. Each block of `module` is gathered as a unit; the remaining parameters form another.

    With --replicate > 1 (hybrid sharding) there are that many copies of the weights, each held by a group of consecutive ranks.
    If a group fits in a node, weights travel within nodes, and only gradients travel between them. A `module` on the meta
    device is sharded before it uses any memory, and each rank fills its shards afterwards.

    `dtype` is the type of the gathered weights (and of the residual stream, if it is bfloat16). Gradients are reduced in
    float32. Autocast alone would gather float32 weights, twice the bytes, and keep full casts of them until backward. With
    --shard_gradients=on, gradients are reduced to shards after every backward, and between replicas after the last one.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, world: World, parallel: ParallelConfig):
        super().__init__()
        replicas = parallel.replicate
        shape, names = (replicas, world.size // replicas), ("replicate", "shard")
        dims = slice(None) if replicas > 1 else slice(1, None)
        self.mesh = init_device_mesh(world.device.type, shape[dims], mesh_dim_names=names[dims])
        for group in self.mesh.get_all_groups():
            _set_pg_timeout(world.timeout, group)  # new groups have torch's default timeout
        # Do not cast inputs: the table of rotary positions must stay float32.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        *blocks, last = module.blocks
        for part in blocks:
            fully_shard(part, mesh=self.mesh, mp_policy=policy)
        fully_shard(last, mesh=self.mesh, mp_policy=policy, reshard_after_forward=False)  # its backward comes next
        fully_shard(module, mesh=self.mesh, mp_policy=policy)
        self.module, self.shard_gradients = module, parallel.shard_gradients == "on"
        self.require_backward_grad_sync = True

    def forward(self, *args, **kwargs):
        """Run the module. As in DDP, the forward decides whether the next backward communicates gradients."""
        if torch.is_grad_enabled():
            self.module.set_requires_gradient_sync(self.require_backward_grad_sync or self.shard_gradients)
            self.module.set_requires_all_reduce(self.require_backward_grad_sync)  # between copies of the weights
        return self.module(*args, **kwargs)


class Fsdp(Strategy):
    """Each rank holds and updates some rows of every parameter."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, world: World, parallel: ParallelConfig, micro_batches: int):
        super().__init__(module, FullyShard(module, dtype, world, parallel), world, micro_batches)
        self.parameters = dict(module.named_parameters())  # now sharded
        self.mesh = self.model.mesh
        self.writers = self.group.size()

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's copy of the weights."""
        return self.mesh.get_group("shard")

    def total_norm(self) -> Tensor:
        """Return the norm of all gradients, equal on all ranks."""
        norm = super().total_norm().full_tensor()
        if self.mesh.ndim == 2:  # nodes may add in different orders, so their copies would drift apart
            dist.broadcast(norm, group=self.mesh.get_group("replicate"), group_src=0)
        return norm

    def orthogonalize(self, matrices: list, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Orthogonalize Muon's matrices of one shape, each of them on one rank, which receives the others' rows."""
        if self.mesh.ndim == 1:
            return self.by_owners(matrices, dtype)
        return optim.orthogonalize_shares(matrices, dtype, self.mesh.get_group("replicate"), self.by_owners)

    def by_owners(self, matrices: list, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Divide the matrices among the ranks of one copy of the weights."""
        return optim.orthogonalize_by_owners(matrices, dtype, self.group)
