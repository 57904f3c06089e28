"""Read text from files and folders, on disk or at any URL that fsspec opens, about a megabyte at a time."""

import codecs
import contextlib
import functools
import glob
import json
import lzma
import os
import re
import sysconfig
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import BinaryIO

import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.implementations.local import LocalFileSystem

from lockstep.common import files
from lockstep.common.errors import UserError, explain, named_errors, plural

CHUNK_BYTES = 1 << 20  # bytes to read at a time
BLOCK_BYTES = 1 << 24  # bytes per request to a server
BOMS = {  # byte order marks; UTF-32's before UTF-16's, as they begin with the same bytes
    **{codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32-le", codecs.BOM_UTF32_BE: "utf-32-be"},
    **{codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"},
}
PLAINLY = 8  # with this many bytes that are not UTF-8, and fewer characters that are, a file has another encoding
CONTROLS = bytes({*range(32)} - {*b"\t\n\v\f\r\x1b"})  # UTF-16 has many of these bytes, text in UTF-8 none
ICONV = "iconv -f ENCODING -t UTF-8 FILE > NEW"
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
# In a folder, these are left out: names of documentation and of held-out files, and hidden files such as macOS's ._NAME.
DOCUMENTATION = {"readme", "license"}
HELD_OUT = re.compile(r"(^|[/_.-])(val|valid|validation|dev|test|eval)[/_.-]", re.IGNORECASE)
LINKED = "in linked folders"
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
    separator: str = ""  # what separates the documents of a plain text file (empty: it is one document)
    version: str = ""  # changes when the content does: a time of modification, or a server's checksum; empty if unknown

    def __str__(self) -> str:
        """Return the URL or path, relative if the file is below the working directory."""
        return self.system.unstrip_protocol(self.path).removeprefix("file://").removeprefix(f"{os.getcwd()}/")

    @property
    def form(self) -> str:
        """The suffix that gives the file's format, ignoring any compression suffix. Empty if it is not one of SUFFIXES."""
        return form_of(self.name)

    @property
    def compression(self) -> str:
        """The suffix of a compressed file, in lower case. Empty or another suffix if the file is not compressed."""
        return PurePosixPath(self.name).suffix.lower()

    def open(self) -> BinaryIO:
        """Open the file for reading. The file system retries failed requests."""
        return self.system.open(self.path, "rb", block_size=BLOCK_BYTES)


@dataclass(frozen=True)
class Piece:
    """A document, or part of a long one."""

    data: bytes  # UTF-8; empty for a row without text
    starts_document: bool
    bytes_on_disk: float

    @functools.cached_property
    def text(self) -> str:
        """The content. Bytes that are not UTF-8 become U+FFFD."""
        return self.data.decode("utf-8", "replace")

    @property
    def replaced(self) -> int:
        """How many U+FFFD stand for bytes that are not UTF-8."""
        return self.text.count("\ufffd") - self.data.count("\ufffd".encode())


# ---------------------------------------------------------------------------------------------------------------------
# Files


def form_of(name: str) -> str:
    """Return the suffix that gives a file's format, in lower case; see `SourceFile.form`."""
    path = PurePosixPath(name.lower())
    suffix = PurePosixPath(path.stem).suffix if path.suffix in OPENERS else path.suffix
    return suffix if suffix in SUFFIXES else ""


def embedded_corpus() -> list[SourceFile]:
    """Return the source files of the Python standard library, without its tests."""
    found, _ = list_files(sysconfig.get_path("stdlib"), prune=NOT_EMBEDDED)
    # Its version is Python's: another installation of the same Python has other times, but the same text.
    return [replace(file, version="") for file in found if file.form == ".py"]


def list_files(
    source: str,
    url: str = "",
    column: str = "text",
    max_document_bytes: int = 1 << 25,
    separator: str = "",
    prune: Container[str] = (),
) -> tuple[list[SourceFile], dict[str, list[str]]]:
    """List the text files at a path or URL (a file, folder or pattern), sorted by name, and the files left out, by reason.

    url: the location of `source`, if it differs from its name. prune: names of local folders not to look into.
    Raises UserError, also for a local file or folder that cannot be read.
    """
    documented = source.startswith(HUB) and not source.lower().endswith((*SUFFIXES, *OPENERS))
    forms = (".jsonl", ".parquet") if documented else SUFFIXES  # .md and .txt there are documentation
    found, skipped = {}, {}
    with named_errors(source):
        remote = "://" in source
        system, path = fsspec.core.url_to_fs(url or source) if remote else (LocalFiles(), os.path.abspath(source))
        local = isinstance(system, LocalFileSystem)
        if local:  # file:// too
            system = LocalFiles()
        try:
            matches, fixed = [system.info(path)], path
        except FileNotFoundError as error:
            if not glob.has_magic(path):
                raise UserError(f"{source}: no such file or folder" + f": {explain(error)}" * remote) from None
            matches = system.glob(path, detail=True).values()
            fixed = os.path.dirname(path[: glob.magic_check.search(path).start()])
        for match in matches:
            name = match["name"]
            if match["type"] == "directory":
                inside = walk(name, prune) if local else system.find(name, detail=True)
                taken, left_out = select(name, inside, forms)
            elif local and os.path.isdir(name):
                taken, left_out = {}, {LINKED: [name]}
            elif form_of(name) not in forms:
                taken, left_out = {}, {"of other types": [name]}
            elif is_hidden(os.path.relpath(name, fixed)) and "/." not in path[len(fixed) :]:  # as in a shell
                taken, left_out = {}, {"with hidden names": [name]}
            else:
                taken, left_out = {name: match}, {}
            found |= taken
            for reason, places in left_out.items():
                skipped.setdefault(reason, []).extend(places)
        paths = sorted(found, key=PurePosixPath)
        sizes = [measure(path, found[path], local) for path in paths]
    if not paths:
        expected = f"expected {' '.join(forms)}, optionally with {' '.join(OPENERS)}"
        pattern = "; for plain text, name a pattern such as */*.txt" * documented
        raise UserError(f"{source}: no text files there; {expected}{pattern}")
    root = os.path.commonpath(map(os.path.dirname, paths))
    more = system, column, max_document_bytes, separator
    texts = [
        SourceFile(p, os.path.relpath(p, root), size, *more, version) for p, (size, version) in zip(paths, sizes, strict=True)
    ]
    return texts, skipped


class LocalFiles(LocalFileSystem):
    """Local files, where a folder that cannot be listed is an error. fsspec would leave it out of what a pattern matches."""

    def walk(self, path, maxdepth=None, topdown=True, on_error="raise", **kwargs):
        """Yield each folder with its folders and files. Raises OSError."""
        return super().walk(path, maxdepth, topdown, on_error, **kwargs)


def walk(folder: str, prune: Container[str]) -> dict[str, dict]:
    """Return the files below a local folder, and its hidden folders and links to folders, which it does not look into.

    Raises OSError if any folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    found = {}
    for parent, folders, names in os.walk(folder, onerror=refuse):
        closed = [name for name in folders if name.startswith(".") or os.path.islink(os.path.join(parent, name))]
        folders[:] = [name for name in folders if name not in closed and name not in prune]
        found |= {os.path.join(parent, name): {"type": "directory"} for name in closed}
        found |= {os.path.join(parent, name): {} for name in names}
    return found


def select(folder: str, inside: dict[str, dict], forms: tuple[str, ...]) -> tuple[dict[str, dict], dict[str, list[str]]]:
    """Divide what is `inside` a folder of any file system into text to train on and what is left out, by reason.

    Documentation and held-out files are left out only if there is other text.
    """
    taken, left_out = {}, {}
    for place, info in inside.items():
        hidden, is_folder = is_hidden(os.path.relpath(place, folder)), info.get("type") == "directory"
        if is_folder and not hidden:
            left_out.setdefault(LINKED, []).append(place)
        elif not is_folder and form_of(place) not in forms:
            left_out.setdefault("of other types", []).append(place)
        elif hidden:
            left_out.setdefault("with hidden names", []).append(place)
        else:
            taken[place] = info
    for reason, applies in (("named README or LICENSE", is_documentation), ("of validation or test data", is_held_out)):
        places = {place for place in taken if applies(os.path.relpath(place, folder))}
        if 0 < len(places) < len(taken):
            left_out[reason] = sorted(places)
            taken = {place: info for place, info in taken.items() if place not in places}
    return taken, left_out


def is_hidden(name: str) -> bool:
    """Return whether a relative path contains a hidden file or folder, such as ._a.txt or .ipynb_checkpoints/a.txt."""
    return any(part.startswith(".") and part.strip(".") for part in PurePosixPath(name).parts)


def is_documentation(name: str) -> bool:
    """Return whether a file describes the others, such as README.md."""
    return PurePosixPath(name).name.lower().partition(".")[0] in DOCUMENTATION


def is_held_out(name: str) -> bool:
    """Return whether a relative path looks like validation or test data. A program's tests are text like the rest of it."""
    return form_of(name) != ".py" and bool(HELD_OUT.search(name))


def measure(path: str, info: dict, local: bool) -> tuple[int, str]:
    """Return a file's size and version. Raises UserError for a local file that cannot be read, before hours of work."""
    if not local:
        return info["size"] or 0, str(info.get("ETag") or "")
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        raise UserError(f"{path} cannot be read; change its permissions, or remove it")
    status = os.stat(path)
    return status.st_size, str(status.st_mtime_ns)


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
    """Read and decompress a file in chunks of about CHUNK_BYTES. Yields (bytes on disk, content in UTF-8).

    A byte order mark decides the encoding, and is removed.
    find_cut: returns where a chunk may end in the bytes read so far (0: nowhere yet). Raises UserError, even for a long line.
    """
    unpack = OPENERS.get(file.compression, contextlib.nullcontext)
    with named_errors(file), file.open() as raw, unpack(raw) as stream:
        rest, position, buffer, encoding = b"", 0, memoryview(bytearray(CHUNK_BYTES)), ""
        while size := stream.readinto(buffer):  # pyarrow's read() leaks its buffer if the stream is corrupt
            data = bytes(buffer[:size])
            if not encoding:
                mark = next((mark for mark in BOMS if data.startswith(mark)), b"")
                data, encoding = data.removeprefix(mark), BOMS.get(mark, "utf-8")
                decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
            content = rest + (data if encoding == "utf-8" else to_utf8(decoder.decode(data)))
            end = find_cut(content) if len(content) >= CHUNK_BYTES else 0
            rest = content[end:]
            if len(rest) > file.max_document_bytes:
                part = "a line" if file.form == ".jsonl" else "a document that cannot be cut"
                raise UserError(f"{file}: {part} is longer than --max_document_bytes={file.max_document_bytes}")
            if end:
                yield raw.tell() - position, content[:end]
                position = raw.tell()
        if rest:
            yield raw.tell() - position, rest


def to_utf8(text: str) -> bytes:
    """Encode `text`. Half a surrogate pair, which UTF-8 cannot express, becomes a byte that is not UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return re.sub(rb"\xed[\xa0-\xbf][\x80-\xbf]", b"\xff", text.encode("utf-8", "surrogatepass"))


def require_utf8(source_files: list[SourceFile]) -> None:
    """Read the plain text files on this machine. Raises a UserError that lists those in another encoding than UTF-8.

    A few damaged characters are not an error; see `Piece.replaced`.
    """
    foreign = {}
    for file in source_files:
        if "://" in str(file) or file.form in (".jsonl", ".parquet"):
            continue
        size = controls = invalid = valid = 0
        for _, data in read_chunks(file, end_of_character):
            size += len(data)
            controls += len(data) - len(data.translate(None, CONTROLS))
            if not data.isascii():
                piece = Piece(data, False, 0)
                invalid += piece.replaced
                valid += len(piece.text) - piece.replaced - len(data.translate(None, bytes(range(128, 256))))
        if controls > size / 4:
            foreign[str(file)] = "UTF-16 without a byte order mark?"
        elif invalid >= PLAINLY and invalid > valid:
            foreign[str(file)] = f"{invalid:,} bytes are not UTF-8"
    if foreign:
        shown = files.shortened(f"{name} ({why})" for name, why in foreign.items())
        convert = f"convert with {ICONV}, where ENCODING is, for example, WINDOWS-1252 or UTF-16LE"
        raise UserError(f"{plural(len(foreign), 'file')} not in UTF-8: {shown}; {convert}")


def end_of_character(content: bytes) -> int:
    """Return the end of the last whole character."""
    incomplete = re.search(rb"[\xc0-\xff][\x80-\xbf]{0,2}\Z", content)
    return incomplete.start() if incomplete else len(content)


def end_of_words(content: bytes) -> int:
    """Return the end of the last word before white space, or 0. No token crosses that point; see `Tokenizer.cuttable`."""
    for size in (4096, 4 * CHUNK_BYTES):  # what is before the last chunk was searched with it
        tail = content[-size:]
        for match in reversed(list(re.finditer(rb"(?:[A-Za-z]|[\xc3-\xf4][\x80-\xbf]{1,3})(?=[ \n])", tail))):
            if match[0].decode("utf-8", "replace").isalpha():
                return len(content) - len(tail) + match.end()
    return 0


def parquet_rows(file: SourceFile) -> Iterator[Piece]:
    """Yield the rows of one column of a parquet file, each a document. Raises UserError."""
    column, limit = file.column, file.max_document_bytes
    with named_errors(file), file.open() as raw:
        table = pyarrow.parquet.ParquetFile(raw, buffer_size=CHUNK_BYTES)
        require_strings(file, table.schema_arrow)
        row_bytes = file.size / max(1, table.metadata.num_rows)
        for group in map(table.metadata.row_group, range(table.metadata.num_row_groups)):
            # Check the total size of all columns: asking for one column's would let damaged metadata abort the process.
            if group.total_byte_size > max(1, group.num_rows) * limit:
                larger = f"its rows, with all columns, are larger than --max_document_bytes={limit}"
                raise UserError(f"{file}: {larger}; raise it, or write the column of text to a file of its own")
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[column]):
            rows = batch.column(0)
            for text in rows.view(AS_BYTES[rows.type]).to_pylist():
                if text and len(text) > limit:
                    raise UserError(f"{file}: a row is longer than --max_document_bytes={limit}")
                yield Piece(text or b"", bool(text), row_bytes)


def require_strings(file: SourceFile, schema: pyarrow.Schema) -> None:
    """Raise a UserError that describes the column, unless it contains strings."""
    found = {field.name: field.type for field in schema}
    if found.get(file.column) in AS_BYTES:
        return
    strings = [name for name, kind in found.items() if kind in AS_BYTES]
    others = f"choose a column of strings with --column: {files.shortened(strings)}" if strings else ""
    if file.column not in found:
        problem = f'no column "{file.column}" of strings; its columns are {files.shortened(found)}'
        raise UserError(f"{file}: {problem}" + (f"; {others}" if others else ""))
    kind = found[file.column]
    if pyarrow.types.is_nested(kind):
        convert = "write one string per row"
    elif pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind) or pyarrow.types.is_dictionary(kind):
        convert = 'if it is text, write it with pyarrow\'s column.cast("string")'
    else:
        convert = "text is expected"
    problem = f'column "{file.column}" contains {files.shortened([str(kind)])}, not strings'
    raise UserError(f"{file}: {problem}; " + "; or ".join(filter(None, [convert, others])))


def jsonl_rows(file: SourceFile) -> Iterator[Piece]:
    """Yield the lines of a .jsonl file, each a document. Raises UserError for an invalid line."""
    first = 1
    for size, data in read_chunks(file, lambda content: content.rfind(b"\n") + 1):
        lines = data.removesuffix(b"\n").split(b"\n")
        for number, line in enumerate(lines, first):
            if not line.strip():
                continue
            try:
                text = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass"))[file.column]
                content = b"" if text is None else to_utf8(text)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise UserError(f"{file}: line {number} {describe_line(line, file.column)}") from None
            yield Piece(content, bool(content), size / len(lines))
        first += len(lines)


def describe_line(line: bytes, key: str) -> str:
    """Say why a line is not a JSON object with a string under `key`, and what would work."""
    if b"\0" in line:
        return f"contains NUL bytes, as UTF-16 does; convert the file to UTF-8: {ICONV}"
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass").strip()
        value, end = json.JSONDecoder().raw_decode(text)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {error.start + 1} is 0x{line[error.start]:02x}); convert the file: {ICONV}"
    except RecursionError:
        return "is nested too deeply"
    except json.JSONDecodeError as error:
        if re.match(r"\{\s*'", text):
            return "is a Python dict, not JSON; write each line with json.dumps"
        if text[:1] not in "{[":
            return 'is not JSON, but plain text; write {"' + key + '": "..."} on each line, or name the file .txt'
        if error.pos >= len(text) or "Unterminated" in error.msg:
            cut = "ends before its JSON value does; remove it if the file was cut off there"
            return f"{cut}, or, if values span several lines, write each on its own (jq -c . FILE does)"
        return f"is not valid JSON ({error.msg} at character {error.pos + 1}); write each line with json.dumps"
    except ValueError:  # Python's limit of digits
        return "has an integer of thousands of digits; write it as a string"
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a string",
        int: "a number",
        float: "a number",
        bool: "true or false",
        type(None): "null",
    }
    if rest := text[end:].strip():
        if rest == ",":
            return "ends with a comma; write one object per line, with nothing after it (sed 's/,$//' FILE does)"
        return f"has more after its first JSON value: {files.shortened([rest])}; write one object per line (jq -c . FILE does)"
    if isinstance(value, list):
        return "is a JSON list, not an object; write one object per line (jq -c '.[]' FILE does)"
    if not isinstance(value, dict):
        return f'is {kinds[type(value)]}, not a JSON object with a string under "{key}"'
    if key in value:
        return f'has {kinds[type(value[key])]} under "{key}", not a string; write a string, or choose another key with --column'
    outer = next((name for name, inner in value.items() if isinstance(inner, dict) and isinstance(inner.get(key), str)), None)
    if outer is not None:
        return f'has "{key}" only inside "{outer}"; move it to the top level (jq -c \'.["{outer}"]\' FILE does)'
    strings = [name for name, inner in value.items() if isinstance(inner, str)]
    choose = f"choose another with --column={strings[0]}" if strings else "none of them has a string"
    return f'has no "{key}"; its keys are {files.shortened(value)}; {choose}'


def separated_documents(file: SourceFile) -> Iterator[Piece]:
    """Yield the documents between the separators of a plain text file, without the line ends around them. Raises UserError."""
    separator = file.separator.encode()

    def after_last_separator(content: bytes) -> int:
        found = content.rfind(separator)
        return found + len(separator) if found >= 0 else 0

    for size, data in read_chunks(file, after_last_separator):
        documents = [document.strip(b"\r\n") for document in data.split(separator)]
        documents = [document for document in documents if document]
        for document in documents:
            yield Piece(document, True, size / len(documents))


def read_pieces(file: SourceFile, whole: bool = False) -> Iterator[Piece]:
    """Read a file in pieces of at most about CHUNK_BYTES. A row or line is always one piece, and so is a file if `whole`.

    Raises UserError.
    """
    if file.form == ".parquet":
        yield from parquet_rows(file)
    elif file.form == ".jsonl":
        yield from jsonl_rows(file)
    elif file.separator:
        yield from separated_documents(file)
    else:
        for number, (size, data) in enumerate(read_chunks(file, (lambda _: 0) if whole else end_of_words)):
            yield Piece(data, number == 0, size)
