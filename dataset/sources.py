"""Read text from files and folders, on disk or at any URL that fsspec opens, about a megabyte at a time."""

import contextlib
import functools
import glob
import json
import lzma
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import BinaryIO

import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.implementations.local import LocalFileSystem

from common import files
from common.errors import UserError, explain, named_errors

CHUNK_BYTES = 1 << 20  # bytes to read at a time
BLOCK_BYTES = 1 << 24  # bytes per request to a server
PARQUET_ROWS = 16  # rows to decode at a time; each may be as long as the longest document
# How to view each type of text column as bytes. A view is free; a cast copies, and imports pyarrow.compute (0.1 s).
AS_BYTES = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
AS_BYTES[pyarrow.string_view()] = pyarrow.binary_view()
AS_BYTES[pyarrow.null()] = pyarrow.null()  # the type of a column in which no row has text
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
OPENERS = {
    ".gz": lambda raw: pyarrow.CompressedInputStream(raw, "gzip"),
    ".zst": lambda raw: pyarrow.CompressedInputStream(raw, "zstd"),
    ".xz": functools.partial(lzma.LZMAFile, format=lzma.FORMAT_XZ),  # not .lzma: it accepts any bytes and may ask for 4 GB
}
HUB = "hf://datasets/"
NOT_EMBEDDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """A text file, and how it stores documents."""

    path: str  # its path in the file system
    name: str  # relative to the folder that contains all files of the source
    size: int
    system: fsspec.AbstractFileSystem
    column: str  # the column of a .parquet file, or the key in a .jsonl file
    max_document_bytes: int  # the longest line or row

    def __str__(self) -> str:
        """Return the URL or path, relative if the file is below the working directory."""
        return self.system.unstrip_protocol(self.path).removeprefix("file://").removeprefix(f"{os.getcwd()}/")

    @property
    def form(self) -> str:
        """The suffix that gives the file's format, ignoring any compression suffix. Empty if it is not one of SUFFIXES."""
        path = PurePosixPath(self.name)
        suffix = PurePosixPath(path.stem).suffix if path.suffix in OPENERS else path.suffix
        return suffix if suffix in SUFFIXES else ""

    def open(self) -> BinaryIO:
        """Open the file for reading. The file system retries failed requests."""
        return self.system.open(self.path, "rb", block_size=BLOCK_BYTES)


