"""Is a run that was stopped and resumed the run that nobody disturbed? On 3, 4, 5 and 8 ranks, under every strategy.

python bench/resume.py

Trains each setting three times: undisturbed, undisturbed again, and stopped halfway and resumed. Prints the sha256 of weights
and optimizer state, and a verdict. On two ranks this would show little: a + b and b + a have the same bits. On three and more
the order of a sum matters. Exit status 1 unless all three are the same everywhere.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from files import sha256
from settings import RunError

FLAGS = dict(
    n_head=2,
    seq_len=16,
    tokens_per_update=16 * 120,  # 120 sequences, which 3, 4, 5 and 8 ranks share
    micro_batch_size=5,
    lr=1e-2,
    warmup_steps=2,
    schedule="constant",
    eval_every=0,
    eval_tokens=640,
    save_every=0,
    log_every=1,
    device="cpu",
    threads=1,
)
SMALL = dict(architecture="qwen3", n_layer=2, n_embd=32)  # all gradients in DDP's first bucket of 1 MB
LARGE = dict(architecture="llama", n_layer=10, n_embd=256, vocab_size=4608)  # 9 million: buckets of 1, 25 and 10 MB
STRATEGIES = ("ddp", "zero1", "fsdp", "scratch_allreduce", "scratch_reduce_scatter", "scratch_overlap")


@dataclass(frozen=True)
class ResumeConfig:
    ranks: str = "3,4,5,8"
    steps: int = 6
    more: bool = True
    """Also bfloat16, compiled, compressed gradients and a model of several buckets, on three ranks."""
    tokens: str = "tokens/python"
    """Dataset; the embedded corpus is prepared if it is not there."""
    out: str = str(machine.RESULTS)
    """Directory for resume.json."""


def cases(config: ResumeConfig) -> list[tuple[str, int, dict]]:
    """What is tried: a name, the number of ranks, and flags."""
    plain = dict(SMALL, optimizer="adamw", dtype="float32", compile="off")
    rows = [(s, int(w), dict(plain, strategy=s)) for s in STRATEGIES for w in config.ranks.split(",")]
    if config.more:
        for s in STRATEGIES:
            rows.append((f"{s}, bfloat16", 3, dict(plain, strategy=s, dtype="bfloat16")))
            rows.append((f"{s}, several buckets", 3, dict(plain, **LARGE, strategy=s)))
            rows.append((f"{s}, compiled", 3, dict(plain, strategy=s, compile="on")))
        rows.append(("ddp, --grad_compression=bf16", 3, dict(plain, grad_compression="bf16")))
        large = dict(plain, **LARGE)
        rows.append(("ddp, several buckets, compiled", 3, dict(large, compile="on")))
        rows.append(("ddp, several buckets, --grad_compression=bf16", 3, dict(large, grad_compression="bf16")))
        rows.append(("ddp, several buckets, Muon, bfloat16", 3, dict(large, optimizer="muon", dtype="bfloat16")))
    return rows


def train(name: str, ranks: int, runs: Path, **flags) -> list[str]:
    """Train to the end. Returns the sha256 of the final weights and optimizer state."""
    arguments = [f"--{key}={value}" for key, value in (FLAGS | flags).items()]
    config = settings.load([*arguments, f"--name={name}", f"--out_dir={runs}"], "")
    errors = runs / f"{name}.err"
    pids = machine.fork(config, ranks, errors)
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        raise RunError(f"{name} on {ranks} ranks with {flags} failed:\n{errors.read_text()}")
    latest = runs / name / "checkpoints" / "latest"
    return [sha256(latest / file) for file in ("model.safetensors", "optimizer.safetensors")]


def main(config: ResumeConfig) -> int:
    """The command."""
    from tqdm import tqdm

    machine.prepare_tokens(config.tokens)
    machine.prepare_to_fork()
    began, rows = time.monotonic(), []
    with machine.workspace() as runs:
        for number, (name, ranks, flags) in enumerate(tqdm(cases(config), unit="case", dynamic_ncols=True)):
            flags = dict(flags, tokens=config.tokens)
            digests = [train(f"{number}-{kind}", ranks, runs, steps=config.steps, **flags) for kind in ("once", "again")]
            train(f"{number}-resumed", ranks, runs, steps=config.steps // 2, **flags)
            digests.append(train(f"{number}-resumed", ranks, runs, steps=config.steps, **flags))
            rows.append({"case": name, "ranks": ranks, "sha256": digests, "same": digests[0] == digests[1] == digests[2]})
    result = {"flags": FLAGS, "steps": config.steps, "seconds": round(time.monotonic() - began), "cases": rows}
    print(machine.write("resume", result, Path(config.out)))
    head = ["strategy", "ranks", "once", "again", "resumed", ""]
    lines = [[r["case"], r["ranks"], *(d[0][:8] for d in r["sha256"]), "same" if r["same"] else "DIFFERENT"] for r in rows]
    print(machine.table(head, lines))
    return int(not all(row["same"] for row in rows))


if __name__ == "__main__":
    with settings.user_errors():
        sys.exit(main(settings.parse(ResumeConfig, sys.argv[1:], __doc__)))
