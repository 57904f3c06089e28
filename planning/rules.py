"""Which settings do not go together: each with the flag to change and values that work.

Imports no torch, so that wrong flags are answered at once. The limits of a single number are in its type, in settings.py.
"""

import itertools
from collections.abc import Iterator

from common.cli import replace
from common.errors import UserError, refuse
from hardware.host import read_ranks
from settings import Command, Config, ModelConfig

MOST_MICRO_BATCHES = 1 << 20  # of an update; each one has its place in a list


def check_command(command: Command) -> None:
    """Raise UserError unless the command's run, or the run that is to be planned, has settings that go together."""
    if not command.plan.plan:
        return check(command.config, read_ranks()[1])
    try:
        check(command.config, command.plan.plan_world_size)
    except UserError as error:
        raise UserError(f"{error}\n       (a plan for --plan_world_size={command.plan.plan_world_size})") from None


def check(config: Config, world_size: int) -> None:
    """Raise one UserError that names every setting, `auto` or resolved, that does not work on `world_size` ranks."""
    problems = strategy_problems(config, world_size), shape_problems(config.model), share_problems(config, world_size)
    refuse(itertools.chain(schedule_problems(config), *problems))


def schedule_problems(config: Config) -> Iterator[str]:
    """The settings of the run's course that another one makes impossible."""
    if config.optim.min_lr != "auto" and config.optim.min_lr > config.optim.lr:
        yield f"--min_lr={config.optim.min_lr} must be at most --lr={config.optim.lr}"
    for number, batch in enumerate(config.skipped_batches):
        if batch >= (end := config.train.steps + number):
            skipped = f"--skip_steps={config.data.skip_steps} has {batch + 1}"
            yield f"{skipped}, which no step of this run would see; the last is {end}"


def strategy_problems(config: Config, world_size: int) -> Iterator[str]:
    """The settings that the strategy, or another setting, does not support."""
    parallel, strategy = config.parallel, config.parallel.strategy
    if strategy == "exact" and config.train.dtype == "float16":
        yield "--strategy=exact does not support --dtype=float16, whose loss scale overflows its integers; use bfloat16"
    if config.train.fp8 and config.train.compile == "off":
        yield "--fp8=true needs --compile=on: eager float8 is slower than bfloat16 (0.3 to 0.9 times in pytorch/ao#685)"
    if strategy != "fsdp" and parallel.replicate != 1:
        yield f"--replicate={parallel.replicate} is for --strategy=fsdp; under {strategy} every rank holds all weights"
    if world_size % parallel.replicate:
        yield f"--replicate={parallel.replicate} does not divide the number of ranks, {world_size}"
    if strategy == "fsdp" and parallel.check_replicas_every:
        yield "--check_replicas_every compares the ranks' copies of the weights; --strategy=fsdp has no copies; use 0"


def shape_problems(model: ModelConfig) -> Iterator[str]:
    """The sizes of a model from scratch that do not fit each other."""
    if model.init_from != "scratch":
        return
    rotary = model.architecture != "gpt2"
    unit = model.n_head * (2 if rotary and model.head_dim == "auto" else 1)
    if model.n_embd % unit:
        even = " x 2 (rotary positions need heads of an even width)" if unit > model.n_head else ""
        values = nearest(model.n_embd, unit, unit)
        yield f"--n_embd={model.n_embd} is not a multiple of --n_head={model.n_head}{even}; try --n_embd={values}"
    elif not rotary and model.head_dim not in ("auto", model.n_embd // model.n_head):
        yield f"--head_dim={model.head_dim} is not for gpt2, where it is n_embd / n_head; leave it out"
    elif rotary and model.head_dim != "auto" and model.head_dim % 2:
        yield f"--head_dim={model.head_dim} must be even for rotary positions"
    if not rotary and model.n_kv_head not in ("auto", model.n_head):
        yield "--n_kv_head is not for gpt2, which has as many key/value heads as heads"
    elif model.n_kv_head != "auto" and model.n_head % model.n_kv_head:
        divisors = ", ".join(str(n) for n in range(1, model.n_head + 1) if model.n_head % n == 0)
        yield f"--n_kv_head={model.n_kv_head} does not divide --n_head={model.n_head}; try one of {divisors}"


def share_problems(config: Config, world_size: int) -> Iterator[str]:
    """Why the global batch is not whole micro-batches with a share of them for each rank.

    The shares must be equal, except under exact, where each rank only needs one micro-batch or more.
    """
    exact, tokens, micro = config.parallel.strategy == "exact", config.train.tokens_per_update, config.train.micro_batch_size
    micro_batch = config.model.seq_len * (1 if micro == "auto" else micro)  # in tokens
    smallest = micro_batch * world_size
    unit = micro_batch if exact else smallest
    if micro != "auto" and tokens // micro_batch > MOST_MICRO_BATCHES:
        yield f"--tokens_per_update={tokens} is {tokens // micro_batch:,} micro-batches; at most {MOST_MICRO_BATCHES:,} work"
        return
    if tokens % unit == 0 and tokens >= smallest:
        return
    factors = [f"--seq_len={config.model.seq_len}"] + [f"--micro_batch_size={micro}"] * (micro != "auto")
    factors += [f"{world_size} ranks"] * (world_size > 1 and (not exact or tokens % unit == 0))
    wrong = "not a multiple of" if tokens % unit else "less than"
    unequal = not exact and tokens % micro_batch == 0 and tokens >= smallest
    takes = unequal and not any(strategy_problems(replace(config, strategy="exact"), world_size))
    other = "; or --strategy=exact, which takes it as it is" if takes else ""
    yield f"--tokens_per_update={tokens} is {wrong} {' x '.join(factors)}; try {nearest(tokens, unit, smallest)}{other}"


def nearest(value: int, unit: int, smallest: int) -> str:
    """The multiples of `unit` on both sides of `value`, none of them less than `smallest`, as text."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below >= smallest else str(max(above, smallest))
