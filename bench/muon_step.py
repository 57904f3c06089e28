"""What do several ranks save by sharing out Muon's matrices? `python bench/muon_step.py`

Times the optimizer's step on gloo ranks of one thread each, for the matrices of a preset, in turns: every rank orthogonalizes
all matrices; the ranks share them out (`ddp`, `exact`); sharded state (`zero1`); sharded rows (`fsdp`). Prints the medians and
their ratios to the first, and writes bench/results/muon_step.json. A minute.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import cli, errors
from common.errors import RunError
from measure import ratio, spread

EVERYTHING = "every rank, all matrices"
CONTENDERS = [EVERYTHING, "ddp", "exact", "zero1", "fsdp"]


@dataclass(frozen=True)
class MuonStepConfig:
    preset: str = "config/laptop.toml"
    ranks: int = 2
    rounds: int = 7
    """How often each contender makes a step, in turns, after one that is not timed."""
    out: str = str(machine.RESULTS)
    """Directory for muon_step.json."""


def main(config: MuonStepConfig) -> None:
    """Measure on forks of this process. Print and write milliseconds and ratios."""
    machine.prepare_to_fork()
    with machine.workspace() as folder:
        path = folder / "times.json"
        pids = machine.fork_ranks(config.ranks, lambda: measure(config, path))
        if any([os.waitpid(pid, 0)[1] for pid in pids]):
            raise RunError("a rank failed")
        times = json.loads(path.read_text())
    ratios = {name: ratio(times[name], times[EVERYTHING]) for name in CONTENDERS}
    rows = [[name, machine.median_and_range(times[name], 1, " ms"), f"{ratios[name]:.2f}"] for name in CONTENDERS]
    print(machine.table(["a step of the optimizers", "time", "ratio"], rows))
    result = {"ms": {name: spread(times[name]) for name in CONTENDERS}, "ratios": ratios}
    print(machine.write("muon_step", result, Path(config.out)))


def measure(config: MuonStepConfig, path: Path) -> int:
    """In each rank: time the steps of all contenders. Rank 0 writes milliseconds."""
    import torch

    import optim
    from model import GPT, initialize
    from parallel.engine import Engine
    from parallel.world import connect

    preset = settings.load([str(machine.ROOT / config.preset), "--optimizer=muon", "--compile=off", "--dtype=float32"], "")
    model, world = settings.resolve_model(preset.model, preset.model.vocab_size or 4096), connect("cpu", threads=1)
    preset = settings.replace(preset, **cli.flat_values(model), micro_batch_size=1)
    updates = {}
    for name in CONTENDERS:
        chosen = settings.replace(preset, strategy="ddp" if name == EVERYTHING else name)
        module = GPT(model)
        initialize(module, 0)
        engine = Engine(module, chosen, world)
        every_matrix = name == EVERYTHING
        optimizers = optim.build(module, chosen.optim) if every_matrix else engine.build_optimizers(chosen.optim)
        updates[name] = engine, optimizers
    times = {name: [] for name in CONTENDERS}
    for turn in range(config.rounds + 1):
        for name, (engine, optimizers) in updates.items():
            generator = torch.Generator().manual_seed(turn)
            for parameter in engine.names:
                parameter.grad = torch.zeros_like(parameter)
                optim.local(parameter.grad).normal_(generator=generator)
            world.barrier()
            began = time.perf_counter()
            optimizers.step()
            world.barrier()
            times[name] += [1000 * (time.perf_counter() - began)] if turn else []
    if world.is_master:
        path.write_text(json.dumps(times))
    world.barrier()
    return 0


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(MuonStepConfig, sys.argv[1:], __doc__))
