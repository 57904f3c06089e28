"""All settings of training, how a preset and flags become one frozen `Config`, and which values are refused.

The dataclasses below are the reference of all settings. They stand here, and not beside the code that uses them, so that
`--help` and a wrong flag are answered at once: this file imports neither torch nor numpy.
"""

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common import cli, files
from common.cli import flat_fields, flat_values, parse, read_ranks
from common.errors import UserError, refuse

HERE = Path(__file__).parent
# What numbers must be, besides finite. The upper bounds keep what is computed from a number, such as a list, small.
RANGES = [
    ("n_layer", "greater than 0 and at most 4096", lambda x: 0 < x <= 1 << 12),
    ("n_head", "greater than 0 and at most 65536", lambda x: 0 < x <= 1 << 16),
    ("n_embd seq_len micro_batch_size", "greater than 0 and at most 2^24", lambda x: 0 < x <= 1 << 24),
    ("vocab_size n_kv_head head_dim d_ff", "at least 0 and at most 2^24", lambda x: 0 <= x <= 1 << 24),
    ("replicate plan_world_size", "greater than 0 and at most 2^20", lambda x: 0 < x <= 1 << 20),
    ("tokens_per_update", "greater than 0 and at most 2^32", lambda x: 0 < x <= 1 << 32),
    ("steps log_every", "greater than 0 and at most 10^12", lambda x: 0 < x <= 10**12),
    ("max_skipped_steps check_replicas_every eval_every", "at least 0 and at most 10^12", lambda x: 0 <= x <= 10**12),
    ("save_every keep_last keep_best eval_tokens", "at least 0 and at most 10^12", lambda x: 0 <= x <= 10**12),
    ("max_shard_bytes", "greater than 0 and at most 2^62", lambda x: 0 < x <= 1 << 62),
    ("threads", "at least 0 and at most 4096", lambda x: 0 <= x <= 1 << 12),
    ("rope_theta", "greater than 0 and at most 10^12", lambda x: 0 < x <= 1e12),
    ("norm_eps", "greater than 0 and at most 1", lambda x: 0 < x <= 1),
    ("lr", "greater than 0 and at most 1000", lambda x: 0 < x <= 1000),
    ("weight_decay", "at least 0 and at most 1000", lambda x: 0 <= x <= 1000),
    ("max_minutes grad_clip dollars_per_gpu_hour", "at least 0", lambda x: x >= 0),
    ("plan_mfu", "at least 0 and at most 1", lambda x: 0 <= x <= 1),
    ("dropout beta1 beta2 momentum", "at least 0 and less than 1", lambda x: 0 <= x < 1),
    ("cooldown_fraction", "greater than 0 and at most 1", lambda x: 0 < x <= 1),
    ("timeout_minutes", "greater than 0 and at most 1000000", lambda x: 0 < x <= 1e6),
    ("seed", "at least 0 and less than 2^63", lambda x: 0 <= x < 1 << 63),
]
FINITE = ("a finite number", lambda x: abs(x) < 1 << 63)
BEFORE = {"muon_dtype": "bfloat16"}  # what a run did whose version did not have the setting
MOST_SKIPPED = 10**6  # batches that --skip_steps may name
MOST_MICRO_BATCHES = 1 << 20  # of an update; each one has its place in a list


@dataclass(frozen=True)
class RunConfig:
    name: str = ""
    """The run lives in OUT_DIR/NAME. Empty: the preset's file name."""
    out_dir: str = "runs"
    """Where run directories are kept."""
    seed: int = 1337
    """Seeds initialization, data order and dropout."""
    resume: str = "auto"
    """auto: continue from the run's newest whole checkpoint; off: start over, refused where checkpoints exist;
    PATH: start a new run from another run or checkpoint directory."""
    max_minutes: float = 0.0
    """Save and stop with exit status 75 after this many minutes (0: no limit)."""


