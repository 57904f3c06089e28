"""Sources of text: files and folders on this machine or the Hugging Face hub, read in units of about a megabyte."""

import contextlib
import functools
import hashlib
import json
import lzma
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from common import files
from common.errors import UserError, in_background
from dataset import hub

UNIT_BYTES = 1 << 20  # how much is read at a time; a worker encodes one unit
HASHED_BYTES = 1 << 16  # the first bytes of a document, whose hash chooses its split
PIECE_BYTES = 256  # what a document takes in memory besides its text
PARQUET_ROWS = 16  # how many rows are decoded at a time; each may be as long as the longest document
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
OPENERS = {
    ".gz": lambda raw: pyarrow.CompressedInputStream(raw, "gzip"),
    ".zst": lambda raw: pyarrow.CompressedInputStream(raw, "zstd"),
    ".xz": functools.partial(lzma.LZMAFile, format=lzma.FORMAT_XZ),  # the older .lzma takes any bytes, and may ask for 4 GB
}
HUB_SUFFIXES = (".parquet", ".jsonl", *(f".jsonl{suffix}" for suffix in OPENERS))  # .md is documentation there
NOT_EMBEDDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class SourceFile:
    """A file of text."""

    path: Path  # on this machine; a file on the hub is there once it is downloaded
    name: str  # relative to its source
    size: int
    modified: int = 0  # when it was last changed, in nanoseconds
    remote: hub.HubFile | None = None


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
    not_utf8: Path | None = None  # the file, if these bytes of it are not UTF-8

    @property
    def text(self) -> str:
        """The content. Bytes that are not UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def embedded_corpus() -> list[SourceFile]:
    """The Python standard library's own source files, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if path.is_file())
    return listed(root, (path for path in paths if not NOT_EMBEDDED & set(path.relative_to(root).parts)))


def text_format(path: Path) -> str:
    """The suffix that says how `path` holds text, without the suffix of its compression. Empty if it is unknown."""
    suffix = Path(path.stem).suffix if path.suffix in OPENERS else path.suffix
    return suffix if suffix in SUFFIXES else ""


def local_files(source: str) -> tuple[list[SourceFile], int]:
    """The files of a file or folder on this machine, in order, and how many it has that are not read. Raises UserError."""
    root = Path(source)
    if not root.exists():
        raise UserError(f"{source}: no such file or folder")
    paths = [path for path in (root.rglob("*") if root.is_dir() else [root]) if path.is_file()]
    found = listed(root, filter(text_format, paths))
    if not found:
        raise UserError(f"{source}: wanted {' '.join(SUFFIXES)}, also followed by {' '.join(OPENERS)}")
    return found, len(paths) - len(found)


def listed(root: Path, paths: Iterable[Path]) -> list[SourceFile]:
    """The files among `paths`, which are `root` or under it, in the order of their names."""
    found = [(path, path.stat()) for path in sorted(paths)]
    return [SourceFile(path, path.relative_to(root).as_posix(), s.st_size, s.st_mtime_ns) for path, s in found]


def hub_files(source: str, commit: str, downloads: Path) -> list[SourceFile]:
    """The files of a source on the hub, in order. `downloads` is where they will be. Raises UserError."""
    found = hub.list_files(source, commit, HUB_SUFFIXES, downloads)
    if not found:
        raise UserError(
            f"{source}: no file of that name or pattern ends in {' '.join(HUB_SUFFIXES)}; download others and give their paths"
        )
    return [SourceFile(file.local, file.path, file.size, remote=file) for file in found]


def fetch(file: SourceFile) -> Path:
    """The path of a file, which is downloaded first if it is on the hub. Raises UserError."""
    if file.remote:
        hub.download(file.remote)
    return file.path


def fetch_ahead(files: list[SourceFile]) -> Iterator[Path]:
    """The paths of files in order. While one is read, the next one is downloaded.

    A downloaded file is deleted as soon as the next one is asked for: at most two are on the disk. Raises
    UserError, also for a file on this machine that is not the one that was listed any more.
    """
    fetched = (in_background(functools.partial(fetch, file)) if file.remote else None for file in files)
    following = next(fetched, None)
    for file in files:
        path = following.result() if following else file.path
        following = next(fetched, None)
        yield path
        if file.remote:
            path.unlink()
        elif (status := path.stat()).st_size != file.size or status.st_mtime_ns != file.modified:  # its text is of two versions
            raise UserError(f"{path} changed while it was read; remove what was prepared, and prepare it again")


# ---------------------------------------------------------------------------------------------------------------------
# Text


