"""How every command starts and ends.

Each script calls `require_packages` first, and `run` above the imports that take seconds.
"""

import contextlib
import importlib
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from common.errors import UserError, user_errors
from hardware import host


def require_packages() -> None:
    """End the script with one line if a package is missing that it imports before `run`, or if the system is Windows."""
    with user_errors():
        if sys.version_info < (3, 11):  # noqa: UP036  that is what this checks
            raise UserError(f"Lockstep needs Python 3.11 or newer, but {sys.executable} is {platform.python_version()}")
        importlib.import_module("settings")
        importlib.import_module("tyro")


def run(name: str, read: Callable[[list[str]], Any]) -> NoReturn:
    """Run the script NAME.py and exit: `read` its flags, import it as a module, and call its `main` with what `read` returned.

    This answers --help and wrong flags at once, and prepares the environment before the script imports torch. The exit status
    is what `main` returns (None: 0), or the status from `user_errors`.
    """
    status = 1
    try:
        with user_errors():
            for console in (sys.stdout, sys.stderr):  # do not crash on a character that the terminal cannot show
                console.reconfigure(errors="backslashreplace")
            settings = read(sys.argv[1:])
            host.prepare_torch()
            status = importlib.import_module(name).main(settings) or 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    # Everything is on disk by now, so skip the interpreter's teardown. Threads of torch's libraries and of the process group
    # may deadlock there, while other ranks wait for this process to end.
    with contextlib.suppress(OSError):  # stdout may be closed, or its disk full
        sys.stdout.flush()
    os._exit(status)


def launcher(ranks: int, of_node: int = 0) -> str:
    """Return the command that starts a script on this many `ranks`. of_node: ranks per machine (0: all on one)."""
    nodes = ranks // (of_node or ranks)
    machines = "--standalone" if nodes == 1 else f"--nnodes={nodes}"
    return "python" if ranks == 1 else f"torchrun {machines} --nproc_per_node={ranks // nodes}"


def again(ranks: int, of_node: int) -> str:
    """Return the command line of this process. For several machines, it lacks torchrun's rendezvous flags."""
    return f"{launcher(ranks, of_node)} {shlex.join(sys.argv)}"
