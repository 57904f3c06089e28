"""What a strategy decides, besides how gradients travel: what a rank updates, and how ranks share the optimizer's work."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.numerics import optim
from lockstep.parallel.world import World


class Strategy:
    """Every rank holds all weights and updates all of them. `model` averages the ranks' gradients, as DDP and the lesson do.

    A strategy that differs overrides what it changes. Sharded tensors are those with `to_local` (DTensors and Shares).
    """

    def __init__(self, module: nn.Module, model: nn.Module, world: World, micro_batches: int):
        """module: the model alone. model: the same in a wrapper. micro_batches: per update, over all ranks."""
        self.model, self.world = model, world
        self.parameters: dict[str, Any] = dict(module.named_parameters())  # what the optimizers update
        self.accumulation_steps = len(world.share(micro_batches))  # by which the loop divides each loss
        self.writers = 1  # ranks that write checkpoints: the first ones, which together hold one copy of the weights

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that together hold each sharded tensor once."""
        return dist.group.WORLD

    def total_norm(self) -> Tensor:
        """Return the norm of all gradients, equal on all ranks."""
        return nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])

    def orthogonalize(self, matrices: list, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Orthogonalize Muon's matrices of one shape (see `optim.Orthogonalize`), each of them on one rank."""
        if self.world.size == 1:
            return optim.orthogonalize(matrices, dtype)
        return optim.orthogonalize_shares(matrices, dtype, dist.group.WORLD, optim.orthogonalize)

    def after_step(self) -> None:
        """Act after the optimizers have updated the weights."""
