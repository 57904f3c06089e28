"""Does one stable trunk with short decays reach the losses of cosine runs of each length?

python bench/phases.py

Trains a trunk, and a decay from each of three checkpoints; from the last one, also a decay on another mixture. Also trains a
cosine run of each length, and repeats the longest decay as a single wsd run. Draws all in phases.png. The exit status is 0 only
if that single run has the bits of the decay. Takes about ten minutes on two cores.
"""

import re
import sys
from pathlib import Path

import machine  # puts the project's folder on the path
from lockstep.reports import curves

# A smaller laptop preset. Bits depend on the warmup, so it must not depend on the length.
SMALL = dict(n_layer=3, n_embd=96, seq_len=128, tokens_per_update=2048, warmup_steps=20, compile="off")
SMALL |= dict(eval_every=20, eval_tokens=32768, log_every=1)
PROSE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "bench/LOG.md"]  # for the other mixture
LENGTHS = (100, 200, 400)  # of the runs, in steps
DECAY = 5  # a decay takes a fifth of its run


def main(config: machine.Options) -> int:
    """The command."""
    machine.prepare_tokens(config.tokens)
    with machine.workspace() as runs:
        machine.prepare_tokens(runs / "prose", *PROSE, tokenizer=Path(config.tokens, "tokenizer.json"))
        rows = train(config, runs)
        same = machine.digests(runs / "straight") == machine.digests(runs / f"decay-{LENGTHS[-1]}")
        path = machine.write("phases", {"flags": SMALL, "runs": rows, "same": same}, config.out)
        draw(runs, path.with_suffix(".png"))
    print(machine.table(["run", "steps", "trained", "code", "prose"], [list(row.values()) for row in rows]))
    print(f"{path}\nthe longest decay and the single wsd run: {'one sha256' if same else 'DIFFERENT'}")
    return int(not same)


def train(config: machine.Options, runs: Path) -> list[dict]:
    """Train all runs. Returns a row for each."""
    common = dict(preset="config/laptop.toml", out_dir=runs, tokens=config.tokens, save_every=0, **SMALL)
    stable = {steps: steps - steps // DECAY for steps in LENGTHS}
    last = stable[LENGTHS[-1]]
    trunk = dict(schedule="constant", steps=last, save_every=stable[LENGTHS[0]], keep_last=0)
    rows = [finish(runs, common | trunk | dict(name="trunk"), 0)]
    for steps, begin in stable.items():
        start = runs / "trunk" / "checkpoints" / f"step-{begin:08d}"
        ending = dict(preset=runs / "trunk" / "config.toml", resume=start, decay_steps=steps - begin)
        rows.append(finish(runs, ending | dict(name=f"decay-{steps}"), begin))
        rows.append(finish(runs, common | dict(name=f"cosine-{steps}", schedule="cosine", min_lr=0.0, steps=steps), 0))
    mixture = f"{last}:{config.tokens}:0.5,{runs / 'prose'}:0.5"
    rows.append(finish(runs, ending | dict(name="annealed", phase=mixture), last))
    straight = dict(name="straight", schedule="wsd", cooldown_fraction=1 / DECAY, steps=LENGTHS[-1])
    return [*rows, finish(runs, common | straight, 0)]


def finish(runs: Path, flags: dict, begin: int) -> dict:
    """Train a run that starts from step `begin`. Returns its losses on both datasets."""
    machine.run(**flags)
    run = runs / flags["name"]
    last = machine.metrics(run)[-1]
    shown = machine.output([sys.executable, "evaluate.py", run, f"--tokens={runs / 'prose'}", "--dtype=float32"])
    prose = float(re.search(r"loss (\S+)", shown)[1])
    row = {"run": run.name, "steps": last["step"], "trained": last["step"] - begin, "code": last["val_loss"], "prose": prose}
    print(row, flush=True)
    return row


def draw(runs: Path, out: Path) -> None:
    """Draw the learning rate and, below it, the validation loss, in large letters that are readable on a phone."""
    from matplotlib.figure import Figure

    blue, orange, green, pink, *_ = curves.COLORS
    styles = {"trunk": (blue, "one stable trunk")}
    styles |= {f"decay-{steps}": (orange, "its decays") for steps in LENGTHS}
    styles |= {"annealed": (pink, "a decay on another mixture")}
    styles |= {f"cosine-{steps}": (green, "a cosine run for each length") for steps in LENGTHS}
    figure = Figure(figsize=(7, 7.4), dpi=130, layout="constrained", facecolor="white")
    rates, losses = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.4))
    seen = set()
    for name, (color, label) in styles.items():
        run = curves.read(runs / name)
        look = dict(color=color, linewidth=2.4, linestyle="--" if name == "annealed" else "-")
        rates.plot(*run.points("lr"), **look)
        steps, values = run.points("val_loss")
        losses.plot(steps, values, **look, label=None if label in seen else label)
        if name != "trunk":
            losses.plot(steps[-1:], values[-1:], "o", color=color, markersize=9, markeredgecolor="white", zorder=3)
        seen.add(label)
    early = [
        loss for step, loss in zip(*curves.read(runs / "trunk").points("val_loss"), strict=True) if step >= LENGTHS[0] // 2
    ]
    losses.set_ylim(top=max(early))
    rates.set_title("learning rate", loc="left", fontsize=16)
    losses.set_title("validation loss on the code, nats per token", loc="left", fontsize=16)
    losses.set_xlabel("step", fontsize=15)
    losses.legend(fontsize=15, frameon=False)
    for axis in (rates, losses):
        axis.grid(color="0.91", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=14)
    rates.set_ylim(bottom=0)
    curves.save(figure, out)


if __name__ == "__main__":
    machine.command_line(__doc__, machine.Options, main)