@dataclass(frozen=True)
class DataConfig:
    tokens: str = "tokens/python"
    """Dataset directory made by prepare_data.py, or a directory of llm.c, nanoGPT or build-nanogpt token files.
    Or several with their weights: a mixture, as in tokens/web:0.8,tokens/code:0.2 (in a preset also a list)."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """Order of the windows of an epoch."""
    skip_steps: str = ""
    """Batches to leave out, named by the steps that would have seen them, as in 812-815,990. A run may add steps to come."""
    attend: Literal["window", "document"] = "window"
    """Which tokens of its window a token sees: all earlier ones, or only those of its own document."""
    prepare_command: str = ""
    """The command that makes the dataset. It is printed where the dataset is missing."""


@dataclass(frozen=True)
class ModelConfig:
    architecture: Literal["gpt2", "llama", "qwen3"] = "gpt2"
    """The arithmetic of transformers' GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM."""
    vocab_size: int = 0
    """Rows of the embedding (0: the dataset's vocabulary, padded to a multiple of 128)."""
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0
    """Key/value heads of grouped-query attention (0: as many as n_head)."""
    n_embd: int = 768
    """Width of the residual stream."""
    head_dim: int = 0
    """Width of a head (0: n_embd / n_head, the only one for gpt2)."""
    d_ff: int = 0
    """Width inside the MLP (0: 4 n_embd for gpt2, else 8/3 n_embd rounded up to a multiple of 64)."""
    seq_len: int = 1024
    """Context length T in tokens."""
    dropout: float = 0.0
    tie_embeddings: bool = True
    """Share the embedding with the output layer."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies (not for gpt2)."""
    rope_scaling: str = ""
    """Llama 3's scaling of the rotary frequencies, as in 8,1,4,8192 (empty: none):
    factor, low_freq_factor, high_freq_factor and original context."""
    gelu: Literal["tanh", "erf"] = "tanh"
    """tanh: GPT-2's approximation of GELU; erf: GELU itself, which nanoGPT computes (gpt2)."""
    norm_eps: float = 1e-5
    init_from: str = "scratch"
    """scratch, or a Hugging Face model directory or hub id whose weights (and shape) to start from."""

    @property
    def rope_factors(self) -> tuple[float, ...]:
        """`rope_scaling` as numbers; empty for none. Raises ValueError."""
        return tuple(float(number) for number in self.rope_scaling.split(",")) if self.rope_scaling else ()


@dataclass(frozen=True)
class OptimConfig:
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the hidden matrices, AdamW for everything else."""
    lr: float = 6e-4
    """Peak learning rate."""
    min_lr: float = -1.0
    """Learning rate at the end of the schedule (negative: lr / 10 for cosine, else 0)."""
    warmup_steps: int = -1
    """Steps of linear warmup (negative: 2 % of the steps)."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """wsd: warmup, stable, then a linear decay over the last cooldown_fraction of the steps."""
    cooldown_fraction: float = 0.2
    weight_decay: float = 0.1
    """Decoupled, on tensors of two and more dimensions."""
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    """Of Muon."""
    muon_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the products in which Muon orthogonalizes its updates. auto: bfloat16 where that is fast."""
    grad_clip: float = 1.0
    """Largest global gradient norm (0: no clipping)."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 1000
    """Optimizer updates of the whole run."""
    tokens_per_update: int = 524288
    """Global batch in tokens, whatever the number of ranks."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Sequences in one forward pass of one rank; auto fits it to memory."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products; the weights are kept in float32. auto: bfloat16 where that is fast.
    float32 products on CUDA are in TF32 (float32 with a mantissa of 10 bits). They repeat their bits, too."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile. auto: where it pays and a compiler works."""
    fp8: bool = False
    """Linear layers of the blocks in float8, by torchao:
    for Hopper GPUs or newer, a billion parameters or more, and compiled code."""
    activation_checkpointing: bool = False
    """Keep only the input of each block for backward and compute the rest again: much less memory, a third more work."""
    threads: int = 0
    """CPU threads of each rank (0: cores // local ranks, and 1 under --strategy=exact)."""
    deterministic: bool = True
    """Use only kernels that give the same bits every time (CUDA; elsewhere all do)."""
    max_skipped_steps: int = 30
    """End the run after this many updates in a row whose gradient is not finite and which were therefore left out."""


