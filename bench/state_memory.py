"""How much memory does each rank take to start, train, save and resume? `python bench/state_memory.py`

Trains 300 million parameters on 4 gloo ranks for one update, saves, and resumes in new processes, by the functions of train.py.
Each rank reads its own anonymous memory (RssAnon) every 5 ms. What it had after it joined the others (code, libraries) is
subtracted. File pages that the system may drop at any time do not count. Prints the peaks of all ranks beside the size of the
state, and how long training waits for a background save on 1, 2 and 4 ranks. Writes bench/results/state_memory.json. Ten
minutes, 24 GB and 8 GB of disk.
"""

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import cli, errors
from common.errors import RunError
from memory import make_tokens


@dataclass(frozen=True)
class StateMemoryConfig:
    strategy: str = "fsdp"
    ranks: int = 4
    n_layer: int = 21
    n_embd: int = 1024
    vocab_size: int = 32768
    optimizer: str = "adamw"
    name: str = "state_memory"
    """Name of the result file."""
    out: str = str(machine.RESULTS)
    """Directory of the result."""


def main(config: StateMemoryConfig) -> None:
    """Measure a run that starts and one that resumes. Print and write the peak of each rank in each phase."""
    machine.prepare_to_fork()
    with machine.workspace() as folder:
        make_tokens(folder / "tokens", 50_000)
        flags = dict(
            architecture="llama", n_layer=config.n_layer, n_head=16, n_embd=config.n_embd, vocab_size=config.vocab_size,
            seq_len=64, micro_batch_size=1, tokens_per_update=64 * config.ranks, strategy=config.strategy,
            optimizer=config.optimizer, dtype="bfloat16", compile="off", device="cpu", threads=1, save_every=0,
            tokens=folder / "tokens", out_dir=folder, name="run",
        )  # fmt: skip
        peaks = measure(machine.arguments("", **flags | {"steps": 1})[1:], config.ranks, folder / "started")
        peaks |= measure(machine.arguments("", **flags | {"steps": 2})[1:], config.ranks, folder / "resumed")
        waited = {config.ranks: max(peaks.pop("waited")), f"{config.ranks}, resumed": max(peaks.pop("resumed: waited"))}
        for ranks in {1, config.ranks // 2} - {0, config.ranks}:
            alone = measure(machine.arguments("", **flags | {"steps": 1, "name": ranks})[1:], ranks, folder / f"on{ranks}")
            waited[ranks] = max(alone["waited"])
    state = peaks.pop("state")[0]
    head = ["phase", *(f"rank {rank}" for rank in range(config.ranks))]
    print(machine.table(head, [[phase, *(f"{mb:,.0f} MB" for mb in row)] for phase, row in peaks.items()]))
    for ranks, seconds in waited.items():
        print(f"ranks {ranks}: training waits {seconds:.2f} s for a background save")
    print(f"weights and optimizer state: {state:,.0f} MB; divided by {config.ranks}: {state / config.ranks:,.0f} MB")
    print(machine.write(config.name, {"state_mb": state, "peaks_mb": peaks, "waited_s": waited}, Path(config.out)))


def measure(arguments: list[str], ranks: int, path: Path) -> dict[str, list[float]]:
    """Train on forks of this process. Returns megabytes by phase and rank."""

    def work() -> int:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        config = settings.load([str(machine.ROOT / "config/laptop.toml"), *arguments], "")
        path.with_suffix(f".{os.environ.get('RANK', 0)}").write_text(json.dumps(train_once(config)))
        return 0

    pids = machine.fork_ranks(ranks, work)
    if any([os.waitpid(pid, 0)[1] for pid in pids]):
        raise RunError(f"a rank of {' '.join(arguments)} failed")
    records = [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]
    return {phase: [record[phase] for record in records] for phase in records[0]}


def train_once(config: settings.Config) -> dict[str, float]:
    """Start or resume, train for an update and save.

    Returns this rank's peak in each phase, in megabytes, and how many seconds it waited for the save.
    """
    import itertools

    import data
    import train

    world, peaks = train.join(config), {}
    before = anonymous_memory()

    @contextlib.contextmanager
    def phase(name: str):
        world.barrier()
        done, most = threading.Event(), [0]

        def watch() -> None:
            while not done.wait(0.005):
                most[0] = max(most[0], anonymous_memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        yield
        done.set()
        watcher.join()
        peaks[name] = (max(most[0], anonymous_memory()) - before) / 1e6

    with phase("start"):
        run = train.prepare(config, world)
    resumed = "resumed: " if run.state.step else ""
    peaks = {f"{resumed}{name}": peak for name, peak in peaks.items()}
    with phase(f"{resumed}update"):
        steps = itertools.product(range(run.state.step, run.state.step + 1), world.share(run.config.micro_batches))
        prefetcher = data.Prefetcher(run.batches, steps, world.device)
        train.update(run, prefetcher)
        prefetcher.close()
    with phase(f"{resumed}save"):
        began = time.perf_counter()
        run.checkpoints.save(run.state, run.engine, run.optimizers, now=True)
        waited = time.perf_counter() - began
        run.checkpoints.finish(run.state, final=True)
        world.barrier()
    run.log.close(0)
    weights = sum(parameter.numel() for parameter in run.engine.names)
    state = sum(value.numel() for part in run.optimizers.parts for values in part.state.values() for value in values.values())
    world.leave(failed=False)
    return peaks | {"state": 4 * (weights + state) / 1e6, f"{resumed}waited": waited}


def anonymous_memory() -> int:
    """The bytes of this process's memory that no file backs (Linux)."""
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(StateMemoryConfig, sys.argv[1:], __doc__))
