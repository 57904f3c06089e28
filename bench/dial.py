"""Which learning rate is best, and does the dial find it? python bench/dial.py [--parts=depth,batch]

Trains small models on real text, with rates a factor of 2 apart, until the best one lies between two others. Then it tries the
two rates halfway to its neighbors. Parts: "depth" scales depth and width together, with three seeds. "batch" varies the batch,
and "tokens" varies it at an equal number of tokens. "length" trains for as long as the dial says, with its batch, warmup and
weight decay. "text" repeats "depth" with one seed on other --tokens. "architecture" varies that.

Every run is an ordinary run of train.py in --runs. Repeating the command continues, and skips finished runs.
Writes dial.json, or dial_PARTS.json for other --parts. "depth" and "text" also get a .png: loss over rate relative to the
dial's, one curve per depth.
"""

import dataclasses
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import numpy as np

from extras import dial
from lockstep import settings
from lockstep.reports import curves

BASE = dict(architecture="qwen3", seq_len=128, micro_batch_size=8, eval_every=0, eval_tokens=65536, save_every=0, log_every=16)
BASE |= dict(device="cpu", dtype="bfloat16", compile="off", threads=1)
PER_DEPTH = 24  # width of a layer; the dial's 64 would take hours
HEAD = 48  # width of a head


