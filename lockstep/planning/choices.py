"""Resolve every `auto` setting according to what the hardware of all ranks can do. This module does not import torch."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from lockstep import settings
from lockstep.common import cli
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


def resolve(config: Config, vocab_size: int, machines: Machines, previous: dict) -> Config:
    """Resolve every `auto` in `config`. Raises UserError if settings conflict.

    previous: the run's settings so far, and its world_size. The run keeps its precision, micro-batch size, warmup, order of a
    mixture and --compile, because its bits depend on them.
    """
    config = for_portable(config, machines.ranks)
    train, optim, model = config.train, config.optim, settings.resolve_model(config.model, vocab_size)
    kept = previous if previous.get("device") == machines.device else {}
    given = {"dtype": train.dtype, "muon_dtype": optim.muon_dtype, "compile": train.compile}
    # float16 needs a loss scale, which exact's integers do not support.
    dtype = "float32" if config.parallel.strategy == "exact" and machines.dtype == "float16" else machines.dtype
    chosen = {"dtype": dtype, "muon_dtype": machines.muon_dtype, "compile": "auto"} | kept
    chosen = {name: chosen[name] if value == "auto" else value for name, value in given.items()}
    run_flops = footprint.flops_per_token(model) * train.steps * train.tokens_per_update
    chosen["compile"] = machines.choose_compile(chosen["compile"], chosen["dtype"], run_flops)
    if optim.warmup_steps == "auto" and "warmup_steps" in previous:  # lengthening a run must not lengthen its warmup
        warmup = min(previous["warmup_steps"], settings.resolve_schedule(optim, train.steps).warmup_steps)
        optim = dataclasses.replace(optim, warmup_steps=warmup)
    config = dataclasses.replace(config, model=model, optim=settings.resolve_schedule(optim, train.steps))
    config = settings.replace(config, device=machines.device, threads=machines.threads, **chosen)
    if config.data.mixture_order == "auto":
        config = settings.replace(config, mixture_order=previous.get("mixture_order", "own"))
    alike = config.parallel.strategy == kept.get("strategy") == "fsdp" and machines.ranks == kept.get("world_size")
    if config.parallel.shard_gradients == "auto" and alike:  # with other ranks, the bits differ anyway
        config = settings.replace(config, shard_gradients=kept["shard_gradients"])
    room = footprint.USABLE * machines.total / (machines.local_ranks if machines.device == "cpu" else 1)
    smallest = settings.replace(config, micro_batch_size=1) if train.micro_batch_size == "auto" else config
    shards = shard_gradients(smallest, machines.ranks, machines.device, room).parallel.shard_gradients
    config = settings.replace(config, shard_gradients=shards)
    if train.micro_batch_size == "auto":
        size = fit_micro_batch(config, previous.get("micro_batch_size"), machines)
        config = settings.replace(config, micro_batch_size=size)
    rules.check(config, machines.ranks)
    return config


def shard_gradients(config: Config, ranks: int, device: str, room: float) -> Config:
    """Resolve --shard_gradients: on if a rank of fsdp would otherwise need more than `room` bytes."""
    off, on = (settings.replace(config, shard_gradients=value) for value in ("off", "on"))
    if config.parallel.strategy != "fsdp":
        return off
    if config.parallel.shard_gradients != "auto":
        return config
    needed, less = (sum(footprint.of_rank(each, ranks, device).values()) for each in (off, on))
    return on if less < needed > room else off


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


def fit_micro_batch(config: Config, previous: int | None, machines: Machines) -> int:
    """Return the micro-batch size for `auto`, in sequences: the largest equal share of an update that fits (see `footprint`).

    A run keeps its `previous` choice if the ranks can divide the batch into such micro-batches. Under `exact`, the choice must
    not depend on what else uses the memory now, so it is based on the total memory, rounded down.
    """
    exact = config.parallel.strategy == "exact"
    if isinstance(previous, int) and config.sequences_per_update % (previous * (1 if exact else machines.ranks)) == 0:
        return previous
    usable = footprint.USABLE * (machines.total // 2**32 * 2**32 if exact else machines.free)
    budget = footprint.CPU_BYTES if machines.device == "cpu" else usable
    return footprint.largest_micro_batch(config, machines.ranks, machines.kind, budget)
