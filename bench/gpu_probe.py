"""What bench/gpu.py measures: training by the trainer itself, and the fastest matmul. Each runs in a fork that can be killed.

The forked process has imported torch but not touched a GPU.
"""

import importlib.util
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import forks
from lockstep import settings
from lockstep.common import errors
from lockstep.common.errors import RunError
from lockstep.common.files import sha256
from lockstep.hardware import footprint
from lockstep.settings import Config

UNTIMED = 2  # updates during which memory is allocated and clocks rise
FEWEST = 4  # timed updates of a run that is cut short


def import_trainer() -> list[str]:
    """Import the trainer, for all forks. Returns the names of missing packages that it can do without."""
    missing = [name for name in ("tyro", "wandb") if importlib.util.find_spec(name) is None]
    if "tyro" in missing:  # it parses command lines, which we do not; but some modules use this name when imported
        sys.modules["tyro"] = types.ModuleType("tyro")
        sys.modules["tyro"].conf = types.SimpleNamespace(Positional=list, arg=lambda **options: None)
    forks.prepare_to_fork()
    return missing


def prepare_bytes(text: str, out: str) -> None:
    """Prepare a text file with one token per byte."""
    import prepare_data

    prepare_data.main(prepare_data.PrepareConfig(sources=(text,), out=out, tokenizer="bytes"))


def train(config: Config, ranks: int, folder: Path, limit: float, enough: Callable = lambda records: False):
    """Run the trainer in FOLDER/run until `enough(the records of its updates)`, or for `limit` seconds; then kill it.

    Returns the records and wait statuses.
    """
    own = dict(out_dir=str(folder), name="run", async_save=False, eval_every=0, eval_tokens=config.model.seq_len)
    config = settings.replace(config, **own)

    def work() -> int:
        import torch

        import train

        torch._logging.set_logs(recompiles=True)
        if config.train.device != "cpu" and 0 < torch.cuda.device_count() < ranks:
            share_gpus(torch.cuda.device_count())
        with errors.user_errors():
            return train.main(config)

    def updates() -> list[dict]:
        return [record for record in machine.metrics(folder / "run") if "loss" in record]

    statuses = forks.run_forks(ranks, work, folder / "forks", limit, lambda: enough(updates()))
    return updates(), statuses


def share_gpus(count: int) -> None:
    """Let this rank share its GPU with others. They use gloo, because NCCL refuses two ranks on one GPU."""
    import torch
    import torch.distributed as dist

    from lockstep.hardware import device

    create = dist.init_process_group
    device.find_device = lambda _, local_rank: torch.device("cuda", local_rank % count)
    dist.init_process_group = lambda _, **options: create("gloo", **options | {"device_id": None})


def training(config: Config, folder: Path, limit: float, updates: int) -> dict:
    """Train for `updates`, or for `limit` seconds. Saves nothing.

    Returns the milliseconds of each update, the seconds until the first, memory, losses, the chosen batch, the banner, and the
    recompilations.
    """
    config, began = settings.replace(config, steps=10**6, save_every=0), time.time()
    records, statuses = train(config, 1, folder, limit, lambda records: len(records) >= updates)
    timed = [record["step_ms"] for record in records[UNTIMED:]]
    if len(timed) < FEWEST:
        raise forks.failure(folder / "forks", statuses, limit)
    resolved = settings.read_preset(folder / "run/config.toml")
    log = (folder / "run/train.log").read_text().replace(f"{machine.ROOT}/", "").splitlines()
    first_update = next(number for number, line in enumerate(log) if re.search(r"step +1/", line))
    errors_seen = (folder / "forks.err").read_text(errors="replace").replace(f"{machine.ROOT}/", "")
    return {
        "first_update_s": records[0]["time"] - began,
        "update_ms": timed,
        "memory_gb": max(record["memory_gb"] for record in records),
        "estimated_gb": sum(footprint.of_rank(resolved, 1, resolved.train.device).values()) / 1e9,
        "losses": [record["loss"] for record in records],
        "tokens_per_update": resolved.train.tokens_per_update,
        "micro_batch_size": resolved.train.micro_batch_size,
        "recompilations": errors_seen.count("Recompiling function"),
        "banner": log[:first_update],
        "warnings": sorted({line for line in errors_seen.splitlines() if "warn" in line.lower()})[:20],
    }


