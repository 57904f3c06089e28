"""Token shards on disk, and directories of them: our datasets with a dataset.json, or other tools' files."""

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import resource
import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NotRequired, Required, TypedDict

import numpy as np

from lockstep.common import cli, files
from lockstep.common.errors import RunError, UserError
from lockstep.common.records import Count, FileName, Sha256, Share, Size, TokenId
from lockstep.dataset.tokenizer import end_of_text, token_ids
from lockstep.settings import HERE, from_here

HEADER_INTS = 256  # llm.c's header: magic, version, number of tokens, zeros
MAGICS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
# llm.c, build-nanogpt and nanoGPT encode web text with GPT-2's tokenizer, whose last token separates documents. Their models
# pad the vocabulary to as many as 50,304 tokens.
GPT2_VOCAB_SIZE, GPT2_PADDED = 50257, 50304
RESTORE = "restore the file, then run the same command to continue"
SCAN_TOKENS = 1 << 22  # how many of a split's ids to check when it is opened
SAMPLES, SAMPLE_BYTES = 16, 1 << 15  # blocks of a foreign file that identify it, and the size of each


class Source(TypedDict, total=False):
    """The record of a source in dataset.json."""

    path: Required[str]
    revision: FileName  # of a dataset on the Hugging Face Hub
    listing: Sha256  # of the names, sizes and modification times of local files
    files: Count
    bytes: Count


TokenizerRecord = TypedDict("TokenizerRecord", {"name": str, "sha256": Sha256})


class ShardRecord(TypedDict):
    """The record of a shard in dataset.json."""

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
    options: NotRequired[dict]  # prepare_data.py settings that the user set
    shards: list[ShardRecord]


def read_metadata(directory: Path) -> Metadata:
    """Return the dataset.json of a directory. Raises UserError."""
    metadata = files.read_json(directory / "dataset.json", Metadata)
    names = [record["file"] for record in metadata["shards"]]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        twice = f"{directory}/dataset.json lists {files.shortened(repeated)} more than once, so its text would count twice"
        raise UserError(f"{twice}; copy dataset.json again, or prepare the dataset again")
    return metadata


def token_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 if every id fits, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int) -> str:
    """Publish `tokens` [n] as an llm.c token shard. Returns the sha256 of the file."""
    dtype = token_dtype(vocab_size)
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = *next(key for key, value in MAGICS.items() if value == dtype), len(tokens)
    with files.publish(path) as file:
        file.write(header)
        file.write(np.ascontiguousarray(tokens, dtype=dtype))
    return files.sha256(path)


@dataclass(frozen=True)
class Shard:
    """The tokens of a file, which stays open. Slicing returns an array.

    Tokens are read with pread, because with a memory map, a truncated file or a bad disk would kill the process with SIGBUS.
    """

    path: Path
    file: BinaryIO
    dtype: np.dtype
    offset: int  # bytes before the tokens
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: slice) -> np.ndarray:
        start, stop, _ = key.indices(self.count)
        size, at = max(0, stop - start) * self.dtype.itemsize, self.offset + start * self.dtype.itemsize
        try:
            data = os.pread(self.file.fileno(), size, at)
        except OSError as error:
            raise RunError(f"{self.path}: {error.strerror} at byte {at}; {RESTORE}") from None
        if len(data) < size:
            held = os.fstat(self.file.fileno()).st_size
            raise RunError(f"{self.path} was truncated to {held} bytes since it was opened; {RESTORE}")
        return np.frombuffer(data, self.dtype)


