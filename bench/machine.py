"""What the benchmarks share with each other and with the tests.

Starting and killing train.py, reading what a run has left, and writing results together with the machine they are from.
"""

import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

sys.path.append(str(Path(__file__).parent.parent))

from common.errors import RunError
from common.files import publish_directory, publish_text, sha256
from hardware.cluster import cpu_name
from hardware.host import cores, memory_bytes
from settings import Config

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
# Metrics that differ between equal runs.
MEASURED = {"time", "tokens_per_second", "mfu", "step_ms", "data_wait_ms", "memory_gb"}
# What holds a processor to fewer instructions, so that it does as an older one: in torch, in oneDNN and in Intel's MKL.
PROCESSORS = {
    "native": {},
    "bfloat16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},  # no matrix unit
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
Processor = Literal["native", "bfloat16", "avx2"]
# A model of 30 thousand parameters that still has every part, trained alike on every machine.
TINY = dict(
    architecture="qwen3",
    n_layer=2,
    n_head=2,
    n_embd=32,
    seq_len=16,
    micro_batch_size=2,
    log_every=1,
    dtype="float32",
    compile="off",
    device="cpu",
    threads=1,
)
# And a run of it without evaluations and checkpoints but the last, whose learning rate does not depend on its length.
TINY_RUN = TINY | dict(
    optimizer="adamw", lr=1e-2, warmup_steps=2, schedule="constant", eval_every=0, eval_tokens=640, save_every=0
)

# ---------------------------------------------------------------------------------------------------------------------
# Starting and killing train.py


def arguments(script: str | Path = "train.py", preset: str = "", **flags) -> list[str]:
    """A script, its preset if it has one, and its flags, as on a command line."""
    return [str(script), *([preset] if preset else []), *(f"--{name}={value}" for name, value in flags.items())]


def launcher(ranks: int = 1, *options: str) -> list[str]:
    """The beginning of a command line: python, with torchrun (and its `options`) if there is more than one rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *options]
    return [sys.executable, *(torchrun if ranks > 1 else [])]


def command(ranks: int = 1, **flags) -> list[str]:
    """The command line of train.py on `ranks` local ranks. flags: see `arguments`."""
    return [*launcher(ranks), *arguments(**flags)]


def environment(**more: str) -> dict[str, str]:
    """This process's environment variables and `more`, without those of a torchrun that started this process."""
    of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in of_a_rank} | more


def start(ranks: int = 1, stderr=subprocess.DEVNULL, **flags) -> subprocess.Popen:
    """Start train.py in the background. What it prints is in its train.log."""
    streams = dict(stdout=subprocess.DEVNULL, stderr=stderr)
    one_thread = environment(OMP_NUM_THREADS="1")
    return subprocess.Popen(command(ranks, **flags), cwd=ROOT, env=one_thread, text=True, **streams)


def run(ranks: int = 1, **flags) -> None:
    """Run train.py to its end. Raises RunError with its error output if it fails."""
    process = start(ranks, stderr=subprocess.PIPE, **flags)
    try:
        _, errors = process.communicate()
    finally:
        kill(process)
    if process.returncode:
        raise RunError(f"exit status {process.returncode} of {' '.join(process.args)}\n{errors}")


def kill(process: subprocess.Popen) -> None:
    """Send SIGKILL to a process and all its descendants. torchrun's ranks are in sessions of their own and would go on."""
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
    """Import what training imports, once, for all forks of this process, without starting a thread: a fork would lack it."""
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import matplotlib.figure  # noqa: F401
    from tqdm import tqdm

    import train  # noqa: F401

    tqdm.monitor_interval = 0
    gc.freeze()  # a collection in a fork would go through all that was imported, and so copy its pages


def fork(config: Config, ranks: int, errors: Path) -> list[int]:
    """Train as `config` says in forks of this process, one for each rank, which need not import anything.

    Returns their process ids. They are one process group, and the first one leads it. Their stderr is appended to `errors`.
    """

    def train_quietly() -> int:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        import train

        return train.main(config)

    return fork_ranks(ranks, train_quietly, new_group=True)


