"""What can be shown about thousands of GPUs without having them? `python bench/scale.py`

sampler: every rank's share of an update on 8 to 16,384 ranks, from a stream of 15 trillion tokens. Are the shares disjoint and
  complete and the same tokens for every number of ranks? Time and memory of one rank.
startup: one rank of 1,024 that share a 70-billion-parameter Llama under fsdp, on tensors without storage and torch's fake
  process group: the seconds to build it, the bytes of the rank, and the collectives of an update beside those of the plan.
scaling: the alpha-beta model of cluster.py against throughputs that others have published. The model's compute rate is set
  where a series begins; the rest of the series is predicted.

Half a minute on one core. Writes bench/results/scale.json.
"""

import math
import statistics
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import cli, errors
from hardware import cluster, footprint
from measure import in_fresh_process

TOKENS = 15 * 10**12
LARGEST_SHARD = 2**31 - 1  # tokens; the header counts them in an int32
LLAMA_70B = dict(
    architecture="llama",
    n_layer=80,
    n_head=64,
    n_kv_head=8,
    n_embd=8192,
    head_dim=128,
    d_ff=28672,
    vocab_size=128256,
    seq_len=8192,
    tie_embeddings=False,
    rope_theta=5e5,
)


@dataclass(frozen=True)
class ScaleConfig:
    part: Literal["all", "sampler", "startup", "scaling"] = "all"
    out: str = str(machine.RESULTS)
    """Directory for scale.json."""


def main(config: ScaleConfig) -> None:
    """Measure all parts; print, write."""
    parts = {"sampler": sampler, "startup": startup, "scaling": scaling}
    chosen = {name: measure for name, measure in parts.items() if config.part in ("all", name)}
    result = {}
    for name, measure in chosen.items():
        began = time.perf_counter()
        result[name] = in_fresh_process(measure)
        print(f"{name}: {time.perf_counter() - began:.1f} s\n", flush=True)
    if config.part == "all":
        print(machine.write("scale", result, Path(config.out)))


# ---------------------------------------------------------------------------------------------------------------------
# The sampler


