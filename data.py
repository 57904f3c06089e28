"""Token shards on disk, the stream of windows they form, and which windows a step sees.

The shards of a split are one stream of N tokens. Window i is tokens [iT, iT + T]: T inputs and T targets shifted by one, so
there are (N - 1) // T windows. Sequence q of the whole run is window permute(q mod n) of epoch q // n. All of it is a pure
function of (seed, q): nothing about data is ever saved, and the tokens of a step do not depend on the number of ranks.
"""

import contextlib
import functools
import hashlib
import json
import mmap
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from settings import UserError

HEADER_INTS = 256  # llm.c's header: magic, version, number of tokens, zeros
MAGICS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
GPT2_VOCAB_SIZE = 50257  # foreign shards do not say their vocabulary; theirs is GPT-2's
SCAN_TOKENS = 1 << 22  # tokens of a split whose ids are checked on opening; a larger split is sampled


# ---------------------------------------------------------------------------------------------------------------------
# Shards


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int) -> str:
    """Publish `tokens` [n] as an llm.c token shard by rename; returns the sha256 of the file."""
    dtype = token_dtype(vocab_size)
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = *next(key for key, value in MAGICS.items() if value == dtype), len(tokens)
    body = np.ascontiguousarray(tokens, dtype=dtype)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(header.tobytes())
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    digest = hashlib.sha256(header.tobytes())
    digest.update(body)
    return digest.hexdigest()


