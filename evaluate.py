"""Validation loss: `python evaluate.py runs/NAME`, and the function that training calls."""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro

import checkpoint
import data
import device
import settings
from dataset import Stream
from settings import UserError
from world import World, connect


@torch.no_grad()
def evaluate(model, stream: Stream, seq_len: int, micro_batch_size: int, tokens: int, world: World, autocast) -> float:
    """Mean loss in nats a token over `tokens` tokens (0: all) in windows spread evenly over the split, shared by the ranks.

    model: inputs and targets [micro-batch, T] to their mean loss. Every rank runs the same number of forward passes, so
    that sharded models may communicate in them. Sums are added up in one order whatever the number of ranks.
    """
    total = stream.num_windows(seq_len)
    if not total:
        raise UserError(f"the validation split has {len(stream)} tokens, less than one window of --seq_len={seq_len}")
    windows = min(total, math.ceil(tokens / seq_len)) if tokens else total
    chosen = torch.arange(windows) * total // windows
    groups = chosen.split(micro_batch_size)
    sums = world.zeros(len(groups))
    mine = world.share(len(groups))
    for turn in range(math.ceil(len(groups) / world.size)):
        at = mine[turn] if turn < len(mine) else 0
        batch = torch.from_numpy(stream.read_windows(groups[at].numpy(), seq_len)).to(world.device)
        with autocast():
            loss = model(batch[:, :-1], batch[:, 1:])
        if turn < len(mine):
            sums[at] = loss.to(sums.dtype) * len(groups[at])
    return world.sum_over_ranks(sums).sum().item() / windows


RANGES = [("eval_tokens seq_len micro_batch_size", "at least 0 and at most 10^12", lambda x: 0 <= x <= 10**12)]


@dataclass(frozen=True)
class EvaluateConfig:
    run: tyro.conf.Positional[str]
    """A run directory (its newest checkpoint), or a checkpoint or Hugging Face model directory."""
    tokens: str = ""
    """Dataset directory, or a mixture of them (empty: what the run was trained on)."""
    eval_tokens: int = 0
    """Validation tokens of each dataset (0: the whole split)."""
    seq_len: int = 0
    """Context length of the windows (0: the model's)."""
    micro_batch_size: int = 0
    """Windows at a time (0: about 8192 tokens)."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


def main(config: EvaluateConfig) -> None:
    """Print the validation loss of a model on a dataset. Raises UserError."""
    settings.refuse(settings.number_problems(config, RANGES))
    directory, model = checkpoint.load_model(config.run)
    mixture = data.open_mixture(config.tokens or trained_on(directory), model.config.vocab_size)
    if mixture.vocab_size > model.config.vocab_size:
        raise UserError(f"{mixture} has a vocabulary of {mixture.vocab_size}, the model of {model.config.vocab_size}")
    if config.seq_len > model.config.seq_len:
        raise UserError(f"--seq_len={config.seq_len}: the model's context is {model.config.seq_len}")
    world = connect(config.device)
    model.to(world.device)
    autocast = partial(device.autocast, world.device, device.choose_dtype(config.dtype, world.device))
    seq_len = config.seq_len or model.config.seq_len
    micro_batch_size, losses = config.micro_batch_size or max(1, 8192 // seq_len), []
    for dataset, stream in zip(mixture.datasets, mixture.streams("val"), strict=True):
        losses.append(evaluate(model, stream, seq_len, micro_batch_size, config.eval_tokens, world, autocast))
        print(f"{directory} on {dataset.directory}: {len(stream):,} validation tokens")
        print(describe(losses[-1], dataset.bits_per_byte(losses[-1])))
    if len(losses) > 1:
        print(f"{directory} on {mixture}")
        print(describe(*list(mixture.validation(losses).values())[:2]))


def describe(loss: float, bits: float | None) -> str:
    """A loss in nats a token in all its units."""
    return f"loss {loss:.4f}  perplexity {math.exp(loss):.3f}" + (f"  bits per byte {bits:.4f}" if bits else "")


def trained_on(directory: Path) -> str:
    """The dataset directory that a checkpoint's settings name. Raises UserError where it has none."""
    if not (directory / "trainer_state.json").exists():
        raise UserError(f"{directory} does not say what it was trained on; --tokens=DIRECTORY says what to evaluate on")
    return settings.from_record(checkpoint.load_state(directory).settings, str(directory)).data.tokens


if __name__ == "__main__":
    with settings.user_errors():
        main(settings.parse(EvaluateConfig, sys.argv[1:], __doc__))