@dataclass(frozen=True)
class ParallelConfig:
    strategy: Literal["ddp", "zero1", "fsdp", "exact", "scratch_allreduce", "scratch_reduce_scatter", "scratch_overlap"] = "ddp"
    """How the ranks work together.
    ddp: torch's DistributedDataParallel;
    zero1: the same with the optimizer state shared out over the ranks;
    fsdp: weights and gradients too;
    exact: bit-identical for any number of ranks;
    scratch_*: the data parallelism of parallel/from_scratch.py."""
    replicate: int = 1
    """Under fsdp, copies of the weights: that many groups of ranks, such as nodes, hold one each (1: all ranks share one)."""
    grad_compression: Literal["none", "bf16"] = "none"
    """bf16: gradients travel between the ranks of ddp in bfloat16, half the bytes."""
    check_replicas_every: int = 0
    """Steps between comparisons of all ranks' weights, which end the run where a bit differs (0: never)."""
    timeout_minutes: float = 10.0
    """How long a rank waits for the others before it gives up."""


@dataclass(frozen=True)
class EvalConfig:
    eval_every: int = 250
    """Steps between evaluations (0: only at the end)."""
    eval_tokens: int = 1048576
    """Validation tokens of an evaluation (0: the whole split)."""


@dataclass(frozen=True)
class CheckpointConfig:
    save_every: int = 250
    """Steps between checkpoints (0: only at the end)."""
    keep_last: int = 2
    """Newest checkpoints to keep (0: all)."""
    keep_best: int = 1
    """Checkpoints with the lowest validation loss to keep besides."""
    max_shard_bytes: int = 10**9
    """Largest file of weights or of optimizer state. A larger tensor has a file of its own.
    Under fsdp each rank writes some of the files and holds them in its memory meanwhile."""
    async_save: bool = True
    """Write checkpoints in the background; training waits only for the copy to host memory."""


@dataclass(frozen=True)
class LogConfig:
    log_every: int = 10
    """Steps between lines of metrics.jsonl and of the console."""
    tensorboard: bool = False
    """Also write the metrics to the run's directory as TensorBoard reads them."""
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "lockstep"
    wandb_group: str = ""
    """The group of the run, such as a sweep's name."""
    wandb_tags: str = ""
    """Tags of the run, as in baseline,124m."""
    wandb_artifact: bool = False
    """Give the checkpoint of the last step to wandb, as an artifact of type model."""


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def skipped_batches(self) -> tuple[int, ...]:
        """The batches that --skip_steps leaves out, counted from 0, in ascending order. Raises ValueError."""
        parts = [part.split("-") for part in self.data.skip_steps.replace(" ", "").split(",") if part]
        ranges = [range(int(first) - 1, int((last or [first])[0])) for first, *last in parts]
        sizes = [batches.stop - batches.start for batches in ranges]  # of one that runs backwards, 0 or less
        if min(sizes, default=1) < 1 or sum(sizes) > MOST_SKIPPED:
            raise ValueError
        return tuple(sorted({batch for batches in ranges for batch in batches}))

    @property
    def sequences_per_update(self) -> int:
        """Sequences in the global batch."""
        return self.train.tokens_per_update // self.model.seq_len

    @property
    def micro_batches(self) -> int:
        """Micro-batches in the global batch, over all ranks. micro_batch_size must be a number by now."""
        return self.sequences_per_update // self.train.micro_batch_size


@dataclass(frozen=True)
class PlanConfig:
    plan: bool = False
    """Say what the run will need (memory, time, money, traffic) and exit. It needs no GPU, no data and no other rank."""
    plan_world_size: int = 8
    """GPUs of the planned run."""
    plan_gpu: Literal["a100", "h100", "h200", "b200", "4090", "cpu"] = "h100"
    """cpu: this machine."""
    plan_mfu: float = 0.0
    """Model FLOPs utilization to plan with, from 0 to 1 (0: a usual one)."""
    dollars_per_gpu_hour: float = 2.5
    """Price to plan with."""
    plan_json: bool = False
    """Print the plan as JSON."""


