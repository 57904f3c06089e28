"""The command line of every command: flags into a frozen dataclass.

tyro reads the flags and writes `--help`. What is added here: all mistakes are reported at once, each in one line that says
what would work.
"""

import contextlib
import dataclasses
import difflib
import io
import os
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

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
LARGEST = 1 << 63  # of an integer; what is computed from it stays a float and a few digits
SCALARS = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}  # as `--help` and errors show them


def read_ranks() -> tuple[int, int, int, int]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets, or 0, 1, 0 and 1. Raises UserError."""
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        there, missing = ("RANK", "WORLD_SIZE")[:: 1 if "RANK" in os.environ else -1]
        raise UserError(f"the environment has {there} but no {missing}; torchrun sets both, and one process needs neither")
    values = []
    for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        text = os.environ.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 8):
            raise UserError(f"the environment variable {name}={text} must be an integer of 0 or more; torchrun sets it")
        values.append(int(text))
    rank, size, local_rank, local_size = values
    for local, value, limit in (("", rank, size), ("LOCAL_", local_rank, local_size)):
        if value >= limit:
            raise UserError(f"{local}RANK={value} must be less than {local}WORLD_SIZE={limit}; torchrun sets both")
    return rank, size, local_rank, local_size


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
        ends = following == "--" or (following.startswith("-") and following.lstrip("-")[:1].isalpha())
        if ends and argument.startswith("--") and name in flags and flags[name].type is bool:
            complete.append(f"{argument}=true")
        elif ends and argument.startswith("--") and name in flags:
            mistakes.append(f"--{name} needs a value, as in --{name}={syntax(flags[name].type)}")
        else:
            complete.append(argument)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            config, unknown = tyro.cli(
                cls,
                args=complete,
                prog=f"python {os.path.relpath(sys.argv[0])} {first}".rstrip(),
                default=default or tyro.MISSING_NONPROP,
                description=description,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
                registry=value_rules(),
                return_unknown_args=True,
                use_underscores=True,
            )
    except LostConsole:  # `--help | head`
        raise SystemExit(0) from None
    except SystemExit as stop:
        if not stop.code:
            raise
        # All other mistakes are collected here. So what is missing is the one argument without --.
        what = next(iter(flags))
        example = f"python {os.path.relpath(sys.argv[0])} {what.upper()}; --help says what it is"
        raise UserError(f"name a run: {run_example()}" if what in ("run", "model") else f"name the {what}: {example}") from None
    for before, argument in pairwise(["", *unknown]):
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0]
            mistakes.append(f"unknown flag --{name}{suggestion(name, flags)} (--help lists all flags)")
        elif not before.startswith("--") or "=" in before:  # else it is the value of an unknown flag
            mistakes.append(f"unexpected {argument}: a preset or a run stands before all flags, and a flag is --name=value")
    for name, value in flat_values(config).items():
        found = value if isinstance(value, tuple) else (value,)
        mistakes += [f"--{name} {wrong}" for wrong in found if isinstance(wrong, ValueError)]
    refuse(mistakes)
    return config


def value_rules():
    """How tyro reads and shows values. A wrong one becomes a ValueError in its place, for tyro would stop at the first."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    rules = ConstructorRegistry()

    @rules.primitive_rule
    def rule(info):
        if info.type not in SCALARS and get_origin(info.type) not in (Literal, Union):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=syntax(info.type),
            instance_from_str=lambda texts: read_value(info.type, texts[0]),
            is_instance=lambda value: True,
            str_from_instance=lambda value: [str(value).lower() if isinstance(value, bool) else str(value)],
        )

    return rules


def alternatives(kind) -> list:
    """What a value of type `kind` may be: types among SCALARS and words."""
    return [kind] if kind in SCALARS or isinstance(kind, str) else [a for k in get_args(kind) for a in alternatives(k)]


def syntax(kind) -> str:
    """What a value of type `kind` may be, as text."""
    return "|".join(SCALARS.get(allowed, allowed) for allowed in alternatives(kind))


def read_value(kind, text: str):
    """The value of type `kind` that `text` means, or a ValueError that says what is allowed."""
    if "\0" in text or text != text.encode("utf-8", "replace").decode():
        encoding = sys.getfilesystemencoding()
        hint = f" (the locale has {encoding}; with PYTHONUTF8=1 it is UTF-8)" if encoding != "utf-8" else ""
        return ValueError(f"must be text in UTF-8 without NUL, not {shown(text)}{hint}")
    for allowed in alternatives(kind):
        if allowed is str or allowed == text:
            return text
        if allowed is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if allowed in (int, float):
            with contextlib.suppress(ValueError):
                value = allowed(text)
                if allowed is float or abs(value) < LARGEST:
                    return value
                return ValueError(f"must be less than 2^63 in magnitude, not {shown(text)}")
    return ValueError(f"must be {syntax(kind)}, not {shown(text)}")


def shown(text: str) -> str:
    """What a flag was given, for an error: not all of something enormous."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


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
