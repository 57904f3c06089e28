"""Turn text into a dataset directory: `python prepare_data.py [SOURCE ...] [--out=tokens/NAME] [--tokenizer=...]`.

Sources are files and folders of .txt .md .py .jsonl .parquet (also .gz .zst .xz); without one, the Python standard library.
Text is read in units of about a megabyte. Worker threads split and encode them (the tokenizers release the interpreter's lock),
and their tokens are written into shards in the order of the text, so the number of workers changes nothing. The same command
again after a kill goes on after the last finished shard.
"""

import io
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tqdm import tqdm

import files
import settings
from data import token_dtype, write_shard
from settings import UserError, cores
from sources import Piece, embedded_corpus, parse, read_units, source_files, split_hash
from tokenizer import Tokenizer, load, resolve

SAMPLE_CHARACTERS = 1 << 24  # how much text train:N learns from
FEW_DOCUMENTS = 100  # a source of fewer documents is split by its tail
SPLITS = ("train", "val")


@dataclass(frozen=True)
class PrepareConfig:
    sources: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[SOURCE ...]")]] = ()
    """Files or folders of .txt .md .py .jsonl .parquet, also .gz .zst .xz (none: the Python standard library's sources)."""
    out: str = ""
    """Dataset directory (default: tokens/ and the first source's name; tokens/python without a source)."""
    tokenizer: str = ""
    """train:N, gpt2, cl100k_base, o200k_base, bytes, or the path of a tokenizer.json or .tiktoken file (default: gpt2;
    train:4096 without a source)."""
    val_fraction: float = -1.0
    """Share of the documents for validation (negative: 0.05; with fewer than 100 documents, the last 0.1 of the text)."""
    shard_tokens: int = 100_000_000
    """Tokens of a shard. The last shard of a split is shorter."""
    workers: int = 0
    """Threads that encode (0: one per core)."""


# ---------------------------------------------------------------------------------------------------------------------
# Splitting and encoding


@dataclass(frozen=True)
class Split:
    """Which text is for validation: documents chosen by their hash, or everything from character `boundary` on."""

    val_fraction: float
    boundary: int | None = None
    offsets: tuple[int, ...] = ()  # with a boundary: the first character of each unit

    def parts(self, unit: list[Piece], index: int) -> Iterator[tuple[str, bool, str]]:
        """Unit number `index` as (split, whether a document starts here, text)."""
        offset = self.offsets[index] if self.offsets else 0
        for piece in parse(unit):
            text = piece.data.decode("utf-8", "replace")
            if self.boundary is None:
                document_hash = split_hash(piece.data) if piece.split_hash is None else piece.split_hash
                yield "val" if document_hash < self.val_fraction else "train", piece.starts_document, text
                continue
            before = max(0, self.boundary - offset)  # characters of this text that are for training
            if text[:before]:
                yield "train", piece.starts_document, text[:before]
            if text[before:]:
                yield "val", piece.starts_document or offset <= self.boundary, text[before:]
            offset += len(text)


def choose_split(paths: list[Path], val_fraction: float) -> Split:
    """The split of a source, which is read up to FEW_DOCUMENTS. Raises UserError if a split would be empty."""
    documents, characters, offsets = 0, 0, []
    for unit in read_units(paths):
        offsets.append(characters)
        for piece in parse(unit):
            documents += piece.starts_document
            characters += len(piece.data.decode("utf-8", "replace"))
        if documents >= FEW_DOCUMENTS:
            return Split(val_fraction if val_fraction > 0 else 0.05)
    if not documents:
        raise UserError("there is no text in the source")
    val_fraction = val_fraction if val_fraction > 0 else 0.1
    boundary = int(characters * (1 - val_fraction))
    if not 0 < boundary < characters:
        raise UserError(f"--val_fraction={val_fraction} of {characters} characters leaves a split empty; try 0.1")
    return Split(val_fraction, boundary, tuple(offsets))


def encode_unit(tokenizer: Tokenizer, split: Split, unit: list[Piece], index: int, wanted: set) -> dict[str, np.ndarray]:
    """The tokens of a unit in each wanted split. Each document is preceded by end-of-text."""
    dtype = token_dtype(tokenizer.vocab_size)
    parts = {name: [np.empty(0, dtype)] for name in SPLITS}
    for name, starts_document, text in split.parts(unit, index):
        if name in wanted:
            parts[name] += [np.array([tokenizer.eot_token] * starts_document, dtype), tokenizer.encode(text).astype(dtype)]
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def encode_all(tokenizer: Tokenizer, split: Split, tasks: Iterator[tuple], workers: int) -> Iterator[tuple]:
    """Encode tasks (unit, its index, wanted splits) and yield (unit, its index, its tokens by split) in their order.

    A few units per worker are in memory at a time.
    """
    pool, pending = ThreadPoolExecutor(workers), deque()
    try:
        for task in tasks:
            pending.append((task, pool.submit(encode_unit, tokenizer, split, *task)))
            if len(pending) > 2 * workers:
                task, future = pending.popleft()
                yield task[0], task[1], future.result()
        for task, future in pending:
            yield task[0], task[1], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------------
