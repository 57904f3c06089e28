"""Prepare a run: find where it starts, resolve its settings, check that the machines are up to it, and say what will run."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import command, settings
from lockstep.checkpoints import checkpoint, huggingface, resume
from lockstep.checkpoints.resume import Start
from lockstep.common import errors, files
from lockstep.common.cli import flat_values
from lockstep.common.errors import PIP, RunError, UserError, plural
from lockstep.dataset.mixture import Mixture
from lockstep.hardware import device, footprint, host
from lockstep.numerics.attention import attention_kernel
from lockstep.numerics.optim import warn_of_warmup
from lockstep.parallel.world import World
from lockstep.planning import choices, rules
from lockstep.planning.choices import Machines
from lockstep.reports.log import Log, Record, require_wandb_key
from lockstep.settings import Config


@dataclass(frozen=True)
class Setup:
    """What a start of training has found: its settings, and where it starts."""

    asked: Config  # before any `auto` was resolved
    config: Config
    start: Start
    mirror: Any  # an extras.mirror.Mirror, with --mirror
    notes: list[str]  # what to tell the user


def prepare(asked: Config, model: type[nn.Module], dataset: Mixture, world: World, log: Log) -> Setup:
    """Find where the run starts, resolve every `auto`, and check what changes. All ranks must call this. Raises UserError.

    model: the class of the model to train.
    """
    flags = {f"--{name}": value for name, value in flat_values(asked).items()}
    world.require_same(flags | {"the sha256 of --tokens": dataset.identity, "torch's version": torch.__version__})
    mirror = None
    if asked.checkpoint.mirror:
        mirror = errors.extra("--mirror", "mirror").Mirror(asked.checkpoint.mirror, log)
    start = resume.find_start(log.directory, asked.run.resume, asked.model.init_from, dataset, world, mirror)
    state = start.state
    previous = state.settings  # of the run, as far as its bits depend on them
    if not start.continues:
        previous = previous | world.broadcast(settings.first_choices(asked))
    previous = previous | {"world_size": state.history[-1]["world_size"] if state.history else 0}
    kept = keep_threads(asked, previous, world)
    config = choices.resolve(choices.from_start(asked, start), dataset.vocab_size, survey(world), previous)
    if huggingface.arithmetic_differs(config.model, model):
        config = settings.replace(config, own_code=True)
    versions = checkpoint.versions(config, world.device)
    notes = list(start.notes)
    if world.is_master and not start.continues:
        notes += resume.describe_loss(log.directory, state.step, config)
    notes += [*kept, *resume.check_changes(start, config, dataset.identity, versions), *compare(config, world, versions)]
    if state.step < config.train.steps:
        notes += check(config, world)
    return Setup(asked, config, start, mirror, notes)


def announce(setup: Setup, world: World, log: Log, reads: list[str], remarks: list[str]) -> None:
    """Say what is about to run. reads, remarks: lines about the data (`data.describe`, `Mixture.remarks`)."""
    if setup.start.state.step < setup.config.train.steps:
        log.say(banner(setup.config, world, setup.start.state.step, reads, remarks))
    for note in setup.notes:
        log.say(note)


def open_run(setup: Setup, world: World, log: Log, checkpoints: checkpoint.Checkpoints, parameters: int) -> Record:
    """Create or open the run's directory, and start what reports to others. All checks have passed: nothing was written so far.

    Returns what metrics.jsonl holds of the step at which the run starts, the same on all ranks. parameters: of the model.
    """
    config, state = setup.config, setup.start.state
    if world.is_master and config.log.wandb == "online":
        require_wandb_key()
    recorded = world.broadcast(log.begin(state.step))
    log.set_status(state="running", step=state.step, steps=config.train.steps, next=command.again(world.size, world.local_size))
    checkpoints.begin(state.step)
    if setup.start.weights and state.step < config.train.steps:
        which = "weights and optimizer state" if setup.start.checkpoint else "weights"
        log.say(f"loaded the {which} of {setup.start.weights}")
    if world.is_master and state.step < config.train.steps:  # a complete run keeps the settings it was trained with
        files.publish_text(log.directory / "config.toml", settings.dumps(config, setup.asked))
    facts = flat_values(config) | {"world_size": world.size, "parameters": parameters}
    run_id = state.wandb_run_id if setup.start.continues else ""
    state.wandb_run_id = log.start_trackers(config.log, facts, state.step, run_id)
    return recorded


def survey(world: World) -> Machines:
    """Return what the hardware of all ranks can do. All ranks must call this."""
    own = world.device
    can = device.choose_dtype("auto", own), device.fast_at_bfloat16(own)
    dtypes, fasts, locals_, free, total = zip(*world.all_gather((*can, world.local_size, *device.memory(own))), strict=True)

    def choose_compile(wanted: str, dtype: str, run_flops: float) -> str:
        return min(world.all_gather(device.choose_compile(wanted, own, dtype, run_flops)))  # "off" < "on"

    slowest, muon_dtype = min(dtypes, key=list(device.DTYPES).index), "bfloat16" if all(fasts) else "float32"
    memory, threads = (min(free), min(total)), torch.get_num_threads()
    ranks = world.size, max(locals_)
    return Machines(*ranks, own.type, device.kind(own), slowest, muon_dtype, *memory, threads, choose_compile)


def keep_threads(config: Config, previous: dict, world: World) -> list[str]:
    """Use the number of CPU threads that the run has used so far, on which its bits depend. All ranks must call this.

    Returns a note if the ranks would otherwise use another number. If the machine lacks the cores, or the number of ranks has
    changed, the bits will differ anyway. previous: the run's settings so far, and its world_size.
    """
    threads, any_ranks = previous.get("threads"), config.parallel.record.any_ranks or config.numerics.numerics == "portable"
    same = previous["world_size"] == world.size and previous.get("device") == world.device.type == "cpu"
    if config.train.threads != "auto" or any_ranks or not same:  # exact uses one thread, and portable has the same bits
        return []
    own, enough = torch.get_num_threads(), all(world.all_gather(threads <= host.cores() // world.local_size))
    if own == threads or not enough:
        return []
    torch.set_num_threads(threads)
    return [f"note: the run keeps {plural(threads, 'thread')} per rank; --threads={own} gives different bits"]


def compare(config: Config, world: World, versions: dict[str, str]) -> list[str]:
    """Return a warning if the ranks' hardware or libraries differ. Raises UserError for `exact`, whose bits depend on that."""
    if config.numerics.numerics == "portable" or not (difference := world.difference(versions)):
        return []
    if config.parallel.record.any_ranks:
        strategy = f"--strategy={config.parallel.strategy}"
        raise UserError(f"{difference}; {strategy} needs identical hardware and libraries, or --numerics=portable")
    return [f"warning: {difference}; the bits depend on which machine runs which rank"]


