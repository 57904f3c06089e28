"""Real processes without the seconds that importing takes: forked from one that has imported everything already.

A script runs in a process of its own, as under `python SCRIPT`, and on ranks as a launcher would start them. Most tests use
it; those of start-up and of torchrun itself run the commands as a user does.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["train", "sharded", "sample", "prepare_data", "torch._dynamo", "torch._inductor.compile_fx", "matplotlib.figure"]
)


class Process:
    """What the tests use of subprocess.Popen. It leads a process group of its own."""

    def __init__(self, command: list, ranks: int, env: dict[str, str], cwd: Path, folder: Path):
        self.streams = [folder / "stdout", folder / "stderr"]
        self.process = SERVER.Process(target=launch, args=([*map(str, command)], ranks, env, cwd, self.streams))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        self.process.join(0)
        return self.process.exitcode

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def communicate(self, timeout):
        """Wait; returns what it wrote to stdout and stderr."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(self.process.name, timeout)
        return tuple(stream.read_text() for stream in self.streams)


def launch(command, ranks, env, cwd, streams):
    """In the new process: run the script, or be the launcher of its ranks."""
    os.setsid()
    os.chdir(cwd)
    for fd, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    os.environ.clear()
    os.environ.update(env)
    for number in (signal.SIGINT, signal.SIGCHLD):  # the server has set them otherwise
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if not ranks:
        run(command)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
            place |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            os.environ.update({key: str(value) for key, value in place.items()})
            run(command)
        pids.append(pid)
    os._exit(watch(pids))


def watch(pids):
    """0 when all ranks have ended well; when one has not, end the others, as torchrun does, and return 1."""
    status, left = 0, set(pids)
    while left:
        pid, how = os.wait()
        left.remove(pid)
        if how and not status:
            status = 1
            for other in left:
                os.kill(other, signal.SIGTERM)
    return status


def run(command):
    """Be `python COMMAND`; does not return."""
    status = 1
    try:
        sys.argv = command
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