@dataclass(frozen=True)
class Command:
    """A command line of train.py. The plan's flags are no settings of the run: config.toml does not have them."""

    config: Config = field(default_factory=Config)
    plan: PlanConfig = field(default_factory=PlanConfig)


def replace(config: Config, **changes) -> Config:
    """`config` with settings replaced by flag name, whatever their group."""
    groups = {}
    for group in dataclasses.fields(config):
        names = {item.name for item in dataclasses.fields(group.type)}
        mine = {name: value for name, value in changes.items() if name in names}
        groups[group.name] = dataclasses.replace(getattr(config, group.name), **mine)
    return Config(**groups)


def load(args: list[str], description: str) -> Config:
    """The `Config` of `load_command`."""
    return load_command(args, description).config


def load_command(args: list[str], description: str) -> Command:
    """The checked training command: defaults < preset (config/laptop.toml if none is named) < flags."""
    preset = HERE / "config" / "laptop.toml"
    if args and not args[0].startswith("-"):
        preset, args = Path(args[0]), args[1:]
    command = parse(Command, args, description, Command(read_preset(preset)), "[config/NAME.toml]")
    config, plan = command.config, command.plan
    if not config.run.name:
        config = replace(config, name=preset.stem)
    refuse(number_problems(plan))
    if not plan.plan:
        refuse(f"--{name} needs --plan" for name, value in flat_values(plan).items() if value != getattr(PlanConfig, name))
    try:
        check(config, plan.plan_world_size if plan.plan else read_ranks()[1])
    except UserError as error:
        note = f"\n       (a plan for --plan_world_size={plan.plan_world_size})" if plan.plan else ""
        raise UserError(f"{error}{note}") from None
    return Command(config, plan)


def read_preset(path: Path) -> Config:
    """The `Config` in a TOML file with one table a group. Raises one UserError with all its mistakes."""
    if path.is_dir() or not path.exists():
        presets = sorted(path.glob("*.toml")) or [Path("config", p.name) for p in sorted((HERE / "config").glob("*.toml"))]
        meant = {preset.stem: f"; perhaps you meant {preset}" for preset in presets}
        near = [meant[stem] for stem in difflib.get_close_matches(path.stem, meant, n=1)]
        if (path / "metrics.jsonl").exists():
            near = [f"; it is a run: --name={path.name} continues it, and {path}/config.toml with another --name repeats it"]
        raise UserError(f"no preset {path}{''.join(near)}; there are {', '.join(map(str, presets))}")
    if path.suffix == ".py":
        raise UserError(f"{path} is Python, which is not executed; docs/from_nanogpt.md has the counterpart of each setting")
    try:
        content = tomllib.loads(files.read_text(path, 1 << 20))
    except ValueError as error:
        raise UserError(f"{path} is not a preset in TOML: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: it is nested too deeply") from None
    groups = {group.name: flat_fields(group.type) for group in dataclasses.fields(Config)}
    home = {key: table for table, keys in groups.items() for key in keys}
    values, mistakes = {}, []
    for table, keys in content.items():
        if table not in groups or not isinstance(keys, dict):
            mistakes.append(f"[{table}] is not one of the tables {', '.join(f'[{name}]' for name in groups)}")
            continue
        for key, value in keys.items():
            if home.get(key) != table:
                hint = f"; it belongs in [{home[key]}]" if key in home else cli.suggestion(key, home)
                mistakes.append(f"unknown key {key} in [{table}]{hint}")
            else:
                if key == "tokens" and isinstance(value, list):
                    value = ",".join(map(str, value))
                values[key], mistake = typed(groups[table][key].type, value)
                mistakes += [f"{key} in [{table}] {mistake}"] if mistake else []
    refuse(f"{path}: {mistake}" for mistake in mistakes)
    return replace(Config(), **values)


