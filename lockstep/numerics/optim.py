"""Optimizers and the learning-rate schedule."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.hardware.device import DTYPES
from lockstep.numerics import native
from lockstep.settings import OptimConfig


class AdamW:
    """AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019), computed by `native` or `portable`."""

    STATE = {"step", "exp_avg", "exp_avg_sq"}  # per parameter, each with its shape, except that step is a scalar

    def __init__(self, groups: list[dict], betas: tuple[float, float], eps: float = 1e-8, ops=native):
        self.param_groups, self.betas, self.eps, self.ops = groups, betas, eps, ops
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights from the gradients."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if p not in self.state:
                    step = torch.zeros((), device=p.device)
                    self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.ops.adamw(
                params=[local(p) for p in parameters],
                grads=[local(p.grad) for p in parameters],
                exp_avgs=[local(self.state[p]["exp_avg"]) for p in parameters],
                exp_avg_sqs=[local(self.state[p]["exp_avg_sq"]) for p in parameters],
                state_steps=[self.state[p]["step"] for p in parameters],
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self.eps,
            )


# torch 2.13 renames this function; 2.11 has only the old name.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
JUMP = 1.25  # a change of the learning rate by more than this factor, from one step to the next, is a jump
BATCH = 4  # matrices per batch in Newton-Schulz: one small matrix underuses the CPU, and many overflow its cache
# Arguments: N matrices of one shape, and a dtype. Returns a function that waits for the nearest orthogonal matrices
# [N, rows, columns] and returns them, or only this rank's part if they are sharded.
Orthogonalize = Callable[[list[Tensor], torch.dtype], Callable[[], Tensor]]


def orthogonalize(matrices: list[Tensor], dtype: torch.dtype, ops=native) -> Callable[[], Tensor]:
    """Approximate the (semi-)orthogonal matrix nearest to each of N `matrices` of one shape: [N, rows, columns] in `dtype`.

    The returned function does the work when called, so that only one shape at a time needs memory.
    """

    def compute() -> Tensor:
        found = []
        for i in range(0, len(matrices), BATCH):
            batch = torch.stack([matrix.to(dtype) for matrix in matrices[i : i + BATCH]])
            tall = batch.shape[1] > batch.shape[2]  # transpose tall matrices to make the Gram matrix smaller
            found.append(newton_schulz(batch.mT, ops).mT if tall else newton_schulz(batch, ops))
        return torch.cat(found)

    return compute


def newton_schulz(x: Tensor, ops, steps: int = 5) -> Tensor:
    """Orthogonalize a batch `x` [N, rows, columns] with Muon's quintic iteration (Jordan et al., 2024)."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = x / ops.matrix_norm(x).clamp(min=1e-7)
    for _ in range(steps):
        gram = ops.matmul(x, x.mT)
        x = ops.baddbmm(x, ops.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def orthogonalize_shares(
    matrices: list[Tensor], dtype: torch.dtype, group: dist.ProcessGroup, orthogonalize: Orthogonalize
) -> Callable[[], Tensor]:
    """Divide the work of `orthogonalize` among the ranks of `group`, which hold the same `matrices` (or the same rows of them).

    Each rank orthogonalizes its share, and one all-gather collects the results.
    """
    each = math.ceil(len(matrices) / group.size())  # the last ranks may get fewer, or none
    first = group.rank() * each
    mine = matrices[first : first + each]
    share = torch.zeros(each, *local(matrices[0]).shape, dtype=dtype, device=matrices[0].device)
    if mine:
        share[: len(mine)] = orthogonalize(mine, dtype)()
    shares = share.new_empty(group.size() * each, *share.shape[1:])
    work = all_gather_single(shares, share, group=group, async_op=True)
    return when_done(work, shares[: len(matrices)])


def when_done(work: dist.Work, received: Tensor) -> Callable[[], Tensor]:
    """Return a function that waits for `work` and returns `received`."""

    def wait() -> Tensor:
        work.wait()
        return received

    return wait


def orthogonalize_by_owners(
    matrices: list, dtype: torch.dtype, group: dist.ProcessGroup, multiple: int = 1, ops=native
) -> Callable[[], Tensor]:
    """Orthogonalize N matrices that are split across the ranks of `group`. The result has this rank's share of each.

    One all-to-all sends the shares of each matrix to its owner, which orthogonalizes it, and another returns the shares of the
    result. The number of matrices that a rank owns is a multiple of `multiple`; the last ranks may own fewer, or none. If
    `multiple` is BATCH, the batches are the same as on a single rank. This matters because the number of matrices multiplied
    together can change a product's bits.
    """
    count, ranks, shape = len(matrices), group.size(), matrices[0].shape
    held, size = local(matrices[0]), share_size(matrices[0])
    each = math.ceil(count / multiple / ranks) * multiple  # matrices per owner

    # One row per matrix, in the order of the owners, with this rank's share. A shorter share is padded with zeros to `size`.
    rows = torch.zeros(ranks * each, size, dtype=dtype, device=held.device)
    for row, matrix in zip(rows, matrices, strict=False):
        row[: held.numel()] = local(matrix).reshape(-1)
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)  # [holders x each, size]

    # The shares of a matrix, one after the other, are the whole matrix.
    whole = received.view(ranks, each, size).transpose(0, 1).reshape(each, ranks * size)
    owned = max(0, min(each, count - group.rank() * each))
    if owned:
        flat = whole[:owned, : math.prod(shape)]
        nearest = orthogonalize(list(flat.unflatten(1, shape)), dtype, ops)()
        flat.copy_(nearest.flatten(1))

    back = whole.view(each, ranks, size).transpose(0, 1).reshape(ranks * each, size)
    work = dist.all_to_all_single(rows, back, group=group, async_op=True)
    return when_done(work, rows[:count, : held.numel()].unflatten(1, held.shape))


