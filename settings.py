"""Every flag of training, how presets and flags become one frozen `Config`, and which values are refused.

The dataclasses of all groups stand here, not beside their users, so that `--help` and a bad flag answer at once: this file
imports neither torch nor numpy. Reading it is reading the reference of all settings.
"""

import contextlib
import dataclasses
import difflib
import errno
import io
import math
import os
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
# What users of nanoGPT and Hugging Face may type first.
OTHER_NAMES = {
    "learning_rate": "lr",
    "max_iters": "steps",
    "max_steps": "steps",
    "warmup_iters": "warmup_steps",
    "block_size": "seq_len",
    "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "tokens_per_update",
    "eval_interval": "eval_every",
    "eval_iters": "eval_tokens",
    "log_interval": "log_every",
    "dataset": "tokens",
}


class UserError(Exception):
    """Bad input. The message names the flag or file and what would work."""


class RunError(Exception):
    """The run cannot go on. The message says why and what is left."""


@contextlib.contextmanager
def user_errors():
    """Print a UserError (exit status 2) or RunError (1) as `error: ...`, once over all ranks, without a traceback."""
    try:
        yield
    except (UserError, RunError) as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank:  # torchrun ends all ranks when the first one exits: give the master, which mostly says the same, time to
            time.sleep(3)
        print(f"error: {error}" + (f" [rank {rank}]" if rank else ""), file=sys.stderr, flush=True)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None
    except OSError as error:  # of a path that cannot be what it is asked to be, or a full disk
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        print(f"error: {error.filename or 'the disk'}: {error.strerror}", file=sys.stderr, flush=True)
        raise SystemExit(1 if error.errno == errno.ENOSPC else 2) from None


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class RunConfig:
    name: str = ""
    """The run lives in OUT_DIR/NAME. Empty: the preset's file name."""
    out_dir: str = "runs"
    """Where run directories are kept."""
    seed: int = 1337
    """Seeds initialization, data order and dropout."""
    resume: str = "auto"
    """auto: continue from the run's newest whole checkpoint; off: start over, refused where checkpoints exist; PATH: start
    a new run from another run or checkpoint directory."""
    max_minutes: float = 0.0
    """Save and stop with exit status 75 after this many minutes (0: no limit)."""


@dataclass(frozen=True)
class DataConfig:
    tokens: str = "tokens/python"
    """Dataset directory made by prepare_data.py, or a directory of llm.c, nanoGPT or build-nanogpt token files."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """Order of the windows of an epoch."""


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
    d_ff: int = 0
    """Width inside the MLP (0: 4 n_embd for gpt2, else 8/3 n_embd rounded up to a multiple of 64)."""
    seq_len: int = 1024
    """Context length T in tokens."""
    dropout: float = 0.0
    tie_embeddings: bool = True
    """Share the embedding with the output layer."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies (llama, qwen3)."""
    norm_eps: float = 1e-5
    init_from: str = "scratch"
    """scratch, or a Hugging Face model directory or hub id whose weights (and shape) to start from."""


@dataclass(frozen=True)
class OptimConfig:
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the hidden matrices, AdamW for everything else."""
    lr: float = 6e-4
    """Peak learning rate."""
    min_lr: float = -1.0
    """Learning rate at the end of the schedule (negative: lr / 10 for cosine, 0 for wsd)."""
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
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products; the weights are kept in float32. auto: bfloat16 where the hardware has it."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile. auto: where it pays and a compiler works."""
    fp8: bool = False
    """Linear layers of the blocks in float8, by torchao: for Hopper GPUs or newer and a billion parameters or more."""
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
    """How the ranks work together. ddp: torch's DistributedDataParallel; zero1: the same with the optimizer state shared out
    over the ranks; fsdp: weights and gradients too; exact: bit-identical for any number of ranks; scratch_*: the data
    parallelism of ddp_from_scratch.py."""
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
    async_save: bool = True
    """Write checkpoints in the background; training waits only for the copy to host memory."""


