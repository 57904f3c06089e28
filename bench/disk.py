"""A disk that fails: the operations of a program on files, counted, recorded, made to fail, and cut off by a loss of power.

`Disk` stands under Python's own calls (open, write, flush, rename, ...) for one directory. What a loss of power may leave is
derived from the record, as ALICE does (Pillai et al., OSDI 2014), and recovery is run from each such state, as CrashMonkey does
(Mohan et al., OSDI 2018). The file system assumed is the weakest that POSIX allows. The content of a file lasts once the file
was flushed; a name lasts once its directory was. Until then either may be there without the other, in any order.
"""

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from checkpoints import store

Tree = dict | bytes | str  # a directory by name, the content of a file, or the target of a link
CHANGES = {"create", "write", "flush", "rename", "unlink", "link", "mkdir"}
# What an operation may answer: errors, a write that stops halfway, or a disk that takes no change from here on.
FAULTS = {
    "EIO": None,
    "ENOSPC": {"create", "write", "mkdir", "link"},
    "short write": {"write"},
    "read-only from here on": CHANGES,
}


class Fault(NamedTuple):
    """What happens to the operation `number`, counted from 1."""

    number: int
    kind: str  # of FAULTS


class Entry(NamedTuple):
    """Names that a directory gets (a node) or loses (None), all at once."""

    directory: int
    names: dict[str, int | None]


class Data(NamedTuple):
    """The content of a file from here on."""

    node: int
    content: bytes


class Flush(NamedTuple):
    """A file or directory is on disk as it is now."""

    node: int


class Promise(NamedTuple):
    """The program has told somebody that this is saved."""

    value: object