def sampler() -> list[dict]:
    """Time, memory and shares of the sampler on many ranks."""
    import data

    rows = []
    with machine.workspace() as folder:
        for tokens in (TOKENS // 1000, TOKENS):
            make_sparse(folder / str(tokens), tokens)
        for tokens, sizes in [(TOKENS // 1000, [8]), (TOKENS, [8, 64, 512, 1024, 4096, 16384])]:
            before, began = private_memory(), time.perf_counter()
            mixture = data.open_mixture(str(folder / str(tokens)))
            opened, held = time.perf_counter() - began, private_memory() - before
            # A sequence of 8,192 tokens for each of 16,384 ranks is 134 million tokens an update.
            batches = data.Batches(mixture.streams("train"), mixture.shares, 8192, 16384, 1, seed=1)
            assert len(batches.streams[0]) == tokens
            for size in sizes:
                row = {"tokens": tokens, "ranks": size, "open s": opened, "open MB": held}
                rows.append(row | check_shares(batches, size) | serve(batches, size))
    formats = {"tokens": ",", "ranks": ",", "right": "", "open s": ".2f", "open MB": ".1f"}
    formats |= {"us": ".0f", "new place us": ".0f", "kB": ".0f"}
    head = ["tokens", "ranks", "shares right", "open, s", "MB", "a rank's batch, us", "at a new place", "kB"]
    print(machine.table(head, [[format(row[key], style) for key, style in formats.items()] for row in rows]))
    return rows


def make_sparse(directory: Path, tokens: int) -> None:
    """Write shards of zeros as large as can be: llm.c's header, then a hole. Each takes one block of disk."""
    directory.mkdir()
    header = np.zeros(256, dtype="<i4")
    counts = [LARGEST_SHARD] * (tokens // LARGEST_SHARD) + [tokens % LARGEST_SHARD]
    for number, count in enumerate([100_000, *counts]):
        header[:3] = 20240520, 1, count
        with open(directory / f"zeros_{'train' if number else 'val'}_{number:06d}.bin", "wb") as file:
            file.write(header.tobytes())
            file.truncate(header.nbytes + 2 * count)


def private_memory() -> float:
    """This process's own memory in MB, without mapped files, which the system can reclaim."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1000


def interesting_steps(batches) -> list[int]:
    """The first update of a run, one in the middle of an epoch, and the one that crosses into the second epoch."""
    in_epoch = batches.streams[0].num_windows(batches.seq_len) // batches.sequences_per_update
    return [0, in_epoch // 2, in_epoch]


def check_shares(batches, size: int) -> dict:
    """Whether the ranks' shares of updates are disjoint and together the update, in the order of one rank."""
    import torch

    from parallel.world import World

    right, seconds = True, []
    n, B = batches.streams[0].num_windows(batches.seq_len), batches.sequences_per_update
    for step in interesting_steps(batches):
        first, shares = batches.first_sequence(step), []
        for rank in range(size):
            share = World(rank, size, 0, 8, torch.device("cpu")).share(B // batches.micro_batch_size)
            began = time.perf_counter()
            shares.append(batches.sequences(first + share.start, len(share))[1])
            seconds.append(time.perf_counter() - began)
        windows = np.concatenate(shares)
        epochs = np.arange(first, first + B) // n
        right &= len(np.unique(np.stack([epochs, windows]), axis=1).T) == B  # no window twice in an epoch
        right &= bool((windows == batches.sequences(first, B)[1]).all()) and bool((windows < n).all())
    return {"right": right, "share us": 1e6 * statistics.median(seconds)}


def serve(batches, size: int) -> dict:
    """Microseconds of a rank's micro-batch, of the first one at a place, and the kilobytes that it takes at most."""
    import data

    new, again = [], []
    in_epoch = interesting_steps(batches)[2]
    for step in np.random.default_rng(0).integers(in_epoch, size=50).tolist():
        micro_batch = step % (batches.sequences_per_update // size)
        data.permuted_block.cache_clear()
        data.mixed_block.cache_clear()
        for times in (new, again):
            began = time.perf_counter()
            batches.batch(step, micro_batch)
            times.append(time.perf_counter() - began)
    tracemalloc.start()
    data.permuted_block.cache_clear()
    batches.batch(in_epoch // 3, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"new place us": 1e6 * statistics.median(new), "us": 1e6 * statistics.median(again), "kB": peak / 1e3}


# ---------------------------------------------------------------------------------------------------------------------
# One rank of 1,024


def startup(size: int = 1024) -> list[dict]:
    """Build and step one rank of `size` in each way to share the model out."""
    return [one_rank(size, copies) for copies in (1, 16)]


def one_rank(size: int, copies: int) -> dict:
    """Build a 70 B Llama on rank 0 of `size`, with so many copies of the weights; one update of a micro-batch a rank."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import optim
    from model import GPT
    from parallel.sharded import FullyShard
    from parallel.world import World

    config = settings.replace(
        settings.Config(),
        **LLAMA_70B,
        strategy="fsdp",
        replicate=copies,
        micro_batch_size=1,
        tokens_per_update=size * LLAMA_70B["seq_len"],
        activation_checkpointing=True,
        dtype="bfloat16",
        compile="on",
        device="cuda",
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    world = World(0, size, 0, 8, torch.device("cpu"))
    began = time.perf_counter()
    with torch.device("meta"):
        module = GPT(config.model)
    model = FullyShard(module, torch.bfloat16, world, copies)
    built = time.perf_counter() - began
    weights = sum(p.to_local().numel() * p.element_size() for p in module.parameters())
    with FakeTensorMode(allow_non_fake_inputs=True), collectives() as counted:
        module.to_empty(device="cpu")
        tokens = torch.zeros(1, config.model.seq_len, dtype=torch.long)
        model(tokens, tokens).backward()
        gradients = sum(p.grad.to_local().numel() * 4 for p in module.parameters())
        optimizer = optim.build(module, config.optim)
        optimizer.step()
        state = sum(value.to_local().numel() * 4 for _, _, value in optimizer.state() if hasattr(value, "to_local"))
    dist.destroy_process_group()
    planned = footprint.of_rank(config, size, "cuda")
    traffic = [(messages, ranks) for _, messages, ranks, _ in cluster.traffic(config, size, 1)]
    row = {
        "ranks": size,
        "copies": copies,
        "parameters": sum(p.numel() for p in module.parameters()),
        "build s": built,
        "bytes": {"weights": weights, "gradients": gradients, "optimizer state": state},
        "planned bytes": planned,
        "collectives": counted,
        "planned collectives": traffic,
        "update": cluster.speed(config, size, cluster.GPUS["h100"], cluster.GPUS["h100"].mfu),
    }
    gb = {name: f"{value / 1e9:.3f}" for name, value in row["bytes"].items()}
    print(f"{row['parameters']:,} parameters on {size} ranks, {copies} copies: built in {built:.1f} s; GB of a rank: {gb}")
    print(f"  collectives of an update: {counted}; planned (collectives, ranks): {traffic}")
    print(f"  planned memory at the peak {sum(planned.values()) / 1e9:.1f} GB; {row['update']}", flush=True)
    return row


def collectives():
    """A context that counts the collectives started in it. Its value is a dictionary of their numbers by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __enter__(self):
            super().__enter__()
            self.counts = {}
            return self.counts

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "c10d":
                name = function._schema.name.split("::")[1].strip("_")
                self.counts[name] = self.counts.get(name, 0) + 1
            return function(*args, **kwargs or {})

    return Counter()


# ---------------------------------------------------------------------------------------------------------------------
# What others have measured


@dataclass(frozen=True)
class Series:
    """Published tokens/s of a GPU for several numbers of GPUs. All of it is FSDP without other parallelism."""

    source: str
    gpu: str
    shape: dict
    points: dict[int, tuple[int, int, float]]  # GPUs: sequences of a micro-batch, micro-batches of an update, tokens/s
    checkpointing: bool = False


MPT_README = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md, 061f2c7"
TITAN_README = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, 31a17bf"
KEMPNER = "KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md, 9f3f03a"


def mpt(gpu: str, layers: int, width: int, points: dict, checkpointing: bool = False) -> Series:
    """A series of an MPT. Its shape is GPT-2's but for biases and positions."""
    shape = dict(architecture="gpt2", n_layer=layers, n_embd=width, n_head=width // 128 or 1, vocab_size=50368, seq_len=2048)
    return Series(MPT_README, gpu, shape, points, checkpointing)


def llama3(layers: int, width: int, ff: int, context: int) -> dict:
    """The shape of a Llama 3 with 8 heads of keys and values."""
    heads = dict(n_head=width // 128, n_kv_head=8, tie_embeddings=False)
    return dict(architecture="llama", n_layer=layers, n_embd=width, d_ff=ff, vocab_size=128256, seq_len=context, **heads)


# Context 2,048, bfloat16, sharded over all GPUs. A100: 40 GB, and 1,600 Gb/s of RoCE between nodes.
PUBLISHED = {
    "MPT 125M": mpt(
        "a100",
        12,
        768,
        {8: (26, 3, 136334), 16: (26, 1, 130535), 32: (26, 1, 127122), 64: (26, 1, 125234), 128: (26, 1, 123936)},
    ),
    "MPT 350M": mpt(
        "a100", 24, 1024, {8: (16, 4, 55995), 16: (18, 1, 55413), 32: (18, 1, 53811), 64: (18, 1, 52689), 128: (18, 1, 51934)}
    ),
    "MPT 760M": mpt(
        "a100", 24, 1536, {8: (12, 4, 30173), 16: (12, 1, 29607), 32: (12, 1, 29648), 64: (12, 1, 29344), 128: (12, 1, 28940)}
    ),
    "MPT 1B": mpt(
        "a100", 24, 2048, {8: (8, 8, 19271), 16: (8, 1, 19085), 32: (10, 1, 15555), 64: (10, 1, 19001), 128: (10, 1, 18647)}
    ),
    "MPT 3B": mpt(
        "a100", 32, 2560, {8: (5, 8, 10065), 16: (5, 1, 9750), 32: (6, 1, 9914), 64: (6, 1, 9736), 128: (6, 1, 9538)}
    ),
    "MPT 7B": mpt(
        "a100", 32, 4096, {8: (12, 4, 3679), 16: (16, 1, 3645), 32: (18, 1, 3725), 64: (18, 1, 3665), 128: (18, 1, 3623)}, True
    ),
    "MPT 13B": mpt(
        "a100", 40, 5120, {8: (4, 16, 1668), 16: (10, 1, 1993), 32: (14, 1, 1998), 64: (16, 1, 1976), 128: (16, 1, 1972)}, True
    ),
    "MPT 30B": mpt("a100", 48, 7168, {32: (4, 1, 857), 128: (6, 1, 865)}, True),
    "MPT 70B": mpt("a100", 80, 8192, {64: (2, 1, 276), 128: (4, 1, 376)}, True),
    "MPT 760M, H100": mpt("h100", 24, 1536, {8: (24, 2, 63147), 16: (24, 1, 68551), 32: (24, 1, 67971)}),
    "MPT 1B, H100": mpt("h100", 24, 2048, {8: (14, 1, 45455), 16: (20, 1, 46037), 32: (20, 1, 45130), 64: (20, 1, 44402)}),
    "MPT 3B, H100": mpt("h100", 32, 2560, {16: (10, 3, 24142), 32: (6, 3, 23021), 64: (6, 3, 22525)}),
    "MPT 13B, H100": mpt("h100", 40, 5120, {8: (2, 1, 4792), 16: (2, 1, 4767), 32: (2, 1, 4811), 64: (2, 1, 4800)}),
    "MPT 30B, H100": mpt("h100", 48, 7168, {8: (3, 21, 2002), 16: (10, 3, 2263), 32: (14, 3, 2308)}, True),
    "MPT 70B, H100": mpt("h100", 80, 8192, {32: (2, 16, 882), 64: (8, 4, 1039)}, True),
    "Llama 3.1 8B": Series(TITAN_README, "h100", llama3(32, 4096, 14336, 8192), {8: (2, 1, 5762), 128: (2, 1, 5605)}),
    "Llama 3.1 8B, compiled": Series(TITAN_README, "h100", llama3(32, 4096, 14336, 8192), {8: (2, 1, 6667), 128: (2, 1, 6514)}),
    "Llama 3 8B, one node": Series(
        KEMPNER,
        "h200",
        llama3(32, 4096, 14336, 4096),
        {1: (4, 2, 10471), 2: (4, 2, 9364), 4: (4, 2, 9746)},
        checkpointing=True,
    ),
}


def scaling() -> dict:
    """Predict the published throughputs, each series from its first point."""
    rows = []
    for name, series in PUBLISHED.items():
        first, *others = series.points
        mfu = fitted_mfu(series, first)
        for ranks in others:
            published, predicted = series.points[ranks][2], predict(series, ranks, mfu)
            row = {"model": name, "GPUs": ranks, "from": first, "published": published, "predicted": predicted}
            row["same micro-batch"] = series.points[ranks][0] == series.points[first][0]
            rows.append(row | {"error": predicted / published - 1, "source": series.source})
    head = ["series", "GPUs", "from", "published tokens/s a GPU", "predicted", "error"]
    print(machine.table(head, [[
        row["model"], row["GPUs"], row["from"], f"{row['published']:,.0f}", f"{row['predicted']:,.0f}", f"{row['error']:+.1%}"
    ] for row in rows]))  # fmt: skip
    alike = [row for row in rows if row["same micro-batch"]]
    for words, chosen in (("all", rows), ("with the micro-batch of the series' first point", alike)):
        errors, worst = [abs(row["error"]) for row in chosen], max(chosen, key=lambda row: abs(row["error"]))
        print(f"{len(chosen)} predictions, {words}: median error {statistics.median(errors):.1%}, ", end="")
        print(f"{sum(error <= 0.1 for error in errors)} within 10 %, ", end="")
        print(f"worst {worst['error']:+.1%} ({worst['model']} on {worst['GPUs']})")
    return {"rows": rows}


def predict(series: Series, ranks: int, mfu: float) -> float:
    """Tokens/s of a GPU."""
    micro_batch_size, micro_steps, _ = series.points[ranks]
    config = settings.replace(
        settings.Config(),
        **series.shape,
        strategy="fsdp",
        dtype="bfloat16",
        compile="on",
        device="cuda",
        micro_batch_size=micro_batch_size,
        tokens_per_update=ranks * micro_batch_size * micro_steps * series.shape["seq_len"],
        activation_checkpointing=series.checkpointing,
    )
    config = settings.replace(config, **cli.flat_values(settings.resolve_model(config.model, series.shape["vocab_size"])))
    step = cluster.speed(config, ranks, cluster.GPUS[series.gpu], mfu)["step_s"]
    return config.train.tokens_per_update / step / ranks


def fitted_mfu(series: Series, ranks: int) -> float:
    """The utilization at which the model predicts the published throughput on `ranks` GPUs, by bisection."""
    low, high = 0.01, 2.0
    while not math.isclose(low, high, rel_tol=1e-9):
        middle = (low + high) / 2
        low, high = (low, middle) if predict(series, ranks, middle) > series.points[ranks][2] else (middle, high)
    return low


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(ScaleConfig, sys.argv[1:], __doc__))
