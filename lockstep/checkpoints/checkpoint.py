"""Checkpoints: everything that a run needs to continue, and when to save it.

A checkpoint is a Hugging Face model directory that also holds optimizer.safetensors, trainer_state.json and manifest.json
(size and sha256 of every file, written last). It is renamed into place, so a kill at any instant leaves either the previous
checkpoint or the new one, complete.

Large sets of tensors are split across several files (`tensor_files`). They are written by the ranks that share the first copy
of the weights: under fsdp all ranks (with `--replicate`, those of the first group), otherwise only the master. A file has the
same bytes whichever rank writes it.
"""

import math
import os
import platform
import shlex
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import settings
from lockstep.checkpoints import huggingface, retention, tensor_files
from lockstep.checkpoints.retention import FileRecord, step_directory, write_manifest
from lockstep.common import cli, files
from lockstep.common.errors import RunError, UserError
from lockstep.common.records import Count
from lockstep.dataset.mixture import Mixture
from lockstep.hardware import device
from lockstep.numerics import optim
from lockstep.numerics.attention import attention_kernel
from lockstep.parallel.world import World
from lockstep.reports.log import Log
from lockstep.reports.progress import due
from lockstep.settings import CheckpointConfig, Config, Ranks

# How long the ranks that write a checkpoint wait for each other: during training, and after training has failed.
LONGEST_SAVE, LAST_SAVE_SECONDS = timedelta(hours=1), 30
HOPELESS = 10  # times the loss of guessing; NaN and infinity are above any limit
SHARD_BYTES = 10**9  # the largest file of weights or optimizer state; a larger tensor gets its own file
HEARTBEAT = 1.0  # seconds between signs of life from a working rank while the others wait
# The settings of a run from `step` on.
Era = TypedDict("Era", {"step": Count, "world_size": Ranks, "settings": dict, "versions": dict[str, str]})


@dataclass
class TrainState:
    """Everything that a run resumes from, except tensors: the content of trainer_state.json."""

    step: Count = 0  # updates done
    tokens: Count = 0  # tokens seen
    best: list[tuple[float, Count]] = field(default_factory=list)  # lowest (validation loss, step), best first
    skipped: Count = 0  # updates skipped because of a non-finite gradient
    unlogged_losses: tuple[float, Count] = (0.0, 0)  # sum and number of the losses since the last line of metrics.jsonl
    unsound: bool = False  # whether the last gradient was not finite or the loss hopeless, so the weights may be useless
    identity: str = ""  # of the run, random; empty in older runs. Two runs may have the same name
    wandb_run_id: str = ""
    grad_scaler: dict[str, float | int] = field(default_factory=dict)
    dataset: str = ""  # identity of the dataset
    settings: dict = field(default_factory=dict)  # every flag as resolved
    versions: dict = field(default_factory=dict)
    mixture_order: Literal["own", "shared", ""] = ""  # see `data.Batches.own_orders`; empty before the run begins
    batch_sizes: list[tuple[Count, Count, Count]] = field(default_factory=list)  # see `data.Batches.sizes`; empty: always one
    history: list[Era] = field(default_factory=list)

    @property
    def config(self) -> Config:
        """The run's last settings, with defaults for settings that an older version did not have."""
        return settings.from_record(self.settings, "trainer_state.json")

    @property
    def best_val_loss(self) -> float | None:
        """The lowest validation loss so far."""
        return self.best[0][0] if self.best else None

    def updated(self, loss: float, grad_norm: float, config: Config) -> None:
        """Count an update. Its gradient was applied if `grad_norm` is finite."""
        self.skipped += not math.isfinite(grad_norm)
        self.unsound = not (math.isfinite(grad_norm) and is_sound(loss, config.model.vocab_size))
        self.step += 1
        self.tokens += config.train.tokens_per_update
        if math.isfinite(loss):
            self.unlogged_losses = (self.unlogged_losses[0] + loss, self.unlogged_losses[1] + 1)

    def begin(self, config: Config, dataset: str, world: World, continues: bool) -> None:
        """Record that the run continues from this step with the resolved `config`."""
        if not continues:
            self.best, self.history, self.identity = [], [], uuid.uuid4().hex  # the old ones describe another run
        self.dataset, self.settings, self.versions = dataset, cli.flat_values(config), versions(config, world.device)
        self.mixture_order = self.mixture_order or "own"
        era = {"world_size": world.size, "settings": self.settings, "versions": self.versions}
        if not self.history or {**self.history[-1], **era} != self.history[-1]:
            self.history = [*self.history, {"step": self.step, **era}]


