"""Is the memory that hardware/footprint.py predicts the memory that training takes?

python bench/memory.py settings|ranks|llama [--flag=value ...]
"""

import itertools
import resource
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path
import settings

BASE = dict(architecture="gpt2", n_layer=6, n_head=6, n_embd=384, vocab_size=8192, seq_len=1024, micro_batch_size=2)
BASE |= dict(optimizer="adamw", lr=1e-3, dtype="bfloat16", compile="off", threads=1, steps=2, save_every=0, async_save=False)
LLAMA_BYTES = 24e9  # of memory, into which config/llama_1.3b.toml must fit
# The ranks, the micro-batches of each rank, and the flags of every setting.
SETTINGS = {
    "gpt2, float32, one micro-batch": (1, 1, dict(dtype="float32", micro_batch_size=1)),
    "gpt2, bfloat16, accumulating": (1, 2, dict()),
    "gpt2, bfloat16, checkpointing": (1, 2, dict(activation_checkpointing=True, micro_batch_size=4)),
    "llama, grouped queries, untied": (1, 2, dict(architecture="llama", n_kv_head=2, tie_embeddings=False)),
    "llama, grouped queries, Muon": (1, 2, dict(architecture="llama", n_kv_head=2, optimizer="muon")),
    "qwen3, Muon, short context": (1, 2, dict(architecture="qwen3", optimizer="muon", seq_len=256, micro_batch_size=8)),
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


@dataclass(frozen=True)
class MemoryConfig:
    only: str = ""
    """Measure only the settings whose name contains this."""
    device: str = "cpu"
    out: str = str(machine.RESULTS)
    """Directory of the result."""


def main(config: MemoryConfig) -> int:
    """Is the memory that is predicted for a rank the memory that training takes, in settings of every kind?

    Trains each setting for two updates on gloo ranks, each a process of its own, by the functions of train.py. A dispatch mode
    sees every tensor that torch makes and adds up the bytes of those that are alive: what `max_memory_allocated` is on a GPU.
    Prints the prediction for the rank with the highest peak and writes memory.json. Ends with 1 if one is more than 10 % off.
    Two minutes on two cores; with a GPU, --device=cuda.
    """
    chosen = {name: setting for name, setting in SETTINGS.items() if config.only in name}
    machine.prepare_to_fork()
    rows = []
    with machine.workspace() as runs:
        machine.make_tokens(runs / "tokens", 200_000, BASE["vocab_size"])
        for i, (name, (ranks, micro_batches, flags)) in enumerate(chosen.items()):
            folder = runs / f"run{i}"
            folder.mkdir()
            flags = BASE | dict(device=config.device) | flags
            flags["tokens_per_update"] = ranks * micro_batches * flags["micro_batch_size"] * flags["seq_len"]
            arguments = machine.arguments(**flags, tokens=runs / "tokens", out_dir=folder, name="run")[1:]
            records = machine.in_forks(two_updates, settings.load(arguments, ""), folder=folder, ranks=ranks)
            row = max(records, key=lambda record: record["measured"]) | {"saving": records[0]["saving"]}
            rows.append({"setting": name, "ranks": ranks, "flags": flags, **row})
            mb = {key: row[key] / 1e6 for key in ("measured", "predicted", "saving", "host")}
            print(f"{name:<38} measured {mb['measured']:7.1f} MB  predicted {mb['predicted']:7.1f}", end=" ")
            print(f"({row['predicted'] / row['measured'] - 1:+.1%})", end="  ")
            print(f"saving {mb['saving']:6.1f}, predicted {mb['host']:6.1f}", flush=True)
    worst = max(abs(row["predicted"] / row["measured"] - 1) for row in rows)
    if not config.only:
        print(machine.write("memory", {"largest_error": worst, "settings": rows}, Path(config.out)))
    print(f"largest error of {len(rows)} predictions: {worst:.1%}")
    return int(worst > 0.1)


def started(config: settings.Config, schedule) -> tuple:
    """A run and its prefetcher, ready for the updates and micro-batches of `schedule`, as train.py makes them."""
    import data
    import train

    world = train.join(config)
    run = train.prepare(config, world)
    prefetcher = data.Prefetcher(run.batches, schedule(run, world), world.device)
    train.warm_up(run)
    return run, prefetcher


def two_updates(config: settings.Config) -> dict:
    """Train for two updates and save. The bytes that were alive at the peak, and those predicted."""
    import torch

    import train
    from hardware import footprint

    with live_bytes(torch.device(config.train.device)) as live:
        run, prefetcher = started(config, lambda run, world: itertools.product(range(2), world.share(run.config.micro_batches)))
        for _ in range(2):
            train.update(run, prefetcher)
        prefetcher.close()
        measured, before = live.peak(), live.bytes()
        live.reset()
        run.checkpoints.save(run.state, run.engine, run.optimizers, now=True)
        saving = live.peak() - before
    ranks, device = run.world.size, run.world.device.type
    parts, moments = footprint.of_rank(run.config, ranks, device), footprint.moments(run.config, ranks, device)
    result = {"measured": measured, "predicted": sum(parts.values()), "saving": saving, "parts": parts}
    result["host"] = footprint.host_bytes(run.config, ranks)
    result["moments"] = {name: sum(parts.values()) for name, parts in moments.items()}
    run.log.close(0)
    run.world.leave(failed=False)
    return result


def live_bytes(device):
    """A context that counts the bytes of the tensors on `device`: `bytes()` now, `peak()` since it began or `reset()`."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class LiveBytes(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.storages, self.most = {}, 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if DTensor in types:
                return NotImplemented  # it calls again with the tensor that it has on this rank
            out = function(*args, **kwargs or {})
            for tensor in tree_leaves(out):
                if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == device.type:
                    storage = tensor.untyped_storage()
                    self.storages[storage._cdata] = weakref.ref(storage)
            self.most = max(self.most, self.bytes())
            return out

        def bytes(self):
            """The bytes that are alive. fsdp resizes storages, so all are asked again."""
            alive = {key: storage for key, ref in self.storages.items() if (storage := ref()) is not None}
            self.storages = {key: self.storages[key] for key in alive}
            return sum(storage.nbytes() for storage in alive.values())

        def peak(self):
            return self.most

        def reset(self):
            self.most = 0

    return LiveBytes()


# ---------------------------------------------------------------------------------------------------------------------
# What ranks really hold


@dataclass(frozen=True)
class RanksConfig:
    ranks: int = 4
    n_layer: int = 8
    n_embd: int = 1024
    out: str = str(machine.RESULTS)
    """Directory of the result."""


def ranks(config: RanksConfig) -> int:
    """How much memory do ranks of fsdp have resident at most, beside those of ddp?

    Trains a llama of 100 million parameters for two updates, saves it, and resumes it for two more. Prints the most resident
    memory of each rank and the ratio of the largest, and writes ranks_memory.json. Takes 15 GB and three minutes on four cores.
    """
    flags = dict(architecture="llama", n_layer=config.n_layer, n_embd=config.n_embd, n_head=16, d_ff=config.n_embd * 11 // 4)
    flags |= dict(tie_embeddings="false", vocab_size=384, optimizer="adamw", seq_len=128, micro_batch_size=1)
    flags |= dict(tokens_per_update=config.ranks * 128, device="cpu", compile="off", eval_tokens=128, name="run")
    machine.prepare_to_fork()
    held: dict[str, dict[str, list[float]]] = {}
    with machine.workspace() as folder:
        machine.make_tokens(folder / "tokens", 20_000, 384)
        for strategy in ("ddp", "fsdp"):
            own = flags | dict(strategy=strategy, tokens=folder / "tokens", out_dir=folder / strategy)
            held[strategy] = {}
            for name, steps in {"begun": 2, "resumed": 4}.items():
                (forks := folder / f"{strategy}-{name}").mkdir()
                training = settings.load(machine.arguments(**own, steps=steps)[1:], "")
                held[strategy][name] = machine.in_forks(resident_after, training, folder=forks, ranks=config.ranks)
                print(
                    f"{strategy:<5} {name:<8} {', '.join(f'{size / 1e9:.2f}' for size in held[strategy][name])} GB", flush=True
                )
    most = {strategy: max(max(sizes) for sizes in starts.values()) for strategy, starts in held.items()}
    print(f"the largest rank of fsdp holds {most['fsdp'] / most['ddp']:.2f} of what the largest of ddp does")
    print(
        machine.write("ranks_memory", {"flags": flags, "resident": held, "ratio": most["fsdp"] / most["ddp"]}, Path(config.out))
    )
    return 0


def resident_after(config: settings.Config) -> int:
    """The most bytes that this process has resident in a whole run."""
    import train

    train.main(config)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---------------------------------------------------------------------------------------------------------------------
# 1.3 billion parameters


@dataclass(frozen=True)
class LlamaConfig(machine.Options):
    preset: str = "config/llama_1.3b.toml"
    seq_len: int = 128


def llama(config: LlamaConfig) -> int:
    """Do two updates of config/llama_1.3b.toml fit into 24 GB on a CPU?

    Trains the preset's model, every weight of it, in bfloat16 with activation checkpointing for two updates of the same tokens,
    with a short context and one small micro-batch. Prints the losses, the time and the most memory that was resident, beside
    the prediction. Writes llama.json. It saves nothing: a checkpoint is first copied in memory, which would take 16 GB more.
    Ends with 1 if it took more or the loss did not fall. One minute on two cores.
    """
    if (free := available()) < LLAMA_BYTES - 2e9:
        print(f"skipped: {free / 1e9:.1f} GB of memory are available, and it takes about {LLAMA_BYTES / 1e9 - 2:.0f}")
        return 0
    machine.prepare_tokens(config.tokens)
    with machine.workspace() as folder:
        result = machine.in_fresh_process(train_llama, config, folder)
    print(f"{result['parameters']:,} parameters; losses {result['losses']}; updates of {result['update s']} s")
    print(f"resident at the peak {result['resident'] / 1e9:.2f} GB; predicted {result['predicted'] / 1e9:.2f} GB")
    print(machine.write("llama", result, Path(config.out)))
    return int(result["resident"] > LLAMA_BYTES or result["losses"][1] >= result["losses"][0])


def available() -> float:
    """Bytes of memory that new processes can take (Linux)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def train_llama(config: LlamaConfig, folder: Path) -> dict:
    """Train for two updates. Both see the same batch, so the second loss must be lower."""
    import train
    from hardware import footprint

    # Running out of address space ends this process with an error. Running out of memory might end another one.
    resource.setrlimit(resource.RLIMIT_DATA, (int(available()), resource.RLIM_INFINITY))
    flags = dict(tokens=config.tokens, vocab_size=50304, device="cpu", dtype="bfloat16", compile="off", warmup_steps=0, steps=2)
    flags |= dict(activation_checkpointing="true", seq_len=config.seq_len, micro_batch_size=1, tokens_per_update=config.seq_len)
    training = settings.load(machine.arguments(config.preset, **flags, out_dir=folder, name="run"), "")
    run, prefetcher = started(training, lambda run, world: itertools.product([0, 0], [0]))
    seconds, updates = [], []
    for _ in range(2):
        began = time.perf_counter()
        updates.append(train.update(run, prefetcher))
        seconds.append(round(time.perf_counter() - began, 1))
    prefetcher.close()
    parts = footprint.of_rank(run.config, 1, "cpu")
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run.log.close(0)
    result = {"flags": flags, "parameters": run.engine.module.parameter_count(), "losses": [loss for loss, _ in updates]}
    result |= {"norms": [norm for _, norm in updates], "update s": seconds, "resident": resident}
    return result | {"predicted": sum(parts.values()), "parts": parts}


if __name__ == "__main__":
    machine.choose(__doc__, settings=(MemoryConfig, main), ranks=(RanksConfig, ranks), llama=(LlamaConfig, llama))
