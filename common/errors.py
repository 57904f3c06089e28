"""How a command begins, speaks, fails and ends: no traceback for what a user can mend.

`UserError` is bad input, exit status 2. `RunError` is a run that cannot go on, exit status 1. A message names the flag or the
file, and what would work.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

EX_TEMPFAIL = 75  # the exit status of a run that was stopped and goes on with the same command
INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended, as a shell reports it
LONGEST_HALF = 2000  # characters of an error's beginning and of its end: it may hold something enormous
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """Bad input. The message names the flag or file and what would work."""


class RunError(Exception):
    """The run cannot go on. The message says why and what is left."""


def begin() -> None:
    """Prepare this process for a command, before anything slow is imported. Raises UserError without a working directory.

    The first Ctrl-C ends the process at once during an import, which might swallow a KeyboardInterrupt. The second one always
    does. What an import raises is printed as by `user_errors`. Output to a console that is closed goes nowhere.
    """
    sys.excepthook = end_by
    if sys.platform == "win32":
        raise UserError("Windows itself lacks signals and links that a run needs; use WSL, as docs/platforms.md says")
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # it is closed, and the next file that is opened would get its number
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    for console in (sys.stdout, sys.stderr):  # a character that the terminal does not have must not end the program
        console.reconfigure(errors="backslashreplace")
    if sys.stdout is sys.__stdout__:  # a test may have put its own in the place
        style = {name: getattr(sys.stdout, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(Console(sys.stdout.fileno(), "w", closefd=False)), **style)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory was removed; go to one that is there") from None


def interrupt(number: int, frame) -> None:
    """Answer the first Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if is_importing(traceback.walk_stack(frame)):
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


def is_importing(frames: Iterable) -> bool:
    """Whether a module is being imported in one of these frames of `traceback`."""
    return any(frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__" for frame, _ in frames)


def end_by(kind: type, error: BaseException, trace) -> None:
    """End the process by an error that nobody has caught, as from an import."""
    try:
        with user_errors():
            raise error
    except SystemExit as end:
        os._exit(end.code)
    except BaseException:
        sys.__excepthook__(kind, error, trace)


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
        raise SystemExit(1)  # the console was lost before the work was done
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
    except ModuleNotFoundError as error:
        message, status = f"{error}; make setup installs what is needed into .venv, and .venv/bin/python finds it there", 2
    except Exception as error:
        if not is_importing(traceback.walk_tb(error.__traceback__)):
            raise
        # A library does not take a variable of the environment, such as TORCH_LOGS, or its files do not go together.
        message, status = f"an import failed: {str(error).strip()}\n       (--debug prints the traceback)", 2
    rank = os.environ.get("RANK", "0")
    if rank.strip("0"):
        # torchrun ends all ranks when the first one exits. The master should be the first: it mostly has the same message.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
        message += f" [rank {rank}]"
    if "--debug" in sys.argv:
        traceback.print_exc()
    complain(f"error: {message}")
    raise SystemExit(status)


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work()` returns or raises. Raises TimeoutError where it takes longer; its thread is then left behind."""
    return in_background(work).result(seconds)


def in_background(work: Callable[[], Any]):
    """The Future of `work()`, called in a thread that does not keep the process from ending, as one of an executor would."""
    from concurrent.futures import Future  # here, because --help does not need it

    future = Future()

    def run():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def plural(count: int, word: str) -> str:
    """`count` with its noun, as in 1 rank, 1,024 ranks and 2 micro-batches."""
    return f"{count:,} {word}" + ("" if count == 1 else "es" if word.endswith("ch") else "s")


def refuse(problems: Iterable[str]) -> None:
    """Raise one UserError with all `problems`, a line each, if there are any."""
    if problems := list(problems):
        raise UserError("\n       ".join(problems))


def end_with(command: Callable[[], int]) -> NoReturn:
    """Run `command` and end the process with the exit status that it returns, without the tear-down of the interpreter.

    That may hang: threads of torch's libraries and the process group wait for one another, and other ranks wait for this
    process to end. Everything is on disk by then.
    """
    status = 1
    try:
        with user_errors():
            status = command()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)
