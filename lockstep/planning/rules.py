"""Find the settings that conflict, and name the flag to change and values that work.

This module does not import torch, so errors in flags appear at once. A single number's limits are in its type (settings.py).
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator

from lockstep import settings
from lockstep.common.cli import as_written, flat_fields, flat_values
from lockstep.common.errors import refuse
from lockstep.common.steps import read_phases
from lockstep.settings import Config, ModelConfig

# What --numerics=portable needs. A compiler may fuse a product and a sum, which are then rounded only once.
PORTABLE = {"dtype": "float32", "muon_dtype": "float32", "compile": "off"}


# Flags whose effect depends on others: whether they have one, and why not. All other flags always have one.
EFFECTS: dict[str, tuple[Callable[[Config], bool], str]] = {
    "min_lr": (lambda c: c.optim.schedule != "constant" or c.optim.decay_steps > 0, "with --schedule=constant"),
    "cooldown_fraction": (
        lambda c: c.optim.schedule not in ("cosine", "constant") and not c.optim.decay_steps,
        "without --schedule=wsd, or with --decay_steps",
    ),
    **dict.fromkeys(
        ("schedule", "steps"),
        (
            lambda c: not c.optim.decay_steps,
            "because --decay_steps={decay_steps} ends the run that many steps after its checkpoint",
        ),
    ),
    "micro_batch_size": (
        lambda c: c.numerics.numerics == "native" or c.train.micro_batch_size == 1,
        "with --numerics=portable, whose micro-batches are single sequences",
    ),
    "shard_gradients": (
        lambda c: c.parallel.record.shards_weights or c.parallel.shard_gradients != "on",
        "without --strategy=fsdp",
    ),
    "wandb_project": (lambda c: c.log.wandb != "off", "without --wandb=online or --wandb=offline"),
}


def check(config: Config, world_size: int, given: Iterable[str] = (), also: Iterable[str] = ()) -> None:
    """Raise one UserError that lists every setting that does not work on `world_size` ranks. config: resolved or not.

    given: the settings that were given as flags, which must have an effect. A preset may have others: it serves several runs.
    also: further problems to list.
    """
    unreadable = settings.problems(config)
    parts = [also, unreadable, without_effect(config, given), portable_problems(config, world_size)]
    parts += [] if unreadable else [step_problems(config)]
    parts += [setting_problems(config, world_size), shape_problems(config.model), share_problems(config, world_size)]
    refuse(dict.fromkeys(itertools.chain(*parts)))


def without_effect(config: Config, given: Iterable[str]) -> Iterator[str]:
    """Yield a message for each setting in `given` that has no effect, unless its value says so, such as 0, off or auto."""
    values, fields = flat_values(config), flat_fields(Config)
    for name, (has_effect, why) in EFFECTS.items():
        turned_off = values[name] == fields[name].default and values[name] in (True, 0, "", "off", "none", "auto")
        if name in given and not turned_off and not has_effect(config):
            yield f"--{name}={values[name]} has no effect {why.format(**values)}; leave it out"


def step_problems(config: Config) -> Iterator[str]:
    """Yield a message for each step in a list that the run will not reach."""
    steps = math.inf if config.optim.decay_steps else config.train.steps  # --decay_steps sets train.steps later
    for number, batch in enumerate(config.skipped_batches):
        if batch >= (end := steps + number):
            skipped = f"--skip_steps={config.data.skip_steps} includes {batch + 1}"
            yield f"{skipped}, but the last step of this run is {end}; leave {batch + 1} out"
    for step, mixture in read_phases(config.data.phase):
        if step >= steps:
            yield f"--phase={step}:{mixture} begins after the last step; --steps must be more than {step}"


def setting_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for each setting that the strategy, or another setting, does not support."""
    parallel, record, optim = config.parallel, config.parallel.record, config.optim
    if optim.min_lr != "auto" and optim.min_lr > optim.lr:
        yield f"--min_lr={optim.min_lr} must be at most --lr={optim.lr}"
    if not re.fullmatch(r"([1-9]\d{0,11}:[1-9]\d{0,5})?", config.log.profile):
        yield f"--profile={config.log.profile} must be STEP:COUNT, such as 100:3 to trace steps 100 to 102"
    if config.eval.tasks_every and not config.eval.tasks:
        yield f"--tasks_every={config.eval.tasks_every} needs --tasks, such as --tasks=hellaswag,arc_easy"
    if config.train.dtype == "float16" and record.no_float16:
        yield f"--strategy={parallel.strategy} does not support --dtype=float16, {record.no_float16}; use --dtype=float32"
    if parallel.replicate != 1 and not record.shards_weights:
        yield f"--replicate={parallel.replicate} needs --strategy=fsdp; under {parallel.strategy} every rank holds all weights"
    if world_size % parallel.replicate:
        yield f"--replicate={parallel.replicate} does not divide the number of ranks, {world_size}"
    if parallel.check_replicas_every and not record.equal_weights:
        yield f"--check_replicas_every compares all ranks' weights, which differ under --strategy={parallel.strategy}; use 0"


