"""Token shards on disk, the stream of windows they form, and which windows a step sees.

The shards of a split are one stream of N tokens. Window i is tokens [iT, iT + T]: T inputs and T targets shifted by one, so
there are n = (N - 1) // T windows. Sequence q of the whole run is window permute(q mod n) of epoch q // n. This is a pure
function of (seed, q): no position in the data needs saving, and the tokens of a step do not depend on the number of ranks.
"""

import contextlib
import functools
import hashlib
import json
import mmap
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import files
from settings import UserError

HEADER_INTS = 256  # llm.c's header: magic, version, number of tokens, zeros
MAGICS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
GPT2_VOCAB_SIZE = 50257  # foreign shards do not say their vocabulary; theirs is GPT-2's
SCAN_TOKENS = 1 << 22  # opening checks the ids of so many tokens of a split, and samples a larger one


# ---------------------------------------------------------------------------------------------------------------------
# Shards


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int) -> str:
    """Publish `tokens` [n] as an llm.c token shard. Returns the sha256 of the file."""
    dtype = token_dtype(vocab_size)
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = *next(key for key, value in MAGICS.items() if value == dtype), len(tokens)
    body = np.ascontiguousarray(tokens, dtype=dtype)
    with files.publish(path) as file:
        file.write(header.tobytes())
        file.write(body)
    digest = hashlib.sha256(header.tobytes())
    digest.update(body)
    return digest.hexdigest()


