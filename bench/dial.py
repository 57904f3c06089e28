"""Where does the best learning rate lie, and does the dial find it? python bench/dial.py [--part=transfer]

Trains small models on real text with rates a factor of 2 apart, on both sides until the best one is inside. Every run is an
ordinary run of train.py in --runs, which are kept: the same command again continues, and what is finished is not repeated.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

BASE = dict(architecture="qwen3", seq_len=128, schedule="wsd", cooldown_fraction=0.4, micro_batch_size=8)
BASE |= dict(
    device="cpu", dtype="bfloat16", compile="off", threads=1, eval_every=0, eval_tokens=65536, save_every=0, log_every=16
)
FIRST = {"adamw": 4e-3, "muon": 1.6e-2}  # the middle of the first three rates
PER_DEPTH = 24  # width of a layer


@dataclass(frozen=True)
class Curve:
    """What the runs of a curve of loss over rate share."""

    optimizer: str
    depth: int
    tokens: int = 1 << 19
    batch: int = 2048
    seed: int = 1
    width: int = 0

    def flags(self) -> dict:
        """The flags of train.py."""
        width = self.width or PER_DEPTH * self.depth
        return BASE | dict(
            optimizer=self.optimizer, n_layer=self.depth, n_embd=width, n_head=max(1, width // 48), seed=self.seed,
            tokens_per_update=self.batch, steps=self.tokens // self.batch, warmup_steps=3 * self.tokens // self.batch // 10,
        )  # fmt: skip


PARTS = {
    "transfer": [Curve(o, d) for d in (2, 4, 8) for o in ("adamw", "muon")],
    "batch": [Curve(o, 4, batch=b) for b in (512, 8192) for o in ("adamw", "muon")],
    "horizon": [Curve(o, 4, tokens=t) for t in (1 << 17, 1 << 21) for o in ("adamw", "muon")],
    "shape": [Curve(o, 4, width=w) for w in (48, 192) for o in ("adamw", "muon")],
    "seed": [Curve(o, d, seed=2) for d in (2, 4) for o in ("adamw", "muon")],
}


@dataclass(frozen=True)
class DialConfig:
    part: str = "transfer"
    """Which curves, of transfer, batch, horizon, shape and seed; several with a comma between."""
    tokens: str = "tokens/python"
    runs: str = "runs/dial"
    """Where the runs are kept."""
    jobs: int = 2
    """Runs at a time."""
    out: str = str(machine.RESULTS)


def main(config: DialConfig) -> None:
    machine.prepare_tokens(config.tokens)
    curves = [curve for part in config.part.split(",") for curve in PARTS[part]]
    with ThreadPoolExecutor(config.jobs) as pool:
        list(pool.map(lambda curve: sweep(config, curve), curves))


def sweep(config: DialConfig, curve: Curve) -> dict[float, float]:
    """Loss by rate, from three rates on until the best one is inside."""
    middle = FIRST[curve.optimizer] * {2: 2, 4: 1, 8: 1 / 2}[curve.depth]
    losses = {rate: train(config, curve, rate) for rate in (middle / 2, middle, middle * 2)}
    while (best := min(losses, key=losses.get)) in (min(losses), max(losses)) and len(losses) < 9:
        rate = best / 2 if best == min(losses) else best * 2
        losses[rate] = train(config, curve, rate)
    print(curve, {rate: round(losses[rate], 4) for rate in sorted(losses)}, f"best {best:g}", flush=True)
    return losses


def train(config: DialConfig, curve: Curve, rate: float) -> float:
    """The validation loss of a run, or infinity if it diverged."""
    c = curve
    name = f"{c.optimizer}-d{c.depth}-w{c.width or PER_DEPTH * c.depth}-t{c.tokens}-b{c.batch}-s{c.seed}-lr{rate:g}"
    records = Path(machine.ROOT, config.runs, name, "metrics.jsonl")
    if not records.exists() or "val_loss" not in machine.metrics(records.parent)[-1]:
        machine.run(**curve.flags(), lr=rate, tokens=config.tokens, out_dir=config.runs, name=name)
    loss = machine.metrics(records.parent)[-1]["val_loss"]
    return loss if math.isfinite(loss) else math.inf


if __name__ == "__main__":
    machine.command_line(__doc__, DialConfig, main)