def read_chunks(path: Path, find_cut: Callable[[bytes], int], limit: int) -> Iterator[tuple[int, bytes]]:
    """Read a file, decompressed, as (bytes on disk, content) in chunks of about UNIT_BYTES.

    find_cut: where a chunk may end in the bytes read so far (0: nowhere yet). Raises UserError, also where no chunk ends within
    `limit` bytes.
    """
    try:
        with files.open_regular(path) as raw, OPENERS.get(path.suffix, contextlib.nullcontext)(raw) as stream:
            rest, position, buffer = b"", 0, memoryview(bytearray(UNIT_BYTES))
            while size := stream.readinto(buffer):  # pyarrow's read() never frees its buffer if the stream is corrupt
                content = rest + buffer[:size]
                end = find_cut(content) if len(content) >= UNIT_BYTES else 0
                rest = content[end:]
                if len(rest) > limit:
                    raise UserError(f"{path}: a line is longer than --max_document_bytes={limit}")
                if end:
                    yield raw.tell() - position, content[:end]
                    position = raw.tell()
            if rest:
                yield raw.tell() - position, rest
    except MemoryError:
        raise UserError(f"{path}: unpacking it takes more memory than there is") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"{path}: {error}") from None


def end_of_words(content: bytes) -> int:
    """The end of the last word before white space: no token crosses it, so both sides keep the tokens of the whole.

    If the last 4096 bytes have no such place, the end of the last whole character.
    """
    tail = max(0, len(content) - 4096)
    if ends := [match.end() for match in re.finditer(rb"[A-Za-z](?=[ \n])", content[tail:])]:
        return tail + ends[-1]
    incomplete = re.search(rb"[\xc0-\xff][\x80-\xbf]{0,2}\Z", content)
    return incomplete.start() if incomplete else len(content)


def parquet_documents(path: Path, form: TextFormat) -> Iterator[Piece]:
    """The rows of a column of a parquet file, one document each. Raises UserError."""
    column, limit = form.column, form.max_document_bytes
    try:
        file = pyarrow.parquet.ParquetFile(files.require_regular(path), buffer_size=UNIT_BYTES)
        schema, strings = file.schema_arrow, (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
        if schema.names.count(column) > 1:
            raise UserError(f'{path}: {schema.names.count(column)} columns are called "{column}"')
        if column not in schema.names or schema.field(column).type not in strings:
            raise UserError(f'{path}: wanted a column "{column}" of strings; its columns are {files.shortened(schema.names)}')
        row_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
        for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
            # The size is that of all columns: pyarrow ends the process if the description of a single column is damaged.
            if group.total_byte_size > max(1, group.num_rows) * limit:
                raise UserError(f"{path}: a row is longer than --max_document_bytes={limit}")
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[column]):
            for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                if text and len(text) > limit:
                    raise UserError(f"{path}: a row is longer than --max_document_bytes={limit}")
                yield document(row_bytes, text or b"")
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: {error}") from None


def jsonl_documents(path: Path, form: TextFormat) -> Iterator[Piece]:
    """The lines of a .jsonl file, one document each. Raises UserError for a line without a text."""
    first = 1
    for size, data in read_chunks(path, lambda content: content.rfind(b"\n") + 1, form.max_document_bytes):
        lines = data.removesuffix(b"\n").split(b"\n")
        for number, line in enumerate(lines, first):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[form.column]
                content = b"" if text is None else text.encode("utf-8", "replace")
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                wanted = f'{path}: line {number} is not a JSON object with a string under "{form.column}"'
                raise UserError(f"{wanted}; --column names another key") from None
            yield document(size / len(lines), content)
        first += len(lines)


def document(bytes_on_disk: float, data: bytes) -> Piece:
    """A whole document, or one without a text, which gives no tokens."""
    return Piece(bytes_on_disk, data, head=data, starts_document=bool(data))


def read_pieces(path: Path, form: TextFormat) -> Iterator[Piece]:
    """Read a file in pieces of at most about UNIT_BYTES (a row or line is one piece)."""
    if text_format(path) == ".parquet":
        yield from parquet_documents(path, form)
    elif text_format(path) == ".jsonl":
        yield from jsonl_documents(path, form)
    else:
        head = b""
        for size, data in read_chunks(path, end_of_words, form.max_document_bytes):
            head = head or data
            yield Piece(size, data, head, data is head, None if is_utf8(data) else path)


def is_utf8(data: bytes) -> bool:
    """Whether `data` is text in UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


Position = tuple[int, int]  # of a unit: the file it was counted from, and its number since


def read_units(paths: Iterable[Path], form: TextFormat, first_file: int = 0) -> Iterator[tuple[Position, list[Piece]]]:
    """Read files in order, in units of about UNIT_BYTES, each with its position.

    Units are counted from the last file at whose beginning a unit begins. A restart that begins to read at that file gets the
    same units; `first_file` is its number among all files. Therefore a unit also ends where a file of several units ends.
    """
    unit, filled, counted_from, number = [], 0, first_file, 0
    for index, path in enumerate(paths, first_file):
        if not unit:
            counted_from, number = index, 0
        for piece in read_pieces(path, form):
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
