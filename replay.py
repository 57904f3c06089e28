"""Look back at a step of a run: `python replay.py runs/NAME --step=12345`. Was it the data, or the machine?

The steps since the newest intact checkpoint before it are computed again. If loss and gradient norm are those of metrics.jsonl,
bit for bit, the machine did what it should, and the sequences of the step show what the model saw. Else the first step that
differs is named. Nothing is written into the run directory. A run under --strategy=exact is replayed by any number of ranks,
other runs by their own: `torchrun --standalone --nproc_per_node=W replay.py ...`.
"""

from dataclasses import dataclass

import tyro

import command
from common import cli
from common.records import Count


@dataclass(frozen=True)
class ReplayConfig:
    run: tyro.conf.Positional[str]
    """A run directory."""
    step: Count = 0
    """The step to look at, as metrics.jsonl counts steps (0: the last one recorded)."""
    sequences: Count = 8
    """How many sequences of the step to show, worst loss first (0: all)."""
    verify: bool = False
    """Check that each kept checkpoint follows from the one before it, sha256 for sha256."""
    tokens: str = ""
    """Where the dataset is now (empty: where the run found it)."""


if __name__ == "__main__":
    command.run("replay", lambda args: cli.parse(ReplayConfig, args, __doc__))

import shlex
import shutil
import sys
import tempfile
from collections import ChainMap
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path

import torch

import data
import settings
import train
from checkpoints import checkpoint, lookup, retention
from checkpoints.checkpoint import Era, TrainState
from checkpoints.snapshot import take_snapshot
from common.errors import UserError, plural
from dataset import tokenizer
from dataset.tokens import read_windows
from parallel.world import World
from reports.log import read_records

CHANGED = "settings, versions, the hardware or the number of ranks changed"


class CannotReplay(UserError):
    """A step cannot be computed again on these ranks, or from the checkpoints that are left."""


@dataclass(frozen=True)
class Past:
    """The run to look back at, on the ranks that are here."""

    directory: Path
    state: TrainState  # of its newest checkpoint
    world: World
    tokens: str  # where the dataset is now, if it is elsewhere

    def say(self, message: str) -> None:
        """Print a line, once."""
        if self.world.is_master:
            print(message, flush=True)


def main(config: ReplayConfig) -> int:
    """Replay and print. Returns 1 if something is not what the run recorded. Raises UserError."""
    newest, warnings = lookup.find(config.run)
    state = checkpoint.load_state(newest)
    world = train.join(state.config)
    past = Past(Path(config.run), state, world, config.tokens)
    with world.reporting_lost_ranks():
        for warning in warnings:
            past.say(warning)
        status = verify(past, config.step) if config.verify else look_back(past, config.step, config.sequences)
        world.leave()
    return status


def look_back(past: Past, step: int, count: int) -> int:
    """Replay up to `step` (0: the last one), and show `count` of its sequences. Returns 1 if a step is not as recorded."""
    lines = read_records(past.directory / "metrics.jsonl")
    records = {record["step"]: record for _, record in lines if record and "loss" in record and "grad_norm" in record}
    last = max(records, default=0)
    step = step or last
    if not 1 <= step <= last:
        raise UserError(f"--step={step}: {past.directory} has steps 1 to {last}")
    run = open_before(past, step)
    past.say(f"replaying steps {run.state.step + 1} to {step}")
    found = replay(run, step - 1)
    sequences = look_at_sequences(run)
    found |= replay(run, step)
    recorded = {s: (records[s]["loss"], records[s]["grad_norm"]) for s in found if s in records}
    different = [s for s in recorded if repr(recorded[s]) != repr(found[s])]  # by repr, NaN is like NaN
    past.say(verdict(found, recorded, different))
    loss, grad_norm = found[step]
    compared = "" if step in recorded else "  (not logged, so not compared; see --log_every)"
    past.say(f"\nstep {step}  loss {loss:.4f}  gradient norm {grad_norm:.3f}{compared}\n\nsequences, worst loss first")
    for sequence in sequences[: count or None]:
        past.say(sequence)
    if 0 < count < len(sequences):
        past.say(f"  ... {len(sequences) - count} more: --sequences=0")
    skip = filter(None, [run.config.data.skip_steps, str(run.batches.batch_number(step - 1) + 1)])
    past.say(f"--skip_steps={','.join(skip)} leaves this batch out")
    return int(bool(different))


