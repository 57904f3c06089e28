"""Shared by all benchmarks and some tests. Start and kill train.py, read a run's files, measure contenders in turns, and write
results together with a description of the machine."""

import atexit
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

sys.path.insert(0, str(Path(__file__).parent.parent))  # before installed packages: one of them is called evaluate

from lockstep.common import cli, errors
from lockstep.common.errors import RunError, UserError
from lockstep.common.files import publish_text, sha256
from lockstep.hardware.host import cores, cpu_name, memory_bytes
from lockstep.settings import Config

ROOT = Path(__file__).parent.parent
LOAD = [round(load, 2) for load in os.getloadavg()]  # of other programs, before the measurement
RESULTS = str(ROOT / "runs" / "bench")  # not bench/results, which is tracked: that needs --out
# Settings of train.py that are not flags.
FILE_ONLY = {name for name, item in cli.flat_fields(Config).items() if not cli.is_flag(item)}
# Metrics that differ between equal runs.
MEASURED = {"time", "tokens_per_second", "mfu", "step_ms", "data_wait_ms", "memory_gb"}
# Limit torch, oneDNN and Intel's MKL to older instructions, so that a processor acts as an older one.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
Processor = Literal["native", "avx2"]
# A model of 30 thousand parameters with every part of a large one, trained in the same way on every machine.
TINY = dict(architecture="qwen3", n_layer=2, n_head=2, n_embd=32, seq_len=16, micro_batch_size=2, log_every=1)
TINY |= dict(dtype="float32", compile="off", device="cpu", threads=1)
# A run of it that evaluates and saves only at the end. Its learning rate does not depend on its length.
TINY_RUN = TINY | dict(optimizer="adamw", lr=1e-2, warmup_steps=2, schedule="constant")
TINY_RUN |= dict(eval_every=0, eval_tokens=640, save_every=0)


@dataclass(frozen=True)
class Out:
    """The flag of all benchmarks."""

    out: str = RESULTS
    """Directory of the results; those in bench/results are tracked."""


@dataclass(frozen=True)
class Options(Out):
    """The flags of most benchmarks."""

    tokens: str = "tokens/python"
    """Dataset directory. If it does not exist, the embedded corpus is prepared there."""


def command_line(description: str, options: type, main: Callable, arguments: list[str] | None = None) -> NoReturn:
    """Run `main` on the `options` from the command line, and exit with its status."""
    with errors.user_errors():
        sys.exit(main(cli.parse(options, sys.argv[1:] if arguments is None else arguments, description)))


def choose(description: str, **cases: tuple[type, Callable]) -> NoReturn:
    """`command_line` for the case that the first argument names. cases: the options and main of each."""
    name, *arguments = sys.argv[1:] or [""]
    if name in cases:
        command_line(cases[name][1].__doc__, *cases[name], arguments)
    with errors.user_errors():
        if name != "--help":
            raise UserError(f"name the case first: python bench/{Path(sys.argv[0]).name} {'|'.join(cases)} [--flag=value ...]")
        print(f"{description}\nThe cases are {', '.join(cases)}; each has its own --help.")
        sys.exit(0)


def arguments(script: str | Path = "train.py", preset: str = "", **flags) -> list[str]:
    """A script, its preset if any, and its flags, as on a command line. Settings that are not flags go into a new preset."""
    if flags.get("numerics") == "portable":  # its micro-batches are single sequences
        flags.pop("micro_batch_size", None)
    if of_file := {name: flags.pop(name) for name in FILE_ONLY & flags.keys()}:
        preset = preset_with(preset or "config/laptop.toml", of_file)
    return [str(script), *([preset] if preset else []), *(f"--{name}={value}" for name, value in flags.items())]


def preset_with(preset: str, changes: dict) -> str:
    """The path of a copy of a preset with other values. It is removed when this process ends."""
    values = tomllib.loads(Path(ROOT, preset).read_text())
    values = {name: value for table in values.values() for name, value in table.items()} | changes
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, Path(preset).name)
    path.write_text(text)
    return str(path)


def launcher(ranks: int = 1, *options: str) -> list[str]:
    """The beginning of a command line: python, with torchrun (and its `options`) if there is more than one rank."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *options]
    return [sys.executable, *(torchrun if ranks > 1 else [])]


def command(ranks: int = 1, **flags) -> list[str]:
    """The command line of train.py on `ranks` local ranks. flags: see `arguments`."""
    return [*launcher(ranks), *arguments(**flags)]


def environment(**more: str) -> dict[str, str]:
    """This process's environment variables and `more`, except any that torchrun set for this process."""
    of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in of_a_rank} | more


def start(ranks: int = 1, **flags) -> subprocess.Popen:
    """Start train.py in the background. Its train.log has what it prints."""
    env, quiet = environment(**({"OMP_NUM_THREADS": "1"} if ranks > 1 else {})), subprocess.DEVNULL
    return subprocess.Popen(command(ranks, **flags), cwd=ROOT, env=env, stdout=quiet, stderr=quiet)


def run(ranks: int = 1, **flags) -> None:
    """Run train.py to its end. Raises RunError with its last output if it fails."""
    timed(command(ranks, **flags)[1:], **({"OMP_NUM_THREADS": "1"} if ranks > 1 else {}))


def kill(process: subprocess.Popen) -> None:
    """Send SIGKILL to a process and all its descendants. torchrun's ranks have separate sessions and would survive."""
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


def all_cores() -> dict[str, str]:
    """`environment()` without a variable that limits threads."""
    return {key: value for key, value in environment().items() if key != "OMP_NUM_THREADS"}


