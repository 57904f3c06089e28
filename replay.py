"""Look back at a step of a run: `python replay.py runs/NAME --step=12345`. Was it the data, or the machine?

Recomputes the steps from the newest intact checkpoint before that step, without writing to the run. If loss and gradient norm
match metrics.jsonl bit for bit, the machine is fine, and the step's sequences show what the model saw. Otherwise, replay.py
prints the first step that differs. A run with --strategy=exact can be replayed on any number of ranks; other runs need the
original number: `torchrun --standalone --nproc_per_node=W replay.py ...`.
"""

from lockstep import command

if __name__ == "__main__":
    command.require_packages()

from dataclasses import dataclass
from typing import Annotated

import tyro

from lockstep.common import cli
from lockstep.common.records import Auto, Count


@dataclass(frozen=True)
class ReplayConfig:
    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]]
    """A run directory."""
    step: Count = 0
    """The step to replay, numbered as in metrics.jsonl (0: the last recorded step)."""
    sequences: Count = 8
    """How many of the step's sequences to show, worst loss first (0: all)."""
    verify: bool = False
    """Check that each kept checkpoint follows from the previous one, sha256 for sha256."""
    from_: Annotated[Count | Auto, tyro.conf.arg(name="from")] = "auto"
    """Where --verify starts: the step of a checkpoint, or 0 for the start of the run (auto: the first checkpoint)."""
    to: Count = 0
    """Where --verify ends (0: at the last checkpoint). A step without a checkpoint is compared by its loss."""
    tokens: str = ""
    """Current location of the dataset (empty: unchanged)."""
    phase: str = ""
    """Current locations of the datasets of the run's phases, in the syntax of train.py's --phase."""


if __name__ == "__main__":
    command.run("replay", lambda args: cli.parse(ReplayConfig, args, __doc__))

import math
import os
import sys
import tempfile
from collections import ChainMap
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch

import data
import train
from lockstep import settings
from lockstep.checkpoints import checkpoint, lookup, retention
from lockstep.checkpoints.checkpoint import Era, TrainState, take_snapshot
from lockstep.checkpoints.resume import Start, search
from lockstep.common.errors import UserError, one_line, plural, say
from lockstep.common.steps import mixtures_seen
from lockstep.dataset.mixture import open_mixture
from lockstep.dataset.tokenizer import load_if_readable
from lockstep.hardware.device import prepare_training
from lockstep.hardware.host import read_ranks
from lockstep.parallel.world import World, connect
from lockstep.reports.log import read_records

OUTLIER = 8  # a loss this many median deviations above the median stands out
WIDTH = 107  # characters of text to show per sequence
CHANGED = "settings, versions, the hardware or the number of ranks changed"


class CannotReplay(UserError):
    """A step cannot be recomputed on these ranks, or from the remaining checkpoints."""


@dataclass(frozen=True)
class Past:
    """The run to replay, and the ranks that replay it."""

    directory: Path
    state: TrainState  # state of the newest checkpoint
    world: World
    moved: dict[str, str]  # settings with the new locations of datasets, if they have moved


def main(config: ReplayConfig) -> int:
    """Replay or verify, and print the result. Returns 1 if anything differs from the run's records. Raises UserError."""
    if not config.verify and (config.from_ != "auto" or config.to):
        raise UserError("--from and --to need --verify; to look at a single step, use --step")
    newest, warnings = lookup.find(config.run)
    state = checkpoint.load_state(newest)
    world = join(anywhere(state.config))
    moved = {"tokens": config.tokens, "phase": config.phase}
    past = Past(Path(config.run), state, world, {name: value for name, value in moved.items() if value})
    if not world.is_master:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    with world.reporting_lost_ranks():
        for warning in warnings:
            say(warning)
        status = verify(past, config) if config.verify else look_back(past, config.step, config.sequences)
        world.leave()
    return status


def join(config: settings.Config) -> World:
    """Join the other ranks, as train.py does."""
    rank, world_size, local_rank, local_world_size = read_ranks()
    device = prepare_training(config, local_rank)
    world = World(rank, world_size, local_world_size, device, timedelta(minutes=config.parallel.timeout_minutes))
    if world_size > 1:
        connect(world)
    return world


