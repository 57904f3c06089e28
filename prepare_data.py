"""Turn text into a dataset directory: `python prepare_data.py [SOURCE ...] [--out=tokens/NAME] [--tokenizer=...]`.

Sources are files and folders of .txt .md .py .jsonl .parquet (also .gz .zst .xz); without one, the Python standard library.
Units of about a megabyte are read in order, split and encoded by worker threads (the tokenizers leave the interpreter to the
others while they work), and put, in order again, into shards: the same bytes whatever the number of workers. Run again after a
kill, it goes on behind the last finished shard.
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

import settings
from data import token_dtype, write_shard
from settings import UserError, cores
from sources import Block, embedded_corpus, parsed, place, read_units, source_files
from tokenizer import Tokenizer, load, resolve, write_text

SAMPLE_CHARACTERS = 1 << 24  # what train:N learns from
FEW_DOCUMENTS = 100  # a source of fewer is split by its tail
SPLITS = ("train", "val")


@dataclass(frozen=True)
class PrepareConfig:
    sources: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[SOURCE ...]")]] = ()
    """Files or folders of .txt .md .py .jsonl .parquet, also .gz .zst .xz (none: the Python standard library's source)."""
    out: str = ""
    """Dataset directory (default: tokens/ and the first source's name; tokens/python without a source)."""
    tokenizer: str = ""
    """train:N, gpt2, cl100k_base, o200k_base, bytes, or the path of a tokenizer.json or .tiktoken file (default: gpt2;
    train:4096 without a source)."""
    val_fraction: float = -1.0
    """Share of the documents kept for validation (negative: 0.05; of fewer than 100 documents, the last 0.1 of the text)."""
    shard_tokens: int = 100_000_000
    """Tokens of a shard; the last one of a split is shorter."""
    workers: int = 0
    """Threads that encode (0: one a core)."""


# ---------------------------------------------------------------------------------------------------------------------
# Splitting and encoding


@dataclass(frozen=True)
class Split:
    """Which text is for validation: documents by their hash, or all from character `boundary` on."""

    val_fraction: float
    boundary: int | None = None
    offsets: tuple[int, ...] = ()  # with a boundary: the first character of each unit

    def parts(self, unit: list[Block], index: int) -> Iterator[tuple[str, bool, str]]:
        """(split, whether a document begins, text) of unit number `index`."""
        offset = self.offsets[index] if self.offsets else 0
        for block in parsed(unit):
            text = block.data.decode("utf-8", "replace")
            if self.boundary is None:
                at = place(block.data) if block.place is None else block.place
                yield "val" if at < self.val_fraction else "train", block.opens, text
                continue
            before = max(0, self.boundary - offset)  # characters of this text that are for training
            if text[:before]:
                yield "train", block.opens, text[:before]
            if text[before:]:
                yield "val", block.opens or offset <= self.boundary, text[before:]
            offset += len(text)


def choose_split(files: list[Path], val_fraction: float) -> Split:
    """The split of a source; reads it until it has FEW_DOCUMENTS. Raises UserError if a part would be empty."""
    documents, characters, offsets = 0, 0, []
    for unit in read_units(files):
        offsets.append(characters)
        for block in parsed(unit):
            documents += block.opens
            characters += len(block.data.decode("utf-8", "replace"))
        if documents >= FEW_DOCUMENTS:
            return Split(val_fraction if val_fraction > 0 else 0.05)
    if not documents:
        raise UserError("there is no text in the source")
    val_fraction = val_fraction if val_fraction > 0 else 0.1
    boundary = int(characters * (1 - val_fraction))
    if not 0 < boundary < characters:
        raise UserError(f"--val_fraction={val_fraction} of {characters} characters leaves a split empty; try 0.1")
    return Split(val_fraction, boundary, tuple(offsets))


def encode_unit(tokenizer: Tokenizer, split: Split, unit: list[Block], index: int, wanted: set) -> dict[str, np.ndarray]:
    """The tokens of a unit by wanted split, end-of-text before each document."""
    dtype = token_dtype(tokenizer.vocab_size)
    rows = {name: [np.empty(0, dtype)] for name in SPLITS}
    for name, opens, text in split.parts(unit, index):
        if name in wanted:
            rows[name] += [np.array([tokenizer.eot_token] * opens, dtype), tokenizer.encode(text).astype(dtype)]
    return {name: np.concatenate(row) for name, row in rows.items()}


def encode_all(tokenizer: Tokenizer, split: Split, tasks: Iterator[tuple], workers: int) -> Iterator[tuple]:
    """(unit, its number, its tokens by split) of every task, in order; a few units a worker are in memory at a time."""
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
    """The shards of a split. The finished ones end behind `offset` tokens of unit number `unit`: what a restart needs."""

    directory: Path
    split: str
    tokenizer: Tokenizer
    shard_tokens: int
    unit: int = 0
    offset: int = 0
    finished: list[dict] = field(default_factory=list)

    def __post_init__(self):
        self.buffer = np.empty(self.shard_tokens, token_dtype(self.tokenizer.vocab_size))  # takes memory as it fills
        self.filled = self.bytes_of_text = self.documents = 0

    def add(self, index: int, tokens: np.ndarray) -> Iterator[dict]:
        """Append the tokens of unit number `index`; yields each shard that this finishes."""
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
        """Write the buffer as a shard that ends behind `offset` tokens of unit number `unit`."""
        tokens = self.buffer[: self.filled]
        name = f"{self.split}_{len(self.finished):06d}.bin"
        digest = write_shard(self.directory / name, tokens, self.tokenizer.vocab_size)
        row = {"file": name, "split": self.split, "tokens": len(tokens), "bytes_of_text": self.bytes_of_text}
        row |= {"documents": self.documents, "sha256": digest}
        self.finished.append(row)
        self.unit, self.offset = unit, offset
        self.filled = self.bytes_of_text = self.documents = 0
        return row


def is_finished(directory: Path, request: dict) -> bool:
    """Whether the directory holds the requested dataset. Raises UserError if it holds another one."""
    path = directory / "dataset.json"
    if not path.exists():
        return False
    try:
        told = json.loads(path.read_text())
        train = [row["tokens"] for row in told["shards"] if row["split"] == "train"]
        there = told["source"], told["tokenizer"]["name"], told["val_fraction"], train[0]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{path} is damaged; remove {directory} or choose another --out") from None
    asked = [request[name] for name in ("source", "tokenizer", "val_fraction")] + [min(request["shard_tokens"], sum(train))]
    if asked[2] < 0:
        asked[2] = there[2]
    names = ("source", "--tokenizer", "--val_fraction", "--shard_tokens")
    differences = [f"{n} {was}, not {now}" for n, was, now in zip(names, there, asked, strict=True) if was != now]
    if differences:
        raise UserError(f"{directory} holds another dataset: {'; '.join(differences)}; choose another --out, or remove it")
    return True


def save_progress(directory: Path, request: dict, splits: dict[str, Shards]) -> None:
    """Publish which shards are finished, and where they end."""
    done = {name: {"unit": s.unit, "offset": s.offset, "finished": s.finished} for name, s in splits.items()}
    write_text(directory / "progress.json", json.dumps({"request": request, "splits": done}))


def read_progress(directory: Path, request: dict) -> dict | None:
    """What an earlier run of this request finished, by split; None if there is no such run. Raises UserError."""
    path = directory / "progress.json"
    if not path.exists():
        if directory.exists() and any(not p.name.startswith(".") for p in directory.iterdir()):
            raise UserError(f"{directory} holds other files; choose another --out, or remove it")
        return None
    try:
        told = json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path} is damaged; remove {directory}, or choose another --out") from None
    needed = ["tokenizer.json"] + [row["file"] for done in told["splits"].values() for row in done["finished"]]
    whole = told["request"] == request and all((directory / name).exists() for name in needed)
    return told["splits"] if whole else None


