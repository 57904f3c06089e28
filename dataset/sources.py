"""Sources of text: files and folders, here or in any file system that fsspec knows, read in units of about a megabyte."""

import contextlib
import functools
import glob
import hashlib
import json
import lzma
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.implementations.local import LocalFileSystem

from common import files
from common.errors import UserError, explain

UNIT_BYTES = 1 << 20  # how much is read at a time; a worker encodes one unit
BLOCK_BYTES = 1 << 24  # what a request to a server asks for
HASHED_BYTES = 1 << 16  # the first bytes of a document, whose hash chooses its split
PIECE_BYTES = 256  # what a document takes in memory besides its text
PARQUET_ROWS = 16  # how many rows are decoded at a time; each may be as long as the longest document
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
OPENERS = {
    ".gz": lambda raw: pyarrow.CompressedInputStream(raw, "gzip"),
    ".zst": lambda raw: pyarrow.CompressedInputStream(raw, "zstd"),
    ".xz": functools.partial(lzma.LZMAFile, format=lzma.FORMAT_XZ),  # the older .lzma takes any bytes, and may ask for 4 GB
}
HUB = "hf://datasets/"
NOT_EMBEDDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """A file of text."""

    path: str  # in its file system
    name: str  # relative to its source
    size: int
    system: fsspec.AbstractFileSystem = LocalFileSystem()

    def __str__(self) -> str:
        return self.path if self.is_local else self.system.unstrip_protocol(self.path)

    @property
    def is_local(self) -> bool:
        """Whether the file is on this machine."""
        return isinstance(self.system, LocalFileSystem)

    @property
    def form(self) -> str:
        """See `text_form`."""
        return text_form(self.name)

    def open(self) -> BinaryIO:
        """The file, to read. A server is asked again by the file system where a request fails."""
        return self.system.open(self.path, "rb", block_size=BLOCK_BYTES)


@dataclass(frozen=True)
class TextFormat:
    """How files hold documents."""

    column: str = "text"  # of .parquet files, or the key in .jsonl files
    max_document_bytes: int = 1 << 25  # the longest line or row


