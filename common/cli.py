"""The command line of every command: flags into a frozen dataclass.

tyro reads the flags and writes `--help`; msgspec checks the values. What is added here: a mistake is reported in one line that
says what would work.
"""

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from common import files
from common.errors import UserError, refuse

# What a flag is called in nanoGPT, build-nanogpt and Hugging Face.
OTHER_NAMES = {
    "lr": "learning_rate max_lr",
    "steps": "max_iters max_steps lr_decay_iters",
    "warmup_steps": "warmup_iters",
    "grad_clip": "max_grad_norm",
    "seq_len": "block_size max_seq_len",
    "micro_batch_size": "batch_size per_device_train_batch_size",
    "tokens_per_update": "gradient_accumulation_steps total_batch_size",
    "eval_every": "eval_interval eval_steps",
    "eval_tokens": "eval_iters",
    "log_every": "log_interval logging_steps",
    "tokens": "dataset",
    "out_dir": "output_dir",
    "schedule": "decay_lr lr_scheduler_type",
    "save_every": "save_steps always_save_checkpoint",
    "name": "run_name wandb_run_name",
    "wandb": "wandb_log report_to",
    "prompt": "start",
}
# Flags of nanoGPT, flags and values of earlier versions, and what replaces each.
NO_FLAGS = {
    "part": "datatrove prepares a corpus on many machines, and train.py reads its .ds files as they are",
    "join": "datatrove prepares a corpus on many machines, and train.py reads its .ds files as they are",
    "eval_only": "python evaluate.py runs/NAME does that",
    "bias": "gpt2 has biases, --architecture=llama and qwen3 have none",
    "csv": 'pandas.read_json("runs/NAME/metrics.jsonl", lines=True) reads what a run measured',
    "json": "replay.py prints text; metrics.jsonl has what a run measured as JSON",
    "backend": "nccl on GPUs and gloo on CPUs are chosen",
    "plan_depths": "plan one depth at a time with --depth=N; python ladder.py finds the depth for a text and a time",
    "zero1": "--strategy=fsdp shards the optimizer state and more, --strategy=ddp gives the bits of zero1",
    "grad_compression": "--strategy=fsdp --dtype=bfloat16 sends less between the ranks",
}
SCALARS = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}  # as `--help` and errors show them
LIMITS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}  # of msgspec's Meta


def flat_fields(cls) -> dict[str, dataclasses.Field]:
    """The fields of a config dataclass by flag name; groups (nested dataclasses) are opened."""
    flags = {}
    for item in dataclasses.fields(cls):
        flags |= flat_fields(item.type) if dataclasses.is_dataclass(item.type) else {item.name: item}
    return flags


def flat_values(config) -> dict[str, Any]:
    """The settings of a config by flag name."""
    values = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        values |= flat_values(value) if dataclasses.is_dataclass(value) else {item.name: value}
    return values


def replace(config, **changes):
    """`config` with settings replaced by flag name, whatever their group."""
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    for name, value in values.items():
        values[name] = replace(value, **changes) if dataclasses.is_dataclass(value) else changes.get(name, value)
    return type(config)(**values)


def parse(cls, args: list[str], description: str, default=None, first: str = ""):
    """Parse command-line `args` into the frozen dataclass `cls`: flat flags, `--a_b`, `--a-b`, `--a=v` and `--a v`.

    default: an instance of `cls` with the values of flags that are not given. `--help` prints them and exits 0.
    first: what `--help` says may stand before the flags, if that is not in `cls`.
    Raises UserError: an unknown flag with the nearest known one, a wrong value with what is allowed.
    """
    import tyro

    config, unknown = tyro.cli(
        cls,
        args=flags_last([argument for argument in args if argument != "--debug"]),  # `user_errors` reads it
        prog=f"python {os.path.relpath(sys.argv[0])} {first}".rstrip(),
        default=default or tyro.MISSING_NONPROP,
        description=f"{description}\n\nAll commands take --debug, which prints the traceback of an error.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
        registry=texts_for_values(),
        return_unknown_args=True,
        use_underscores=True,
    )
    for word in sorted(unknown, key=lambda word: not word.startswith("--"))[:1]:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            raise UserError(f"unknown flag --{name}{suggestion(name, flat_fields(cls))} (--help lists all flags)")
        raise UserError(f"unexpected {word}: a preset or a run comes before all flags, and a flag is --name=value")
    values, wrong = read_values(cls, flat_values(config), strict=False)
    if "run" in wrong:  # the one argument without --
        raise UserError(f"name a run: {run_example()}")
    refuse(f"--{name} {mistake}" for name, mistake in wrong.items())
    return replace(config, **values)


def flags_last(args: list[str]) -> list[str]:
    """`args` with flags and their values behind the other arguments, which tyro would take for more values of the flag."""
    others, flags = [], []
    for word in args:
        of_flag = flags and flags[-1].startswith("--") and "=" not in flags[-1]  # --a v
        (flags if word.startswith("--") or of_flag else others).append(word)
    return others + flags


