"""How every command starts and ends: `command.run` stands at the top of each script, above the imports that take seconds."""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from common.errors import user_errors
from hardware import host


def run(name: str, read: Callable[[list[str]], Any]) -> NoReturn:
    """Run the script NAME.py to its end: `read` its flags, import it as a module, and call its `main` with what was read.

    So --help and wrong flags are answered at once, and torch, which the script imports, finds its environment prepared. The
    exit status is what `main` returns (None: 0), or that of `user_errors`.
    """
    status = 1
    try:
        with user_errors():
            for console in (sys.stdout, sys.stderr):  # a character that the terminal lacks must not end the program
                console.reconfigure(errors="backslashreplace")
            settings = read(sys.argv[1:])
            host.prepare_torch()
            status = importlib.import_module(name).main(settings) or 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    # Without the interpreter's tear-down, which may hang: threads of torch's libraries and the process group wait for one
    # another, and other ranks wait for this process to end. Everything is on disk by now.
    with contextlib.suppress(OSError):  # nobody may read any more, or the disk be full
        sys.stdout.flush()
    os._exit(status)
