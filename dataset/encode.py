"""Text to tokens: which split each document goes to, and workers that encode the units of text in parallel."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from common.errors import UserError
from dataset.sources import Piece, Position, SourceFile, TextFormat, read_units, split_hash
from dataset.tokenizer import Tokenizer
from dataset.tokens import token_dtype

FEW_DOCUMENTS = 100  # a source of fewer documents is split by its tail


@dataclass(frozen=True)
class Split:
    """Which text is for validation: documents chosen by their hash, or everything from character `boundary` on."""

    val_fraction: float
    boundary: int | None = None
    offsets: dict[Position, int] = field(default_factory=dict)  # with a boundary: the first character of each unit

    def parts(self, unit: list[Piece], position: Position) -> Iterator[tuple[str, bool, str]]:
        """The unit at `position` as (split, whether a document starts here, text)."""
        offset = self.offsets.get(position, 0)
        for piece in unit:
            text = piece.text
            if self.boundary is None:
                split = "val" if split_hash(piece.head) < self.val_fraction else "train"
                yield split, piece.starts_document, text
                continue
            before = max(0, self.boundary - offset)  # characters of this text that are for training
            if text[:before]:
                yield "train", piece.starts_document, text[:before]
            if text[before:]:
                yield "val", piece.starts_document or offset <= self.boundary, text[before:]
            offset += len(text)


def choose_split(source_files: Iterable[SourceFile], form: TextFormat, val_fraction: float) -> Split:
    """The split of a source, which is read up to FEW_DOCUMENTS. Raises UserError if a split would be empty.

    val_fraction: negative means 0.05, and with few documents 0.1.
    """
    documents, characters, offsets = 0, 0, {}
    for position, unit in read_units(source_files, form):
        offsets[position] = characters
        documents += sum(piece.starts_document for piece in unit)
        characters += sum(len(piece.text) for piece in unit)
        if documents >= FEW_DOCUMENTS:
            return Split(val_fraction if val_fraction > 0 else 0.05)
    if not documents:
        raise UserError("there is no text in the source")
    val_fraction = val_fraction if val_fraction > 0 else 0.1
    boundary = int(characters * (1 - val_fraction))
    if not 0 < boundary < characters:
        raise UserError(f"--val_fraction={val_fraction} of {characters} characters leaves a split empty; try 0.1")
    return Split(val_fraction, boundary, offsets)


def encode_unit(tokenizer: Tokenizer, split: Split, unit: list[Piece], position: Position, names: list[str]) -> dict:
    """The tokens of a unit in each of the splits `names`. Each document is preceded by end-of-text."""
    dtype = token_dtype(tokenizer.vocab_size)
    parts = {name: [np.empty(0, dtype)] for name in names}
    for name, starts_document, text in split.parts(unit, position):
        if name in parts:
            parts[name] += [np.array([tokenizer.eot_token] * starts_document, dtype), tokenizer.encode(text).astype(dtype)]
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def encode_all(tokenizer: Tokenizer, split: Split, units: Iterable[tuple], workers: int) -> Iterator[tuple]:
    """Encode units (position, pieces, splits) in parallel. Yields (position, bytes on disk, tokens by split) in order.

    A few units per worker are in memory at a time.
    """
    pool, pending = ThreadPoolExecutor(workers), deque()

    def next_result():
        position, size, future = pending.popleft()
        return position, size, future.result()

    try:
        for position, unit, names in units:
            size = sum(piece.bytes_on_disk for piece in unit)
            pending.append((position, size, pool.submit(encode_unit, tokenizer, split, unit, position, names)))
            if len(pending) > 2 * workers:
                yield next_result()
        while pending:
            yield next_result()
    finally:
        pool.shutdown(cancel_futures=True)
