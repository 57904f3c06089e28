"""What a run will need, before you rent anything: `python train.py [config/NAME.toml] --plan [--flag=value ...]`

Calculates memory per rank, time, money and checkpoints from the settings alone, without a GPU, data or torch. The
speed follows from the MFU: --plan_mfu, or what we measured or assume for the GPU.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from lockstep import settings
from lockstep.common import cli, files
from lockstep.common.errors import UserError, say
from lockstep.common.records import Auto
from lockstep.hardware import footprint, gpus
from lockstep.hardware.host import read_ranks
from lockstep.planning import choices, rules
from lockstep.reports.log import Log, duration
from lockstep.settings import Config, Ranks

DOLLARS = 2.5  # per GPU hour: an assumption, so the plan also gives the hours


@dataclass(frozen=True)
class PlanConfig:
    plan: bool = False
    """Print what the run will need (memory, time, money) and exit. Works without a GPU, data or other ranks."""
    plan_world_size: Ranks = 8
    """Number of GPUs for the planned run."""
    plan_gpu: Literal["a100", "h100", "h200", "b200", "4090"] = "h100"
    plan_mfu: Annotated[float, Meta(gt=0, le=1)] | Auto = "auto"
    """Model FLOPs utilization to plan with, at most 1. auto: a typical value."""


@dataclass(frozen=True)
class Command(Config):
    """A train.py command line. Plan flags are not run settings, so config.toml omits them."""

    plan: PlanConfig = field(default_factory=PlanConfig)


def read_command(args: list[str], description: str) -> tuple[Config, PlanConfig]:
    """Read and check a train.py command line: the run's settings, and the plan flags. Raises UserError."""
    config, options = load_command(args, description)
    rank, world_size = read_ranks()[:2]
    for note in (not_taken(args, config), borrowed_rate(args, config)):
        if rank == 0 and note:
            say(note)
    given = settings.given(settings.divide(args)[1])
    if own := settings.of_run(config):  # a run's own command continues it, even if a flag has lost its effect
        now, repeated = cli.flat_values(config), cli.flat_values(own)
        given -= {name for name in given & now.keys() if now[name] == repeated[name]}
    unplanned = [f"--{name} needs --plan" for name in vars(options) if name in given and not options.plan and name != "plan"]
    try:
        rules.check(config, options.plan_world_size if options.plan else world_size, given, unplanned)
    except UserError:
        if options.plan or settings.problems(config):
            raise
        with Log(Path(config.run.out_dir, config.run.name), rank == 0):  # records the error in status.json
            raise
    return config, options


def load_command(args: list[str], description: str) -> tuple[Config, PlanConfig]:
    """Return what a command line asks for, and its plan flags. Raises UserError."""
    groups = dict(vars(settings.read_command_line(args, description, Command)))
    options = groups.pop("plan")
    return Config(**groups), options


def not_taken(args: list[str], config: Config) -> str:
    """Return a note if the run that continues as `config` differs from the preset in `args`; else empty."""
    preset, flags = settings.divide(args)
    given = settings.given(flags)
    unnamed = flags == args and "name" in given  # only the default preset, while the run may have used a different one
    if unnamed or not settings.of_run(config):
        return ""
    values, now = cli.flat_values(settings.read_preset(preset, asked=True)), cli.flat_values(config)
    names = (settings.read_toml(preset).keys() & values.keys()) - given - {"name", "out_dir", "resume"}
    other = [name for name in sorted(names) if values[name] != now[name]]
    kept = f"note: {config.run.name} keeps its own {files.shortened(other)}, whatever {os.path.relpath(preset)} has"
    return f"{kept}; flags or its config.toml change them" if other else ""


def borrowed_rate(args: list[str], config: Config) -> str:
    """Return a warning if --init_from would train at the learning rate of a preset that starts from scratch; else empty."""
    preset, flags = settings.divide(args)
    chosen = "lr" in settings.given(flags) or config.optim.lr <= settings.CONTINUING_LR
    if config.model.init_from == "scratch" or chosen or settings.of_run(config):
        return ""
    if settings.read_preset(preset).model.init_from != "scratch":  # the preset continues a model, too
        return ""
    optimizer = "" if config.optim.optimizer == "adamw" else "--optimizer=adamw "
    rate = f"{os.path.relpath(preset)} trains from scratch at --lr={config.optim.lr:g}"
    forgets = f"at which {config.model.init_from} may forget what it has learned"
    return f"warning: {rate}, {forgets}; {optimizer}--lr={settings.CONTINUING_LR:g} is gentler (docs/export.md)"


