"""Token shards on disk, and dataset directories of them: ours with a dataset.json, or those of other tools."""

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NotRequired, Required, TypedDict

import numpy as np
from msgspec import Meta

from common import files
from common.errors import RunError, UserError
from common.records import Count, FileName, Sha256, Share, Size, TokenId

HEADER_INTS = 256  # llm.c's header: magic, version, number of tokens, zeros
MAGICS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
GPT2_VOCAB_SIZE = 50257  # foreign shards do not say their vocabulary; theirs is GPT-2's
RESTORE = "restore the file, and the same command goes on"
SCAN_TOKENS = 1 << 22  # opening checks the ids of so many tokens of a split


# ---------------------------------------------------------------------------------------------------------------------
# dataset.json

Part = Annotated[str, Meta(pattern=r"\A[1-9]\d{0,3}/[1-9]\d{0,3}\Z")]  # as in --part=3/64

# Beside another tool's tokens, a tokenizer.json is read for its special tokens only.
AddedToken = TypedDict("AddedToken", {"id": TokenId, "content": Annotated[str, Meta(min_length=1)], "special": bool})
AddedTokens = TypedDict("AddedTokens", {"added_tokens": list[AddedToken]}, total=False)
# In dataset.json: a source of the text, the tokenizer, and the settings of prepare_data.py that are recorded if they are given.
Source = TypedDict("Source", {"path": Required[str], "revision": FileName, "files": Count, "bytes": Count}, total=False)
TokenizerRecord = TypedDict("TokenizerRecord", {"name": str, "sha256": Sha256})
Options = TypedDict("Options", {"column": str, "max_tokens": Count, "part": Part, "shard_tokens": Count}, total=False)


class ShardRecord(TypedDict):
    """A shard in dataset.json."""

    file: FileName
    split: Literal["train", "val"]
    tokens: Count
    bytes_of_text: Count
    documents: Count
    sha256: Sha256


class Metadata(TypedDict):
    """The content of dataset.json."""

    version: Literal[1]
    tokenizer: TokenizerRecord
    vocab_size: Size
    eot_token: TokenId
    dtype: Literal["uint16", "uint32"]
    source: list[Source]
    val_fraction: Share
    options: NotRequired[Options]
    listing: NotRequired[str]
    shards: list[ShardRecord]


def read_metadata(directory: Path) -> Metadata:
    """The dataset.json of a directory. Raises UserError."""
    path = directory / "dataset.json"
    metadata = files.read_json(path, Metadata)
    if metadata["eot_token"] >= metadata["vocab_size"]:
        raise UserError(f"{path}: eot_token {metadata['eot_token']} is outside the vocabulary of {metadata['vocab_size']}")
    names = [record["file"] for record in metadata["shards"]]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: a shard is listed twice")
    return metadata


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
    digest = hashlib.sha256()
    with files.publish(path) as file:
        for part in (header, np.ascontiguousarray(tokens, dtype=dtype)):
            file.write(part)
            digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class Shard:
    """The tokens of a file, which stays open. A slice of them is an array.

    They are read by pread. In a memory map, a file that was truncated or a bad disk would end the process by SIGBUS.
    """

    path: Path
    file: BinaryIO
    dtype: np.dtype
    offset: int  # bytes in front of the tokens
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: slice) -> np.ndarray:
        start, stop, _ = key.indices(self.count)
        size, at = max(0, stop - start) * self.dtype.itemsize, self.offset + start * self.dtype.itemsize
        data = b""
        try:
            while len(data) < size and (part := os.pread(self.file.fileno(), size - len(data), at + len(data))):
                data = data + part if data else part
        except OSError as error:
            raise RunError(f"{self.path}: {error.strerror} at byte {at + len(data)}; {RESTORE}") from None
        if len(data) < size:
            held = os.fstat(self.file.fileno()).st_size
            raise RunError(f"{self.path} was truncated to {held} bytes since it was opened; {RESTORE}")
        return np.frombuffer(data, self.dtype)


