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
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from lockstep.dataset.mixture import BLOCK, Mixture, Phases
from lockstep.dataset.tokens import Stream
from lockstep.settings import Config

ROUNDS = 6  # rounds of the Feistel network
Sizes = Sequence[tuple[int, int, int]]  # for each size of the batch: its first step, its first sequence, and its sequences


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


class Prefetcher:
    """Builds batches ahead of time in a thread, for a `schedule` of (step, micro-batch), and delivers them on the device."""

    def __init__(self, batches: Batches, schedule: Iterable[tuple[int, int]], device, depth: int = 4):
        self.device = device
        self.wait_seconds = 0.0  # how long the consumer has waited in total
        self._batches = batches
        self._pool = ThreadPoolExecutor(1)
        self._rest = ((micro_batch, self._pool.submit(self._build, step, micro_batch)) for step, micro_batch in schedule)
        self._pending = deque(itertools.islice(self._rest, depth))

    def _build(self, step: int, micro_batch: int):
        import torch  # imported here because preparing data does not need it

        tokens = torch.from_numpy(self._batches.batch(step, micro_batch))
        if self.device.type != "cuda":
            return tokens
        torch.cuda.set_device(self.device)  # a new thread defaults to device 0, and pinning memory would open a context there
        return tokens.pin_memory()

    def next(self) -> tuple:
        """Return the next micro-batch: its number in the global batch, and its inputs and targets on the device.

        Inputs and targets are int64 [micro_batch_size, seq_len].
        """
        began = time.perf_counter()
        micro_batch, future = self._pending.popleft()
        batch = future.result()
        self.wait_seconds += time.perf_counter() - began
        self._pending.extend(itertools.islice(self._rest, 1))
        # Copy asynchronously only from pinned memory: other memory may be freed before the device reads it (pytorch#189690).
        tokens = batch.to(self.device, non_blocking=self.device.type == "cuda")
        return micro_batch, tokens[:, :-1], tokens[:, 1:]

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(cancel_futures=True)


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return the dropout seed of a micro-batch, which is the same on any rank."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