def open_shard(path: Path) -> Shard:
    """Open a token file: llm.c's .bin, nanoGPT's train.bin or val.bin, a .npy, or datatrove's .ds. Raises UserError."""
    file = files.require_file(path).open("rb", buffering=0)  # a buffer would read a whole file system block
    size = os.fstat(file.fileno()).st_size
    if path.suffix == ".npy":
        try:
            tokens = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # numpy parses the header as a Python literal, which can fail in many ways
            raise UserError(f"{path}: {error}") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise UserError(f"{path} has {tokens.dtype} values of shape {tokens.shape}; expected a 1-D array of integers")
        return Shard(path, file, tokens.dtype, tokens.offset, len(tokens))
    magic, version, count = np.frombuffer(file.read(HEADER_INTS * 4).ljust(12, b"\0"), "<i4", 3).tolist()
    header, offset, dtype = "its header", HEADER_INTS * 4, MAGICS.get((magic, version))
    if path.suffix == ".ds":
        header, offset, (_, dtype, count) = f"{path.name}.metadata", 0, read_datatrove(path)
    elif dtype is None and path.name in ("train.bin", "val.bin"):  # nanoGPT's, without a header
        header, offset, dtype, count = "a row of uint16", 0, np.dtype("<u2"), (size + 1) // 2
    elif dtype is None:
        wanted = " or ".join(f"{magic} and {version}" for magic, version in MAGICS)
        raise UserError(f"{path}: its header has magic {magic} and version {version}; expected llm.c's {wanted}")
    wanted = offset + count * dtype.itemsize
    if count < 0 or size != wanted:
        raise UserError(f"{path}: {header} implies {wanted} bytes, but the file has {size}; copy it or prepare it again")
    return Shard(path, file, dtype, offset, count)


def read_datatrove(path: Path) -> tuple[str, np.dtype, int]:
    """Read NAME.ds.metadata: the tokenizer's name or path, the tokens' dtype, and their number. Raises UserError."""
    said = re.match(r"(.*)\|([24])\n(\d{1,18})(\n|\Z)", files.read_text(Path(f"{path}.metadata")))
    if not said:
        raise UserError(f"{path}.metadata: expected TOKENIZER|2 or TOKENIZER|4, then the number of tokens on the next line")
    return said[1], np.dtype(f"<u{said[2]}"), int(said[3])


