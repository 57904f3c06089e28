"""Is the time that --plan predicts for an update the time that it takes? `python bench/step_time.py`

The MFU is measured on one setting, as somebody would who tries a model before a long run. It is what --plan_mfu takes. With it
the plan predicts the other settings: other shapes, contexts, micro-batches, strategies and numbers of ranks. Each is trained by
train.py for a few steps, right after the reference, because the machine's speed changes. Prints both times and writes
bench/results/step_time.json. Six minutes on two cores with bfloat16 and without other load.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import cli, errors
from measure import run_until
from memory import BASE, make_tokens
from planning import plan
from settings import PlanConfig

REFERENCE = BASE | dict(seq_len=256, micro_batch_size=8, tokens_per_update=4096, threads=0, device="cpu", eval_every=0)
# The ranks and the flags of every setting.
SETTINGS = {
    "two micro-batches of 8 x 256 (the reference again)": (1, dict()),
    "eight micro-batches of 2 x 256": (1, dict(micro_batch_size=2)),
    "context 1,024": (1, dict(seq_len=1024, micro_batch_size=2)),
    "12 layers": (1, dict(n_layer=12)),
    "768 wide": (1, dict(n_embd=768, n_head=12)),
    "vocabulary of 32,768": (1, dict(vocab_size=32768)),
    "activation checkpointing": (1, dict(activation_checkpointing=True)),
    "llama, grouped queries, untied": (1, dict(architecture="llama", n_kv_head=2, tie_embeddings=False)),
    "qwen3, Muon": (1, dict(architecture="qwen3", optimizer="muon")),
    "ddp on 2": (2, dict(strategy="ddp")),
    "ddp on 2, accumulating": (2, dict(strategy="ddp", micro_batch_size=2)),
    "zero1 on 2": (2, dict(strategy="zero1")),
    "fsdp on 2": (2, dict(strategy="fsdp")),
    "fsdp on 2, accumulating, checkpointing": (2, dict(strategy="fsdp", micro_batch_size=2, activation_checkpointing=True)),
    "exact on 2": (2, dict(strategy="exact")),
}


@dataclass(frozen=True)
class StepTimeConfig:
    only: str = ""
    """Measure only the settings whose name contains this."""
    steps: int = 10
    warmup_steps: int = 4
    """Steps of each run whose time does not count."""
    out: str = str(machine.RESULTS)
    """Directory of the result."""


def main(config: StepTimeConfig) -> int:
    """Measure all settings; print, write. Returns 1 if a prediction is more than 25 % off."""
    chosen = {name: setting for name, setting in SETTINGS.items() if config.only in name}
    rows = []
    with machine.workspace() as folder:
        make_tokens(folder / "tokens", 200_000)
        for name, (ranks, flags) in chosen.items():
            mfu = predicted(1, REFERENCE, mfu=1) / seconds(config, 1, REFERENCE, folder)
            planned, measured = predicted(ranks, REFERENCE | flags, mfu), seconds(config, ranks, REFERENCE | flags, folder)
            rows.append({"setting": name, "ranks": ranks, "flags": {key: str(value) for key, value in flags.items()}})
            rows[-1] |= {"mfu": mfu, "predicted_s": planned, "measured_s": measured}
            print(f"{name:<52} {measured:.3f} s, predicted {planned:.3f} s, {planned / measured - 1:+.0%}", flush=True)
    worst = max(abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows)
    if not config.only:
        print(machine.write("step_time", {"largest_error": worst, "settings": rows}, Path(config.out)))
    print(f"largest error of {len(rows)} predictions: {worst:.1%}")
    return int(worst > 0.25)


def seconds(config: StepTimeConfig, ranks: int, flags: dict, folder: Path) -> float:
    """The median time of an update of a run on `ranks` ranks."""
    records = run_until(config.steps, "", ranks=ranks, **flags | {"tokens": folder / "tokens", "steps": config.steps + 1})[1]
    speed = statistics.median(record["tokens_per_second"] for record in records[config.warmup_steps :])
    return flags["tokens_per_update"] / speed


def predicted(ranks: int, flags: dict, mfu: float) -> float:
    """The seconds of an update by the plan."""
    config = settings.load(machine.arguments("", **flags, tokens="none")[1:], "")
    return plan.make(config, PlanConfig(plan_world_size=ranks, plan_gpu="cpu", plan_mfu=mfu)).speed["step_s"]


if __name__ == "__main__":
    with errors.user_errors():
        raise SystemExit(main(cli.parse(StepTimeConfig, sys.argv[1:], __doc__)))