def verdict(found: dict[int, tuple], recorded: dict[int, tuple], different: list[int]) -> str:
    """Whether the (loss, gradient norm) of the steps are those of the run."""
    if not recorded:
        return "metrics.jsonl has no record of these steps to compare with"
    if not different:
        steps = plural(len(recorded), "recorded step")
        return f"{steps}: loss and gradient norm are the recorded ones, bit for bit; look at the data"
    step = different[0]
    (loss, norm), (loss_before, norm_before) = found[step], recorded[step]
    differ = f"loss {loss!r}, recorded {loss_before!r}; gradient norm {norm!r}, recorded {norm_before!r}"
    return f"step {step} is the first that differs: {differ}"


def conditions(era: Era) -> tuple:
    """What the bits of a step depend on besides the state before it."""
    config = settings.from_record(era["settings"], f"the settings from step {era['step']} on")
    same = settings.replace(config, check_replicas_every=0, timeout_minutes=1, max_skipped_steps=1)
    ranks = 0 if same.parallel.strategy == "exact" else era["world_size"]
    order = config.run.seed, config.data.order, config.skipped_batches
    return same.model, same.optim, same.train, same.parallel, order, ranks, era["versions"]


def open_before(past: Past, step: int, start: Path | None = None) -> train.Run:
    """The run at its newest intact checkpoint before `step` (or at `start`), or at its beginning. Raises CannotReplay."""
    directory, state, world = past.directory, past.state, past.world
    begun = [era for era in state.history if era["step"] < step]
    if not begun:
        begins = state.history[0]["step"]
        raise UserError(f"{directory} begins at step {begins}; earlier steps are those of the run it came from")
    era = begun[-1]
    since = list(takewhile(lambda other: conditions(other) == conditions(era), reversed(begun)))[-1]["step"]
    config = settings.from_record(era["settings"], f"{directory} from step {era['step']} on")
    earlier = [path for path in retention.published(directory / "checkpoints") if retention.step_of(path) < step]
    start = start or next((path for path in reversed(earlier) if retention.find_damage(path) is None), None)
    pretrained = None
    if start is None and state.origins:
        source = lookup.find_origin(directory, state.origins[-1])
        began = settings.from_record(state.history[0]["settings"], str(directory)).run
        start, pretrained = (None, source) if began.resume in ("auto", "off") else (source, None)
    before = checkpoint.load_state(start) if start else TrainState()
    if before.step < since:
        gone = f"no intact checkpoint between it and step {step} is left (--keep_last)"
        raise CannotReplay(f"{CHANGED} at step {since}, and {gone}")
    if config.parallel.strategy != "exact" and world.size != era["world_size"]:
        raise CannotReplay(
            f"step {step} was computed on {plural(era['world_size'], 'rank')}, and its bits depend on that; use torchrun "
            f"--standalone --nproc_per_node={era['world_size']} replay.py {shlex.join(sys.argv[1:])}"
        )
    dataset = data.open_mixture(past.tokens or config.data.tokens, config.model.vocab_size)
    if dataset.identity != state.dataset:
        problem = f"{dataset} holds other tokens, or other shares of them, than the run was trained on"
        raise UserError(f"{problem}; --tokens says where they are now, of a mixture each with its weight")
    model = settings.resolve_model(config.model, dataset.vocab_size)  # the run may be an old one
    config = replace(config, model=model, optim=settings.resolve_schedule(config.optim, config.train.steps))
    ours = checkpoint.versions(world.device)
    if ours != era["versions"]:
        past.say(f"warning: the step was computed with {era['versions']}; here are {ours}")
    run = train.build(config, world, dataset, lookup.Start(before, start, pretrained))
    run.engine.warm_up(config.train.micro_batch_size, config.model.seq_len)
    return run