def open_shard(path: Path) -> np.ndarray:
    """The tokens of a shard, memory-mapped: llm.c's .bin with either magic, nanoGPT's headerless .bin, or a .npy.

    Raises UserError when the size does not fit the header or the array is not a row of unsigned integers.
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
    """`count` tokens of a file from byte `offset` on, which the system reads when they are looked at.

    It is told not to read ahead: around every window of a shuffled order that would be megabytes. And it is a plain array:
    slicing an np.memmap takes ten times as long.
    """
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        pages.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(pages, dtype, count, offset)


def open_shards(paths: list[Path]) -> list[np.ndarray]:
    """All of them, each of which keeps a file open, for more than the 1024 that many systems allow by default."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # a system that has no such limit, or does not let us
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

    def windows(self, seq_len: int) -> int:
        """Windows of seq_len inputs and as many targets."""
        return max(0, (len(self) - 1) // seq_len)

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy tokens [start, start + len(out)) into `out`, across shard boundaries."""
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            offset = start + filled - int(self.starts[shard])
            piece = self.shards[shard][offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1

    def check(self, tokens: np.ndarray, where: str) -> None:
        """Raise UserError if a token id is outside the vocabulary."""
        if len(tokens) and int(tokens.max()) >= self.vocab_size:
            raise UserError(
                f"{where}: token {int(tokens.max())} is outside the vocabulary of {self.vocab_size}; "
                "--vocab_size=N says that it is larger, or the files are of another kind"
            )

    def check_ids(self) -> None:
        """Check every token id of a small split, a sample of those of a large one (batches are checked as they are read)."""
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
    splits: dict[str, Stream]
    bytes_of_text: dict[str, int]  # per split; empty where the directory does not say
    identity: str  # sha256 over what the shards are, whatever the directory is called

    @property
    def tokenizer(self) -> Path | None:
        """Its tokenizer.json, if there is one."""
        path = self.directory / "tokenizer.json"
        return path if path.exists() else None

    def bits_per_byte(self, loss: float, split: str = "val") -> float | None:
        """`loss` in nats a token as bits per byte of text; None where the bytes are not known."""
        if not self.bytes_of_text.get(split):
            return None
        return loss / float(np.log(2)) * len(self.splits[split]) / self.bytes_of_text[split]


def open_dataset(directory: str | Path, vocab_size: int = 0, prepare_command: str = "") -> Dataset:
    """Open a dataset directory, ours (dataset.json) or foreign token files, and check sizes, counts and token ids.

    vocab_size: what foreign files, which do not say it, are held to (0: GPT-2's). prepare_command: what makes the dataset, if
    it names this directory as --out; the UserError for a missing directory prints it.
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
    splits = {s: Stream(paths, open_shards(paths), vocab_size) for s, paths in names.items()}
    for stream in splits.values():
        stream.check_ids()
    told = [(path.name, path.stat().st_size) for paths in names.values() for path in paths]
    return Dataset(directory, vocab_size, min(GPT2_VOCAB_SIZE, vocab_size) - 1, splits, {}, _digest(told))


def _open_own(directory: Path) -> Dataset:
    path = directory / "dataset.json"
    try:
        told = json.loads(path.read_text())
        if told["version"] != 1:
            raise UserError(f"{path}: version {told['version']}; this Lockstep reads version 1")
        splits = {}
        for split in ("train", "val"):
            rows = [row for row in told["shards"] if row["split"] == split]
            paths = [directory / row["file"] for row in rows]
            splits[split] = Stream(paths, open_shards(paths), told["vocab_size"])
            for row, shard in zip(rows, splits[split].shards, strict=True):
                if len(shard) != row["tokens"]:
                    raise UserError(f"{directory / row['file']}: {len(shard)} tokens, dataset.json says {row['tokens']}")
            splits[split].check_ids()
        text = {s: sum(row["bytes_of_text"] for row in told["shards"] if row["split"] == s) for s in splits}
        identity = _digest([(row["split"], row["tokens"], row["sha256"]) for row in told["shards"]])
        return Dataset(directory, told["vocab_size"], told["eot_token"], splits, text, identity)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {type(error).__name__} {error}; prepare the dataset again") from None


def _foreign_files(directory: Path, split: str) -> list[Path]:
    for pattern in (f"*_{split}_*.bin", f"*_{split}_*.npy", f"{split}.bin"):
        if files := sorted(directory.glob(pattern)):
            return files
    return []


def _digest(told: list) -> str:
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Which windows a step sees

ROUNDS = 6
BLOCK = 4096


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """A keyed bijection of [0, n): where `index` [k] stands in the shuffled order of this epoch, in O(1) memory an index.

    A Feistel network over the next power of two, with cycle walking back into [0, n): Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002. The round function is the finalizer of splitmix64.
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
    """`permute` of indices BLOCK block, BLOCK block + 1, ...: for thousands at once numpy takes little longer than for ten."""
    return permute(np.arange(block * BLOCK, min(n, (block + 1) * BLOCK)), n, seed, epoch)


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)


@dataclass(frozen=True)
class Batches:
    """Pure function from (step, micro-batch) to tokens."""

    stream: Stream
    seq_len: int
    sequences_per_update: int
    micro_batch_size: int
    seed: int
    shuffled: bool = True

    def __post_init__(self):
        if not self.stream.windows(self.seq_len):
            raise UserError(
                f"the split has {len(self.stream)} tokens, less than one window of --seq_len={self.seq_len} and its last "
                "target; prepare more text or lower --seq_len"
            )

    def windows(self, first: int, count: int) -> np.ndarray:
        """Window numbers [count] of sequences first ... first + count - 1 of the run."""
        n = self.stream.windows(self.seq_len)
        out, filled = np.empty(count, dtype=np.int64), 0
        while filled < count:
            epoch, index = divmod(first + filled, n)
            if self.shuffled:
                piece = permuted_block(index // BLOCK, n, self.seed, epoch)[index % BLOCK :][: count - filled]
            else:
                piece = np.arange(index, min(n, index + count - filled))
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
        return out

    def tokens(self, windows: np.ndarray) -> np.ndarray:
        """int64 [len(windows), seq_len + 1]: inputs are [:, :-1], targets [:, 1:]."""
        out = np.empty((len(windows), self.seq_len + 1), dtype=self.stream.shards[0].dtype)
        for row, window in zip(out, windows.tolist(), strict=True):
            self.stream.read(window * self.seq_len, row)
        self.stream.check(out.reshape(-1), f"windows {windows.tolist()[:4]}... of {self.stream.paths[0].parent}")
        return out.astype(np.int64)

    def batch(self, step: int, micro_batch: int) -> np.ndarray:
        """The tokens of micro-batch `micro_batch` (of the whole update, not of a rank) of update `step`."""
        first = step * self.sequences_per_update + micro_batch * self.micro_batch_size
        return self.tokens(self.windows(first, self.micro_batch_size))


class Prefetcher:
    """Builds the batches at `places` [(step, micro-batch), ...] ahead in a thread; hands them out in order, on the device."""

    def __init__(self, batches: Batches, places, device, depth: int = 4):
        self.device = device
        self.wait_seconds = 0.0  # time the consumer stood waiting
        self._queue = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._build, args=(batches, places), daemon=True)
        self._thread.start()

    def _build(self, batches: Batches, places) -> None:
        import torch  # here, so that preparing data needs none

        try:
            for step, micro_batch in places:
                tokens = torch.from_numpy(batches.batch(step, micro_batch))
                self._put(tokens.pin_memory() if self.device.type == "cuda" else tokens)
                if self._stop.is_set():
                    return
        except BaseException as error:  # whatever it is must reach the training loop, not die with the thread
            self._put(error)

    def _put(self, item) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def next(self) -> tuple:
        """The next batch as two tensors: inputs and targets, int64 [micro_batch_size, seq_len] on the device."""
        began = time.perf_counter()
        item = self._queue.get()
        self.wait_seconds += time.perf_counter() - began
        if isinstance(item, BaseException):
            raise item
        tokens = item.to(self.device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]

    def close(self) -> None:
        """Stop building."""
        self._stop.set()
        self._thread.join()
