"""Turn text into tokens: assign each document to a split, and encode units of text in parallel."""

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from lockstep.common.errors import UserError
from lockstep.common.records import Auto
from lockstep.dataset.sources import SourceFile, read_pieces
from lockstep.dataset.tokenizer import END_OF_TEXT, Tokenizer
from lockstep.dataset.tokens import token_dtype

FEW_DOCUMENTS = 100  # with fewer documents than this, the end of the text goes to validation
HASHED_BYTES = 1 << 16  # how many leading bytes of a document are hashed to choose its split
UNIT_BYTES = 1 << 20  # bytes of text that a worker encodes at a time
PIECE_BYTES = 256  # approximate memory overhead per document, in bytes

Position = tuple[int, int]  # where a unit is: the index of its file, and the unit's index in that file


@dataclass
class Unit:
    """About UNIT_BYTES of text from one file."""

    position: Position
    parts: list[tuple[str, bool, str]] = field(default_factory=list)  # the split, whether a document starts here, the text
    filled: int = 0  # size in memory, in bytes
    bytes_on_disk: float = 0
    without_text: int = 0  # number of rows without text
    replaced: int = 0  # number of U+FFFD that replaced bytes which are not UTF-8
    spelled: Counter[str] = field(default_factory=Counter)  # how often the text spells out an end-of-text token


@dataclass(frozen=True)
class Split:
    """Which text goes to validation: documents chosen by hash, or everything from character `boundary` on."""

    val_fraction: float
    boundary: int | None = None
    offsets: list[int] = field(default_factory=list)  # if there is a boundary: the position of each file's first character


def choose_split(source_files: list[SourceFile], val_fraction: float | Auto) -> Split:
    """Choose how to split the source after reading up to FEW_DOCUMENTS documents. Raises UserError if a split would be empty.

    val_fraction: auto means 0.05, or 0.1 if there are few documents.
    """
    documents, characters, offsets = 0, 0, []
    for file in source_files:
        offsets.append(characters)
        for piece in read_pieces(file):
            documents += piece.starts_document
            characters += len(piece.text)
            if documents >= FEW_DOCUMENTS:
                return Split(0.05 if val_fraction == "auto" else val_fraction)
    if not documents:
        raise UserError("the source contains no text; check its path, and --column for .jsonl and .parquet files")
    val_fraction = 0.1 if val_fraction == "auto" else val_fraction
    if characters < 2:
        raise UserError("the source has only one character, which cannot be split into training and validation; add text")
    boundary = int(characters * (1 - val_fraction))
    if not 0 < boundary < characters:
        raise UserError(f"--val_fraction={val_fraction} of {characters} characters leaves one split empty; try 0.1")
    return Split(val_fraction, boundary, offsets)


def split_hash(data: bytes) -> float:
    """Return a hash of the beginning of a document, uniform in [0, 1). It decides the document's split."""
    return int.from_bytes(hashlib.blake2b(data[:HASHED_BYTES], digest_size=6).digest(), "big") / 2**48


def read_units(
    source_files: list[SourceFile], split: Split, wanted: dict[str, Position], whole: bool = False
) -> Iterator[Unit]:
    """Yield the text that still needs encoding as units, file by file and in order.

    wanted: for each split, the position at which an earlier run left off. Files before both positions are not read.
    whole: whether to keep each document in one piece.
    """
    for index in range(min(wanted.values())[0], len(source_files)):
        unit, name, offset = Unit((index, 0)), "", split.offsets[index] if split.offsets else 0
        for piece in read_pieces(source_files[index], whole):
            text = piece.text
            if split.boundary is None:
                if piece.starts_document:
                    name = "val" if split_hash(piece.data) < split.val_fraction else "train"
                parts = [(name, piece.starts_document, text)]
            else:
                before = max(0, split.boundary - offset)  # characters of this text that go to training
                starts_val = piece.starts_document or offset <= split.boundary
                parts = [("train", piece.starts_document, text[:before]), ("val", starts_val, text[before:])]
                offset += len(text)
            unit.parts += [part for part in parts if part[2] and unit.position >= wanted[part[0]]]
            unit.filled += len(piece.data) + PIECE_BYTES
            unit.bytes_on_disk += piece.bytes_on_disk
            unit.without_text += not piece.data
            unit.replaced += piece.replaced
            if unit.filled >= UNIT_BYTES:
                yield unit
                unit = Unit((index, unit.position[1] + 1))
        if unit.filled:
            yield unit


def encode_unit(tokenizer: Tokenizer, unit: Unit) -> tuple[Unit, dict[str, np.ndarray]]:
    """Encode a unit into one array of tokens per split. Each document begins with an end-of-text token."""
    dtype = token_dtype(tokenizer.vocab_size)
    tokens = {split: [np.empty(0, dtype)] for split in ("train", "val")}
    for split, starts_document, text in unit.parts:
        unit.spelled.update({name: text.count(name) for name in {tokenizer.eot_text, END_OF_TEXT}})
        tokens[split] += [np.array([tokenizer.eot_token] * starts_document, dtype), tokenizer.encode(text)]
    return unit, {split: np.concatenate(arrays, dtype=dtype, casting="unsafe") for split, arrays in tokens.items()}


def encode_all(tokenizer: Tokenizer, units: Iterable[Unit], workers: int) -> Iterator[tuple[Unit, dict[str, np.ndarray]]]:
    """Encode units in parallel and yield them in order; see `encode_unit`. Holds only a few units per worker in memory."""
    pool = ThreadPoolExecutor(workers)
    results = (pool.submit(encode_unit, tokenizer, unit) for unit in units)
    pending = deque(islice(results, 2 * workers))
    try:
        while pending:
            yield pending.popleft().result()
            pending.extend(islice(results, 1))
    finally:
        pool.shutdown(cancel_futures=True)
