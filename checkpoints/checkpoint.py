"""Checkpoints: everything that a run needs to continue, and when it is saved.

A checkpoint is a Hugging Face model directory with optimizer.safetensors and trainer_state.json beside the model, and
manifest.json (size and sha256 of every file), written last. It appears by rename: a kill at any instant leaves the last
checkpoint or the new one, complete. Large tensors are in several files, as `tensor_files` names them, written by several ranks.
"""

import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import optim
import settings
from checkpoints import huggingface, tensor_files
from checkpoints.retention import MANIFEST, Retention, step_directory, write_manifest
from checkpoints.snapshot import Snapshot, count_writers, take_snapshot, write_together
from common import errors, files
from common.errors import RunError, UserError
from common.records import Count, FileName, Sha256
from data import Mixture
from hardware import device
from parallel.world import World
from reports.log import Log
from reports.progress import due
from settings import CheckpointConfig, Config, Ranks

# How long ranks that write a checkpoint wait for each other: while training goes on, and after it has failed.
LONGEST_SAVE, LAST_SAVE_SECONDS = timedelta(hours=1), 30
HEARTBEAT = 1.0  # seconds between two signs of life of the master, while the others wait for it
# How a run went on from a step.
Era = TypedDict("Era", {"step": Count, "world_size": Ranks, "settings": dict, "versions": dict[str, str]})


class Origin(TypedDict):
    """Where the first weights of a run came from."""

    source: str  # as --resume or --init_from names it
    directory: str
    step: NotRequired[Count]  # of a checkpoint
    versions: NotRequired[dict[str, str]]  # that wrote it
    sha256: dict[FileName, Sha256]  # of its manifest, or else of its weights
    command: str  # that began the run


@dataclass
class TrainState:
    """Everything that resumes and is not a tensor: the content of trainer_state.json."""

    step: Count = 0  # updates done
    tokens: Count = 0  # tokens seen
    best: list[tuple[float, Count]] = field(default_factory=list)  # lowest (validation loss, step), best first
    skipped: Count = 0  # updates skipped because of a non-finite gradient
    wandb_run_id: str = ""
    grad_scaler: dict[str, float | int] = field(default_factory=dict)
    dataset: str = ""  # identity of the dataset
    settings: dict = field(default_factory=dict)  # every flag as resolved
    versions: dict = field(default_factory=dict)
    history: list[Era] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)  # of the run, last; before it those of the run that it came from

    @property
    def config(self) -> Config:
        """The settings so far, with defaults for those that an older version lacks."""
        return settings.from_record(self.settings, "trainer_state.json")

    @property
    def best_val_loss(self) -> float | None:
        """The lowest validation loss so far."""
        return self.best[0][0] if self.best else None

    def begin(self, now: dict[str, Any], dataset: str, world: World, continues: bool, source: Path | None) -> None:
        """Note how the run goes on from this step, with the settings `now`. source: where a new run has its weights from."""
        if not continues:
            self.best, self.history = [], []  # of a run with other checkpoints
            if source and world.is_master:
                self.origins = [*self.origins, origin(now["resume"], now["init_from"], source)]
        self.dataset, self.settings, self.versions = dataset, now, versions(world.device)
        era = {"world_size": world.size, "settings": self.settings, "versions": self.versions}
        if not self.history or {**self.history[-1], **era} != self.history[-1]:
            self.history = [*self.history, {"step": self.step, **era}]


def origin(resume: str, init_from: str, source: Path) -> Origin:
    """Where the weights of a run that begins now come from: the model directory `source`, as a flag named it."""
    is_checkpoint = (source / MANIFEST).exists()
    paths = [source / MANIFEST] if is_checkpoint else tensor_files.files_of(source, "model")
    found = Origin(
        source=resume if resume not in ("auto", "off") else init_from,
        directory=str(source.resolve()),
        sha256={path.name: files.sha256(path) for path in paths},
        command=shlex.join(sys.argv),
    )
    state = load_state(source) if is_checkpoint else None
    return found | {"step": state.step, "versions": state.versions} if state else found


def versions(own: torch.device) -> dict[str, str]:
    """What the bits of a run depend on besides its settings."""
    packages = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    if torch.backends.mkl.is_available():
        packages["mkl"] = os.environ.get("MKL_CBWR", "")  # the mode in which it multiplies (host.prepare_torch)
    return packages | {"hardware": device.describe(own)}