def check(config: Config, world: World) -> list[str]:
    """Raise UserError if this machine lacks memory, packages or disk space for the run. Returns warnings and notes."""
    check_memory(config, world)
    if config.log.tensorboard and find_spec("tensorboard") is None:
        raise UserError(f"--tensorboard=true needs tensorboard, which is not installed; try: {PIP} tensorboard")
    train, optim = config.train, config.optim
    warnings = [*check_disk(config), *warn_of_warmup(train.steps, optim)]
    chosen = (train.dtype, optim.muon_dtype if optim.optimizer == "muon" else "")  # chosen by the user, or at the first start
    if "bfloat16" in chosen and world.device.type == "cpu" and not device.fast_at_bfloat16(world.device):
        muon = ' with muon_dtype = "float32" in a preset' if optim.optimizer == "muon" else ""
        faster = f"--dtype=float32{muon} may be faster, but gives different bits"
        warnings.append(f"warning: this processor is not known to be fast in bfloat16; {faster}")
    if world.device.type == "cuda" and (most := device.ranks_here()) > world.local_size:
        idle = plural(torch.cuda.device_count() - world.local_size, "GPU")
        warnings.append(f"note: {idle} of this node will be idle; torchrun --nproc_per_node={most} train.py ... uses {most}")
    if note := config.model.form.note:
        warnings.append(f"note: --architecture={config.model.architecture}: {note}")
    return warnings


def check_memory(config: Config, world: World) -> None:
    """Raise UserError if there is too little memory for an update (on a CPU, also for the copy that a checkpoint needs)."""
    own = world.device.type
    needed = sum(footprint.of_rank(config, world.size, device.kind(world.device)).values())
    total = device.memory(world.device)[1]
    if own == "cpu":  # Linux would kill the run without a message
        needed = world.local_size * needed + footprint.checkpoint_bytes(config)
    if needed > total:
        remedy = "" if own == "cpu" else f", or use {rules.less_memory(config, world.size)}"
        raise UserError(
            f"an update needs about {needed / 1e9:,.1f} GB, but this {'machine' if own == 'cpu' else 'GPU'} has only "
            f"{total / 1e9:,.1f} GB of memory; lower --micro_batch_size, --seq_len or the model's size{remedy}"
        )


