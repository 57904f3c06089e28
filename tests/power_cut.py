"""Is anything lost if one file operation fails, or if the power fails at any moment? tests/test_power_cut.py runs this.

Saves, prunes and resumes the checkpoints of a tiny model, prepares a dataset and exports a model. They work on a disk (disk.py)
where each operation in turn fails in every possible way. Then the power is cut after each operation, and everything restarts
from each state that the disk may be in. After each case:

- checkpoints: one is intact and at least as new as the last one announced as saved. The run continues and saves.
- a dataset: repeating the command makes it, byte for byte.
- an export: it is complete or absent, and complete if it was announced.
"""

import contextlib
import io
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

import disk
import export
import prepare_data
from conftest import damage
from disk import Disk, Fault
from lockstep import settings
from lockstep.checkpoints import checkpoint, retention
from lockstep.common import cli
from lockstep.common.errors import RunError, UserError
from lockstep.parallel.world import World
from lockstep.settings import Config
from model import initial_weights, on_meta

DATASET = SimpleNamespace(identity="0" * 64, tokenizer=None, eot_token=0, vocab_size=0)
MODEL = settings.replace(Config(), architecture="gpt2", vocab_size=8, n_layer=1, n_head=1, n_embd=2, seq_len=4)
MODEL = settings.replace(Config(), **cli.flat_values(settings.resolve_model(MODEL.model, 8)))
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # flushing takes no time there
EXPECTED = (UserError, RunError)  # how a command that cannot continue ends, without a traceback


class Miniature:
    """A run without training: it starts from what is in `checkpoints` and saves."""

    def __init__(self, checkpoints: Path, shard_bytes: int = 10**9, **keep):
        found, _ = retention.newest(checkpoints)
        checkpoint.SHARD_BYTES = shard_bytes
        self.warnings = []
        log = SimpleNamespace(say=lambda _: None, warn=self.warnings.append)
        world = World(0, 1, 1, torch.device("cpu"))
        config = settings.replace(MODEL, **dict(async_save=False, save_every=0) | keep)
        self.state = checkpoint.load_state(found) if found else checkpoint.TrainState()
        self.state.begin(config, DATASET.identity, world, found is not None)
        model = on_meta(config.model)
        weights = dict(initial_weights(model, self.state.step))
        self.engine = SimpleNamespace(
            module=model,
            world=world,
            strategy=SimpleNamespace(writers=1),
            parameters=weights,
            optimizer_state=lambda: {f"{name}.exp_avg": tensor for name, tensor in weights.items()},
            gather=lambda tensors, _: tensors,
            scaler=SimpleNamespace(state_dict=dict),
        )
        self.checkpoints = checkpoint.Checkpoints(checkpoints, config.checkpoint, self.engine, DATASET, log)
        self.checkpoints.begin(self.state.step)

    def save(self, step: int, val_loss: float = math.nan) -> bool:
        """Save as if at `step`, and evaluate. Returns whether the checkpoint is announced as saved."""
        self.state.step, before = step, len(self.warnings)
        self.checkpoints.save(self.state, now=True)
        self.checkpoints.finish(self.state)
        announced = not any("could not be written" in warning for warning in self.warnings[before:])
        self.checkpoints.evaluated(self.state, val_loss)
        return announced


# ---------------------------------------------------------------------------------------------------------------------
# Scenarios: `prepare` makes a directory, `act` works there and reports what is saved, and `problems` judges the outcome.


@dataclass(frozen=True)
class Saves:
    """A run that continues from checkpoints, some of them damaged, and saves, with evaluations in between."""

    name: str
    intact: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()
    saves: tuple[int, ...] = (82, 84, 86)
    keep_last: int = 2
    keep_best: int = 0
    shard_bytes: int = 10**9

    def prepare(self, root: Path) -> None:
        for step in sorted(self.intact + self.damaged):
            Miniature(root / "checkpoints", keep_last=0, keep_best=1).save(step, float(step))  # the first one is the best
        for step in self.damaged:
            damage(retention.step_directory(root / "checkpoints", step) / "model.safetensors")

    def act(self, root: Path, promise) -> None:
        promise(max(self.intact, default=0))
        run = Miniature(root / "checkpoints", self.shard_bytes, keep_last=self.keep_last, keep_best=self.keep_best)
        for step in self.saves:
            try:
                saved = run.save(step, 100.0 - step)
            except (OSError, *EXPECTED) as error:
                raise AssertionError(f"training ended: {error}") from error
            if saved:
                promise(step)

    def problems(self, root: Path, promised: int | None) -> list[str]:
        checkpoints, promised = root / "checkpoints", promised or max(self.intact, default=0)
        found, _ = retention.newest(checkpoints)
        step = retention.step_of(found) if found else 0
        if step < promised:
            return [f"step {promised} was saved, and the newest intact checkpoint is of step {step}"]
        run = Miniature(checkpoints, keep_last=self.keep_last, keep_best=self.keep_best)
        for more in (200, 300):
            if not run.save(more) or retention.newest(checkpoints)[0] != retention.step_directory(checkpoints, more):
                return [f"step {more} could not be saved afterwards: {run.warnings}"]
        return []


