"""What does it cost to keep the ranks in step? `python bench/grad_sync.py`

Measures updates of the same global batch for each strategy on 1, 2 and 4 local processes, in turns. Prints a table of the time,
and how much communication adds to it (0 if noise is larger). It also has the bytes that a rank sends, the memory of weights and
optimizer state, and how far the final weights are from a single process's. Writes grad_sync.json.
"""

import functools
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import forks
import machine  # puts the project's folder on the path
from lockstep import settings
from lockstep.common import cli
from lockstep.strategies import STRATEGIES

FLAGS = dict(architecture="qwen3", n_layer=4, n_head=4, n_embd=256, seq_len=128, vocab_size=4096, micro_batch_size=4)
FLAGS |= dict(lr=1e-4, device="cpu", dtype="float32")


@dataclass(frozen=True)
class StrategiesConfig(machine.Out):
    strategies: str = ",".join(STRATEGIES)
    ranks: str = "1,2,4"
    rounds: int = 3
    """How often each strategy is measured, in turns. The table shows the median."""
    updates: int = 8
    """Timed updates per round. Two untimed ones come first."""
    micro_batches: int = 8
    """Micro-batches per update, over all ranks."""
    compile: Literal["off", "on"] = "off"
    name: str = "grad_sync"


def main(config: StrategiesConfig) -> None:
    """Measure all strategies, then print and write the results."""
    from safetensors.torch import load_file

    forks.prepare_to_fork()
    pairs = [(strategy, int(ranks)) for ranks in config.ranks.split(",") for strategy in config.strategies.split(",")]
    pairs = list(dict.fromkeys([("ddp", 1), *pairs]))  # the others' weights are compared with those of `ddp` on one rank
    results = {pair: [] for pair in pairs}
    with machine.workspace() as folder:
        for strategy, ranks in pairs * config.rounds:
            weights = folder / f"{strategy}-{ranks}.safetensors"
            result = forks.in_forks(measure, config, strategy, str(weights), ranks=ranks, folder=folder)[0]
            own, one = load_file(weights), load_file(folder / "ddp-1.safetensors")
            result["largest_difference"] = max((own[name] - one[name]).abs().max().item() for name in one)
            results[strategy, ranks].append(result)
            print(f"{strategy} on {ranks}: {result['update_ms']:.0f} ms", flush=True)
    rows = [
        {"strategy": strategy, "ranks": ranks} | {key: statistics.median(row[key] for row in each) for key in each[0]}
        for (strategy, ranks), each in results.items()
    ]
    print(machine.table([*rows[0]], [[*row.values()] for row in rows]))
    each = {f"{strategy} on {ranks}": [row["update_ms"] for row in each] for (strategy, ranks), each in results.items()}
    print(machine.write(config.name, {"rows": rows, "update_ms_each": each}, config.out))


def measure(config: StrategiesConfig, strategy: str, weights_file: str) -> dict:
    """Run updates with and without syncing on each rank. Rank 0 writes the weights."""
    import torch
    from safetensors.torch import save_file

    from lockstep.hardware.device import prepare_device
    from lockstep.hardware.host import read_ranks
    from lockstep.numerics.optim import local
    from lockstep.parallel.world import World, connect
    from model import initial_weights, on_meta
    from train import build_engine

    flags = dict(strategy=strategy, compile=config.compile)
    flags["tokens_per_update"] = config.micro_batches * FLAGS["micro_batch_size"] * FLAGS["seq_len"]
    training = settings.replace(settings.Config(), **FLAGS, **flags)
    training = settings.replace(training, **cli.flat_values(settings.resolve_model(training.model, FLAGS["vocab_size"])))
    rank, world_size, _, _ = read_ranks()
    world = World(rank, world_size, world_size, prepare_device("cpu", threads=1))
    if world_size > 1:
        connect(world)
    module = on_meta(training.model)
    engine = build_engine(module, initial_weights(module, 0), training, world)
    optimizers = engine.optimizers
    size = (config.micro_batches, FLAGS["micro_batch_size"], FLAGS["seq_len"] + 1)
    tokens = torch.randint(0, FLAGS["vocab_size"], size, generator=torch.Generator().manual_seed(0))
    mine = world.share(config.micro_batches)

    def accumulate(sync: bool) -> None:
        for i, micro_batch in enumerate(mine):
            engine.model.require_backward_grad_sync = sync and i == len(mine) - 1
            loss = engine.model(tokens[micro_batch, :, :-1], tokens[micro_batch, :, 1:])
            (loss / engine.accumulation_steps).backward()

    def update() -> None:
        engine.clip(1.0)
        optimizers.step()
        engine.zero_grad()

    def timed(*works) -> list[float]:
        """Run each of `works` in turn. Returns their milliseconds."""
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
    without = [timed(alone, engine.zero_grad)[0] for _ in range(config.updates)]
    state = [local(value) for part in optimizers.parts for values in part.state.values() for value in values.values()]
    world.leave()
    return {
        "update_ms": statistics.median(map(sum, updates)),
        "exposed_ms": max(0.0, statistics.median(part for part, _ in updates) - statistics.median(without)),
        "sent_mb": sent / 1e6,
        "weights_mb": sum(local(parameter).nbytes for parameter in module.parameters()) / 1e6,
        "state_mb": sum(value.nbytes for value in state) / 1e6,
    }


def loopback_bytes() -> int:
    """Bytes sent so far over Linux's loopback device, which gloo's ranks on one machine use."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


if __name__ == "__main__":
    machine.command_line(__doc__, StrategiesConfig, main)
