"""Every setting of training, and how a preset and flags become one frozen `Config`.

A setting's type limits its value, and lockstep/planning/rules.py lists which values conflict. This file imports neither torch
nor numpy, so that `--help` and errors in flags appear at once.
"""

import dataclasses
import json
import math
import os
import shlex
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta
from typing_extensions import Doc  # comes with tyro, which shows it as the help of a flag

from lockstep.architectures import ARCHITECTURES, OWN, Architecture, HuggingFace
from lockstep.common import cli, files
from lockstep.common.cli import flat_fields, flat_values, parse, read_values, replace
from lockstep.common.errors import UserError, messages, refuse
from lockstep.common.records import Auto, Count, FileOnly, Seed, Size
from lockstep.common.steps import read_phases, read_skipped
from lockstep.strategies import STRATEGIES, StrategyRecord

HERE = Path(__file__).parent.parent
# Upper limits bound the work and memory that a number can cost, for example as the length of a list.
Steps = Annotated[int, Meta(gt=0, le=10**12)]
Ranks = Annotated[int, Meta(gt=0, le=1 << 20)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
# Settings of earlier versions: the value that runs and presets may still have, and what to do instead of any other.
RETIRED: dict[str, tuple[Any, str]] = {
    "depth": ("off", "`python extras/ladder.py --depth=6 --tokens=tokens/NAME` prints the command for a model of a depth"),
    "fp8": (False, "use --dtype=bfloat16, or torchtitan for float8"),
    "max_shard_bytes": (10**9, "checkpoints are divided into files of up to 1 GB"),
    "max_skipped_steps": (30, "a run ends after more than 30 skipped updates in a row"),
    "mixture_order": ("auto", "a run keeps the order that it began with"),
    "prepare_command": ("", "write the command in a comment"),
    "tasks_limit": (0, "write the limit after a task, as in --tasks=hellaswag:200"),
}


@dataclass(frozen=True)
class RunConfig:
    name: str = ""
    """Name of the run, which is stored in OUT_DIR/NAME. Empty: the preset's file name."""
    seed: Seed = 1337
    """Seed for initialization, data order and dropout."""
    resume: str = "auto"
    """auto: continue from the newest intact checkpoint; off: start over; PATH: start a new run from another checkpoint."""
    out_dir: str = "runs"
    """Directory that holds all runs."""
    max_minutes: Annotated[float, Meta(ge=0, le=10**9)] = 0.0
    """Save and stop with exit status 75 this many minutes after the start (0: no limit)."""


@dataclass(frozen=True)
class DataConfig:
    tokens: str = "tokens/python"
    """A dataset directory, or a weighted mixture such as tokens/web:0.8,tokens/code:0.2 (a preset may use a list)."""
    attend: Literal["window", "document"] = "window"
    """Whether tokens attend to all earlier tokens in the window, or only to those in the same document."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """Order of the windows within an epoch."""
    phase: str = ""
    """Switch to another mixture after a step, such as 8000:tokens/web:0.5,tokens/math:0.5.
    Several phases go in one list, such as 8000:tokens/web,9000:tokens/math. A run that continues may add future phases."""
    skip_steps: str = ""
    """Skip the batches of these steps, such as 812-815,990. When a run continues, you may add future steps."""


@dataclass(frozen=True)
class ModelConfig:
    architecture: Literal[tuple(ARCHITECTURES)] = "gpt2"
    """The same arithmetic as transformers' class of this name."""
    n_layer: Annotated[int, Meta(gt=0, le=1 << 12)] = 12
    n_head: Annotated[int, Meta(gt=0, le=1 << 16)] = 12
    n_embd: Size = 768
    """Width of the residual stream."""
    seq_len: Size = 1024
    """Context length T in tokens."""
    dropout: Fraction = 0.0
    init_from: str = "scratch"
    """scratch, or a Hugging Face model directory or Hub id to take weights and shape from."""
    vocab_size: Size | Auto = "auto"
    """Rows of the embedding. auto: the dataset's vocabulary, padded to a multiple of 128."""
    n_kv_head: Size | Auto = "auto"
    """Key/value heads for grouped-query attention. auto: n_head."""
    d_ff: Size | Auto = "auto"
    """Width inside the MLP. auto: 4 n_embd for gpt2, else 8/3 n_embd rounded up to a multiple of 64."""
    tie_embeddings: bool = True
    """Share the embedding with the output layer."""
    head_dim: FileOnly[Size | Auto] = "auto"
    """Width of a head. auto: n_embd / n_head, the only choice for gpt2."""
    gelu: FileOnly[Literal["tanh", "erf"]] = "tanh"
    """For gpt2. tanh: GPT-2's approximation of GELU; erf: exact GELU, as in nanoGPT."""
    norm_eps: FileOnly[Annotated[float, Meta(gt=0, le=1)]] = 1e-5
    rope_theta: FileOnly[Annotated[float, Meta(gt=0, le=10**12)]] = 10000.0
    """Base of the rotary frequencies (not for gpt2)."""
    rope_scaling: FileOnly[str] = "none"
    """none, or Llama 3's four values: factor, low_freq_factor, high_freq_factor, original context length, as in 8,1,4,8192."""
    own_code: FileOnly[bool] = False
    """Whether model.py was edited, so that no class of transformers computes this model. Found when a run starts."""

    @property
    def record(self) -> Architecture:
        """What this architecture computes, and what Hugging Face calls it."""
        return ARCHITECTURES[self.architecture]

    @property
    def form(self) -> HuggingFace:
        """How checkpoints describe this model."""
        return OWN if self.own_code else self.record.form

    @property
    def rope_factors(self) -> tuple[float, ...]:
        """`rope_scaling` as numbers, empty for none. Raises UserError."""
        with suppress(ValueError):
            factors = tuple(float(number) for number in self.rope_scaling.split(",") if self.rope_scaling != "none")
            if not factors or len(factors) == 4 and 0 < min(factors) <= max(factors) < math.inf and factors[1] < factors[2]:
                return factors
        raise UserError(
            f'rope_scaling = "{self.rope_scaling}" must be none or four positive numbers (2nd < 3rd) like 8,1,4,8192'
        )


@dataclass(frozen=True)
class NumericsConfig:
    numerics: Literal["native", "portable"] = "native"
    """portable: the same bits on any processor, number of threads and version of torch, but slower and only in float32."""


# Bytes of state per parameter: in the blocks' matrices, and elsewhere. AdamW keeps two float32 averages, Muon one.
OPTIMIZERS = {"adamw": (8.0, 8.0), "muon": (4.0, 8.0)}
CONTINUING_LR = 1e-4  # with AdamW, a learning rate at which a trained model forgets little (docs/export.md)


@dataclass(frozen=True)
class OptimConfig:
    optimizer: Literal[tuple(OPTIMIZERS)] = "adamw"
    """muon: Muon for the hidden matrices, AdamW for everything else."""
    lr: Annotated[float, Meta(gt=0, le=1000)] = 6e-4
    """Peak learning rate."""
    warmup_steps: Annotated[int, Meta(ge=0, le=10**12)] | Auto = "auto"
    """Steps of linear warmup. auto: 2 % of all steps."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """wsd: warmup, stable, then linear decay over the last cooldown_fraction of the steps."""
    min_lr: Annotated[float, Meta(ge=0, le=1000)] | Auto = "auto"
    """Final learning rate. auto: lr / 10 for cosine, else 0."""
    weight_decay: Annotated[float, Meta(ge=0, le=1000)] = 0.1
    """Decoupled; applied only to tensors with two or more dimensions."""
    grad_clip: Annotated[float, Meta(ge=0, le=10**12)] = 1.0
    """Clip the global gradient norm to this (0: no clipping)."""
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    cooldown_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.2
    decay_steps: Count = 0
    """Finish a run from a checkpoint: decay as in wsd over this many steps, then end. It sets the schedule and the steps."""
    momentum: FileOnly[Fraction] = 0.95
    """Muon's momentum."""
    muon_dtype: FileOnly[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Precision in which Muon orthogonalizes its updates. auto: bfloat16 if that is fast here."""


@dataclass(frozen=True)
class TrainConfig:
    steps: Steps = 1000
    """Optimizer updates in the whole run."""
    tokens_per_update: Annotated[int, Meta(gt=0, le=1 << 32)] = 524288
    """Global batch size in tokens, across all ranks."""
    micro_batch_size: Size | Literal["auto"] = "auto"
    """Sequences per forward pass on each rank. auto: as many as fit in memory."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of matmuls; weights stay in float32. auto: bfloat16 if that is fast here.
    On CUDA, float32 matmuls use TF32, which has a 10-bit mantissa."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Use torch.compile. auto: only if it saves time and a compiler works."""
    activation_checkpointing: bool = False
    """Keep only each block's input for the backward pass and recompute the rest: much less memory, a third more compute."""
    threads: Annotated[int, Meta(gt=0, le=1 << 12)] | Auto = "auto"
    """CPU threads per rank. auto: cores // local ranks (without torchrun: OMP_NUM_THREADS), or 1 under exact."""
    deterministic: FileOnly[bool] = True
    """Use only CUDA kernels that give the same bits every time. CPU kernels always do."""


@dataclass(frozen=True)
class ParallelConfig:
    strategy: Annotated[
        Literal[tuple(STRATEGIES)], Doc(" ".join(f"{name}: {record.help}." for name, record in STRATEGIES.items()))
    ] = "ddp"
    replicate: Ranks = 1
    """Copies of the weights under fsdp, each sharded across a group of ranks such as a node (1: one copy across all ranks)."""
    shard_gradients: Literal["auto", "on", "off"] = "auto"
    """For fsdp. on: send gradients to their shards after every micro-batch: less memory, more traffic, and different bits.
    off: send them once per update. auto: on if an update would not fit otherwise."""
    check_replicas_every: Count = 0
    """Steps between comparisons of all ranks' weights (0: never). The run ends if a bit differs."""
    timeout_minutes: FileOnly[Annotated[float, Meta(gt=0, le=10**6)]] = 10.0
    """How long a rank waits for the others before giving up."""

    @property
    def record(self) -> StrategyRecord:
        """What a rank holds and sends under this strategy, and what works with it."""
        return STRATEGIES[self.strategy]


@dataclass(frozen=True)
class EvalConfig:
    eval_every: Count = 250
    """Steps between evaluations (0: only at the end)."""
    eval_tokens: Count = 1048576
    """Validation tokens per evaluation (0: the whole split)."""
    sample_every: Count = 0
    """Steps between text samples from the model, each on one line (0: none)."""
    tasks: str = ""
    """lm-eval tasks to score the model on: names or YAML files, such as hellaswag,arc_easy.
    hellaswag:200 uses only the first 200 documents."""
    tasks_every: Count = 0
    """Steps between scoring runs on the tasks (0: only at the end)."""


@dataclass(frozen=True)
class CheckpointConfig:
    save_every: Count = 250
    """Steps between checkpoints (0: no checkpoint depends on the step)."""
    save_minutes: Annotated[float, Meta(ge=0, le=10**9)] = 10.0
    """Also save when this many minutes have passed since the last save (0: never). The last step is always saved."""
    keep_last: Count = 2
    """Number of newest checkpoints to keep (0: all)."""
    keep_best: Count = 1
    """Also keep this many checkpoints with the lowest validation loss."""
    mirror: str = ""
    """Copy each checkpoint to this URL, such as s3://bucket/run (anything that fsspec opens).
    On an empty disk, the run continues from there."""
    async_save: bool = True
    """Write checkpoints in the background; training waits only for the copy to host memory."""


@dataclass(frozen=True)
class LogConfig:
    log_every: Steps = 10
    """Steps between lines in metrics.jsonl and on the console."""
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: str = ""
    """Empty: the environment variable WANDB_PROJECT, or else lockstep."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard in the run's directory."""
    profile: str = ""
    """Write a trace of these updates (STEP:COUNT, such as 100:3) to the run's directory."""


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)

    @property
    def skipped_batches(self) -> tuple[int, ...]:
        """The batches that --skip_steps leaves out, counted from 0, in ascending order. Raises UserError."""
        return read_skipped(self.data.skip_steps)

    @property
    def sequences_per_update(self) -> int:
        """Sequences in the global batch."""
        return self.train.tokens_per_update // self.model.seq_len

    @property
    def micro_batches(self) -> int:
        """Micro-batches in the global batch, over all ranks. micro_batch_size must be resolved."""
        return self.sequences_per_update // self.train.micro_batch_size


def load(args: list[str], description: str) -> Config:
    """Return the checked settings of a train.py command line without plan flags. See `read_command_line`. Raises UserError."""
    config = read_command_line(args, description, Config)
    check(config)
    return config


def read_command_line(args: list[str], description: str, kind: type):
    """Return what a train.py command line asks for, with every `auto` as it is. Precedence: default < preset < run < flag.

    A run that continues keeps its own settings unless a flag changes them. kind: Config, or a subclass with further groups of
    flags. Raises UserError.
    """
    path, flags = divide(args)
    refuse(f"--{name} no longer exists; {RETIRED[name][1]}" for name in cli.flag_names(flags) if name in RETIRED)
    config = parse(kind, flags, description, kind(**vars(load_preset(path, flags))), "[config/NAME.toml]")
    if not config.run.name:
        config = replace(config, name=path.stem)
    if own := of_run(config):
        asked = flat_values(config)
        config = replace(config, **flat_values(own) | {name: asked[name] for name in given(flags) if name in asked})
    return config


def load_preset(path: Path, flags: list[str]) -> Config:
    """Return the settings of a preset, which may be the config.toml of a run. Raises UserError."""
    config, run = read_preset(path), path.parent if path.parent.name else path.absolute().parent
    if "name" in given(flags):
        return config
    if path.name == "config.toml" and (run / "metrics.jsonl").exists():
        return replace(config, out_dir=str(run.parent), name=run.name)  # its current place: a run may be copied or moved
    recorded = Path(config.run.out_dir, config.run.name)
    if "\n[asked]\n" in files.read_text(path) and run.resolve() != recorded.resolve():  # written by `dumps`
        new = f"start a new run with --name=NAME, or continue that one with {shlex.quote(f'{recorded}/config.toml')}"
        raise UserError(f"{path} contains the settings of the run {recorded}; {new}")
    return config


def divide(args: list[str]) -> tuple[Path, list[str]]:
    """Return the preset of a command line, and its flags."""
    named = bool(args) and not args[0].startswith("-")
    return (Path(args[0]), args[1:]) if named else (HERE / "config" / "laptop.toml", args)


def given(flags: list[str]) -> set[str]:
    """Return the names of the settings in `flags`."""
    return set(cli.flag_names(flags))


def of_run(config: Config) -> Config | None:
    """Return the settings last requested for the run in `config`, or None if it has no checkpoints. Raises UserError."""
    run = Path(config.run.out_dir, config.run.name)
    if not any(run.glob("checkpoints/step-*")) or not (run / "config.toml").exists():
        return None
    own = read_preset(run / "config.toml", asked=True)
    return replace(own, name=config.run.name, out_dir=config.run.out_dir, resume="auto")


def first_choices(asked: Config) -> dict[str, Any]:
    """Return the settings that a run resolved when it was started as `asked` before, by flag name; empty if it was not.

    This matters until its first checkpoint, which records them too.
    """
    path = Path(asked.run.out_dir, asked.run.name, "config.toml")
    with suppress(UserError):  # also if the file is missing: nothing depends on it yet
        before = replace(read_preset(path, asked=True), name=asked.run.name, out_dir=asked.run.out_dir)
        return flat_values(read_preset(path)) if before == asked else {}
    return {}


def read_preset(path: Path, asked: bool = False) -> Config:
    """Return the `Config` in a TOML file. See `read_toml`."""
    return from_record(read_toml(path, asked), str(path))


def read_toml(path: Path, asked: bool = False) -> dict[str, Any]:
    """Read the values in a TOML file by key; tables are only headings. asked: before `auto` was resolved. Raises UserError."""
    if not path.is_file():
        own = HERE / "config" / f"{path.stem}.toml"
        presets = [own] if own.exists() else sorted(HERE.glob("config/*.toml"))
        which = "perhaps you meant" if own.exists() else "available:"
        raise UserError(f"no preset {path}; {which} {', '.join(map(from_here, presets))}")
    try:
        content = tomllib.loads(files.read_text(path, 1 << 20).removeprefix("\ufeff"))  # Windows' editors mark UTF-8 so
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a valid TOML preset: {error}") from None
    of_run = isinstance(content.get("asked"), dict)  # as written by `dumps`
    values, before = {}, content.pop("asked") if of_run else {}
    for table, keys in content.items():
        for key, value in keys.items() if isinstance(keys, dict) else [(table, keys)]:
            if key in values:
                raise UserError(f"{path}: {key} is set twice; keep one")
            values[key] = ",".join(map(str, value)) if key in ("tokens", "phase") and isinstance(value, list) else value
    if asked:
        values |= before
    if of_run:
        update_record(values)
    return values


def update_record(values: dict[str, Any]) -> None:
    """Adapt the settings that a run of an earlier version recorded, so that they give the same run."""
    limit = values.pop("tasks_limit", 0)
    if limit and values.get("tasks"):
        values["tasks"] = ",".join(f"{task}:{limit}" for task in values["tasks"].split(","))
    # What followed from the depth is recorded, too, and `load_state` takes the order. The others do not affect the bits.
    for name in ("depth", "max_shard_bytes", "max_skipped_steps", "mixture_order", "prepare_command"):
        values.pop(name, None)


def from_here(path: Path) -> str:
    """Return `path` as a command in the current directory may name it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def from_record(values: dict[str, Any], where: str) -> Config:
    """Return a checked `Config` with these settings, keyed by flag name. Raises UserError, each line beginning with `where`."""
    values, flags = without_retired(values, where), flat_fields(Config)
    refuse(f"{where}: unknown key {name}{cli.suggestion(name, flags)}" for name in values if name not in flags)
    found, wrong = read_values(Config, values, strict=True)
    refuse(f"{where}: {name} {mistake}" for name, mistake in wrong.items())
    check(config := replace(Config(), **found))
    return config


def without_retired(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `values` without `RETIRED` settings. Raises UserError if one of them has a value that no longer works."""
    refuse(
        f"{where}: {name} = {json.dumps(values[name])} no longer works; {instead}"
        for name, (last, instead) in RETIRED.items()
        if values.get(name, last) != last
    )
    return {name: value for name, value in values.items() if name not in RETIRED}


def check(config: Config) -> None:
    """Raise UserError for each setting that cannot be parsed or is not allowed here."""
    refuse(problems(config))


def problems(config: Config) -> list[str]:
    """Return a message for each setting that cannot be parsed or is not allowed here."""
    run, data, prepare = config.run, config.data, "python prepare_data.py URL --out=tokens/NAME makes a dataset from a URL"
    found = messages(
        lambda: config.skipped_batches,
        lambda: read_phases(data.phase),
        lambda: config.model.rope_factors,
        lambda: cli.require_local("out_dir", run.out_dir, "use --mirror=URL to copy each checkpoint there"),
        lambda: cli.require_local("tokens", data.tokens, prepare),
        lambda: cli.require_local("phase", data.phase, prepare),
    )
    if run.name in (".", "..") or "/" in run.name:
        found.append(f"--name={run.name} must be a plain directory name; use --out_dir for its location")
    if "@" in urlsplit(config.checkpoint.mirror).netloc:
        found.append("--mirror contains a password, which would appear in logs; put it in the storage client's own settings")
    return found


def resolve_model(model: ModelConfig, dataset_vocab_size: int) -> ModelConfig:
    """Return `model` with a number in place of each auto. Raises UserError if the vocabulary is smaller than the dataset's."""
    chosen = {
        "vocab_size": math.ceil(dataset_vocab_size / 128) * 128,
        "n_kv_head": model.n_head,
        "head_dim": model.n_embd // model.n_head,
        "d_ff": math.ceil(8 / 3 * model.n_embd / 64) * 64 if model.record.gated else 4 * model.n_embd,
    }
    model = with_chosen(model, chosen)
    if model.vocab_size < dataset_vocab_size:
        raise UserError(f"--vocab_size={model.vocab_size} is smaller than the dataset's {dataset_vocab_size}; leave it out")
    return model


def resolve_schedule(optim: OptimConfig, steps: int) -> OptimConfig:
    """Return `optim` with a number in place of each auto, for a run of `steps`."""
    min_lr = {"cosine": optim.lr / 10, "wsd": 0.0, "constant": 0.0}[optim.schedule]
    return with_chosen(optim, {"warmup_steps": math.ceil(steps / 50), "min_lr": min_lr})


def with_chosen(group, chosen: dict[str, Any]):
    """Return a group of settings in which the values of `chosen` replace auto."""
    return dataclasses.replace(group, **{name: value for name, value in chosen.items() if getattr(group, name) == "auto"})


def dumps(config: Config, asked: Config | None = None) -> str:
    """Return `config` as TOML, one table per group. Passed to train.py as a preset, it repeats the run.

    asked: the settings before `auto` was resolved. Those that differ go into the table `asked`, for when the run continues.
    """
    tables = {group.name: vars(getattr(config, group.name)) for group in dataclasses.fields(config)}
    resolved = flat_values(config)
    tables["asked"] = {name: value for name, value in flat_values(asked or config).items() if value != resolved[name]}
    text = []
    for table, values in tables.items():
        # JSON writes these values as TOML does, except for DEL, which TOML requires to be escaped.
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()]
        text.append(f"[{table}]\n" + "".join(lines))
    return "\n".join(text).replace("\x7f", "\\u007f")
