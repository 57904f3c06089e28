"""Is it the same run on any number of ranks, even if it is killed again and again?

python bench/same_run.py

Trains one run on 1, 2, 3 and 4 ranks. Then trains it once more with kills, continuing each time on a different number of ranks.
Draws all losses to same_run.png and prints the sha256 of every run's final files. The exit status is 0 only if all runs under
--strategy=exact are equal, bit for bit. Takes about ten minutes on two cores.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import machine  # puts the project's folder on the path
from lockstep.common.errors import UserError
from lockstep.reports import curves

# 0.5 million parameters with dropout. An update has 12 micro-batches, which 1, 2, 3, 4 and 6 ranks can share equally.
FLAGS = machine.TINY | dict(n_embd=64, seq_len=32, dropout=0.1, tokens_per_update=768, optimizer="muon", lr=5e-3)
FLAGS |= dict(eval_every=50, eval_tokens=8192, save_every=7)
KILL = dict(color="black", linestyle="", marker="x", markersize=7, markeredgewidth=1.6, zorder=5)
FILES = ("model.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class SameRunConfig(machine.Options):
    strategy: Literal["both", "ddp", "exact"] = "both"
    steps: int = 200
    max_ranks: int = 4
    kills: int = 6
    """How often to kill the last run. It continues on a different number of ranks each time."""


def main(config: SameRunConfig) -> int:
    """The command."""
    if config.max_ranks < 2 or config.steps < config.kills + 1:
        raise UserError("--max_ranks must be at least 2, and --steps more than --kills")
    machine.prepare_tokens(config.tokens)
    strategies = ["ddp", "exact"] if config.strategy == "both" else [config.strategy]
    with machine.workspace() as runs:
        ranks = [*range(1, config.max_ranks + 1), None]
        groups = {strategy: [train(config, strategy, n, runs) for n in ranks] for strategy in strategies}
    rows = []
    for group in groups.values():
        rows += [row | {"metrics": len(row["metrics"]), "largest_distance": max(drift(row, group[0]))} for row in group]
    result = {"flags": FLAGS, "steps": config.steps, "same": {name: all_the_same(rows) for name, rows in groups.items()}}
    print(path := machine.write("same_run", result | {"runs": rows}, config.out))
    draw(groups, path.with_suffix(".png"))
    return report(groups)


def train(config: SameRunConfig, strategy: str, ranks: int | None, runs: Path) -> dict:
    """Train on `ranks` ranks, or (None) with kills. Returns the files, the metrics, and ranks and last step of each attempt."""
    label = f"W={ranks}" if ranks else "killed"
    run, attempts = runs / f"{strategy}-{label}", [{"ranks": ranks, "last_step": config.steps}]
    flags = FLAGS | dict(strategy=strategy, steps=config.steps, tokens=config.tokens, out_dir=runs, name=run.name)
    if ranks:
        machine.run(ranks, **flags)
    else:
        attempts = kill_and_continue(config, run, flags)
    print(f"{strategy} {label}: done", flush=True)
    records = machine.unmeasured(machine.metrics(run))
    return {"strategy": strategy, "run": label, **machine.digests(run), "attempts": attempts, "metrics": records}


def kill_and_continue(config: SameRunConfig, run: Path, flags: dict) -> list[dict]:
    """Train with `kills` hard kills spread over the run, continuing each time on a different number of ranks."""
    chance, ranks, attempts = random.Random(0), 1, []
    for i in range(config.kills + 1):
        ranks = chance.choice([n for n in range(1, config.max_ranks + 1) if n != ranks])
        if i == config.kills:
            machine.run(ranks, **flags)
        else:
            stop_at = int(config.steps * (i + chance.random() * 0.8) / (config.kills + 1))
            process = machine.start(ranks, **flags)
            while machine.last_step(run) < stop_at and process.poll() is None:
                time.sleep(0.005)
            time.sleep(chance.random() * 0.1)
            machine.kill(process)
        attempts.append({"ranks": ranks, "last_step": machine.last_step(run)})
    return attempts


def all_the_same(rows: list[dict]) -> bool:
    """Whether all runs have the same files and the same metrics."""
    return all(row[key] == rows[0][key] for row in rows for key in (*FILES, "metrics"))


def losses(row: dict) -> list[float]:
    """The training loss of every step."""
    return [record["loss"] for record in row["metrics"] if "loss" in record]


def drift(row: dict, alone: dict) -> list[float]:
    """How far each loss is from the loss on one rank."""
    return [abs(a - b) for a, b in zip(losses(row), losses(alone), strict=True)]


def draw(groups: dict[str, list[dict]], out: Path) -> None:
    """Draw a column per strategy: the losses of all runs, and below, how far they are from the run on one rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(groups), 5.6), dpi=160, layout="constrained")
    axes = figure.subplots(2, len(groups), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 2))
    for (strategy, rows), (upper, lower) in zip(groups.items(), axes.T, strict=True):
        for i, row in enumerate(rows):
            steps, color = range(1, len(losses(row)) + 1), curves.COLORS[i % len(curves.COLORS)]
            width = 1 + 1.1 * (len(rows) - 1 - i)  # so that lines do not hide each other
            upper.plot(steps, losses(row), color=color, linewidth=width, label=row["run"])
            lower.plot(steps, drift(row, rows[0]), color=color, linewidth=1.4)
        kills = [attempt["last_step"] for attempt in rows[-1]["attempts"][:-1] if attempt["last_step"]]
        upper.plot(kills, [losses(rows[-1])[step - 1] for step in kills], label="SIGKILL", **KILL)
        upper.set_title(f"--strategy={strategy}: {verdict(rows)}", loc="left")
        lower.set_yscale("symlog", linthresh=1e-8)
        lower.set(xlabel="step", ylim=(-2e-9, 2e-2))
        for axis in (upper, lower):
            axis.grid(color="0.91", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("distance to the loss on W=1")
    axes[0, 0].legend(frameon=False)
    curves.save(figure, out)


def verdict(rows: list[dict]) -> str:
    """The number of different final weights among the runs of a strategy."""
    different = len({row[FILES[0]] for row in rows})
    return f"{len(rows)} runs, " + ("one sha256" if all_the_same(rows) else f"{different} different sha256")


def report(groups: dict[str, list[dict]]) -> int:
    """Print the sha256 and the verdict. Returns the exit status: 1 if runs under exact differ."""
    for strategy, rows in groups.items():
        for row in rows:
            ranks = ", ".join(str(attempt["ranks"]) for attempt in row["attempts"])
            distance = max(drift(row, rows[0]))
            print(f"{strategy:<6} {row['run']:<7} {' '.join(row[file][:12] for file in FILES)} {distance:.1e} on {ranks} ranks")
        print(f"{strategy}: {verdict(rows)}" + ", the same optimizer state and metrics" * all_the_same(rows))
    return int("exact" in groups and not all_the_same(groups["exact"]))


if __name__ == "__main__":
    machine.command_line(__doc__, SameRunConfig, main)