def digests(config: Config, ranks: int, folder: Path, limit: float, kill_after: int = 0) -> dict:
    """The sha256 of weights and optimizer state at the end of a run. kill_after: kill the run once after so many updates."""
    began = time.monotonic()
    if kill_after:
        records, statuses = train(config, ranks, folder, limit, lambda records: len(records) >= kill_after)
        if len(records) < kill_after:
            raise forks.failure(folder / "forks", statuses, limit)
    _, statuses = train(config, ranks, folder, limit - (time.monotonic() - began))
    if any(statuses):
        raise forks.failure(folder / "forks", statuses, limit)
    resumed = "loaded the weights and optimizer state" in (folder / "run/train.log").read_text()
    return {"resumed": resumed, "sha256": machine.digests(folder / "run")}


def sha256_of_each(run: Path) -> dict[str, str]:
    """The sha256 of the weights in each checkpoint of a run."""
    return {path.parent.name: sha256(path) for path in sorted(run.glob("checkpoints/step-*/model.safetensors"))}


def commands(run: Path, device: str, folder: Path, limit: float) -> list[str]:
    """The last lines that sample.py and evaluate.py print for a run."""

    def both() -> None:
        import evaluate
        import sample

        sample.main(sample.SampleConfig(run=str(run), prompt="two ", max_new_tokens=40, device=device))
        evaluate.main(evaluate.EvaluateConfig(run=str(run), eval_tokens=4096, device=device))

    forks.in_forks(both, folder=folder, limit=limit)
    return (folder / "forks.out").read_text().replace(f"{machine.ROOT}/", "").splitlines()[-6:]


def nanogpt_steps(checkout: Path, flags: list[str], limit: float) -> list[float]:
    """Milliseconds of each timed update of nanoGPT's train.py, which is killed after `limit` seconds."""
    command = [sys.executable, "train.py", *flags]
    with (checkout / "output").open("w+") as output:
        process = subprocess.Popen(command, cwd=checkout, env=machine.all_cores(), stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            machine.kill(process)
        output.seek(0)
        text = output.read()
    milliseconds = [float(number) for number in re.findall(r"^iter \d+: .* time ([\d.]+)ms", text, re.MULTILINE)]
    timed = milliseconds[1 + UNTIMED :]  # the first includes an evaluation
    if process.returncode not in (0, -signal.SIGKILL) or len(timed) < FEWEST:
        raise RunError(f"nanoGPT's train.py ended with {process.returncode} after {len(milliseconds)} updates:\n{text[-2000:]}")
    return timed


def facts() -> dict:
    """The GPUs, the FLOP/s in their datasheet, and the versions that matter for speed."""
    import torch

    from lockstep.hardware import device

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {"gpus": gpus, "datasheet_flops": device.datasheet_flops(gpus[0]) if gpus else None} | versions


def matmul_peak(device_name: str) -> float:
    """FLOP/s of a matmul of square bfloat16 matrices of the best size, sustained for a second, as in training."""
    import torch
    from torch.utils.benchmark import Timer

    best = 0.0
    for size in (256, 512) if device_name == "cpu" else (4096, 8192, 16384):
        a, b = (torch.randn(size, size, device=device_name, dtype=torch.bfloat16) for _ in range(2))
        timer = Timer("a @ b", globals={"a": a, "b": b})  # queues several before it waits for a GPU
        best = max(best, 2 * size**3 / timer.blocked_autorange(min_run_time=1).median)
    return best
