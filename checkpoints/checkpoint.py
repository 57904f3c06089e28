"""Checkpoints: everything a run needs to continue, and the policy of saving and keeping it.

A checkpoint is a Hugging Face model directory with optimizer.safetensors and trainer_state.json beside the model, and
manifest.json (size and sha256 of every file), written last. It appears by rename: a kill at any instant leaves the last
checkpoint or the new one, complete. Large tensors are in several files, as `tensor_files` names them, and several ranks write
them.
"""

import math
import os
import platform
import shlex
import sys
import time
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import optim
import settings
from checkpoints import huggingface, tensor_files
from checkpoints.retention import MANIFEST, Retention, set_aside, step_directory, write_manifest
from checkpoints.snapshot import Snapshot, take_snapshot, write_together
from common import cli, files
from common.errors import RunError, UserError
from common.records import Count, FileName, Sha256
from data import Mixture
from hardware import device, footprint
from parallel.world import World
from reports.log import Log
from reports.progress import due
from settings import Config, Ranks

# How long ranks that write a checkpoint wait for each other: while training goes on, and after it has failed.
LONGEST_SAVE, LAST_SAVE_SECONDS = timedelta(hours=1), 30
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
    """Everything that resumes and is not a tensor. It is also the type of trainer_state.json."""

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

    def begin(self, config: Config, dataset: Mixture, world: World, continues: bool, source: Path | None) -> None:
        """Note how the run goes on from this step. A run that starts from another's checkpoint has a history of its own.

        source: the directory whose weights it has, if any.
        """
        if source and not continues and world.is_master:
            self.origins = [*self.origins, origin(config, source)]
        if not continues:
            self.best = []  # of checkpoints that are not in this run
        self.dataset, self.settings = dataset.identity, cli.flat_values(config)
        self.versions = versions(world.device)
        self.history = list(self.history) if continues else []
        now = {"world_size": world.size, "settings": self.settings, "versions": self.versions}
        if not self.history or {**self.history[-1], **now} != self.history[-1]:
            self.history.append({"step": self.step, **now})


def origin(config: Config, source: Path) -> Origin:
    """Where the weights of a run that begins now come from: the model directory `source`."""
    named = config.run.resume if config.run.resume not in ("auto", "off") else config.model.init_from
    paths = [source / MANIFEST] if (source / MANIFEST).exists() else tensor_files.files_of(source, "model")
    found = Origin(
        source=named,
        directory=str(source.resolve()),
        sha256={path.name: files.sha256(path) for path in paths},
        command=shlex.join(sys.argv),
    )
    if (source / "trainer_state.json").exists():
        state = load_state(source)
        found |= {"step": state.step, "versions": state.versions}
    return found


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

    def __init__(self, directory: Path, config: Config, dataset: Mixture, world: World, log: Log, start_step: int):
        self.directory, self.config, self.dataset, self.world, self.log = directory, config, dataset, world, log
        self.retention = Retention(directory, config.checkpoint.keep_last, config.checkpoint.keep_best, start_step)
        self.saved_at = start_step  # step of the newest checkpoint, published or being written
        self._evaluated: tuple[float, int] | None = None  # (validation loss, step) of a checkpoint that may not be there yet
        self._saver = ThreadPoolExecutor(1)
        self._save: Future | None = None  # under way, or done and not yet looked at
        self._writers = range(footprint.writers(config, world.size))
        # The writers tell each other in the background what they have written, while training communicates otherwise.
        # The other ranks have no part in making the group: with NCCL they would wait for ranks that never come.
        self._group: dist.ProcessGroup | None = None
        if len(self._writers) > 1 and world.rank in self._writers:
            self._group = dist.new_group(list(self._writers), LONGEST_SAVE, "gloo", use_local_synchronization=True)

    def begin(self) -> None:
        """Make the directory fit for saving, before the first step. Raises UserError where nothing could be saved."""
        for note in self.retention.begin() if self.world.is_master else ():
            self.log.warn(note)

    def save(self, state: TrainState, engine, optimizers, now: bool) -> None:
        """Save a checkpoint if one is due at this step, or if `now`; a step is saved once.

        Training waits until the tensors are copied to the writers' memory. With async_save the rest runs in the background.
        """
        if state.step == self.saved_at or not (now or due(self.config.checkpoint.save_every, state.step)):
            return
        began = time.perf_counter()
        self.finish(state)  # one save at a time: two would need the memory of two
        snapshot = take_snapshot(engine, optimizers, self.config, self.world)
        self.saved_at = state.step
        if self.world.rank not in self._writers:
            return
        state.grad_scaler = engine.scaler.state_dict()
        state = replace(state, best=list(state.best))
        self._save = self._saver.submit(self._write, state, snapshot)
        if not self.config.checkpoint.async_save:
            self.wait()
        self.log.say(f"step {state.step:>6}  checkpoint; training waited {time.perf_counter() - began:.3f} s")

    def _write(self, state: TrainState, snapshot: Snapshot) -> None:
        write(self.directory, state, snapshot, self.dataset, self.world.rank, self._group)
        self.retention.saved(step_directory(self.directory, state.step))

    def wait(self, failed: bool = False) -> None:
        """Wait for the save under way, if any. If training has failed, other writers may be gone, so the wait has an end."""
        if self._save is not None:
            futures.wait([self._save], LAST_SAVE_SECONDS if failed and self._group else None)

    def finish(self, state: TrainState, final: bool = False) -> None:
        """Wait for the save under way and remove what retention does not keep.

        A failed save is a warning while there will be another; at the end of the run (`final`) it is a RunError.
        """
        self.wait()
        save, self._save = self._save, None
        if not self.world.is_master:
            return
        if error := save and save.exception():  # a full disk, a directory that may not be written, ...: the run can go on
            message = f"the checkpoint of step {self.saved_at} could not be written: {error}"
            message += f"; the newest intact one is {self.retention.newest}"
            if final:
                raise RunError(f"{message}; make room there and run the same command again")
            self.log.warn(f"{message}; training goes on to the next save")
        self.prune(state)

    def evaluated(self, state: TrainState, val_loss: float) -> None:
        """Remember the validation loss of the weights at `state.step` if they are saved, or will be, and among the best."""
        if self.saved_at == state.step and math.isfinite(val_loss):
            self._evaluated = (val_loss, state.step)
        self.prune(state)

    def prune(self, state: TrainState) -> None:
        """Point `best` at the best evaluated checkpoint and remove those that are neither new nor good enough to keep."""
        if not self.world.is_master:
            return
        # While its checkpoint is being written, and where that fails, the best one before it stays.
        if self._evaluated and self.retention.counts(step_directory(self.directory, self._evaluated[1])):
            state.best = sorted([*state.best, self._evaluated])[: max(1, self.config.checkpoint.keep_best)]
            self._evaluated = None
        best, link = [step_directory(self.directory, step) for _, step in state.best], self.directory / "best"
        try:
            best = [path for path in best if path.exists()]
            if best and self.config.checkpoint.keep_best:
                files.link(link, best[0])
            else:
                files.remove(link)
        except OSError as error:  # such as a full disk: the run can go on
            self.log.warn(f"{link} could not be set: {error}")
        try:
            warnings = self.retention.prune(best)
        except OSError as error:
            warnings = [f"nothing could be removed: {error}"]
        for warning in warnings:
            self.log.warn(warning)


