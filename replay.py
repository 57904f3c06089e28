"""Look back at a step of a run: `python replay.py runs/NAME --step=12345`. Was it the data, or the machine?

The steps since the newest intact checkpoint before it are computed again. If loss and gradient norm are those of metrics.jsonl,
bit for bit, the machine did what it should. The sequences of the step, worst loss first, then show what the model saw. If they
are not, the first step that differs is named. Nothing is written into the run directory.

A run under --strategy=exact is replayed by one process, whatever the number of ranks it had. Other runs need their own number:
`torchrun --standalone --nproc_per_node=W replay.py ...`.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # which python -I and PYTHONSAFEPATH=1 leave out

import settings
from common import cli, errors
from hardware import host

if __name__ == "__main__":
    with errors.user_errors():
        host.prepare_torch()

import json
import shutil
import tempfile
from collections import ChainMap
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import tyro

import data
import train
from checkpoints import checkpoint, lookup, retention
from checkpoints.checkpoint import Era, TrainState
from checkpoints.snapshot import take_snapshot
from common.errors import UserError, plural
from dataset import tokenizer
from dataset.tokens import read_windows
from parallel.engine import full_tensor
from parallel.world import World
from reports.log import Record, read_records

CHANGED = "settings, versions, the hardware or the number of ranks changed"
SHOWN = 8  # sequences, and tensors


@dataclass(frozen=True)
class ReplayConfig:
    run: tyro.conf.Positional[str]
    """A run directory."""
    step: int = 0
    """The step to look at, as metrics.jsonl counts steps (0: the last one recorded)."""
    steps: int = 1
    """How many steps to look at, from --step on."""
    json: bool = False
    """Print one JSON object with every sequence and tensor, not the most striking ones alone."""
    verify: bool = False
    """Check that each kept checkpoint follows from the one before it, sha256 for sha256."""
    tokens: str = ""
    """Where the dataset is now (empty: where the run found it)."""


class CannotReplay(UserError):
    """A step cannot be computed again on these ranks, or from the checkpoints that are left."""


@dataclass
class Replayed:
    """A step that was computed again."""

    step: int
    skip_steps: str  # the flag's value that leaves out this step's batch, too
    loss: float
    grad_norm: float
    recorded: dict | None  # the record of metrics.jsonl, if there is one
    norms: dict[str, float] = field(default_factory=dict)  # gradient norm of each tensor, before clipping
    updates: dict[str, float] = field(default_factory=dict)  # size of each tensor's update, relative to its norm
    sequences: list[dict] = field(default_factory=list)  # worst loss first

    @property
    def same(self) -> bool | None:
        """Whether loss and gradient norm have the recorded bits; None without a record."""
        return self.recorded and repr([self.recorded["loss"], self.recorded["grad_norm"]]) == repr([self.loss, self.grad_norm])


def main(config: ReplayConfig) -> int:
    """Replay and print. Returns 1 if something is not what the run recorded. Raises UserError."""
    newest, warnings = lookup.find(config.run)
    state = checkpoint.load_state(newest)
    world, failed = train.join(state.config), True
    try:
        with world.naming_missing_ranks():
            status = verify(config, state, world) if config.verify else look_back(config, state, world, warnings)
        failed = False
    finally:
        world.leave(failed)
    return status


def look_back(config: ReplayConfig, state: TrainState, world: World, warnings: list[str]) -> int:
    """Replay the steps and print what they saw. Returns 1 if one of them is not what the run recorded. Raises UserError."""
    directory = Path(config.run)
    records = recorded_steps(directory / "metrics.jsonl")
    step = config.step or max(records, default=0)
    last = step + config.steps - 1
    if step < 1 or last > max(records, default=0):
        raise UserError(f"--step={step} --steps={config.steps}: {directory} has steps 1 to {max(records, default=0)}")
    if world.is_master and not config.json:
        for warning in warnings:
            print(warning, flush=True)
    replayed, first = [], step
    while first <= last:  # each era with its own settings
        end = min([last, *(era["step"] for era in eras(state) if era["step"] >= first)])
        replayed += replay_era(config, directory, state, world, range(first, end + 1), records)
        first = end + 1
    if world.is_master:
        if config.json:
            print(json.dumps({"run": str(directory), "steps": [asdict(r) | {"same": r.same} for r in replayed]}))
        else:
            for line in verdict(replayed):
                print(line)
            for i, r in enumerate(replayed):
                if r.step >= step:
                    tell_step(r, replayed[:i])
    return int(any(r.same is False for r in replayed))


def recorded_steps(path: Path) -> dict[int, Record]:
    """The training records of a metrics.jsonl by step. Raises UserError where it cannot be read."""
    return {record["step"]: record for _, record in read_records(path) if record and "loss" in record and "grad_norm" in record}


def eras(state: TrainState) -> list[Era]:
    """The eras of a run whose steps were computed alike, each from its `step` on. What changes no bit begins none."""
    found = []
    for era in state.history:
        config = settings.from_record(era["settings"], f"its settings from step {era['step']} on")
        same = settings.replace(config, check_replicas_every=0, timeout_minutes=1, max_skipped_steps=1)
        ranks = 0 if same.parallel.strategy == "exact" else era["world_size"]
        order = config.run.seed, config.data.order, config.skipped_batches
        computed = same.model, same.optim, same.train, same.parallel, order, ranks, era["versions"]
        if not found or computed != found[-1][1]:
            found.append((era, computed))
    return [era for era, _ in found]


def open_before(
    config: ReplayConfig, directory: Path, state: TrainState, world: World, step: int, start: Path | None = None
) -> train.Run:
    """The run as it was before `step`, at its newest intact checkpoint before it (or at `start`), or at its beginning.

    Raises CannotReplay where `step` cannot be computed from there, here; UserError where something is missing.
    """
    begun = [era for era in eras(state) if era["step"] < step]
    if not begun:
        begins = state.history[0]["step"]
        raise UserError(f"{directory} begins at step {begins}; earlier steps are those of the run it came from")
    era = begun[-1]
    training = settings.from_record(era["settings"], f"{directory} from step {era['step']} on")
    for path in reversed(retention.published(directory / "checkpoints")) if start is None else ():
        if retention.step_of(path) < step and retention.fault(path) is None:
            start = path
            break
    if config.tokens:
        training = settings.replace(training, tokens=config.tokens)
    pretrained = None
    if start is None and state.origins:
        source = lookup.find_origin(directory, state.origins[-1])
        began = settings.from_record(state.history[0]["settings"], str(directory)).run
        start, pretrained = (None, source) if began.resume in ("auto", "off") else (source, None)
    before = checkpoint.load_state(start) if start else TrainState()
    if before.step < era["step"]:
        raise CannotReplay(
            f"{CHANGED} at step {era['step']}, and no intact checkpoint between it and step {step} is left (--keep_last)"
        )
    if training.parallel.strategy != "exact" and world.size != era["world_size"]:
        raise CannotReplay(
            f"step {step} was computed on {plural(era['world_size'], 'rank')}, and its bits depend on that; use torchrun "
            f"--standalone --nproc_per_node={era['world_size']} replay.py {directory} "
            + ("--verify" if config.verify else f"--step={step}")
        )
    dataset = data.open_mixture(training.data.tokens, training.model.vocab_size)
    if dataset.identity != state.dataset:
        where = "--tokens says where they are now, of a mixture each with its weight"
        raise UserError(f"{dataset} holds other tokens, or other shares of them, than the run was trained on; {where}")
    model = settings.resolve_model(training.model, dataset.vocab_size)  # the run may be an old one
    training = replace(training, model=model, optim=settings.resolve_schedule(training.optim, training.train.steps))
    ours = checkpoint.versions(world.device)
    if world.is_master and ours != era["versions"]:
        print(f"warning: the step was computed with {era['versions']}; here are {ours}", file=sys.stderr)
    run = train.build(training, world, dataset, lookup.Start(before, start, pretrained))
    run.engine.warm_up(training.train.micro_batch_size, training.model.seq_len)
    return run


def replay_era(
    config: ReplayConfig, directory: Path, state: TrainState, world: World, steps: range, records: dict[int, Record]
) -> list[Replayed]:
    """Look closely at `steps`, which are of one era. Its model is freed at the end, before another is made."""
    run = open_before(config, directory, state, world, steps[0])
    if world.is_master and not config.json:
        print(f"replaying steps {run.state.step + 1} to {steps[-1]}", flush=True)
    return replay(run, steps[-1], steps, records)


def replay(run: train.Run, last: int, wanted: range, records: dict[int, dict]) -> list[Replayed]:
    """Compute the steps up to `last` again, and look closely at those that are `wanted`. All ranks must call it."""
    upcoming = [(s, m) for s in range(run.state.step, last) for m in run.world.share(run.config.micro_batches)]
    prefetcher = data.Prefetcher(run.batches, upcoming, run.world.device)
    norms = {}

    def note_norms() -> None:
        for name, parameter in run.engine.parameters.items():
            if parameter.grad is not None:
                norms[name] = full_tensor(torch.linalg.vector_norm(parameter.grad)).item() / run.engine.scaler.get_scale()

    replayed = []
    while run.state.step < last:
        step = run.state.step + 1
        sequences = look_at_sequences(run) if step in wanted else []
        before = {n: p.detach().clone() for n, p in run.engine.parameters.items()} if step in wanted else {}
        loss, grad_norm = train.update(run, prefetcher, note_norms)
        updates = {n: relative_change(old, run.engine.parameters[n].detach()) for n, old in before.items()}
        skip = ",".join(filter(None, [run.config.data.skip_steps, str(run.batches.batch_number(step - 1) + 1)]))
        replayed.append(Replayed(step, skip, loss, grad_norm, records.get(step), dict(norms), updates, sequences))
    prefetcher.close()
    return replayed


def relative_change(before: torch.Tensor, after: torch.Tensor) -> float:
    """The norm of the change of a tensor over the norm that it had."""
    change, norm = (full_tensor(torch.linalg.vector_norm(t)).item() for t in (after - before, before))
    return change / norm if norm else float("inf") if change else 0.0


@torch.no_grad()
def look_at_sequences(run: train.Run) -> list[dict]:
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
    if not run.world.is_master:
        return []
    text = tokenizer.load(run.dataset.tokenizer) if run.dataset.tokenizer else None
    datasets, windows = batches.sequences(batches.first_sequence(step), len(losses))
    sequences = read_windows(batches.streams, datasets, windows, batches.seq_len)
    rows = []
    for number, (loss, dataset, window, tokens) in enumerate(zip(losses, datasets, windows, sequences, strict=True)):
        shard, position = batches.streams[dataset].locate(int(window) * batches.seq_len)
        rows.append(
            {
                "sequence": number,
                "loss": loss,
                "dataset": str(run.dataset.datasets[dataset].directory),
                "shard": shard.name,
                "position": position,
                "documents_begin": [i for i, token in enumerate(tokens[:-1].tolist()) if token == run.dataset.eot_token],
                "text": text.decode(tokens[:-1]) if text else " ".join(map(str, tokens[:-1].tolist())),
            }
        )
    return sorted(rows, key=lambda row: -row["loss"])


def verdict(replayed: list[Replayed]) -> list[str]:
    """Whether the steps are those of the run."""
    compared = [r for r in replayed if r.recorded]
    different = [r for r in compared if not r.same]
    if not compared:
        return ["metrics.jsonl has no record of these steps to compare with"]
    if not different:
        recorded = plural(len(compared), "recorded step")
        return [f"{recorded}: loss and gradient norm are the recorded ones, bit for bit; look at the data"]
    first = different[0]
    lines = [
        f"step {first.step} is the first that differs: loss {first.loss!r}, recorded {first.recorded['loss']!r}; "
        f"gradient norm {first.grad_norm!r}, recorded {first.recorded['grad_norm']!r}"
    ]
    if compared[-1].same:
        lines.append("later steps agree again: only what was recorded is wrong, not what was computed")
    elif first is not compared[-1]:
        lines.append("the last differs, too: the state before the first was not this one, or the machine computed otherwise")
    return lines


def tell_step(r: Replayed, before: list[Replayed]) -> None:
    """Print one step: its sequences, worst first, and its tensors, those whose gradients are most out of line first."""
    width = max(60, shutil.get_terminal_size().columns)
    compared = "" if r.recorded else "  (not logged, so not compared; see --log_every)"
    print(f"\nstep {r.step}  loss {r.loss:.4f}  gradient norm {r.grad_norm:.3f}{compared}\n\nsequences, worst loss first")
    for row in r.sequences[:SHOWN]:
        begins = f"; documents begin at {', '.join(map(str, row['documents_begin'][:6]))}" if row["documents_begin"] else ""
        place = f"{row['dataset']}/{row['shard']} from token {row['position']:,}"
        print(f"  {row['loss']:8.4f}  sequence {row['sequence']}: {place}{begins}")
        print(f"            {row['text'][:width].encode('unicode_escape').decode()[: width - 13]}")
    if len(r.sequences) > SHOWN:
        print(f"  ... {len(r.sequences) - SHOWN} more: --json")
    usual = {name: median(b.norms[name] for b in before if name in b.norms) for name in r.norms if before}
    ratio = {name: r.norms[name] / usual[name] if usual.get(name) else 1.0 for name in r.norms}
    usually = f", and how many times the median of {plural(len(before), 'step')} before it is" if before else ""
    print(f"\ntensors by gradient norm{usually}")
    for name in sorted(r.norms, key=lambda name: (-ratio[name], -r.norms[name]))[:SHOWN]:
        times = f"  {ratio[name]:7.1f} times" if before else ""
        print(f"  {r.norms[name]:10.4g}{times}  {name}, changed by {r.updates[name]:.2%}")
    largest = max(r.updates, key=r.updates.get)
    print(f"largest update: {largest}, by {r.updates[largest]:.2%} of its norm")
    print(f"--skip_steps={r.skip_steps} leaves this batch out")


def verify(config: ReplayConfig, state: TrainState, world: World) -> int:
    """Compute each kept checkpoint from the one before it and compare sha256. Returns 1 if one does not follow."""
    if config.step:
        raise UserError("--verify looks at all kept checkpoints; leave --step out")
    directory = Path(config.run)
    kept = retention.published(directory / "checkpoints")
    if len(kept) < 2:
        has = plural(len(kept), "checkpoint")
        raise UserError(f"{directory} has {has}; --verify compares each with the one before (see --keep_last)")
    wrong = 0
    for start, end in pairwise(kept):
        try:
            problem = difference(config, directory, state, world, start, end)
            found = f"DOES NOT follow from {start.name}: {problem}" if problem else f"follows from {start.name}"
        except CannotReplay as reason:
            problem, found = "", f"cannot be checked: {reason}"
        if world.is_master:
            print(f"{end.name} {found}", flush=True)
        wrong += bool(problem)
    return int(wrong > 0)


def difference(config: ReplayConfig, directory: Path, state: TrainState, world: World, start: Path, end: Path) -> str:
    """In what checkpoint `end` is another than computed from checkpoint `start`. Empty if in nothing. Raises CannotReplay."""
    if problem := retention.fault(start) or retention.fault(end):
        return problem
    last = retention.step_of(end)
    run = open_before(config, directory, state, world, last, start)
    replay(run, last, range(0), {})
    snapshot = take_snapshot(run.engine, run.optimizers, run.config, world)
    with tempfile.TemporaryDirectory() as temporary:
        again = ChainMap(*world.all_gather(snapshot.write(Path(temporary))))
    kept = retention.read_manifest(end)
    different = [name for name in sorted(again) if again[name] != kept.get(name)]
    return f"{', '.join(different)} would be others" if different else ""


if __name__ == "__main__":
    errors.end_with(lambda: main(cli.parse(ReplayConfig, sys.argv[1:], __doc__)))