@contextlib.contextmanager
def explaining_out_of_memory(config: Config, world: World) -> Iterator[None]:
    """Turn a device's out-of-memory error into a one-line RunError that names flags to save memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        size = config.train.micro_batch_size
        smaller = f"--micro_batch_size={size // 2 if size % 2 == 0 else 1} or " if size > 1 else ""
        ran = f"rank {world.rank} ran out of memory with --micro_batch_size={size}"
        raise RunError(f"{ran}; continue with {smaller}{rules.less_memory(config, world.size)}") from error


def check_disk(config: Config) -> list[str]:
    """Raise UserError if the disk has no room for a checkpoint. Returns a warning if not all kept checkpoints will fit."""
    directory, where = Path(config.run.out_dir, config.run.name).absolute(), f"--out_dir={config.run.out_dir}"
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{where} --name={config.run.name}: {there} is a file; choose a directory")
    size, free = footprint.checkpoint_bytes(config), shutil.disk_usage(there).free
    left = f"{size / 1e6:,.1f} MB, but the disk has only {free / 1e6:,.0f} MB left"
    if size > free:
        raise UserError(f"{where}: a checkpoint needs {left}; free some space, or choose another --out_dir")
    more = footprint.checkpoints_at_once(config.checkpoint, config.train.steps) - len([*directory.glob("checkpoints/step-*")])
    kept = f"the run will write and keep {plural(more, 'more checkpoint')} of {left}"
    return [f"warning: {where}: {kept}; lower --keep_last or --keep_best"] if more * size > free else []


def banner(config: Config, world: World, step: int, reads: list[str], remarks: list[str]) -> str:
    """Return what is about to run, as aligned lines.

    config: resolved. step: where the run begins. reads, remarks: lines about the data (`data.describe`, `Mixture.remarks`).
    """
    model, train, own, ranks = config.model, config.train, world.device, plural(world.size, "rank")
    shared = ""
    if world.size > 1:
        each, more = divmod(config.micro_batches, world.size)
        shared = f", {f'{each} or {each + 1}' if more else each} on each of {ranks}"
    hardware = torch.cuda.get_device_name(own) if own.type == "cuda" else f"{own.type} ({plural(host.cores(), 'core')})"
    kernel = attention_kernel(model, device.DTYPES[train.dtype], own)
    if config.data.attend == "document":
        kernel = f"{'FlexAttention' if footprint.uses_flex(config, device.kind(own)) else 'a mask'}, within documents"
    memory, total = sum(footprint.of_rank(config, world.size, device.kind(own)).values()), device.memory(own)[1]
    peak, known = device.peak_flops(own, train.dtype) * world.size, device.known_peak_flops(own, train.dtype)
    source = "from the datasheet" if known else "measured here with matmuls"
    rows = [
        f"model   {model.architecture}, {footprint.parameter_count(model):,} parameters: "
        f"{plural(model.n_layer, 'layer')}, {model.n_embd} wide, vocabulary {model.vocab_size}, context {model.seq_len}",
        *reads,
        f"batch   {train.tokens_per_update:,} tokens = {plural(config.micro_batches, 'micro-batch')} of "
        f"{train.micro_batch_size} x {model.seq_len}{shared}; {plural(train.steps, 'step')}",
        f"ranks   {ranks}, {config.parallel.strategy}, {plural(train.threads, 'thread')} each",
        f"device  {hardware}, {train.dtype}, {'' if train.compile == 'on' else 'not '}compiled, attention by {kernel}",
        f"memory  about {memory / 1e6:,.0f} MB of {total / 1e6:,.0f} MB for each rank's tensors",
        f"peak    {peak / 1e12:.3g} TFLOP/s over all ranks, {source}",
        *(remark if remark.startswith("warning:") else f"note    {remark}" for remark in remarks),
    ]
    begins = f"from step {step}" if step else "from the beginning"
    return "\n  ".join([f"{Path(config.run.out_dir, config.run.name)}, {begins}", *rows])
