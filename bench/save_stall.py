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
EVERY = 3  # steps between saves: enough for one to end before the next begins
FLAGS = dict(architecture="gpt2", n_layer=12, n_head=10, n_embd=640, seq_len=128, tokens_per_update=512, micro_batch_size=4)
FLAGS |= dict(optimizer="adamw", lr=3e-4, eval_every=0, eval_tokens=1024, log_every=1, dtype="float32", compile="off")
FLAGS |= dict(save_every=EVERY, keep_last=1, keep_best=0, device="cpu", threads=1)


@dataclass(frozen=True)
class SaveStallConfig(machine.Options):
    pairs: int = 2
    """How often each kind of save is measured, in turns."""
    saves: int = 4
    """Saves of a run that are counted. The first and the last are not."""


def measure(run: Path, saves: int, **flags) -> dict[str, list[float]]:
    """Seconds that training waited for each save, and milliseconds of each step after the first save."""
    last = (saves + 2) * EVERY
    machine.run(**FLAGS, **flags, steps=last, out_dir=run.parent, name=run.name)
    waited = [float(seconds) for step, seconds in WAITED.findall((run / "train.log").read_text()) if EVERY < int(step) < last]
    steps = [line["step_ms"] for line in machine.metrics(run) if "step_ms" in line and EVERY < line["step"] <= last - EVERY]
    return {"waited_s": waited, "step_ms": steps}


def write_plainly(sizes: list[int], path: Path) -> float:
    """Seconds to write files of these sizes and flush them to disk."""
    contents, seconds = [os.urandom(size) for size in sizes], 0.0
    for content in contents:
        began = time.perf_counter()
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        seconds += time.perf_counter() - began
        path.unlink()
    return seconds


def main(config: SaveStallConfig) -> None:
    """Measure in turns, write, print."""
    machine.prepare_tokens(config.tokens)
    result = {"sync": {"waited_s": [], "step_ms": []}, "async": {"waited_s": [], "step_ms": []}, "plain_s": []}
    with machine.workspace() as runs:
        for pair in range(config.pairs):
            for kind in ("sync", "async"):
                run = runs / f"{kind}-{pair}"
                for key, values in measure(run, config.saves, async_save=kind == "async", tokens=config.tokens).items():
                    result[kind][key] += values
            sizes = [path.stat().st_size for path in (run / "checkpoints" / "latest").iterdir()]
            result["plain_s"] += [write_plainly(sizes, runs / "plain") for _ in range(3)]
    result["bytes"] = sum(sizes)
    # A save is charged with the whole slowdown of the steps that follow it.
    slower = (statistics.mean(result["async"]["step_ms"]) - statistics.mean(result["sync"]["step_ms"])) * EVERY / 1000
    times = {f"training waits, {kind}": result[kind]["waited_s"] for kind in ("sync", "async")}
    for name, values in (times | {f"write and fsync alone of {sum(sizes) / 1e9:.2f} GB": result["plain_s"]}).items():
        print(f"{name}: {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
    print(f"a background save slows the steps by {slower:.2f} s")
    print(machine.write("save_stall", result, Path(config.out)))


if __name__ == "__main__":
    machine.command_line(__doc__, SaveStallConfig, main)
