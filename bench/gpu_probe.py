"""What bench/gpu.py measures, each in a process of its own: training by the trainer itself, and single operations.

A process of its own cannot disturb the next measurement, and can be killed when its time is over. It is a fork of one that has
imported torch but not touched a GPU.
"""

import functools
import importlib.util
import json
import os
import signal
import statistics
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import errors
from common.errors import RunError
from hardware import host
from settings import Config, ModelConfig

FIRST_UPDATES = 2  # not counted: memory is allocated, and clocks rise
FEWEST_UPDATES = 4  # without which a run has measured nothing

# ---------------------------------------------------------------------------------------------------------------------
# Processes


def import_trainer() -> list[str]:
    """Import the trainer, for all forks. Returns which of the packages it can do without are missing."""
    missing = [name for name in ("tyro", "wandb") if importlib.util.find_spec(name) is None]
    if "tyro" in missing:  # it parses command lines, which are not used here; two modules name this type as they are imported
        tyro = types.ModuleType("tyro")
        tyro.conf = types.SimpleNamespace(Positional=list)
        sys.modules["tyro"] = tyro
    machine.prepare_to_fork()
    return missing


def run_forks(ranks: int, folder: Path, work: Callable[[], int], limit: float, enough=lambda: False) -> list[int]:
    """Let `ranks` forks `work`, until all have ended, one has failed, there is `enough`, or `limit` seconds are over.

    What still runs then is killed. Returns the wait statuses. The output of the forks is appended to FOLDER/output.
    """

    def work_quietly() -> int:
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        return work()

    deadline = time.monotonic() + limit
    pids = machine.fork_ranks(ranks, work_quietly, new_group=True)
    try:
        while time.monotonic() < deadline and not enough():
            ended = [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids]
            if all(ended) or any(end is not None and end.si_status for end in ended):
                break
            time.sleep(0.01)
    finally:
        statuses = machine.end(pids)
    return statuses


def failure(folder: Path, statuses: list[int], limit: float) -> RunError:
    """The error of forks that did not do their work, with the last line that they wrote."""
    lines = [line.strip() for line in (folder / "output").read_text(errors="replace").split("\n") if line.strip()]
    ended = "was not done" if all(status == signal.SIGKILL for status in statuses) else "failed"
    return RunError(f"{ended} within {limit:.0f} s: {(lines or ['no output'])[-1][:500]}")


def in_fork(function: Callable, *arguments, folder: Path, limit: float):
    """`function(*arguments)` in a fork. Raises RunError where it fails or takes more than `limit` seconds."""

    def work() -> int:
        (folder / "result").write_text(json.dumps(function(*arguments)))
        return 0

    if any(statuses := run_forks(1, folder, work, limit)):
        raise failure(folder, statuses, limit)
    return json.loads((folder / "result").read_text())


# ---------------------------------------------------------------------------------------------------------------------
# Training


def train_in_forks(config: Config, ranks: int, folder: Path, limit: float, enough, variables: dict, graph: str = ""):
    """Run the trainer on `ranks`. Returns the times at which it read a gradient norm, the time before, and the wait statuses.

    enough: whether the times so far are enough, which kills the run. variables: of the environment. graph: see `compile_as`.
    """
    path = folder / "norms"
    path.unlink(missing_ok=True)

    def work() -> int:
        os.environ.update(variables)
        import train
        from parallel import engine

        if os.environ.get("RANK", "0") == "0":
            note_norms(engine.Engine, path)
        if graph:
            compile_as(engine.Engine, graph)
        with errors.user_errors():
            return train.main(config)

    def times() -> list[float]:
        return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    began = time.perf_counter()
    statuses = run_forks(ranks, folder, work, limit, lambda: enough(times()))
    return times(), began, statuses


def note_norms(engine_class, path: Path) -> None:
    """Let the engine append the time to a file whenever it has read a gradient norm, the only wait for a GPU in an update.

    From one of these times to the next is a whole update: the optimizer's kernels too, which the GPU computes after the wait.
    """
    clip = engine_class.clip
    file = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the process)

    def clip_and_note(self, limit: float) -> float:
        norm = clip(self, limit)
        file.write(f"{time.perf_counter()}\n")
        return norm

    engine_class.clip = clip_and_note


