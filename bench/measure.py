"""What comparing benchmarks share: contenders measured in turns, and how to run train.py and nanoGPT as contenders."""

import contextlib
import io
import multiprocessing
import os
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
from common.errors import RunError, UserError


def in_turns(rounds: int, contenders: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measure all contenders one after the other, `rounds` times, so that other load on the machine hits them equally."""
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


def in_fresh_process(function: Callable, *arguments):
    """`function(*arguments)` in a new interpreter, where no other module or setting disturbs it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def environment() -> dict[str, str]:
    """This process's environment variables without one that limits threads."""
    return {key: value for key, value in machine.environment().items() if key != "OMP_NUM_THREADS"}


def timed(command: list, cwd: Path) -> float:
    """Seconds that `python COMMAND` takes. Raises RunError with its last output if it fails."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env=environment(), capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RunError(f"{shlex.join(map(str, command))} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return seconds


def run_until(
    step: int, preset: str, checkout: Path = machine.ROOT, variables: dict[str, str] | None = None, **flags
) -> tuple[float, list[dict]]:
    """Train by `checkout` until metrics.jsonl has `step` records, then kill the run, before it saves or evaluates anything.

    variables: more environment variables. Returns the seconds since the command and the records. Raises RunError if the run
    ends earlier.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = {"out_dir": folder, "name": "run", "log_every": 1, "eval_every": 0, "save_every": 0} | flags
        command = machine.command(preset=preset, **flags)
        run, output = Path(folder) / "run", Path(folder) / "output"
        began = time.perf_counter()
        with open(output, "w") as file:
            process = subprocess.Popen(command, cwd=checkout, stdout=file, stderr=file, env=environment() | (variables or {}))
        try:
            while True:
                ended = process.poll() is not None
                records = machine.metrics(run) if (run / "metrics.jsonl").exists() else []
                if len(records) >= step:
                    return time.perf_counter() - began, records[:step]
                if ended:
                    raise RunError(f"train.py {preset} ended before step {step}:\n{output.read_text()[-2000:]}")
                time.sleep(0.005 if step == 1 else 0.25)  # reading the file disturbs the measurement
        finally:
            machine.kill(process)


def copy_of_nanogpt(checkout: str, folder: Path, text: str) -> Path:
    """Copy a checkout to `folder` and let its data/shakespeare_char/prepare.py prepare `text` there."""
    if not (Path(checkout) / "data/shakespeare_char/prepare.py").exists():
        raise UserError(f"--nanogpt={checkout} is no checkout of nanoGPT: git clone https://github.com/karpathy/nanoGPT")
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
    data = folder / "data/shakespeare_char"
    (data / "input.txt").write_text(text)
    timed(["prepare.py"], data)
    return folder


def nanogpt_train(checkout: Path, *flags: str) -> dict:
    """Run nanoGPT's train.py in this process. Returns its global variables and functions."""
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    sys.argv = ["train.py", *flags]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return runpy.run_path("train.py", run_name="__main__")
