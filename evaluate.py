"""Measure a model's validation loss: `python evaluate.py runs/NAME`. For scores on tasks instead, add `--tasks=hellaswag`."""

from lockstep import command

if __name__ == "__main__":
    command.require_packages()

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from lockstep.common import cli
from lockstep.common.records import Count


@dataclass(frozen=True)
class EvaluateConfig:
    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]]
    """A run directory (uses its newest checkpoint), a checkpoint, or a Hugging Face model directory or Hub id."""
    tokens: str = ""
    """Dataset directory or mixture (empty: what the run was trained on)."""
    eval_tokens: Count = 0
    """Validation tokens per dataset (0: the whole split)."""
    seq_len: Count = 0
    """Context length of the windows (0: the model's)."""
    micro_batch_size: Count = 0
    """Windows per batch (0: about 8192 tokens)."""
    tasks: str = ""
    """Score the model on these lm-eval tasks instead: names or YAML files, such as hellaswag,arc_easy.
    hellaswag:200 uses only the first 200 documents."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    numerics: Literal["auto", "native", "portable"] = "auto"
    """portable: the same bits on any processor; auto: as the model was trained."""


if __name__ == "__main__":
    command.run("evaluate", lambda args: cli.parse(EvaluateConfig, args, __doc__))

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch

from lockstep.checkpoints import huggingface, lookup
from lockstep.common import errors
from lockstep.common.errors import UserError, say
from lockstep.dataset.mixture import Mixture, open_mixture
from lockstep.dataset.tokens import Stream
from lockstep.hardware import device, host
from lockstep.parallel.world import World, connect
from lockstep.reports.progress import score_lines
from lockstep.settings import DataConfig
from model import GPT, on_meta


@torch.no_grad()
def evaluate(model, stream: Stream, seq_len: int, micro_batch_size: int, tokens: int, world: World, autocast) -> float:
    """Return the mean loss in nats per token over `tokens` tokens (0: all), in windows spread evenly over the split.

    Training calls this too. The ranks divide the windows among themselves, but all call the model the same number of times,
    because a sharded model communicates in every call. model: maps inputs and targets [micro-batch, T] to their mean loss.
    """
    total, windows = stream.num_windows(seq_len), num_windows(stream, seq_len, tokens)
    chosen = torch.arange(windows) * total // windows
    groups = chosen.split(micro_batch_size)
    sums, mine = world.zeros(len(groups)), world.share(len(groups))
    for turn in range(math.ceil(len(groups) / world.size)):
        at = mine[turn] if turn < len(mine) else 0
        batch = np.stack([stream.read_window(window, seq_len) for window in groups[at].tolist()])
        batch = torch.from_numpy(batch).to(world.device)
        with autocast():
            loss = model(batch[:, :-1], batch[:, 1:])
        if turn < len(mine):
            sums[at] = loss.to(sums.dtype) * len(groups[at])
    return math.fsum(world.sum_over_ranks(sums).tolist()) / windows


def losses_on(mixture: Mixture, model, seq_len: int, micro_batch_size: int, tokens: int, world: World, autocast) -> list[float]:
    """Return the mean loss on the validation split of each dataset, from `tokens` tokens of each (0: all). See `evaluate`."""
    streams = mixture.streams("val")
    return [evaluate(model, stream, seq_len, micro_batch_size, tokens, world, autocast) for stream in streams]


def num_windows(stream: Stream, seq_len: int, tokens: int) -> int:
    """Return the number of windows that hold `tokens` validation tokens (0: all). Raises UserError if there are none."""
    stream.check_length(seq_len, "validation")
    total = stream.num_windows(seq_len)
    return min(total, math.ceil(tokens / seq_len)) if tokens else total


def load_tasks(names: str, tokenizer: Path | None, eot_token: int | None, seq_len: int, world: World):
    """Return lm-eval's tasks as `extras.tasks.Tasks`. Raises UserError."""
    return errors.extra("--tasks", "tasks").load(names, tokenizer, eot_token, seq_len, world)


def main(config: EvaluateConfig) -> None:
    """Print the validation loss of a model on a dataset, or its scores on tasks. Raises UserError."""
    directory, model = lookup.load_model(config.run, on_meta, config.numerics, config.dtype)
    rank, world_size, local_rank, local_world_size = host.read_ranks()
    portable = model.numerics == "portable"
    own = device.prepare_device(config.device, local_rank, integers_only=portable)
    world = World(rank, world_size, local_world_size, own)
    if world_size > 1:
        connect(world)
    if directory.name != (chosen := world.broadcast(directory.name)):  # the run has saved again meanwhile
        directory, model = lookup.load_model(str(directory.with_name(chosen)), on_meta, config.numerics, config.dtype)
    dtype = "float32" if portable else device.choose_dtype(config.dtype, world.device)
    autocast = partial(device.autocast, world.device, dtype)
    lines = (score if config.tasks else validate)(config, directory, model, world, autocast)
    if world.is_master:
        say("\n".join(lines))


def score(config: EvaluateConfig, directory: Path, model: GPT, world: World, autocast) -> list[str]:
    """Return the scores on tasks, one per line."""
    loaded = load_tasks(config.tasks, *huggingface.first_token(directory), model.config.seq_len, world)
    with autocast():
        scores = loaded.measure(model.to(world.device))
    return [f"{directory} on {config.tasks}", *score_lines(scores)]


def validate(config: EvaluateConfig, directory: Path, model: GPT, world: World, autocast) -> list[str]:
    """Return the validation loss on each dataset, with the same attention as in training."""
    trained = lookup.settings_of(directory).data
    if not (config.tokens or trained.tokens):
        raise UserError(f"{directory} does not say what it was trained on; choose a dataset with --tokens=DIRECTORY")
    mixture = open_mixture(DataConfig(config.tokens) if config.tokens else trained, model.config.vocab_size)
    model.document_token = mixture.document_token(trained.attend)
    if mixture.vocab_size > model.config.vocab_size:
        raise UserError(f"{mixture} has a vocabulary of {mixture.vocab_size}, but the model's is {model.config.vocab_size}")
    if config.seq_len > model.config.seq_len:
        raise UserError(f"--seq_len={config.seq_len} exceeds the model's context of {model.config.seq_len}; lower it")
    lines = huggingface.check_tokenizer(directory, mixture.tokenizer)
    model.to(world.device)
    seq_len = config.seq_len or model.config.seq_len
    micro_batch_size, tokens = config.micro_batch_size or max(1, 8192 // seq_len), config.eval_tokens
    losses = losses_on(mixture, model, seq_len, micro_batch_size, tokens, world, autocast)
    for dataset, stream, loss in zip(mixture.datasets, mixture.streams("val"), losses, strict=True):
        evaluated = num_windows(stream, seq_len, tokens) * seq_len
        lines.append(f"{directory} on {dataset.directory}: {evaluated:,} of {len(stream):,} validation tokens")
        lines.append(describe(loss, dataset.bits_per_byte(loss)))
    if len(losses) > 1:
        lines += [f"{directory} on {mixture}", describe(*list(mixture.validation(losses).values())[:2])]
    return lines


def describe(loss: float, bits: float | None) -> str:
    """Return a loss in nats per token, with its perplexity and bits per byte."""
    perplexity = torch.tensor(loss, dtype=torch.float64).exp()  # may be infinite
    return f"loss {loss:.4f}  perplexity {perplexity:.3f}" + (f"  bits per byte {bits:.4f}" if bits else "")
