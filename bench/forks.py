"""Forks of this process, which need not import anything again: ranks that train, and functions that return measurements.

A fork can be killed, but lacks its parent's threads. So `prepare_to_fork` imports what training needs without starting threads.
"""

import contextlib
import gc
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NoReturn

import machine  # noqa: F401  puts the project's folder on the path

# isort: split
from lockstep.common.errors import RunError
from lockstep.hardware.host import prepare_torch


def prepare_to_fork() -> None:
    """Import what training needs, once for all forks. Starts no thread, because forks would lack it."""
    prepare_torch()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import matplotlib.figure  # noqa: F401
    from tqdm import tqdm

    import train  # noqa: F401

    tqdm.monitor_interval = 0
    gc.freeze()  # otherwise a collection in a fork would touch, and so copy, the pages of everything imported


def free_port() -> int:
    """Return a port on which nobody listens, outside the range from which the system takes ports for connections.

    Each process begins its search elsewhere, because the port stays free until its user listens on it.
    """
    number = os.getpid()
    while True:
        port = 12000 + number % 20000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does, so earlier connections don't count
            probe.bind(("", port))
            return port
        number += 997


def fork_ranks(ranks: int, work: Callable[[], int], new_group: bool = False) -> list[int]:
    """Fork this process once per rank. A fork calls `work` and exits with the status that it returns.

    Returns their process ids. The forks get the environment variables that torchrun would set.
    new_group: put the forks in a new process group.
    """
    port = free_port()
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        leader = pids[0] if pids else pid
        if new_group:  # both the fork and its parent do this, because either may come first
            with contextlib.suppress(OSError):
                os.setpgid(pid, leader)
        if pid == 0:
            if ranks > 1:
                world = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
                world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({key: str(value) for key, value in world.items()})
            exit_with(work)
        pids.append(pid)
    return pids


def exit_with(work: Callable[[], int | None]) -> NoReturn:
    """End this process with the status that `work` returns or exits with (None: 0), or with 1 and a traceback if it raises."""
    status = 1
    try:
        status = work() or 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_forks(ranks: int, work: Callable[[], int], output: Path, limit: float = math.inf, enough=lambda: False) -> list[int]:
    """Let `ranks` forks `work` until all have ended, `enough()` is true or `limit` seconds are over. Then kill the rest.

    Returns their wait statuses, signal.SIGKILL for killed ones. Their output is appended to OUTPUT.out and OUTPUT.err.
    """

    def work_quietly() -> int:
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        return work()

    def has_ended(pid: int) -> bool:  # without reaping it
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    pids, deadline = fork_ranks(ranks, work_quietly, new_group=True), time.monotonic() + limit
    try:
        while time.monotonic() < deadline and not enough() and not all(map(has_ended, pids)):
            time.sleep(0.001)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pids[0], signal.SIGKILL)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    return statuses


def in_forks(function: Callable, *arguments, folder: Path, ranks: int = 1, limit: float = math.inf) -> list:
    """What `function(*arguments)` returns in each of `ranks` forks, passed back as JSON. Raises RunError."""

    def work() -> int:
        (folder / f"returned{os.environ.get('RANK', 0)}").write_text(json.dumps(function(*arguments)))
        return 0

    if any(statuses := run_forks(ranks, work, folder / "forks", limit)):
        raise failure(folder / "forks", statuses, limit)
    return [json.loads((folder / f"returned{rank}").read_text()) for rank in range(ranks)]


def failure(output: Path, statuses: list[int], limit: float = math.inf) -> RunError:
    """The error for forks that failed, with the last line that they printed."""
    texts = [Path(f"{output}.{stream}") for stream in ("err", "out")]
    lines = [line for path in texts if path.exists() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    ended = "was not done" if all(status == signal.SIGKILL for status in statuses) else "failed"
    within = f" within {limit:.0f} s" if limit < math.inf else ""
    return RunError(f"{ended}{within}: {(lines or ['no output'])[-1].strip()[:500]}")


def in_fresh_process(function: Callable, *arguments):
    """Call `function(*arguments)` in a new interpreter, free of other modules and settings."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