@dataclass(frozen=True)
class Piece:
    """A document, or part of a long one."""

    data: bytes  # UTF-8; empty for a row without text
    starts_document: bool
    bytes_on_disk: float

    @property
    def text(self) -> str:
        """The content. Bytes that are not UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def embedded_corpus() -> list[SourceFile]:
    """Return the source files of the Python standard library, without its tests."""
    found, _ = list_files(sysconfig.get_path("stdlib"))
    return [file for file in found if file.form == ".py" and not NOT_EMBEDDED & set(PurePosixPath(file.name).parts)]


def list_files(
    source: str, url: str = "", column: str = "text", max_document_bytes: int = 1 << 25
) -> tuple[list[SourceFile], list[SourceFile]]:
    """List the text files at a path or URL (a file, folder or pattern), sorted by name, and the files of other types.

    url: the location of `source`, if it differs from its name. Raises UserError.
    """
    with named_errors(source):
        remote = "://" in source
        system, path = fsspec.core.url_to_fs(url or source) if remote else (LocalFileSystem(), os.path.abspath(source))
        try:
            matches = [system.info(path)]
        except FileNotFoundError as error:
            if not glob.has_magic(path):
                raise UserError(f"{source}: no such file or folder" + f": {explain(error)}" * remote) from None
            matches = system.glob(path, detail=True).values()
        sizes = {}
        for match in matches:
            inside = system.find(match["name"], detail=True) if match["type"] == "directory" else {match["name"]: match}
            sizes |= {path: info["size"] or 0 for path, info in inside.items() if info["type"] != "directory"}
    root = os.path.commonpath(map(os.path.dirname, sizes)) if sizes else ""
    paths, more = sorted(sizes, key=PurePosixPath), (system, column, max_document_bytes)
    found = [SourceFile(path, os.path.relpath(path, root), sizes[path], *more) for path in paths]
    documented = source.startswith(HUB) and not source.endswith((*SUFFIXES, *OPENERS))  # .md and .txt there are documentation
    forms = (".jsonl", ".parquet") if documented else SUFFIXES
    texts, others = ([file for file in found if (file.form in forms) == wanted] for wanted in (True, False))
    if not texts:
        expected = f"expected {' '.join(forms)}, optionally with {' '.join(OPENERS)}"
        pattern = "; for plain text, name a pattern such as */*.txt" * documented
        raise UserError(f"{source}: no text files there; {expected}{pattern}")
    return texts, others


def at_commit(source: str, commit: str = "") -> tuple[str, str]:
    """Pin a dataset on the Hugging Face Hub to a commit (default: the current one). Returns its URL and the commit.

    Raises UserError.
    """
    from huggingface_hub import HfApi, HfFileSystem

    if not re.match(HUB + "[^/]+/[^/]", source):
        raise UserError(f"{source}: expected {HUB}OWNER/NAME, optionally followed by @REVISION and by /FOLDER or /PATTERN")
    with named_errors(source):
        place = HfFileSystem().resolve_path(source)
        commit = commit or HfApi().dataset_info(place.repo_id, revision=place.revision).sha
    return f"{HUB}{place.repo_id}@{commit}/{place.path_in_repo}".rstrip("/"), commit


# ---------------------------------------------------------------------------------------------------------------------
# Text


def read_chunks(file: SourceFile, find_cut: Callable[[bytes], int]) -> Iterator[tuple[int, bytes]]:
    """Read and decompress a file in chunks of about CHUNK_BYTES. Yields (bytes on disk, content).

    find_cut: returns where a chunk may end in the bytes read so far (0: nowhere yet). Raises UserError, even for a long line.
    """
    unpack = OPENERS.get(PurePosixPath(file.name).suffix, contextlib.nullcontext)
    with named_errors(file), file.open() as raw, unpack(raw) as stream:
        rest, position, buffer = b"", 0, memoryview(bytearray(CHUNK_BYTES))
        while size := stream.readinto(buffer):  # pyarrow's read() leaks its buffer if the stream is corrupt
            content = rest + buffer[:size]
            end = find_cut(content) if len(content) >= CHUNK_BYTES else 0
            rest = content[end:]
            if len(rest) > file.max_document_bytes:
                raise UserError(f"{file}: a line is longer than --max_document_bytes={file.max_document_bytes}")
            if end:
                yield raw.tell() - position, content[:end]
                position = raw.tell()
        if rest:
            yield raw.tell() - position, rest


def end_of_words(content: bytes) -> int:
    """Return the end of the last word before white space. No token crosses that point, so a cut there changes no tokens.

    If the last 4096 bytes contain no such point, returns the end of the last whole character.
    """
    tail = max(0, len(content) - 4096)
    if ends := [match.end() for match in re.finditer(rb"[A-Za-z](?=[ \n])", content[tail:])]:
        return tail + ends[-1]
    incomplete = re.search(rb"[\xc0-\xff][\x80-\xbf]{0,2}\Z", content)
    return incomplete.start() if incomplete else len(content)


def parquet_rows(file: SourceFile) -> Iterator[Piece]:
    """Yield the rows of one column of a parquet file, each a document. Raises UserError."""
    column, limit = file.column, file.max_document_bytes
    too_long = UserError(f"{file}: a row is longer than --max_document_bytes={limit}")
    with named_errors(file), file.open() as raw:
        table = pyarrow.parquet.ParquetFile(raw, buffer_size=CHUNK_BYTES)
        schema = table.schema_arrow
        if column not in schema.names or schema.field(column).type not in AS_BYTES:
            raise UserError(f'{file}: no column "{column}" of strings; its columns are {files.shortened(schema.names)}')
        row_bytes = file.size / max(1, table.metadata.num_rows)
        for group in map(table.metadata.row_group, range(table.metadata.num_row_groups)):
            # Check the total size of all columns: asking for one column's would let damaged metadata abort the process.
            if group.total_byte_size > max(1, group.num_rows) * limit:
                raise too_long
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[column]):
            rows = batch.column(0)
            for text in rows.view(AS_BYTES[rows.type]).to_pylist():
                if text and len(text) > limit:
                    raise too_long
                yield Piece(text or b"", bool(text), row_bytes)


def jsonl_rows(file: SourceFile) -> Iterator[Piece]:
    """Yield the lines of a .jsonl file, each a document. Raises UserError for an invalid line."""
    first = 1
    for size, data in read_chunks(file, lambda content: content.rfind(b"\n") + 1):
        lines = data.removesuffix(b"\n").split(b"\n")
        for number, line in enumerate(lines, first):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[file.column]
                content = b"" if text is None else text.encode("utf-8", "replace")
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                wanted = f'{file}: line {number} is not a JSON object with a string under "{file.column}"'
                raise UserError(f"{wanted}; use --column=KEY for another key") from None
            yield Piece(content, bool(content), size / len(lines))
        first += len(lines)


def read_pieces(file: SourceFile) -> Iterator[Piece]:
    """Read a file in pieces of at most about CHUNK_BYTES (but a row or line is always one piece). Raises UserError."""
    if file.form == ".parquet":
        yield from parquet_rows(file)
    elif file.form == ".jsonl":
        yield from jsonl_rows(file)
    else:
        for number, (size, data) in enumerate(read_chunks(file, end_of_words)):
            yield Piece(data, number == 0, size)
