"""What does it cost to keep the ranks in step?

python bench/grad_sync.py strategies|exact [--flag=value ...]
"""

import functools
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import forks
import machine  # puts the project's folder on the path
import settings
from common import cli

STRATEGIES = ["ddp", "zero1", "fsdp", "exact", "scratch_allreduce", "scratch_reduce_scatter", "scratch_overlap"]
FLAGS = dict(architecture="qwen3", n_layer=4, n_head=4, n_embd=256, seq_len=128, vocab_size=4096, micro_batch_size=4)
FLAGS |= dict(lr=1e-4, device="cpu", dtype="float32", compile="off")
COLUMNS = ["strategy", "ranks", "update_ms", "exposed_ms", "sent_mb", "weights_mb", "state_mb", "largest_difference"]


@dataclass(frozen=True)
class StrategiesConfig(machine.Out):
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


def strategies(config: StrategiesConfig) -> None:
    """Every strategy on 1, 2 and 4 local processes, in a table and a bar chart.

    Measures updates of the same global batch for each strategy and number of ranks, in turns: their time, and how much of it
    communication adds (compared with the same updates without syncing); the bytes that a rank sends, and the memory of weights
    and optimizer state; the distance of the final weights from those of one process. Writes grad_sync.json and grad_sync.png.
    """
    from safetensors.torch import load_file

    forks.prepare_to_fork()
    pairs = [(strategy, int(ranks)) for ranks in config.ranks.split(",") for strategy in config.strategies.split(",")]
    results = {pair: [] for pair in pairs}
    with machine.workspace() as folder:
        for strategy, ranks in pairs * config.rounds:
            weights = folder / f"{strategy}-{ranks}.safetensors"
            result = forks.in_forks(measure, config, strategy, str(weights), ranks=ranks, folder=folder)[0]
            own, one = load_file(weights), load_file(folder / "ddp-1.safetensors")
            result["largest_difference"] = max((own[name] - one[name]).abs().max().item() for name in one)
            results[strategy, ranks].append(result)
            print(f"{strategy} on {ranks}: {result['update_ms']:.0f} ms", flush=True)
    rows = []
    for (strategy, ranks), each in results.items():
        medians = {key: statistics.median(result[key] for result in each) for key in each[0]}
        rows.append({"strategy": strategy, "ranks": ranks, **medians, "update_ms_each": [row["update_ms"] for row in each]})
    path = machine.write(config.name, {"rows": rows}, Path(config.out))
    draw(rows, path.with_suffix(".png"))
    print(machine.table(COLUMNS, [[row[key] for key in COLUMNS] for row in rows]))


def measure(config: StrategiesConfig, strategy: str, weights_file: str) -> dict:
    """In each rank: run updates with and without syncing. Rank 0 writes the weights."""
    import torch
    from safetensors.torch import save_file

    from model import GPT, initial_weights
    from optim import local
    from parallel.engine import Engine
    from parallel.world import connect

    update_tokens = config.micro_batches * FLAGS["micro_batch_size"] * FLAGS["seq_len"]
    training = settings.replace(settings.Config(), **FLAGS, strategy=strategy, tokens_per_update=update_tokens)
    training = settings.replace(training, **cli.flat_values(settings.resolve_model(training.model, FLAGS["vocab_size"])))
    world = connect("cpu", threads=1)
    module = GPT(training.model)
    module.load_state_dict(dict(initial_weights(module, 0)))
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

    def update() -> None:
        engine.clip(1.0)
        optimizers.step()
        engine.drop_gradients()

    def timed(*works) -> list[float]:
        """Milliseconds of each of `works`, one after the other."""
        if world.size > 1:
            torch.distributed.barrier()
        times = [time.perf_counter()]
        for work in works:
            work()
            times.append(time.perf_counter())
        return [1000 * (end - began) for began, end in itertools.pairwise(times)]

    synced, alone = functools.partial(accumulate, True), functools.partial(accumulate, False)
    for _ in range(2):
        timed(synced, update)
    before = loopback_bytes()
    updates = [timed(synced, update) for _ in range(config.updates)]
    sent = (loopback_bytes() - before) / config.updates / world.size
    weights = engine.gather(engine.parameters, dict.fromkeys(engine.parameters, 0))
    if world.is_master:
        save_file(weights, weights_file)
    without = [timed(alone, engine.drop_gradients)[0] for _ in range(config.updates)]
    state = [local(value) for part in optimizers.parts for values in part.state.values() for value in values.values()]
    world.leave(failed=False)
    return {
        "update_ms": statistics.median(map(sum, updates)),
        "exposed_ms": statistics.median(part for part, _ in updates) - statistics.median(without),
        "sent_mb": sent / 1e6,
        "weights_mb": sum(local(parameter).nbytes for parameter in module.parameters()) / 1e6,
        "state_mb": sum(value.nbytes for value in state) / 1e6,
    }


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
        exposed = [max(0.0, row["exposed_ms"]) for row in mine]
        bars = axes.bar(at, [row["update_ms"] for row in mine], width=0.25, label=f"{ranks} ranks")
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
        below = [row["update_ms"] - part for row, part in zip(mine, exposed, strict=True)]
        axes.bar(at, exposed, bottom=below, width=0.25, color="none", hatch="////")
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("ms per update of the same global batch")
    axes.set_title("Time of an update; hatched: the part that communication adds", fontsize=10)
    axes.margins(y=0.1)  # room for the numbers on the bars
    axes.legend()
    figure.savefig(path, dpi=130)


# ---------------------------------------------------------------------------------------------------------------------
# The cost of exact


def exact(config: machine.Options) -> None:
    """What bit-identical training costs: the time of a step under --strategy=exact against ddp, by train.py itself.

    Trains the laptop preset for a few steps with one strategy and then with the other, in turns, on one process and on two.
    Both cut the update into the same micro-batches and use one thread a rank. Writes exact_cost.json. Eight minutes on two
    cores.
    """
    machine.prepare_tokens(config.tokens)
    flags = dict(micro_batch_size=4, compile="on", tokens=config.tokens, warmup_steps=0, threads=1)

    def step_ms(strategy: str, ranks: int) -> float:
        records = machine.run_until(15, "config/laptop.toml", ranks=ranks, strategy=strategy, **flags)
        return statistics.median(record["step_ms"] for record in records[3:])  # the first steps are slower

    result = {}
    for ranks in (1, 2):
        contenders = {strategy: functools.partial(step_ms, strategy, ranks) for strategy in ("ddp", "exact")}
        result[ranks] = machine.in_turns(3, contenders)
        print(f"W={ranks}: exact / ddp = {machine.ratio(result[ranks]['exact'], result[ranks]['ddp']):.3f}", flush=True)
    print(machine.write("exact_cost", {"settings": flags, "step_ms": result}, Path(config.out)))


if __name__ == "__main__":
    machine.choose(__doc__, strategies=(StrategiesConfig, strategies), exact=(machine.Options, exact))
