"""Optimizers and the learning-rate schedule."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from settings import OptimConfig


@dataclass(frozen=True)
class Optimizers:
    """One or two torch optimizers that together own every parameter: AdamW, or Muon with AdamW."""

    parts: list[torch.optim.Optimizer]

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
        """The inverse of `state`, by parameter. Steps stay on the CPU unless the optimizer is fused, as torch wants it."""
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    if values := state.get(parameter):
                        part.state[parameter] = {
                            k: v.to(parameter.device) if k != "step" or group.get("fused") else v for k, v in values.items()
                        }


class BatchedMuon(torch.optim.Muon):
    """torch's Muon, its `match_rms_adamw` flavour, with one batch of matrix products for all matrices of a shape.

    A transformer has a handful of shapes, and one of its matrices alone is too small to fill a GPU or to be worth a call.
    """

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights from the gradients."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            given = [p for p in group["params"] if p.grad is not None]
            for shape in dict.fromkeys(p.shape for p in given):
                matrices = [p for p in given if p.shape == shape]
                gradients = [p.grad for p in matrices]
                for p in matrices:
                    if not self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                momenta = [self.state[p]["momentum_buffer"] for p in matrices]
                torch._foreach_lerp_(momenta, gradients, 1 - momentum)
                updates = torch.stack(torch._foreach_lerp(gradients, momenta, momentum))  # Nesterov's
                torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
                directions = orthogonalize(updates, group["ns_coefficients"], group["ns_steps"], group["eps"])
                torch._foreach_add_(matrices, directions.to(matrices[0].dtype).unbind(), alpha=-0.2 * lr * max(shape) ** 0.5)


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The nearest (semi-)orthogonal matrix of each of `matrices` [N, rows, columns], nearly, in bfloat16.

    Newton and Schulz's iteration with the quintic polynomial of Muon (Jordan et al., 2024), of which every step is three
    products of matrices; the wide way round, where these are smaller.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16().mT if tall else matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def build(model: nn.Module, config: OptimConfig) -> Optimizers:
    """AdamW over all parameters, or Muon over the hidden matrices and AdamW over the rest.

    Weight decay is for tensors of two and more dimensions. Muon's update is scaled to AdamW's RMS (Liu et al., "Muon is
    Scalable for LLM Training", 2025), so that one learning rate fits both.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if config.optimizer == "muon" and p.ndim == 2 and name.startswith("blocks.")]
    in_matrices = set(map(id, matrices))
    others = [p for _, p in named if id(p) not in in_matrices]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.beta2)
    device_type = named[0][1].device.type  # "cuda" also for "cuda:1"
    parts = [torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=device_type in ("cuda", "cpu", "mps"))]
    if matrices:
        kind = {"momentum": config.momentum, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        parts.append(BatchedMuon(matrices, lr=config.lr, **kind))
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
