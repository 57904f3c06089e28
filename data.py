"""Which tokens a step sees.

The train shards of a dataset form one stream of N tokens, which has n = (N - 1) // T windows. Window i is tokens [iT, iT + T]:
T inputs, and T targets shifted by one. Sequence k of a dataset belongs to epoch k // n, and is window permute(k mod n) there.
In a mixture, every block of 4,096 sequences contains each dataset's share, in shuffled order, and each dataset has its own
permutation. A phase changes the shares from a given step on, and each dataset carries on with its next sequence. All of this is
a pure function of (seed, sequence). So a run need not save its position in the data, and a step sees the same tokens on any
number of ranks. Only a run that begins from a checkpoint with another batch size records where it does, because a step alone no
longer says which sequences came before it.
"""

import bisect
import functools
import itertools
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from lockstep.common.errors import UserError
from lockstep.common.records import Auto
from lockstep.common.steps import read_phases
from lockstep.dataset.tokens import Dataset, Stream, digest, open_dataset
from lockstep.settings import Config, DataConfig

ROUNDS = 6  # rounds of the Feistel network
BLOCK = 4096  # sequences per block of a mixture; the shares are whole numbers that add up to this
Sizes = Sequence[tuple[int, int, int]]  # for each size of the batch: its first step, its first sequence, and its sequences
Phases = tuple[tuple[int, tuple[int, ...]], ...]  # for each phase: its first step, and the share of each dataset


@dataclass(frozen=True)
class Mixture:
    """The datasets of a run, all with the same tokenizer, and their shares. A single dataset is a mixture of one."""

    datasets: tuple[Dataset, ...]
    phases: Phases  # the first is --tokens, from step 0; datasets that only later phases use have a share of 0 there
    rounded: bool = False  # whether the shares differ from the requested weights

    def __str__(self) -> str:
        return self.describe(self.shares)

    def describe(self, shares: tuple[int, ...]) -> str:
        """Return the mixture in the syntax of --tokens."""
        parts = [(str(d.directory), share) for d, share in zip(self.datasets, shares, strict=True) if share]
        return ",".join(f"{name}:{share / BLOCK:g}" for name, share in parts) if len(parts) > 1 else parts[0][0]

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares in the first phase, --tokens."""
        return self.phases[0][1]

    @property
    def evaluated(self) -> int:
        """The number of datasets that share --eval_tokens: the ones in --tokens."""
        return sum(share > 0 for share in self.shares)

    @property
    def vocab_size(self) -> int:
        """The size of the tokenizer's vocabulary."""
        return self.datasets[0].vocab_size

    @property
    def eot_token(self) -> int | None:
        """The end-of-text token, or None if no dataset states it."""
        return next((dataset.eot_token for dataset in self.datasets if dataset.eot_token is not None), None)

    def document_token(self, attend: str) -> int | None:
        """Return the token that starts a document, for attention within documents. Raises UserError if it is unknown.

        Some files put this token at the end of documents instead. It is then predicted from the document that it ends, and the
        tokens after it don't see that document.
        """
        match attend:
            case "window":
                return None
            case "document":
                for dataset in self.datasets:
                    if dataset.eot_token is None:
                        unknown = f"--attend=document: {dataset.directory} does not say which token separates documents"
                        raise UserError(f"{unknown}; put its tokenizer.json there, or use --attend=window")
                return self.eot_token
            case other:
                raise AssertionError(f"--attend={other} is not implemented")

    @property
    def tokenizer(self) -> Path | None:
        """The first tokenizer.json among the datasets, or None."""
        return next((dataset.tokenizer for dataset in self.datasets if dataset.tokenizer), None)

    @property
    def remarks(self) -> list[str]:
        """Notes for the user: assumptions about the files, and rounded weights."""
        found = [dataset.remark for dataset in self.datasets if dataset.remark]
        if self.rounded:
            mixtures = "; ".join(self.describe(shares) for _, shares in self.phases)
            found.append(f"the weights of mixtures are rounded to 1/{BLOCK:,}: {mixtures}")
        return found

    @property
    def identity(self) -> str:
        """The sha256 of the contents and shares of --tokens, followed by ` STEP:SHA256` for each later phase."""
        return self._identity([dataset.identity for dataset in self.datasets])

    def translate(self, recorded: str) -> str:
        """Return an identity that a run recorded in today's form. Parts of it that are not of this mixture stay as they are."""
        earlier = self._identity([dataset.earlier_identity or dataset.identity for dataset in self.datasets])
        today = dict(zip(earlier.split(), self.identity.split(), strict=True))
        return " ".join(today.get(part, part) for part in recorded.split())

    def _identity(self, identities: list[str]) -> str:
        words = []
        for step, shares in self.phases:
            # Shares are hashed in units of 1/2^24, because the identity was recorded so when shares could be that fine.
            parts = [(i, identities[i], share * 4096) for i, share in enumerate(shares) if share]
            if step:
                words.append(f"{step}:{digest(parts)}")
            elif len(parts) == 1:
                words.append(parts[0][1])
            else:
                words.append(digest([part[1:] for part in parts]))
        return " ".join(words)

    @property
    def names(self) -> list[str]:
        """A name for each dataset: its directory's name, or the path if two directories share a name."""
        names = [dataset.directory.resolve().name for dataset in self.datasets]
        return names if len(set(names)) == len(names) else [str(dataset.directory) for dataset in self.datasets]

    def by_name(self, values: Iterable[float]) -> dict[str, float]:
        """Return a value for each dataset by its name."""
        return dict(zip(self.names, values, strict=True))

    @property
    def once(self) -> dict[str, float]:
        """After how many tokens of the run each dataset has been read once, by name. Ignores later phases."""
        parts = zip(self.names, self.streams("train"), self.shares, strict=True)
        return {name: len(stream) * BLOCK / share for name, stream, share in parts if share}

    def streams(self, split: str) -> list[Stream]:
        """Return the split of each dataset."""
        return [dataset.splits[split] for dataset in self.datasets]

    def validation(self, losses: list[float]) -> dict[str, float | None]:
        """Return the metrics record for the datasets' validation `losses`: the mean and, with several datasets, each one.

        The mean is always weighted by the shares of --tokens, so that it stays comparable across phases. Bits per byte is None
        if a dataset's size in bytes is unknown.
        """
        parts = [part for part in zip(self.shares, losses, self.datasets, strict=True) if part[0]]
        mean = sum(share / BLOCK * loss for share, loss, _ in parts)
        sizes = [share / BLOCK * dataset.bytes_per_token for share, _, dataset in parts]
        record = {"val_loss": mean, "val_bpb": mean / math.log(2) / sum(sizes) if all(sizes) else None}
        for name, dataset, loss in zip(self.names, self.datasets, losses, strict=True):
            if len(self.datasets) > 1:
                record |= {f"val_loss/{name}": loss, f"val_bpb/{name}": dataset.bits_per_byte(loss)}
        return record