@dataclass(frozen=True)
class Piece:
    """A document, or a part of a long one."""

    bytes_on_disk: float
    data: bytes  # UTF-8; none of a document without a text
    head: bytes  # how the document begins
    starts_document: bool
    not_utf8: str = ""  # the file, if these bytes of it are not UTF-8

    @property
    def text(self) -> str:
        """The content. Bytes that are not UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", "replace")


@contextlib.contextmanager
def named_errors(name: object) -> Iterator[None]:
    """Turn what a file system, a server or a damaged file raises in the block into a UserError that begins with `name`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each file system raises its client's own classes
        raise UserError(f"{name}: {explain(error)}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Files


def text_form(name: str) -> str:
    """The suffix that says how a file holds text, without that of its compression. Empty if it is unknown."""
    path = PurePosixPath(name)
    suffix = PurePosixPath(path.stem).suffix if path.suffix in OPENERS else path.suffix
    return suffix if suffix in SUFFIXES else ""


def embedded_corpus() -> list[SourceFile]:
    """The Python standard library's own source files, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    return [file for file in local_files(root) if file.form == ".py" and not NOT_EMBEDDED & set(Path(file.name).parts)]


def local_files(root: Path) -> list[SourceFile]:
    """The files that are `root` or under it, in the order of their names."""
    if not root.exists():
        raise FileNotFoundError("no such file or folder")
    paths = [path for path in sorted(root.rglob("*") if root.is_dir() else [root]) if path.is_file()]
    base = root if root.is_dir() else root.parent
    return [SourceFile(str(path), str(path.relative_to(base)), path.stat().st_size) for path in paths]


def remote_files(url: str) -> list[SourceFile]:
    """The files at a URL that fsspec can open (a file, a folder or a pattern), in the order of their names."""
    system, path = fsspec.core.url_to_fs(url)
    try:
        matches = [system.info(path)]
    except FileNotFoundError as error:
        if not glob.has_magic(path):
            raise FileNotFoundError("no such file or folder") from error
        matches = system.glob(path, detail=True).values()
    sizes = {}
    for match in matches:
        inside = system.find(match["name"], detail=True) if match["type"] == "directory" else {match["name"]: match}
        sizes |= {path: info["size"] or 0 for path, info in inside.items() if info["type"] == "file"}
    root = os.path.commonpath(map(os.path.dirname, sizes)) if sizes else ""
    return [SourceFile(path, os.path.relpath(path, root), sizes[path], system) for path in sorted(sizes, key=PurePosixPath)]


def on_hub(source: str, commit: str = "") -> tuple[str, str]:
    """The URL of a dataset on the Hugging Face hub at a commit, and the commit: by default the one that `source` means now.

    Raises UserError.
    """
    from huggingface_hub import HfApi, HfFileSystem

    if not source.startswith(HUB):
        raise UserError(f"{source}: wanted {HUB}OWNER/NAME, also with @REVISION, and with /FOLDER or /PATTERN, after it")
    with named_errors(source):
        place = HfFileSystem().resolve_path(source)
        commit = commit or HfApi().dataset_info(place.repo_id, revision=place.revision).sha
    return f"{HUB}{place.repo_id}@{commit}/{place.path_in_repo}".rstrip("/"), commit


def list_files(source: str, url: str = "") -> tuple[list[SourceFile], int]:
    """The files of text at a path or URL, in order, and how many others are there. Raises UserError.

    url: where they are, if that is not `source` itself.
    """
    with named_errors(source):
        found = remote_files(url or source) if "://" in source else local_files(Path(source))
    texts = [file for file in found if file.form]
    if source.startswith(HUB) and not text_form(source):  # a folder, where .md and .txt are documentation
        texts = [file for file in texts if file.form in (".jsonl", ".parquet")]
    if not texts:
        raise UserError(f"{source}: no file of text there; wanted {' '.join(SUFFIXES)}, also followed by {' '.join(OPENERS)}")
    return texts, len(found) - len(texts)


# ---------------------------------------------------------------------------------------------------------------------
# Text


def read_chunks(file: SourceFile, find_cut: Callable[[bytes], int], limit: int) -> Iterator[tuple[int, bytes]]:
    """Read a file, decompressed, as (bytes on disk, content) in chunks of about UNIT_BYTES.

    find_cut: where a chunk may end in the bytes read so far (0: nowhere yet). Raises UserError, also where no chunk ends within
    `limit` bytes.
    """
    unpack = OPENERS.get(PurePosixPath(file.name).suffix, contextlib.nullcontext)
    with named_errors(file), file.open() as raw, unpack(raw) as stream:
        rest, position, buffer = b"", 0, memoryview(bytearray(UNIT_BYTES))
        while size := stream.readinto(buffer):  # pyarrow's read() never frees its buffer if the stream is corrupt
            content = rest + buffer[:size]
            end = find_cut(content) if len(content) >= UNIT_BYTES else 0
            rest = content[end:]
            if len(rest) > limit:
                raise UserError(f"{file}: a line is longer than --max_document_bytes={limit}")
            if end:
                yield raw.tell() - position, content[:end]
                position = raw.tell()
        if rest:
            yield raw.tell() - position, rest


def end_of_words(content: bytes) -> int:
    """The end of the last word before white space: no token crosses it, so both sides keep the tokens of the whole.

    If the last 4096 bytes have no such place, the end of the last whole character.
    """
    tail = max(0, len(content) - 4096)
    if ends := [match.end() for match in re.finditer(rb"[A-Za-z](?=[ \n])", content[tail:])]:
        return tail + ends[-1]
    incomplete = re.search(rb"[\xc0-\xff][\x80-\xbf]{0,2}\Z", content)
    return incomplete.start() if incomplete else len(content)


def parquet_documents(file: SourceFile, form: TextFormat) -> Iterator[Piece]:
    """The rows of a column of a parquet file, one document each. Raises UserError."""
    column, limit = form.column, form.max_document_bytes
    too_long = UserError(f"{file}: a row is longer than --max_document_bytes={limit}")
    with named_errors(file), file.open() as raw:
        table = pyarrow.parquet.ParquetFile(raw, buffer_size=UNIT_BYTES)
        schema, strings = table.schema_arrow, (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
        if column not in schema.names or schema.field(column).type not in strings:
            raise UserError(f'{file}: wanted a column "{column}" of strings; its columns are {files.shortened(schema.names)}')
        row_bytes = file.size / max(1, table.metadata.num_rows)
        for group in map(table.metadata.row_group, range(table.metadata.num_row_groups)):
            # The size is that of all columns: pyarrow ends the process if the description of a single column is damaged.
            if group.total_byte_size > max(1, group.num_rows) * limit:
                raise too_long
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[column]):
            for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                if text and len(text) > limit:
                    raise too_long
                yield document(row_bytes, text or b"")


def jsonl_documents(file: SourceFile, form: TextFormat) -> Iterator[Piece]:
    """The lines of a .jsonl file, one document each. Raises UserError for a line without a text."""
    first = 1
    for size, data in read_chunks(file, lambda content: content.rfind(b"\n") + 1, form.max_document_bytes):
        lines = data.removesuffix(b"\n").split(b"\n")
        for number, line in enumerate(lines, first):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[form.column]
                content = b"" if text is None else text.encode("utf-8", "replace")
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                wanted = f'{file}: line {number} is not a JSON object with a string under "{form.column}"'
                raise UserError(f"{wanted}; --column names another key") from None
            yield document(size / len(lines), content)
        first += len(lines)


def document(bytes_on_disk: float, data: bytes) -> Piece:
    """A whole document, or one without a text, which gives no tokens."""
    return Piece(bytes_on_disk, data, head=data, starts_document=bool(data))


def read_pieces(file: SourceFile, form: TextFormat) -> Iterator[Piece]:
    """Read a file in pieces of at most about UNIT_BYTES (a row or line is one piece). Raises UserError."""
    if file.form == ".parquet":
        yield from parquet_documents(file, form)
    elif file.form == ".jsonl":
        yield from jsonl_documents(file, form)
    else:
        head = b""
        for size, data in read_chunks(file, end_of_words, form.max_document_bytes):
            head = head or data
            not_utf8 = ""
            try:
                data.decode()
            except UnicodeDecodeError:
                not_utf8 = str(file)
            yield Piece(size, data, head, data is head, not_utf8)


Position = tuple[int, int]  # of a unit: the file it was counted from, and its number since


def read_units(
    source_files: Iterable[SourceFile], form: TextFormat, first_file: int = 0
) -> Iterator[tuple[Position, list[Piece]]]:
    """Read files in order, in units of about UNIT_BYTES, each with its position.

    Units are counted from the last file at whose beginning a unit begins. A restart that begins to read at that file gets the
    same units; `first_file` is its number among all files. Therefore a unit also ends where a file of several units ends.
    """
    unit, filled, counted_from, number = [], 0, first_file, 0
    for index, file in enumerate(source_files, first_file):
        if not unit:
            counted_from, number = index, 0
        for piece in read_pieces(file, form):
            unit.append(piece)
            filled += len(piece.data) + PIECE_BYTES
            if filled >= UNIT_BYTES:
                yield (counted_from, number), unit
                unit, filled, number = [], 0, number + 1
        if unit and number:
            yield (counted_from, number), unit
            unit, filled = [], 0
    if unit:
        yield (counted_from, number), unit


def split_hash(data: bytes) -> float:
    """A hash of the beginning of a document, uniform in [0, 1). It chooses the document's split."""
    return int.from_bytes(hashlib.blake2b(data[:HASHED_BYTES], digest_size=6).digest(), "big") / 2**48