def fork_ranks(ranks: int, work: Callable[[], int], new_group: bool = False) -> list[int]:
    """Fork this process once for each rank. A fork calls `work` and exits with the status that it returns.

    Returns their process ids. The environment variables of the forks are those that torchrun would set.
    new_group: make the forks a process group of their own.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        leader = pids[0] if pids else pid
        if new_group:  # the fork and its parent both do it, because either may be the first
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


def exit_with(work: Callable[[], int]) -> NoReturn:
    """End this process with the status that `work` returns or exits with, or with 1 and a traceback if it raises."""
    status = 1
    try:
        status = work()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def end(pids: list[int]) -> list[int]:
    """Send SIGKILL to the process group of a `fork`. Returns the wait statuses: signal.SIGKILL of those that still ran."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pids[0], signal.SIGKILL)
    return [os.waitpid(pid, 0)[1] for pid in pids]


# ---------------------------------------------------------------------------------------------------------------------
# What a run has left


def metrics(run: Path) -> list[dict]:
    """The records of a run's metrics.jsonl, without a last line that is not complete."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]]


def unmeasured(records: list[dict]) -> list[dict]:
    """`records` without times and memory, as two equal runs have them."""
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def digests(run: Path) -> dict[str, str]:
    """The sha256 of the weights and of the optimizer state in a run's newest checkpoint, by file name."""
    latest = run / "checkpoints" / "latest"
    return {path.name: sha256(path) for path in sorted(latest.glob("*.safetensors"))}


def fake_checkpoint(checkpoints: Path, step: int) -> Path:
    """Publish a checkpoint of a few bytes that is intact by its manifest."""
    from checkpoints import retention  # and torch, which `prepare_to_fork` must come before

    with publish_directory(retention.step_directory(checkpoints, step)) as directory:
        for name in (*retention.FILES, "model.safetensors", "optimizer.safetensors"):
            (directory / name).write_text(json.dumps({"step": step}))
        retention.write_manifest(directory)
    return retention.step_directory(checkpoints, step)


# ---------------------------------------------------------------------------------------------------------------------
# Data, results and the machine they are from


def prepare_tokens(directory: str) -> None:
    """Prepare the embedded corpus in `directory` if there is no dataset."""
    if not (ROOT / directory / "dataset.json").exists():
        subprocess.run([sys.executable, "prepare_data.py", f"--out={directory}"], cwd=ROOT, check=True)


@contextlib.contextmanager
def workspace():
    """A directory for runs. It is removed at the end, also after SIGTERM.

    It is in runs/, because a system may hold its temporary files in memory.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=ROOT / "runs") as directory:
        yield Path(directory)


def act_as(processor: Processor) -> None:
    """Hold this process, before it imports torch, and those that it starts to the instructions of `processor`."""
    os.environ.update(PROCESSORS[processor])
    if processor != "native":  # the compiler's cache does not tell processors apart
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir(), f"torchinductor_as_{processor}"))


def acted_as() -> Processor:
    """The processor that `act_as` has set."""
    return next(name for name in reversed(PROCESSORS) if PROCESSORS[name].items() <= os.environ.items())


def describe() -> dict:
    """This machine, its load, and the versions of what runs on it."""
    gpus = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "safetensors")}
    return {
        "machine": {
            "cpu": cpu_name(),
            "instructions": acted_as(),
            "cores": cores(),
            "memory_gib": round(memory_bytes() / 2**30, 1),
            "gpus": gpus,
        },
        "versions": {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}", **versions},
        "commit": output_of(["git", "describe", "--always", "--dirty"]),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def output_of(command: list[str]) -> str:
    """What a command prints, or nothing if it is not installed."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def write(name: str, result: dict, directory: Path = RESULTS) -> Path:
    """Publish `result` and the machine as DIRECTORY/NAME.json, NAME_avx2.json where it acted as avx2. Returns the path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}{'' if acted_as() == 'native' else '_' + acted_as()}.json"
    record = {"command": sys.argv, "date": time.strftime("%Y-%m-%d"), **describe(), **result}
    publish_text(path, json.dumps(record, indent=2) + "\n")
    return path


def table(head: list[str], rows: list[list]) -> str:
    """The rows as text in columns. The first column is flush left, the others flush right."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
    return "\n".join("  ".join(line) for line in lines)


def median_and_range(values: list[float], digits: int = 2, unit: str = "") -> str:
    """The median and the extremes of measurements, as text."""
    median, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{median}{unit} ({low} to {high})"
