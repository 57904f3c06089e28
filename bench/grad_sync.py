"""What does it cost to keep the ranks in step? Every strategy on 1, 2 and 4 local processes, in a table and a bar chart.

python bench/grad_sync.py

Measures updates of the same global batch for each strategy and number of ranks, in turns:
- their time, and how much of it communication adds (compared with the same updates without syncing);
- the bytes that a rank sends, and the memory of weights and optimizer state;
- the distance of the final weights from those of one process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import settings
from common import cli, errors
from machine import arguments, environment, launcher, table, write

STRATEGIES = ["ddp", "zero1", "fsdp", "exact", "scratch_allreduce", "scratch_reduce_scatter", "scratch_overlap"]


@dataclass(frozen=True)
class GradSyncConfig:
    strategies: str = ",".join(STRATEGIES)
    ranks: str = "1,2,4"
    rounds: int = 3
    """How often each strategy is measured, in turns. The table shows the median."""
    updates: int = 8
    """Timed updates of a round. Two untimed ones come first."""
    n_layer: int = 4
    n_embd: int = 256
    seq_len: int = 128
    micro_batch_size: int = 4
    micro_batches: int = 8
    """Micro-batches of an update, over all ranks."""
    device: str = "auto"
    dtype: str = "float32"
    name: str = "grad_sync"
    """Name of the result files."""
    worker: str = ""
    """Set by the script itself: the strategy to measure and the file for its result, as STRATEGY:FILE."""


def configuration(config: GradSyncConfig, strategy: str) -> settings.Config:
    """The training settings of one measurement."""
    shape = {"architecture": "qwen3", "n_layer": config.n_layer, "n_head": 4, "n_embd": config.n_embd, "vocab_size": 4096}
    batch = {"micro_batch_size": config.micro_batch_size, "seq_len": config.seq_len}
    batch["tokens_per_update"] = config.micro_batches * config.micro_batch_size * config.seq_len
    chosen = settings.replace(
        settings.Config(), strategy=strategy, lr=1e-4, device=config.device, dtype=config.dtype, compile="off", **shape, **batch
    )
    return settings.replace(chosen, **cli.flat_values(settings.resolve_model(chosen.model, 4096)))


def measure(config: GradSyncConfig) -> None:
    """In each rank: run updates with and without syncing. Rank 0 writes the result."""
    import torch
    from safetensors.torch import save_file

    from model import GPT, initialize
    from parallel.engine import Engine
    from parallel.world import connect

    strategy, out = config.worker.split(":")
    training = configuration(config, strategy)
    world = connect(config.device, threads=1)
    module = GPT(training.model)
    initialize(module, 0)
    engine = Engine(module, training, world)
    optimizers = engine.build_optimizers(training.optim)
    generator = torch.Generator().manual_seed(0)
    shape = (config.micro_batches, config.micro_batch_size, config.seq_len + 1)
    tokens = torch.randint(0, 4096, shape, generator=generator).to(world.device)
    mine = world.share(config.micro_batches)

    def accumulate(sync: bool) -> None:
        for i, micro_batch in enumerate(mine):
            engine.model.require_backward_grad_sync = sync and i == len(mine) - 1
            with engine.autocast():
                loss = engine.model(tokens[micro_batch, :, :-1], tokens[micro_batch, :, 1:])
            (loss / engine.loss_divisor).backward()
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(function, *args) -> float:
        world.barrier()
        began = time.perf_counter()
        function(*args)
        return time.perf_counter() - began

    def step(grad_clip: float) -> None:
        engine.clip(grad_clip)
        optimizers.step()
        engine.drop_gradients()

    def update() -> None:
        accumulate(True)
        step(1.0)

    for _ in range(2):
        update()
    sent = loopback_bytes()
    with_sync = [timed(update) for _ in range(config.updates)]
    sent = (loopback_bytes() - sent) / config.updates / world.size
    full, parts = [], []
    for _ in range(config.updates):
        full.append(timed(accumulate, True))
        step(0.0)
    weights = engine.gather(engine.parameters, dict.fromkeys(engine.parameters, 0))
    for _ in range(config.updates):
        parts.append(timed(accumulate, False))
        engine.drop_gradients()
    if world.is_master:
        save_file(weights, f"{out}.safetensors")
        state = [local(value) for part in optimizers.parts for values in part.state.values() for value in values.values()]
        result = {
            "update_ms": 1000 * statistics.median(with_sync),
            "exposed_ms": 1000 * (statistics.median(full) - statistics.median(parts)),
            "sent_mb": sent / 1e6,
            "weights_mb": sum(local(p).numel() * 4 for p in module.parameters()) / 1e6,
            "state_mb": sum(value.nbytes for value in state) / 1e6,
        }
        Path(out).write_text(json.dumps(result))
    world.barrier()
    os._exit(0)  # without the tear-down of the interpreter, like train.py


def local(tensor):
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def loopback_bytes() -> int:
    """Bytes sent so far over the loopback device, through which gloo's ranks on one machine communicate (0: unknown)."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))
    except (OSError, StopIteration):
        return 0


