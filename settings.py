"""All settings of training, and how a preset and flags become one frozen `Config`.

The dataclasses below are the reference of all settings. Each type has the limits of its value; which values do not go together
is in planning/rules.py. The settings stand here, and not beside the code that uses them, so that `--help` and a wrong flag are
answered at once: this file imports neither torch nor numpy.
"""

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from common import cli, files
from common.cli import flat_fields, flat_values, parse, read_values, replace
from common.errors import UserError, refuse
from common.records import Count, Seed, Share, Size

HERE = Path(__file__).parent
# The upper limits bound what is computed or allocated from a number, such as a list.
Steps = Annotated[int, Meta(gt=0, le=10**12)]
SizeOrZero = Annotated[int, Meta(ge=0, le=1 << 24)]
Ranks = Annotated[int, Meta(gt=0, le=1 << 20)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
BEFORE = {"muon_dtype": "bfloat16"}  # what a run did whose version did not have the setting
REMOVED = ("wandb_group", "wandb_tags", "wandb_artifact")  # settings that the config.toml of an older run may have
MOST_SKIPPED = 10**6  # batches that --skip_steps may name


@dataclass(frozen=True)
class RunConfig:
    name: str = ""
    """The run lives in OUT_DIR/NAME. Empty: the preset's file name."""
    out_dir: str = "runs"
    """Where run directories are kept."""
    seed: Seed = 1337
    """Seeds initialization, data order and dropout."""
    resume: str = "auto"
    """auto: continue from the run's newest whole checkpoint; off: start over, refused where checkpoints exist;
    PATH: start a new run from another run or checkpoint directory."""
    max_minutes: Annotated[float, Meta(ge=0, le=10**9)] = 0.0
    """Save and stop with exit status 75 after this many minutes (0: no limit)."""
    depth: Annotated[int, Meta(gt=0, le=256)] | Literal["off"] = "off"
    """The dial: the number of layers, to which the width, the batch, the steps, the learning rate and its schedule and the
    weight decay follow. It wins over a preset; a flag wins over it."""


@dataclass(frozen=True)
class DataConfig:
    tokens: str = "tokens/python"
    """Dataset directory made by prepare_data.py, or a directory of llm.c, nanoGPT or build-nanogpt token files.
    A mixture names several and their weights, as in tokens/web:0.8,tokens/code:0.2 (in a preset also as a list)."""
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
    vocab_size: SizeOrZero = 0
    """Rows of the embedding (0: the dataset's vocabulary, padded to a multiple of 128)."""
    n_layer: Annotated[int, Meta(gt=0, le=1 << 12)] = 12
    n_head: Annotated[int, Meta(gt=0, le=1 << 16)] = 12
    n_kv_head: SizeOrZero = 0
    """Key/value heads of grouped-query attention (0: as many as n_head)."""
    n_embd: Size = 768
    """Width of the residual stream."""
    head_dim: SizeOrZero = 0
    """Width of a head (0: n_embd / n_head, the only one for gpt2)."""
    d_ff: SizeOrZero = 0
    """Width inside the MLP (0: 4 n_embd for gpt2, else 8/3 n_embd rounded up to a multiple of 64)."""
    seq_len: Size = 1024
    """Context length T in tokens."""
    dropout: Fraction = 0.0
    tie_embeddings: bool = True
    """Share the embedding with the output layer."""
    rope_theta: Annotated[float, Meta(gt=0, le=10**12)] = 10000.0
    """Base of the rotary frequencies (not for gpt2)."""
    rope_scaling: str = ""
    """Llama 3's scaling of the rotary frequencies, as in 8,1,4,8192 (empty: none):
    factor, low_freq_factor, high_freq_factor and original context."""
    gelu: Literal["tanh", "erf"] = "tanh"
    """tanh: GPT-2's approximation of GELU; erf: GELU itself, which nanoGPT computes (gpt2)."""
    norm_eps: Annotated[float, Meta(gt=0, le=1)] = 1e-5
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
    lr: Annotated[float, Meta(gt=0, le=1000)] = 6e-4
    """Peak learning rate."""
    min_lr: Annotated[float, Meta(ge=-1000, le=1000)] = -1.0
    """Learning rate at the end of the schedule (negative: lr / 10 for cosine, else 0)."""
    warmup_steps: Annotated[int, Meta(ge=-(10**12), le=10**12)] = -1
    """Steps of linear warmup (negative: 2 % of the steps)."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """wsd: warmup, stable, then a linear decay over the last cooldown_fraction of the steps."""
    cooldown_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.2
    weight_decay: Annotated[float, Meta(ge=0, le=1000)] = 0.1
    """Decoupled, on tensors of two and more dimensions."""
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    momentum: Fraction = 0.95
    """Momentum of Muon."""
    muon_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the products in which Muon orthogonalizes its updates. auto: bfloat16 where that is fast."""
    grad_clip: Annotated[float, Meta(ge=0, le=10**12)] = 1.0
    """Largest global gradient norm (0: no clipping)."""


@dataclass(frozen=True)
class TrainConfig:
    steps: Steps = 1000
    """Optimizer updates of the whole run."""
    tokens_per_update: Annotated[int, Meta(gt=0, le=1 << 32)] = 524288
    """Global batch in tokens, whatever the number of ranks."""
    micro_batch_size: Size | Literal["auto"] = "auto"
    """Sequences in one forward pass of one rank; auto fits it to memory."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products; the weights are kept in float32. auto: bfloat16 where that is fast.
    On CUDA float32 products are in TF32, which has a mantissa of 10 bits. It gives the same bits every time, too."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile. auto: on where it saves time and a compiler works."""
    fp8: bool = False
    """Multiply in float8 in the linear layers of the blocks, by torchao.
    This pays on a Hopper GPU or newer, with a billion parameters or more, in compiled code."""
    activation_checkpointing: bool = False
    """Keep only the input of each block for backward and compute the rest again: much less memory, a third more work."""
    threads: Annotated[int, Meta(ge=0, le=1 << 12)] = 0
    """CPU threads of each rank (0: cores // local ranks, and 1 under --strategy=exact)."""
    deterministic: bool = True
    """Use only kernels of CUDA that give the same bits every time. On a CPU the model needs no others."""
    max_skipped_steps: Count = 30
    """End the run after this many updates in a row whose gradient is not finite and which were therefore skipped."""


@dataclass(frozen=True)
class ParallelConfig:
    strategy: Literal["ddp", "zero1", "fsdp", "exact", "scratch_allreduce", "scratch_reduce_scatter", "scratch_overlap"] = "ddp"
    """How the ranks work together.
    ddp: torch's DistributedDataParallel;
    zero1: the same with the optimizer state shared out over the ranks;
    fsdp: weights and gradients too;
    exact: bit-identical for any number of ranks;
    scratch_*: the data parallelism of parallel/from_scratch.py."""
    replicate: Ranks = 1
    """Copies of the weights under fsdp. A group of ranks, such as a node, shares each copy (1: all ranks share one)."""
    grad_compression: Literal["none", "bf16"] = "none"
    """bf16: gradients travel between the ranks of ddp in bfloat16, half the bytes."""
    check_replicas_every: Count = 0
    """Steps between comparisons of all ranks' weights (0: never). A bit that differs ends the run."""
    timeout_minutes: Annotated[float, Meta(gt=0, le=10**6)] = 10.0
    """How long a rank waits for the others before it gives up."""


@dataclass(frozen=True)
class EvalConfig:
    eval_every: Count = 250
    """Steps between evaluations (0: only at the end)."""
    eval_tokens: Count = 1048576
    """Validation tokens of an evaluation (0: the whole split)."""
    sample_every: Count = 0
    """Steps between samples: a line of text that the model writes (0: none)."""


@dataclass(frozen=True)
class CheckpointConfig:
    save_every: Count = 250
    """Steps between checkpoints (0: only at the end)."""
    keep_last: Count = 2
    """Newest checkpoints to keep (0: all)."""
    keep_best: Count = 1
    """Checkpoints with the lowest validation loss to keep, besides the newest."""
    max_shard_bytes: Annotated[int, Meta(gt=0, le=1 << 62)] = 10**9
    """Largest file of weights or of optimizer state. A larger tensor has a file of its own.
    Under fsdp each rank writes some of the files and holds them in its memory meanwhile."""
    async_save: bool = True
    """Write checkpoints in the background; training waits only for the copy to host memory."""


@dataclass(frozen=True)
class LogConfig:
    log_every: Steps = 10
    """Steps between lines of metrics.jsonl and of the console."""
    tensorboard: bool = False
    """Also write the metrics to the run's directory as TensorBoard reads them."""
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
    def skipped_batches(self) -> tuple[int, ...]:
        """The batches that --skip_steps leaves out, counted from 0, in ascending order. Raises ValueError."""
        parts = [part.partition("-") for part in self.data.skip_steps.replace(" ", "").split(",") if part]
        ranges = [range(int(first) - 1, int(last if dash else first)) for first, dash, last in parts]
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
    plan_world_size: Ranks = 8
    """GPUs of the planned run."""
    plan_gpu: Literal["a100", "h100", "h200", "b200", "4090", "cpu"] = "h100"
    """cpu: this machine."""
    plan_mfu: Share = 0.0
    """Model FLOPs utilization to plan with, from 0 to 1 (0: a usual one)."""
    plan_depths: str = ""
    """Plan several depths of the dial and print a row for each, as in 12,16,20,24."""
    dollars_per_gpu_hour: Annotated[float, Meta(ge=0, le=10**6)] = 2.5
    """Price to plan with."""


@dataclass(frozen=True)
class Command:
    """A command line of train.py. The plan's flags are no settings of the run: config.toml does not have them."""

    config: Config = field(default_factory=Config)
    plan: PlanConfig = field(default_factory=PlanConfig)


def load(args: list[str], description: str) -> Config:
    """The `Config` of `load_command`."""
    return load_command(args, description).config


def load_command(args: list[str], description: str) -> Command:
    """The checked training command: defaults < preset (config/laptop.toml if none is named) < flags."""
    preset, args = divide(args)
    command = parse(Command, args, description, Command(read_preset(preset)), "[config/NAME.toml]")
    if not command.config.run.name:
        command = replace(command, name=preset.stem)
    if not command.plan.plan:
        given = (name for name, value in flat_values(command.plan).items() if value != getattr(PlanConfig, name))
        refuse(f"--{name} needs --plan" for name in given)
    refuse(problems(command.config))
    return command


def divide(args: list[str]) -> tuple[Path, list[str]]:
    """The preset of a command line, and its flags."""
    named = bool(args) and not args[0].startswith("-")
    return (Path(args[0]), args[1:]) if named else (HERE / "config" / "laptop.toml", args)


def given(flags: list[str]) -> set[str]:
    """The names of the settings that flags give."""
    return {flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}


def read_preset(path: Path) -> Config:
    """The `Config` in a TOML file, whose tables are headings. Raises one UserError with all its mistakes."""
    if path.is_dir() or not path.exists():
        presets = sorted(path.glob("*.toml")) or [Path("config", p.name) for p in sorted((HERE / "config").glob("*.toml"))]
        raise UserError(f"no preset {path}; there are {', '.join(map(str, presets))}")
    try:
        content = tomllib.loads(files.read_text(path, 1 << 20))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a preset in TOML: {error}") from None
    flags, values, mistakes = flat_fields(Config), {}, []
    for table, keys in content.items():
        for key, value in keys.items() if isinstance(keys, dict) else [(table, keys)]:
            if key in values:
                mistakes.append(f"{key} is given twice; keep one")
            elif key in flags:
                values[key] = ",".join(map(str, value)) if key == "tokens" and isinstance(value, list) else value
            elif key not in REMOVED:
                mistakes.append(f"unknown key {key}{cli.suggestion(key, flags)}")
    found, wrong = read_values(Config, values, strict=True)
    refuse(f"{path}: {mistake}" for mistake in [*mistakes, *(f"{key} {mistake}" for key, mistake in wrong.items())])
    return replace(Config(), **found)


def from_record(values: dict[str, Any], where: str) -> Config:
    """The `Config` whose settings a run has recorded as `values`. Unknown ones are left out. Raises UserError."""
    flags = flat_fields(Config)
    known = {name: value for name, value in (BEFORE | values).items() if name in flags}
    found, wrong = read_values(Config, known, strict=True)
    refuse(f"{where}: settings.{name} {mistake}" for name, mistake in wrong.items())
    config = replace(Config(), **found)
    refuse(f"{where}: {problem}" for problem in problems(config))
    return config


def problems(config: Config) -> Iterator[str]:
    """The settings whose text cannot be read or means something else here."""
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
    if config.run.name in (".", "..") or "/" in config.run.name:
        yield f"--name={config.run.name} must be a plain directory name; --out_dir says where the directory is"


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
