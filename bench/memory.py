"""Does training take the memory that is predicted for a rank? `python bench/memory.py [--only=TEXT]`

Trains settings of every kind for two updates with the functions of train.py, on gloo ranks in separate processes. A dispatch
mode adds up the bytes of live tensors, as `max_memory_allocated` does on a GPU. Prints the bytes of the rank with the highest
peak, and writes memory.json. Exits with 1 if a prediction is more than 10 % off. Takes two minutes on two cores.
"""

from collections.abc import Iterator
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import forks
from lockstep import settings
from lockstep.dataset import tokenizer
from lockstep.hardware import footprint

BASE = dict(architecture="gpt2", n_layer=6, n_head=6, n_embd=384, vocab_size=8192, seq_len=1024, micro_batch_size=2)
BASE |= dict(optimizer="adamw", lr=1e-3, dtype="bfloat16", compile="off", threads=1, steps=2, save_every=0, async_save=False)
# The ranks, the micro-batches of each rank, and the flags of every setting.
SETTINGS = {
    "gpt2, float32, one micro-batch": (1, 1, dict(dtype="float32", micro_batch_size=1)),
    "gpt2, bfloat16, accumulating": (1, 2, dict()),
    "gpt2, bfloat16, checkpointing": (1, 2, dict(activation_checkpointing=True, micro_batch_size=4)),
    "llama, grouped queries, untied": (1, 2, dict(architecture="llama", n_kv_head=2, tie_embeddings=False)),
    "llama, grouped queries, Muon": (1, 2, dict(architecture="llama", n_kv_head=2, optimizer="muon")),
    "qwen3, Muon, short context": (1, 2, dict(architecture="qwen3", optimizer="muon", seq_len=256, micro_batch_size=8)),
    "llama, documents": (
        1,
        2,
        dict(attend="document", dtype="float32", architecture="llama", n_layer=2, seq_len=4096, micro_batch_size=1),
    ),
    "ddp, one micro-batch": (2, 1, dict(strategy="ddp")),
    "ddp, accumulating": (2, 2, dict(strategy="ddp", dtype="float32", micro_batch_size=1)),
    "fsdp, one micro-batch": (2, 1, dict(strategy="fsdp", architecture="llama")),
    "fsdp, accumulating, checkpointing": (2, 2, dict(strategy="fsdp", activation_checkpointing=True)),
    "fsdp, four ranks, two copies": (4, 2, dict(strategy="fsdp", replicate=2, dtype="float32", micro_batch_size=1)),
    "fsdp, Muon": (2, 2, dict(strategy="fsdp", architecture="qwen3", optimizer="muon")),
    "exact, one rank": (1, 2, dict(strategy="exact")),
    "portable, one rank": (
        1,
        2,
        dict(numerics="portable", dtype="float32", n_layer=3, n_head=4, n_embd=256, vocab_size=2048, seq_len=128),
    ),
    "exact, accumulating": (2, 2, dict(strategy="exact", shard_gradients="off")),
    "exact, sharded gradients": (2, 2, dict(strategy="exact", shard_gradients="on")),
    "exact, four ranks, sharded gradients, Muon": (
        4,
        2,
        dict(strategy="exact", shard_gradients="on", architecture="llama", tie_embeddings=False, optimizer="muon"),
    ),
    "fsdp, sharded gradients": (2, 2, dict(strategy="fsdp", shard_gradients="on")),
    "scratch_reduce_scatter, accumulating": (2, 2, dict(strategy="scratch_reduce_scatter")),
    "scratch_overlap, accumulating": (2, 2, dict(strategy="scratch_overlap")),
}


def main(config: machine.Predictions) -> int:
    """The command."""
    forks.prepare_to_fork()
    with machine.workspace() as folder:
        bytes_and_end = tokenizer.resolve("bytes")  # --attend=document needs its end-of-text
        machine.make_tokens(folder / "tokens", 200_000, bytes_and_end.vocab_size)
        bytes_and_end.save(folder / "tokens" / "tokenizer.json")
        return machine.hold_against("memory", measured(config.only, folder), config, most=0.1)


def measured(only: str, folder: Path) -> Iterator[dict]:
    """A row for each setting whose name contains `only`."""
    for number, (name, (ranks, micro_batches, flags)) in enumerate(SETTINGS.items()):
        if only in name:
            flags = BASE | flags
            flags["tokens_per_update"] = ranks * micro_batches * flags["micro_batch_size"] * flags["seq_len"]
            own = machine.arguments("", **flags, tokens=folder / "tokens", out_dir=folder, name=f"run{number}")[1:]
            rows = forks.in_forks(two_updates, settings.load(own, ""), folder=folder, ranks=ranks)
            yield {"setting": name, "ranks": ranks, "flags": flags} | max(rows, key=lambda row: row["measured"])


def two_updates(config: settings.Config) -> dict:
    """The peak bytes of live tensors in two updates of this rank, and the predicted bytes."""
    import train
    from watch import Watch

    with Watch("cpu") as watch:
        run, prefetcher = machine.ready(config, 2)
        for _ in range(2):
            train.update(run, prefetcher)
    prefetcher.close()
    run.log.close(0)
    run.world.leave()
    parts = footprint.of_rank(run.config, run.world.size, "cpu")
    return {"measured": watch.peak, "predicted": sum(parts.values()), "parts": parts}


if __name__ == "__main__":
    machine.command_line(__doc__, machine.Predictions, main)