@dataclass(frozen=True)
class Stream:
    """The shards of one split as one stream of tokens."""

    shards: list[Shard]
    vocab_size: int

    @functools.cached_property
    def largest(self) -> int:
        """The largest id in the split; of a large one, only the start of each shard is read. Raises UserError; see `check`."""
        share = max(1024, SCAN_TOKENS // max(1, len(self.shards)))
        return max((self.check(shard[:share], str(shard.path)) for shard in self.shards), default=0)

    @functools.cached_property
    def starts(self) -> list[int]:
        """The position of each shard's first token, and of the end: [shards + 1]."""
        return list(itertools.accumulate(map(len, self.shards), initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def num_windows(self, seq_len: int) -> int:
        """Return the number of windows of `seq_len` inputs and targets in the stream."""
        return max(0, (len(self) - 1) // seq_len)

    def check_length(self, seq_len: int, split: str) -> None:
        """Raise UserError if the stream has less than one window of `seq_len`. split: the split's name, for the message."""
        if not self.num_windows(seq_len):
            where = f"{self.shards[0].path.parent if self.shards else 'a dataset'} has {len(self)} {split} tokens"
            raise UserError(f"{where}, less than one window of --seq_len={seq_len}; prepare more text, or lower --seq_len")

    def locate(self, position: int) -> tuple[Path, int]:
        """Return the shard that contains the token at `position` of the stream, and the token's position in the shard."""
        shard = bisect.bisect(self.starts, position) - 1
        return self.shards[shard].path, position - self.starts[shard]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count), int64, across shard boundaries; fewer at the end of the stream.

        Raises UserError for a token outside the vocabulary.
        """
        first, last = bisect.bisect(self.starts, start) - 1, bisect.bisect_left(self.starts, start + count)
        parts = [
            shard[max(0, start - begins) : start + count - begins]
            for shard, begins in zip(self.shards[first:last], self.starts[first:last], strict=False)
        ]
        tokens = np.concatenate(parts, dtype=np.int64)
        self.check(tokens, f"{self.shards[0].path.parent}, from token {start:,} on")
        return tokens

    def read_window(self, window: int, seq_len: int) -> np.ndarray:
        """Return the tokens of a window, int64 [seq_len + 1]: inputs are [:-1], targets [1:]. See `read`."""
        return self.read(window * seq_len, seq_len + 1)

    def check(self, tokens: np.ndarray, where: str) -> int:
        """Return the largest id. Raises UserError, naming the tokens by `where`, if any id is outside the vocabulary."""
        if not len(tokens):
            return 0
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= self.vocab_size:
            outside = f"{where}: token {lowest if lowest < 0 else highest} is outside the vocabulary of {self.vocab_size}"
            way_out = "give train.py a larger --vocab_size, or prepare_data.py --check their --tokenizer"
            raise UserError(f"{outside}; prepare the tokens again or, if another tool made them, {way_out}")
        return highest


def open_stream(paths: list[Path], vocab_size: int) -> Stream:
    """Open the shards of a split and check a sample of their ids. Each batch is checked when it is read. Raises UserError."""
    # Many systems allow 1024 open files by default, and some never more. macOS may call the limit infinite.
    with contextlib.suppress(ValueError, OSError, OverflowError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = soft + len(paths)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    stream = Stream([open_shard(path) for path in paths], vocab_size)
    _ = stream.largest
    return stream


@dataclass(frozen=True)
class Dataset:
    """An opened dataset directory."""

    directory: Path
    vocab_size: int
    eot_token: int | None  # the token between documents, or None if unknown
    tokenizer: Path | None  # the tokenizer.json, if it exists
    splits: dict[str, Stream]  # "train" and "val"
    identity: str  # sha256 of the shards' recorded sha256, or of the names, sizes and samples of foreign files
    bytes_of_text: dict[str, int] = field(default_factory=dict)  # size of each split's text, if known
    remark: str = ""  # assumptions about foreign files
    earlier_identity: str = ""  # if it differs: the identity in runs of earlier versions, which took no samples

    @functools.cached_property
    def tokenizer_sha256(self) -> str | None:
        """The sha256 of the tokenizer.json, if it exists."""
        return files.sha256(self.tokenizer) if self.tokenizer else None

    @property
    def bytes_per_token(self) -> float:
        """Average bytes of text per validation token, or 0 if unknown."""
        return self.bytes_of_text.get("val", 0) / max(1, len(self.splits["val"]))

    def bits_per_byte(self, loss: float) -> float | None:
        """Convert a validation `loss` in nats per token to bits per byte of text, or None if the number of bytes is unknown."""
        return loss / float(np.log(2)) / self.bytes_per_token if self.bytes_per_token else None


def open_dataset(directory: str | Path, vocab_size: int = 0) -> Dataset:
    """Open a directory with a dataset.json or foreign token files. Checks sizes, counts and token ids. Raises UserError.

    vocab_size: for foreign files, which do not state it (0: from datatrove's tokenizer, nanoGPT's meta.pkl, or else GPT-2).
    """
    cli.require_local("tokens", str(directory), "python prepare_data.py URL --out=tokens/NAME makes a dataset from a URL")
    directory = Path(directory)
    if directory.is_file():
        raise UserError(f"the dataset {directory} is a file; pass a directory of tokens, which prepare_data.py makes from text")
    if not directory.is_dir():
        how = f"make it with: python prepare_data.py [SOURCE ...] {shlex.quote(f'--out={directory}')}"
        for preset in sorted(HERE.glob("config/*.toml")):
            if f'tokens = "{directory}"\n' in files.read_text(preset):
                how = f"the first lines of {from_here(preset)} say how to prepare it"
        raise UserError(f"the dataset {directory} does not exist; {how}")
    return _open_own(directory) if (directory / "dataset.json").exists() else _open_foreign(directory, vocab_size)


def _open_own(directory: Path) -> Dataset:
    metadata, splits, bytes_of_text = read_metadata(directory), {}, {}
    for split in ("train", "val"):
        records = [record for record in metadata["shards"] if record["split"] == split]
        splits[split] = open_stream([directory / record["file"] for record in records], metadata["vocab_size"])
        for record, shard in zip(records, splits[split].shards, strict=True):
            if len(shard) != record["tokens"]:
                raise UserError(f"{shard.path} has {len(shard)} tokens, but dataset.json says {record['tokens']}")
        bytes_of_text[split] = sum(record["bytes_of_text"] for record in records)
    identity = digest([(record["split"], record["tokens"], record["sha256"]) for record in metadata["shards"]])
    tokenizer = next(directory.glob("tokenizer.json"), None)
    return Dataset(directory, metadata["vocab_size"], metadata["eot_token"], tokenizer, splits, identity, bytes_of_text)


def _open_foreign(directory: Path, vocab_size: int) -> Dataset:
    names = {split: _foreign_files(directory, split) for split in ("train", "val")}
    if not names["train"] or not names["val"]:
        raise UserError(
            f"{directory} is not a dataset: expected dataset.json from prepare_data.py, or token files for train and "
            "val, named *_train_*.bin, *_train.bin, *_train_*.npy, train.bin or train/*.ds; prepare_data.py makes one from text"
        )
    datatrove = read_datatrove(names["train"][0])[0] if names["train"][0].suffix == ".ds" else ""
    tokenizer = next((path for path in (directory / "tokenizer.json", Path(datatrove)) if path.is_file()), None)
    ids, characters = token_ids(tokenizer) if tokenizer else {}, characters_in(directory / "meta.pkl")
    if vocab_size:
        source = "--vocab_size"
    elif characters:
        source, vocab_size = "meta.pkl", characters
    elif datatrove and not ids:
        put = f"put its tokenizer there (the tokenizer.json of {datatrove})"
        raise UserError(f"{directory}: {put}, or give train.py --vocab_size=N")
    elif datatrove:
        source, vocab_size = str(tokenizer), max(ids.values()) + 1
    else:
        source, vocab_size = "GPT-2", GPT2_VOCAB_SIZE
    eot_token = end_of_text(ids)
    if not ids and not characters and GPT2_VOCAB_SIZE <= vocab_size <= GPT2_PADDED:
        eot_token = GPT2_VOCAB_SIZE - 1
    if eot_token is not None and eot_token >= vocab_size:  # extras/char_tokenizer.py adds one that the dataset does not use
        eot_token = None

    splits = {split: open_stream(paths, vocab_size) for split, paths in names.items()}
    largest = max(stream.largest for stream in splits.values())
    remark = f"{directory} has no dataset.json; vocabulary {vocab_size:,} (from {source}), largest id seen {largest}"
    if source == "GPT-2" and largest < GPT2_VOCAB_SIZE // 2:
        remark = f"warning: {remark}; if no token has a larger id, set --vocab_size={largest + 1}"
    if eot_token is not None:
        remark += f"; token {eot_token} separates documents (from {'its tokenizer' if ids else 'GPT-2'})"
    if not tokenizer:
        maker = shlex.join(["python", "extras/char_tokenizer.py", f"{directory}/input.txt"])
        made = f": {maker}" if characters else ", such as --tokenizer=gpt2"
        remark += f"; sample.py will need the tokenizer of these tokens{made}"
    paths = [path for found in names.values() for path in found]
    sizes = [(str(path.relative_to(directory)), path.stat().st_size) for path in paths]
    identity = digest([[*size, sample_sha256(path)] for size, path in zip(sizes, paths, strict=True)])
    return Dataset(directory, vocab_size, eot_token, tokenizer, splits, identity, {}, remark, digest(sizes))


def sample_sha256(path: Path) -> str:
    """Return the sha256 of SAMPLES blocks of a file, from its beginning to its end. A small file is hashed completely.

    Foreign files have no sha256 to compare with, and to hash them all would delay every start by minutes.
    """
    found, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb", buffering=0) as file:
        for i in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
            found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def _foreign_files(directory: Path, split: str) -> list[Path]:
    # llm.c names its smaller datasets like tiny_shakespeare_train.bin.
    for pattern in ("*_{}_*.bin", "*_{}_*.npy", "{}.bin", "{}/*.ds", "{}*.ds", "*_{}*.ds", "*_{}.bin", "*_{}.npy"):
        if paths := sorted(directory.glob(pattern.format(split))):
            return paths
    return []


def characters_in(path: Path) -> int:
    """Return the number of characters according to nanoGPT's meta.pkl (0: unknown). The pickle is searched, never unpickled."""
    if not path.is_file():
        return 0
    # "vocab_size", memoized (by MEMOIZE, or BINPUT and a number), followed by a BININT1, BININT2 or BININT.
    found = re.search(rb"vocab_size(?:\x94|q.)(?:K(.)|M(..)|J(....))", files.read_bytes(path), re.DOTALL)
    return int.from_bytes(found[found.lastindex], "little") if found else 0


def digest(value: list) -> str:
    """Return the sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