@dataclass(frozen=True)
class Command:
    """A command that makes a directory, after `begin`. Repeating it makes the same directory."""

    name: str
    begin: Callable[[Path], None]
    make: Callable[[Path, str], None]

    def prepare(self, root: Path) -> None:
        self.begin(root)
        self.make(root, "expected")

    def act(self, root: Path, promise) -> None:
        self.make(root, "made")
        promise(True)

    def problems(self, root: Path, promised: bool) -> list[str]:
        if promised and not (root / "made").exists():
            return [f"the directory of {self.name} was saved, but does not exist"]
        with contextlib.suppress(UserError):  # an existing export is not replaced
            self.make(root, "made")
        return [] if content(root / "made") == content(root / "expected") else [f"{self.name} differs from the expected one"]


def write_text(root: Path) -> None:
    """Text for a dataset of several shards."""
    (root / "text").mkdir()
    for number in range(120):
        (root / "text" / f"{number}.txt").write_text(f"text {number} " * 10)


def make_dataset(root: Path, name: str) -> None:
    """Make a dataset of the text."""
    for path in (root / "text").iterdir():  # dataset.json depends on modification times, which the disk does not keep
        os.utime(path, (0, 0))
    make = dict(tokenizer="bytes", shard_tokens=5000, val_fraction=0.2, workers=1)
    prepare_data.prepare(prepare_data.PrepareConfig((str(root / "text"),), out=str(root / name), **make))


def export_to(root: Path, name: str) -> None:
    """Export the run."""
    export.main(export.ExportConfig(str(root / "run"), out=str(root / name)))


def content(directory: Path) -> dict[str, bytes]:
    """The contents of a directory by name, ignoring hidden names."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name[0] != "."]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


SCENARIOS = [
    Saves("first saves", saves=(10, 20, 30), keep_best=1),
    Saves("saves beside newer damaged ones", intact=(80,), damaged=(100, 120)),
    Saves("saves beside a best and newer damaged ones", intact=(80, 90), damaged=(100, 110), saves=(97,), keep_best=1),
    Saves("saves, the last one kept", intact=(70, 80), keep_last=1, keep_best=1),
    Saves("saves, three kept, an older one damaged", intact=(50, 60, 80), damaged=(70,), keep_last=3),
    Saves("saves in several files", intact=(80,), saves=(82, 84), keep_last=1, shard_bytes=64),
    Command("dataset", write_text, make_dataset),
    Command("export", lambda root: Miniature(root / "run" / "checkpoints").save(1), export_to),
]


# ---------------------------------------------------------------------------------------------------------------------
# The cases of a scenario


class Cases:
    """Runs a scenario many times in one directory."""

    def __init__(self, scenario, root: Path):
        self.scenario, self.root, self.start = scenario, root, root.with_name("start")
        self.broken, self.count = [], Counter()
        root.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            scenario.prepare(root)
        root.rename(self.start)

    def act(self, fault: Fault | None = None) -> tuple[Disk, object, str]:
        """Run the scenario once. Returns the disk's record, the last promise and the traceback, if any."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.start, self.root, symlinks=True)
        traceback = ""
        with Disk(self.root, fault) as record, contextlib.redirect_stdout(io.StringIO()):
            try:
                self.scenario.act(self.root, record.promise)
            except EXPECTED:
                pass
            except Exception as error:  # except that errors.user_errors turns one with a file name into a message
                traceback = repr(error) if getattr(error, "filename", None) is None else ""
        return record, [None, *record.promises.values()][-1], traceback

    def judge(self, case: str, promised) -> None:
        """Count a case, and record it if something is lost."""
        self.count["cases"] += 1
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                problems = self.scenario.problems(self.root, promised)
        except Exception as error:
            problems = [f"afterwards: {error!r}"]
        self.broken += [f"{case}: {problem}" for problem in problems]

    def fail_each(self, every: int = 1) -> None:
        """Make every operation (or one in `every`) fail in each possible way."""
        whole, promised, traceback = self.act()
        self.judge("undisturbed", promised)
        if promised is None or traceback:
            self.broken.append(f"undisturbed: it saved nothing {traceback}")
        self.count["operations"] = len(whole.kinds)
        for number, what in list(enumerate(whole.kinds, 1))[::every]:
            for kind in (kind for kind, operations in disk.FAULTS.items() if what in operations):
                _, promised, traceback = self.act(Fault(number, kind))
                self.count["faults"] += 1
                case = f"{kind} at operation {number}, {what}"
                self.broken += [f"{case}: {traceback}"] * bool(traceback)
                self.judge(case, promised)

    def cut_each(self, every: int = 1) -> None:
        """Cut the power after every operation, and continue from each distinct state (or one in `every`) that may result."""
        whole, _, _ = self.act()
        seen = set()
        for how, end, tree, promised in disk.crash_states(whole):
            self.count["crash cases"] += 1
            if (key := repr((tree, promised))) in seen:
                continue
            seen.add(key)
            if len(seen) % every == 0:
                shutil.rmtree(self.root)
                disk.plant(tree, self.root)
                self.count["crash states"] += 1
                self.judge(f"power cut after operation {end - whole.before}, {how}", promised)
