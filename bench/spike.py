"""A loss spike, and what replay.py says about it: was it the data or the machine?

python bench/spike.py

Puts noise into 16 of the 64 sequences that step 37 sees, trains, replays step 37, and trains again with --skip_steps=37. Draws
the losses of both runs and those of the sequences of step 37 into bench/results/spike.png. The exit status is 0 only if the
replay has the bits of the run and puts the noise first. About two minutes on two cores.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import numpy as np

import data
import settings
from dataset.tokens import open_shard, write_shard
from reports import curves

STEP, FIRST, COUNT = 37, 20, 16  # the noise is in sequences 20 to 35 of step 37
FLAGS = dict(architecture="qwen3", n_layer=2, n_head=2, n_embd=128, seq_len=64, steps=60, tokens_per_update=64 * 64)
FLAGS |= dict(micro_batch_size=16, lr=5e-3, eval_every=0, save_every=30, keep_last=0, log_every=1)
FLAGS |= dict(dtype="float32", compile="off", device="cpu")


def spoil(source: Path, directory: Path) -> None:
    """Copy a dataset and overwrite the tokens of COUNT sequences of step STEP with noise."""
    shutil.copytree(source, directory)
    record = json.loads((directory / "dataset.json").read_text())
    shard = next(row for row in record["shards"] if row["split"] == "train")  # the only one of a small corpus
    tokens, mixture = np.array(open_shard(directory / shard["file"])[:]), data.open_mixture(str(directory))
    T, sequences = FLAGS["seq_len"], FLAGS["tokens_per_update"] // FLAGS["seq_len"]
    size = (T, sequences, FLAGS["micro_batch_size"])
    batches = data.Batches(mixture.streams("train"), mixture.shares, *size, settings.Config().run.seed)
    chance = np.random.default_rng(0)
    for window in batches.sequences((STEP - 1) * sequences + FIRST, COUNT)[1]:
        tokens[window * T : (window + 1) * T] = chance.integers(0, record["vocab_size"], T)
    shard["sha256"] = write_shard(directory / shard["file"], tokens, record["vocab_size"])
    (directory / "dataset.json").write_text(json.dumps(record))


def draw(spoiled: list[dict], skipped: list[dict], sequences: list[dict], out: Path) -> None:
    """The losses of both runs, and those of the sequences of the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=150, layout="constrained")
    runs, step = figure.subplots(1, 2)
    for records, color, label in ((spoiled, 1, "as it was"), (skipped, 0, f"--skip_steps={STEP}")):
        runs.plot([r["step"] for r in records], [r["loss"] for r in records], color=curves.COLORS[color], label=label)
    runs.set_title("training loss", loc="left")
    runs.set_xlabel("step")
    runs.legend(frameon=False)
    noise = [FIRST <= row["sequence"] < FIRST + COUNT for row in sequences]
    colors = [curves.COLORS[1] if is_noise else "0.75" for is_noise in noise]
    step.bar(range(len(sequences)), [row["loss"] for row in sequences], color=colors, width=0.9)
    step.set_title(f"replay.py --step={STEP}: its sequences, worst first", loc="left")
    step.set_xlabel("sequence (orange: noise)")
    step.set_ylim(bottom=0.9 * min(row["loss"] for row in sequences))
    for axis in (runs, step):
        axis.spines[["top", "right"]].set_visible(False)
    curves.save(figure, out)


def main(config: machine.Options) -> int:
    """The command."""
    machine.prepare_tokens(config.tokens)
    with machine.workspace() as runs:
        spoil(machine.ROOT / config.tokens, runs / "tokens")
        flags = dict(FLAGS, tokens=runs / "tokens", out_dir=runs)
        machine.run(name="spoiled", **flags)
        machine.run(name="skipped", **flags, skip_steps=str(STEP))
        command = [sys.executable, "replay.py", str(runs / "spoiled"), f"--step={STEP}"]
        text = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, check=True).stdout
        replayed = json.loads(subprocess.run([*command, "--json"], cwd=machine.ROOT, capture_output=True, check=True).stdout)
        step = replayed["steps"][-1]
        spoiled, skipped = ([r for r in machine.metrics(runs / n) if "loss" in r] for n in ("spoiled", "skipped"))
        draw(spoiled, skipped, step["sequences"], Path(config.out) / "spike.png")
    print(text)
    worst = sorted(row["sequence"] for row in step["sequences"][:COUNT])
    found = step["same"] and worst == list(range(FIRST, FIRST + COUNT))
    losses = {"step_before": spoiled[STEP - 2]["loss"], "step": step["loss"], "skipped": skipped[STEP - 1]["loss"]}
    result = {"flags": FLAGS, "losses": losses, "worst_sequences": worst, "found": found}
    print(machine.write("spike", result, Path(config.out)))
    return int(not found)


if __name__ == "__main__":
    machine.command_line(__doc__, machine.Options, main)
