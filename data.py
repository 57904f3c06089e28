"""Which tokens a step sees.

The train shards of a dataset are one stream of N tokens. Window i is tokens [iT, iT + T]: T inputs and T targets shifted by
one, so there are n = (N - 1) // T windows. Sequence k of a dataset is window permute(k mod n) of epoch k // n. In every block
of 4,096 sequences of a run each of its datasets has its share, in a shuffled order. All of this is a pure function of (seed,
sequence): no position in the data needs saving, and the tokens of a step do not depend on the number of ranks.
"""

import functools
import itertools
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from common import files
from common.errors import UserError
from common.records import Auto
from dataset.tokens import Dataset, Stream, digest, open_dataset, read_windows
from settings import Config

ROUNDS = 6  # of the Feistel network
BLOCK = 4096  # sequences in which each dataset has its share: shares are whole numbers that add up to it


@dataclass(frozen=True)
class Mixture:
    """The datasets of a run, all of one tokenizer, and their shares. A run on a single dataset has a mixture of one."""

    datasets: tuple[Dataset, ...]
    shares: tuple[int, ...]  # how many of every BLOCK sequences come from each
    rounded: bool = False  # whether the shares are not exactly the weights that were asked for

    def __str__(self) -> str:
        parts = [f"{d.directory}:{share / BLOCK:g}" for d, share in zip(self.datasets, self.shares, strict=True)]
        return ",".join(parts) if len(parts) > 1 else str(self.datasets[0].directory)

    @property
    def vocab_size(self) -> int:
        """How many tokens the tokenizer has."""
        return self.datasets[0].vocab_size

    @property
    def eot_token(self) -> int | None:
        """The end-of-text token, or None if no dataset says which one it is."""
        return next((dataset.eot_token for dataset in self.datasets if dataset.eot_token is not None), None)

    def document_token(self, attend: str) -> int | None:
        """The token that starts a document, if tokens are to attend within documents. Raises UserError if it is not known.

        Files that end documents with it are the same: the document before predicts it, and nothing after it sees that document.
        """
        for dataset in self.datasets:
            if attend == "document" and dataset.eot_token is None:
                unknown = f"--attend=document: {dataset.directory} does not say which token separates documents"
                raise UserError(f"{unknown}; put the tokenizer.json of its tokens there, or use --attend=window")
        return self.eot_token if attend == "document" else None

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json, if one of the datasets has it."""
        return next((dataset.tokenizer for dataset in self.datasets if dataset.tokenizer), None)

    @property
    def remarks(self) -> list[str]:
        """What the user should know: what is assumed of the files, and weights that were rounded."""
        rounded = f"the weights of --tokens are rounded to 1/{BLOCK:,}: {self}"
        return [dataset.remark for dataset in self.datasets if dataset.remark] + [rounded] * self.rounded

    @property
    def identity(self) -> str:
        """sha256 of what the datasets hold and of their shares."""
        if len(self.datasets) == 1:
            return self.datasets[0].identity
        # Shares are hashed in units of 1/2^24: runs that began when shares were finer go on if theirs are the same.
        return digest([(dataset.identity, share * 4096) for dataset, share in zip(self.datasets, self.shares, strict=True)])

    @property
    def names(self) -> list[str]:
        """A name for each dataset: its directory's, or the whole path if two directories have the same name."""
        names = [dataset.directory.resolve().name for dataset in self.datasets]
        return names if len(set(names)) == len(names) else [str(dataset.directory) for dataset in self.datasets]

    @property
    def once(self) -> dict[str, float]:
        """After how many tokens of a run each dataset has been read once, by name."""
        parts = zip(self.names, self.streams("train"), self.shares, strict=True)
        return {name: len(stream) * BLOCK / share for name, stream, share in parts}

    def streams(self, split: str) -> list[Stream]:
        """A split of each dataset."""
        return [dataset.splits[split] for dataset in self.datasets]

    def validation(self, losses: list[float]) -> dict[str, float | None]:
        """What to record of the validation losses of the datasets: their mean, weighted by the shares, and each of several.

        Bits per byte is None if a dataset does not know its bytes.
        """
        sizes = [share / BLOCK * dataset.bytes_per_token for share, dataset in zip(self.shares, self.datasets, strict=True)]
        mean = sum(share / BLOCK * loss for share, loss in zip(self.shares, losses, strict=True))
        record = {"val_loss": mean, "val_bpb": mean / math.log(2) / sum(sizes) if all(sizes) else None}
        for name, dataset, loss in zip(self.names, self.datasets, losses, strict=True):
            if len(self.datasets) > 1:
                record |= {f"val_loss/{name}": loss, f"val_bpb/{name}": dataset.bits_per_byte(loss)}
        return record


