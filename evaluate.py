"""Validation loss: `python evaluate.py runs/NAME`, and the function that training calls."""

import math

import torch

from data import Batches
from world import World


@torch.no_grad()
def evaluate(model, batches: Batches, tokens: int, world: World, autocast) -> float:
    """Mean loss in nats a token over `tokens` tokens (0: all) in windows spread evenly over the split, shared by the ranks.

    model: inputs and targets [micro-batch, T] to their mean loss. Every rank runs the same number of forward passes, so
    that sharded models may communicate in them. Sums are added up in one order whatever the number of ranks.
    """
    total = batches.stream.windows(batches.seq_len)
    windows = min(total, math.ceil(tokens / batches.seq_len)) if tokens else total
    chosen = torch.arange(windows) * total // windows
    groups = chosen.split(batches.micro_batch_size)
    sums = world.zeros(len(groups))
    mine = world.share(len(groups))
    for turn in range(math.ceil(len(groups) / world.size)):
        at = mine[turn] if turn < len(mine) else 0
        batch = batches.tokens(groups[at].numpy()).to(world.device)
        with autocast():
            loss = model(batch[:, :-1], batch[:, 1:])
        if turn < len(mine):
            sums[at] = loss.to(sums.dtype) * len(groups[at])
    return world.sum_(sums).sum().item() / windows
