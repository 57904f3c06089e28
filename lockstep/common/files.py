"""Write files completely or not at all, and check them when they are read.

Everything is written under a hidden name, flushed to disk, and then renamed. So a kill at any instant leaves either the old
content or the new, never a mixture. `read_json` validates JSON against a type.
"""

import errno
import fcntl
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from lockstep.common.errors import UserError

LARGEST_TEXT = 1 << 26  # bytes of a JSON or text file; the largest tokenizer.json in use is about half as large


def hidden(path: Path) -> Path:
    """Return the temporary name of `path` while it is being written."""
    return path.with_name(f".{path.name}.tmp")


def sync(path: Path) -> None:
    """Flush a file or directory to disk. Some file systems cannot flush a directory; they are trusted with its entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # such as CIFS and WSL's DrvFs
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextmanager
def publish(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a binary file to write to. It becomes `path` when the block ends, and is deleted if the block raises.

    durable: if False, do not wait for the disk; a power failure may then lose the file.
    """
    temporary = hidden(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def publish_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically."""
    with publish(path) as file:
        file.write(text.encode())


@contextmanager
def publish_directory(path: Path, make: bool = True) -> Iterator[Path]:
    """Yield an empty directory to fill. It becomes `path` when the block ends, and is deleted if the block raises.

    make: False if the block creates the directory, because other processes write to it too.
    """
    temporary = hidden(path)
    try:
        if make:
            remove(temporary)
            temporary.mkdir(parents=True)
        yield temporary
        for file in (*temporary.iterdir(), temporary):
            sync(file)
    except BaseException:
        remove(temporary)  # a full disk needs the space back
        raise
    if path.exists():
        retire(path)
    os.rename(temporary, path)
    sync(path.parent)


def make_directory(path: Path) -> None:
    """Create a directory if it does not exist, and flush its parents so that a crash cannot lose it."""
    path.mkdir(parents=True, exist_ok=True)
    for parent in path.absolute().parents:
        with suppress(OSError):  # some parents are not ours to open
            sync(parent)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Lock a directory while the block runs. Creates it if it is missing, and removes it if it ends up empty.

    Raises UserError if another live process has locked it.
    """
    descriptor = None
    try:
        # The process that held the directory may have removed it just before we locked it, so we may hold a removed one.
        while descriptor is None or not is_open_at(descriptor, directory):
            if descriptor is not None:
                os.close(descriptor)
            make_directory(directory)
            descriptor = os.open(directory, os.O_RDONLY)
            if not lock(descriptor):
                raise UserError(f"{directory} is in use by another process; wait, or choose another --out")
        try:
            yield
        finally:
            with suppress(OSError):  # it is not empty
                directory.rmdir()  # while we hold it: a process that was refused must not remove it
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_open_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file or directory is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def lock(file: int | BinaryIO, shared: bool = False) -> bool:
    """Lock a file or directory for as long as it is open. Returns False if another live process has locked it.

    On file systems without locks, such as some shared ones, this always succeeds. shared: other shared locks are allowed.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def retire(directory: Path) -> None:
    """Remove a published directory, renaming it first so that a kill cannot leave part of it under its real name."""
    doomed = directory.with_name(f".{directory.name}.old.tmp")
    remove(doomed)
    os.rename(directory, doomed)
    sync(directory.parent)
    remove(doomed)


def remove(path: Path) -> None:
    """Remove a file, link or directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(name: Path, target: Path) -> None:
    """Atomically point the symbolic link `name` at its sibling directory `target`."""
    temporary = hidden(name)
    remove(temporary)
    temporary.symlink_to(target.name)
    if name.is_dir() and not name.is_symlink():  # a tool that follows links copied the run
        retire(name)
    os.replace(temporary, name)
    sync(name.parent)


def require_file(path: Path) -> Path:
    """Return `path`, for a library that opens files itself. Raises UserError if the file does not exist."""
    if not path.is_file():
        raise UserError(f"{path} is a directory, not a file" if path.is_dir() else f"{path.parent} has no {path.name}")
    return path


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hex. Raises UserError if the file does not exist."""
    with open(require_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: Path, limit: int = LARGEST_TEXT) -> bytes:
    """Read a file of at most `limit` bytes. Raises UserError if it is missing or larger, OSError if unreadable."""
    if (size := require_file(path).stat().st_size) > limit:
        raise UserError(f"{path} is too large: {size:,} bytes, but the limit is {limit:,}")
    return path.read_bytes()


def read_text(path: Path, limit: int = LARGEST_TEXT) -> str:
    """Read a UTF-8 text file. See `read_bytes`."""
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {error}") from None


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file as `kind`, a type for msgspec. Drops keys that a TypedDict does not declare.

    Raises a UserError that names the file, the key and what is allowed there.
    """
    return decode(read_bytes(path), kind, str(path))


def decode(value: Any, kind: type, name: str) -> Any:
    """Convert `value` to `kind`: JSON bytes, or decoded JSON. Raises a UserError that begins with `name`."""
    try:
        return msgspec.json.decode(value, type=kind) if isinstance(value, bytes) else msgspec.convert(value, kind)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise UserError(f"{name}: {error}") from None


def shortened(names: Iterable[str]) -> str:
    """Return the first few of `names`, for messages: there may be thousands, and a single one may be very long."""
    shown = [name if len(name) <= 60 else f"{name[:60]}..." for name in itertools.islice(names, 9)]
    return ", ".join(shown[:8] + ["..."] * (len(shown) > 8)) or "nothing"
