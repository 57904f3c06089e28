"""Checkpoints: what a run needs to go on, published so that a kill at any instant leaves the last one or the new one whole.

A checkpoint is a Hugging Face model directory with optimizer.safetensors and trainer_state.json beside the model, and
manifest.json (size and sha256 of every file), written last. It is written under a hidden name, flushed to disk and renamed.
"""

import hashlib
import json
import os
import shutil
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

import hf
from data import Dataset
from settings import ModelConfig, UserError

MANIFEST = "manifest.json"


@dataclass
class TrainState:
    """Everything that resumes and is not a tensor."""

    step: int = 0  # updates done
    tokens: int = 0  # tokens seen
    best: list[tuple[float, int]] = field(default_factory=list)  # lowest (validation loss, step), best first
    skipped: int = 0  # updates left out because of a non-finite gradient
    wandb_run_id: str = ""
    grad_scaler: dict = field(default_factory=dict)
    dataset: str = ""  # identity of the dataset
    settings: dict = field(default_factory=dict)  # every flag as resolved
    versions: dict = field(default_factory=dict)

    @property
    def best_val_loss(self) -> float | None:
        """The lowest validation loss so far."""
        return self.best[0][0] if self.best else None

    def add_evaluation(self, val_loss: float, step: int, keep: int) -> None:
        """Remember an evaluated checkpoint if it is among the best `keep` (at least the best is always known)."""
        self.best = sorted([*self.best, (val_loss, step)])[: max(1, keep)]


def step_directory(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return checkpoints / f"step-{step:08d}"


def steps(checkpoints: Path) -> list[Path]:
    """The published checkpoints, oldest first, whole or not."""
    return sorted(path for path in checkpoints.glob("step-*") if path.is_dir())


def save(
    checkpoints: Path,
    state: TrainState,
    model: dict[str, Tensor],
    model_config: ModelConfig,
    optimizer: dict[str, Tensor],
    dataset: Dataset,
) -> Path:
    """Publish the checkpoint of `state.step` and point `latest` at it."""
    final = step_directory(checkpoints, state.step)
    with published(final) as directory:
        hf.write_model(directory, model, model_config, dataset.tokenizer, dataset.eot_token)
        save_file({name: value.contiguous() for name, value in optimizer.items()}, directory / "optimizer.safetensors")
        told = asdict(state) | {"best_val_loss": state.best_val_loss}
        (directory / "trainer_state.json").write_text(json.dumps(told, indent=2) + "\n")
    link(checkpoints / "latest", final)
    return final


class Saver:
    """Runs one save at a time, in the background if asked. An error of a save is kept until `wait` hands it out."""

    def __init__(self, in_background: bool, step: int):
        self.in_background = in_background
        self.step = step  # of the newest checkpoint, published or on its way
        self._thread, self._error = None, None

    def start(self, step: int, write) -> None:
        """Call `write()`, which publishes the checkpoint of `step`; the one before must have been waited for."""
        self.step = step
        if self.in_background:
            self._thread = threading.Thread(target=self._run, args=(write,))
            self._thread.start()
        else:
            self._run(write)

    def _run(self, write) -> None:
        try:
            write()
        except Exception as error:  # a full disk, a directory that may not be written, ...: the run can go on
            self._error = error

    def wait(self) -> Exception | None:
        """Wait for the save under way. Returns its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error


@contextmanager
def published(final: Path):
    """A temporary directory to fill, which becomes `final` whole or not at all."""
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        seal(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk its space is needed
        raise
    if final.exists():  # one that does not match its manifest: a whole one is never written again
        old = final.with_name(f".{final.name}.old.tmp")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
        shutil.rmtree(old)
    os.rename(temporary, final)
    sync(final.parent)


def seal(directory: Path) -> None:
    """Write the manifest and flush everything to disk."""
    files = sorted(directory.iterdir())
    manifest = {path.name: {"size": path.stat().st_size, "sha256": sha256(path)} for path in files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in [*files, directory / MANIFEST, directory]:
        sync(path)


def link(name: Path, target: Path) -> None:
    """Point the symbolic link `name` at its sibling `target`, atomically."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, name)
    sync(name.parent)


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(directory: Path) -> str | None:
    """Why the checkpoint is not whole, or None if every file matches its manifest."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        for name, told in manifest.items():
            size = (directory / name).stat().st_size
            if size != told["size"]:
                return f"{name} has {size} bytes instead of {told['size']}"
            if sha256(directory / name) != told["sha256"]:
                return f"{name} does not match its sha256"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: {error}"
    return None


def newest(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and what was passed over on the way to it and why."""
    passed = []
    for path in reversed(steps(checkpoints)):
        if (why := fault(path)) is None:
            return path, passed
        passed.append(f"passed over {path}: {why}")
    return None, passed


def sweep(checkpoints: Path) -> None:
    """Remove what a killed process left half written."""
    for path in checkpoints.glob(".*.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def prune(checkpoints: Path, state: TrainState, keep_last: int, keep_best: int) -> None:
    """Point `best` at the best evaluated checkpoint and remove what retention does not keep (keep_last=0: nothing)."""
    best = [path for _, step in state.best if (path := step_directory(checkpoints, step)).exists()]
    if best and keep_best:
        link(checkpoints / "best", best[0])
    if not keep_last:
        return
    existing = steps(checkpoints)  # once: what a save publishes meanwhile must not be taken for old
    for path in existing[:-keep_last]:
        if path not in best[:keep_best]:
            doomed = path.with_name(f".{path.name}.tmp")
            os.rename(path, doomed)  # a kill while removing must not leave something that looks like a checkpoint
            shutil.rmtree(doomed)


def find(name: str) -> Path:
    """The checkpoint directory that a user means: itself, or the newest whole one of a run directory.

    Raises UserError where there is none.
    """
    path = Path(name)
    if (path / "trainer_state.json").exists():
        if why := fault(path):
            raise UserError(f"{path} is not whole: {why}")
        return path
    found, passed = newest(path / "checkpoints")
    if found is None:
        raise UserError(
            "\n       ".join([f"{path} is neither a run with a whole checkpoint nor a checkpoint directory", *passed])
        )
    return found


def load_state(directory: Path) -> TrainState:
    """The trainer state of a whole checkpoint."""
    told = json.loads((directory / "trainer_state.json").read_text())
    told.pop("best_val_loss")
    return TrainState(**told | {"best": [tuple(pair) for pair in told["best"]]})


def load_optimizer(directory: Path) -> dict[str, Tensor]:
    """Optimizer state by "parameter.key"."""
    return load_file(directory / "optimizer.safetensors")