def is_sound(loss: float, vocab_size: int) -> bool:
    """Return whether `loss` may come from a model worth keeping. One that guesses has log(vocab_size)."""
    return loss < HOPELESS * math.log(max(2, vocab_size))


def versions(config: Config, own: torch.device) -> dict[str, str]:
    """Return everything besides its settings that can change a run's bits."""
    packages = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    if torch.backends.mkl.is_available():
        packages["mkl"] = os.environ.get("MKL_CBWR", "")  # its reproducibility mode (host.prepare_torch)
    if own.type == "cuda":
        kernel = attention_kernel(config.model, device.DTYPES[config.train.dtype], own)
        packages |= device.libraries() | {"attention": kernel}
    return packages | {"hardware": device.describe(own)}


def load_state(directory: Path, dataset: Mixture | None = None) -> TrainState:
    """Return the trainer state of an intact checkpoint. Raises UserError.

    dataset: the run's, which knows the identities of its data in earlier versions.
    """
    path = directory / "trainer_state.json"
    state = files.read_json(path, TrainState)
    if not state.mixture_order:  # version 0.1.0 knew only the shared one, and later ones had a setting
        state.mixture_order = "own" if state.settings.get("mixture_order") == "own" else "shared"
    for record in (state.settings, *(era["settings"] for era in state.history)):
        if record:
            settings.update_record(record)
    state.settings = settings.without_retired(state.settings, str(path))
    for era in state.history:
        era["settings"] = settings.without_retired(era["settings"], str(path))
    settings.from_record(state.settings, str(path))
    if dataset:
        state.dataset = dataset.translate(state.dataset)
    return state


def open_optimizer(
    directory: Path, parameters: dict[str, Tensor], state: TrainState, optimizer: str
) -> dict[str, tensor_files.LazyTensor]:
    """Return the optimizer state as lazy tensors, by "parameter.key". Raises UserError if it does not match `parameters`."""
    tensors = tensor_files.open_tensors(directory, "optimizer")
    if not tensors and state.skipped == state.step:  # no update so far
        return tensors
    for name, parameter in parameters.items():
        for key in optim.optimizer_of(name, parameter, optimizer).STATE:
            found, shape = tensors.get(f"{name}.{key}"), () if key == "step" else tuple(parameter.shape)
            if found is None or (found.dtype, found.shape) != ("F32", shape):
                stored = f"{found.dtype} {list(found.shape)}" if found else "missing"
                needed = f"this model with --optimizer={optimizer} needs F32 {list(shape)}"
                way_out = f"to use only the weights, start a new run with {shlex.quote(f'--init_from={directory}')}"
                raise UserError(f"{directory}: {name}.{key} in the optimizer state is {stored}; {needed}; {way_out}")
    return tensors


def while_others_wait(world: World, work: Callable[[], Any], mine: bool | None = None) -> Any:
    """Run `work` on the master, or on the ranks where `mine` is true. It may take longer than timeout_minutes.

    Returns the master's result on all ranks.
    """
    if world.size == 1:
        return work()
    job = ThreadPoolExecutor(1).submit(work) if (world.is_master if mine is None else mine) else None
    while not all(world.all_gather(job is None or bool(futures.wait([job], HEARTBEAT).done))):
        pass
    return world.broadcast(job and job.result())


# ---------------------------------------------------------------------------------------------------------------------
# Saving


@dataclass(frozen=True)
class Snapshot:
    """The part of a checkpoint that this rank writes, copied to host memory."""

    layouts: dict[str, tensor_files.Layout]  # layouts of all tensors in the checkpoint, by stem
    files: dict[str, dict[str, Tensor]]  # this rank's tensors, by file and name

    def write(self, directory: Path) -> dict[str, FileRecord]:
        """Write this rank's files, flush them to disk, and return their records. Equal tensors give equal bytes."""
        records = {}
        for name, tensors in self.files.items():
            tensor_files.write(directory / name, tensors, torch.float32)
            files.sync(directory / name)
            records[name] = retention.record(directory / name)
        return records


def take_snapshot(engine) -> Snapshot:
    """Copy what this rank will write. The writers get files of up to SHARD_BYTES in turn. All ranks must call this."""
    config, weights, state = engine.module.config, engine.parameters, engine.optimizer_state()
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    sizes = {name: 4 * math.prod(tensor.shape) for name, tensor in state.items()}
    model, optimizer = huggingface.layout(shapes, config, SHARD_BYTES), tensor_files.lay_out("optimizer", sizes, SHARD_BYTES)
    dealt = {file: number % engine.strategy.writers for number, file in enumerate(model | optimizer)}
    writer = {name: dealt[file] for file, names in (model | optimizer).items() for name in names}
    writer |= {ours: writer[theirs] for ours, theirs in huggingface.tensor_names(shapes, config).items()}
    copies = huggingface.to_hf(engine.gather(weights, writer), config) | engine.gather(state, writer)
    own = [file for file, rank in dealt.items() if rank == engine.world.rank]
    mine = {file: {name: copies[name] for name in (model | optimizer)[file]} for file in own}
    return Snapshot({"model": model, "optimizer": optimizer}, mine)