class Checkpoints:
    """The checkpoints of a run: when one is saved, in the background or not, and which ones stay.

    All ranks call the methods. Several may write the tensors; only the master publishes and removes checkpoints.
    """

    def __init__(self, directory: Path, options: CheckpointConfig, engine, dataset: Mixture, log: Log):
        self.directory, self.options, self.engine, self.dataset, self.log = directory, options, engine, dataset, log
        self.world: World = engine.world
        self.retention = Retention(directory, options.keep_last, options.keep_best)
        self.saved_at = 0  # step of the newest checkpoint, published or being written
        self._evaluated: tuple[float, int] | None = None  # (validation loss, step) of a checkpoint that may not be there yet
        self._saver = ThreadPoolExecutor(1)
        self._save: Future | None = None  # under way, or done and not yet looked at
        self._writers = range(count_writers(engine))
        # Writers tell each other in the background what they have written. Other ranks have no part in making the group.
        self._group: dist.ProcessGroup | None = None
        if len(self._writers) > 1 and self.world.rank in self._writers:
            self._group = dist.new_group(list(self._writers), LONGEST_SAVE, "gloo", use_local_synchronization=True)

    def begin(self, start_step: int) -> None:
        """Make the directory fit for saving. The checkpoint of `start_step`, if it is there, is intact. Raises UserError."""
        self.saved_at = start_step
        if self.world.is_master:
            self.retention.begin(step_directory(self.directory, start_step))

    def save(self, state: TrainState, now: bool) -> None:
        """Save a checkpoint if one is due at this step, or if `now`; with async_save, all but a copy in the background."""
        if state.step == self.saved_at or not (now or due(self.options.save_every, state.step)):
            return
        began = time.perf_counter()
        self.finish(state)  # one save at a time: two would need the memory of two
        snapshot = take_snapshot(self.engine, self.options.max_shard_bytes)
        self.saved_at = state.step
        if self.world.rank not in self._writers:
            return
        state = replace(state, best=list(state.best), grad_scaler=self.engine.scaler.state_dict())
        self._save = self._saver.submit(self.write, state, snapshot)
        if not self.options.async_save:
            self.wait()
        self.log.say(f"step {state.step:>6}  checkpoint; training waited {time.perf_counter() - began:.3f} s")

    def write(self, state: TrainState, snapshot: Snapshot) -> None:
        """Write this rank's files; the master adds the rest and publishes the checkpoint. Raises OSError."""
        path = step_directory(self.directory, state.step)
        if not self.world.is_master:
            write_together(files.hidden(path), snapshot, self._group)
            return
        with files.publish_directory(path, make=False) as directory:
            # Nothing may fail before this, or the others would wait in vain.
            records = write_together(directory, snapshot, self._group)
            for layout in snapshot.layouts:
                layout.write_index(directory)
            huggingface.write_description(directory, snapshot.config, self.dataset.tokenizer, self.dataset.eot_token)
            content = asdict(state) | {"best_val_loss": state.best_val_loss}
            tensor_files.write_json(directory / "trainer_state.json", content)
            write_manifest(directory, records)
        files.link(self.directory / "latest", path)
        self.retention.saved(path)

    def wait(self, failed: bool = False) -> None:
        """Wait for the save under way, if any. If training has failed, other writers may be gone, so the wait has an end."""
        if self._save is not None:
            futures.wait([self._save], LAST_SAVE_SECONDS if failed and self._group else None)

    def finish(self, state: TrainState, final: bool = False) -> None:
        """Wait for the save under way. Where it failed, warn, or raise RunError at the end of the run (`final`)."""
        self.wait()
        save, self._save = self._save, None
        if not self.world.is_master:
            return
        if error := save and save.exception():  # such as a full disk: the run can go on
            message = f"the checkpoint of step {self.saved_at} could not be written: {error}"
            message += f"; the newest intact one is {self.retention.newest}"
            if final:
                raise RunError(f"{message}; make room there and run the same command again")
            self.log.warn(f"{message}; training goes on to the next save")
        self.prune(state)

    def evaluated(self, state: TrainState, val_loss: float) -> None:
        """Remember the validation loss of the weights at `state.step`, if they are saved or being saved."""
        if self.saved_at == state.step and math.isfinite(val_loss):
            self._evaluated = (val_loss, state.step)
        self.prune(state)

    def prune(self, state: TrainState) -> None:
        """Point `best` at the best evaluated checkpoint and remove those that need not stay."""
        if not self.world.is_master:
            return
        # While its checkpoint is being written, and where that fails, the best one before it stays.
        if self._evaluated and step_directory(self.directory, self._evaluated[1]) in self.retention.intact:
            state.best = sorted([*state.best, self._evaluated])[: max(1, self.options.keep_best)]
            self._evaluated = None
        try:
            best = [path for _, step in state.best if (path := step_directory(self.directory, step)).exists()]
            if best and self.options.keep_best:
                files.link(self.directory / "best", best[0])
            else:
                files.remove(self.directory / "best")
            self.retention.prune(best)
        except OSError as error:  # such as a full disk: the run can go on
            self.log.warn(f"older checkpoints could not be removed, or best not be set: {error}")


def while_others_wait(world: World, work: Callable[[], Any]) -> Any:
    """Let the master do `work`, which may take longer than --timeout_minutes. Returns its result on all ranks."""
    if world.size == 1:
        return work()
    job = errors.in_background(work) if world.is_master else None
    while not world.broadcast(job and bool(futures.wait([job], HEARTBEAT).done)):
        pass
    return world.broadcast(job and job.result())


def load_state(directory: Path) -> TrainState:
    """The trainer state of an intact checkpoint. Raises UserError."""
    path = directory / "trainer_state.json"
    state = files.read_json(path, TrainState)
    settings.from_record(state.settings, str(path))
    return state


def open_optimizer(
    directory: Path, parameters: dict[str, Tensor], state: TrainState, optimizer: str
) -> dict[str, tensor_files.LazyTensor]:
    """Optimizer state by "parameter.key", to be read by rows. Raises UserError unless it is that of `parameters`, and whole."""
    tensors = tensor_files.open_tensors(directory, "optimizer")
    if not tensors and state.skipped == state.step:  # no update was made yet
        return tensors
    for name, parameter in parameters.items():
        for key in optim.optimizer_of(name, parameter, optimizer).STATE:
            found, shape = tensors.get(f"{name}.{key}"), () if key == "step" else tuple(parameter.shape)
            if found is None or (found.dtype, found.shape) != ("F32", shape):
                stored = f"{found.dtype} {list(found.shape)}" if found else "missing"
                needed = f"this model with --optimizer={optimizer} needs F32 {list(shape)}"
                way_out = f"a new run with --init_from={directory} takes the weights alone"
                raise UserError(f"{directory}: {name}.{key} of the optimizer's state is {stored}; {needed}; {way_out}")
    return tensors
