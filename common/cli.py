"""The command line of every command: flags into a frozen dataclass.

tyro reads the flags and writes `--help`. What is added here: all mistakes are reported at once, each in one line that says
what would work.
"""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from common.errors import LostConsole, UserError, refuse

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
# What nanoGPT has flags for and this project has none for.
NO_FLAGS = {
    "eval_only": "python evaluate.py runs/NAME does that",
    "bias": "gpt2 has biases, --architecture=llama and qwen3 have none",
    "backend": "nccl on GPUs and gloo on CPUs are chosen",
}
SCALARS = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}  # as `--help` and errors show them
LIMITS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}  # of msgspec's Meta


def read_ranks() -> tuple[int, int, int, int]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets, or 0, 1, 0 and 1. Raises UserError."""
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    with contextlib.suppress(ValueError):
        rank, size, local_rank, local_size = (int(os.environ.get(name, default)) for name, default in defaults.items())
        both = ("RANK" in os.environ) == ("WORLD_SIZE" in os.environ)
        if both and 0 <= rank < size < 1 << 20 and 0 <= local_rank < local_size < 1 << 20:
            return rank, size, local_rank, local_size
    found = " ".join(f"{name}={os.environ[name]}" for name in defaults if name in os.environ)
    raise UserError(
        "RANK must be less than WORLD_SIZE, and LOCAL_RANK less than LOCAL_WORLD_SIZE, all of them integers from 0 on; the "
        f"environment has {found}; torchrun sets all four, and one process needs none"
    )


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
    Raises one UserError with all mistakes: unknown flags with the nearest known one, wrong values with what is allowed.
    """
    import tyro

    args = [argument for argument in args if argument != "--debug"]  # `user_errors` reads it
    description = (description or "") + "\n\nAll commands take --debug, which prints the traceback of an error."
    flags, complete, mistakes = flat_fields(cls), [], []
    for argument, following in pairwise([*args, "--"]):
        name = argument.removeprefix("--").replace("-", "_")
        last = following == "--" or (following.startswith("-") and following.lstrip("-")[:1].isalpha())
        if not (last and argument.startswith("--") and name in flags):
            complete.append(argument)
        elif flags[name].type is bool:
            complete.append(f"{argument}=true")
        else:
            mistakes.append(f"--{name} needs a value, as in --{name}={syntax(flags[name].type)}")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            config, unknown = tyro.cli(
                cls,
                args=complete,
                prog=f"python {os.path.relpath(sys.argv[0])} {first}".rstrip(),
                default=default or tyro.MISSING_NONPROP,
                description=description,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
                registry=texts_for_values(),
                return_unknown_args=True,
                use_underscores=True,
            )
    except LostConsole:  # `--help | head`
        raise SystemExit(0) from None
    except SystemExit as stop:
        if not stop.code:
            raise
        # tyro takes any text for a value. So what is missing is the one argument without --.
        what = next(iter(flags))
        example = f"python {os.path.relpath(sys.argv[0])} {what.upper()}; --help says what it is"
        raise UserError(f"name a run: {run_example()}" if what in ("run", "model") else f"name the {what}: {example}") from None
    for before, argument in pairwise(["", *unknown]):
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0]
            mistakes.append(f"unknown flag --{name}{suggestion(name, flags)} (--help lists all flags)")
        elif not before.startswith("--") or "=" in before:  # else it is the value of an unknown flag
            mistakes.append(f"unexpected {argument}: a preset or a run stands before all flags, and a flag is --name=value")
    values, wrong = read_values(cls, flat_values(config), strict=False)
    refuse([*mistakes, *(f"--{name} {mistake}" for name, mistake in wrong.items())])
    return replace(config, **values)


def texts_for_values():
    """tyro's rules for how to read and show a value: it hands on the text, for it would stop at the first wrong value."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    rules = ConstructorRegistry()

    @rules.primitive_rule
    def rule(info):
        if info.type not in SCALARS and get_origin(info.type) not in (Literal, Union):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=syntax(info.type),
            instance_from_str=lambda texts: texts[0],
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
    """`values` as settings of the config dataclass `cls`, by flag name, and what is wrong with those that cannot be that."""
    kinds, found, wrong = flat_fields(cls), {}, {}
    for name, value in values.items():
        try:
            found[name] = read_value(kinds[name].type, value, strict)
        except ValueError as error:
            wrong[name] = str(error)
    return found, wrong


def read_value(kind, value, strict: bool):
    """`value` as a setting of type `kind`. Raises a ValueError that says what is allowed.

    strict: False reads numbers and booleans from text.
    """
    text = "".join(value) if isinstance(value, str | tuple) else ""
    if "\0" in text or text != text.encode("utf-8", "replace").decode():
        raise ValueError(f"must be text in UTF-8 without NUL, not {value!r}")
    try:
        found = msgspec.convert(value, kind, strict=strict)
    except (msgspec.ValidationError, OverflowError) as error:
        outside = str(error).startswith("Expected") and ("<" in str(error) or ">" in str(error))
        raise ValueError(f"must be {limits(kind) if outside else syntax(kind)}, not {value!r}") from None
    if isinstance(found, int) and abs(found) >= 1 << 63:  # what is computed from it stays a float and a few digits
        raise ValueError(f"must be less than 2^63 in magnitude, not {value!r}")
    return found


def read_quantity(text: str, units: dict[str, int]) -> int:
    """`text`, a number and one of `units`, such as 1.5GB, as a number. 0 where it is none."""
    match = re.fullmatch(rf"(\d{{1,20}}(?:\.\d{{1,20}})?)({'|'.join(units)})", text.upper())
    return round(float(match[1]) * units[match[2]]) if match else 0


def new_directory(out: str) -> Path:
    """The path of a directory to make, as --out gives it. Raises UserError where it is missing, or something has that name."""
    if not out:
        raise UserError("--out=DIR is missing, the directory to make")
    if Path(out).exists():
        raise UserError(f"--out={out} exists, and nothing is overwritten; choose another")
    return Path(out)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; perhaps you meant --lr` where `name` is near to a known name or to one of its OTHER_NAMES, else mostly nothing."""
    if name in NO_FLAGS:
        return f"; {NO_FLAGS[name]}"
    names = {other: ours for ours in known for other in [ours, *OTHER_NAMES.get(ours, "").split()]}
    near = difflib.get_close_matches(name.replace("-", "_").lower(), names, n=1)
    return f"; perhaps you meant --{names[near[0]]}" if near else ""


def similar_runs(name: str) -> str:
    """`; perhaps you meant runs/mine` where there are runs in `name`, or beside it or in runs/ something of a similar name."""
    path = Path(name)
    runs = sorted({*Path("runs").glob("*/checkpoints"), *path.parent.glob("*/checkpoints")})
    known = {str(found.parent): found.parent.name for found in [*sorted(path.parent.glob("*/config.json")), *runs]}
    near = [str(found.parent) for found in sorted(path.glob("*/checkpoints"))]
    near += [place for place in known if place != name and difflib.get_close_matches(path.name, [known[place]])]
    return f"; perhaps you meant {' or '.join(near[:4])}" if near else ""


def run_example() -> str:
    """What to type for a command that needs a run, and which runs there are."""
    runs = [str(path.parent) for path in sorted(Path("runs").glob("*/metrics.jsonl"))]
    there = ", ".join(runs[:8] + ["..."] * (len(runs) > 8)) or "none yet; python train.py makes one"
    return f"python {Path(sys.argv[0]).name} runs/NAME; there are {there}"