def parse_mixture(tokens: str, flag: str) -> list[tuple[str, Fraction]]:
    """Return the directory and weight of each dataset in `tokens/web:0.8,tokens/code:0.2`. Raises UserError, naming `flag`."""
    parts = [re.fullmatch(r"\s*(.+):(\d{0,20}\.?\d{1,20})\s*", part) for part in tokens.split(",")]
    if os.path.exists(tokens) or parts == [None]:  # a single directory, even if its name looks like a mixture
        return [(tokens, Fraction(1))]
    if not all(part and Fraction(part[2]) for part in parts):
        wanted = "each dataset of a mixture needs a weight greater than 0, as in tokens/web:0.8,tokens/code:0.2"
        raise UserError(f"{flag}: {wanted}")
    return [(part[1], Fraction(part[2])) for part in parts]


def parse_mixtures(config: DataConfig) -> list[tuple[int, str, list[tuple[str, Fraction]]]]:
    """Return --tokens and each phase: its first step, its flag, and its directories with their weights. Raises UserError."""
    tokens = f"--tokens={config.tokens}"
    found = [(0, tokens, parse_mixture(config.tokens, tokens))]
    for step, text in read_phases(config.phase):
        flag = f"--phase={step}:{text}"
        found.append((step, flag, parse_mixture(text, flag)))
    return found


def directories(config: DataConfig) -> list[str]:
    """Return the directories named by --tokens and --phase, without duplicates. Raises UserError."""
    return list(dict.fromkeys(directory for _, _, parts in parse_mixtures(config) for directory, _ in parts))