def typed(kind, value) -> tuple[Any, str]:
    """A setting of type `kind` from a value of TOML or JSON, and what is wrong with it, if anything."""
    found = cli.read_value(kind, str(value) if isinstance(value, str | int | float) else repr(value))
    enormous = isinstance(value, int) and abs(value) >= cli.LARGEST
    if isinstance(found, ValueError) and (enormous or isinstance(value, str) and str in cli.alternatives(kind)):
        return found, str(found)
    return found, "" if found == value else f"must be {cli.syntax(kind)}, not {value!r}"  # such as a number in quotes


def from_record(values: dict[str, Any], where: str) -> Config:
    """The `Config` whose settings a run has recorded as `values`. Unknown ones are left out. Raises UserError."""
    values = BEFORE | values
    kinds = {name: item.type for name, item in flat_fields(Config).items()}
    found = {name: typed(kinds[name], value) for name, value in values.items() if name in kinds}
    refuse(f"{where}: settings.{name} {mistake}" for name, (_, mistake) in found.items() if mistake)
    config = replace(Config(), **{name: value for name, (value, _) in found.items()})
    refuse(f"{where}: {problem}" for problem in range_problems(config))
    return config


def check(config: Config, world_size: int) -> None:
    """Raise one UserError that names every setting that does not work on `world_size` ranks, and values that do.

    It works for a config as given and for one with every `auto` resolved.
    """
    refuse(range_problems(config))  # the other checks calculate with these numbers
    refuse([*strategy_problems(config, world_size), *shape_problems(config.model), *share_problems(config, world_size)])
    refuse(
        f"--skip_steps={config.data.skip_steps} has {batch + 1}, which no step of this run would see; the last is {end}"
        for number, batch in enumerate(config.skipped_batches)
        if batch >= (end := config.train.steps + number)
    )


def number_problems(config, ranges: list[tuple] = RANGES) -> Iterator[str]:
    """The numbers in any config that are outside their range."""
    for name, value in flat_values(config).items():
        words, holds = next((rule for names, *rule in ranges if name in names.split()), FINITE)
        if isinstance(value, int | float) and not (value == value and abs(value) != math.inf and holds(value)):
            yield f"--{name} must be {words}, not {value}"


def range_problems(config: Config) -> Iterator[str]:
    """The settings that make no sense by themselves."""
    yield from number_problems(config)
    if config.optim.min_lr > config.optim.lr:
        yield f"--min_lr={config.optim.min_lr} must be at most --lr={config.optim.lr}"
    try:
        valid = all(batch >= 0 for batch in config.skipped_batches)
    except ValueError:
        valid = False
    if not valid:
        wanted = f"steps from 1 on and ranges of them, such as 812-815,990, at most {MOST_SKIPPED:,} in all"
        yield f"--skip_steps={config.data.skip_steps} must be {wanted}"
    try:
        factors = config.model.rope_factors
        valid = not factors or len(factors) == 4 and min(factors) > 0 and factors[1] < factors[2] and max(factors) < math.inf
    except ValueError:
        valid = False
    if not valid:
        yield f"--rope_scaling={config.model.rope_scaling} must be four numbers greater than 0, such as Llama 3.1's 8,1,4,8192"
    if config.model.init_from == "resume":
        yield "--init_from=resume is nanoGPT's: here the same command again continues a run; leave the flag out"
    if config.log.wandb_artifact and config.log.wandb == "off":
        yield "--wandb_artifact needs --wandb=online or --wandb=offline"
    if config.run.name in (".", "..") or "/" in config.run.name:
        yield f"--name={config.run.name} must be a plain directory name; --out_dir says where the directory is"