def portable_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for each setting that --numerics=portable does not support."""
    if config.numerics.numerics == "native":
        return
    given, fields = flat_values(config), flat_fields(Config)
    strategy, any_ranks = config.parallel.strategy, config.parallel.record.any_ranks
    for name, value in PORTABLE.items():
        if given[name] not in ("auto", value):
            needed, wrong = as_written(fields[name], value), as_written(fields[name], given[name])
            yield f"--numerics=portable needs {needed}; leave out {wrong}"
    if not any_ranks and (world_size > 1 or strategy != "ddp"):
        yield f"--numerics=portable needs --strategy=exact: under {strategy}, sums of gradients depend on the number of ranks"


def shape_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a message for each size that cannot work in a model from scratch."""
    if model.init_from != "scratch":
        return
    rotary, keys = model.record.positions == "rotary", model.form.keys
    unit = model.n_head * (2 if rotary and model.head_dim == "auto" else 1)
    if model.n_embd % unit:
        even = " x 2 (rotary positions need an even head_dim)" if unit > model.n_head else ""
        values = nearest(model.n_embd, unit, unit)
        yield f"--n_embd={model.n_embd} is not a multiple of --n_head={model.n_head}{even}; try --n_embd={values}"
    elif "head_dim" not in keys and model.head_dim not in ("auto", model.n_embd // model.n_head):
        yield f"head_dim = {model.head_dim}: for {model.architecture} it must be n_embd / n_head; leave it out"
    elif rotary and model.head_dim != "auto" and model.head_dim % 2:
        yield f"head_dim = {model.head_dim} must be even for rotary positions"
    if "n_kv_head" not in keys and model.n_kv_head not in ("auto", model.n_head):
        yield f"--n_kv_head: {model.architecture} has one key/value head per query head; leave it out"
    elif model.n_kv_head != "auto" and model.n_head % model.n_kv_head:
        divisors = ", ".join(str(n) for n in range(1, model.n_head + 1) if model.n_head % n == 0)
        yield f"--n_kv_head={model.n_kv_head} does not divide --n_head={model.n_head}; try one of {divisors}"


def share_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message if the ranks cannot share the global batch in whole micro-batches.

    Shares must be equal, unless the strategy gives the same bits on any number of ranks. Then each rank needs at least one.
    """
    unequal, tokens, micro = config.parallel.record.any_ranks, config.train.tokens_per_update, config.train.micro_batch_size
    if config.numerics.numerics == "portable":
        micro = 1  # see choices.for_portable
    micro_batch = config.model.seq_len if micro == "auto" else config.model.seq_len * micro  # size in tokens
    smallest = micro_batch * world_size
    unit = micro_batch if unequal else smallest
    whole, enough = tokens % unit == 0, tokens >= smallest
    if whole and enough:
        return
    factors = [f"--seq_len={config.model.seq_len}"]
    if micro != "auto":
        factors.append(f"--micro_batch_size={micro}")
    if world_size > 1 and (whole or not unequal):
        factors.append(f"{world_size} ranks")
    wrong, other = "less than" if whole else "not a multiple of", ""
    if enough and not unequal and tokens % micro_batch == 0:
        other = "; or --strategy=exact, which allows unequal shares"
    if unequal and whole:  # too few micro-batches, but perhaps enough sequences
        sequences = tokens // config.model.seq_len
        if fit := next((n for n in range(sequences // world_size, 0, -1) if sequences % n == 0), 0):
            other = f"; or --micro_batch_size={fit}"
    yield f"--tokens_per_update={tokens} is {wrong} {' x '.join(factors)}; try {nearest(tokens, unit, smallest)}{other}"


def nearest(value: int, unit: int, smallest: int) -> str:
    """Return the nearest multiples of `unit` below and above `value`, at least `smallest`, as text."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below >= smallest else str(max(above, smallest))


def less_memory(config: Config, ranks: int) -> str:
    """Return what lets an update fit on a GPU, such as `--activation_checkpointing=true or --strategy=fsdp`."""
    sharded, remedies = config.parallel.record.shards_weights, []
    if not config.train.activation_checkpointing:
        remedies.append("--activation_checkpointing=true")
    flag = "--shard_gradients=on" if sharded else "--strategy=fsdp"
    if ranks == 1:
        remedies.append("several GPUs" if sharded else f"several GPUs with {flag}")
    elif config.parallel.shard_gradients != "on":
        remedies.append(flag)
    return " or ".join(remedies) or "a GPU with more memory"