def output(command: list, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """What a command prints. Raises RunError with its last output if it fails."""
    command, streams = [str(part) for part in command], dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(command, cwd=cwd, env=all_cores() if env is None else env, **streams)
    try:
        printed, _ = process.communicate()
    finally:
        kill(process)
    if process.returncode:
        raise RunError(f"{shlex.join(command)} ended with {process.returncode}:\n{printed[-2000:]}")
    return printed


def timed(command: list, cwd: Path = ROOT, **variables: str) -> float:
    """Seconds that `python COMMAND` takes. Raises RunError with its last output if it fails."""
    began = time.perf_counter()
    output([sys.executable, *command], cwd, all_cores() | variables)
    return time.perf_counter() - began


def step_ms(preset: str = "", ranks: int = 1, **flags) -> list[float]:
    """The milliseconds of each update of a run, without the first. It saves and evaluates only at its end."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=ROOT / "runs") as folder:
        flags |= dict(out_dir=folder, name="run", log_every=1, eval_every=0, eval_tokens=1, save_every=0)
        timed([*launcher(ranks)[1:], *arguments("train.py", preset, **flags)])
        return [record["step_ms"] for record in metrics(Path(folder, "run")) if "step_ms" in record]


def metrics(run: Path) -> list[dict]:
    """The records of a run's metrics.jsonl, without an incomplete last line. Empty if the file does not exist yet."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def last_step(run: Path) -> int:
    """The last step in the metrics of a run (0: none yet)."""
    return max((record["step"] for record in metrics(run)), default=0)


def unmeasured(records: list[dict]) -> list[dict]:
    """`records` without times and memory, which differ between equal runs."""
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def digests(run: Path) -> dict[str, str]:
    """The sha256 of the weights and of the optimizer state in a run's newest checkpoint, by file name."""
    latest = run / "checkpoints" / "latest"
    return {path.name: sha256(path) for path in sorted(latest.glob("*.safetensors"))}


def prepare_tokens(out: str | Path, *sources: str | Path, **flags) -> None:
    """Prepare `sources`, or else the embedded corpus, in the directory `out`, if there is no dataset."""
    if not Path(ROOT, out, "dataset.json").exists():
        timed(["prepare_data.py", *sources, *arguments("", out=out, **flags)[1:]])


@contextlib.contextmanager
def workspace():
    """A directory for runs in runs/ (/tmp may be in memory). It is removed at the end, also after SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=ROOT / "runs") as directory:
        yield Path(directory)


def act_as(processor: Processor) -> None:
    """Limit this process and its children to the instructions of `processor`. Call this before importing torch."""
    if processor == "avx2":  # the compiler's cache does not tell processors apart
        os.environ.update(AVX2, TORCHINDUCTOR_CACHE_DIR=str(Path(tempfile.gettempdir(), "torchinductor_as_avx2")))


def acted_as() -> Processor:
    """The processor that `act_as` has set."""
    return "avx2" if AVX2.items() <= os.environ.items() else "native"


def describe() -> dict:
    """This machine, its load, and the versions of its software."""
    host = {"cpu": cpu_name(), "instructions": acted_as(), "cores": cores(), "memory_gib": round(memory_bytes() / 2**30, 1)}
    host |= {"gpus": output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()}
    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    versions |= {name: importlib.metadata.version(name) for name in ("torch", "numpy", "safetensors")}
    return {
        "machine": host,
        "versions": versions,
        "commit": output_of("git", "describe", "--always", "--dirty"),
        "load before": LOAD,
        "load after": [round(load, 2) for load in os.getloadavg()],
    }


def output_of(*command: str) -> str:
    """What a command prints; empty if it is not installed."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() if shutil.which(command[0]) else ""


def write(name: str, result: dict, out: str = RESULTS) -> Path:
    """Publish `result` and the machine as OUT/NAME.json, or NAME_avx2.json under `act_as("avx2")`. Returns the path."""
    path = Path(out, f"{name}{'' if acted_as() == 'native' else '_' + acted_as()}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = [re.sub("=/.*/", "=", argument) for argument in sys.argv[1:]]  # without the paths of this machine
    record = {"command": [f"bench/{Path(sys.argv[0]).name}", *shown], "date": time.strftime("%Y-%m-%d"), **describe(), **result}
    publish_text(path, json.dumps(record, indent=2) + "\n")
    return path


def renewed(page: Path, lines: str) -> str:
    """The text of a page with `lines` in place of those between its comments `made` and `end`."""
    before, begin, rest = page.read_text().partition("<!-- made -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return before + begin + lines + end + after


def make_tokens(directory: Path, count: int, vocab_size: int) -> None:
    """Write shards, named as in llm.c, of ids with frequencies of 1 / rank, like words: little to learn, but something."""
    import numpy as np

    from lockstep.dataset.tokens import write_shard

    directory.mkdir()
    ids = np.exp(np.random.default_rng(0).random(count) * np.log(vocab_size)).astype(np.uint16) - 1
    write_shard(directory / "made_train_000000.bin", ids, vocab_size)
    write_shard(directory / "made_val_000000.bin", ids[:100_000], vocab_size)


def in_turns(rounds: int, contenders: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measure all contenders one after the other, `rounds` times, so that other load on the machine affects them equally."""
    measured = {name: [] for name in contenders}
    for number in range(1, rounds + 1):
        for name, measure in contenders.items():
            measured[name].append(measure())
            print(f"{number}/{rounds}  {name:<40} {measured[name][-1]:,.4g}", flush=True)
    return measured


def spread(values: list[float]) -> dict:
    """The median, the extremes and all measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}


def ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def table(head: list[str], rows: list[list]) -> str:
    """The rows as aligned text, with four digits per number. The first column is flush left, the others flush right."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
    return "\n".join("  ".join(line) for line in lines)
