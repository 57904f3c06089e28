"""What bench/gpu.py measures: training by the trainer itself, and the fastest matmul. Each runs in a fork that can be killed.

The forked process has imported torch but not touched a GPU.
"""

import importlib.util
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import forks
import settings
from common import errors
from hardware import footprint
from settings import Config

UNTIMED = 2  # updates during which memory is allocated and clocks rise
FEWEST, SECONDS = 4, 20.0  # a timed run has at least this many updates, and lasts at least this long


def import_trainer() -> list[str]:
    """Import the trainer, for all forks. Returns the names of missing packages that it can do without."""
    missing = [name for name in ("tyro", "wandb") if importlib.util.find_spec(name) is None]
    if "tyro" in missing:  # it parses command lines, which we do not; but two modules use this name when imported
        sys.modules["tyro"] = types.ModuleType("tyro")
        sys.modules["tyro"].conf = types.SimpleNamespace(Positional=list, arg=lambda **options: None)
    forks.prepare_to_fork()
    return missing


def train(config: Config, ranks: int, folder: Path, limit: float, enough: Callable = lambda records: False, plain: str = ""):
    """Run the trainer in FOLDER/run until `enough(the records of its updates)`, or for `limit` seconds; then kill it.

    plain: "waiting" makes Muon wait for each exchange. Returns the records and wait statuses.
    """
    own = dict(out_dir=str(folder), name="run", async_save=False, eval_every=0, eval_tokens=config.model.seq_len)
    config = settings.replace(config, **own)

    def work() -> int:
        import torch

        import train

        if plain == "waiting":
            import optim

            optim.when_done = lambda work, received: (work.wait(), lambda: received)[1]
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

    from hardware import device

    create = dist.init_process_group
    device.find_device = lambda _, local_rank: torch.device("cuda", local_rank % count)
    dist.init_process_group = lambda _, **options: create("gloo", **options | {"device_id": None})


def training(config: Config, folder: Path, limit: float, updates: int, ranks: int = 1, plain: str = "") -> dict:
    """Train for `updates`, or at least FEWEST of them and SECONDS after the first. Saves nothing.

    Returns the milliseconds of each update, the seconds until the first, memory, losses and the chosen batch.
    """

    def enough(records: list[dict]) -> bool:
        seconds = records[-1]["time"] - records[0]["time"] if records else 0.0
        return len(records) >= updates or (len(records) >= FEWEST and seconds > SECONDS)

    config, began = settings.replace(config, steps=10**6, save_every=0), time.time()
    records, statuses = train(config, ranks, folder, limit, enough, plain)
    if len(records) < min(updates, FEWEST):
        raise forks.failure(folder / "forks", statuses, limit)
    resolved = settings.read_preset(folder / "run/config.toml")
    return {
        "first_update_s": records[0]["time"] - began,
        "update_ms": [record["step_ms"] for record in records[UNTIMED:]],
        "memory_gb": max(record["memory_gb"] for record in records),
        "estimated_gb": sum(footprint.of_rank(resolved, ranks, resolved.train.device).values()) / 1e9,
        "losses": [record["loss"] for record in records],
        "tokens_per_update": resolved.train.tokens_per_update,
        "micro_batch_size": resolved.train.micro_batch_size,
    }


def digests(config: Config, ranks: int, folder: Path, limit: float, kill_after: int = 0) -> dict:
    """The sha256 of weights and optimizer state at the end of a run. kill_after: kill the run once after so many updates."""
    if kill_after:
        records, statuses = train(config, ranks, folder, limit, lambda records: len(records) >= kill_after)
        if len(records) < kill_after:
            raise forks.failure(folder / "forks", statuses, limit)
    _, statuses = train(config, ranks, folder, limit)
    if any(statuses):
        raise forks.failure(folder / "forks", statuses, limit)
    resumed = "loaded the weights and optimizer state" in (folder / "run/train.log").read_text()
    return {"resumed": resumed, "sha256": machine.digests(folder / "run")}


def facts() -> dict:
    """The GPUs, the FLOP/s in their datasheet, and the versions that matter for speed."""
    import torch

    from hardware import device

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