def begin(directory: Path, request: dict, tokenizer: Tokenizer) -> dict:
    """Make the directory, without what an unfinished run of another request left there."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in [*directory.glob("*_*.bin"), directory / "tokenizer.json"]:
        stale.unlink(missing_ok=True)
    save_progress(directory, request, {})
    tokenizer.save(directory / "tokenizer.json")
    return {}


# ---------------------------------------------------------------------------------------------------------------------
# The command


def sample(files: list[Path]) -> Iterator[str]:
    """At most SAMPLE_CHARACTERS of text, evenly from the beginnings of at most 1000 of the files."""
    files = files[:: -(-len(files) // 1000)]
    left = SAMPLE_CHARACTERS
    for number, path in enumerate(files):
        share = left // (len(files) - number)
        for block in (block for unit in read_units([path]) for block in parsed(unit)):
            text = block.data.decode("utf-8", "replace")[:share]
            yield text
            share, left = share - len(text), left - len(text)
            if not share:
                break


def make_tokenizer(spec: str, files: list[Path]) -> Tokenizer:
    """The tokenizer that `spec` means, trained on the files where it says so."""
    tokenizer = resolve(spec, lambda: sample(files))
    if spec.startswith("train:") and tokenizer.vocab_size < int(spec[6:]):
        print(f"--tokenizer={spec}: there is too little text for more than {tokenizer.vocab_size} tokens")
    return tokenizer


def encode_files(splits: dict[str, Shards], split: Split, files: list[Path], workers: int, request: dict) -> None:
    """Encode all units that are not in finished shards yet and publish their shards."""
    train = splits["train"]
    size = sum(path.stat().st_size for path in files)
    shown = (
        {}
        if sys.stderr.isatty()
        else {"file": io.StringIO(), "mininterval": 60, "bar_format": ", {percentage:.0f} %, {remaining} left"}
    )
    bar = tqdm(total=size, unit="B", unit_scale=True, **shown)

    def advance(unit):
        bar.update(sum(block.size for block in unit))

    def tasks():
        for index, unit in enumerate(read_units(files)):
            wanted = {name for name, shards in splits.items() if index >= shards.unit}
            if wanted:
                yield unit, index, wanted
            else:
                advance(unit)

    index = -1
    for unit, index, tokens in encode_all(train.tokenizer, split, tasks(), workers):
        for name, shards in splits.items():
            for row in shards.add(index, tokens[name]):
                save_progress(train.directory, request, splits)
                tqdm.write(f"{row['file']}: {row['tokens']:,} tokens{bar if shown else ''}")
        advance(unit)
    bar.close()
    for shards in splits.values():
        if shards.filled:
            shards.publish(index + 1, 0)
            save_progress(train.directory, request, splits)
        if not shards.finished:
            raise UserError(f"--val_fraction={split.val_fraction} leaves no document for {shards.split}; try another")


def prepare(config: PrepareConfig) -> None:
    """Make the dataset directory that `config` asks for, finish it, or find it finished. Raises UserError."""
    if config.val_fraction == 0 or config.val_fraction >= 1:
        raise UserError(f"--val_fraction={config.val_fraction} leaves a split empty; more than 0 and less than 1 works, as 0.1")
    if not 0 < config.shard_tokens < 2**31 or config.workers < 0:
        raise UserError("--shard_tokens must be at least 1 and less than 2^31, --workers at least 0")
    began = time.perf_counter()
    found = {source: source_files(source) for source in config.sources}
    name = Path(config.sources[0]).resolve().name.split(".")[0] if found else "python"
    found = found or {f"the standard library of Python {sys.version.split()[0]}": embedded_corpus()}
    files = [path for paths in found.values() for path in paths]
    directory = Path(config.out or f"tokens/{name}")
    request = {
        "source": [{"path": s, "files": len(f), "bytes": sum(p.stat().st_size for p in f)} for s, f in found.items()],
        "tokenizer": config.tokenizer or ("gpt2" if config.sources else "train:4096"),
        "val_fraction": config.val_fraction,
        "shard_tokens": config.shard_tokens,
    }
    if is_finished(directory, request):
        print(f"{directory} holds this dataset already")
        return
    split = choose_split(files, config.val_fraction)
    done = read_progress(directory, request)
    if done is None:
        tokenizer = make_tokenizer(request["tokenizer"], files)
        done = begin(directory, request, tokenizer)
    else:
        tokenizer = load(directory / "tokenizer.json", name=request["tokenizer"])
        print(f"{directory}: going on behind {sum(len(split['finished']) for split in done.values())} finished shards")
    splits = {name: Shards(directory, name, tokenizer, config.shard_tokens, **done.get(name, {})) for name in SPLITS}
    encode_files(splits, split, files, config.workers or cores(), request)
    rows = [row for shards in splits.values() for row in shards.finished]
    dataset = {
        "format": "lockstep-tokens",
        "version": 1,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        "vocab_size": tokenizer.vocab_size,
        "eot_token": tokenizer.eot_token,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "source": request["source"],
        "val_fraction": split.val_fraction,
        "shards": rows,
    }
    write_text(directory / "dataset.json", json.dumps(dataset, indent=1) + "\n")
    (directory / "progress.json").unlink()
    tokens, size = (sum(row[key] for row in rows) for key in ("tokens", "bytes_of_text"))
    said = (
        f"{tokens:,} tokens of {size:,} bytes of text, {size / tokens:.2f} bytes a token, vocabulary {tokenizer.vocab_size:,}"
    )
    print(f"{directory}: {said}, {time.perf_counter() - began:.1f} s")


def main() -> None:
    """The command line."""
    with settings.user_errors():
        config = settings.parse(PrepareConfig, sys.argv[1:], "Turn text into a dataset directory of token shards.")
        try:
            prepare(config)
        except KeyboardInterrupt:
            print("stopped; the same command goes on behind the last finished shard", file=sys.stderr)
            raise SystemExit(75) from None


if __name__ == "__main__":
    main()