# Writing: tokens to shards


@dataclass
class Shards:
    """Writes the tokens of a split into shards. A restart goes on at token `offset` of unit number `unit`."""

    directory: Path
    split: str
    tokenizer: Tokenizer
    shard_tokens: int
    unit: int = 0
    offset: int = 0
    finished: list[dict] = field(default_factory=list)

    def __post_init__(self):
        self.buffer = np.empty(self.shard_tokens, token_dtype(self.tokenizer.vocab_size))  # takes up memory only as it fills
        self.filled = self.bytes_of_text = self.documents = 0

    def add(self, index: int, tokens: np.ndarray) -> Iterator[dict]:
        """Append the tokens of unit number `index`. Yields the record of each shard that this finishes."""
        position = self.offset if index == self.unit else 0
        while position < len(tokens):
            part = tokens[position : position + self.shard_tokens - self.filled]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            self.bytes_of_text += int(self.tokenizer.bytes_per_token.take(part).sum())
            self.documents += int(np.count_nonzero(part == self.tokenizer.eot_token))
            position += len(part)
            if self.filled == self.shard_tokens:
                yield self.publish(index, position)

    def publish(self, unit: int, offset: int) -> dict:
        """Write the buffer as a shard. It ends before token `offset` of unit number `unit`."""
        tokens = self.buffer[: self.filled]
        name = f"{self.split}_{len(self.finished):06d}.bin"
        digest = write_shard(self.directory / name, tokens, self.tokenizer.vocab_size)
        record = {"file": name, "split": self.split, "tokens": len(tokens), "bytes_of_text": self.bytes_of_text}
        record |= {"documents": self.documents, "sha256": digest}
        self.finished.append(record)
        self.unit, self.offset = unit, offset
        self.filled = self.bytes_of_text = self.documents = 0
        return record


def is_finished(directory: Path, request: dict) -> bool:
    """Whether the directory holds the requested dataset. Raises UserError if it holds another one."""
    path = directory / "dataset.json"
    if not path.exists():
        return False
    metadata = files.read_json(path)
    try:
        train = [record["tokens"] for record in metadata["shards"] if record["split"] == "train"]
        found = metadata["source"], metadata["tokenizer"]["name"], metadata["val_fraction"], train[0]
    except (LookupError, TypeError):
        raise UserError(f"{path} is damaged; remove {directory} or choose another --out") from None
    val_fraction = found[2] if request["val_fraction"] < 0 else request["val_fraction"]
    wanted = request["source"], request["tokenizer"], val_fraction, min(request["shard_tokens"], sum(train))
    names = ("source", "--tokenizer", "--val_fraction", "--shard_tokens")
    differences = [f"{n} {old}, not {new}" for n, old, new in zip(names, found, wanted, strict=True) if old != new]
    if differences:
        raise UserError(f"{directory} holds another dataset: {'; '.join(differences)}; choose another --out, or remove it")
    return True


def save_progress(directory: Path, request: dict, splits: dict[str, Shards]) -> None:
    """Publish which shards are finished and where they end."""
    progress = {name: {"unit": s.unit, "offset": s.offset, "finished": s.finished} for name, s in splits.items()}
    files.publish_text(directory / "progress.json", json.dumps({"request": request, "splits": progress}))


def read_progress(directory: Path, request: dict) -> dict | None:
    """What an earlier run of this request has finished, by split. None if there was no such run. Raises UserError."""
    path = directory / "progress.json"
    if not path.exists():
        if directory.exists() and any(not p.name.startswith(".") for p in directory.iterdir()):
            raise UserError(f"{directory} holds other files; choose another --out, or remove it")
        return None
    progress = files.read_json(path)
    try:
        names = ["tokenizer.json"] + [record["file"] for split in progress["splits"].values() for record in split["finished"]]
        is_whole = progress["request"] == request and all((directory / name).exists() for name in names)
    except (LookupError, TypeError, AttributeError):
        raise UserError(f"{path} is damaged; remove {directory}, or choose another --out") from None
    return progress["splits"] if is_whole else None


