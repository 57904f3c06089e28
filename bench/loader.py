"""How fast is the data loader, compared with nanoGPT's? `python bench/loader.py --nanogpt=PATH`

1. Tokens/s of `data.Batches.batch`, of the `Prefetcher` and of nanoGPT's get_batch on the same tokens, in turns, and as a share
   of the speed at which memory copies as many int64.
2. The time to open a sparse dataset of 200 GB and to read its batches, compared with one of 20 MB.
3. The share of a training step that waits for data. train.py reports it for the presets that a CPU can train. For the others
   it is estimated: the time to read a batch without prefetching, over the time of a step at 989 TFLOP/s, the peak of an H100.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import cli, errors
from dataset.tokens import GPT2_VOCAB_SIZE
from gpu import SHAPES, make_tokens
from hardware import footprint
from measure import copy_of_nanogpt, in_fresh_process, in_turns, nanogpt_train, ratio, run_until, spread

SHARD_TOKENS = 100_000_000
HEADER_BYTES = 1024
H100_FLOPS = 989e12  # in bfloat16, by its datasheet


@dataclass(frozen=True)
class LoaderConfig:
    nanogpt: str = ""
    """A checkout of nanoGPT (empty: leave nanoGPT out)."""
    rounds: int = 3
    seconds: float = 2.0
    """Duration of each measurement."""
    batch_size: int = 12
    seq_len: int = 1024
    gigabytes: float = 200.0
    """Size of the large dataset. It is sparse, so it takes almost no disk space."""


def main(config: LoaderConfig) -> None:
    """Measure all in turns. Print and write the results."""
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        make_random(small, 10_000_000)
        make_sparse(large, round(config.gigabytes * 5e8))
        contenders = {
            "memory copy of int64, tokens/s": lambda: in_fresh_process(copy_speed, config),
            "ours, Batches.batch, tokens/s": lambda: in_fresh_process(our_speed, small, config, False),
            "ours, Prefetcher, tokens/s": lambda: in_fresh_process(our_speed, small, config, True),
        }
        if config.nanogpt:
            peer = copy_of_nanogpt(config.nanogpt, Path(folder) / "nanogpt", "text")
            contenders["nanoGPT, get_batch, tokens/s"] = lambda: in_fresh_process(nanogpt_speed, peer, small, config)
        measured = in_turns(config.rounds, contenders)
        sizes = {"20 MB": in_fresh_process(open_and_serve, small, config)}
        sizes[f"{config.gigabytes:g} GB"] = in_fresh_process(open_and_serve, large, config)
        make_tokens(Path(folder) / "words", 10_000_000, 256)
        waits = {
            preset: trained_wait(preset, Path(folder) / "words", vocab_size)
            for preset, vocab_size in (("laptop", 4096), ("shakespeare_char", 384))
        }
    names = iter(contenders)
    copy, direct = next(names), next(names)
    for preset in SHAPES:
        model = settings.load([f"config/{preset}.toml"], "").model
        flops_per_token = footprint.flops_per_token(settings.resolve_model(model, model.vocab_size or GPT2_VOCAB_SIZE))
        waits[preset] = H100_FLOPS / flops_per_token / statistics.median(measured[direct])
    result = {name: spread(values) for name, values in measured.items()} | {"size": sizes, "data_wait": waits}
    result["share of memory copy"] = ratio(measured[direct], measured[copy])
    for name, row in sizes.items():
        print(f"{name}: " + ", ".join(f"{key} {value:,.3g}" for key, value in row.items()))
    print("share of a step that waits for data: " + ", ".join(f"{name} {share:.2%}" for name, share in waits.items()))
    print(f"Batches.batch runs at {result['share of memory copy']:.1%} of the speed of memory copy")
    if config.nanogpt:
        result["times nanoGPT"] = ratio(measured[direct], measured["nanoGPT, get_batch, tokens/s"])
        print(f"Batches.batch / nanoGPT's get_batch: {result['times nanoGPT']:.2f}")
    print(machine.write("loader", result))


# ---------------------------------------------------------------------------------------------------------------------
# Datasets


def make_random(directory: Path, tokens: int) -> None:
    """Write random GPT-2 tokens as nanoGPT's train.bin and val.bin, which both loaders read."""
    directory.mkdir()
    ids = np.random.default_rng(0).integers(50257, size=tokens, dtype=np.uint16)
    ids.tofile(directory / "train.bin")
    ids[:100_000].tofile(directory / "val.bin")


