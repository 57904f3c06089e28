"""What bench/gpu.py measures, each in a fork, which can be killed: training by the trainer itself, and single operations.

The forks are of a process that has imported torch but not touched a GPU.
"""

import importlib.util
import os
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import forks
import settings
from common import errors
from hardware import footprint
from settings import Config, ModelConfig

UNTIMED = 2  # updates in which memory is allocated, and clocks rise
FEWEST, SECONDS = 4, 20.0  # the updates that a run is timed for at least, and those of so many seconds


def import_trainer() -> list[str]:
    """Import the trainer, for all forks. Returns which of the packages it can do without are missing."""
    missing = [name for name in ("tyro", "wandb") if importlib.util.find_spec(name) is None]
    if "tyro" in missing:  # it parses command lines, which are not used here; two modules name this type as they are imported
        sys.modules["tyro"] = types.ModuleType("tyro")
        sys.modules["tyro"].conf = types.SimpleNamespace(Positional=list)
    forks.prepare_to_fork()
    return missing


# ---------------------------------------------------------------------------------------------------------------------
# Training


def train(config: Config, ranks: int, folder: Path, limit: float, enough: Callable = lambda records: False):
    """Run the trainer as FOLDER/run until `enough(the records of its updates)`, or for `limit` seconds; then kill it.

    Returns the records and the wait statuses.
    """
    own = dict(out_dir=str(folder), name="run", async_save=False, eval_every=0, eval_tokens=config.model.seq_len)
    config = settings.replace(config, **own)

    def work() -> int:
        import torch

        import train

        if ranks > torch.cuda.device_count():
            os.environ["LOCKSTEP_SHARE_GPU"] = "1"
        with errors.user_errors():
            return train.main(config)

    def updates() -> list[dict]:
        return [record for record in machine.metrics(folder / "run") if "loss" in record]

    statuses = forks.run_forks(ranks, work, folder / "forks", limit, lambda: enough(updates()))
    return updates(), statuses


def training(config: Config, folder: Path, limit: float, updates: int) -> dict:
    """Train for `updates`, or at least FEWEST of them and SECONDS after the first. Saves nothing.

    Returns the milliseconds of each update, the seconds until the first, memory, losses and what was chosen.
    """

    def enough(records: list[dict]) -> bool:
        seconds = records[-1]["time"] - records[0]["time"] if records else 0.0
        return len(records) >= updates or (len(records) >= FEWEST and seconds > SECONDS)

    config, began = settings.replace(config, steps=10**6, save_every=0), time.time()
    records, statuses = train(config, 1, folder, limit, enough)
    if len(records) < min(updates, FEWEST):
        raise forks.failure(folder / "forks", statuses, limit)
    resolved = settings.read_preset(folder / "run/config.toml")
    return {
        "first_update_s": records[0]["time"] - began,
        "update_ms": [record["step_ms"] for record in records[UNTIMED:]],
        "memory_gb": max(record["memory_gb"] for record in records),
        "estimated_gb": sum(footprint.of_rank(resolved, 1, resolved.train.device).values()) / 1e9,
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


# ---------------------------------------------------------------------------------------------------------------------
# Single operations


def facts() -> dict:
    """The GPUs, the FLOP/s that their datasheet says, and the versions that matter to speed."""
    import torch

    from hardware import device

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {"gpus": gpus, "datasheet_flops": device.datasheet_flops(gpus[0]) if gpus else None} | versions


def milliseconds(work: Callable[[], object], seconds: float) -> float:
    """The median time of a call of `work`, measured for so long. Several calls are queued before a GPU is awaited."""
    from torch.utils.benchmark import Timer

    return 1000 * Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=seconds).median


def matmul_peak(device_name: str) -> float:
    """FLOP/s of products of two square bfloat16 matrices of the best size, sustained for a second, as training must."""
    import torch

    best = 0.0
    for size in (1024, 2048) if device_name == "cpu" else (4096, 8192, 16384):
        a, b = (torch.randn(size, size, device=device_name, dtype=torch.bfloat16) for _ in range(2))
        best = max(best, 2000 * size**3 / milliseconds(lambda a=a, b=b: a @ b, seconds=1))
    return best


def attention_kernels(model: ModelConfig, sequences: int, device_name: str, seconds: float, deterministic: bool) -> dict:
    """Milliseconds of forward and backward of causal attention by each kernel, and by the trainer. None: not offered."""
    import torch
    import torch.nn.functional as F
    from torch.nn import attention

    import kernels
    from hardware import device

    if deterministic:
        device.make_deterministic(torch.device(device_name), integers_only=False)
    kind = dict(device=device_name, dtype=torch.bfloat16, requires_grad=True)
    heads = (model.n_head, model.n_kv_head, model.n_kv_head)
    q, k, v = (torch.randn(sequences, count, model.seq_len, model.head_dim, **kind) for count in heads)
    grad = torch.randn_like(q)

    def measure(context, function) -> float | None:
        try:
            with context:
                return milliseconds(lambda: torch.autograd.grad(function(), (q, k, v), grad), seconds)
        except RuntimeError:  # this kernel is not for this device, these shapes or deterministic mode
            return None

    def sdpa():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=model.n_kv_head != model.n_head)

    results = {"the trainer's": measure(nullcontext(), lambda: kernels.attention(q, k, v))}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        results[name] = measure(attention.sdpa_kernel(getattr(attention.SDPBackend, name)), sdpa)
    try:
        attention.activate_flash_attention_impl("FA3")
        results["FLASH_ATTENTION 3"] = measure(attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION), sdpa)
    except Exception:  # an older torch, another GPU, or no such package: each raises another kind
        results["FLASH_ATTENTION 3"] = None
    return results


def profile(config: Config, folder: str) -> str:
    """What takes the time of one update: torch's table of the operations that take most."""
    from torch import cuda, profiler

    import train

    run, prefetcher = machine.ready(settings.replace(config, out_dir=folder, name="run", steps=10**6), FEWEST + 1)
    for _ in range(FEWEST):
        train.update(run, prefetcher)
    on_gpu = run.world.device.type == "cuda"
    with profiler.profile() as seen:
        train.update(run, prefetcher)
        if on_gpu:
            cuda.synchronize()
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return seen.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=60)
