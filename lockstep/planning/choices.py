"""What a run's settings become: from what the user asked for, to a value for every setting.

    settings.read_command_line   what was asked for: defaults < preset < the run's own settings, if it continues < flags
    from_start                   where the run starts: a model's shape, the end of --decay_steps, what a run keeps
    resolve                      a value for every `auto`, in the order of this file, for what all ranks' hardware can do

This module does not import torch, so that `--plan` answers at once.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep import settings
from lockstep.common import cli
from lockstep.common.errors import UserError, refuse
from lockstep.common.steps import read_phases
from lockstep.hardware import footprint
from lockstep.planning import rules
from lockstep.settings import Config


@dataclass(frozen=True)
class Machines:
    """What all ranks can do, as limited by the slowest one and by the one with the least memory."""

    ranks: int
    local_ranks: int  # ranks of one node, which on a CPU share its memory
    device: str  # cpu, cuda or mps
    kind: str  # from `hardware.device.kind`
    dtype: str  # the fastest precision
    muon_dtype: str
    free: float  # bytes of memory: the GPU's, or on a CPU, the machine's
    total: float
    threads: int  # CPU threads per rank
    choose_compile: Callable[[str, str, float], str]  # --compile, dtype, FLOPs of the run -> on or off


def from_start(asked: Config, start) -> Config:
    """Fill in what the start determines: the model's shape, the schedule, and the run's origin. Raises UserError.

    start: a `checkpoints.resume.Start`.
    """
    config = asked
    if config.model.init_from != "scratch":
        config = dataclasses.replace(config, model=start.shape(config.model))
    config = with_decay(config, start)
    if start.checkpoint:
        config = settings.replace(config, init_from=start.origin(config.model.init_from))
    if start.continues:
        before = start.state.config
        if before.run.resume not in ("auto", "off"):
            config = settings.replace(config, resume=before.run.resume)
        if start.state.step >= config.train.steps:  # a complete run keeps its checkpoints
            config = settings.replace(config, keep_last=before.checkpoint.keep_last, keep_best=before.checkpoint.keep_best)
    elif start.checkpoint:  # name the checkpoint, because its run may train on
        config = settings.replace(config, resume=str(start.checkpoint))
    elif start.pretrained_by_us and Path(config.model.init_from).exists():
        config = settings.replace(config, init_from=str(start.pretrained))
    return config


def with_decay(config: Config, start) -> Config:
    """Return `config` with the schedule and steps that follow from --decay_steps, if it is set. Raises UserError."""
    decay = config.optim.decay_steps
    if not decay:
        return config
    done, before = start.state.step, start.state.config
    steps = before.train.steps  # if the run is already in this decay
    if not start.continues or before.optim.decay_steps != decay:
        if not start.checkpoint:
            problem = "finishes a run from one of its checkpoints, so it needs --resume=PATH"
            raise UserError(f"--decay_steps={decay} {problem}; for a new run, use --schedule=wsd and --cooldown_fraction")
        peak = settings.resolve_schedule(before.optim, before.train.steps)
        if (rate := start.learning_rate(peak)) < peak.lr:
            problem = f"at {start.checkpoint}, the learning rate is {rate:.3g}, already below its peak of {peak.lr:.3g}"
            raise UserError(f"--decay_steps={decay}: {problem}; use a checkpoint from the stable part of the schedule")
        steps = done + decay
        late = [step for step, _ in read_phases(config.data.phase) if step >= steps]
        refuse(f"--phase={step}:... begins after the last step, {steps}" for step in late)
    return settings.replace(config, schedule="wsd", steps=steps)


def resolve(config: Config, vocab_size: int, machines: Machines, previous: dict) -> Config:
    """Return `config` with a value for every `auto`. Raises UserError if settings conflict.

    previous: the run's settings so far, and its world_size. The run keeps those that its bits depend on.
    """
    config = for_portable(config, machines.ranks)
    config = dataclasses.replace(config, model=settings.resolve_model(config.model, vocab_size))
    config = with_schedule(config, previous)
    config = with_hardware(config, machines, previous)
    config = with_batch(config, machines, previous)
    rules.check(config, machines.ranks)
    return config


def for_portable(config: Config, ranks: int) -> Config:
    """Set each auto in `config` to what --numerics=portable needs.

    Each micro-batch is a single sequence, so --micro_batch_size does not affect the bits. A single rank uses `exact` to sum
    gradients as several ranks do.
    """
    if config.numerics.numerics == "native":
        return config
    given = cli.flat_values(config)
    needed = {name: value for name, value in rules.PORTABLE.items() if given[name] == "auto"}
    if ranks == 1 and config.parallel.strategy == "ddp":
        needed["strategy"] = "exact"
    return settings.replace(config, micro_batch_size=1, **needed)


def with_schedule(config: Config, previous: dict) -> Config:
    """Resolve the learning rate's schedule. Lengthening a run does not lengthen its warmup."""
    optim = settings.resolve_schedule(config.optim, config.train.steps)
    if config.optim.warmup_steps == "auto" and "warmup_steps" in previous:
        optim = dataclasses.replace(optim, warmup_steps=min(previous["warmup_steps"], optim.warmup_steps))
    return dataclasses.replace(config, optim=optim)