def begin(directory: Path, request: dict, tokenizer: Tokenizer) -> None:
    """Make the directory, or remove what an unfinished run of another request has left in it."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in [*directory.glob("*_*.bin"), directory / "tokenizer.json"]:
        stale.unlink(missing_ok=True)
    files.remove_unfinished(directory)
    save_progress(directory, request, {})
    tokenizer.save(directory / "tokenizer.json")


# ---------------------------------------------------------------------------------------------------------------------
# The command


def sample(paths: list[Path]) -> Iterator[str]:
    """At most SAMPLE_CHARACTERS of text, in equal parts from the beginnings of at most 1000 of the files."""
    paths = paths[:: -(-len(paths) // 1000)]
    left = SAMPLE_CHARACTERS
    for number, path in enumerate(paths):
        share = left // (len(paths) - number)
        for piece in (piece for unit in read_units([path]) for piece in parse(unit)):
            text = piece.data.decode("utf-8", "replace")[:share]
            yield text
            share, left = share - len(text), left - len(text)
            if not share:
                break


def make_tokenizer(spec: str, paths: list[Path]) -> Tokenizer:
    """The tokenizer that `spec` names. train:N learns it from the files."""
    tokenizer = resolve(spec, lambda: sample(paths))
    if spec.startswith("train:") and tokenizer.vocab_size < int(spec[6:]):
        print(f"--tokenizer={spec}: there is too little text for more than {tokenizer.vocab_size} tokens")
    return tokenizer


def encode_files(splits: dict[str, Shards], split: Split, paths: list[Path], workers: int, request: dict) -> None:
    """Encode all units that are not in finished shards yet, and publish their shards."""
    train = splits["train"]
    bar_style = {}
    if not sys.stderr.isatty():  # no moving bar: its text follows the name of each finished shard
        bar_style = {"file": io.StringIO(), "mininterval": 60, "bar_format": ", {percentage:.0f} %, {remaining} left"}
    bar = tqdm(total=sum(path.stat().st_size for path in paths), unit="B", unit_scale=True, **bar_style)

    def advance(unit):
        bar.update(sum(piece.bytes_on_disk for piece in unit))

    def tasks():
        for index, unit in enumerate(read_units(paths)):
            wanted = {name for name, shards in splits.items() if index >= shards.unit}
            if wanted:
                yield unit, index, wanted
            else:
                advance(unit)

    index = -1
    for unit, index, tokens in encode_all(train.tokenizer, split, tasks(), workers):
        for name, shards in splits.items():
            for record in shards.add(index, tokens[name]):
                save_progress(train.directory, request, splits)
                tqdm.write(f"{record['file']}: {record['tokens']:,} tokens{bar if bar_style else ''}")
        advance(unit)
    bar.close()
    for shards in splits.values():
        if shards.filled:
            shards.publish(index + 1, 0)
            save_progress(train.directory, request, splits)
        if not shards.finished:
            raise UserError(f"--val_fraction={split.val_fraction} leaves no document for {shards.split}; try another")


def prepare(config: PrepareConfig) -> None:
    """Make the dataset directory that `config` describes, finish it, or find it finished. Raises UserError."""
    if config.val_fraction == 0 or config.val_fraction >= 1:
        raise UserError(f"--val_fraction={config.val_fraction} leaves a split empty; more than 0 and less than 1 works, as 0.1")
    if not 0 < config.shard_tokens < 2**31 or config.workers < 0:
        raise UserError("--shard_tokens must be at least 1 and less than 2^31, --workers at least 0")
    began = time.perf_counter()
    found = {source: source_files(source) for source in config.sources}
    name = Path(config.sources[0]).resolve().name.split(".")[0] if found else "python"
    found = found or {f"the standard library of Python {sys.version.split()[0]}": embedded_corpus()}
    paths = [path for source_paths in found.values() for path in source_paths]
    directory = Path(config.out or f"tokens/{name}")
    request = {
        "source": [{"path": s, "files": len(f), "bytes": sum(p.stat().st_size for p in f)} for s, f in found.items()],
        "tokenizer": config.tokenizer or ("gpt2" if config.sources else "train:4096"),
        "val_fraction": config.val_fraction,
        "shard_tokens": config.shard_tokens,
    }
    if is_finished(directory, request):
        print(f"{directory} already holds this dataset")
        return
    split = choose_split(paths, config.val_fraction)
    progress = read_progress(directory, request)
    if progress is None:
        tokenizer = make_tokenizer(request["tokenizer"], paths)
        begin(directory, request, tokenizer)
        progress = {}
    else:
        tokenizer = load(directory / "tokenizer.json", name=request["tokenizer"])
        print(f"{directory}: going on after {sum(len(split['finished']) for split in progress.values())} finished shards")
    splits = {name: Shards(directory, name, tokenizer, config.shard_tokens, **progress.get(name, {})) for name in SPLITS}
    encode_files(splits, split, paths, config.workers or cores(), request)
    records = [record for shards in splits.values() for record in shards.finished]
    metadata = {
        "format": "lockstep-tokens",
        "version": 1,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        "vocab_size": tokenizer.vocab_size,
        "eot_token": tokenizer.eot_token,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "source": request["source"],
        "val_fraction": split.val_fraction,
        "shards": records,
    }
    files.publish_text(directory / "dataset.json", json.dumps(metadata, indent=1) + "\n")
    (directory / "progress.json").unlink()
    tokens, text_bytes = (sum(record[key] for record in records) for key in ("tokens", "bytes_of_text"))
    print(
        f"{directory}: {tokens:,} tokens of {text_bytes:,} bytes of text, {text_bytes / tokens:.2f} bytes per token, "
        f"vocabulary {tokenizer.vocab_size:,}, {time.perf_counter() - began:.1f} s"
    )


def main() -> None:
    """The command line."""
    with settings.user_errors():
        config = settings.parse(PrepareConfig, sys.argv[1:], "Turn text into a dataset directory of token shards.")
        try:
            prepare(config)
        except KeyboardInterrupt:
            print("stopped; the same command goes on after the last finished shard", file=sys.stderr)
            raise SystemExit(75) from None


if __name__ == "__main__":
    main()