def compile_as(engine_class, graph: str) -> None:
    """Let the engine compile the model as one graph ("whole") or each block by itself ("blocks")."""
    import torch

    plain = engine_class.__init__

    def compile_after(self, module, config, world, weights=()):
        plain(self, module, settings.replace(config, compile="off"), world, weights)
        self.compiled = True
        if graph == "whole":
            self.model = torch.compile(self.model)
        else:
            for block in module.blocks:
                block.forward = torch.compile(block.forward)

    engine_class.__init__ = compile_after


def training(
    config: Config, ranks: int, folder: Path, limit: float, updates: int, seconds: float, variables: dict, graph: str
) -> dict:
    """Train for `updates`, or at least FEWEST_UPDATES and `seconds` after the first; then kill the run, which saves nothing.

    Returns the milliseconds of each update, the seconds until the first, memory, data wait, losses and what was chosen.
    """

    def enough(times: list[float]) -> bool:
        return len(times) >= updates or (len(times) >= FEWEST_UPDATES and time.perf_counter() - times[0] > seconds)

    config = settings.replace(config, out_dir=str(folder), name="run", steps=10**6, eval_every=0, save_every=0)
    times, began, statuses = train_in_forks(config, ranks, folder, limit, enough, variables, graph)
    if len(times) < min(updates, FEWEST_UPDATES):
        raise failure(folder, statuses, limit)
    resolved = settings.read_preset(folder / "run/config.toml")
    records = [record for record in machine.metrics(folder / "run") if "loss" in record]
    return {
        "first_update_s": times[0] - began,
        "update_ms": [1000 * (b - a) for a, b in zip(times, times[1:], strict=False)][FIRST_UPDATES:],
        "logged_ms": median_of(records, "step_ms"),
        "data_wait_ms": median_of(records, "data_wait_ms"),
        "memory_gb": max((record["memory_gb"] for record in records), default=None),
        "losses": [record["loss"] for record in records],
        "tokens_per_update": resolved.train.tokens_per_update,
        "micro_batch_size": resolved.train.micro_batch_size,
        "dtype": resolved.train.dtype,
        "compile": resolved.train.compile,
    }


def median_of(records: list[dict], key: str) -> float | None:
    """The median of a metric in the records that have it."""
    values = [record[key] for record in records if key in record]
    return statistics.median(values) if values else None


