"""Real processes without the seconds that importing takes: they are forked from one that has imported all modules already.

A script runs in a separate process, as under `python SCRIPT`, or on several ranks, as torchrun would start them. Most tests
use this. The tests of start-up and of torchrun itself run the commands as a user does.
"""

import contextlib
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forks

SERVER = multiprocessing.get_context("forkserver")
COMMANDS = ["train", "sample", "prepare_data", "evaluate", "replay", "plot"]
# What commands import when they need it.
LATER = ["lockstep.parallel.sharded", "torch._dynamo", "torch._inductor.compile_fx", "matplotlib.figure"]
# multiprocessing polls all its processes whenever it starts one. If two threads poll one at once, the second gets 255.
ASKING = threading.Lock()
SERVER.set_forkserver_preload([*COMMANDS, *LATER, "pytest", "warm"])


class Process:
    """A process with the methods of subprocess.Popen that the tests use. It leads its own process group."""

    def __init__(self, command: list, ranks: int, env: dict[str, str], cwd: Path, folder: Path, memory: Path | None = None):
        """memory: a file for the kilobytes by which the resident memory of the command grew, at most."""
        self.streams = [folder / "stdout", folder / "stderr"]
        self.process = SERVER.Process(target=launch, args=([*map(str, command)], ranks, env, cwd, self.streams, memory))
        with ASKING:
            self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        with ASKING:
            return self.process.exitcode

    def poll(self):
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.002)

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def communicate(self, timeout):
        """Wait for the end. Returns what it wrote to stdout and stderr."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(self.process.name, timeout)
            time.sleep(0.002)
        return tuple(stream.read_text() for stream in self.streams)


def launch(command, ranks, env, cwd, streams, memory):
    """In the new process: run the script, or start its ranks and wait for them."""
    gc.freeze()  # a collection would go through all that was imported, and so copy its pages
    os.setsid()
    os.chdir(cwd)
    for fd, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    os.environ.clear()
    os.environ.update(env)
    for number in (signal.SIGINT, signal.SIGCHLD):  # the server has changed their handlers
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    if ranks > 1:
        os._exit(watch(forks.fork_ranks(ranks, lambda: run(command))))
    if memory:
        pid = os.fork()
        if pid:
            _, status, usage = os.wait4(pid, 0)
            memory.write_text(str(usage.ru_maxrss - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
            os._exit(os.waitstatus_to_exitcode(status) % 256)
    forks.exit_with(lambda: run(command))


def watch(pids):
    """Wait for all ranks. Returns 0 if all end well, else 1, after ending the others as torchrun does."""
    status, left = 0, set(pids)
    while left:
        pid, wait_status = os.wait()
        left.remove(pid)
        if wait_status and not status:
            status = 1
            for other in left:
                os.kill(other, signal.SIGTERM)
    return status


def run(command):
    """Do what `python COMMAND` does. Returns the exit status."""
    if os.path.basename(command[0]) in ("train.py", "changed.py"):  # real starts draw, and measure the processor
        from lockstep.hardware import device
        from lockstep.reports import curves

        curves.single = curves.draw = lambda *_: None
        device.best_product = lambda *_: 1e11
    sys.argv = command
    sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
    runpy.run_path(command[0], run_name="__main__")
    return 0
