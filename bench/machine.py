"""What the benchmarks share: starting train.py, ending it the hard way, and writing results with the machine they are of."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

from files import publish_text
from settings import Config, RunError, cores

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
MEASURED = {"tokens_per_second", "mfu", "step_ms", "data_wait_ms", "memory_gb"}  # metrics that no two runs share


def command(ranks: int = 1, **flags) -> list[str]:
    """The command line of train.py with `flags`, under torchrun if there is more than one rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    preset = [flags.pop("preset")] if "preset" in flags else []
    return [sys.executable, *launcher, "train.py", *preset, *(f"--{name}={value}" for name, value in flags.items())]


def environment() -> dict[str, str]:
    """This process's, without another torchrun's ranks in it."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in ranks} | {"OMP_NUM_THREADS": "1"}


def start(ranks: int = 1, stderr=subprocess.DEVNULL, **flags) -> subprocess.Popen:
    """train.py in the background; what it prints is in its train.log."""
    streams = dict(stdout=subprocess.DEVNULL, stderr=stderr)
    return subprocess.Popen(command(ranks, **flags), cwd=ROOT, env=environment(), text=True, **streams)


def run(ranks: int = 1, **flags) -> None:
    """train.py to its end. Raises RunError with what it said if it fails."""
    process = start(ranks, stderr=subprocess.PIPE, **flags)
    try:
        _, errors = process.communicate()
    finally:
        kill(process)
    if process.returncode:
        raise RunError(f"exit status {process.returncode} of {' '.join(process.args)}\n{errors}")


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a process and all its descendants: torchrun's ranks are in sessions of their own and would live on."""
    if process.poll() is None:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        parents = dict(map(int, line.split()) for line in listed.splitlines())
        family = [process.pid]
        for member in family:
            family += [pid for pid, parent in parents.items() if parent == member]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def prepare_to_fork() -> None:
    """Import what training imports once, before `fork`, and start no thread: it would not survive a fork."""
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import matplotlib.figure  # noqa: F401
    from tqdm import tqdm

    import train  # noqa: F401

    tqdm.monitor_interval = 0


def fork(config: Config, ranks: int, errors: Path) -> list[int]:
    """Train as `config` says in forks of this process, one a rank, without the seconds that importing takes.

    Returns their process ids. They form one process group, led by the first. What they write to stderr goes to `errors`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            if ranks > 1:
                world = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
                world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({key: str(value) for key, value in world.items()})
            be_a_rank(config, pids[0] if pids else 0, errors)
        pids.append(pid)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pids[0])
    return pids


def be_a_rank(config: Config, group: int, errors: Path) -> None:
    """In a forked process: train until the end or the kill. Does not return."""
    status = 1
    try:
        os.setpgid(0, group)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        import train

        status = train.main(config)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def end(pids: list[int]) -> list[int]:
    """SIGKILL to the process group of a `fork`. Returns the wait statuses: signal.SIGKILL of those alive until then."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pids[0], signal.SIGKILL)
    return [os.waitpid(pid, 0)[1] for pid in pids]


def metrics(run: Path) -> list[dict]:
    """The records of a run's metrics.jsonl; a line torn by a kill is left out."""
    records = []
    for line in (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def unmeasured(records: list[dict]) -> list[dict]:
    """`records` without times and memory: what equal runs have in common."""
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def prepare_tokens(directory: str) -> None:
    """Make the dataset of the embedded corpus if it is not there."""
    if not (ROOT / directory / "dataset.json").exists():
        subprocess.run([sys.executable, "prepare_data.py", f"--out={directory}"], cwd=ROOT, check=True)


@contextlib.contextmanager
def workspace():
    """A directory for runs, removed at the end, also by SIGTERM; in runs/, for a system's temporary files may be in memory."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=ROOT / "runs") as directory:
        yield Path(directory)


def describe() -> dict:
    """This machine and the versions of what ran on it."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "safetensors")}
    return {
        "machine": {
            "cpu": (models or [platform.processor()])[0],
            "cores": cores(),
            "memory_gib": round(memory, 1),
            "gpus": gpus,
        },
        "versions": {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}", **versions},
        "commit": said(["git", "describe", "--always", "--dirty"]),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def said(command: list[str]) -> str:
    """What a command prints; nothing where it is not there or fails."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def write(name: str, result: dict, directory: Path = RESULTS) -> Path:
    """Publish `result` with the machine as DIRECTORY/NAME.json by rename."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    record = {"command": sys.argv, "date": time.strftime("%Y-%m-%d"), **describe(), **result}
    publish_text(path, json.dumps(record, indent=2) + "\n")
    return path


def table(head: list[str], rows: list[list]) -> str:
    """Text in columns, the first one flush left."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
    return "\n".join("  ".join(line) for line in lines)
