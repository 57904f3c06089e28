"""Optimizers and the learning-rate schedule."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from settings import OptimConfig


class AdamW:
    """AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019): torch's fused kernel for all parameters.

    The kernel is called here because building a torch.optim.Optimizer imports torch's compiler, which takes a second.
    """

    def __init__(self, groups: list[dict], betas: tuple[float, float], eps: float = 1e-8):
        self.param_groups, self.betas, self.eps = groups, betas, eps
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights from the gradients."""
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            if not given:
                continue
            for p in given:
                if p not in self.state:
                    step = torch.zeros((), device=p.device)
                    self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            averages, squares, steps = ([self.state[p][key] for p in given] for key in ("exp_avg", "exp_avg_sq", "step"))
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                given,
                [p.grad for p in given],
                averages,
                squares,
                [],  # AMSGrad's maxima
                steps,
                lr=group["lr"],
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )


class Muon:
    """Muon (Jordan et al., 2024) with one batch of matrix products for all matrices of a shape.

    A transformer has a handful of shapes, and one of its matrices alone is too small to fill a GPU or to be worth a call. The
    update is scaled to AdamW's RMS (Liu et al., "Muon is Scalable for LLM Training", 2025): one learning rate fits both.
    """

    def __init__(self, groups: list[dict], momentum: float):
        self.param_groups, self.momentum = groups, momentum
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights from the gradients."""
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            for shape in dict.fromkeys(p.shape for p in given):
                matrices = [p for p in given if p.shape == shape]
                gradients = [p.grad for p in matrices]
                for p in matrices:
                    if p not in self.state:
                        self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
                momenta = [self.state[p]["momentum_buffer"] for p in matrices]
                torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
                directions = orthogonalize(torch.stack(torch._foreach_lerp(gradients, momenta, self.momentum)))  # Nesterov's
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                rate = 0.2 * group["lr"] * max(shape) ** 0.5
                torch._foreach_add_(matrices, directions.to(matrices[0].dtype).unbind(), alpha=-rate)


@dataclass(frozen=True)
class Optimizers:
    """One or two optimizers that together own every parameter: AdamW, or Muon with AdamW.

    Each has `param_groups`, of which the rate of learning is set before a step, and `state`, tensors by parameter and name.
    """

    parts: list[AdamW | Muon]

    def step(self) -> None:
        """Update the weights from the gradients."""
        for part in self.parts:
            part.step()

    def set_learning_rate(self, lr: float) -> None:
        """Set every parameter group's learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr

    def state(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """All state tensors, each with the parameter that it belongs to and its name there."""
        for part in self.parts:
            for parameter, state in part.state.items():
                for key, value in state.items():
                    yield parameter, key, value

    def load_state(self, state: dict[Tensor, dict[str, Tensor]]) -> None:
        """The inverse of `state`, by parameter."""
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    if values := state.get(parameter):
                        part.state[parameter] = {key: value.to(parameter.device) for key, value in values.items()}


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrix of each of `matrices` [N, rows, columns], nearly, in bfloat16.

    Newton and Schulz's iteration with the quintic polynomial of Muon (Jordan et al., 2024), of which every step is three
    products of matrices; the wide way round, where these are smaller.
    """
    a, b, c = 3.4445, -4.775, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16().mT if tall else matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def build(model: nn.Module, config: OptimConfig) -> Optimizers:
    """AdamW over all parameters, or Muon over the hidden matrices and AdamW over the rest.

    Weight decay is for tensors of two and more dimensions.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if config.optimizer == "muon" and p.ndim == 2 and name.startswith("blocks.")]
    in_matrices = set(map(id, matrices))
    others = [p for _, p in named if id(p) not in in_matrices]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "lr": config.lr, "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "lr": config.lr, "weight_decay": 0.0},
    ]
    parts: list[AdamW | Muon] = [AdamW(groups, (config.beta1, config.beta2))]
    if matrices:
        parts.append(Muon([{"params": matrices, "lr": config.lr, "weight_decay": config.weight_decay}], config.momentum))
    return Optimizers(parts)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of update `step` (0-based) of `steps`: linear warmup, then cosine, wsd or constant.

    wsd: warmup, stable, decay (Hu et al., "MiniCPM", 2024), linear over the last `cooldown_fraction`.
    """
    warmup = config.warmup_steps if config.warmup_steps >= 0 else math.ceil(steps / 50)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    floor = config.min_lr if config.min_lr >= 0 else (config.lr / 10 if config.schedule == "cosine" else 0.0)
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, steps - warmup)
        return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * done))
    left = (steps - step) / max(1, round(config.cooldown_fraction * steps))
    return floor + (config.lr - floor) * min(1.0, left)
