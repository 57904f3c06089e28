"""Training state sharded over the ranks, so that W ranks can train a model that one cannot hold: ZeRO stage 3, FSDP.

In plain data parallelism every rank keeps 4 bytes a parameter of weights, 4 of gradients and 8 of AdamW's state, and all ranks
keep the same. ZeRO (Rajbhandari et al. 2020) shards them, so that the ranks together hold one copy instead of W:

    strategy    fraction that each rank holds    bytes a parameter      each rank sends in an update
                weights   gradients   state      (float32, AdamW)       (n: bytes of gradients or weights)
    ddp         1         1           1          16                     2 n of gradients
    fsdp        1 / W     1 / W       1 / W      16 / W                 1 n of gradients, 2 n of weights a micro-batch

Under `fsdp` the whole weights of a block exist only while it computes. Gradients are sent once an update, and every rank keeps
them whole between its micro-batches. With --shard_gradients=on they are sent after each micro-batch, and only shards are kept.
Muon sends 4 bytes more a parameter of the rank's share (`optim.py` says how).
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import GPT
from parallel.world import World


class FullyShard(nn.Module):
    """torch's FSDP2 with the interface of DDP. Each block of `module` is gathered as a unit; the other parameters are one more.

    With `replicas` > 1 (hybrid sharding) there are that many copies of the weights, each held by a group of consecutive ranks.
    If a group fits into a node, weights travel within nodes, and only gradients travel between them. `module` may be on the
    meta device. Then it is divided before it takes any memory, and each rank fills its shards afterwards.

    `dtype` is the type of the gathered weights (and, if it is bfloat16, of the residual stream). Gradients are reduced in
    float32. Autocast alone would gather float32, which is twice the bytes, and would keep whole casts of the weights until
    backward. With `shard_gradients` that is after every backward, and copies of shards are reduced after the last one.
    """

    def __init__(self, module: GPT, dtype: torch.dtype, world: World, replicas: int, shard_gradients: bool):
        super().__init__()
        shape, names = (replicas, world.size // replicas), ("replicate", "shard")
        dims = slice(None) if replicas > 1 else slice(1, None)
        self.mesh = init_device_mesh(world.device.type, shape[dims], mesh_dim_names=names[dims])
        for group in self.mesh.get_all_groups():
            _set_pg_timeout(world.timeout, group)  # new groups have torch's own
        # Inputs are not cast, because the table of rotary positions must stay float32.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        *blocks, last = module.blocks
        for part in blocks:
            fully_shard(part, mesh=self.mesh, mp_policy=policy)
        fully_shard(last, mesh=self.mesh, mp_policy=policy, reshard_after_forward=False)  # its backward comes next
        fully_shard(module, mesh=self.mesh, mp_policy=policy)
        self.module, self.shard_gradients = module, shard_gradients
        self.require_backward_grad_sync = True

    def forward(self, *args, **kwargs):
        """Run the module. As in DDP, the forward decides whether the backward that follows communicates gradients."""
        if torch.is_grad_enabled():
            self.module.set_requires_gradient_sync(self.require_backward_grad_sync or self.shard_gradients)
            self.module.set_requires_all_reduce(self.require_backward_grad_sync)  # between copies of the weights
        return self.module(*args, **kwargs)
