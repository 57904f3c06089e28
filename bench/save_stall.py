"""How long does training wait for a checkpoint, with --async_save and without, and how fast is the save itself?

python bench/save_stall.py

Trains a model of 62 million parameters (0.74 GB a checkpoint), in turns with and without background saves. A save costs the
time that training waits for it. A background save also slows down the steps that run meanwhile. For comparison, the same
number of bytes is written to the same disk by write and fsync alone. About ten minutes on two cores.
"""

import os
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

WAITED = re.compile(r"^step +(\d+)  checkpoint; training waited ([\d.]+) s$", re.MULTILINE)


@dataclass(frozen=True)
class SaveStallConfig(machine.Options):
    pairs: int = 2
    """How often each kind of save is measured, in turns."""
    saves: int = 4
    """Saves of a run that are counted. The first and the last are not."""
    save_every: int = 3
    """Steps between saves: enough for one to end before the next begins."""
    n_layer: int = 12
    n_embd: int = 640
    tokens_per_update: int = 512
    device: str = "cpu"


def measure(config: SaveStallConfig, async_save: bool, runs: Path, name: str) -> dict[str, list[float]]:
    """Seconds that training waited for each save, and milliseconds of each step after the first save."""
    first, last = config.save_every, (config.saves + 2) * config.save_every
    model = dict(architecture="gpt2", n_layer=config.n_layer, n_head=config.n_embd // 64, n_embd=config.n_embd, seq_len=128)
    batch = dict(tokens_per_update=config.tokens_per_update, micro_batch_size=config.tokens_per_update // 128)
    saving = dict(steps=last, save_every=first, async_save=async_save, keep_last=1, keep_best=0)
    flags = dict(optimizer="adamw", lr=3e-4, eval_every=0, eval_tokens=1024, log_every=1, dtype="float32", compile="off")
    where = dict(device=config.device, threads=1, tokens=config.tokens, out_dir=runs, name=name)
    machine.run(**model, **batch, **saving, **flags, **where)
    saves = WAITED.findall((runs / name / "train.log").read_text())
    waited = [float(seconds) for step, seconds in saves if first < int(step) < last]
    updates = [line for line in machine.metrics(runs / name) if "step_ms" in line]
    steps = [line["step_ms"] for line in updates if first < line["step"] <= last - config.save_every]
    return {"waited_s": waited, "step_ms": steps}


def write_plainly(sizes: list[int], directory: Path) -> float:
    """Seconds to write files of these sizes into a new directory and flush them to disk."""
    directory.mkdir()
    contents = [os.urandom(size) for size in sizes]
    began = time.perf_counter()
    for i, content in enumerate(contents):
        with open(directory / str(i), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    for path in directory.iterdir():
        path.unlink()
    return seconds


def report(result: dict, save_every: int) -> None:
    """Print what a save costs and how fast it writes."""
    sync, background = result["sync"], result["async"]
    stall = statistics.median(sync["waited_s"])
    waits = statistics.median(background["waited_s"])
    # A save is charged with the whole slowdown of the steps that follow it.
    slowdown = (statistics.mean(background["step_ms"]) - statistics.mean(sync["step_ms"])) * save_every / 1000
    gigabytes = result["bytes"] / 1e9
    plain = statistics.median(result["plain_s"])
    rows = [
        ["training waits, --async_save=false", machine.median_and_range(sync["waited_s"], 2, " s")],
        ["training waits, --async_save=true", machine.median_and_range(background["waited_s"], 3, " s")],
        ["a step, --async_save=false", machine.median_and_range(sync["step_ms"], 0, " ms")],
        ["a step, --async_save=true", machine.median_and_range(background["step_ms"], 0, " ms")],
        ["a background save slows the steps by", f"{slowdown:.2f} s"],
        ["plain write and fsync", machine.median_and_range(result["plain_s"], 2, " s")],
        ["a save writes", f"{gigabytes / stall:.2f} GB/s, {plain / stall:.2f} of plain {gigabytes / plain:.2f} GB/s"],
    ]
    print(machine.table([f"a checkpoint of {gigabytes:.2f} GB", ""], rows))
    lost = waits + max(0.0, slowdown)
    print(f"with a background save training waits {stall / waits:.0f} times less")
    print(f"counting the slower steps too, a background save costs {stall / lost:.1f} times less")


def main(config: SaveStallConfig) -> None:
    """Measure in turns, write, print."""
    from tqdm import tqdm

    machine.prepare_tokens(config.tokens)
    result = {"sync": {"waited_s": [], "step_ms": []}, "async": {"waited_s": [], "step_ms": []}, "plain_s": []}
    turns = [(pair, kind) for pair in range(config.pairs) for kind in ("sync", "async", "plain")]
    with machine.workspace() as runs:
        for pair, kind in (bar := tqdm(turns, unit="run", dynamic_ncols=True)):
            bar.set_description(kind)
            if kind == "plain":
                sizes = [path.stat().st_size for path in (runs / f"sync-{pair}" / "checkpoints" / "latest").iterdir()]
                result["bytes"] = sum(sizes)
                result["plain_s"] += [write_plainly(sizes, runs / f"plain-{pair}-{i}") for i in range(3)]
            else:
                for key, values in measure(config, kind == "async", runs, f"{kind}-{pair}").items():
                    result[kind][key] += values
    print(machine.write("save_stall", result, Path(config.out)))
    report(result, config.save_every)


if __name__ == "__main__":
    machine.command_line(__doc__, SaveStallConfig, main)