def with_hardware(config: Config, machines: Machines, previous: dict) -> Config:
    """Resolve the device and the precision, and whether to compile. A run keeps its choices on the same kind of device."""
    kept = previous if previous.get("device") == machines.device else {}
    given = cli.flat_values(config)
    fastest = {"dtype": machines.dtype, "muon_dtype": machines.muon_dtype, "compile": "auto"}
    if config.parallel.record.no_float16 and machines.dtype == "float16":
        fastest["dtype"] = "float32"
    chosen = {}
    for name, value in fastest.items():
        chosen[name] = kept.get(name, value) if given[name] == "auto" else given[name]
    flops = footprint.flops_per_token(config.model) * config.train.steps * config.train.tokens_per_update
    chosen["compile"] = machines.choose_compile(chosen["compile"], chosen["dtype"], flops)
    return settings.replace(config, device=machines.device, threads=machines.threads, **chosen)


def with_batch(config: Config, machines: Machines, previous: dict) -> Config:
    """Resolve --shard_gradients and --micro_batch_size, which determine how much memory an update needs.

    A run keeps its choices if they still work. Under fsdp with another number of ranks, the bits differ anyway.
    """
    parallel, asked = config.parallel, config.train.micro_batch_size
    same_ranks = previous.get("world_size") == machines.ranks and previous.get("device") == machines.device
    same = parallel.strategy == previous.get("strategy") and same_ranks
    if parallel.shard_gradients == "auto" and parallel.record.shards_weights and same:
        config = settings.replace(config, shard_gradients=previous["shard_gradients"])
    room = footprint.USABLE * machines.total / (machines.local_ranks if machines.device == "cpu" else 1)
    smallest = settings.replace(config, micro_batch_size=1) if asked == "auto" else config
    shards = shard_gradients(smallest, machines.ranks, machines.device, room).parallel.shard_gradients
    config = settings.replace(config, shard_gradients=shards)
    if asked == "auto":
        size = fit_micro_batch(config, previous.get("micro_batch_size"), machines)
        config = settings.replace(config, micro_batch_size=size)
    return config


def shard_gradients(config: Config, ranks: int, device: str, room: float) -> Config:
    """Resolve --shard_gradients: on if a rank of fsdp would otherwise need more than `room` bytes."""
    off, on = (settings.replace(config, shard_gradients=value) for value in ("off", "on"))
    if not config.parallel.record.shards_weights:
        return off
    if config.parallel.shard_gradients != "auto":
        return config
    needed, less = (sum(footprint.of_rank(each, ranks, device).values()) for each in (off, on))
    return on if needed > room and less < needed else off


def fit_micro_batch(config: Config, previous: int | None, machines: Machines) -> int:
    """Return the micro-batch size for `auto`, in sequences: the largest equal share of an update that fits (see `footprint`).

    A run keeps its `previous` choice if the ranks can divide the batch into such micro-batches. Under `exact`, shares may be
    unequal, and the choice must not depend on what else uses the memory now, so it is based on the total memory, rounded down.
    """
    equal_shares, memory = machines.ranks, machines.free
    if config.parallel.record.any_ranks:
        equal_shares, memory = 1, machines.total // 2**32 * 2**32
    if isinstance(previous, int) and config.sequences_per_update % (previous * equal_shares) == 0:
        return previous
    budget = footprint.CPU_BYTES if machines.device == "cpu" else footprint.USABLE * memory
    return footprint.largest_micro_batch(config, machines.ranks, machines.kind, budget)