@dataclass(frozen=True)
class LogConfig:
    log_every: int = 10
    """Steps between lines of metrics.jsonl and of the console."""
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = "lockstep"


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
    def sequences_per_update(self) -> int:
        """Sequences of the global batch."""
        return self.train.tokens_per_update // self.model.seq_len

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an update, over all ranks, once --micro_batch_size is a number."""
        return self.sequences_per_update // self.train.micro_batch_size


def flat_fields(cls) -> dict[str, dataclasses.Field]:
    """The flags of a config dataclass by name; groups (nested dataclasses) are opened."""
    flags = {}
    for item in dataclasses.fields(cls):
        flags |= flat_fields(item.type) if dataclasses.is_dataclass(item.type) else {item.name: item}
    return flags


def flat_values(config) -> dict[str, object]:
    """The settings of a config by flag name."""
    values = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        values |= flat_values(value) if dataclasses.is_dataclass(value) else {item.name: value}
    return values


def replace(config: Config, **changes) -> Config:
    """`config` with settings replaced by flag name, whatever their group."""
    groups = {}
    for group in dataclasses.fields(config):
        names = {item.name for item in dataclasses.fields(group.type)}
        mine = {name: value for name, value in changes.items() if name in names}
        groups[group.name] = dataclasses.replace(getattr(config, group.name), **mine)
    return Config(**groups)


def parse(cls, args: list[str], description: str):
    """Parse command-line `args` into the frozen dataclass `cls` with tyro: flat flags, `--a_b`, `--a-b`, `--a=v` and `--a v`.

    `--help` prints and exits 0. Raises UserError for an unknown flag (with the nearest known one) and for a bad value.
    """
    import tyro

    arguments, rest = [], list(args)
    flags = flat_fields(cls)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--help":
            arguments.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = known_name(name.replace("-", "_"), flags, f"flag --{name}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"--{name} needs a value, as in --{name}={flags[name].default}")
            value = rest.pop(0)
        if flags[name].type is bool:
            value = {"true": "True", "false": "False"}.get(value.lower(), value)
        arguments.append(f"--{name}={value}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)
            return tyro.cli(cls, args=arguments, description=description, config=markers, use_underscores=True)
    except SystemExit as stop:
        if not stop.code:
            raise
        text = " ".join(line.strip("│ ") for line in said.getvalue().splitlines() if line.startswith("│"))
        raise UserError(text.split(" ──")[0].removeprefix("Error parsing ")) from None


def known_name(name: str, flags: dict, what: str) -> str:
    """`name` if it is one of `flags`; else UserError with the nearest."""
    if name in flags:
        return name
    near = [OTHER_NAMES.get(name), *difflib.get_close_matches(name, flags, n=1, cutoff=0.5)]
    meant = next((f"; perhaps you meant --{known}" for known in near if known in flags), "")
    raise UserError(f"unknown {what}{meant} (--help lists all flags)")


def preset_arguments(path: Path) -> list[str]:
    """The settings of a TOML preset, one table a group, as flags."""
    try:
        tables = tomllib.loads(path.read_text())
    except FileNotFoundError:
        presets = ", ".join(f"config/{p.name}" for p in sorted((HERE / "config").glob("*.toml")))
        raise UserError(f"no preset {path}; there are {presets}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    groups = {group.name: flat_fields(group.type) for group in dataclasses.fields(Config)}
    arguments = []
    for table, settings in tables.items():
        if table not in groups or not isinstance(settings, dict):
            raise UserError(f"{path}: [{table}] is not one of the tables {', '.join(f'[{name}]' for name in groups)}")
        for key, value in settings.items():
            known_name(key, groups[table], f"key {key} in [{table}] of {path}")
            arguments.append(f"--{key}={value}")
    return arguments


def load(args: list[str], description: str) -> Config:
    """The `Config` of a training command: defaults < preset (config/laptop.toml if none is named) < flags, checked."""
    args = list(args)
    preset = HERE / "config" / "laptop.toml"
    if args and not args[0].startswith("-"):
        preset = Path(args.pop(0))
    stray = next((a for i, a in enumerate(args) if not a.startswith("-") and (i == 0 or "=" in args[i - 1])), None)
    if stray:
        raise UserError(f"{stray}: only the preset, before all flags, is given without --; flags are --name=value")
    config = parse(Config, preset_arguments(preset) + args, description)
    if not config.run.name:
        config = replace(config, name=preset.stem)
    check(config, int(os.environ.get("WORLD_SIZE", "1")))
    return config


def check(config: Config, world_size: int) -> None:
    """Raise one UserError that names every setting out of range and values that work."""
    run, model, optim = config.run, config.model, config.optim
    wrong = []

    def require(holds, message):
        if not holds:
            wrong.append(message)

    for name in ("n_layer", "n_head", "n_embd", "seq_len", "steps", "tokens_per_update", "log_every", "lr", "timeout_minutes"):
        require(flat_values(config)[name] > 0, f"--{name} must be greater than 0")
    for name in ("vocab_size", "n_kv_head", "d_ff", "threads", "eval_every", "eval_tokens", "save_every", "keep_last"):
        require(flat_values(config)[name] >= 0, f"--{name} must not be negative")
    for name in ("weight_decay", "grad_clip", "keep_best", "max_minutes", "check_replicas_every", "max_skipped_steps"):
        require(flat_values(config)[name] >= 0, f"--{name} must not be negative")
    for name in ("beta1", "beta2", "momentum", "dropout"):
        require(0 <= flat_values(config)[name] < 1, f"--{name} must be at least 0 and less than 1")
    require(config.parallel.replicate > 0, "--replicate must be greater than 0")
    require(0 < optim.cooldown_fraction <= 1, "--cooldown_fraction must be more than 0 and at most 1")
    require(optim.min_lr <= optim.lr, f"--min_lr must be at most --lr={optim.lr}")
    require(run.name not in (".", "..") and "/" not in run.name, "--name is a plain directory name; --out_dir says where")
    if wrong:
        raise UserError("\n       ".join(wrong))

    check_strategy(config, world_size, require)
    if model.init_from == "scratch":
        require(
            model.n_embd % model.n_head == 0,
            f"--n_embd={model.n_embd} is not a multiple of --n_head={model.n_head}; try {nearest(model.n_embd, model.n_head)}",
        )
        require(
            model.n_head % (model.n_kv_head or 1) == 0,
            f"--n_kv_head={model.n_kv_head} does not divide --n_head={model.n_head}",
        )
        require(
            model.architecture == "gpt2" or model.n_embd // model.n_head % 2 == 0,
            f"--n_embd / --n_head = {model.n_embd // model.n_head} must be even for rotary positions",
        )
        require(
            model.architecture != "gpt2" or model.n_kv_head in (0, model.n_head),
            "--n_kv_head is for llama and qwen3; gpt2 has as many key/value heads as heads",
        )
    check_batch(config, world_size, require)
    if wrong:
        raise UserError("\n       ".join(wrong))


def check_strategy(config: Config, world_size: int, require) -> None:
    """What a strategy can do, and what only another can."""
    parallel, strategy = config.parallel, config.parallel.strategy
    require(
        strategy != "exact" or config.train.dtype != "float16",
        "--strategy=exact and --dtype=float16 do not go together: its loss scale would fill the fixed point; use bfloat16",
    )
    require(
        strategy == "ddp" or parallel.grad_compression == "none",
        f"--grad_compression={parallel.grad_compression} is for --strategy=ddp, not {strategy}",
    )
    require(
        strategy == "fsdp" or parallel.replicate == 1,
        f"--replicate={parallel.replicate} is for --strategy=fsdp; under {strategy} every rank holds all weights",
    )
    require(
        world_size % parallel.replicate == 0,
        f"--replicate={parallel.replicate} does not divide the {world_size} rank(s)",
    )
    require(
        strategy != "fsdp" or config.optim.optimizer != "muon",
        "--strategy=fsdp and --optimizer=muon do not go together: Muon needs whole matrices, of which fsdp gives every rank "
        "some rows; use --strategy=zero1, which shares its state and work out by matrices",
    )
    require(
        strategy != "fsdp" or not parallel.check_replicas_every,
        "--check_replicas_every compares the ranks' copies of the weights, and under --strategy=fsdp there are none; use 0",
    )


def check_batch(config: Config, world_size: int, require) -> None:
    """The update must be cut into whole sequences, whole micro-batches and equal shares of the ranks (exact: any shares)."""
    if config.parallel.strategy == "exact":
        world_size = 1
    seq_len, tokens, micro = config.model.seq_len, config.train.tokens_per_update, config.train.micro_batch_size
    if micro == "auto":
        unit, said = seq_len * world_size, f"--seq_len={seq_len} x {world_size} rank(s)"
    else:
        require(micro > 0, "--micro_batch_size must be greater than 0, or auto")
        unit = seq_len * max(micro, 1) * world_size
        said = f"--seq_len={seq_len} x --micro_batch_size={micro} x {world_size} rank(s)"
    require(
        tokens % unit == 0,
        f"--tokens_per_update={tokens} is not a multiple of {said} = {unit}; try {nearest(tokens, unit)}",
    )


def nearest(value: int, unit: int) -> str:
    """The multiples of `unit` on both sides of `value`, as text."""
    below, above = value // unit * unit, math.ceil(value / unit) * unit
    return f"{below} or {above}" if below else str(above)


def resolve_model(model: ModelConfig, dataset_vocab_size: int) -> ModelConfig:
    """`model` with every 0 that means "choose" filled in.

    Raises UserError when the vocabulary is smaller than the dataset's.
    """
    vocab_size = model.vocab_size or math.ceil(dataset_vocab_size / 128) * 128
    if vocab_size < dataset_vocab_size:
        raise UserError(f"--vocab_size={vocab_size} is less than the dataset's {dataset_vocab_size}; leave it out to fit it")
    d_ff = model.d_ff or (4 * model.n_embd if model.architecture == "gpt2" else math.ceil(8 / 3 * model.n_embd / 64) * 64)
    return dataclasses.replace(model, vocab_size=vocab_size, n_kv_head=model.n_kv_head or model.n_head, d_ff=d_ff)


def dumps(config: Config) -> str:
    """`config` as TOML, one table a group: `train.py` accepts it as a preset."""
    lines = []
    for group in dataclasses.fields(config):
        lines.append(f"[{group.name}]")
        for name, value in flat_values(getattr(config, group.name)).items():
            lines.append(f"{name} = {toml(value)}")
        lines.append("")
    return "\n".join(lines)


def toml(value: str | bool | int | float) -> str:
    """A TOML value. Strings are basic strings, with quotes, backslashes and control characters escaped."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'
    return repr(value)