def first_updates(config: Config, folder: Path, limit: float) -> list[float]:
    """Seconds until the first update with an empty compiler cache, and again with a full one. Each may take half of `limit`."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "cache/triton")}
    seconds = []
    for name in ("cold", "warm"):
        (folder / name).mkdir()
        seconds.append(training(config, 1, folder / name, limit / 2, 1, 0, variables, "")["first_update_s"])
    return seconds


def digests(config: Config, ranks: int, folder: Path, limit: float, variables: dict, kill_after: int = 0) -> dict:
    """The sha256 of weights and optimizer state at the end of a run. kill_after: kill the run once after so many updates."""
    config = settings.replace(
        config, out_dir=str(folder), name="run", async_save=False, eval_every=0, eval_tokens=config.model.seq_len
    )
    if kill_after:
        times, _, statuses = train_in_forks(config, ranks, folder, limit, lambda times: len(times) >= kill_after, variables)
        if len(times) < kill_after:
            raise failure(folder, statuses, limit)
    times, _, statuses = train_in_forks(config, ranks, folder, limit, lambda times: False, variables)
    if any(statuses):
        raise failure(folder, statuses, limit)
    return {"updates": len(times), "sha256": machine.digests(folder / "run")}


# ---------------------------------------------------------------------------------------------------------------------
# Single operations, each in a fork by `in_fork`


def facts(device_name: str) -> dict:
    """The GPUs, what their datasheet says, and the versions that matter to speed."""
    import torch
    from torch.nn import attention

    from hardware import device

    gpus = []
    if device_name == "cuda" and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    implementations = getattr(attention, "list_flash_attention_impls", list)()  # torch 2.11 has it already
    return {
        "gpus": gpus,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if gpus else "",
        "memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9 if gpus else None,
        "datasheet_flops": device.datasheet_flops(gpus[0]) if gpus else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpus else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "flash_attention": [str(name) for name in implementations],
    }


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
    width = model.head_dim
    q, k, v = (
        torch.randn(sequences, heads, model.seq_len, width, device=device_name, dtype=torch.bfloat16, requires_grad=True)
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
    for backend in (
        attention.SDPBackend.FLASH_ATTENTION,
        attention.SDPBackend.CUDNN_ATTENTION,
        attention.SDPBackend.EFFICIENT_ATTENTION,
    ):
        results[backend.name] = measure(attention.sdpa_kernel(backend), sdpa)
    try:
        attention.activate_flash_attention_impl("FA3")
        results["FLASH_ATTENTION 3"] = measure(attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION), sdpa)
    except Exception:  # an older torch, another GPU, or no such package: each raises another kind
        results["FLASH_ATTENTION 3"] = None
    return results


def loss_in_parts(model: ModelConfig, tokens: int, rows: int, device_name: str, seconds: float) -> dict:
    """Milliseconds of the loss, forward and backward, with `rows` rows of logits at a time, and its peak memory in GB."""
    import torch

    import kernels
    from hardware import device

    kernels.rows_at_a_time = lambda vocab_size, device: rows
    x = torch.randn(tokens, model.n_embd, device=device_name, requires_grad=True)
    weight = (torch.randn(model.vocab_size, model.n_embd, device=device_name) * 0.02).requires_grad_()
    targets = torch.randint(model.vocab_size, (tokens,), device=device_name)
    where = torch.device(device_name)
    loss = kernels.linear_cross_entropy
    if device_name == "cuda":
        loss = functools.partial(loss, part=torch.compile(kernels.cross_entropy_part, dynamic=False))

    def work():
        with device.autocast(where, "bfloat16"):
            value = loss(x, weight, targets)
        return torch.autograd.grad(value, (x, weight))

    return {"ms": milliseconds(work, device_name, seconds), "memory_gb": device.peak_memory_gb(where)}


def joined_products(model: ModelConfig, tokens: int, device_name: str, seconds: float) -> dict:
    """Milliseconds of products of the same input, forward and backward: [one after the other, joined into one]."""
    import torch

    from hardware import device

    C, kv_width = model.n_embd, model.head_dim * model.n_kv_head
    groups = {"q, k, v": [C, kv_width, kv_width]}
    if model.architecture != "gpt2":
        groups["gate, up"] = [model.d_ff, model.d_ff]
    x = torch.randn(tokens, C, device=device_name, requires_grad=True)
    results = {}
    for name, widths in groups.items():
        separate = [(torch.randn(width, C, device=device_name) * 0.02).requires_grad_() for width in widths]
        joined = [torch.cat(separate).detach().requires_grad_()]
        grads = [torch.randn(tokens, width, device=device_name, dtype=torch.bfloat16) for width in widths]

        def outputs(x, weights, widths=widths):
            products = [torch.nn.functional.linear(x, weight) for weight in weights]
            return products if len(products) > 1 else products[0].split(widths, dim=1)

        function = torch.compile(outputs) if device_name == "cuda" else outputs

        def work(weights, function=function, grads=grads):
            with device.autocast(torch.device(device_name), "bfloat16"):
                made = function(x, weights)
            return torch.autograd.grad(made, (x, *weights), grads)

        results[name] = [milliseconds(lambda w=weights: work(w), device_name, seconds) for weights in (separate, joined)]
    return results


def copies_to_the_host(size: int, device_name: str) -> dict:
    """Seconds to copy `size` bytes to ordinary host memory: by the driver, and through a page-locked buffer."""
    import torch

    from parallel import engine

    torch.set_num_threads(host.cores())  # as the trainer has them
    source = torch.ones(size // 4, device=device_name)
    staging = torch.empty(engine.STAGING_BYTES, dtype=torch.uint8, pin_memory=device_name == "cuda")
    ways = {
        "by the driver": lambda: source.to("cpu", copy=True),
        "through a page-locked buffer": lambda: engine.copy_through(staging, source),
    }
    return {name: milliseconds(way, device_name, 0.5) / 1000 for name, way in ways.items()}
