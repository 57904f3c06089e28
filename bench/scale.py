"""What can be shown about thousands of GPUs without having them, and about time before a run? `python bench/scale.py`

sampler: every rank's share of an update on 8 to 16,384 ranks, from a stream of 15 trillion tokens. Are the shares disjoint and
  complete and the same tokens for every number of ranks? The time of one rank.
startup: one rank of 1,024 that share a 70-billion-parameter Llama under fsdp, on tensors without storage and torch's fake
  process group: the seconds to build it, the bytes of the rank, and the collectives of an update beside those of the plan.
scaling: the alpha-beta model of gpus.py against throughputs that others have published (published.json: sequences of a
  micro-batch, micro-batches of an update and tokens/s of a GPU by the number of GPUs, under FSDP alone with bfloat16). The
  model's compute rate is set where a series begins; the rest of the series is predicted.

Half a minute on one core. Writes bench/results/scale.json.
"""

import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import machine  # puts the project's folder on the path

# isort: split
import numpy as np

import data
import forks
import settings
from common import cli
from hardware import footprint, gpus

TOKENS = 15 * 10**12
LARGEST_SHARD = 2**31 - 1  # tokens; the header counts them in an int32
LLAMA_70B = dict(architecture="llama", n_layer=80, n_head=64, n_kv_head=8, n_embd=8192, head_dim=128, d_ff=28672)
LLAMA_70B |= dict(vocab_size=128256, seq_len=8192, tie_embeddings=False, rope_theta=5e5)


@dataclass(frozen=True)
class ScaleConfig(machine.Out):
    part: Literal["all", "sampler", "startup", "scaling"] = "all"


def main(config: ScaleConfig) -> int:
    """Measure the parts; print, write."""
    parts = {"sampler": sampler, "startup": startup, "scaling": scaling}
    chosen = {name: part for name, part in parts.items() if config.part in ("all", name)}
    result = {name: forks.in_fresh_process(measure) for name, measure in chosen.items()}
    if config.part == "all":
        print(machine.write("scale", result, Path(config.out)))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The sampler