def texts_for_values():
    """tyro's rules for how to read and show a value. They hand on its text, for `read_values` says better what is wrong."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    rules = ConstructorRegistry()

    @rules.primitive_rule
    def rule(info):
        if info.type not in SCALARS and get_origin(info.type) not in (Literal, Union):
            return None
        return PrimitiveConstructorSpec(
            nargs=(0, 1),  # none where a flag stands alone, as in --plan
            metavar=syntax(info.type),
            instance_from_str=lambda texts: texts[0] if len(texts) == 1 else texts,
            is_instance=lambda value: True,
            str_from_instance=lambda value: [str(value).lower() if isinstance(value, bool) else str(value)],
        )

    return rules


def syntax(kind) -> str:
    """What a value of type `kind` may be, as text, without its limits."""
    if kind in SCALARS or isinstance(kind, str):
        return SCALARS.get(kind, kind)
    kinds = get_args(kind)
    return syntax(kinds[0]) if get_origin(kind) is Annotated else "|".join(filter(None, map(syntax, kinds)))


def limits(kind) -> str:
    """Between which limits a number of type `kind` must be, as text."""
    if isinstance(kind, Meta):
        return " and ".join(f"{word} {getattr(kind, key):,}" for key, word in LIMITS.items() if getattr(kind, key) is not None)
    return "".join(map(limits, get_args(kind)))


def read_values(cls, values: dict[str, Any], strict: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """`values` as settings of the config dataclass `cls`, by flag name, and what is wrong with those that cannot be that.

    strict: False reads numbers and booleans from text.
    """
    kinds, found, wrong = flat_fields(cls), {}, {}
    for name, value in values.items():
        kind = kinds[name].type
        try:
            found[name] = True if kind is bool and value == [] else msgspec.convert(value, kind, strict=strict)
        except (msgspec.ValidationError, OverflowError) as error:
            outside = str(error).startswith("Expected") and ("<" in str(error) or ">" in str(error))
            allowed = limits(kind) + ", or auto" * syntax(kind).endswith("|auto") if outside else syntax(kind)
            if value == []:
                wrong[name] = f"needs a value: {allowed}"
            else:
                wrong[name] = f"must be {allowed}, not {value!r}" + (f"; {NO_FLAGS[value]}" if str(value) in NO_FLAGS else "")
    return found, wrong


def read_quantity(text: str, units: dict[str, int]) -> int:
    """`text`, a number and one of `units`, such as 1.5GB, as a number. 0 where it is none."""
    match = re.fullmatch(rf"(\d{{1,20}}(?:\.\d{{1,20}})?)({'|'.join(units)})", text.upper())
    return round(float(match[1]) * units[match[2]]) if match else 0


def require_local(flag: str, path: str, instead: str) -> None:
    """Raise UserError where a flag that takes a local path was given a URL. instead: what takes it there, or from there."""
    if "://" in path:
        raise UserError(f"--{flag}={path} must be a local path; {instead}")


def new_directory(out: str) -> Path:
    """The path of a directory to make, as --out gives it. Raises UserError where it is missing, or something has that name."""
    require_local("out", out, "`python export.py RUN --push=OWNER/NAME` uploads a model to the Hugging Face hub")
    if not out:
        raise UserError("--out=DIR is missing, the directory to make")
    if Path(out).exists():
        raise UserError(f"--out={out} exists, and nothing is overwritten; choose another")
    return Path(out)


def suggestion(name: str, known: Iterable[str]) -> str:
    """What replaces the flag `name`, or the nearest one of `known`, as in `; perhaps you meant --lr`. Empty for nothing."""
    if name in NO_FLAGS:
        return f"; {NO_FLAGS[name]}"
    others = {other: ours for ours, names in OTHER_NAMES.items() for other in names.split()}
    names = {other: ours for other, ours in others.items() if ours in known} | {ours: ours for ours in known}
    near = [name] if name in others else difflib.get_close_matches(name.lower(), names, n=1)
    return f"; perhaps you meant --{names[near[0]]}" if near and near[0] in names else ""


def similar_runs(name: str) -> str:
    """`; perhaps you meant runs/mine` where there are runs in `name`, or beside it or in runs/ something of a similar name."""
    path = Path(name)
    near = [str(found.parent) for found in sorted(path.glob("*/checkpoints"))]
    for found in sorted({*Path("runs").glob("*/checkpoints"), *path.parent.glob("*/checkpoints")}):
        near += [str(found.parent)] * bool(difflib.get_close_matches(path.name, [found.parent.name]))
    return f"; perhaps you meant {' or '.join(near[:4])}" if near else ""


def run_example() -> str:
    """What to type for a command that needs a run, and which runs there are."""
    runs = [str(path.parent) for path in sorted(Path("runs").glob("*/metrics.jsonl"))]
    there = files.shortened(runs) if runs else "none yet; python train.py makes one"
    return f"python {Path(sys.argv[0]).name} runs/NAME; there are {there}"