def open_mixture(config: DataConfig, vocab_size: int | Auto = "auto") -> Mixture:
    """Open the datasets that --tokens and --phase name; see `open_dataset`. Raises UserError if their tokenizers differ."""
    opened = open_all(directories(config), 0 if vocab_size == "auto" else vocab_size)
    datasets, phases, rounded = [], [], False  # phases: the first step of each, and the shares by index in `datasets`
    for step, flag, parts in parse_mixtures(config):
        weights, shares = [weight for _, weight in parts], {}
        for (directory, weight), share in zip(parts, round_shares(weights), strict=True):
            if not share:
                raise UserError(f"{flag}: a weight is too small; every dataset needs at least 1 of {BLOCK:,} sequences")
            if share * sum(weights) != weight * BLOCK:
                rounded = True
            dataset = opened[directory]
            known = [i for i, d in enumerate(datasets) if i not in shares and d.directory.samefile(dataset.directory)]
            if known:  # a dataset from an earlier phase keeps its index
                shares[known[0]] = share
            else:
                shares[len(datasets)] = share
                datasets.append(dataset)
            for other in datasets:
                if other is not dataset:
                    check_tokenizers(other, dataset, flag)
        phases.append((step, shares))
    every = range(len(datasets))
    return Mixture(tuple(datasets), tuple((step, tuple(shares.get(i, 0) for i in every)) for step, shares in phases), rounded)


def open_all(paths: list[str], vocab_size: int) -> dict[str, Dataset]:
    """Open each dataset directory once. vocab_size: the model's, which may be padded (0: unknown)."""
    opened = {path: open_dataset(path, vocab_size) for path in paths}
    stated = [dataset.vocab_size for path, dataset in opened.items() if is_own(path)]
    for path, dataset in opened.items():
        if stated and dataset.vocab_size == vocab_size and not is_own(path):
            largest = max(stream.largest for stream in dataset.splits.values())
            if largest < stated[0] < vocab_size:  # its tokens have the same vocabulary as the datasets that state theirs
                opened[path] = open_dataset(path, stated[0])
    return opened


def open_if_there(config: Config) -> tuple[Mixture | None, int]:
    """Return the datasets of a run, or None if one is missing, and the size of the vocabulary (if unknown, GPT-2's)."""
    vocab_size = config.model.vocab_size
    if all(Path(directory).is_dir() for directory in directories(config.data)):
        mixture = open_mixture(config.data, vocab_size)
        return mixture, mixture.vocab_size
    return None, 50257 if vocab_size == "auto" else vocab_size


def is_own(directory: str) -> bool:
    """Return whether a dataset states its vocabulary, as those made by prepare_data.py do."""
    return Path(directory, "dataset.json").exists()


def check_tokenizers(first: Dataset, other: Dataset, flag: str) -> None:
    """Raise UserError if two datasets were clearly made with different tokenizers."""
    hashes = {d.tokenizer_sha256 for d in (first, other)} - {None}
    ends = {d.eot_token for d in (first, other)} - {None}
    if other.vocab_size != first.vocab_size or len(ends) > 1 or len(hashes) > 1:
        raise UserError(f"{flag}: {first.directory} and {other.directory} were made with different tokenizers")


def round_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Scale weights to whole numbers that add up to BLOCK: round all down, then up the ones with the largest remainders."""
    exact = [weight * BLOCK / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    for i in sorted(range(len(shares)), key=lambda i: shares[i] - exact[i])[: BLOCK - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def permute(index: np.ndarray, n: int, *key: int) -> np.ndarray:
    """Return where a shuffle of [0, n) maps each `index` [k]. `key` determines the shuffle, which needs no table of n entries.

    It is a Feistel network over the next power of two, whose round function is splitmix64's finalizer. A value outside [0, n)
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


@functools.lru_cache(maxsize=64)  # one or two blocks per dataset of a mixture
def permuted_block(block: int, n: int, *key: int) -> np.ndarray:
    """Return `permute` of a block of indices, from BLOCK * block on, because in numpy thousands cost hardly more than ten."""
    return permute(np.arange(block * BLOCK, min(n, (block + 1) * BLOCK)), n, *key)


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)


@functools.lru_cache(maxsize=64)  # for each phase, the blocks where it begins and ends
def mixed_block(block: int, shares: tuple[int, ...], seed: int) -> np.ndarray:
    """Return the dataset of each sequence in one block of the run, int64 [BLOCK]."""
    mixed = sum(share > 0 for share in shares)
    return np.repeat(np.arange(len(shares)), shares)[permute(np.arange(BLOCK), BLOCK, seed, block, mixed)]


