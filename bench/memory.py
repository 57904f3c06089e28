"""Are the memory and the time that --plan predicts those that training takes?

python bench/memory.py settings|ranks|llama|time [--flag=value ...]
"""

import itertools
import resource
import statistics
from collections.abc import Iterator
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import forks
import settings
from hardware import footprint, host
from planning import plan

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
    "llama, documents": (1, 2, dict(attend="document", architecture="llama", n_layer=2, seq_len=4096, micro_batch_size=1)),
    "ddp, one micro-batch": (2, 1, dict(strategy="ddp")),
    "ddp, accumulating": (2, 2, dict(strategy="ddp", dtype="float32", micro_batch_size=1)),
    "zero1, accumulating": (2, 2, dict(strategy="zero1")),
    "zero1, Muon": (2, 2, dict(strategy="zero1", architecture="qwen3", optimizer="muon")),
    "fsdp, one micro-batch": (2, 1, dict(strategy="fsdp", architecture="llama")),
    "fsdp, accumulating, checkpointing": (2, 2, dict(strategy="fsdp", activation_checkpointing=True)),
    "fsdp, four ranks, two copies": (4, 2, dict(strategy="fsdp", replicate=2, dtype="float32", micro_batch_size=1)),
    "fsdp, Muon": (2, 2, dict(strategy="fsdp", architecture="qwen3", optimizer="muon")),
    "exact, accumulating": (2, 2, dict(strategy="exact")),
    "scratch_reduce_scatter, accumulating": (2, 2, dict(strategy="scratch_reduce_scatter")),
    "scratch_overlap, accumulating": (2, 2, dict(strategy="scratch_overlap")),
}
REFERENCE = BASE | dict(seq_len=256, micro_batch_size=8, tokens_per_update=4096, threads=0, device="cpu", eval_every=0)
# The ranks and the flags of every setting whose time is measured.
TIMED = {
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


def of_settings(config: machine.Predictions) -> int:
    """Is the memory that is predicted for a rank the memory that training takes, in settings of every kind?

    Trains each setting for two updates on gloo ranks, each a process of its own, by the functions of train.py. A dispatch mode
    adds up the bytes of the tensors that are alive: what `max_memory_allocated` is on a GPU. Prints bytes of the rank with the
    highest peak and writes memory.json. Ends with 1 if a prediction is more than 10 % off. Two minutes on two cores.
    """
    forks.prepare_to_fork()
    with machine.workspace() as folder:
        machine.make_tokens(folder / "tokens", 200_000, BASE["vocab_size"])
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
    """The bytes that were alive at the peak of two updates of this rank, and those predicted."""
    import train
    from watch import Watch

    with Watch("cpu") as watch:
        run, prefetcher = machine.ready(config, 2)
        for _ in range(2):
            train.update(run, prefetcher)
    prefetcher.close()
    run.log.close(0)
    run.world.leave(failed=False)
    parts = footprint.of_rank(run.config, run.world.size, "cpu")
    return {"measured": watch.peak, "predicted": sum(parts.values()), "parts": parts}


def of_ranks(config: machine.Out) -> int:
    """How much memory do ranks of fsdp have resident at most, beside those of ddp?

    Trains a llama of 104 million parameters for two updates, saves it, and resumes it for two more. Prints the most resident
    memory of each rank and the ratio of the largest, and writes ranks_memory.json. Takes 15 GB and three minutes on four cores.
    """
    flags = dict(architecture="llama", n_layer=8, n_embd=1024, n_head=16, d_ff=2816, tie_embeddings="false")
    flags |= dict(vocab_size=384, optimizer="adamw", seq_len=128, micro_batch_size=1, tokens_per_update=4 * 128)
    flags |= dict(device="cpu", compile="off", eval_tokens=128)
    forks.prepare_to_fork()
    held: dict[str, dict[str, list[float]]] = {"ddp": {}, "fsdp": {}}
    with machine.workspace() as folder:
        machine.make_tokens(folder / "tokens", 20_000, 384)
        for strategy, (start, steps) in itertools.product(held, {"begun": 2, "resumed": 4}.items()):
            own = flags | dict(strategy=strategy, tokens=folder / "tokens", out_dir=folder, name=strategy, steps=steps)
            training = settings.load(machine.arguments("", **own)[1:], "")
            sizes = held[strategy][start] = forks.in_forks(resident_after, training, folder=folder, ranks=4)
            print(f"{strategy:<5} {start:<8} {', '.join(f'{size / 1e9:.2f}' for size in sizes)} GB", flush=True)
    ddp, fsdp = (max(map(max, starts.values())) for starts in held.values())
    print(f"the largest rank of fsdp holds {fsdp / ddp:.2f} of what the largest of ddp does")
    print(machine.write("ranks_memory", {"flags": flags, "resident": held, "ratio": fsdp / ddp}, Path(config.out)))
    return 0


def resident_after(config: settings.Config) -> int:
    """The most bytes that this process has resident in a whole run."""
    import train

    train.main(config)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def llama(config: machine.Out) -> int:
    """Do two updates of config/llama_1.3b.toml fit into 24 GB on a CPU?

    Trains the preset's model, every weight of it, in bfloat16 with activation checkpointing for two updates of the same 128
    tokens. Prints the losses and the most memory that was resident, beside the prediction. Writes llama.json. It is killed
    before it saves: a checkpoint is first copied in memory, which would take 16 GB more. Ends with 1 if it took more than 24 GB
    or the loss did not fall. One minute on two cores.
    """
    preset = "config/llama_1.3b.toml"
    flags = dict(vocab_size=50304, device="cpu", dtype="bfloat16", compile="off", warmup_steps=0)
    flags |= dict(activation_checkpointing="true", seq_len=128, micro_batch_size=1, tokens_per_update=128)
    with machine.workspace() as folder:
        machine.make_tokens(folder / "tokens", 129, 50304)  # one window, so each update has the same tokens
        training = settings.load(machine.arguments(preset, **flags, tokens=folder / "tokens"), "")
        parts = plan.make(training, settings.PlanConfig(plan_world_size=1, plan_gpu="cpu")).memory
        # Without address space this process ends with an error. Running out of memory might end another one.
        resource.setrlimit(resource.RLIMIT_DATA, (host.memory_bytes(), resource.RLIM_INFINITY))
        records = machine.run_until(2, preset, tokens=folder / "tokens", **flags)
    result = {"flags": flags, "losses": [record["loss"] for record in records], "resident": 1e9 * records[-1]["memory_gb"]}
    result |= {"predicted": sum(parts.values()), "parts": parts}
    print(f"losses {result['losses']}; {result['resident'] / 1e9:.2f} GB, predicted {result['predicted'] / 1e9:.2f}")
    print(machine.write("llama", result, Path(config.out)))
    return int(result["resident"] > 24e9 or result["losses"][1] >= result["losses"][0])


def of_updates(config: machine.Predictions) -> int:
    """Is the time that --plan predicts for an update the time that it takes?

    The MFU is measured on one setting. With it the plan predicts the others. Each is trained by train.py for ten steps, right
    after the first one, because the machine's speed changes. Writes step_time.json. Ends with 1 if a prediction is more than
    25 % off. Six minutes on two cores with bfloat16.
    """
    with machine.workspace() as folder:
        machine.make_tokens(folder / "tokens", 200_000, BASE["vocab_size"])
        return machine.hold_against("step_time", step_times(config.only, folder / "tokens"), config, most=0.25)


def step_times(only: str, tokens: Path) -> Iterator[dict]:
    """A row for each setting whose name contains `only`: the seconds of an update."""

    def measured(ranks: int, flags: dict) -> float:
        records = machine.run_until(10, "", ranks=ranks, **flags | {"tokens": tokens, "steps": 11})
        return statistics.median(record["step_ms"] for record in records[4:]) / 1000

    def predicted(ranks: int, flags: dict, mfu: float) -> float:
        own = settings.load(machine.arguments("", **flags, tokens="none")[1:], "")
        options = settings.PlanConfig(plan_world_size=ranks, plan_gpu="cpu", plan_mfu=mfu)
        return plan.make(own, options).speed["step_s"]

    for name, (ranks, changes) in TIMED.items():
        if only in name:
            flags, mfu = REFERENCE | changes, predicted(1, REFERENCE, 1) / measured(1, REFERENCE)
            row = {"setting": name, "ranks": ranks, "flags": changes, "mfu": mfu}
            yield row | {"predicted": predicted(ranks, flags, mfu), "measured": measured(ranks, flags)}


if __name__ == "__main__":
    machine.choose(
        __doc__,
        settings=(machine.Predictions, of_settings),
        ranks=(machine.Out, of_ranks),
        llama=(machine.Out, llama),
        time=(machine.Predictions, of_updates),
    )