class Disk(contextlib.ExitStack):
    """The directory `root` while a program works on it. `ops` is the record of its changes."""

    def __init__(self, root: Path, fault: Fault | None = None):
        super().__init__()
        self.root, self.fault, self.kinds = os.path.abspath(root), fault, []  # the kinds of the operations so far
        self.ops, self.nodes, self.content = [], [{}], {}  # a node is {} (a directory), "" (a file) or the target of a link
        self.names = {0: {}}  # of each directory, now
        self._scan(self.root, 0)
        self.before = len(self.ops)  # what was there lasts

    def promise(self, value) -> None:
        """Record what the program has told somebody."""
        self.ops.append(Promise(value))

    def __enter__(self):
        """Stand under the calls of this process."""
        for name in ("open", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "stat", "lstat", "scandir", "listdir"):
            self.enter_context(mock.patch.object(os, name, self._wrap(getattr(os, name), getattr(self, f"_{name}"))))
        self.enter_context(mock.patch.object(os, "symlink", self._symlink(os.symlink)))
        opened = self._wrap(open, self._io_open)
        self.enter_context(mock.patch.object(builtins, "open", opened))
        self.enter_context(mock.patch.object(io, "open", opened))
        self.enter_context(mock.patch.object(store, "save_file", self._save_file(store.save_file)))
        return self

    # What stands in for each call. `real` does the work.

    def _wrap(self, real, stand_in):
        def call(path=".", *args, **more):
            full = self._full(path, more.get("dir_fd"))
            return real(path, *args, **more) if full is None else stand_in(real, full, path, *args, **more)

        return call

    def _full(self, path, dir_fd=None) -> str | None:
        """The absolute path, or None outside of `root`."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        path = os.path.abspath(path)
        return path if path.startswith(self.root) else None

    def _stat(self, real, full, path, *args, **more):
        self._count("stat", full)
        return real(path, *args, **more)

    _lstat = _stat

    def _scandir(self, real, full, path, *args):
        self._count("list", full)
        return real(path, *args)

    _listdir = _scandir

    def _open(self, real, full, path, flags, *args, **more):
        self._count("create" if flags & os.O_CREAT else "open", full)
        descriptor = real(path, flags, *args, **more)
        if flags & os.O_CREAT:
            self._create(full)
        return descriptor

    def _io_open(self, real, full, path, mode="r", *args, **more):
        if isinstance(path, int):
            return real(path, mode, *args, **more)
        writes = set(mode) & set("wax+")
        self._count("create" if writes else "open", full)
        file = real(path, mode, *args, **more)
        if not writes:
            return file
        self._create(full)
        self._note(full)
        return Writer(self, file, full)

    def _fsync(self, real, full, descriptor):
        self._note(full)
        self._count("flush", full)
        real(descriptor)
        if (node := self._node(full)) is not None:
            self.ops.append(Flush(node))

    def _rename(self, real, full, path, target):
        self._count("rename", full)
        real(path, target)
        (here, old), (there, new) = self._place(full), self._place(os.path.abspath(target))
        assert here == there, "a rename to another directory is not modelled"
        self._enter(here, {new: self.names[here][old], old: None})

    _replace = _rename

    def _unlink(self, real, full, path, **more):
        self._count("unlink", full)
        real(path, **more)
        directory, name = self._place(full)
        self._enter(directory, {name: None})

    _rmdir = _unlink

    def _mkdir(self, real, full, path, *args, **more):
        self._count("mkdir", full)
        real(path, *args, **more)
        self._create(full, {})

    def _symlink(self, real):
        def symlink(target, path, *args, **more):
            full = self._full(path)
            if full is not None:
                self._count("link", full)
            real(target, path, *args, **more)
            if full is not None:
                self._create(full, os.fspath(target))

        return symlink

    def _save_file(self, real):
        """safetensors writes by itself, without Python's calls."""

        def save_file(tensors, path, metadata=None):
            real(tensors, path, metadata)
            self._note(os.path.abspath(path))

        return save_file

    # The record

    def _count(self, kind: str, path: str) -> None:
        """Count an operation. Raises OSError where it is to fail."""
        self.kinds.append(kind)
        number, fault = self.fault or (0, "")
        if fault.startswith("read-only") and number <= len(self.kinds) and kind in CHANGES:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        if number == len(self.kinds) and (FAULTS[fault] is None or kind in FAULTS[fault]):
            code = errno.EIO if fault == "EIO" else errno.ENOSPC
            if fault == "short write":
                os.truncate(path, len(_read(path)) // 2)
            raise OSError(code, os.strerror(code), path)

    def _note(self, path: str) -> None:
        """Record what was written to a file since it was noted last."""
        node = self._node(path)
        if node is None or self.nodes[node] != "":
            return
        content = _read(path)
        if content != self.content.get(node):
            self._count("write", path)
            self.content[node] = content
            self.ops.append(Data(node, content))

    def _place(self, path: str) -> tuple[int, str]:
        """The directory's node and the name there."""
        *folders, name = os.path.relpath(path, self.root).split(os.sep)
        node = 0
        for folder in folders:
            node = self.names[node][folder]
        return node, name

    def _node(self, path: str) -> int | None:
        if path == self.root:
            return 0
        directory, name = self._place(path)
        return self.names[directory].get(name)

    def _create(self, path: str, kind: dict | str = "") -> None:
        directory, name = self._place(path)
        if name not in self.names[directory]:
            self.nodes.append(kind)
            if kind == {}:
                self.names[len(self.nodes) - 1] = {}
            elif kind == "":
                self.content[len(self.nodes) - 1] = b""
            self._enter(directory, {name: len(self.nodes) - 1})

    def _enter(self, directory: int, names: dict[str, int | None]) -> None:
        self.ops.append(Entry(directory, names))
        _apply(self.names[directory], names)

    def _scan(self, path: str, node: int) -> None:
        for name in sorted(os.listdir(path)):
            full = os.path.join(path, name)
            if os.path.islink(full):
                self._create(full, os.readlink(full))
            elif os.path.isdir(full):
                self._create(full, {})
                self._scan(full, self.names[node][name])
            else:
                self._create(full)
                self.content[self.names[node][name]] = _read(full)
                self.ops.append(Data(self.names[node][name], _read(full)))


class Writer:
    """A file open for writing. What was written counts when it is flushed or closed."""

    def __init__(self, disk: Disk, file, path: str):
        self.disk, self.file, self.path = disk, file, path

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def flush(self):
        """Hand what was written to the system."""
        self.file.flush()
        self.disk._note(self.path)

    def close(self):
        """Hand what was written to the system and close the file."""
        if not self.file.closed:
            self.file.close()
            self.disk._note(self.path)


def _read(path: str) -> bytes:
    """The content of a file, by calls that nobody stands under."""
    file = io.FileIO(path)
    try:
        return file.readall()
    finally:
        file.close()


def _apply(directory: dict[str, int], names: dict[str, int | None]) -> None:
    for name, node in names.items():
        if node is None:
            directory.pop(name, None)
        else:
            directory[name] = node


def crash_states(disk: Disk) -> Iterator[tuple[str, int, Tree, object]]:
    """What a loss of power may leave: how, after how many operations, the tree, and the last promise made by then.

    Of what does not last yet at that moment: all is there, a beginning of it in order, nothing, all but one operation, only one
    operation, or all with one file torn in half or full of zeros.
    """
    lasts = {}  # by which operation each one lasts
    for i, op in enumerate(disk.ops):
        flushes = (j for j in range(i, len(disk.ops)) if disk.ops[j] == Flush(op[0]))
        lasts[i] = -1 if i < disk.before else next(flushes, len(disk.ops))
    promised = None
    for end in range(disk.before, len(disk.ops) + 1):
        last = disk.ops[end - 1] if end > disk.before else None
        if isinstance(last, Promise):
            promised = last.value
        loose = [i for i in range(disk.before, end) if lasts[i] >= end and isinstance(disk.ops[i], Entry | Data)]
        kept = [i for i in range(end) if i not in set(loose)]
        cuts = {"all": loose, "nothing": []}
        for place, i in enumerate(loose):
            cuts |= {f"until {i}": loose[:place], f"not {i}": loose[:place] + loose[place + 1 :], f"only {i}": [i]}
        for how, some in cuts.items():
            yield how, end, _tree(disk, sorted([*kept, *some]), {}), promised
        for i in loose:
            if isinstance(disk.ops[i], Data):
                content = disk.ops[i].content
                for how, torn in (("torn", content[: len(content) // 2]), ("zeros", bytes(len(content)))):
                    yield f"{how} {i}", end, _tree(disk, range(end), {i: torn}), promised


def _tree(disk: Disk, indices, torn: dict[int, bytes]) -> Tree:
    """The directory after these operations and no others."""
    names, content = {}, {}
    for i in indices:
        op = disk.ops[i]
        if isinstance(op, Entry):
            _apply(names.setdefault(op.directory, {}), op.names)
        elif isinstance(op, Data):
            content[op.node] = torn.get(i, op.content)

    def grow(node: int) -> Tree:
        if disk.nodes[node] == {}:
            return {name: grow(child) for name, child in sorted(names.get(node, {}).items())}
        return disk.nodes[node] or content.get(node, b"")

    return grow(0)


def frozen(tree: Tree) -> object:
    """`tree` as a key."""
    return tuple((name, frozen(child)) for name, child in tree.items()) if isinstance(tree, dict) else tree


def whole(path: Path) -> Tree:
    """What is at `path`."""
    if path.is_symlink():
        return os.readlink(path)
    return path.read_bytes() if path.is_file() else {child.name: whole(child) for child in sorted(path.iterdir())}


def plant(tree: Tree, path: Path) -> None:
    """Make what `tree` says at `path`."""
    if isinstance(tree, bytes):
        path.write_bytes(tree)
    elif isinstance(tree, str):
        path.symlink_to(tree)
    else:
        path.mkdir(exist_ok=True)
        for name, child in tree.items():
            plant(child, path / name)