def open_shard(path: Path) -> Shard:
    """Open a shard: llm.c's .bin with either magic, nanoGPT's headerless .bin, or a .npy.

    Raises UserError if the file's size does not fit its header, or if a .npy is not one row of integers.
    """
    try:
        file = files.open_regular(path).detach()  # without a buffer, which is as large as a block of the file system
        if path.suffix == ".npy":
            tokens = np.lib.format.open_memmap(path, mode="r")
            if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
                raise UserError(f"{path}: holds {tokens.dtype} {tokens.shape}; wanted one row of integer tokens")
            return Shard(path, file, tokens.dtype, tokens.offset, len(tokens))
        size, header = os.fstat(file.fileno()).st_size, file.read(HEADER_INTS * 4)
        magic, version, count = np.frombuffer(header.ljust(12, b"\0"), "<i4", 3).tolist()
        dtype = MAGICS.get((magic, version))
        if dtype is None:
            counted = count > 0 and size - len(header) in (2 * count, 4 * count)
            if counted or magic in {known for known, _ in MAGICS}:
                wanted = " or ".join(f"{known} and {its_version}" for known, its_version in MAGICS)
                raise UserError(f"{path}: llm.c's header, with magic {magic} and version {version}; wanted {wanted}")
            if size % 2 or not size:
                raise UserError(f"{path}: {size} bytes are not whole uint16 tokens, and there is no llm.c header")
            return Shard(path, file, np.dtype("<u2"), 0, size // 2)
        wanted = HEADER_INTS * 4 + count * dtype.itemsize
        if count < 0 or size != wanted:
            raise UserError(f"{path}: its header promises {wanted} bytes, the file has {size}; copy or prepare it again")
        return Shard(path, file, dtype, HEADER_INTS * 4, count)
    except (OSError, ValueError, TypeError, SyntaxError, OverflowError, RecursionError, tokenize.TokenError) as error:
        raise UserError(f"{path}: {error}") from None  # numpy parses the header of a .npy as Python, and fails in as many ways


def open_shards(paths: list[Path]) -> list[Shard]:
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
    shards: list[Shard]
    vocab_size: int

    @functools.cached_property
    def starts(self) -> list[int]:
        """The position of each shard's first token, and of the end: [shards + 1]."""
        return list(itertools.accumulate(map(len, self.shards), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def num_windows(self, seq_len: int) -> int:
        """How many windows of `seq_len` inputs and as many targets the stream has."""
        return max(0, (len(self) - 1) // seq_len)

    def check_length(self, seq_len: int, split: str) -> None:
        """Raise UserError unless there is a window of `seq_len`. `split` names the stream in the message."""
        if not self.num_windows(seq_len):
            where = self.paths[0].parent if self.paths else "a dataset"
            raise UserError(
                f"{where} has {len(self)} {split} tokens, less than one window of --seq_len={seq_len} and its last target; "
                "prepare more text or lower --seq_len"
            )

    def locate(self, position: int) -> tuple[Path, int]:
        """The shard that holds the token at `position` of the stream, and where in the shard it is."""
        shard = bisect.bisect(self.starts, position) - 1
        return self.paths[shard], position - self.starts[shard]

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy tokens [start, start + len(out)) into `out`, across shard boundaries."""
        shard = bisect.bisect(self.starts, start) - 1
        filled = 0
        while filled < len(out):
            offset = start + filled - self.starts[shard]
            tokens = self.shards[shard][offset : offset + len(out) - filled]
            out[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            shard += 1

    def read_windows(self, windows: np.ndarray, seq_len: int) -> np.ndarray:
        """Read windows [k]: int64 [k, seq_len + 1]. Raises UserError for a bad token."""
        return read_windows([self], np.zeros_like(windows), windows, seq_len)

    def check(self, tokens: np.ndarray, where: str) -> int:
        """The largest token id. Raises UserError if one is outside the vocabulary; `where` names the tokens in the message."""
        if not len(tokens):
            return 0
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= self.vocab_size:
            raise UserError(
                f"{where}: token {lowest if lowest < 0 else highest} is outside the vocabulary of {self.vocab_size}; "
                "if it is larger, --vocab_size=N tells train.py so and --tokenizer tells prepare_data.py --check"
            )
        return highest

    def check_ids(self) -> int:
        """Check the ids of a small split, and those at the beginnings of a large one's shards. Batches are checked when read.

        Returns the largest id seen.
        """
        share = max(1024, SCAN_TOKENS // max(1, len(self.shards)))
        shards = zip(self.paths, self.shards, strict=True)
        return max((self.check(shard[:share], str(path)) for path, shard in shards), default=0)


def read_windows(streams: list[Stream], numbers: np.ndarray, windows: np.ndarray, seq_len: int) -> np.ndarray:
    """Read windows: int64 [k, seq_len + 1]. Inputs are [:, :-1], targets [:, 1:].

    windows [k]: each is of the stream whose number in `streams` is in `numbers` [k]. Raises UserError for a bad token.
    """
    out = np.empty((len(windows), seq_len + 1), np.int64)
    rows = list(zip(out, numbers.tolist(), windows.tolist(), strict=True))
    for row, number, window in rows:
        streams[number].read(window * seq_len, row)
    try:
        streams[0].check(out.reshape(-1), "")  # all have the same vocabulary
    except UserError:
        for row, number, window in rows:
            streams[number].check(row, f"window {window} of {streams[number].paths[0].parent}")
    return out


@dataclass(frozen=True)
class Dataset:
    """An opened dataset directory."""

    directory: Path
    vocab_size: int
    eot_token: int
    splits: dict[str, Stream]  # "train" and "val"
    bytes_of_text: dict[str, int]  # of each split; empty if the directory does not say
    identity: str  # sha256 of what the shards hold; the directory's name does not matter
    remark: str = ""  # what is assumed, because foreign files do not say it

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json of the directory, if there is one."""
        path = self.directory / "tokenizer.json"
        return path if path.exists() else None

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text for which a validation token stands on average. 0 if the directory does not say."""
        return self.bytes_of_text.get("val", 0) / max(1, len(self.splits["val"]))

    def bits_per_byte(self, loss: float) -> float | None:
        """Convert a validation `loss`, in nats per token, to bits per byte of text. None if the number of bytes is unknown."""
        return loss / float(np.log(2)) / self.bytes_per_token if self.bytes_per_token else None


def open_dataset(directory: str | Path, vocab_size: int = 0, prepare_command: str = "") -> Dataset:
    """Open a dataset directory and check sizes, counts and token ids. It has a dataset.json, or foreign token files.

    vocab_size: the vocabulary of foreign files, which do not state it (0: that of nanoGPT's meta.pkl, or else GPT-2's).
    prepare_command: what makes the dataset. The UserError for a missing directory prints it if its --out is this directory.
    """
    directory = Path(directory)
    if (directory / "dataset.json").exists():
        return _open_own(directory)
    if directory.is_file():
        raise UserError(f"--tokens={directory} is a file; give the directory that it is in")
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
    characters = characters_in(directory / "meta.pkl")
    source = "--vocab_size" if vocab_size else "meta.pkl" if characters else "GPT-2"
    vocab_size = vocab_size or characters or GPT2_VOCAB_SIZE
    eot_token = characters or min(GPT2_VOCAB_SIZE, vocab_size) - 1  # characters have none
    if (made := directory / "tokenizer.json").exists():
        added = files.read_json(made, AddedTokens).get("added_tokens", [])
        eot_token = next((token["id"] for token in added if token["content"] == "<|endoftext|>"), eot_token)
    splits = {split: Stream(paths, open_shards(paths), vocab_size) for split, paths in names.items()}
    largest = max([stream.check_ids() for stream in splits.values()])
    remark = f"{directory} has no dataset.json: a vocabulary of {vocab_size:,} by {source}; the largest id seen is {largest}"
    if source == "GPT-2" and largest < GPT2_VOCAB_SIZE // 2:
        remark = f"warning: {remark}; if no id is larger, give --vocab_size={largest + 1}"
    if not made.exists():
        how = "sample.py needs the tokenizer of these tokens, such as --tokenizer=gpt2"
        if characters:
            how = f"python tools/char_tokenizer.py {directory}/meta.pkl makes {made}; sample.py takes it by --tokenizer={made}"
        remark += f"; {how}"
    sizes = [(path.name, path.stat().st_size) for paths in names.values() for path in paths]
    return Dataset(directory, vocab_size, eot_token, splits, {}, digest(sizes), remark)


def characters_in(path: Path) -> int:
    """How many characters nanoGPT's meta.pkl says there are; 0 if it does not say. The pickle is searched, never unpickled."""
    if not path.is_file():
        return 0
    # "vocab_size", which is memoized (by MEMOIZE, or BINPUT and a number), then a BININT1, BININT2 or BININT.
    found = re.search(rb"vocab_size(?:\x94|q.)(?:K(.)|M(..)|J(....))", files.read_bytes(path), re.DOTALL)
    return int.from_bytes(found[found.lastindex], "little") if found else 0


def _open_own(directory: Path) -> Dataset:
    metadata, splits, bytes_of_text = read_metadata(directory), {}, {}
    for split in ("train", "val"):
        records = [record for record in metadata["shards"] if record["split"] == split]
        paths = [directory / record["file"] for record in records]
        splits[split] = Stream(paths, open_shards(paths), metadata["vocab_size"])
        for record, shard in zip(records, splits[split].shards, strict=True):
            if len(shard) != record["tokens"]:
                raise UserError(f"{directory / record['file']}: {len(shard)} tokens, dataset.json says {record['tokens']}")
        splits[split].check_ids()
        bytes_of_text[split] = sum(record["bytes_of_text"] for record in records)
    identity = digest([(record["split"], record["tokens"], record["sha256"]) for record in metadata["shards"]])
    return Dataset(directory, metadata["vocab_size"], metadata["eot_token"], splits, bytes_of_text, identity)


def _foreign_files(directory: Path, split: str) -> list[Path]:
    for pattern in (f"*_{split}_*.bin", f"*_{split}_*.npy", f"{split}.bin"):
        if paths := sorted(directory.glob(pattern)):
            return paths
    return []


def digest(value: list) -> str:
    """sha256 of a value, as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
