"""Sources of text: files and folders of .txt .md .py .jsonl .parquet (also .gz .zst .xz), read in units of about a megabyte."""

import contextlib
import hashlib
import json
import lzma
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from settings import UserError

UNIT_BYTES = 1 << 20  # what is read, handed to a worker and encoded at a time
HASHED_BYTES = 1 << 16  # of a document; they say which split it goes to
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
OPENERS = {
    ".gz": lambda raw: pyarrow.CompressedInputStream(raw, "gzip"),
    ".zst": lambda raw: pyarrow.CompressedInputStream(raw, "zstd"),
    ".xz": lzma.LZMAFile,
}
NOT_EMBEDDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Block:
    """A document, a part of one longer than a unit, or lines of JSON that are still to be parsed."""

    size: float  # bytes on disk
    data: bytes  # UTF-8
    opens: bool = True  # a document begins here
    place: float | None = None  # of the document, where this is a part of one
    lines: tuple[Path, int] | None = None  # lines of JSON: the file and the number of the first


def embedded_corpus() -> list[Path]:
    """The Python standard library's own source files, its tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(p for p in root.rglob("*.py") if not NOT_EMBEDDED & set(p.relative_to(root).parts))


def kind(path: Path) -> str:
    """The suffix that says what `path` holds, without the one of its compression; empty if it is not a known one."""
    suffix = Path(path.stem).suffix if path.suffix in OPENERS else path.suffix
    return suffix if suffix in SUFFIXES else ""


def source_files(source: str) -> list[Path]:
    """The files of a source, in order. Raises UserError when there are none."""
    if source.startswith("hf://"):
        raise UserError(f"{source}: hf:// is not read yet; download its .parquet files and name their folder")
    path = Path(source)
    if not path.exists():
        raise UserError(f"{source}: no such file or folder")
    files = sorted(p for p in path.rglob("*") if kind(p) and p.is_file()) if path.is_dir() else [path] if kind(path) else []
    if not files:
        raise UserError(f"{source}: wanted {' '.join(SUFFIXES)} (also with {' '.join(OPENERS)} behind)")
    return files


def read_cut(path: Path, cut) -> Iterator[tuple[int, bytes]]:
    """(bytes on disk, content) of a file in blocks of about UNIT_BYTES that end where `cut` says (0: not yet)."""
    try:
        with open(path, "rb") as raw, OPENERS.get(path.suffix, contextlib.nullcontext)(raw) as stream:
            rest, position = b"", 0
            while content := stream.read(UNIT_BYTES):
                content = rest + content
                end = cut(content) if len(content) >= UNIT_BYTES else 0
                rest = content[end:]
                if end:
                    yield raw.tell() - position, content[:end]
                    position = raw.tell()
            if rest:
                yield raw.tell() - position, rest
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"{path}: {error}") from None


def cut_lines(content: bytes) -> int:
    """Behind the last whole line."""
    return content.rfind(b"\n") + 1


def cut_text(content: bytes) -> int:
    """Where the parts have the tokens of the whole: no token reaches across the end of a word before white space.

    Without such a place near the end, behind the last whole character.
    """
    near = max(0, len(content) - 4096)
    if ends := [match.end() for match in re.finditer(rb"[A-Za-z](?=[ \n])", content[near:])]:
        return near + ends[-1]
    broken = re.search(rb"[\xc0-\xff][\x80-\xbf]{0,2}\Z", content)
    return broken.start() if broken else len(content)


def parquet_rows(path: Path) -> Iterator[Block]:
    """The rows of the column "text" of a parquet file, a document each."""
    try:
        file = pyarrow.parquet.ParquetFile(path, buffer_size=UNIT_BYTES)
        names = file.schema_arrow.names
        if "text" not in names or file.schema_arrow.field("text").type not in (pyarrow.string(), pyarrow.large_string()):
            raise UserError(f'{path}: wanted a column "text" of strings; its columns are {", ".join(names)}')
        size = path.stat().st_size / max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=256, columns=["text"]):
            for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                yield Block(size, text or b"")
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: {error}") from None


def read_blocks(path: Path) -> Iterator[Block]:
    """A file as blocks of about UNIT_BYTES or less."""
    if kind(path) == ".parquet":
        yield from parquet_rows(path)
    elif kind(path) == ".jsonl":
        line = 1
        for size, data in read_cut(path, cut_lines):
            yield Block(size, data, lines=(path, line))
            line += data.count(b"\n")
    else:
        at = None
        for size, data in read_cut(path, cut_text):
            first = at is None
            at = place(data) if first else at
            yield Block(size, data, first, at)


def read_units(files: list[Path]) -> Iterator[list[Block]]:
    """The blocks of all files in order, in units of UNIT_BYTES or a little more."""
    unit, filled = [], 0
    for path in files:
        for block in read_blocks(path):
            unit.append(block)
            filled += len(block.data)
            if filled >= UNIT_BYTES:
                yield unit
                unit, filled = [], 0
    if unit:
        yield unit


def parsed(unit: list[Block]) -> Iterator[Block]:
    """The blocks of a unit that hold text, lines of JSON taken apart. Raises UserError for a line without a text."""
    for block in unit:
        if block.lines is None:
            if block.data:
                yield block
            continue
        path, first = block.lines
        for number, line in enumerate(block.data.split(b"\n"), first):
            try:
                if line.strip() and (text := json.loads(line)["text"]):
                    yield Block(0, text.encode("utf-8", "replace"))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f'{path}: line {number} is not a JSON object with a string under "text"') from None


def place(data: bytes) -> float:
    """Where its content puts a document, uniform in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(data[:HASHED_BYTES], digest_size=6).digest(), "big") / 2**48