class Muon:
    """Muon (Jordan et al., 2024): update each matrix by the orthogonal matrix nearest to its momentum.

    Updates are scaled to the size of AdamW's (Liu et al., "Muon is Scalable for LLM Training", 2025), so one learning rate fits
    both. Matrices of one shape are orthogonalized together. `orthogonalize` may divide this work among ranks, which exchange
    the results for one shape while they compute the next. Parameters may be sharded by rows.
    """

    STATE = {"momentum_buffer"}

    def __init__(
        self, groups: list[dict], momentum: float, dtype: torch.dtype, orthogonalize: Orthogonalize = orthogonalize, ops=native
    ):
        self.param_groups, self.momentum, self.dtype = groups, momentum, dtype
        self.orthogonalize, self.ops = orthogonalize, ops
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights from the gradients. Overwrites the gradients."""
        previous = None  # the update of the previous shape, whose results travel while this shape's are computed
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for shape in dict.fromkeys(p.shape for p in parameters):
                matrices = [p for p in parameters if p.shape == shape]
                for p in matrices:
                    if p not in self.state:
                        self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
                weights, gradients = [local(p) for p in matrices], [local(p.grad) for p in matrices]
                momenta = [local(self.state[p]["momentum_buffer"]) for p in matrices]
                self.ops.lerp_(momenta, gradients, 1 - self.momentum)
                self.ops.lerp_(gradients, momenta, self.momentum)  # Nesterov's momentum
                nearest = self.orthogonalize([p.grad for p in matrices], self.dtype)
                if previous:
                    self.update(*previous)
                previous = (weights, nearest, group, max(shape))
        if previous:
            self.update(*previous)

    def update(self, weights: list[Tensor], nearest: Callable[[], Tensor], group: dict, longest: int) -> None:
        """Update the `weights` of one shape with the matrices that `nearest` returns. longest: the shape's longest side."""
        updates = nearest().to(weights[0].dtype).unbind()
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        self.ops.add_(weights, updates, alpha=-0.2 * group["lr"] * math.sqrt(longest))


