"""What bench/gpu.py measures, each in a process of its own: training by the trainer itself, and single operations.

A process of its own cannot disturb the next measurement, and can be killed when its time is over. It is a fork of one that has
imported torch but not touched a GPU.
"""

import importlib.util
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import machine  # puts the project's folder on the path
import settings
from common import errors
from hardware import footprint
from settings import Config, ModelConfig

FIRST_UPDATES = 2  # not counted: memory is allocated, and clocks rise
FEWEST_UPDATES = 4  # without which a run has measured nothing
PROFILED = 4  # the update of which a profile is made
LINES = 15  # of a profile
APART = "LOCKSTEP_APART"  # the environment variable that tells a fork to multiply by each weight alone


def import_trainer() -> list[str]:
    """Import the trainer, for all forks. Returns which of the packages it can do without are missing."""
    missing = [name for name in ("tyro", "wandb") if importlib.util.find_spec(name) is None]
    if "tyro" in missing:  # it parses command lines, which are not used here; two modules name this type as they are imported
        sys.modules["tyro"] = types.ModuleType("tyro")
        sys.modules["tyro"].conf = types.SimpleNamespace(Positional=list)
    machine.prepare_to_fork()
    return missing


# ---------------------------------------------------------------------------------------------------------------------
# Training


def train_in_forks(config: Config, ranks: int, folder: Path, limit: float, enough, variables: dict):
    """Run the trainer as FOLDER/run until `enough(seconds since its first update, records of its updates)`, which kills it.

    Returns the seconds until the first update, the records and the wait statuses. variables: of the environment.
    """
    began, first = time.monotonic(), None

    def work() -> int:
        os.environ.update(variables)
        import kernels
        import train

        if APART in variables:
            kernels.joins = lambda x, layers: False

        profile_one(train, folder / "profile")
        with errors.user_errors():
            return train.main(config)

    def updates() -> list[dict]:
        there = (folder / "run/metrics.jsonl").exists()
        return [record for record in machine.metrics(folder / "run") if "loss" in record] if there else []

    def is_enough() -> bool:
        nonlocal first
        records = updates()
        first = first or (time.monotonic() if records else None)
        return bool(records) and enough(time.monotonic() - first, records)

    statuses = machine.run_forks(ranks, work, folder / "forks", limit, is_enough)
    return first and first - began, updates(), statuses


def profile_one(train, path: Path) -> None:
    """Let the trainer profile one update if the file `path` is there, and write what took most time into it."""
    update = train.update

    def profiled(run, prefetcher):
        if not path.exists() or run.state.step != PROFILED:
            return update(run, prefetcher)
        from torch import cuda, profiler

        on_gpu = run.world.device.type == "cuda"
        with profiler.profile() as profile:
            result = update(run, prefetcher)
            if on_gpu:
                cuda.synchronize()
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        events = [event for event in profile.key_averages() if (event.device_type.name != "CPU") == on_gpu]  # kernels, or calls
        events.sort(key=lambda event: -getattr(event, key))
        rows = [[event.key[:60], getattr(event, key) / 1000, event.count] for event in events]
        path.write_text(json.dumps({"rows": rows[:LINES], "ms": sum(ms for _, ms, _ in rows)}))
        return result

    train.update = profiled


def training(config: Config, ranks: int, folder: Path, limit: float, updates: int, seconds: float, variables: dict) -> dict:
    """Train for `updates`, or at least FEWEST_UPDATES and `seconds` after the first; then kill the run, which saves nothing.

    Returns the milliseconds of each update, the seconds until the first, memory, data wait, losses and what was chosen.
    """

    def enough(since: float, records: list[dict]) -> bool:
        return len(records) >= updates or (len(records) >= FEWEST_UPDATES and since > seconds)

    config = settings.replace(config, out_dir=str(folder), name="run", steps=10**6, eval_every=0, save_every=0)
    first, records, statuses = train_in_forks(config, ranks, folder, limit, enough, variables)
    if len(records) < min(updates, FEWEST_UPDATES):
        raise machine.failure(folder / "forks", statuses, limit)
    resolved = settings.read_preset(folder / "run/config.toml")
    return {
        "first_update_s": first,
        "update_ms": [record["step_ms"] for record in records[FIRST_UPDATES:]],
        "data_wait_ms": statistics.median(record["data_wait_ms"] for record in records[FIRST_UPDATES:]),
        "memory_gb": max(record["memory_gb"] for record in records),
        "losses": [record["loss"] for record in records],
        "estimated_gb": sum(footprint.of_rank(resolved, ranks, resolved.train.device).values()) / 1e9,
        "tokens_per_update": resolved.train.tokens_per_update,
        "micro_batch_size": resolved.train.micro_batch_size,
    }