def look_back(past: Past, step: int, count: int) -> int:
    """Replay up to `step` (0: the last one), and show `count` of its sequences. Returns 1 if a step differs from its record."""
    records = read_steps(past)
    last = max(records, default=0)
    step = step or last
    if not 1 <= step <= last:
        raise UserError(f"--step={step}: {past.directory} has only steps 1 to {last}")
    run = open_before(past, step)
    say(f"replaying steps {run.state.step + 1} to {step}")
    found = replay(run, step - 1)
    first, losses = run.state.step, sequence_losses(run, run.state.step)
    sequences = show_sequences(run, losses)
    found |= replay(run, step)
    after = sequence_losses(run, first)
    same, said = compare(found, records)
    say(f"{said}; {verdict(losses, after)}" if same else said)
    loss, grad_norm = found[step]
    compared = "" if step in records else "  (not logged, so not compared; see --log_every)"
    say(f"\nstep {step}  loss {loss:.4f}  gradient norm {grad_norm:.3f}{compared}\n\nsequences, worst loss first")
    say("\n".join(sequences[: count or None]))
    if 0 < count < len(sequences):
        say(f"  ... {len(sequences) - count} more: --sequences=0")
    skip = str(run.batches.batch_number(step - 1) + 1)
    if run.config.data.skip_steps:
        skip = f"{run.config.data.skip_steps},{skip}"
    say(f"to leave out this batch: --skip_steps={skip}")
    return int(not same)


def read_steps(past: Past) -> dict[int, tuple[float, float]]:
    """Return the loss and the gradient norm of each step in metrics.jsonl."""
    lines = [record for _, record in read_records(past.directory / "metrics.jsonl") if record]
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in lines if "grad_norm" in record}


def compare(found: dict[int, tuple], records: dict[int, tuple]) -> tuple[bool, str]:
    """Return whether the (loss, gradient norm) of each step found matches the run's record of it, and a sentence about it."""
    logged = [step for step in found if step in records]
    for step in logged:
        if repr(found[step]) != repr(records[step]):  # by repr, so that NaN equals NaN
            (loss, norm), (loss_before, norm_before) = found[step], records[step]
            differ = f"loss {loss!r} (recorded: {loss_before!r}), gradient norm {norm!r} (recorded: {norm_before!r})"
            return False, f"step {step} is the first that differs: {differ}"
    if not logged:
        return True, "no step was logged (see --log_every)"
    return True, f"{plural(len(logged), 'recorded step')}: loss and gradient norm match the records bit for bit"


def verdict(losses: list[float], after: list[float]) -> str:
    """Say whether to look at the data or at the optimizer, from the sequences' losses before and after the step."""
    losses = list(map(badness, losses))
    worst, typical = max(losses), median(losses)
    spread = median(abs(loss - typical) for loss in losses)
    before_after = f"the step took their mean loss from {fmean(losses):.4f} to {fmean(after):.4f}"
    # Ordinary text differs less. Early in a run all losses are alike, so a small lead counts for nothing.
    if worst > max(typical + OUTLIER * spread, 1.25 * typical):
        return f"look at the data: the worst sequence has loss {worst:.4f}, the median {typical:.4f}; {before_after}"
    near = f"no sequence stands out (worst {worst:.4f}, median {typical:.4f})"
    return f"{near}, so look at the optimizer (--lr, --grad_clip): {before_after}"


def badness(loss: float) -> float:
    """Return a loss for comparisons: NaN is worst."""
    return math.inf if math.isnan(loss) else loss


