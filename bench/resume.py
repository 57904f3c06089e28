"""Is a run that was stopped and resumed the same as an undisturbed one? On 3, 4, 5 and 8 ranks, under every strategy.

python bench/resume.py

Trains each case three times: undisturbed, undisturbed again, and stopped halfway and resumed. Prints the sha256 of the final
weights and a verdict. Two ranks would show little, because a + b and b + a have the same bits. On three and more ranks the
order of a sum matters. The exit status is 0 only if weights and optimizer state are the same, bit for bit, in every case.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import cli, errors
from common.errors import RunError

# 120 micro-batches, which 3, 4, 5 and 8 ranks can share equally.
FLAGS = machine.TINY_RUN | dict(tokens_per_update=16 * 120, micro_batch_size=1)
# FLAGS have all gradients in DDP's first bucket of 1 MB; 9 million parameters fill buckets of 1, 25 and 10 MB.
SEVERAL_BUCKETS = dict(architecture="llama", n_layer=10, n_embd=256, vocab_size=4608, micro_batch_size=5)
STRATEGIES = ("ddp", "zero1", "fsdp", "scratch_allreduce", "scratch_reduce_scatter", "scratch_overlap", "exact")


@dataclass(frozen=True)
class ResumeConfig:
    ranks: str = "3,4,5,8"
    strategies: str = ",".join(STRATEGIES)
    steps: int = 6
    more: bool = True
    """Also try bfloat16, compiled, compressed gradients and a model of several buckets, on three ranks."""
    tokens: str = "tokens/python"
    """Dataset; the embedded corpus is prepared if it is not there."""
    out: str = str(machine.RESULTS)
    """Directory for resume.json."""


def cases(config: ResumeConfig) -> list[tuple[str, int, dict]]:
    """Every case: its name, its number of ranks, and its flags."""
    strategies, large = config.strategies.split(","), SEVERAL_BUCKETS
    rows = [(s, int(ranks), dict(strategy=s)) for s in strategies for ranks in config.ranks.split(",")]
    if not config.more:
        return rows
    for s in strategies:
        rows.append((f"{s}, bfloat16", 3, dict(strategy=s, dtype="bfloat16")))
        rows.append((f"{s}, several buckets", 3, dict(large, strategy=s)))
        rows.append((f"{s}, compiled", 3, dict(strategy=s, compile="on")))
    rows.append(("ddp, --grad_compression=bf16", 3, dict(grad_compression="bf16")))
    rows.append(("ddp, several buckets, compiled", 3, dict(large, compile="on")))
    rows.append(("ddp, several buckets, --grad_compression=bf16", 3, dict(large, grad_compression="bf16")))
    rows.append(("ddp, several buckets, Muon, bfloat16", 3, dict(large, optimizer="muon", dtype="bfloat16")))
    return rows


def train(name: str, ranks: int, runs: Path, **flags) -> dict[str, str]:
    """Train to the end. Returns the sha256 of the final weights and optimizer state."""
    arguments = machine.arguments(name=name, out_dir=runs, **FLAGS | flags)
    errors = runs / f"{name}.err"
    pids = machine.fork(settings.load(arguments[1:], ""), ranks, errors)
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        raise RunError(f"{name} on {ranks} ranks with {flags} failed:\n{errors.read_text()}")
    return machine.digests(runs / name)


def main(config: ResumeConfig) -> int:
    """The command."""
    from tqdm import tqdm

    machine.prepare_tokens(config.tokens)
    machine.prepare_to_fork()
    began, rows = time.monotonic(), []
    with machine.workspace() as runs:
        for number, (name, ranks, flags) in enumerate(tqdm(cases(config), unit="case", dynamic_ncols=True)):
            flags = dict(flags, tokens=config.tokens)
            train(f"{number}-resumed", ranks, runs, steps=config.steps // 2, **flags)
            names = [f"{number}-{kind}" for kind in ("undisturbed", "repeated", "resumed")]
            digests = [train(run, ranks, runs, steps=config.steps, **flags) for run in names]
            rows.append({"case": name, "ranks": ranks, "sha256": digests})
    result = {"flags": FLAGS, "steps": config.steps, "seconds": round(time.monotonic() - began), "cases": rows}
    print(machine.write("resume", result, Path(config.out)))
    return report(rows)


def report(rows: list[dict]) -> int:
    """Print the table and a verdict for each case. Returns the exit status."""
    lines, status = [], 0
    for row in rows:
        digests = row["sha256"]
        same = all(other == digests[0] for other in digests)
        weights = [each["model.safetensors"][:8] for each in digests]
        lines.append([row["case"], row["ranks"], *weights, "same" if same else "DIFFERENT"])
        status = status or int(not same)
    print(machine.table(["case", "ranks", "undisturbed", "repeated", "resumed", ""], lines))
    return status


if __name__ == "__main__":
    with errors.user_errors():
        sys.exit(main(cli.parse(ResumeConfig, sys.argv[1:], __doc__)))
