"""Files that are complete or not there: everything is written under a hidden name, flushed to disk, then renamed.

A kill at any instant leaves the old content or the new one, never a mixture.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from settings import UserError

NO_SYMLINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)  # how file systems say that they have none


def hidden(path: Path) -> Path:
    """The name under which `path` is written before it is complete."""
    return path.with_name(f".{path.name}.tmp")


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def publish(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write to. It becomes `path` when the block ends, and vanishes if the block raises."""
    temporary = hidden(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def publish_text(path: Path, text: str) -> None:
    """Publish `text` as UTF-8."""
    with publish(path) as file:
        file.write(text.encode())


@contextmanager
def publish_directory(path: Path) -> Iterator[Path]:
    """An empty directory to fill. It becomes `path` when the block ends, and vanishes if the block raises."""
    temporary = hidden(path)
    remove(temporary)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
    except BaseException:
        remove(temporary)  # on a full disk its space is needed
        raise
    if path.exists():
        retire(path)
    os.rename(temporary, path)
    sync(path.parent)


def retire(directory: Path) -> None:
    """Remove a published directory. It is renamed first: a kill halfway must not leave a part of it under its name."""
    doomed = directory.with_name(f".{directory.name}.old.tmp")
    remove(doomed)
    os.rename(directory, doomed)
    remove(doomed)


def remove(path: Path) -> None:
    """Remove a file, link or directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_unfinished(directory: Path) -> None:
    """Remove what a killed process has left half written in `directory`."""
    for path in directory.glob(".*.tmp"):
        remove(path)


def link(name: Path, target: Path) -> None:
    """Point the symbolic link `name` at its sibling directory `target`, atomically. Without symbolic links, copy it."""
    temporary = hidden(name)
    remove(temporary)
    try:
        temporary.symlink_to(target.name)
    except OSError as error:
        if error.errno not in NO_SYMLINKS:
            raise
        with publish_directory(name) as copy:
            shutil.copytree(target, copy, dirs_exist_ok=True)
        return
    if name.is_dir() and not name.is_symlink():  # the run was copied by something that follows links
        retire(name)
    os.replace(temporary, name)
    sync(name.parent)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises UserError where it cannot be read or is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = f"only {listing(path.parent)}" if path.parent.is_dir() else "it is not a directory"
        raise UserError(f"{path.parent} has no {path.name}: {there}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content


def listing(directory: Path) -> str:
    """The first names in `directory`, for messages."""
    names = sorted(path.name for path in directory.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