def replay(run: train.Run, last: int) -> dict[int, tuple[float, float]]:
    """Compute the steps up to `last` again. Returns the loss and the gradient norm of each. All ranks must call it."""
    upcoming = [(s, m) for s in range(run.state.step, last) for m in run.world.share(run.config.micro_batches)]
    prefetcher, found = data.Prefetcher(run.batches, upcoming, run.world.device), {}
    while run.state.step < last:
        found[run.state.step] = train.update(run, prefetcher)  # which is the step after it
    prefetcher.close()
    return found


@torch.no_grad()
def look_at_sequences(run: train.Run) -> list[str]:
    """The sequences of the coming update, worst loss first: their losses, where they come from, and their text."""
    batches, step, each = run.batches, run.state.step, run.config.train.micro_batch_size
    losses = run.world.zeros(run.config.sequences_per_update)
    run.engine.module.eval()  # without dropout
    for micro_batch in run.world.share(run.config.micro_batches):
        tokens = torch.from_numpy(batches.batch(step, micro_batch)).to(run.world.device)  # [micro_batch_size, seq_len + 1]
        for i, sequence in enumerate(tokens):
            with run.engine.autocast():
                losses[micro_batch * each + i] = run.engine.eval_model(sequence[None, :-1], sequence[None, 1:]).to(losses.dtype)
    run.engine.module.train()
    losses = run.world.sum_over_ranks(losses).tolist()
    text = tokenizer.load(run.dataset.tokenizer) if run.dataset.tokenizer else None
    datasets, windows = batches.sequences(batches.first_sequence(step), len(losses))
    sequences = read_windows(batches.streams, datasets, windows, batches.seq_len)[:, :-1].tolist()
    width = max(60, shutil.get_terminal_size().columns) - 13
    rows = []
    for i in sorted(range(len(losses)), key=lambda i: -losses[i]):
        shard, position = batches.streams[datasets[i]].locate(int(windows[i]) * batches.seq_len)
        documents = [str(at) for at, token in enumerate(sequences[i]) if token == run.dataset.eot_token][:6]
        begins = f"; documents begin at {', '.join(documents)}" if documents else ""
        content = text.decode(sequences[i]) if text else " ".join(map(str, sequences[i]))
        rows.append(
            f"  {losses[i]:8.4f}  sequence {i}: {run.dataset.datasets[datasets[i]].directory}/{shard.name} "
            f"from token {position:,}{begins}\n            {content.encode('unicode_escape').decode()[:width]}"
        )
    return rows


def verify(past: Past, step: int) -> int:
    """Compute each kept checkpoint from the one before it and compare sha256. Returns 1 if one does not follow."""
    if step:
        raise UserError("--verify looks at all kept checkpoints; leave --step out")
    kept = retention.published(past.directory / "checkpoints")
    if len(kept) < 2:
        has = plural(len(kept), "checkpoint")
        raise UserError(f"{past.directory} has {has}; --verify compares each with the one before (see --keep_last)")
    wrong = 0
    for start, end in pairwise(kept):
        try:
            problem = difference(past, start, end)
            found = f"DOES NOT follow from {start.name}: {problem}" if problem else f"follows from {start.name}"
        except CannotReplay as reason:
            problem, found = "", f"cannot be checked: {reason}"
        past.say(f"{end.name} {found}")
        wrong += bool(problem)
    return int(wrong > 0)


def difference(past: Past, start: Path, end: Path) -> str:
    """In what checkpoint `end` is another than computed from checkpoint `start`. Empty if in nothing. Raises CannotReplay."""
    if problem := retention.find_damage(start) or retention.find_damage(end):
        return problem
    run = open_before(past, retention.step_of(end), start)
    replay(run, retention.step_of(end))
    snapshot = take_snapshot(run.engine, run.config.checkpoint.max_shard_bytes)
    with tempfile.TemporaryDirectory() as temporary:
        again = ChainMap(*past.world.all_gather(snapshot.write(Path(temporary))))
    kept = retention.read_manifest(end)
    different = [name for name in sorted(again) if again[name] != kept.get(name)]
    return f"{', '.join(different)} would be others" if different else ""
