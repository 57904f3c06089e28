"""Is it the same run on any number of ranks, and also if it is killed again and again?

python bench/same_run.py

Trains one run on 1, 2, 3 and 4 ranks. Trains it once more with kills, after each of which it continues on another number of
ranks. Draws all losses into bench/results/same_run.png and prints the sha256 of every run's final files. The exit status is 0
only if all runs under --strategy=exact are the same, bit for bit. About ten minutes on two cores.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import machine  # puts the project's folder on the path
from common.errors import UserError
from reports import curves

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
    """How often the disturbed run is killed. Each time it continues on another number of ranks."""
    seed: int = 0
    """Seeds the instants of the kills and the numbers of ranks."""


def killed_run(config: SameRunConfig, directory: Path, flags: dict) -> list[dict]:
    """Train with `kills` hard kills spread over the run. After each it continues on another number of ranks.

    Returns the number of ranks and the last step of each attempt, in order.
    """
    chance, ranks, attempts = random.Random(config.seed), 1, []
    for i in range(config.kills + 1):
        ranks = chance.choice([n for n in range(1, config.max_ranks + 1) if n != ranks])
        if i == config.kills:
            machine.run(ranks, **flags)
        else:
            stop_at = int(config.steps * (i + chance.random() * 0.8) / (config.kills + 1))
            process = machine.start(ranks, **flags)
            while last_step(directory) < stop_at and process.poll() is None:
                time.sleep(0.005)
            time.sleep(chance.random() * 0.1)
            machine.kill(process)
        attempts.append({"ranks": ranks, "last_step": last_step(directory)})
    return attempts


def last_step(directory: Path) -> int:
    """The last step in the metrics of a run (0: none yet)."""
    records = machine.metrics(directory) if (directory / "metrics.jsonl").exists() else []
    return max((record["step"] for record in records), default=0)


def train_all(config: SameRunConfig, strategies: list[str], runs: Path) -> list[dict]:
    """Train every run of every strategy, one after the other. Returns a row for each."""
    from tqdm import tqdm

    names = [*range(1, config.max_ranks + 1), "killed"]
    rows = []
    for strategy, name in (bar := tqdm([(s, n) for s in strategies for n in names], unit="run", dynamic_ncols=True)):
        label = name if name == "killed" else f"W={name}"
        bar.set_description(f"{strategy} {label}")
        directory = runs / f"{strategy}-{name}"
        flags = dict(FLAGS, strategy=strategy, steps=config.steps, tokens=config.tokens, out_dir=runs, name=directory.name)
        if name == "killed":
            attempts = killed_run(config, directory, flags)
        else:
            machine.run(name, **flags)
            attempts = [{"ranks": name, "last_step": config.steps}]
        records = machine.unmeasured(machine.metrics(directory))
        digests = machine.digests(directory)
        rows.append({"strategy": strategy, "run": label, **digests, "attempts": attempts, "metrics": records})
    return rows


def all_the_same(rows: list[dict]) -> bool:
    """Whether all runs have the same files and the same metrics."""
    return all(row[key] == rows[0][key] for row in rows for key in (*FILES, "metrics"))


def losses(row: dict) -> list[float]:
    """The training loss of every step."""
    return [record["loss"] for record in row["metrics"] if "loss" in record]


def drift(row: dict, rows: list[dict]) -> list[float]:
    """The distance of each loss from that of the same strategy on one rank."""
    alone = next(other for other in rows if other["strategy"] == row["strategy"])
    return [abs(a - b) for a, b in zip(losses(row), losses(alone), strict=True)]


def draw(rows: list[dict], out: Path) -> None:
    """Draw a column for each strategy: the losses of all runs, and below them their distance from those on one rank."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    strategies = list(dict.fromkeys(row["strategy"] for row in rows))
    figure = Figure(figsize=(5 * len(strategies), 5.6), dpi=160, layout="constrained")
    axes = figure.subplots(2, len(strategies), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 2))
    for strategy, (upper, lower) in zip(strategies, axes.T, strict=True):
        mine = [row for row in rows if row["strategy"] == strategy]
        for i, row in enumerate(mine):
            steps, color = range(1, len(losses(row)) + 1), curves.COLORS[i % len(curves.COLORS)]
            width = 1 + 1.1 * (len(mine) - 1 - i)  # so that no line hides another
            upper.plot(steps, losses(row), color=color, linewidth=width)
            lower.plot(steps, drift(row, rows), color=color, linewidth=1.4)
            kills = [attempt["last_step"] for attempt in row["attempts"][:-1] if attempt["last_step"]]
            upper.plot(kills, [losses(row)[step - 1] for step in kills], **KILL)
        different = len({row[FILES[0]] for row in mine})
        one = f"{len(mine)} runs, " + ("one sha256" if all_the_same(mine) else f"{different} different sha256")
        for axis, text, height in ((upper, one, 0.95), (lower, "0 at every step" * all_the_same(mine), 0.3)):
            axis.text(0.98, height, text, transform=axis.transAxes, ha="right", va="top", fontsize=12, fontweight="bold")
            axis.grid(color="0.91", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
        upper.set_title(f"--strategy={strategy}", loc="left", fontsize=13, family="monospace")
        lower.set_yscale("symlog", linthresh=1e-8)
        lower.set_yticks([0, 1e-8, 1e-6, 1e-4, 1e-2])
        lower.set_ylim(-2e-9, 2e-2)
        lower.set_xlabel("step")
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("distance to the loss on W=1")
    names = [row["run"].replace("=", " = ").replace("killed", "killed, W changed") for row in mine]
    handles = [
        Line2D([], [], color=curves.COLORS[i % len(curves.COLORS)], linewidth=3, label=name) for i, name in enumerate(names)
    ]
    handles.append(Line2D([], [], label="SIGKILL", **KILL))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    curves.save(figure, out)


def report(rows: list[dict]) -> int:
    """Print the table and the verdict. Returns the exit status."""
    head = ["strategy", "run", "weights", "optimizer", "last loss", "largest distance to W=1"]
    cells = []
    for row in rows:
        digests = [row[file][:12] for file in FILES]
        cells.append([row["strategy"], row["run"], *digests, f"{losses(row)[-1]:.9f}", f"{max(drift(row, rows)):.1e}"])
    print(machine.table(head, cells))
    status = 0
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        attempts = mine[-1]["attempts"]
        ranks = ", ".join(str(attempt["ranks"]) for attempt in attempts)
        print(f"{strategy}: killed {len(attempts) - 1} times, W = {ranks}")
        if all_the_same(mine):
            print(f"{strategy}: {len(mine)} runs are the same, bit for bit: weights, optimizer state and every metric")
        else:
            print(f"{strategy}: {len({row[FILES[0]] for row in mine})} different weights in {len(mine)} runs")
            status = max(status, int(strategy == "exact"))
    return status


def main(config: SameRunConfig) -> int:
    """The command."""
    if config.max_ranks < 2 or config.steps < config.kills + 1:
        raise UserError("--max_ranks must be at least 2, and --steps more than --kills")
    machine.prepare_tokens(config.tokens)
    strategies = ["ddp", "exact"] if config.strategy == "both" else [config.strategy]
    with machine.workspace() as runs:
        rows = train_all(config, strategies, runs)
    picture = Path(config.out) / "same_run.png"
    draw(rows, picture)
    summaries = [{**row, "metrics": len(row["metrics"]), "largest_distance": max(drift(row, rows))} for row in rows]
    same = {strategy: all_the_same([row for row in rows if row["strategy"] == strategy]) for strategy in strategies}
    result = {"flags": FLAGS, "steps": config.steps, "same": same, "runs": summaries}
    path = machine.write("same_run", result, Path(config.out))
    print(f"{picture}, {path}")
    return report(rows)


if __name__ == "__main__":
    machine.command_line(__doc__, SameRunConfig, main)
