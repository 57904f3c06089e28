"""What does it cost to keep the ranks in step?

python bench/grad_sync.py strategies|exact [--flag=value ...]
"""

import functools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path
import settings
from common import cli

STRATEGIES = ["ddp", "zero1", "fsdp", "exact", "scratch_allreduce", "scratch_reduce_scatter", "scratch_overlap"]
FLAGS = dict(architecture="qwen3", n_layer=4, n_head=4, n_embd=256, seq_len=128, vocab_size=4096, micro_batch_size=4)
FLAGS |= dict(lr=1e-4, device="cpu", dtype="float32", compile="off")
HEAD = ["strategy", "ranks", "update ms", "exposed ms", "sent MB", "weights MB", "state MB", "largest difference"]


@dataclass(frozen=True)
class StrategiesConfig:
    strategies: str = ",".join(STRATEGIES)
    ranks: str = "1,2,4"
    rounds: int = 3
    """How often each strategy is measured, in turns. The table shows the median."""
    updates: int = 8
    """Timed updates of a round. Two untimed ones come first."""
    micro_batches: int = 8
    """Micro-batches of an update, over all ranks."""
    name: str = "grad_sync"
    """Name of the result files."""
    out: str = str(machine.RESULTS)
    """Directory of the results."""


def strategies(config: StrategiesConfig) -> None:
    """Every strategy on 1, 2 and 4 local processes, in a table and a bar chart.

    Measures updates of the same global batch for each strategy and number of ranks, in turns: their time, and how much of it
    communication adds (compared with the same updates without syncing); the bytes that a rank sends, and the memory of weights
    and optimizer state; the distance of the final weights from those of one process. Writes grad_sync.json and grad_sync.png.
    """
    from safetensors.torch import load_file

    machine.prepare_to_fork()
    pairs = [(s, int(w)) for w in config.ranks.split(",") for s in config.strategies.split(",")]
    results: dict[tuple, list[dict]] = {pair: [] for pair in pairs}
    with machine.workspace() as folder:
        for number, (strategy, ranks) in enumerate(pairs * config.rounds, 1):
            weights = folder / f"{strategy}-{ranks}.safetensors"
            result = machine.in_forks(measure, config, strategy, str(weights), ranks=ranks, folder=folder)[0]
            own, one = load_file(weights), load_file(folder / "ddp-1.safetensors")
            result["largest_difference"] = max((own[name] - one[name]).abs().max().item() for name in one)
            results[strategy, ranks].append(result)
            print(f"{number}/{config.rounds * len(pairs)}  {strategy} on {ranks}: {result['update_ms']:.0f} ms", flush=True)
    rows = []
    for (strategy, ranks), each in results.items():
        medians = {key: statistics.median(result[key] for result in each) for key in each[0]}
        times = [round(result["update_ms"], 1) for result in each]
        rows.append({"strategy": strategy, "ranks": ranks, **medians, "update_ms_each": times})
    path = machine.write(config.name, {"rows": rows}, Path(config.out))
    draw(rows, path.with_suffix(".png"))
    formats = ["{}", "{}", "{:.1f}", "{:.1f}", "{:.1f}", "{:.1f}", "{:.1f}", "{:.1e}"]
    print(machine.table(HEAD, [[f.format(v) for f, v in zip(formats, row.values(), strict=False)] for row in rows]))


