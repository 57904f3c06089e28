"""Which tokens do thousands of ranks see? `python bench/scale.py`

Computes every rank's share of an update, on 8 to 16,384 ranks, from a stream of 15 trillion tokens. Are the shares disjoint and
complete, and are the tokens the same for any number of ranks? Also times one rank. Half a minute on one core. Writes
scale.json.
"""

import statistics
import time
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import numpy as np

import data
from lockstep.settings import DataConfig

TOKENS = 15 * 10**12
LARGEST_SHARD = 2**31 - 1  # tokens; the header counts them in an int32


def main(config: machine.Out) -> None:
    """Time the sampler and check its shares on many ranks."""
    rows = []
    with machine.workspace() as folder:
        for tokens, sizes in [(TOKENS // 1000, [8]), (TOKENS, [8, 1024, 16384])]:
            make_sparse(folder / str(tokens), tokens)
            began = time.perf_counter()
            mixture = data.open_mixture(DataConfig(str(folder / str(tokens))))
            opened = time.perf_counter() - began
            # A sequence of 8,192 tokens for each of 16,384 ranks is 134 million tokens per update.
            batches = data.Batches(mixture.streams("train"), mixture.phases, 8192, 16384, 1, seed=1)
            in_epoch = batches.streams[0].num_windows(batches.seq_len) // batches.sequences_per_update
            for ranks in sizes:
                # The first update of a run, one in the middle of an epoch, and the one that crosses into the second epoch.
                right = all(shares_are_right(batches, ranks, step) for step in (0, in_epoch // 2, in_epoch))
                times = microseconds(batches, ranks, in_epoch)
                rows.append({"tokens": tokens, "ranks": ranks, "right": right, "open s": opened} | times)
                print(rows[-1], flush=True)
    print(machine.write("scale", {"sampler": rows}, config.out))


def make_sparse(directory: Path, tokens: int) -> None:
    """Write the largest possible shards, of zeros: llm.c's header, then a hole. Each takes one disk block."""
    directory.mkdir()
    header = np.zeros(256, dtype="<i4")
    full, rest = divmod(tokens, LARGEST_SHARD)
    for number, count in enumerate([100_000, *[LARGEST_SHARD] * full, *[rest] * (rest > 0)]):
        header[:3] = 20240520, 1, count
        with open(directory / f"zeros_{'train' if number else 'val'}_{number:06d}.bin", "wb") as file:
            file.write(header.tobytes())
            file.truncate(header.nbytes + 2 * count)


def shares_are_right(batches, size: int, step: int) -> bool:
    """Whether the ranks' shares of an update are disjoint, and together are the update in the order of one rank."""
    import torch

    from lockstep.parallel.world import World

    n, B = batches.streams[0].num_windows(batches.seq_len), batches.sequences_per_update
    first, shares = batches.first_sequence(step), []
    for rank in range(size):
        share = World(rank, size, 8, torch.device("cpu")).share(B // batches.micro_batch_size)
        shares.append(batches.sequences(first + share.start, len(share))[1])
    windows, epochs = np.concatenate(shares), np.arange(first, first + B) // n
    once = len(np.unique(np.stack([epochs, windows]), axis=1).T) == B  # no window twice in an epoch
    return once and bool((windows == batches.sequences(first, B)[1]).all() and (windows < n).all())


def microseconds(batches, size: int, in_epoch: int) -> dict:
    """Microseconds to compute a rank's micro-batch: the first at a new place in the run, and a later one there."""
    new, again = [], []
    for step in np.random.default_rng(0).integers(in_epoch, size=50).tolist():
        data.permuted_block.cache_clear()
        data.mixed_block.cache_clear()
        for times in (new, again):
            began = time.perf_counter()
            batches.batch(step, step % (batches.sequences_per_update // size))
            times.append(time.perf_counter() - began)
    return {"new place us": 1e6 * statistics.median(new), "us": 1e6 * statistics.median(again)}


if __name__ == "__main__":
    machine.command_line(__doc__, machine.Out, main)