def profile(config: Config, folder: Path, limit: float) -> dict:
    """What takes the time of one update: the operations that take most, with milliseconds and calls, and the sum of all."""
    path = folder / "profile"
    path.touch()
    config = settings.replace(config, out_dir=str(folder), name="run", steps=10**6, eval_every=0, save_every=0)
    statuses = train_in_forks(config, 1, folder, limit, lambda since, records: len(records) > PROFILED + 1, {})[2]
    if not path.read_text():
        raise machine.failure(folder / "forks", statuses, limit)
    return json.loads(path.read_text())


def digests(config: Config, ranks: int, folder: Path, limit: float, variables: dict, kill_after: int = 0) -> dict:
    """The sha256 of weights and optimizer state at the end of a run. kill_after: kill the run once after so many updates."""
    own = dict(out_dir=str(folder), name="run", async_save=False, eval_every=0, eval_tokens=config.model.seq_len)
    config = settings.replace(config, **own)
    if kill_after:
        enough = lambda since, records: len(records) >= kill_after  # noqa: E731
        _, records, statuses = train_in_forks(config, ranks, folder, limit, enough, variables)
        if len(records) < kill_after:
            raise machine.failure(folder / "forks", statuses, limit)
    statuses = train_in_forks(config, ranks, folder, limit, lambda since, records: False, variables)[2]
    if any(statuses):
        raise machine.failure(folder / "forks", statuses, limit)
    resumed = "loaded the weights and optimizer state" in (folder / "run/train.log").read_text()
    return {"resumed": resumed, "sha256": machine.digests(folder / "run")}


# ---------------------------------------------------------------------------------------------------------------------
# Single operations, each in a fork


def facts(device_name: str) -> dict:
    """The GPUs, what their datasheet says, and the versions that matter to speed."""
    import torch

    from hardware import device

    found = {"gpus": [], "datasheet_flops": None, "torch": torch.__version__, "cuda": torch.version.cuda}
    if device_name == "cuda" and torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["datasheet_flops"] = device.datasheet_flops(found["gpus"][0])
        found["memory_gb"] = torch.cuda.get_device_properties(0).total_memory / 1e9
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def milliseconds(work: Callable[[], object], device_name: str, seconds: float) -> float:
    """The median time of a call of `work`, several of which are queued before the device is awaited."""
    import torch

    wait = torch.cuda.synchronize if device_name == "cuda" else lambda: None

    def timed(count: int) -> float:
        wait()
        began = time.perf_counter()
        for _ in range(count):
            work()
        wait()
        return (time.perf_counter() - began) / count

    timed(2)  # compiles, and chooses kernels
    count = max(1, min(100, int(seconds / 5 / timed(1))))
    return 1000 * statistics.median(timed(count) for _ in range(5))


def attention_kernels(model: ModelConfig, sequences: int, device_name: str, deterministic: bool, seconds: float) -> dict:
    """Milliseconds of forward and backward of causal attention by each kernel, and by the trainer. None: not offered."""
    import torch
    import torch.nn.functional as F
    from torch.nn import attention

    import kernels
    from hardware import device

    if deterministic:
        device.make_deterministic(torch.device(device_name), integers_only=False)
    q, k, v = (
        torch.randn(
            sequences, heads, model.seq_len, model.head_dim, device=device_name, dtype=torch.bfloat16, requires_grad=True
        )
        for heads in (model.n_head, model.n_kv_head, model.n_kv_head)
    )
    grad = torch.randn_like(q)

    def measure(context, function) -> float | None:
        try:
            with context:
                return milliseconds(lambda: torch.autograd.grad(function(), (q, k, v), grad), device_name, seconds)
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