def main(config: GradSyncConfig) -> None:
    """Measure all strategies on all numbers of ranks. Print the table, write JSON and PNG."""
    from safetensors.torch import load_file
    from tqdm import tqdm

    pairs = [(s, int(w)) for w in config.ranks.split(",") for s in config.strategies.split(",") if s in STRATEGIES]
    runs: dict[tuple, list[dict]] = {pair: [] for pair in pairs}
    with tempfile.TemporaryDirectory() as folder:
        for turn in tqdm(range(config.rounds * len(pairs)), desc="grad_sync", unit="run"):
            strategy, ranks = pairs[turn % len(pairs)]
            out = Path(folder) / f"{strategy}-{ranks}"
            command = [*launcher(ranks), *arguments(__file__, **vars(config) | {"worker": f"{strategy}:{out}"})]
            one_thread = environment(OMP_NUM_THREADS="1")
            done = subprocess.run(command, env=one_thread, capture_output=True, text=True)
            if done.returncode:
                raise errors.RunError(f"{strategy} on {ranks} ranks failed\n{done.stderr[-2000:]}")
            result = json.loads(out.read_text())
            weights, one = load_file(f"{out}.safetensors"), load_file(Path(folder) / "ddp-1.safetensors")
            result["largest_difference"] = max((weights[name] - one[name]).abs().max().item() for name in one)
            runs[strategy, ranks].append(result)
    rows = []
    for (strategy, ranks), results in runs.items():
        medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
        spread = [round(result["update_ms"], 1) for result in results]
        rows.append({"strategy": strategy, "ranks": ranks, **medians, "update_ms_each": spread})
    path = write(config.name, {"rows": rows})
    draw(rows, path.with_suffix(".png"))
    show(rows)


def show(rows: list[dict]) -> None:
    """Print the table and the ratios of some update times."""
    head = ["strategy", "ranks", "update ms", "exposed ms", "sent MB", "weights MB", "state MB", "largest difference"]
    formats = ["{}", "{}", "{:.1f}", "{:.1f}", "{:.1f}", "{:.1f}", "{:.1f}", "{:.1e}"]
    keys = ["strategy", "ranks", "update_ms", "exposed_ms", "sent_mb", "weights_mb", "state_mb", "largest_difference"]
    print(table(head, [[f.format(row[key]) for f, key in zip(formats, keys, strict=True)] for row in rows]))
    times = {(row["strategy"], row["ranks"]): row["update_ms"] for row in rows}
    for name, top, bottom in (
        ("scratch_overlap / ddp, update time on 2 ranks", ("scratch_overlap", 2), ("ddp", 2)),
        ("scratch_allreduce / ddp, update time on 2 ranks", ("scratch_allreduce", 2), ("ddp", 2)),
        ("2 ranks / 1 rank, tokens per second with ddp", ("ddp", 1), ("ddp", 2)),
    ):
        if top in times and bottom in times:
            print(f"{name}: {times[top] / times[bottom]:.3f}")


def draw(rows: list[dict], path: Path) -> None:
    """Draw bars of update time for each strategy and number of ranks. The part that communication adds is hatched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    names, counts = list(dict.fromkeys(r["strategy"] for r in rows)), list(dict.fromkeys(r["ranks"] for r in rows))
    for i, ranks in enumerate(counts):
        by_name = {r["strategy"]: r for r in rows if r["ranks"] == ranks}
        at = [k + (i - (len(counts) - 1) / 2) * 0.27 for k, name in enumerate(names) if name in by_name]
        times = [by_name[name]["update_ms"] for name in names if name in by_name]
        exposed = [max(0.0, by_name[name]["exposed_ms"]) for name in names if name in by_name]
        bars = axes.bar(at, times, width=0.25, label=f"{ranks} rank" + "s" * (ranks > 1), color=f"C{i}")
        below = [time - part for time, part in zip(times, exposed, strict=True)]
        axes.bar(at, exposed, bottom=below, width=0.25, color="none", hatch="////")
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("ms per update of the same global batch")
    axes.set_title("Time of an update; hatched: the part that communication adds", fontsize=10)
    axes.set_ylim(top=1.1 * max(r["update_ms"] for r in rows))  # room for the numbers on the bars
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    with errors.user_errors():
        chosen = cli.parse(GradSyncConfig, sys.argv[1:], __doc__)
        measure(chosen) if chosen.worker else main(chosen)