def local(tensor) -> Tensor:
    """Return this rank's part of a sharded tensor (a DTensor or a Share), in the same memory, or a plain tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def share_size(tensor) -> int:
    """Return how many elements of a DTensor or a Share each rank holds; the last ranks may hold fewer, or none."""
    if isinstance(tensor, Tensor):  # FSDP divides rows as torch.chunk does
        return math.ceil(len(tensor) / tensor.device_mesh.size(-1)) * math.prod(tensor.shape[1:])
    return tensor.size


@torch.no_grad()
def load_rows(tensor, whole):
    """Fill `tensor`, which may be sharded, from the `whole` tensor, which may be a LazyTensor. Returns `tensor`."""
    if not hasattr(tensor, "to_local") or not tensor.ndim:
        local(tensor).copy_(whole[slice(None) if tensor.ndim else ...])
        return tensor
    mine, width = tensor.to_local(), math.prod(tensor.shape[1:])
    rank = tensor.device_mesh.get_local_rank(-1) if isinstance(tensor, Tensor) else tensor.rank
    first = rank * share_size(tensor)
    top = first // width  # a share may begin and end within a row
    rows = whole[top : math.ceil((first + mine.numel()) / width)].reshape(-1)
    mine.copy_(rows[first - top * width :][: mine.numel()].view(mine.shape))
    return tensor


@dataclass(frozen=True)
class Optimizers:
    """The optimizers of a model: AdamW, or AdamW and Muon. Together they own every parameter.

    Each of the `parts` has `param_groups` (dictionaries with `params` and `lr`) and `state` (tensors by parameter and name).
    """

    parts: list[AdamW | Muon]
    after_step: Callable[[], None]  # under `exact`, the ranks exchange the weights that each has updated

    def step(self) -> None:
        """Update the weights from the gradients."""
        for part in self.parts:
            part.step()
        self.after_step()

    @property
    def lr(self) -> float:
        """The learning rate of the last update."""
        return self.parts[0].param_groups[0]["lr"]

    def set_learning_rate(self, lr: float) -> None:
        """Set every parameter group's learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr

    def state(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Yield all state tensors, each with its parameter and a name such as `exp_avg`."""
        for part in self.parts:
            for parameter, state in part.state.items():
                for key, value in state.items():
                    yield parameter, key, value

    def load_state(self, state: dict[Tensor, dict]) -> None:
        """Set the state from full tensors, by parameter and name. They may be LazyTensors, which are read by rows."""
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    for key, whole in state.get(parameter, {}).items():
                        value = torch.empty_like(parameter) if whole.shape else torch.empty((), device=parameter.device)
                        part.state.setdefault(parameter, {})[key] = load_rows(value, whole)


def optimizer_of(name: str, parameter: Tensor, optimizer: str) -> type[AdamW] | type[Muon]:
    """Return the class that updates a parameter under --optimizer=`optimizer`."""
    matrix = Muon if parameter.ndim == 2 and name.startswith("blocks.") else AdamW
    return {"adamw": AdamW, "muon": matrix}[optimizer]


def build(
    parameters: dict[str, Tensor],
    config: OptimConfig,
    ops: ModuleType = native,
    orthogonalize: Orthogonalize = orthogonalize,
    after_step: Callable[[], None] = lambda: None,
) -> Optimizers:
    """Build AdamW for all parameters, or Muon (with `orthogonalize`) for the hidden matrices and AdamW for the rest.

    Weight decay applies to tensors of two or more dimensions.
    """
    matrices, others = [], []
    for name, p in parameters.items():
        (matrices if optimizer_of(name, p, config.optimizer) is Muon else others).append(p)
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "lr": config.lr, "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "lr": config.lr, "weight_decay": 0.0},
    ]
    parts: list[AdamW | Muon] = [AdamW(groups, (config.beta1, config.beta2), ops=ops)]
    if matrices:
        group = {"params": matrices, "lr": config.lr, "weight_decay": config.weight_decay}
        parts.append(Muon([group], config.momentum, DTYPES[config.muon_dtype], orthogonalize, ops))
    return Optimizers(parts, after_step)


def learning_rate(step: int, steps: int, config: OptimConfig, cosine=math.cos) -> float:
    """Return the learning rate of update `step` (0-based) of `steps`: linear warmup, then cosine, wsd or constant.

    config: resolved. wsd is warmup-stable-decay (Hu et al., "MiniCPM", 2024). Its decay is linear, over the last `decay_steps`
    steps, or if that is 0, over the fraction `cooldown_fraction` of all steps.
    """
    warmup, floor = config.warmup_steps, config.min_lr
    if step < warmup:
        return config.lr * (step + 1) / warmup
    match config.schedule:
        case "constant":
            return config.lr
        case "cosine":
            progress = (step - warmup) / max(1, steps - warmup)
            angle = torch.tensor(math.pi * progress, dtype=torch.float64)
            return floor + (config.lr - floor) * 0.5 * (1 + float(cosine(angle)))
        case "wsd":
            return floor + (config.lr - floor) * min(1.0, (steps - step) / cooldown(steps, config))
        case _:
            assert_never(config.schedule)


def cooldown(steps: int, config: OptimConfig) -> int:
    """Return over how many of a run's last steps wsd decays."""
    return config.decay_steps or max(1, round(config.cooldown_fraction * steps))


def warn_of_warmup(steps: int, config: OptimConfig) -> list[str]:
    """Return a warning if the warmup leaves no room for the rest of the schedule. config: resolved."""
    warmup, last = config.warmup_steps, steps - cooldown(steps, config)  # the last step before the decay
    if warmup >= steps:
        end = learning_rate(steps - 1, steps, config)
        return [f"warning: --warmup_steps={warmup} takes up all of the {steps} steps; the learning rate ends at {end:.2g}"]
    if config.schedule == "wsd" and warmup > last:
        drop = f"falls from {config.lr:.2g} to {learning_rate(warmup, steps, config):.2g} at once"
        return [f"warning: --warmup_steps={warmup} ends after the decay begins, at step {last + 1}; the learning rate {drop}"]
    return []


def warn_of_jump(done: int, before: tuple[int, OptimConfig], now: tuple[int, OptimConfig]) -> list[str]:
    """Return a warning if a run's steps and schedule change so that its learning rate jumps after `done` steps.

    A change of --lr alone is no jump. before, now: the number of steps, and the resolved settings.
    """
    (steps, old), (_, new) = before, now
    last, planned = (learning_rate(step, steps, old) / old.lr for step in (done - 1, done))
    following = learning_rate(done, *now) / new.lr
    if min(last, planned) / JUMP <= following <= max(last, planned) * JUMP:
        return []
    rates = f"from {last * old.lr:.2g} to {following * new.lr:.2g} at step {done + 1}"
    why = f"the steps so far followed the schedule of a run of {steps} steps"
    return [
        f"warning: the learning rate jumps {rates}: {why}; with --schedule=constant, a run can be lengthened without a jump"
    ]