def sampler() -> list[dict]:
    """Time and shares of the sampler on many ranks."""
    rows = []
    with machine.workspace() as folder:
        for tokens, sizes in [(TOKENS // 1000, [8]), (TOKENS, [8, 1024, 16384])]:
            make_sparse(folder / str(tokens), tokens)
            began = time.perf_counter()
            mixture = data.open_mixture(str(folder / str(tokens)))
            opened = time.perf_counter() - began
            # A sequence of 8,192 tokens for each of 16,384 ranks is 134 million tokens an update.
            batches = data.Batches(mixture.streams("train"), mixture.shares, 8192, 16384, 1, seed=1)
            in_epoch = batches.streams[0].num_windows(batches.seq_len) // batches.sequences_per_update
            for ranks in sizes:
                # The first update of a run, one in the middle of an epoch, and the one that crosses into the second epoch.
                right = all(shares_are_right(batches, ranks, step) for step in (0, in_epoch // 2, in_epoch))
                times = microseconds(batches, ranks, in_epoch)
                rows.append({"tokens": tokens, "ranks": ranks, "right": right, "open s": opened} | times)
                print(rows[-1], flush=True)
    return rows


def make_sparse(directory: Path, tokens: int) -> None:
    """Write shards of zeros as large as can be: llm.c's header, then a hole. Each takes one block of disk."""
    directory.mkdir()
    header = np.zeros(256, dtype="<i4")
    full, rest = divmod(tokens, LARGEST_SHARD)
    for number, count in enumerate([100_000, *[LARGEST_SHARD] * full, *[rest] * (rest > 0)]):
        header[:3] = 20240520, 1, count
        with open(directory / f"zeros_{'train' if number else 'val'}_{number:06d}.bin", "wb") as file:
            file.write(header.tobytes())
            file.truncate(header.nbytes + 2 * count)


def shares_are_right(batches, size: int, step: int) -> bool:
    """Whether the ranks' shares of an update are disjoint and together the update, in the order of one rank."""
    import torch

    from parallel.world import World

    n, B = batches.streams[0].num_windows(batches.seq_len), batches.sequences_per_update
    first, shares = batches.first_sequence(step), []
    for rank in range(size):
        share = World(rank, size, 8, torch.device("cpu")).share(B // batches.micro_batch_size)
        shares.append(batches.sequences(first + share.start, len(share))[1])
    windows, epochs = np.concatenate(shares), np.arange(first, first + B) // n
    once = len(np.unique(np.stack([epochs, windows]), axis=1).T) == B  # no window twice in an epoch
    return once and bool((windows == batches.sequences(first, B)[1]).all() and (windows < n).all())


def microseconds(batches, size: int, in_epoch: int) -> dict:
    """Of a rank's micro-batch: of the first one at a new place of the run, and of another one there."""
    new, again = [], []
    for step in np.random.default_rng(0).integers(in_epoch, size=50).tolist():
        data.permuted_block.cache_clear()
        data.mixed_block.cache_clear()
        for times in (new, again):
            began = time.perf_counter()
            batches.batch(step, step % (batches.sequences_per_update // size))
            times.append(time.perf_counter() - began)
    return {"new place us": 1e6 * statistics.median(new), "us": 1e6 * statistics.median(again)}


# ---------------------------------------------------------------------------------------------------------------------
# One rank of 1,024


def startup() -> list[dict]:
    """Build rank 0 of 1,024 and update it, with one copy of the weights and with 16."""
    return [one_rank(1024, copies) for copies in (1, 16)]


def one_rank(size: int, copies: int) -> dict:
    """Build a 70 B Llama on rank 0 of `size`, with so many copies of the weights; one update of a micro-batch a rank."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import optim
    from model import without_values
    from parallel.sharded import FullyShard
    from parallel.world import World
    from watch import Watch

    flags = dict(LLAMA_70B, strategy="fsdp", replicate=copies, micro_batch_size=1, activation_checkpointing=True)
    flags |= dict(dtype="bfloat16", compile="on", device="cuda", tokens_per_update=size * LLAMA_70B["seq_len"])
    config = settings.replace(settings.Config(), **flags)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    world = World(0, size, 8, torch.device("cpu"))
    began = time.perf_counter()
    module = without_values(config.model)
    model = FullyShard(module, torch.bfloat16, world, copies)
    built = time.perf_counter() - began
    with FakeTensorMode(allow_non_fake_inputs=True), Watch("cpu") as watch:
        module.to_empty(device="cpu")
        tokens = torch.zeros(1, config.model.seq_len, dtype=torch.long)
        model(tokens, tokens).backward()
        optimizer = optim.build(module, config.optim)
        optimizer.step()
        own = {"weights": [*module.parameters()], "gradients": [parameter.grad for parameter in module.parameters()]}
        own["optimizer state"] = [value for _, _, value in optimizer.state() if hasattr(value, "to_local")]
        held = {name: sum(tensor.to_local().nbytes for tensor in tensors) for name, tensors in own.items()}
    dist.destroy_process_group()
    row = {
        "ranks": size,
        "copies": copies,
        "build s": built,
        "bytes": held,
        "planned bytes": footprint.of_rank(config, size, "cuda"),
        "collectives": {name: count for name, count in watch.names.items() if name.startswith("c10d::")},
        "planned collectives": [(messages, ranks) for _, messages, ranks, _ in gpus.traffic(config, size, 1)],
        "update": gpus.speed(config, size, gpus.GPUS["h100"], gpus.GPUS["h100"].mfu),
    }
    print(*(f"{key}: {value}" for key, value in row.items()), sep="\n  ", flush=True)
    return row


# ---------------------------------------------------------------------------------------------------------------------
# What others have measured


def scaling() -> list[dict]:
    """Predict the published throughputs, each series from its first point."""
    rows = []
    for name, series in json.loads((machine.ROOT / "bench/published.json").read_text()).items():
        first, *others = series["points"]
        mfu = fitted_mfu(series, *first)
        for ranks, micro_batch, micro_steps, published in others:
            predicted = predict(series, ranks, micro_batch, micro_steps, mfu)
            row = {"model": name, "GPUs": ranks, "published": published, "predicted": predicted}
            rows.append(row | {"error": predicted / published - 1, "same micro-batch": micro_batch == first[1]})
            print(f"{name:<24} {ranks:5} GPUs: {published:8,.0f} tokens/s a GPU, {rows[-1]['error']:+.1%} predicted")
    for words, chosen in (("all", rows), ("equal micro-batches", [row for row in rows if row["same micro-batch"]])):
        errors = [abs(row["error"]) for row in chosen]
        print(f"{len(chosen)} predictions, {words}: median error {statistics.median(errors):.1%}, ", end="")
        print(f"{sum(error <= 0.1 for error in errors)} within 10 %, worst {max(errors):.1%}", flush=True)
    return rows


def predict(series: dict, ranks: int, micro_batch: int, micro_steps: int, mfu: float) -> float:
    """Tokens/s of a GPU."""
    shape, update = series["shape"], ranks * micro_batch * micro_steps * series["shape"]["seq_len"]
    flags = dict(strategy="fsdp", dtype="bfloat16", compile="on", device="cuda", micro_batch_size=micro_batch)
    flags |= dict(tokens_per_update=update, activation_checkpointing=series["checkpointing"])
    config = settings.replace(settings.Config(), **shape, **flags)
    config = settings.replace(config, **cli.flat_values(settings.resolve_model(config.model, shape["vocab_size"])))
    return update / gpus.speed(config, ranks, gpus.GPUS[series["gpu"]], mfu)["step_s"] / ranks


def fitted_mfu(series: dict, ranks: int, micro_batch: int, micro_steps: int, published: float) -> float:
    """The utilization at which the model predicts the published throughput on `ranks` GPUs, by bisection."""
    low, high = 0.01, 2.0
    while not math.isclose(low, high, rel_tol=1e-9):
        middle = (low + high) / 2
        too_fast = predict(series, ranks, micro_batch, micro_steps, middle) > published
        low, high = (low, middle) if too_fast else (middle, high)
    return low


if __name__ == "__main__":
    machine.command_line(__doc__, ScaleConfig, main)