@dataclass(frozen=True)
class Curve:
    """The settings that all runs of one curve of loss over rate share."""

    optimizer: str
    depth: int
    tokens: int = 1 << 19
    batch: int = 2048
    seeds: tuple[int, ...] = (1,)
    architecture: str = "qwen3"
    own: bool = False  # whether to use the dial's warmup and weight decay

    def flags(self, vocab_size: int) -> dict:
        """The flags of train.py, with the dial's rate."""
        width, steps = PER_DEPTH * self.depth, self.tokens // self.batch
        shape = dict(architecture=self.architecture, n_layer=self.depth, n_embd=width, n_head=max(1, width // HEAD))
        model = settings.resolve_model(settings.replace(settings.ModelConfig(), **BASE | shape), vocab_size)
        rate = dial.rate_of(model, self.optimizer, steps, self.batch)
        if not self.own:
            rate |= dict(warmup_steps=steps * 3 // 10, weight_decay=0.1)
        return BASE | shape | rate | dict(tokens_per_update=self.batch, steps=steps, optimizer=self.optimizer)

    def nanochat(self) -> float:
        """The rate by nanochat's formulas, scaled to equal the dial's at one point."""
        width = (PER_DEPTH * self.depth / dial.WIDTH) ** (-0.5 if self.optimizer == "adamw" else 0)
        return dial.TUNED[self.optimizer].lr * width * (self.batch / dial.RATE_BATCH) ** 0.5


def batch_of(tokens: int, optimizer: str) -> int:
    """The dial's batch for a run of `tokens`."""
    return dial.length_of(tokens, BASE["seq_len"], optimizer)["tokens_per_update"]


BOTH = ("adamw", "muon")
PARTS = {
    "depth": [Curve(o, d, seeds=(1, 2, 3)) for d in (2, 4, 8) for o in BOTH],
    "batch": [Curve(o, 2, batch=b, tokens=256 * b, seeds=(1, 2)) for b in (1024, 4096) for o in BOTH],
    "tokens": [Curve(o, 4, 1 << 20, b) for o in BOTH for b in (4096, 2048, 8192, 16384 if o == "muon" else 1024)],
    "length": [Curve(o, d, t << 20, batch_of(t << 20, o), own=True) for d, t in ((3, 6), (2, 3)) for o in BOTH],
    "text": [Curve(o, d) for d in (2, 4, 8) for o in BOTH],
    "architecture": [Curve(o, 4, architecture=a) for a in ("gpt2", "llama") for o in BOTH],
}


@dataclass(frozen=True)
class DialConfig(machine.Options):
    parts: str = "depth,batch,architecture"
    """Which curves to measure."""
    runs: str = "runs/dial"
    """Directory of the runs."""
    jobs: int = 2
    """Runs at a time, one core each."""


def main(config: DialConfig) -> None:
    """Train what is not trained yet, then print, draw and write the results."""
    machine.prepare_tokens(config.tokens)
    vocab_size = json.loads((machine.ROOT / config.tokens / "dataset.json").read_text())["vocab_size"]
    wanted = {curve: part for part in config.parts.split(",") for curve in PARTS[part]}
    with ThreadPoolExecutor(config.jobs) as pool:
        swept = list(pool.map(lambda curve: sweep(config, curve, vocab_size), wanted))
    rows = [{"part": part, **dataclasses.asdict(c), **found} for (c, part), found in zip(wanted.items(), swept, strict=True)]
    depths = [row for row in rows if row["part"] in ("depth", "text")]
    factors = {o: factors_of([row for row in depths if row["optimizer"] == o]) for o in BOTH} if depths else {}
    result = {"flags": BASE, "curves": rows, "factors": factors}
    keys = ["part", "optimizer", "depth", "width", "tokens", "batch", "best_rate", "dial", "nanochat", "best_loss", "dial_loss"]
    print(machine.table(keys, [[row[key] for key in keys] for row in rows]))
    print(json.dumps(factors, indent=1))
    name = "dial" if config.parts == DialConfig.parts else "dial_" + config.parts.replace(",", "_")
    print(path := machine.write(name, result, config.out))
    if depths:
        draw(depths, path.with_suffix(".png"))


def sweep(config: DialConfig, curve: Curve, vocab_size: int) -> dict:
    """Try rates until the best is not at an end. Returns losses by rate, the best rate, and its loss and the dial's."""
    flags = curve.flags(vocab_size)
    middle = 1e-3 * 2 ** round(math.log2(flags["lr"] / 1e-3))
    losses = {}

    def try_out(*rates: float) -> None:
        losses.update((rate, [train(config, curve, flags | dict(lr=rate, seed=s)) for s in curve.seeds]) for rate in rates)

    try_out(middle, middle / 2, middle * 2)
    while (best := min(losses, key=lambda rate: sum(losses[rate]))) in (min(losses), max(losses)) and len(losses) < 9:
        try_out(best / 2 if best == min(losses) else best * 2)
    try_out(best / 2**0.5, best * 2**0.5)
    means = {rate: float(np.mean(losses[rate])) for rate in sorted(losses)}
    near = [rate for rate in means if best / 2 <= rate <= best * 2 or means[rate] < means[best] + 0.05]
    parabola = np.polynomial.Polynomial.fit(np.log2(near), [means[rate] for rate in near], 2)
    place = float(np.clip(parabola.deriv().roots()[0], math.log2(near[0]), math.log2(near[-1])))
    at_dial = math.log2(flags["lr"])
    inside = math.log2(near[0]) <= at_dial <= math.log2(near[-1])
    dial_loss = parabola(at_dial) if inside else np.interp(at_dial, np.log2(list(means)), list(means.values()))
    print(curve, f"best {2**place:.3g}, dial {flags['lr']:.3g}", flush=True)
    found = {"width": flags["n_embd"], "best_rate": 2**place, "dial": flags["lr"], "nanochat": curve.nanochat()}
    found |= {"best_loss": float(parabola(place)), "dial_loss": float(dial_loss)}
    return found | {"losses": {f"{rate:g}": losses[rate] for rate in means}}


def train(config: DialConfig, curve: Curve, flags: dict) -> float:
    """The validation loss of a run; infinity if it diverged."""
    kind = f"{Path(config.tokens).name}-{curve.architecture}-{curve.optimizer}{'-own' * curve.own}"
    shape = f"d{curve.depth}-w{flags['n_embd']}-t{curve.tokens}-b{curve.batch}"
    name = f"{kind}-{shape}-s{flags['seed']}-lr{flags['lr']:g}"
    run = Path(machine.ROOT, config.runs, name)
    if not any("val_loss" in record for record in machine.metrics(run)):
        machine.run(**flags, tokens=config.tokens, out_dir=config.runs, name=name)
    loss = machine.metrics(run)[-1]["val_loss"]
    return loss if math.isfinite(loss) else math.inf


def factors_of(rows: list[dict]) -> dict:
    """How far the best rates spread over depths, as a factor: absolute, relative to the dial's, and to nanochat's."""
    ratios = {rule: [row["best_rate"] / row.get(rule, 1.0) for row in rows] for rule in ("constant", "dial", "nanochat")}
    return {rule: round(max(values) / min(values), 3) for rule, values in ratios.items()}


def draw(rows: list[dict], out: Path) -> None:
    """Draw loss over rate relative to the dial's: a panel per optimizer, a curve per depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    for axis, optimizer in zip(figure.subplots(1, 2), BOTH, strict=True):
        own = [row for row in rows if row["optimizer"] == optimizer]
        for color, row in zip(curves.COLORS, own, strict=False):
            points = sorted((float(rate) / row["dial"], np.mean(losses)) for rate, losses in row["losses"].items())
            label = f"{row['depth']} layers, {row['width']} wide"
            axis.plot(*zip(*points, strict=True), "o-", color=color, markersize=4, linewidth=1.4, label=label)
            axis.plot(row["best_rate"] / row["dial"], row["best_loss"], "*", color=color, markersize=11)
        axis.axvline(1, color="0.6", linewidth=1, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set(xlabel="learning rate / the dial's", ylabel="validation loss")
        axis.set_title(f"{optimizer} (stars: the best rate)", loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    curves.save(figure, out)


if __name__ == "__main__":
    machine.command_line(__doc__, DialConfig, main)