def resolve(config: Config, options: PlanConfig) -> tuple[Config, str]:
    """Resolve `config` for the planned GPUs. Also returns a remark if its tokens, and so their vocabulary, are missing."""
    from lockstep.dataset.mixture import open_if_there  # only here, because --help does not need numpy

    if config.model.init_from != "scratch":
        from lockstep.checkpoints import huggingface, lookup  # these import torch

        directory, _ = lookup.find_model(config.model.init_from, ("config.json",))
        config = dataclasses.replace(config, model=huggingface.shape_of(directory, config.model))
    mixture, vocab_size = open_if_there(config)
    remark = "" if mixture else f"{config.data.tokens} does not exist"
    if decay := config.optim.decay_steps:  # plan the branch, not its trunk
        config = settings.replace(config, steps=decay)

    def choose_compile(wanted: str, *_) -> str:
        return "on" if wanted == "auto" else wanted

    memory = gpus.GPUS[options.plan_gpu].memory
    gpu = ("cuda", "cuda", "bfloat16", "bfloat16", memory, memory)
    machines = choices.Machines(options.plan_world_size, options.plan_world_size, *gpu, 1, choose_compile)
    return choices.resolve(config, vocab_size, machines, {}), remark


def show(config: Config, options: PlanConfig) -> None:
    """Print the plan, on one rank."""
    if read_ranks()[0] == 0:
        say(text(*resolve(config, options), options))


def text(config: Config, remark: str, options: PlanConfig) -> str:
    """Return the plan for a resolved `config` as a table, verdict first. remark: see `resolve`."""
    model, train, ranks, gpu = config.model, config.train, options.plan_world_size, gpus.GPUS[options.plan_gpu]
    sizes, memory, usable = footprint.parameters(model), footprint.of_rank(config, ranks, "cuda"), footprint.USABLE * gpu.memory
    count, needed, tokens = sum(sizes.values()), sum(memory.values()), train.steps * train.tokens_per_update
    fits, smaller = needed <= usable, "--micro_batch_size=1 or " if train.micro_batch_size > 1 else ""
    mfu, source = (options.plan_mfu, "--plan_mfu") if options.plan_mfu != "auto" else gpus.typical_mfu(gpu, count)
    compute_s, waited_s = gpus.speed(config, ranks, gpu, mfu)
    step_s = compute_s + waited_s
    hours = train.steps * step_s / 3600 * ranks
    checkpoint, kept = footprint.checkpoint_bytes(config), footprint.checkpoints_at_once(config.checkpoint, train.steps)
    rows = [
        ("Parameters", model.architecture),
        *((f"  {name}", f"{size:,}") for name, size in (sizes | {"total": count}).items() if size),
        ("Memory per rank, GB",),
        *((f"  {name}", gb(size)) for name, size in memory.items() if size),
        ("  peak during an update", gb(needed), "" if fits else f"try {smaller}{rules.less_memory(config, ranks)}"),
        ("  usable", gb(usable), f"of {gb(gpu.memory)}"),
        ("Batch and tokens",),
        ("  tokens per update", f"{train.tokens_per_update:,}"),
        ("  micro-batch", f"{train.micro_batch_size} x {model.seq_len:,}"),
        ("  micro-steps per update", f"{-(-config.micro_batches // ranks):,}"),
        ("  updates", f"{train.steps:,}"),
        ("  tokens", f"{tokens:,}", f"{tokens / count:.1f} per parameter"),
        ("  vocabulary, padded", f"{model.vocab_size:,}", remark),
        ("Time and money",),
        ("  FLOPs", f"{footprint.flops_per_token(model) * tokens:.2e}"),
        ("  MFU", f"{mfu:.0%}", f"{source}; the peak is {gpu.peak_flops * ranks / 1e12:,.0f} TFLOP/s"),
        ("  one update", f"{step_s:.3f} s", f"{waited_s:.3f} s of it waiting for other ranks, if the network keeps up"),
        ("  tokens/s", f"{train.tokens_per_update / step_s:,.0f}"),
        ("  the run", duration(train.steps * step_s), f"{hours:,.1f} GPU hours at ${DOLLARS:g}"),
        ("  checkpoints on disk", f"{gb(kept * checkpoint)} GB", f"at most {kept} of {gb(checkpoint)} GB each"),
    ]  # fmt: skip
    first, second = (max(len(row[i]) for row in rows if len(row) > i) for i in range(2))
    lines = [
        f"{config.run.name} on {ranks} x {options.plan_gpu.upper()}, {config.parallel.strategy}, {train.dtype}: "
        f"{'fits' if fits else 'DOES NOT FIT'}, {duration(train.steps * step_s)}, ${hours * DOLLARS:,.0f}"
    ]
    for label, value, note in ((*row, "", "")[:3] for row in rows):
        above = "" if label[:1] == " " else "\n"
        lines.append(above + f"{label:{first}}  {value:>{second}}  {note}".rstrip())
    return "\n".join(lines)


def gb(size: float) -> str:
    """Format bytes as gigabytes."""
    return f"{size / 1e9:,.2f}" if size >= 1e7 else f"{size / 1e9:.4f}"
