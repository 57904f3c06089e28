"""A model that the ranks train together, under any strategy. The training loop sees only `Engine`."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.common.errors import RunError
from lockstep.hardware import device
from lockstep.numerics import optim
from lockstep.numerics.optim import Optimizers, local
from lockstep.parallel.replicas import check_replicas
from lockstep.parallel.shares import gather_own
from lockstep.parallel.world import World
from lockstep.reports.log import duration
from lockstep.settings import TrainConfig

STAGING_BYTES = 1 << 26  # size of the pinned buffer through which checkpoints leave a GPU


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


@dataclass
class Engine:
    """A model with its optimizers: gradient clipping, evaluation, precision, and the state for checkpoints.

    The loop sets `model.require_backward_grad_sync` before each forward and divides each loss by `accumulation_steps`. After
    the last backward of an update, the gradients on every rank are the mean over all micro-batches of all ranks.
    """

    module: nn.Module
    strategy: Strategy
    optimizers: Optimizers
    world: World
    train: TrainConfig  # resolved
    scaler: torch.amp.GradScaler = field(init=False)  # the loss scale of float16
    staging: Tensor | None = None

    def __post_init__(self):
        self.dtype, self.compiled = self.train.dtype, self.train.compile == "on"
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=self.dtype == "float16")
        self.model = self.strategy.model  # `module` in a wrapper: maps inputs and targets [micro-batch, T] to their mean loss
        self.parameters = self.strategy.parameters  # what the optimizers update: the module's, or this rank's shares of them
        self.accumulation_steps = self.strategy.accumulation_steps

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the model in evaluation mode, without dropout.

        Compiling the forward pass alone pays off on a GPU, but on a CPU it takes longer than it saves.
        """
        eager = self.compiled and self.world.device.type == "cpu"
        self.module.eval()
        try:
            yield torch.compiler.set_stance("force_eager")(self.module) if eager else self.module
        finally:
            self.module.train()

    def autocast(self):
        """Return the autocast context of the forward pass."""
        return device.autocast(self.world.device, self.dtype)

    @contextlib.contextmanager
    def inference(self):
        """Run the module as in `evaluating`, and eagerly, because inputs have many lengths and each would be compiled."""
        eager = torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()
        with self.evaluating(), self.autocast(), eager:
            yield

    def warm_up(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Run one synchronized forward and backward on dummy tokens and drop the gradients. say: prints a line.

        This triggers compilation, and it settles DDP's buckets, which torch rearranges after the first backward by the order in
        which gradients arrived. A gradient's place in a bucket affects the order of its sum over ranks. So without a warm-up, a
        resumed run's first update would round differently from the same update of an uninterrupted run.
        """
        if self.world.size == 1 and not self.compiled:
            return
        if self.compiled:
            say("compiling ...")
        began, shape = time.monotonic(), self.module.config
        size = (self.train.micro_batch_size, shape.seq_len + 1)
        tokens = torch.arange(size[0] * size[1], device=self.world.device).view(size) % shape.vocab_size
        self.model.require_backward_grad_sync = True
        with self.autocast():
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self.zero_grad()
        if self.compiled:
            say(f"compiled in {duration(time.monotonic() - began)}")

    def clip(self, limit: float) -> float:
        """Clip the gradients to the global norm `limit` (0: do not). Returns the norm before clipping, equal on all ranks."""
        # An update waits for the GPU only here. The optimizer's work then hides the kernel launches of the next update.
        norm = self.strategy.total_norm().item() / self.scaler.get_scale()
        if self.scaler.is_enabled():  # GradScaler expects a torch optimizer; ours is not one
            self.scaler.unscale_(SimpleNamespace(param_groups=[{"params": list(self.parameters.values())}]))
        if 0 < limit < norm < math.inf:
            torch._foreach_mul_([local(p.grad) for p in self.parameters.values() if p.grad is not None], limit / norm)
        return norm

    def zero_grad(self) -> None:
        """Set the gradients to None, not to zeros: a resumed run starts with None, and its first sums must not differ."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the optimizers' state by "parameter.key", sharded like the parameters."""
        name_of = {parameter: name for name, parameter in self.parameters.items()}
        return {f"{name_of[parameter]}.{key}": value for parameter, key, value in self.optimizers.state()}

    def load_optimizer_state(self, tensors: dict[str, Any]) -> None:
        """Load this rank's part of an optimizer state, saved by any strategy on any number of ranks.

        If the tensors are in a file, each rank reads only its own rows.
        """
        state = {parameter: {} for parameter in self.parameters.values()}
        for name, value in tensors.items():
            parameter_name, _, key = name.rpartition(".")
            state[self.parameters[parameter_name]][key] = value
        self.optimizers.load_state(state)

    @torch.no_grad()
    def gather(self, tensors: dict[str, Tensor], writers: dict[str, int]) -> dict[str, Tensor]:
        """Copy the full tensors that this rank saves to host memory, where training cannot change them.

        `writers` maps each of `tensors` to the rank that writes it; other ranks keep no copy. All ranks must call this.
        """
        rank, copies = self.world.rank, {}
        sharded = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
        if sharded:
            group = self.strategy.group
            if rank < group.size():  # the other groups have copies of the same rows
                copies = {name: self.to_host(tensor) for name, tensor in gather_own(sharded, writers, group)}
        for name, tensor in tensors.items():
            if name not in sharded and writers[name] == rank:
                copies[name] = self.to_host(tensor.clone() if tensor.device.type == "cpu" else tensor)
        return copies

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in host memory, or itself if it is already there."""
        if self.staging is None and tensor.device.type == "cuda":
            self.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        return tensor.cpu() if self.staging is None else copy_through(self.staging, tensor)

    def check_replicas(self) -> None:
        """Raise RunError on all ranks, naming the first tensor, if any rank's weights differ by a single bit."""
        try:
            check_replicas(self.module)
        except ValueError as error:
            raise RunError(f"{error}; memory, a GPU or a library on one of them is faulty; the checkpoints are kept") from None


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def copy_through(staging: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in ordinary host memory, made piece by piece through the pinned memory `staging` [bytes].

    A GPU writes at the full speed of its bus only to pinned memory. For ordinary memory, the driver makes a second copy on one
    core, while torch makes it here on all cores.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    staging = staging.view(tensor.dtype)
    for source, target in zip(tensor.reshape(-1).split(len(staging)), copy.view(-1).split(len(staging)), strict=True):
        piece = staging[: len(source)]
        piece.copy_(source, non_blocking=True)
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()
        target.copy_(piece)
    return copy


def is_sharded(tensor) -> bool:
    """Return whether `tensor` is split across ranks, as a DTensor or a Share."""
    return hasattr(tensor, "to_local")