def measure(config: StrategiesConfig, strategy: str, weights_file: str) -> dict:
    """In each rank: run updates with and without syncing. Rank 0 writes the weights."""
    import torch
    from safetensors.torch import save_file

    from model import GPT, initialize
    from parallel.engine import Engine
    from parallel.world import connect

    update_tokens = config.micro_batches * FLAGS["micro_batch_size"] * FLAGS["seq_len"]
    training = settings.replace(settings.Config(), **FLAGS, strategy=strategy, tokens_per_update=update_tokens)
    training = settings.replace(training, **cli.flat_values(settings.resolve_model(training.model, FLAGS["vocab_size"])))
    world = connect("cpu", threads=1)
    module = GPT(training.model)
    initialize(module, 0)
    engine = Engine(module, training, world)
    optimizers = engine.build_optimizers(training.optim)
    size = (config.micro_batches, FLAGS["micro_batch_size"], FLAGS["seq_len"] + 1)
    tokens = torch.randint(0, FLAGS["vocab_size"], size, generator=torch.Generator().manual_seed(0))
    mine = world.share(config.micro_batches)

    def accumulate(sync: bool) -> None:
        for i, micro_batch in enumerate(mine):
            engine.model.require_backward_grad_sync = sync and i == len(mine) - 1
            loss = engine.model(tokens[micro_batch, :, :-1], tokens[micro_batch, :, 1:])
            (loss / engine.loss_divisor).backward()

    def step() -> None:
        engine.clip(1.0)
        optimizers.step()
        engine.drop_gradients()

    def update() -> None:
        accumulate(True)
        step()

    def timed(function, *arguments) -> float:
        world.barrier()
        began = time.perf_counter()
        function(*arguments)
        return 1000 * (time.perf_counter() - began)

    for _ in range(2):
        update()
    before, full, parts = loopback_bytes(), [], []
    updates = [timed(update) for _ in range(config.updates)]
    sent = (loopback_bytes() - before) / config.updates / world.size
    for _ in range(config.updates):
        full.append(timed(accumulate, True))
        step()
    weights = engine.gather(engine.parameters, dict.fromkeys(engine.parameters, 0))
    if world.is_master:
        save_file(weights, weights_file)
    for _ in range(config.updates):
        parts.append(timed(accumulate, False))
        engine.drop_gradients()
    state = [local(value) for part in optimizers.parts for values in part.state.values() for value in values.values()]
    exposed = statistics.median(full) - statistics.median(parts)
    result = {"update_ms": statistics.median(updates), "exposed_ms": exposed, "sent_mb": sent / 1e6}
    result["weights_mb"] = sum(local(p).numel() * 4 for p in module.parameters()) / 1e6
    result["state_mb"] = sum(value.nbytes for value in state) / 1e6
    world.barrier()
    return result


def local(tensor):
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def loopback_bytes() -> int:
    """Bytes sent so far over the loopback device of Linux, through which gloo's ranks on one machine communicate."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def draw(rows: list[dict], path: Path) -> None:
    """Draw bars of update time for each strategy and number of ranks. The part that communication adds is hatched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots()
    names, counts = list(dict.fromkeys(r["strategy"] for r in rows)), list(dict.fromkeys(r["ranks"] for r in rows))
    for i, ranks in enumerate(counts):
        mine = [row for row in rows if row["ranks"] == ranks]
        at = [names.index(row["strategy"]) + (i - (len(counts) - 1) / 2) * 0.27 for row in mine]
        times, exposed = [row["update_ms"] for row in mine], [max(0.0, row["exposed_ms"]) for row in mine]
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


# ---------------------------------------------------------------------------------------------------------------------
# The cost of exact


@dataclass(frozen=True)
class ExactConfig(machine.Options):
    rounds: int = 3
    """How often each strategy is measured on each number of ranks, in turns."""
    steps: int = 15
    """Steps of a run, the first three of which do not count."""


def exact(config: ExactConfig) -> None:
    """What bit-identical training costs: the time of a step under --strategy=exact against ddp, by train.py itself.

    Trains the laptop preset for a few steps with one strategy and then with the other, in turns, on one process and on two.
    Both cut the update into the same micro-batches and use one thread a rank. Writes exact_cost.json. Eight minutes on two
    cores.
    """
    machine.prepare_tokens(config.tokens)
    fixed = dict(preset="config/laptop.toml", steps=config.steps, micro_batch_size=4, compile="on", tokens=config.tokens)
    fixed |= dict(warmup_steps=0, threads=1, eval_every=0, eval_tokens=1024, save_every=0, log_every=1)

    def step_ms(strategy: str, ranks: int) -> float:
        name = f"{strategy}-{ranks}-{time.monotonic_ns()}"
        machine.run(ranks, strategy=strategy, out_dir=runs, name=name, **fixed)
        return statistics.median(line["step_ms"] for line in machine.metrics(runs / name)[3:] if "step_ms" in line)

    pairs = [(ranks, strategy) for ranks in (1, 2) for strategy in ("ddp", "exact")]
    with machine.workspace() as runs:
        contenders = {f"W={ranks} {strategy}": functools.partial(step_ms, strategy, ranks) for ranks, strategy in pairs}
        times = machine.in_turns(config.rounds, contenders)
    result = {str(ranks): {s: times[f"W={ranks} {s}"] for s in ("ddp", "exact")} for ranks in (1, 2)}
    print(machine.write("exact_cost", {"settings": fixed, "step_ms": result}, Path(config.out)))
    for ranks, row in result.items():
        print(f"W={ranks}: exact / ddp = {machine.ratio(row['exact'], row['ddp']):.3f}")


if __name__ == "__main__":
    machine.choose(__doc__, strategies=(StrategiesConfig, strategies), exact=(ExactConfig, exact))