def strategy_problems(config: Config, world_size: int) -> Iterator[str]:
    """The settings that the strategy, or another setting, does not support."""
    parallel, strategy = config.parallel, config.parallel.strategy
    if strategy == "exact" and config.train.dtype == "float16":
        yield "--strategy=exact does not support --dtype=float16, whose loss scale overflows its integers; use bfloat16"
    if config.train.fp8 and config.train.compile == "off":
        yield (
            "--fp8=true needs --compile=on: without the compiler, scaling and casting make float8 slower than bfloat16 "
            "(0.3 to 0.9 times the speed in pytorch/ao#685)"
        )
    if strategy != "ddp" and parallel.grad_compression != "none":
        yield f"--grad_compression={parallel.grad_compression} is for --strategy=ddp, not {strategy}"
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
    unit = model.n_head * (2 if rotary and not model.head_dim else 1)
    if model.n_embd % unit:
        even = " x 2 (rotary positions need heads of an even width)" if unit > model.n_head else ""
        values = nearest(model.n_embd, unit, unit)
        yield f"--n_embd={model.n_embd} is not a multiple of --n_head={model.n_head}{even}; try --n_embd={values}"
    elif not rotary and model.head_dim not in (0, model.n_embd // model.n_head):
        yield f"--head_dim={model.head_dim} is not for gpt2, where it is n_embd / n_head; leave it out"
    elif model.head_dim % 2 and rotary:
        yield f"--head_dim={model.head_dim} must be even for rotary positions"
    if not rotary and model.n_kv_head not in (0, model.n_head):
        yield "--n_kv_head is not for gpt2, which has as many key/value heads as heads"
    elif model.n_head % (model.n_kv_head or 1):
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
    factors = [f"--seq_len={config.model.seq_len}"]
    if micro != "auto":
        factors.append(f"--micro_batch_size={micro}")
    if world_size > 1 and (not exact or tokens % unit == 0):
        factors.append(f"{world_size} ranks")
    wrong = "not a multiple of" if tokens % unit else "less than"
    others, unequal = [], replace(config, strategy="exact")
    if micro != "auto" and not [*share_problems(replace(config, micro_batch_size="auto"), world_size)]:
        others.append("--micro_batch_size=auto, which takes it as it is")
    if not exact and not [*strategy_problems(unequal, world_size), *share_problems(unequal, world_size)]:
        others.append("--strategy=exact, which takes it as it is")
    other = f"; or {', or '.join(others)}" if others else ""
    yield f"--tokens_per_update={tokens} is {wrong} {' x '.join(factors)}; try {nearest(tokens, unit, smallest)}{other}"


def nearest(value: int, unit: int, smallest: int) -> str:
    """The multiples of `unit` on both sides of `value`, none of them less than `smallest`, as text."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below >= smallest else str(max(above, smallest))


def resolve_model(model: ModelConfig, dataset_vocab_size: int) -> ModelConfig:
    """`model` with a number in the place of each 0 that means "choose".

    Raises UserError when the vocabulary is smaller than the dataset's.
    """
    vocab_size = model.vocab_size or math.ceil(dataset_vocab_size / 128) * 128
    if vocab_size < dataset_vocab_size:
        raise UserError(f"--vocab_size={vocab_size} is less than the dataset's {dataset_vocab_size}; leave it out to fit it")
    d_ff = model.d_ff or (4 * model.n_embd if model.architecture == "gpt2" else math.ceil(8 / 3 * model.n_embd / 64) * 64)
    n_kv_head, head_dim = model.n_kv_head or model.n_head, model.head_dim or model.n_embd // model.n_head
    return dataclasses.replace(model, vocab_size=vocab_size, n_kv_head=n_kv_head, head_dim=head_dim, d_ff=d_ff)


def resolve_schedule(optim: OptimConfig, steps: int) -> OptimConfig:
    """`optim` with a number in the place of each negative one that means "choose", for a run of `steps`."""
    warmup_steps = optim.warmup_steps if optim.warmup_steps >= 0 else math.ceil(steps / 50)
    min_lr = optim.min_lr if optim.min_lr >= 0 else (optim.lr / 10 if optim.schedule == "cosine" else 0.0)
    return dataclasses.replace(optim, warmup_steps=warmup_steps, min_lr=min_lr)


def dumps(config: Config) -> str:
    """`config` as TOML, one table a group. As a preset of train.py it repeats the run."""
    lines = []
    for group in dataclasses.fields(config):
        lines.append(f"[{group.name}]")
        for name, value in flat_values(getattr(config, group.name)).items():
            # JSON writes these values as TOML does, but for DEL, which TOML wants escaped.
            lines.append(f"{name} = " + json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f"))
        lines.append("")
    return "\n".join(lines)