@dataclass(frozen=True)
class Batches:
    """The tokens of each micro-batch of each step, as a pure function."""

    streams: list[Stream]  # one per dataset
    phases: Phases
    seq_len: int
    sequences_per_update: int
    micro_batch_size: int
    seed: int
    shuffled: bool = True
    skipped: tuple[int, ...] = ()  # batches that no step uses, in ascending order
    own_orders: bool = False  # whether each dataset has its own shuffle; otherwise, datasets of equal length share one
    sizes: Sizes = ()  # the sizes of the batch so far, if it has changed; the last is `sequences_per_update`

    def __post_init__(self):
        for stream in self.streams:
            stream.check_length(self.seq_len, "train")

    def sequences(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset and window, [count] each, of the sequences in [first, first + count), all of one phase."""
        shares = self.phases[self.phase(first)][1]
        blocks = range(first // BLOCK, (first + count - 1) // BLOCK + 1)
        datasets = np.concatenate([mixed_block(block, shares, self.seed) for block in blocks])[first % BLOCK :][:count]
        windows, read = np.empty(count, np.int64), self.read(first)
        for dataset in set(datasets.tolist()):
            mine = datasets == dataset
            windows[mine] = self.windows(dataset, int(read[dataset]), np.count_nonzero(mine))
        return datasets, windows

    def phase(self, sequence: int) -> int:
        """Return the index of the phase that contains a sequence of the run."""
        return bisect.bisect(self.starts, sequence) - 1

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first sequence of each phase: the one that follows the batch of the last step before the phase."""
        return [self.reached(step) for step, _ in self.phases]

    def read(self, sequence: int) -> np.ndarray:
        """Return how many of the sequences before this one come from each dataset, int64 [datasets]."""
        last, read = self.phase(sequence), 0
        for phase in range(last + 1):
            end = sequence if phase == last else self.starts[phase + 1]
            read = read + self.count(phase, end) - self.count(phase, self.starts[phase])
        return read

    def count(self, phase: int, sequence: int) -> np.ndarray:
        """Return what `read` would return if the shares of `phase` had always applied."""
        shares = self.phases[phase][1]
        blocks, rest = divmod(sequence, BLOCK)
        read = blocks * np.array(shares)
        if rest:
            read += np.bincount(mixed_block(blocks, shares, self.seed)[:rest], minlength=len(shares))
        return read

    def windows(self, dataset: int, first: int, count: int) -> np.ndarray:
        """Return the windows [count] of a dataset's sequences in [first, first + count)."""
        n = self.streams[dataset].num_windows(self.seq_len)
        if not self.shuffled:
            return np.arange(first, first + count) % n
        parts, end = [], first + count
        while first < end:
            epoch, index = divmod(first, n)
            key = (self.seed, epoch)
            if self.own_orders and dataset > 0:  # the first dataset has the same shuffle either way, and so has a dataset alone
                key += (0, dataset)
            parts.append(permuted_block(index // BLOCK, n, *key)[index % BLOCK :][: end - first])
            first += len(parts[-1])
        return np.concatenate(parts)

    def batch(self, step: int, micro_batch: int) -> np.ndarray:
        """Return the tokens of a micro-batch of update `step`: int64 [micro_batch_size, seq_len + 1].

        Inputs are [:, :-1], targets [:, 1:]. Micro-batches are numbered over the whole update, not within a rank.
        """
        first = self.first_sequence(step) + micro_batch * self.micro_batch_size
        datasets, windows = self.sequences(first, self.micro_batch_size)
        places = zip(datasets.tolist(), windows.tolist(), strict=True)
        return np.stack([self.streams[dataset].read_window(window, self.seq_len) for dataset, window in places])

    def batch_number(self, step: int) -> int:
        """Return the number of the batch that update `step` uses: `step`, moved past every skipped batch before it."""
        batch = step
        for skipped in self.skipped:
            if skipped <= batch:
                batch += 1
        return batch

    def first_sequence(self, step: int) -> int:
        """Return the first sequence of update `step`."""
        return self.first_of_batch(self.batch_number(step))

    def reached(self, step: int) -> int:
        """Return the sequence after the last one of the first `step` updates."""
        return self.first_of_batch(self.batch_number(step - 1) + 1)

    def first_of_batch(self, batch: int) -> int:
        """Return the first sequence of a batch."""
        first_batch, first_sequence, size = 0, 0, self.sequences_per_update
        for step, sequence, sequences in self.sizes:
            begins = self.batch_number(step - 1) + 1
            if begins <= batch:
                first_batch, first_sequence, size = begins, sequence, sequences
        return first_sequence + (batch - first_batch) * size

    def epochs(self, step: int) -> list[float]:
        """Return how many epochs of each dataset the first `step` updates read."""
        read = self.read(self.first_sequence(step)).tolist()
        return [count / stream.num_windows(self.seq_len) for count, stream in zip(read, self.streams, strict=True)]


def make_batches(config: Config, mixture: Mixture, sizes: Sizes = (), own_orders: bool = True) -> Batches:
    """Return the batches of a run. Raises UserError if a dataset is too short for one training and one validation window.

    sizes, own_orders: see `Batches`.
    """
    for stream in mixture.streams("val"):
        stream.check_length(config.model.seq_len, "validation")
    return Batches(
        streams=mixture.streams("train"),
        phases=mixture.phases,
        seq_len=config.model.seq_len,
        sequences_per_update=config.sequences_per_update,
        micro_batch_size=config.train.micro_batch_size,
        seed=config.run.seed,
        shuffled={"shuffled": True, "sequential": False}[config.data.order],
        skipped=config.skipped_batches,
        own_orders=own_orders,
        sizes=sizes,
    )


def sizes_from(step: int, sizes: Sizes, before: Config, config: Config) -> Sizes:
    """Return the sizes of the batch in a run that goes on from `step` as `config` (see `Batches`).

    sizes, before: its sizes and its settings until then.
    """
    if before.sequences_per_update == config.sequences_per_update:
        return sizes
    sizes = sizes or [(0, 0, before.sequences_per_update)]
    batches = Batches([], (), 0, before.sequences_per_update, 1, 0, skipped=before.skipped_batches, sizes=sizes)
    return [*sizes, (step, batches.reached(step), config.sequences_per_update)]


def describe(mixture: Mixture, batches: Batches, steps: int) -> list[str]:
    """Return what a run of `steps` reads: a line for each dataset, and one for each later phase."""
    lines = []
    for i, (dataset, epochs) in enumerate(zip(mixture.datasets, batches.epochs(steps), strict=True)):
        tokens = len(batches.streams[i])
        line = f"tokens  {tokens:,} to train on in {dataset.directory}; the run reads them {epochs:.2f} times"
        if len(mixture.datasets) > 1:
            percents = [f"{100 * shares[i] / BLOCK:.3g}" for _, shares in mixture.phases]
            line += f", for {', then '.join(percents)} % of its sequences"
        lines.append(line)
    return lines + [f"phase   after step {step}: {mixture.describe(shares)}" for step, shares in mixture.phases[1:]]


def planned(config: Config) -> tuple[int, Callable[[Config, int], dict[str, float]]]:
    """Return what a plan must know of the data: the vocabulary's size, and how many epochs of each dataset so many steps read.

    The latter is a function of settings and steps, and empty if a dataset is missing.
    """
    mixture, vocab_size = open_if_there(config)

    def epochs(config: Config, steps: int) -> dict[str, float]:
        if mixture is None:
            return {}
        return mixture.by_name(make_batches(config, mixture).epochs(steps))

    return vocab_size, epochs


class Prefetcher:
    """Builds batches ahead of time in a thread, for a `schedule` of (step, micro-batch), and delivers them on the device."""

    def __init__(self, batches: Batches, schedule: Iterable[tuple[int, int]], device, depth: int = 4):
        self.device = device
        self.wait_seconds = 0.0  # how long the consumer has waited in total
        self._batches = batches
        self._pool = ThreadPoolExecutor(1)
        self._rest = (self._pool.submit(self._build, *place) for place in schedule)
        self._pending = deque(itertools.islice(self._rest, depth))

    def _build(self, step: int, micro_batch: int):
        import torch  # imported here because preparing data does not need it

        tokens = torch.from_numpy(self._batches.batch(step, micro_batch))
        if self.device.type != "cuda":
            return tokens
        torch.cuda.set_device(self.device)  # a new thread defaults to device 0, and pinning memory would open a context there
        return tokens.pin_memory()

    def next(self) -> tuple:
        """Return the next batch: inputs and targets, each int64 [micro_batch_size, seq_len] on the device."""
        began = time.perf_counter()
        batch = self._pending.popleft().result()
        self.wait_seconds += time.perf_counter() - began
        self._pending.extend(itertools.islice(self._rest, 1))
        # Copy asynchronously only from pinned memory: other memory may be freed before the device reads it (pytorch#189690).
        tokens = batch.to(self.device, non_blocking=self.device.type == "cuda")
        return tokens[:, :-1], tokens[:, 1:]

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(cancel_futures=True)


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return the dropout seed of a micro-batch, which is the same on any rank."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