def open_shard(path: Path) -> np.ndarray:
    """Map the tokens of a shard into memory: llm.c's .bin with either magic, nanoGPT's headerless .bin, or a .npy.

    Raises UserError if the file's size does not fit its header, or if a .npy is not one row of integers.
    """
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
                raise UserError(f"{path}: holds {tokens.dtype} {tokens.shape}; wanted one row of integer tokens")
            return map_tokens(path, tokens.dtype, tokens.offset, len(tokens))
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
        size = path.stat().st_size
        dtype = MAGICS.get(tuple(header[:2].tolist())) if len(header) == HEADER_INTS else None
        if dtype is None:
            if size % 2 or not size:
                raise UserError(f"{path}: {size} bytes are not whole uint16 tokens, and there is no llm.c header")
            return map_tokens(path, np.dtype("<u2"), 0, size // 2)
        wanted = HEADER_INTS * 4 + int(header[2]) * dtype.itemsize
        if size != wanted:
            raise UserError(f"{path}: its header promises {wanted} bytes, the file has {size}; copy or prepare it again")
        return map_tokens(path, dtype, HEADER_INTS * 4, int(header[2]))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def map_tokens(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """Map `count` tokens of a file, from byte `offset` on. The system reads a page when it is first touched.

    Reading ahead is switched off, because a shuffled order would load megabytes around every window. The result is a plain
    array: slicing an np.memmap takes ten times as long.
    """
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, dtype, count, offset)


def open_shards(paths: list[Path]) -> list[np.ndarray]:
    """Open all shards. Each one keeps a file open, and many systems allow only 1024 by default, so raise that limit."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # some systems have no such limit or do not let us change it
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = soft + len(paths)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    return [open_shard(path) for path in paths]


@dataclass(frozen=True)
class Stream:
    """The shards of one split as one stream of tokens."""

    paths: list[Path]
    shards: list[np.ndarray]
    vocab_size: int
    starts: np.ndarray = field(init=False)  # [shards + 1] position of each shard's first token

    def __post_init__(self):
        object.__setattr__(self, "starts", np.cumsum([0] + [len(shard) for shard in self.shards]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def num_windows(self, seq_len: int) -> int:
        """How many windows of `seq_len` inputs and as many targets the stream has."""
        return max(0, (len(self) - 1) // seq_len)

    def locate(self, position: int) -> tuple[Path, int]:
        """The shard that holds the token at `position` of the stream, and where in the shard it is."""
        shard = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self.paths[shard], position - int(self.starts[shard])

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy tokens [start, start + len(out)) into `out`, across shard boundaries."""
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            offset = start + filled - int(self.starts[shard])
            tokens = self.shards[shard][offset : offset + len(out) - filled]
            out[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            shard += 1

    def check(self, tokens: np.ndarray, where: str) -> None:
        """Raise UserError if a token id is outside the vocabulary. `where` names the tokens in the message."""
        if not len(tokens):
            return
        lowest, highest = int(tokens.min()) if tokens.dtype.kind == "i" else 0, int(tokens.max())
        if lowest < 0 or highest >= self.vocab_size:
            raise UserError(
                f"{where}: token {lowest if lowest < 0 else highest} is outside the vocabulary of {self.vocab_size}; "
                "--vocab_size=N says that it is larger, or the files are of another kind"
            )

    def check_ids(self) -> None:
        """Check every token id of a small split and a sample of a large one. Each batch is checked again when it is read."""
        share = max(1, SCAN_TOKENS // max(1, len(self.shards)))
        for path, shard in zip(self.paths, self.shards, strict=True):
            if len(shard) <= share:
                self.check(shard, str(path))
            else:
                for start in np.linspace(0, len(shard) - 1024, num=min(64, share // 1024), dtype=np.int64):
                    self.check(shard[start : start + 1024], str(path))


@dataclass(frozen=True)
class Dataset:
    """An opened dataset directory."""

    directory: Path
    vocab_size: int
    eot_token: int
    splits: dict[str, Stream]  # "train" and "val"
    bytes_of_text: dict[str, int]  # of each split; empty if the directory does not say
    identity: str  # sha256 of what the shards hold; the directory's name does not matter

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json of the directory, if there is one."""
        path = self.directory / "tokenizer.json"
        return path if path.exists() else None

    def bits_per_byte(self, loss: float, split: str = "val") -> float | None:
        """Convert `loss`, in nats per token, to bits per byte of text. None if the number of bytes is unknown."""
        if not self.bytes_of_text.get(split):
            return None
        return loss / float(np.log(2)) * len(self.splits[split]) / self.bytes_of_text[split]


def open_dataset(directory: str | Path, vocab_size: int = 0, prepare_command: str = "") -> Dataset:
    """Open a dataset directory and check sizes, counts and token ids. It has a dataset.json, or foreign token files.

    vocab_size: the vocabulary of foreign files, which do not state it (0: GPT-2's). prepare_command: what makes the dataset,
    if it names this directory as --out; the UserError for a missing directory prints it.
    """
    directory = Path(directory)
    if (directory / "dataset.json").exists():
        return _open_own(directory)
    if not directory.is_dir():
        if f"--out={directory}" not in prepare_command.split():
            prepare_command = f"python prepare_data.py [SOURCE ...] --out={directory}"
        raise UserError(f"--tokens={directory} does not exist; make it with: {prepare_command}")
    names = {split: _foreign_files(directory, split) for split in ("train", "val")}
    if not names["train"] or not names["val"]:
        raise UserError(
            f"--tokens={directory} has neither dataset.json nor *_train_*.bin and *_val_*.bin, *_train_*.npy and "
            "*_val_*.npy, or train.bin and val.bin; make a dataset with prepare_data.py"
        )
    vocab_size = vocab_size or GPT2_VOCAB_SIZE
    splits = {split: Stream(paths, open_shards(paths), vocab_size) for split, paths in names.items()}
    for stream in splits.values():
        stream.check_ids()
    sizes = [(path.name, path.stat().st_size) for paths in names.values() for path in paths]
    return Dataset(directory, vocab_size, min(GPT2_VOCAB_SIZE, vocab_size) - 1, splits, {}, _digest(sizes))


def _open_own(directory: Path) -> Dataset:
    path = directory / "dataset.json"
    metadata = files.read_json(path)
    try:
        if metadata["version"] != 1:
            raise UserError(f"{path}: version {metadata['version']}; this Lockstep reads version 1")
        splits, bytes_of_text = {}, {}
        for split in ("train", "val"):
            rows = [row for row in metadata["shards"] if row["split"] == split]
            paths = [directory / row["file"] for row in rows]
            if len({path.name for path in paths if path.parent == directory}) < len(rows):
                raise UserError(f"{path}: the {split} shards are not different files of this directory")
            splits[split] = Stream(paths, open_shards(paths), metadata["vocab_size"])
            for row, shard in zip(rows, splits[split].shards, strict=True):
                if len(shard) != row["tokens"]:
                    raise UserError(f"{directory / row['file']}: {len(shard)} tokens, dataset.json says {row['tokens']}")
            splits[split].check_ids()
            bytes_of_text[split] = sum(row["bytes_of_text"] for row in rows)
        identity = _digest([(row["split"], row["tokens"], row["sha256"]) for row in metadata["shards"]])
        return Dataset(directory, metadata["vocab_size"], metadata["eot_token"], splits, bytes_of_text, identity)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {type(error).__name__} {error}; prepare the dataset again") from None


def _foreign_files(directory: Path, split: str) -> list[Path]:
    for pattern in (f"*_{split}_*.bin", f"*_{split}_*.npy", f"{split}.bin"):
        if paths := sorted(directory.glob(pattern)):
            return paths
    return []


def _digest(value: list) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Which windows a step sees

ROUNDS = 6
BLOCK = 4096


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Shuffle: a bijection of [0, n) keyed by (seed, epoch), computed for `index` [k] alone. It needs no table of n entries.

    The method is a Feistel network over the next power of two. A value outside [0, n) is encrypted again until it falls
    inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The round function is the
    finalizer of splitmix64.
    """
    bits = max(2, (n - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64)

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


@functools.lru_cache(maxsize=4)
def permuted_block(block: int, n: int, seed: int, epoch: int) -> np.ndarray:
    """`permute` of the BLOCK indices from BLOCK * block on. numpy takes little longer for thousands than for ten."""
    return permute(np.arange(block * BLOCK, min(n, (block + 1) * BLOCK)), n, seed, epoch)


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)


@dataclass(frozen=True)
class Batches:
    """The tokens of each micro-batch of each step, as a pure function."""

    stream: Stream
    seq_len: int
    sequences_per_update: int
    micro_batch_size: int
    seed: int
    shuffled: bool = True
    skipped: tuple[int, ...] = ()  # batches that no step sees, in ascending order

    def __post_init__(self):
        if not self.stream.num_windows(self.seq_len):
            raise UserError(
                f"the split has {len(self.stream)} tokens, less than one window of --seq_len={self.seq_len} and its last "
                "target; prepare more text or lower --seq_len"
            )

    def windows(self, first: int, count: int) -> np.ndarray:
        """The windows [count] that sequences first ... first + count - 1 of the run are."""
        n = self.stream.num_windows(self.seq_len)
        out, filled = np.empty(count, dtype=np.int64), 0
        while filled < count:
            epoch, index = divmod(first + filled, n)
            if self.shuffled:
                part = permuted_block(index // BLOCK, n, self.seed, epoch)[index % BLOCK :][: count - filled]
            else:
                part = np.arange(index, min(n, index + count - filled))
            out[filled : filled + len(part)] = part
            filled += len(part)
        return out

    def tokens(self, windows: np.ndarray) -> np.ndarray:
        """Read windows: int64 [len(windows), seq_len + 1]. Inputs are [:, :-1], targets [:, 1:]."""
        out = np.empty((len(windows), self.seq_len + 1), dtype=self.stream.shards[0].dtype)
        for row, window in zip(out, windows.tolist(), strict=True):
            self.stream.read(window * self.seq_len, row)
        self.stream.check(out.reshape(-1), f"windows {windows.tolist()[:4]}... of {self.stream.paths[0].parent}")
        return out.astype(np.int64)

    def batch(self, step: int, micro_batch: int) -> np.ndarray:
        """The tokens of a micro-batch of update `step`. Micro-batches are numbered over the whole update, not within a rank."""
        first = self.first_sequence(step) + micro_batch * self.micro_batch_size
        return self.tokens(self.windows(first, self.micro_batch_size))

    def first_sequence(self, step: int) -> int:
        """The first sequence of update `step`, which takes the batch number `step` of those that are not skipped."""
        batch = step
        for skipped in self.skipped:
            batch += skipped <= batch
        return batch * self.sequences_per_update


class Prefetcher:
    """Builds batches ahead of time in a thread, and hands them out in order on the device.

    schedule: the (step, micro-batch) of each batch.
    """

    def __init__(self, batches: Batches, schedule: Iterable[tuple[int, int]], device, depth: int = 4):
        self.device = device
        self.wait_seconds = 0.0  # how long the consumer has waited in all
        self._queue = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._build, args=(batches, schedule), daemon=True)
        self._thread.start()

    def _build(self, batches: Batches, schedule: Iterable[tuple[int, int]]) -> None:
        import torch  # here, because preparing data does not need it

        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread has device 0, and pinning memory opens a context there
            for step, micro_batch in schedule:
                tokens = torch.from_numpy(batches.batch(step, micro_batch))
                self._put(tokens.pin_memory() if self.device.type == "cuda" else tokens)
                if self._stop.is_set():
                    return
        except BaseException as error:  # every error must reach the training loop instead of ending with the thread
            self._put(error)

    def _put(self, item) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def next(self) -> tuple:
        """The next batch: inputs and targets, each int64 [micro_batch_size, seq_len] on the device."""
        began = time.perf_counter()
        item = self._queue.get()
        self.wait_seconds += time.perf_counter() - began
        if isinstance(item, BaseException):
            raise item
        tokens = item.to(self.device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()