def make_sparse(directory: Path, tokens: int) -> None:
    """Write shards of SHARD_TOKENS zeros: llm.c's header, then a hole. Each takes one block of disk."""
    directory.mkdir()
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    counts = [SHARD_TOKENS] * (tokens // SHARD_TOKENS) + [tokens % SHARD_TOKENS] * (tokens % SHARD_TOKENS > 0)
    for number, count in enumerate([100_000, *counts]):
        header[:3] = 20240520, 1, count
        with open(directory / f"made_{'train' if number else 'val'}_{number:06d}.bin", "wb") as file:
            file.write(header.tobytes())
            file.truncate(HEADER_BYTES + 2 * count)


# ---------------------------------------------------------------------------------------------------------------------
# Measurements, each in a process of its own


def calls_per_second(call: Callable[[], object], seconds: float) -> float:
    """How often a second `call` can be made. A tenth of the time goes to warming up first."""
    for share in (0.1, 1.0):
        calls, began = 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < share * seconds:
            call()
            calls += 1
    return calls / passed


def copy_speed(config: LoaderConfig) -> float:
    """How many int64 a second memory copies, between arrays too large for the caches."""
    source = np.ones(1 << 25, dtype=np.int64)
    target = np.empty_like(source)
    return len(source) * calls_per_second(lambda: np.copyto(target, source), config.seconds)


def our_batches(directory: Path, config: LoaderConfig):
    """The loader as train.py makes it, with 40 micro-batches an update."""
    import data

    mixture = data.open_mixture(str(directory))
    return data.Batches(
        mixture.streams("train"), mixture.shares, config.seq_len, 40 * config.batch_size, config.batch_size, seed=1
    )


def our_speed(directory: Path, config: LoaderConfig, prefetch: bool) -> float:
    """Tokens/s of our loader, called directly or through the prefetching thread."""
    import torch

    import data

    batches = our_batches(directory, config)
    upcoming = ((step, micro_batch) for step in range(10**9) for micro_batch in range(40))
    if prefetch:
        prefetcher = data.Prefetcher(batches, upcoming, torch.device("cpu"))
        call = prefetcher.next
    else:
        call = lambda: torch.from_numpy(batches.batch(*next(upcoming)))  # noqa: E731
    speed = calls_per_second(call, config.seconds) * config.batch_size * config.seq_len
    if prefetch:
        prefetcher.close()
    return speed


def nanogpt_speed(checkout: Path, directory: Path, config: LoaderConfig) -> float:
    """Tokens/s of the get_batch that nanoGPT's train.py defines."""
    shape = ["--n_layer=1", "--n_head=1", "--n_embd=8", f"--block_size={config.seq_len}", "--batch_size=1"]
    paths = [f"--dataset={directory}", f"--out_dir={directory}/out"]
    flags = ["--device=cpu", "--compile=False", "--eval_only=True", "--eval_iters=1"]
    get_batch = nanogpt_train(checkout, *shape, *paths, *flags)["get_batch"]
    get_batch.__globals__["batch_size"] = config.batch_size  # set late: the script has evaluated its model with batches of 1
    return calls_per_second(lambda: get_batch("train"), config.seconds) * config.batch_size * config.seq_len


def open_and_serve(directory: Path, config: LoaderConfig) -> dict[str, float]:
    """Seconds to open a dataset, microseconds a batch for 200 random steps read twice, and the memory used."""
    before = memory()
    began = time.perf_counter()
    batches = our_batches(directory, config)
    opened = time.perf_counter() - began
    steps = np.random.default_rng(0).integers(batches.streams[0].num_windows(config.seq_len) // 480, size=200).tolist()
    served = []
    for _ in range(2):
        began = time.perf_counter()
        for step in steps:
            batches.batch(step, 0)
        served.append(1e6 * (time.perf_counter() - began) / len(steps))
    after = memory()
    grown = {f"{key} MB": after[key] - before[key] for key in after}
    return {"open s": opened, "first us a batch": served[0], "then us a batch": served[1]} | grown


def trained_wait(preset: str, tokens: Path, vocab_size: int) -> float:
    """The share of training time in which train.py waits for data, after the first steps."""
    lines = run_until(15, f"config/{preset}.toml", tokens=tokens, vocab_size=vocab_size, compile="off")[1][5:]
    return sum(line["data_wait_ms"] for line in lines) / sum(line["step_ms"] for line in lines)


def memory() -> dict[str, float]:
    """Memory of this process in MB: its own, and pages of mapped files, which the system can reclaim."""
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return {"own": int(resident["RssAnon"]) / 1000, "mapped": int(resident["RssFile"]) / 1000}


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(LoaderConfig, sys.argv[1:], __doc__))
