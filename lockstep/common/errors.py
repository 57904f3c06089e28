"""Messages and errors. An error that the user can fix names the flag or file and the fix, without a traceback."""

import contextlib
import errno
import importlib
import os
import re
import shlex
import signal
import sys
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

EX_TEMPFAIL = 75  # exit status of a stopped run, which the same command continues
PIP = f"{shlex.quote(sys.executable)} -m pip install"  # into this Python's environment
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """Bad input. The message names the flag or file, and what would work."""


class RunError(Exception):
    """The run cannot continue. The message says why, and what remains."""


@contextlib.contextmanager
def user_errors():
    """Print an error that the user can fix as `error: ...`, without a traceback, and exit. See `outcome`.

    --debug also prints the traceback.
    """
    try:
        yield
        sys.stdout.flush()
        return
    except BaseException as error:
        message, status = outcome(error)
        if message is None:
            raise
        if isinstance(error, BrokenPipeError):  # nobody reads stdout any more, as after `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard the remaining output
    if rank := os.environ.get("RANK", "0").lstrip("0"):
        # torchrun ends all ranks once one exits, so let the master exit first: it usually has the same message.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
        message += f" [rank {rank}]"
    if "--debug" in sys.argv:
        traceback.print_exc()
    if message:
        sys.stderr.write(f"{printable(message)}\n")  # one call, because other ranks write to stderr too
        sys.stderr.flush()
    raise SystemExit(status)


def outcome(error: BaseException) -> tuple[str | None, int]:
    """Return the message and exit status for an error that ends a command. The message is None if the user cannot fix it.

    The status is 2 for bad input (a UserError, or a file that cannot be opened). It is 1 if the run cannot continue (a RunError
    or a full disk), and 130 after Ctrl-C.
    """
    if isinstance(error, UserError | RunError):
        return f"error: {error}", 2 if isinstance(error, UserError) else 1
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130  # as a shell reports it
    if isinstance(error, ImportError):
        return f"error: {explain(error)}; {how_to_install(error.name)}", 2
    if isinstance(error, BrokenPipeError):
        return "", 1
    if isinstance(error, OSError) and (error.filename is not None or error.errno in FULL_DISK):
        return f"error: {error.filename or 'the disk'}: {error.strerror}", 1 if error.errno in FULL_DISK else 2
    return None, 1


def how_to_install(module: str | None) -> str:
    """Return what to do if `module` cannot be imported."""
    if os.name == "nt" or module in ("fcntl", "resource"):
        return "Windows has no such module, so use WSL there: run `wsl --install`, then pip install -r requirements.txt in it"
    requirements = os.path.relpath(Path(__file__).parents[2] / "requirements.txt")
    install = shlex.join([sys.executable, "-m", "pip", "install", "-r", requirements])
    return f"run {install}, or `make setup` and then .venv/bin/python"


def say(message: str) -> None:
    """Print a line to the console."""
    print(printable(message), flush=True)


def explain(error: BaseException) -> str:
    """Say in one line why a library's request failed: the root cause, without URL queries, which may contain a signature."""
    said = [error] if isinstance(error, FileNotFoundError | PermissionError | ImportError) else []  # names the file or module
    while cause := error.__cause__ or error.__context__:
        error = cause
    lines = [str(one).strip().partition("\n")[0] or type(one).__name__ for one in dict.fromkeys([*said, error])]
    return re.sub(r"\?\S*", "", ": ".join(lines))


@contextlib.contextmanager
def named_errors(name: object) -> Iterator[None]:
    """Turn any error from a library, a server or a damaged file into a UserError that begins with `name`."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # each library has its own classes, and the panics of tokenizers are not Exceptions
        raise UserError(f"{name}: {explain(error)}") from None


def extra(flag: str, module: str) -> ModuleType:
    """Return a module of extras/, which `flag` needs. Raises UserError if this copy lacks it, because it may be deleted."""
    try:
        return importlib.import_module(f"extras.{module}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "extras":
            raise
        found = f"{flag} needs extras/{module.partition('.')[0]}, which this copy lacks"
        raise UserError(f"{found}; leave out {flag}, or take the folder extras/ from Lockstep's repository") from None


def printable(text: str) -> str:
    """Escape control characters in `text`, because a terminal would obey them, and a file name may contain some.

    Unlike `ascii`, it keeps letters of any language, their spaces, and the joiners that emoji and some scripts need.
    """

    def keep(c: str) -> bool:
        return c.isprintable() or c in "\n\t\u200c\u200d" or unicodedata.category(c) == "Zs"

    return "".join(c if keep(c) else c.encode("unicode_escape", "replace").decode() for c in text)


def one_line(text: str) -> str:
    """Show `text` on one line: as it is, but with line ends, tabs and other control characters escaped."""
    return printable(text.replace("\n", "\\n").replace("\t", "\\t"))


def plural(count: int, word: str) -> str:
    """Return a count with its noun: 1 rank, 1,024 ranks, 2 micro-batches."""
    return f"{count:,} {word}" + ("" if count == 1 else "es" if word.endswith("ch") else "s")


def refuse(problems: Iterable[str]) -> None:
    """If there are any `problems`, raise one UserError that lists them, one per line."""
    if problems := list(problems):
        raise UserError("\n       ".join(problems))


def messages(*checks: Callable[[], Any]) -> list[str]:
    """Call each of the `checks`, and return the messages of those that raise UserError."""
    found = []
    for check in checks:
        try:
            check()
        except UserError as error:
            found.append(str(error))
    return found


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Run `work` in a thread, and return or raise what it does. After `seconds`, abandons it and raises TimeoutError."""
    return ThreadPoolExecutor(1).submit(work).result(seconds)
