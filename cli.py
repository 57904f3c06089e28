"""The command line of every command: flags into a frozen dataclass, and errors without a traceback.

tyro reads the flags and writes `--help`. What is added here: all mistakes are reported at once, each in one line that says
what would work.
"""

import contextlib
import dataclasses
import difflib
import errno
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

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
INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended, as a shell reports it
LONGEST_HALF = 2000  # characters of an error's beginning and of its end: it may hold something enormous
LARGEST = 1 << 63  # of an integer; what is computed from it stays a float and a few digits
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SCALARS = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}  # as `--help` and errors show them


class UserError(Exception):
    """Bad input. The message names the flag or file and what would work."""


class RunError(Exception):
    """The run cannot go on. The message says why and what is left."""


def begin() -> None:
    """Make this process one of a command, before anything slow is imported. Raises UserError without a working directory.

    Ctrl-C ends it at once while something is imported, because imports may swallow it, and the second time in any case. What an
    import raises is printed as `user_errors` does. A console that is closed is one that nobody reads.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # another file would get its number
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    for console in (sys.stdout, sys.stderr):  # a character that the terminal does not have must not end the program
        console.reconfigure(errors="backslashreplace")
    if sys.stdout is sys.__stdout__:  # not where a test reads it
        style = {name: getattr(sys.stdout, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(Console(sys.stdout.fileno(), "w", closefd=False)), **style)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    sys.excepthook = end_by
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory was removed; go to one that is there") from None


def interrupt(number: int, frame) -> None:
    """Answer the first Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while frame:
        if is_import(frame):
            with contextlib.suppress(OSError):
                os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def is_import(frame) -> bool:
    """Whether a module is being imported in this frame."""
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"


def end_by(kind: type, error: BaseException, trace) -> None:
    """End the process by an error that nobody has caught, as from an import."""
    try:
        with user_errors():
            raise error
    except SystemExit as end:
        os._exit(end.code)
    except BaseException:
        sys.__excepthook__(kind, error, trace)


def import_problem(error: Exception) -> str:
    """Why a package could not be imported: it is not there, or does not take a variable of the environment. Else nothing."""
    trace, importing = error.__traceback__, False
    while trace:
        importing, trace = importing or is_import(trace.tb_frame), trace.tb_next
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; make setup installs what is needed into .venv, and .venv/bin/python finds it there"
    said = str(error).strip()
    refused = [
        f"{name}={value}"
        for name, value in os.environ.items()
        if importing and name.startswith(("TORCH", "PYTORCH", "MPL")) and (name in said or value in said)
    ]
    return f"the environment has {' '.join(refused)}: {said.splitlines()[0]}" if refused else ""


class LostConsole(OSError):
    """stdout takes nothing any more."""


class Console(io.FileIO):
    """stdout, whose errors can be told from those of other files."""

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise LostConsole(error.errno, error.strerror) from None


@contextlib.contextmanager
def survive_lost_console():
    """Go on without a console that takes nothing any more, as after `| head`, in a closed terminal or with > /dev/full."""
    lost = None
    try:
        yield
    except LostConsole as error:
        lost = error
    finally:  # an exit status that is on its way stays what it is
        try:
            sys.stdout.flush()
        except LostConsole as error:
            lost = error
        if lost:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if lost.errno != errno.EPIPE:  # `| head` has what it wanted
                complain(f"warning: the console takes nothing any more: {lost.strerror}")


def complain(message: str) -> None:
    """Write a message to stderr, if anybody reads it."""
    if len(message) > 2 * LONGEST_HALF:
        message = f"{message[:LONGEST_HALF]} ... {message[-LONGEST_HALF:]}"
    with contextlib.suppress(OSError):
        print(printable(message), file=sys.stderr, flush=True)


def say(message: str) -> None:
    """Write a line to the console."""
    print(printable(message), flush=True)


def printable(text: str) -> str:
    """`text` with escapes in place of control characters, which a name may have and a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "replace").decode() for c in text)


@contextlib.contextmanager
def user_errors():
    """Print an error that the user can act on as `error: ...`, without a traceback, and exit.

    The status is 2 for bad input (a UserError, or a path that is not what it has to be), 1 where the run cannot go on
    (a RunError, or a full disk), and 130 after Ctrl-C. --debug prints the traceback of an error, too.
    """
    try:
        begin()
        with survive_lost_console():
            yield
            sys.stdout.flush()
            return
        raise SystemExit(1)  # the rest was not done, so nobody may take it for done
    except UserError as error:
        message, status = str(error), 2
    except RunError as error:
        message, status = str(error), 1
    except KeyboardInterrupt:
        complain("interrupted")
        raise SystemExit(INTERRUPTED) from None
    except OSError as error:
        full = error.errno in FULL_DISK
        if not full and error.filename is None:
            raise
        message, status = f"{error.filename or 'the disk'}: {error.strerror}", 1 if full else 2
    except Exception as error:
        message, status = import_problem(error), 2
        if not message:
            raise
    rank = os.environ.get("RANK", "0")
    if rank.strip("0"):
        # torchrun ends all ranks when the first one exits. Let that be the master, whose message is mostly the same.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
        message += f" [rank {rank}]"
    if "--debug" in sys.argv:
        traceback.print_exc()
    complain(f"error: {message}")
    raise SystemExit(status)


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work()` returns or raises. Raises TimeoutError where it takes longer; its thread is then left behind."""
    from concurrent.futures import Future  # here, because --help does not need it

    future = Future()

    def run():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


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


def plural(count: int, word: str) -> str:
    """`count` with its noun, as in 1 rank, 1,024 ranks and 2 micro-batches."""
    return f"{count:,} {word}" + ("" if count == 1 else "es" if word.endswith("ch") else "s")


def refuse(problems: Iterable[str]) -> None:
    """Raise one UserError with all `problems`, a line each, if there are any."""
    if problems := list(problems):
        raise UserError("\n       ".join(problems))


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