def write(
    checkpoints: Path, state: TrainState, snapshot: Snapshot, dataset: Mixture, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Publish the checkpoint of `state.step` and point `latest` at it, with the other writers in `group` (None: alone).

    Each rank writes its files, and the master also the rest. Raises OSError where one of them could not.
    """
    path = step_directory(checkpoints, state.step)
    if rank > 0:
        write_together(files.hidden(path), snapshot, group)
        return
    if os.path.lexists(path):  # somebody else's, put there since the start
        set_aside(path)
    with files.publish_directory(path, make=False) as directory:
        records = write_together(directory, snapshot, group)
        for layout in snapshot.layouts:
            layout.write_index(directory)
        huggingface.write_description(directory, snapshot.config, dataset.tokenizer, dataset.eot_token)
        content = asdict(state) | {"best_val_loss": state.best_val_loss}
        tensor_files.write_json(directory / "trainer_state.json", content)
        write_manifest(directory, records)
    files.link(checkpoints / "latest", path)


def load_state(directory: Path) -> TrainState:
    """The trainer state of an intact checkpoint. Raises UserError."""
    path = directory / "trainer_state.json"
    state = files.read_json(path, TrainState)
    settings.from_record(state.settings, str(path))
    if not state.history:
        raise UserError(f"{path}: history is empty, but a run notes its beginning there; use another checkpoint")
    if state.grad_scaler and state.grad_scaler.keys() != torch.amp.GradScaler("cpu").state_dict().keys():
        raise UserError(f"{path}: grad_scaler has the keys {', '.join(state.grad_scaler)}")
    return state


def open_optimizer(
    directory: Path, parameters: dict[str, Tensor], state: TrainState, optimizer: str
) -> dict[str, tensor_files.Stored]:
    """Optimizer state by "parameter.key", to be read by rows. Raises UserError unless it is that of `parameters`, and whole."""
    tensors, shapes = tensor_files.open_tensors(directory, "optimizer"), {}
    if not tensors and state.skipped == state.step:  # no update was made yet
        return tensors
    for name, parameter in parameters.items():
        for key in optim.optimizer_of(name, parameter, optimizer).STATE:
            shapes[f"{name}.{key}"] = () if key == "step" else tuple(parameter.shape)
    for name in sorted(shapes | tensors):
        found = f"{tensors[name].dtype} {list(tensors[name].shape)}" if name in tensors else "missing"
        wanted = f"F32 {list(shapes[name])}" if name in shapes else "none"
        if found != wanted:
            raise UserError(
                f"{directory}: {name} of the optimizer's state is {found}; this model with --optimizer={optimizer} wants "
                f"{wanted}; a new run with --init_from={directory} takes the weights alone"
            )
    return tensors