def parse_mixture(tokens: str) -> list[tuple[str, Fraction]]:
    """The directory and weight of each dataset in `--tokens=tokens/web:0.8,tokens/code:0.2`. Raises UserError."""
    parts = [re.fullmatch(r"\s*(.+):(\d{0,20}\.?\d{1,20})\s*", part) for part in tokens.split(",")]
    if os.path.exists(tokens) or parts == [None]:  # one directory, whatever its name looks like
        return [(tokens, Fraction(1))]
    if not all(part and Fraction(part[2]) for part in parts):
        wanted = "each dataset of a mixture needs a weight greater than 0, as in tokens/web:0.8,tokens/code:0.2"
        raise UserError(f"--tokens={tokens}: {wanted}")
    return [(part[1], Fraction(part[2])) for part in parts]


def open_mixture(tokens: str, vocab_size: int | Auto = "auto", prepare_command: str = "") -> Mixture:
    """Open the datasets that --tokens names; see `open_dataset`. Raises UserError if their tokenizers differ."""
    directories, weights = zip(*parse_mixture(tokens), strict=True)
    vocab_size = 0 if vocab_size == "auto" else vocab_size
    datasets = tuple(open_dataset(directory, vocab_size, prepare_command) for directory in directories)
    first = datasets[0]
    for dataset in datasets[1:]:
        hashes = {files.sha256(d.tokenizer) for d in (first, dataset) if d.tokenizer}
        ends = {d.eot_token for d in (first, dataset)} - {None}
        if dataset.vocab_size != first.vocab_size or len(ends) > 1 or len(hashes) > 1:
            raise UserError(f"--tokens={tokens}: {first.directory} and {dataset.directory} were made with different tokenizers")
    shares = round_shares(weights)
    if not all(shares):
        raise UserError(f"--tokens={tokens}: a weight is too small; the smallest share is 1 of {BLOCK:,} sequences")
    rounded = any(share * sum(weights) != weight * BLOCK for share, weight in zip(shares, weights, strict=True))
    return Mixture(datasets, shares, rounded)


def round_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Weights as whole numbers that add up to BLOCK: rounded down, and the largest remainders up."""
    exact = [weight * BLOCK / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    for i in sorted(range(len(shares)), key=lambda i: shares[i] - exact[i])[: BLOCK - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def permute(index: np.ndarray, n: int, *key: int) -> np.ndarray:
    """Shuffle: a bijection of [0, n) that depends on `key`, computed for `index` [k] alone. It needs no table of n entries.

    A Feistel network over the next power of two, with the finalizer of splitmix64 as its round function. A value outside [0, n)
    is encrypted again until it falls inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
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


@functools.lru_cache(maxsize=4)
def mixed_block(block: int, shares: tuple[int, ...], seed: int) -> np.ndarray:
    """The sequences of the run from BLOCK * block on: the dataset of each, and its number in there. int64 [2, BLOCK]."""
    mixed = np.empty((2, BLOCK), np.int64)
    mixed[0] = np.repeat(np.arange(len(shares)), shares)[permute(np.arange(BLOCK), BLOCK, seed, block, len(shares))]
    for dataset, share in enumerate(shares):
        mixed[1, mixed[0] == dataset] = np.arange(block * share, (block + 1) * share)
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
            own = windows[datasets == dataset]  # consecutive numbers of sequences, replaced by those of their windows
            windows[datasets == dataset] = self.windows(dataset, int(own[0]), len(own))
        return datasets, windows

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
        block, rest = divmod(self.first_sequence(step), BLOCK)
        begun = np.bincount(mixed_block(block, self.shares, self.seed)[0, :rest], minlength=len(self.shares))
        parts = zip(self.streams, self.shares, begun.tolist(), strict=True)
        return [(block * share + more) / stream.num_windows(self.seq_len) for stream, share, more in parts]


def make_batches(config: Config, mixture: Mixture) -> Batches:
    """The batches of a run. Raises UserError unless each dataset has a window to train on and one to validate on."""
    for stream in mixture.streams("val"):
        stream.check_length(config.model.seq_len, "validation")
    sizes = config.model.seq_len, config.sequences_per_update, config.train.micro_batch_size
    order = config.run.seed, config.data.order == "shuffled", config.skipped_batches
    return Batches(mixture.streams("train"), mixture.shares, *sizes, *order)


class Prefetcher:
    """Builds the batches of a schedule of (step, micro-batch) ahead of time in a thread, and hands them out on the device."""

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
