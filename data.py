"""Which tokens a step sees.

The train shards of a dataset are one stream of N tokens. Window i is tokens [iT, iT + T]: T inputs and T targets shifted by
one, so there are n = (N - 1) // T windows. Sequence k of a dataset is window permute(k mod n) of epoch k // n. A run takes its
sequences from one or several datasets: in every block of 4,096 each dataset has its share, in a shuffled order. All of this is
a pure function of (seed, sequence): no position in the data needs saving, and the tokens of a step do not depend on the number
of ranks.
"""

import functools
import itertools
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from common import files
from common.errors import UserError
from dataset.tokens import Dataset, Stream, digest, open_dataset, read_windows
from settings import Config

ROUNDS = 6  # of the Feistel network
BLOCK = 4096  # sequences in which each dataset has its share
PERIOD = 4096  # blocks after which the shares come out exactly
SHARES = BLOCK * PERIOD  # shares of a mixture are whole numbers that add up to this


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures of datasets


@dataclass(frozen=True)
class Mixture:
    """The datasets of a run, all of one tokenizer, and their shares. A run on a single dataset has a mixture of one."""

    datasets: tuple[Dataset, ...]
    shares: tuple[int, ...]  # how many of SHARES sequences come from each

    def __str__(self) -> str:
        parts = (f"{d.directory}:{share / SHARES:g}" for d, share in zip(self.datasets, self.shares, strict=True))
        return ",".join(parts) if len(self.datasets) > 1 else str(self.datasets[0].directory)

    @property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer has."""
        return self.datasets[0].vocab_size

    @property
    def eot_token(self) -> int:
        """The end-of-text token."""
        return self.datasets[0].eot_token

    def document_token(self, attend: str) -> int | None:
        """The token that starts a document, if tokens are to attend within documents. Raises UserError without such a token."""
        if attend == "window":
            return None
        if self.eot_token >= self.vocab_size:
            raise UserError(f"--attend=document: {self} has no end-of-text tokens, which start documents; use --attend=window")
        return self.eot_token

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json, if one of the datasets has it."""
        return next((dataset.tokenizer for dataset in self.datasets if dataset.tokenizer), None)

    @property
    def identity(self) -> str:
        """sha256 of what the shards hold and of the shares; the directories' names do not matter."""
        if len(self.datasets) == 1:
            return self.datasets[0].identity
        return digest([(dataset.identity, share) for dataset, share in zip(self.datasets, self.shares, strict=True)])

    @property
    def names(self) -> list[str]:
        """A name for each dataset: its directory's, or the whole path if two directories have the same name."""
        names = [dataset.directory.resolve().name for dataset in self.datasets]
        return names if len(set(names)) == len(names) else [str(dataset.directory) for dataset in self.datasets]

    @property
    def once(self) -> dict[str, float]:
        """After how many tokens of a run each dataset has been read once, by name."""
        parts = zip(self.names, self.streams("train"), self.shares, strict=True)
        return {name: len(stream) * SHARES / share for name, stream, share in parts}

    def streams(self, split: str) -> list[Stream]:
        """A split of each dataset."""
        return [dataset.splits[split] for dataset in self.datasets]

    def validation(self, losses: list[float]) -> dict[str, float | None]:
        """What to record of the validation losses of the datasets: those of the mixture, and of each dataset if it has several.

        The loss of the mixture is the mean, weighted by the shares. Bits per byte is None if a dataset does not know its bytes.
        """
        weights = [share / SHARES for share in self.shares]
        sizes = [weight * dataset.bytes_per_token for weight, dataset in zip(weights, self.datasets, strict=True)]
        loss = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
        record = {"val_loss": loss, "val_bpb": loss / math.log(2) / sum(sizes) if all(sizes) else None}
        for name, dataset, loss in zip(self.names, self.datasets, losses, strict=True):
            if len(self.datasets) > 1:
                record |= {f"val_loss/{name}": loss, f"val_bpb/{name}": dataset.bits_per_byte(loss)}
        return record