def write_together(directory: Path, snapshot: Snapshot, group: dist.ProcessGroup | None) -> dict[str, FileRecord]:
    """Write this rank's files, wait for the other writers in `group` (None: no others), and return all records.

    If any of them fails, raises OSError on all. Each rank reports any kind of failure, because the others would hang otherwise.
    """
    records, problem = {}, ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        records = snapshot.write(directory)
    except Exception as error:
        problem = str(error) or type(error).__name__
    reports = [(records, problem)]
    if group:
        reports *= group.size()
        dist.all_gather_object(reports, (records, problem), group=group)
    if problems := [problem + f" (rank {rank})" * bool(group) for rank, (_, problem) in enumerate(reports) if problem]:
        raise OSError("; ".join(problems))
    return {name: record for records, _ in reports for name, record in records.items()}


class Checkpoints:
    """The checkpoints of a run: saves them, in the background if requested, and removes old ones.

    All ranks call the methods. Several may write tensors, but only the master publishes and removes checkpoints. As a context
    manager, it finishes the save in progress at the end.
    """

    def __init__(
        self,
        directory: Path,
        options: CheckpointConfig,
        engine,
        dataset: Mixture,
        log: Log,
        mirror=None,  # an `extras.mirror.Mirror`, with --mirror
        weights: Path | None = None,  # the directory that the weights came from; its bos_token is kept
    ):
        self.directory, self.options, self.engine, self.dataset, self.log = directory, options, engine, dataset, log
        self.world: World = engine.world
        huggingface.check_description(engine.module.config, {name: tuple(p.shape) for name, p in engine.parameters.items()})
        self.intact: set[Path] = set()  # written and flushed by this process, or verified
        self.saved_at, self._saved_time = 0, time.monotonic()  # step of the newest checkpoint, published or in progress
        self._due = False  # whether a save of --save_every waits for sound weights
        self.between: set[Path] = set()  # checkpoints that only --save_minutes asked for
        self._bos_token = huggingface.bos_token(weights, dataset.tokenizer) if weights and self.world.is_master else None
        self._evaluated: tuple[float, int] | None = None  # (validation loss, step) of a checkpoint that may be in progress
        self._saver = ThreadPoolExecutor(1)
        self._save: Future | None = None  # the save in progress, or done but not yet checked
        self._mirror = mirror if self.world.is_master else None
        self._writers = range(engine.strategy.writers)
        # A group of only the writers, in which they exchange the records of their files in the background.
        self._group: dist.ProcessGroup | None = None
        if len(self._writers) > 1 and self.world.rank in self._writers:
            self._group = dist.new_group(list(self._writers), LONGEST_SAVE, "gloo", use_local_synchronization=True)

    def begin(self, start_step: int) -> None:
        """Prepare the directory for saving. If a checkpoint of `start_step` exists, it is intact. Raises UserError."""
        self.saved_at, self._saved_time = start_step, time.monotonic()
        if self.world.is_master:
            self.intact = retention.prepare(self.directory, step_directory(self.directory, start_step))

    @property
    def keep_last(self) -> int:
        """How many of the newest checkpoints to keep (0: all), with those that only --save_minutes asked for."""
        return self.options.keep_last and self.options.keep_last + len(self.between)

    def __enter__(self):
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        """Finish the save in progress, even if training has failed, and then the copy to the mirror, if there is one."""
        self.wait(failed=error is not None)
        if error is None and self._mirror:
            self._mirror.finish()  # last, because a scheduler may not wait for it

    def overdue(self) -> bool:
        """Return whether --save_minutes have passed since the last save."""
        return 0 < 60 * self.options.save_minutes < time.monotonic() - self._saved_time

    def save(self, state: TrainState, now: bool, overdue: bool = False) -> None:
        """Save a checkpoint if one is due, or `now`. With async_save, training waits only for the copy to the host.

        A save that is due waits while the weights are unsound, because they may never be of use. overdue: whether
        --save_minutes have passed on any rank; a save for only this reason is removed after the next one.
        """
        if state.step == self.saved_at:
            return
        self._due |= due(self.options.save_every, state.step)
        if not now and (state.unsound or not (self._due or overdue)):
            return
        began = time.perf_counter()
        self.finish(state)  # one save at a time: two would need twice the memory
        snapshot = take_snapshot(self.engine)
        if not now and not self._due:
            self.between.add(step_directory(self.directory, state.step))
        self.saved_at, self._saved_time, self._due = state.step, time.monotonic(), False
        if self.world.rank in self._writers:
            state = replace(state, best=list(state.best), grad_scaler=self.engine.scaler.state_dict())
            self._save = self._saver.submit(self.write, state, snapshot)
        if not self.options.async_save:
            self.wait_together()
        self.log.say(f"step {state.step:>6}  checkpoint; training waited {time.perf_counter() - began:.3f} s")

    def write(self, state: TrainState, snapshot: Snapshot) -> None:
        """Write this rank's files. The master adds the rest and publishes the checkpoint. Raises OSError."""
        path = step_directory(self.directory, state.step)
        if not self.world.is_master:
            write_together(files.hidden(path), snapshot, self._group)
            return
        with files.publish_directory(path, make=False) as directory:
            # Nothing before this line may fail, or the other writers would hang.
            records = write_together(directory, snapshot, self._group)
            for stem, layout in snapshot.layouts.items():
                tensor_files.write_index(directory, stem, layout)
            known = dict(bos_token=self._bos_token, vocab_size=self.dataset.vocab_size)
            about = self.engine.module.config, self.dataset.tokenizer, self.dataset.eot_token
            huggingface.write_description(directory, *about, **known)
            content = asdict(state) | {"best_val_loss": state.best_val_loss}
            tensor_files.write_json(directory / "trainer_state.json", content)
            write_manifest(directory, records)
        files.link(self.directory / "latest", path)
        self.intact.add(path)
        retention.verify(self.directory, self.intact, self.keep_last)

    def wait(self, failed: bool = False) -> None:
        """Wait for the save in progress, if any. If training has `failed`, wait only briefly: other writers may be gone."""
        if self._save is not None:
            futures.wait([self._save], LAST_SAVE_SECONDS if failed and self._group else None)

    def wait_together(self) -> None:
        """Wait on all ranks for the save in progress, which may take longer than timeout_minutes."""
        while_others_wait(self.world, self.wait, mine=self._save is not None)

    def finish(self, state: TrainState, final: bool = False) -> None:
        """Wait for the save in progress. If it failed, warn, or raise RunError at the end of the run (`final`)."""
        self.wait_together()
        save, self._save = self._save, None
        if self.world.is_master and save and (error := save.exception()):  # such as a full disk: training can continue
            message = f"the checkpoint at step {self.saved_at} could not be written: {error}"
            message += f"; the newest intact one is {max(self.intact, key=retention.step_of)}" if self.intact else ""
            if final:
                raise RunError(f"{message}; free some space and run the same command again")
            self.log.warn(f"{message}; training continues until the next save")
        self.prune(state)

    def evaluated(self, state: TrainState, val_loss: float) -> None:
        """Remember the validation loss of the weights at `state.step`, if a checkpoint of them exists or is in progress."""
        if self.saved_at == state.step and math.isfinite(val_loss):
            self._evaluated = (val_loss, state.step)
        self.prune(state, remove=False)

    def prune(self, state: TrainState, remove: bool = True) -> None:
        """Point `best` at the best evaluated checkpoint and remove checkpoints that need not be kept.

        Removes nothing right after a save, because the next update may find its weights unsound, and nothing while they are.
        """
        if not self.world.is_master:
            return
        keep_best = self.options.keep_best
        # The previous best checkpoint stays until the new one is written.
        if self._evaluated and step_directory(self.directory, self._evaluated[1]) in self.intact:
            state.best = sorted([*state.best, self._evaluated])[: max(1, keep_best)]
            self._evaluated = None
        try:
            best = [path for _, step in state.best if (path := step_directory(self.directory, step)).exists()][:keep_best]
            if best:
                files.link(self.directory / "best", best[0])
            else:
                files.remove(self.directory / "best")
            if remove and not state.unsound:
                retention.prune(self.directory, self.intact, self.options.keep_last, best, self.between)
        except OSError as error:  # such as a full disk: training can continue
            self.log.warn(f"could not remove older checkpoints or set the link `best`: {error}")
        if self._mirror:
            kept = [step_directory(self.directory, step).name for _, step in state.best[:keep_best]]
            self._mirror.update(sorted(self.intact), 0 if state.unsound else self.keep_last, kept)
