"""Sources of text: files and folders of .txt .md .py .jsonl .parquet (also .gz .zst .xz), read in units of about a megabyte."""

import contextlib
import hashlib
import json
import lzma
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from settings import UserError

UNIT_BYTES = 1 << 20  # how much is read at a time; a worker encodes one unit
HASHED_BYTES = 1 << 16  # the first bytes of a document, whose hash chooses its split
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
OPENERS = {
    ".gz": lambda raw: pyarrow.CompressedInputStream(raw, "gzip"),
    ".zst": lambda raw: pyarrow.CompressedInputStream(raw, "zstd"),
    ".xz": lzma.LZMAFile,
}
NOT_EMBEDDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Piece:
    """A document, a part of a long one, or lines of JSON that are not parsed yet."""

    bytes_on_disk: float
    data: bytes  # UTF-8
    starts_document: bool = True
    split_hash: float | None = None  # of the whole document, if this is a part of one
    first_line: tuple[Path, int] | None = None  # of lines of JSON: their file and the number of the first


def embedded_corpus() -> list[Path]:
    """The Python standard library's own source files, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(p for p in root.rglob("*.py") if not NOT_EMBEDDED & set(p.relative_to(root).parts))


def text_format(path: Path) -> str:
    """The suffix that says how `path` holds text, without the suffix of its compression. Empty if it is unknown."""
    suffix = Path(path.stem).suffix if path.suffix in OPENERS else path.suffix
    return suffix if suffix in SUFFIXES else ""


def source_files(source: str) -> list[Path]:
    """The files of a source, in order. Raises UserError if there are none."""
    if source.startswith("hf://"):
        raise UserError(f"{source}: hf:// is not read yet; download its .parquet files and name their folder")
    path = Path(source)
    if not path.exists():
        raise UserError(f"{source}: no such file or folder")
    candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
    paths = [p for p in candidates if text_format(p) and p.is_file()]
    if not paths:
        raise UserError(f"{source}: wanted {' '.join(SUFFIXES)}, also followed by {' '.join(OPENERS)}")
    return paths


def read_chunks(path: Path, find_cut: Callable[[bytes], int]) -> Iterator[tuple[int, bytes]]:
    """Read a file, decompressed, as (bytes on disk, content) in chunks of about UNIT_BYTES.

    find_cut: where a chunk may end in the bytes read so far (0: nowhere yet). Raises UserError.
    """
    try:
        with open(path, "rb") as raw, OPENERS.get(path.suffix, contextlib.nullcontext)(raw) as stream:
            rest, position = b"", 0
            while content := stream.read(UNIT_BYTES):
                content = rest + content
                end = find_cut(content) if len(content) >= UNIT_BYTES else 0
                rest = content[end:]
                if end:
                    yield raw.tell() - position, content[:end]
                    position = raw.tell()
            if rest:
                yield raw.tell() - position, rest
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"{path}: {error}") from None


def end_of_lines(content: bytes) -> int:
    """The end of the last whole line."""
    return content.rfind(b"\n") + 1


def end_of_words(content: bytes) -> int:
    """The end of the last word before white space: no token crosses it, so both sides keep the tokens of the whole.

    If the last 4096 bytes have no such place, the end of the last whole character.
    """
    tail = max(0, len(content) - 4096)
    if ends := [match.end() for match in re.finditer(rb"[A-Za-z](?=[ \n])", content[tail:])]:
        return tail + ends[-1]
    incomplete = re.search(rb"[\xc0-\xff][\x80-\xbf]{0,2}\Z", content)
    return incomplete.start() if incomplete else len(content)


def parquet_documents(path: Path) -> Iterator[Piece]:
    """The rows of the column "text" of a parquet file, one document each. Raises UserError."""
    try:
        file = pyarrow.parquet.ParquetFile(path, buffer_size=UNIT_BYTES)
        names = file.schema_arrow.names
        if "text" not in names or file.schema_arrow.field("text").type not in (pyarrow.string(), pyarrow.large_string()):
            raise UserError(f'{path}: wanted a column "text" of strings; its columns are {", ".join(names)}')
        row_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=256, columns=["text"]):
            for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                yield Piece(row_bytes, text or b"")
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: {error}") from None


def read_pieces(path: Path) -> Iterator[Piece]:
    """Read a file in pieces of at most about UNIT_BYTES (a row of a parquet file is one piece)."""
    if text_format(path) == ".parquet":
        yield from parquet_documents(path)
    elif text_format(path) == ".jsonl":
        line = 1
        for size, data in read_chunks(path, end_of_lines):
            yield Piece(size, data, first_line=(path, line))
            line += data.count(b"\n")
    else:
        document_hash = None
        for size, data in read_chunks(path, end_of_words):
            is_first = document_hash is None
            document_hash = split_hash(data) if is_first else document_hash
            yield Piece(size, data, is_first, document_hash)


def read_units(paths: list[Path]) -> Iterator[list[Piece]]:
    """Read all files in order, in units of UNIT_BYTES or a little more."""
    unit, filled = [], 0
    for path in paths:
        for piece in read_pieces(path):
            unit.append(piece)
            filled += len(piece.data)
            if filled >= UNIT_BYTES:
                yield unit
                unit, filled = [], 0
    if unit:
        yield unit


def parse(unit: list[Piece]) -> Iterator[Piece]:
    """The pieces of a unit that hold text, with lines of JSON parsed. Raises UserError for a line without a text."""
    for piece in unit:
        if piece.first_line is None:
            if piece.data:
                yield piece
            continue
        path, first = piece.first_line
        for number, line in enumerate(piece.data.split(b"\n"), first):
            try:
                if line.strip() and (text := json.loads(line)["text"]):
                    yield Piece(0, text.encode("utf-8", "replace"))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f'{path}: line {number} is not a JSON object with a string under "text"') from None


def split_hash(data: bytes) -> float:
    """A hash of the beginning of a document, uniform in [0, 1). It chooses the document's split."""
    return int.from_bytes(hashlib.blake2b(data[:HASHED_BYTES], digest_size=6).digest(), "big") / 2**48