def parse_mixture(tokens: str) -> list[tuple[str, Fraction]]:
    """The directory and weight of each dataset in `--tokens=tokens/web:0.8,tokens/code:0.2`. Raises UserError."""
    if os.path.exists(tokens):  # whatever its name looks like
        return [(tokens, Fraction(1))]
    parts = [re.fullmatch(r"\s*(.+):(\d{0,20}\.?\d{1,20})\s*", part) for part in tokens.split(",")]
    if all(part and Fraction(part[2]) for part in parts):
        return [(part[1], Fraction(part[2])) for part in parts]
    if len(parts) == 1:
        return [(tokens, Fraction(1))]
    raise UserError(
        f"--tokens={tokens}: each dataset of a mixture needs a weight greater than 0, as in tokens/web:0.8,tokens/code:0.2"
    )


def open_mixture(tokens: str, vocab_size: int = 0, prepare_command: str = "") -> Mixture:
    """Open the datasets that --tokens names; see `open_dataset`. Raises UserError if their tokenizers differ."""
    directories, weights = zip(*parse_mixture(tokens), strict=True)
    datasets = tuple(open_dataset(directory, vocab_size, prepare_command) for directory in directories)
    first = datasets[0]
    for dataset in datasets[1:]:
        hashes = {files.sha256(d.tokenizer) for d in (first, dataset) if d.tokenizer}
        if (dataset.vocab_size, dataset.eot_token) != (first.vocab_size, first.eot_token) or len(hashes) > 1:
            raise UserError(f"--tokens={tokens}: {first.directory} and {dataset.directory} were made with different tokenizers")
    shares = round_shares(weights)
    if not all(shares):
        raise UserError(f"--tokens={tokens}: a weight is too small; the smallest share is 1 of {SHARES:,} sequences")
    return Mixture(datasets, shares)


