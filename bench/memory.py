"""Is the memory that hardware/footprint.py predicts the memory that training takes? `python bench/memory.py`

Trains each setting for two updates on gloo ranks, each a process of its own, by the functions of train.py. A dispatch mode sees
every tensor that torch makes and adds up the bytes of those that are alive: what `max_memory_allocated` is on a GPU. (Resident
memory is in the results too. It also counts code, threads' stacks and what the allocator keeps.) Prints the prediction for the
rank with the highest peak and writes bench/results/memory.json. Two minutes on two cores; with a GPU, --device=cuda.
"""

import json
import os
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import cli, errors
from common.errors import RunError

BASE = dict(
    architecture="gpt2",
    n_layer=6,
    n_head=6,
    n_embd=384,
    vocab_size=8192,
    seq_len=1024,
    micro_batch_size=2,
    optimizer="adamw",
    lr=1e-3,
    dtype="bfloat16",
    compile="off",
    threads=1,
    steps=2,
    save_every=0,
    async_save=False,
)
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
    """Measure all settings; print, write. Returns 1 if a prediction is more than 10 % off."""
    chosen = {name: setting for name, setting in SETTINGS.items() if config.only in name}
    machine.prepare_to_fork()
    rows = []
    with machine.workspace() as folder:
        make_tokens(folder / "tokens", 200_000)
        for i, (name, (ranks, micro_batches, flags)) in enumerate(chosen.items()):
            flags = BASE | dict(tokens=folder / "tokens", out_dir=folder, name=f"run{i}", device=config.device) | flags
            flags["tokens_per_update"] = ranks * micro_batches * flags["micro_batch_size"] * flags["seq_len"]
            rows.append(
                {
                    "setting": name,
                    "ranks": ranks,
                    "flags": {key: str(flags[key]) for key in flags if key not in ("tokens", "out_dir")},
                }
            )
            rows[-1] |= measure(machine.arguments("", **flags)[1:], ranks, folder / f"run{i}.json")
            print(line(rows[-1]), flush=True)
    worst = max(abs(row["predicted"] / row["measured"] - 1) for row in rows)
    if not config.only:
        print(machine.write("memory", {"largest_error": worst, "settings": rows}, Path(config.out)))
    print(f"largest error of {len(rows)} predictions: {worst:.1%}")
    return int(worst > 0.1)


def make_tokens(directory: Path, count: int) -> None:
    """Shards of random tokens in llm.c's format."""
    import numpy as np

    from dataset.tokens import write_shard

    directory.mkdir()
    for split in ("train", "val"):
        ids = np.random.default_rng(0).integers(BASE["vocab_size"], size=count, dtype=np.uint16)
        write_shard(directory / f"random_{split}_000000.bin", ids, BASE["vocab_size"])


def measure(arguments: list[str], ranks: int, path: Path) -> dict:
    """Train on forks of this process. Returns the record of the rank with the highest peak."""

    def work() -> int:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        config = settings.load([str(machine.ROOT / "config/laptop.toml"), *arguments], "")
        path.with_suffix(f".{os.environ.get('RANK', '0')}").write_text(json.dumps(two_updates(config)))
        return 0

    pids = machine.fork_ranks(ranks, work)
    if any([os.waitpid(pid, 0)[1] for pid in pids]):
        raise RunError(f"a rank of {' '.join(arguments)} failed")
    records = [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]
    return max(records, key=lambda record: record["measured"]) | {"saving": records[0]["saving"]}


def two_updates(config: settings.Config) -> dict:
    """Train for two updates and save. The bytes that were alive at the peak, and those predicted."""
    import itertools

    import data
    import train
    from hardware import footprint

    world = train.join(config)
    resident = reset_resident()
    with live_bytes(world.device) as live:
        run = train.prepare(config, world)
        prefetcher = data.Prefetcher(
            run.batches, itertools.product(range(2), world.share(run.config.micro_batches)), world.device
        )
        train.warm_up(run)
        for _ in range(2):
            train.update(run, prefetcher)
        prefetcher.close()
        measured, resident = live.peak(), reset_resident() - resident
        before = live.bytes()
        live.reset()
        run.checkpoints.save(run.state, run.engine, run.optimizers, now=True)
        saving = live.peak() - before
    moments = footprint.moments(run.config, world.size, world.device.type)
    parts = footprint.of_rank(run.config, world.size, world.device.type)
    run.log.close(0)
    world.leave(failed=False)
    return {
        "measured": measured,
        "predicted": sum(parts.values()),
        "resident": resident,
        "saving": saving,
        "host": footprint.host_bytes(run.config, run.world.size),
        "moments": {name: sum(parts.values()) for name, parts in moments.items()},
        "parts": parts,
    }


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


def reset_resident() -> int:
    """The most memory in bytes that was resident since the last call (Linux). The count starts again."""
    status, refs = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not refs.exists():
        return 0
    peak = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    refs.write_text("5")
    return 1024 * peak


def line(row: dict) -> str:
    """A row of the table."""
    mb = {key: row[key] / 1e6 for key in ("measured", "predicted", "resident", "saving", "host")}
    return (
        f"{row['setting']:<38} measured {mb['measured']:7.1f} MB  predicted {mb['predicted']:7.1f} "
        f"({row['predicted'] / row['measured'] - 1:+.1%})  resident {mb['resident']:7.1f}  "
        f"saving {mb['saving']:6.1f}, predicted {mb['host']:6.1f}"
    )


if __name__ == "__main__":
    with errors.user_errors():
        raise SystemExit(main(cli.parse(MemoryConfig, sys.argv[1:], __doc__)))