def anywhere(config: settings.Config) -> settings.Config:
    """Return settings that let this machine recompute the run: on the CPU if it lacks the run's kind of accelerator."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    device = config.train.device if available.get(config.train.device) else "cpu"
    threads = config.train.threads if config.numerics.numerics == "native" else "auto"
    return settings.replace(config, threads=threads, device=device)


def conditions(era: Era) -> tuple:
    """Return everything that the bits of a step depend on, except the state before it."""
    config = settings.from_record(era["settings"], f"the settings from step {era['step']} on")
    same = settings.replace(config, check_replicas_every=0, timeout_minutes=1)
    if not same.parallel.record.shards_weights:
        same = settings.replace(same, shard_gradients="off")
    if same.numerics.numerics == "portable":
        same = settings.replace(same, threads="auto", device="cpu")
    versions = era["versions"] if config.numerics.numerics == "native" else {}
    ranks = 0 if same.parallel.record.any_ranks else era["world_size"]
    return same.model, same.numerics, same.optim, same.train, same.parallel, ranks, versions


def open_before(past: Past, step: int, path: Path | None = None) -> train.Run:
    """Open the run at checkpoint `path` (None: the newest intact one before `step`, or the start). Raises CannotReplay."""
    directory, state, world = past.directory, past.state, past.world
    begun = [era for era in state.history if era["step"] < step]
    if not begun:
        begins = state.history[0]["step"]
        raise UserError(f"{directory} begins at step {begins}; to replay earlier steps, name the run that it started from")
    era = begun[-1]
    since = era["step"]  # where the eras begin that had the same conditions
    for other in reversed(begun):
        if conditions(other) != conditions(era):
            break
        since = other["step"]
    config = settings.from_record(era["settings"], f"the settings of {directory} from step {era['step']} on")
    if config.numerics.numerics == "native" and config.train.threads != "auto":
        torch.set_num_threads(config.train.threads)  # `join` set those of the run's last settings
    if not config.parallel.record.any_ranks and world.size != era["world_size"]:
        computed = f"step {step} was computed on {plural(era['world_size'], 'rank')}"
        raise CannotReplay(f"{computed}, and its bits depend on their number; use {command.again(era['world_size'], 0)}")
    dataset = open_mixture(settings.replace(config.data, **past.moved), config.model.vocab_size)
    if mixtures_seen(dataset.identity, step) != mixtures_seen(dataset.translate(state.dataset), step):
        problem = f"{dataset} is not what the run was trained on: its tokens or their shares differ"
        raise UserError(f"{problem}; set --tokens to the current location of the tokens (for a mixture, with weights)")
    if path is None:
        for candidate in reversed(retention.published(directory / "checkpoints")):
            if retention.step_of(candidate) < step and retention.find_damage(candidate) is None:
                path = candidate
                break
    if path:
        start = Start(checkpoint.load_state(path, dataset), path)
    else:
        began = settings.from_record(state.history[0]["settings"], str(directory))
        start = search(directory / "new", began.run.resume, began.model.init_from, dataset)  # as when it first started
        start.state.mixture_order = state.mixture_order
    if start.state.step < since:
        gone = f"no intact checkpoint remains between that step and step {step} (a larger --keep_last keeps more)"
        raise CannotReplay(f"{CHANGED} at step {since}, and {gone}")
    ours = checkpoint.versions(config, world.device)
    if ours != era["versions"] and config.numerics.numerics == "native":
        say(f"warning: the step was computed with {era['versions']}; this machine has {ours}")
    run = train.build(config, world, dataset, start)
    run.engine.warm_up()
    return run


def replay(run: train.Run, last: int) -> dict[int, tuple[float, float]]:
    """Recompute the steps up to `last`. Returns the loss and the gradient norm of each. All ranks must call this."""
    upcoming = [(s, m) for s in range(run.state.step, last) for m in run.world.share(run.config.micro_batches)]
    prefetcher, found = data.Prefetcher(run.batches, upcoming, run.world.device), {}
    while run.state.step < last:
        found[run.state.step] = train.update(run, prefetcher)  # the right side runs first, so the key is the new step
    prefetcher.close()
    return found


@torch.no_grad()
def sequence_losses(run: train.Run, step: int) -> list[float]:
    """Return the current loss of each sequence of update `step`. All ranks must call this."""
    batches, each = run.batches, run.config.train.micro_batch_size
    losses = run.world.zeros(run.config.sequences_per_update)
    with run.engine.evaluating() as model:
        for micro_batch in run.world.share(run.config.micro_batches):
            tokens = torch.from_numpy(batches.batch(step, micro_batch)).to(run.world.device)  # [micro_batch_size, seq_len + 1]
            for i, sequence in enumerate(tokens):
                with run.engine.autocast():
                    losses[micro_batch * each + i] = model(sequence[None, :-1], sequence[None, 1:]).to(losses.dtype)
    return run.world.sum_over_ranks(losses).tolist()


def show_sequences(run: train.Run, losses: list[float]) -> list[str]:
    """Return the sequences of the next update, worst of their `losses` first: the losses, locations and text."""
    batches, dataset = run.batches, run.dataset
    tokenizer = load_if_readable(dataset.tokenizer)
    datasets, windows = batches.sequences(batches.first_sequence(run.state.step), len(losses))
    rows = []
    for i in sorted(range(len(losses)), key=lambda i: -badness(losses[i])):
        directory, stream = dataset.datasets[datasets[i]].directory, batches.streams[datasets[i]]
        shard, position = stream.locate(windows[i] * batches.seq_len)
        line = f"  {losses[i]:8.4f}  sequence {i}: {directory}/{shard.name} from token {position:,}"
        tokens = stream.read_window(windows[i], batches.seq_len)[:-1].tolist()
        documents = [str(at) for at, token in enumerate(tokens) if token == dataset.eot_token]
        if documents:
            line += f"; documents begin at {', '.join(documents[:6])}"
        text = tokenizer.decode(tokens) if tokenizer else " ".join(map(str, tokens))
        rows.append(f"{line}\n            {one_line(text)[:WIDTH]}")
    return rows


def verify(past: Past, config: ReplayConfig) -> int:
    """Recompute each kept checkpoint of a segment from the previous one, and compare. Returns 1 if any differs."""
    kept = {retention.step_of(path): path for path in retention.published(past.directory / "checkpoints")}
    if not kept:
        raise UserError(f"{past.directory} has no checkpoints/; name a run directory, such as runs/laptop")
    first = min(kept) if config.from_ == "auto" else config.from_
    last = config.to or max(kept)
    if config.step or first not in {0, *kept} or not first < last <= past.state.step:
        steps = f"{past.directory} has checkpoints at steps {', '.join(map(str, kept))} (--keep_last sets how many are kept)"
        raise UserError(f"--verify needs --from (0 or the step of a checkpoint) and a later --to, without --step; {steps}")
    status, between = 0, [step for step in kept if first < step < last]
    for start, end in pairwise([first, *between, last]):
        before = kept[start].name if start in kept else "the beginning"
        after = kept[end].name if end in kept else f"step {end}"
        try:
            problem = difference(past, kept.get(start), kept.get(end), end)
        except CannotReplay as reason:
            say(f"{after} cannot be checked: {reason}")
            continue
        if problem:
            say(f"{after} DOES NOT follow from {before}: {problem}")
            status = 1
        else:
            say(f"{after} follows from {before}")
    return status


def difference(past: Past, start: Path | None, end: Path | None, last: int) -> str:
    """Say how step `last` differs from a replay that begins at checkpoint `start` (None: the run's start); empty if not.

    The tensors must equal checkpoint `end`, if given, and the losses since `start` must equal the recorded ones. Raises
    CannotReplay.
    """
    for path in (start, end):
        if path and (damage := retention.find_damage(path)):
            return damage
    run, records = open_before(past, last, start), read_steps(past)
    if end is None and last not in records:
        raise CannotReplay(f"step {last} has neither a checkpoint nor a line in metrics.jsonl (see --log_every)")
    same, said = compare(replay(run, last), records)
    problems = [] if same else [said]
    if end:
        snapshot = take_snapshot(run.engine)
        with tempfile.TemporaryDirectory() as temporary:
            again = ChainMap(*past.world.all_gather(snapshot.write(Path(temporary))))
        kept = retention.read_manifest(end)
        if not again.keys() <= kept.keys():
            raise CannotReplay("its tensors are divided among other files, as --max_shard_bytes of version 0.1.0 could do")
        if others := [name for name in sorted(again) if again[name] != kept.get(name)]:
            problems.insert(0, f"{', '.join(others)} would differ")
    return "; ".join(problems)