def round_shares(weights: Iterable[Fraction]) -> tuple[int, ...]:
    """Weights as whole numbers that add up to SHARES: rounded down, and the largest remainders up."""
    weights = list(weights)
    exact = [weight * SHARES / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    for i in sorted(range(len(shares)), key=lambda i: shares[i] - exact[i])[: SHARES - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


# ---------------------------------------------------------------------------------------------------------------------
# The order of sequences


def permute(index: np.ndarray, n: int, *key: int) -> np.ndarray:
    """Shuffle: a bijection of [0, n) that depends on `key`, computed for `index` [k] alone. It needs no table of n entries.

    The method is a Feistel network over the next power of two. A value outside [0, n) is encrypted again until it falls
    inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The round function is the
    finalizer of splitmix64.
    """
    bits = max(2, (n - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def encrypt(value: np.ndarray) -> np.ndarray:
        high, low = value >> low_bits, value & low_mask
        for i in range(0, ROUNDS, 2):
            high = high ^ _mix(low + keys[i]) & high_mask
            low = low ^ _mix(high + keys[i + 1]) & low_mask
        return high << low_bits | low

    value = encrypt(np.asarray(index, dtype=np.uint64))
    while (outside := value >= n).any():
        value[outside] = encrypt(value[outside])
    return value.astype(np.int64)


@functools.lru_cache(maxsize=64)  # one or two for each dataset of a mixture
def permuted_block(block: int, n: int, seed: int, epoch: int) -> np.ndarray:
    """`permute` of the BLOCK indices from BLOCK * block on. numpy takes little longer for thousands than for ten."""
    return permute(np.arange(block * BLOCK, min(n, (block + 1) * BLOCK)), n, seed, epoch)


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)


def sequences_before(block: int, shares: tuple[int, ...]) -> np.ndarray:
    """How many sequences of each dataset there are in the blocks before `block`: int64 [datasets].

    Each dataset has its share of these sequences to within one, and its share of every single block to within one.
    """
    periods, rest = divmod(block, PERIOD)
    every_block = np.array(shares) // PERIOD
    return periods * np.array(shares) + rest * every_block + extra_sequences(shares)[rest]


@functools.lru_cache(maxsize=4)
def extra_sequences(shares: tuple[int, ...]) -> np.ndarray:
    """How many of the first 0, 1, ... PERIOD blocks give each dataset one sequence more: int64 [PERIOD + 1, datasets].

    A dataset's share of a block is seldom a whole number. It is rounded down, and the sequences that remain are given out
    one by one: to a dataset at most one in a block, and each within its own window of blocks, so that the dataset is never a
    whole sequence ahead or behind. This is the fair scheduling of periodic tasks. Algorithm PF always succeeds: in each
    block, serve those whose windows end first (Baruah, Cohen, Plaxton and Varvel, "Proportionate Progress", 1996).
    """
    rates = [share % PERIOD for share in shares]  # extra sequences in a period
    per_block = sum(rates) // PERIOD
    given = [0] * len(rates)
    table = np.zeros((PERIOD + 1, len(rates)), np.int64)

    def is_open(i: int, block: int) -> bool:
        return rates[i] > 0 and given[i] * PERIOD // rates[i] <= block

    def compare(i: int, j: int) -> int:
        """Negative if dataset i is served before dataset j."""
        if (rates[i], given[i]) == (rates[j], given[j]):
            return 0
        for ahead in itertools.count(1):
            ends = [divmod(-(given[d] + ahead) * PERIOD, rates[d]) for d in (i, j)]
            keys = [(-end, rest == 0) for end, rest in ends]  # of equal ends, one whose next window overlaps is first
            if keys[0] != keys[1] or keys[0][1]:
                return (keys[0] > keys[1]) - (keys[0] < keys[1])

    for block in range(PERIOD):
        candidates = [i for i in range(len(rates)) if is_open(i, block)]
        for i in sorted(candidates, key=functools.cmp_to_key(compare))[:per_block]:
            given[i] += 1
        table[block + 1] = given
    return table


@functools.lru_cache(maxsize=4)
def mixed_block(block: int, shares: tuple[int, ...], seed: int) -> np.ndarray:
    """The sequences of the run from BLOCK * block on: the dataset of each, and its number in there. int64 [2, BLOCK]."""
    first, end = sequences_before(block, shares), sequences_before(block + 1, shares)
    mixed = np.empty((2, BLOCK), np.int64)
    mixed[0] = np.repeat(np.arange(len(shares)), end - first)[permute(np.arange(BLOCK), BLOCK, seed, block, len(shares))]
    for dataset in range(len(shares)):
        mixed[1, mixed[0] == dataset] = np.arange(first[dataset], end[dataset])
    return mixed


@dataclass(frozen=True)
class Batches:
    """The tokens of each micro-batch of each step, as a pure function."""

    streams: list[Stream]  # one for each dataset
    shares: tuple[int, ...]
    seq_len: int
    sequences_per_update: int
    micro_batch_size: int
    seed: int
    shuffled: bool = True
    skipped: tuple[int, ...] = ()  # batches that no step sees, in ascending order

    def __post_init__(self):
        for stream in self.streams:
            stream.check_length(self.seq_len, "train")

    def sequences(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Which datasets [count] and windows [count] the sequences first ... first + count - 1 of the run are."""
        blocks = range(first // BLOCK, (first + count - 1) // BLOCK + 1)
        mixed = np.concatenate([mixed_block(block, self.shares, self.seed) for block in blocks], axis=1)
        datasets, windows = mixed[:, first % BLOCK :][:, :count]
        for dataset in set(datasets.tolist()):
            mask = datasets == dataset
            own = windows[mask]  # consecutive numbers of sequences, replaced by those of their windows
            windows[mask] = self.windows(dataset, int(own[0]), len(own))
        return datasets, windows

    def sequences_read(self, count: int) -> list[int]:
        """How many of the first `count` sequences of the run are of each dataset."""
        block, rest = divmod(count, BLOCK)
        begun = mixed_block(block, self.shares, self.seed)[0, :rest]
        return (sequences_before(block, self.shares) + np.bincount(begun, minlength=len(self.shares))).tolist()

    def windows(self, dataset: int, first: int, count: int) -> np.ndarray:
        """The windows [count] that sequences first ... first + count - 1 of a dataset are."""
        n = self.streams[dataset].num_windows(self.seq_len)
        if not self.shuffled:
            return np.arange(first, first + count) % n
        parts, end = [], first + count
        while first < end:
            epoch, index = divmod(first, n)
            parts.append(permuted_block(index // BLOCK, n, self.seed, epoch)[index % BLOCK :][: end - first])
            first += len(parts[-1])
        return np.concatenate(parts)

    def batch(self, step: int, micro_batch: int) -> np.ndarray:
        """The tokens of a micro-batch of update `step`: int64 [micro_batch_size, seq_len + 1].

        Inputs are [:, :-1], targets [:, 1:]. Micro-batches are numbered over the whole update, not within a rank.
        """
        first = self.first_sequence(step) + micro_batch * self.micro_batch_size
        return read_windows(self.streams, *self.sequences(first, self.micro_batch_size), self.seq_len)

    def batch_number(self, step: int) -> int:
        """The batch that update `step` takes: number `step` of those that are not skipped."""
        batch = step
        for skipped in self.skipped:
            batch += skipped <= batch
        return batch

    def first_sequence(self, step: int) -> int:
        """The first sequence of update `step`."""
        return self.batch_number(step) * self.sequences_per_update

    def epochs(self, step: int) -> list[float]:
        """How many times the first `step` updates read each dataset."""
        counts = self.sequences_read(self.first_sequence(step))
        return [n / stream.num_windows(self.seq_len) for n, stream in zip(counts, self.streams, strict=True)]


def make_batches(config: Config, mixture: Mixture) -> Batches:
    """The batches of a run. Raises UserError unless each dataset has a window to train on and one to validate on."""
    for stream in mixture.streams("val"):
        stream.check_length(config.model.seq_len, "validation")
    return Batches(
        mixture.streams("train"),
        mixture.shares,
        config.model.seq_len,
        config.sequences_per_update,
        config.train.micro_batch_size,
        config.run.seed,
        shuffled=config.data.order == "shuffled",
        skipped=config.skipped_batches,
    )


class Prefetcher:
    """Builds batches ahead of time in a thread, and hands them out in order on the device.

    schedule: the (step, micro-batch) of each batch.
    """

    def __init__(self, batches: Batches, schedule: Iterable[tuple[int, int]], device, depth: int = 4):
        self.device = device
        self.wait_seconds = 0.0  # how long the consumer has waited in all
        self._batches = batches
        self._pool = ThreadPoolExecutor(1)
        self._rest = (self._pool.submit(self._build, *place) for place in schedule)
        self._pending = deque(itertools.islice(self._rest, depth))

    def _build(self, step: int, micro_batch: int):
        import torch  # here, because preparing data does not need it

        tokens = torch.from_numpy(self._batches.batch(step, micro_batch))
        if self.device.type != "cuda":
            return tokens
        torch.cuda.set_device(self.device)  # a new thread has device 0, and pinning memory opens a context there
        return tokens.pin_memory()

    def next(self) -> tuple:
        """The next batch: inputs and targets, each int64 [micro_batch_size, seq_len] on the device."""
        began = time.perf_counter()
        batch = self._pending.popleft().result()
        self.wait_seconds += time.perf_counter() - began
        self._pending.extend(itertools.islice(self._rest, 1))
        # From pinned memory. Other memory may be freed before a device that is not awaited has read it (pytorch#189690).
        tokens = batch.to(self.device, non_blocking=self.device.type == "cuda")
        return tokens[:, :-1], tokens[:, 1:]

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(cancel_futures=True)


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The random state for the dropout of a micro-batch, the same whichever rank computes it."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
