"""How every command starts and ends.

Each script calls `require_packages` first, and `run` above the imports that take seconds.
"""

import contextlib
import importlib
import os
import platform
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from lockstep.common.errors import UserError, printable, user_errors
from lockstep.hardware import host


def require_packages() -> None:
    """End the script with one line if a package is missing that it imports before `run`, or if the system is Windows."""
    open_streams()
    with user_errors():
        if sys.version_info < (3, 11):  # noqa: UP036  that is what this checks
            raise UserError(f"Lockstep needs Python 3.11 or newer, but {sys.executable} is {platform.python_version()}")
        importlib.import_module("lockstep.settings")
        importlib.import_module("tyro")


def run(name: str, read: Callable[[list[str]], Any]) -> NoReturn:
    """Run the script NAME.py and exit: `read` its flags, import it as a module, and call its `main` with what `read` returned.

    This answers --help and wrong flags at once, and prepares the environment before the script imports torch. The exit status
    is what `main` returns (None: 0), or the status from `user_errors`.
    """
    open_streams()
    status = 1
    try:
        with user_errors():
            for console in (sys.stdout, sys.stderr):  # do not crash on a character that the terminal cannot show
                console.reconfigure(errors="backslashreplace")
            # torch.distributed.launch passes --local-rank besides LOCAL_RANK, which we read.
            sys.argv = [word for word in sys.argv if not re.match(r"--local[-_]rank=", word)]
            settings = read(sys.argv[1:])
            host.prepare_torch()
            status = importlib.import_module(name).main(settings) or 0
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):  # a library called sys.exit("text")
            sys.stderr.write(f"{printable(str(status))}\n")
            status = 1
    except BaseException:
        traceback.print_exc()
    # Everything is on disk by now, so skip the interpreter's teardown. Threads of torch's libraries and of the process group
    # may deadlock there, while other ranks wait for this process to end.
    for console in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody may read it any more, or its disk may be full
            console.flush()
    os._exit(status)


def open_streams() -> None:
    """Open /dev/null as stdin, stdout and stderr where the parent process left them closed, as some daemons do.

    Otherwise, Python has no such stream, and the next file that is opened gets its number and receives what libraries print.

    Also open it as stdin under `!` in a notebook, which gives commands a terminal, but nobody can type there. So wandb does not
    ask for a key.
    """
    if host.in_notebook() and os.isatty(0):
        os.close(0)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115


def launcher(ranks: int, of_node: int = 0) -> str:
    """Return the command that starts a script on this many `ranks`. of_node: ranks per machine (0: all on one)."""
    nodes = ranks // (of_node or ranks)
    machines = "--standalone" if nodes == 1 else f"--nnodes={nodes}"
    return "python" if ranks == 1 else f"torchrun {machines} --nproc_per_node={ranks // nodes}"


def again(ranks: int, of_node: int) -> str:
    """Return the command line of this process. For several machines, it lacks torchrun's rendezvous flags."""
    return f"{launcher(ranks, of_node)} {shlex.join(sys.argv)}"
