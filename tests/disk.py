"""A failing disk: count and record a program's file operations, make them fail, or cut the power at any of them.

`Disk` intercepts Python's own calls (open, fsync, rename, ...) for one directory. From the record it derives what a power cut
may leave, as ALICE does (Pillai et al., OSDI 2014). Recovery then runs from each such state, as in CrashMonkey (Mohan et al.,
OSDI 2018). The assumed file system is the weakest that POSIX allows. Content survives once its file is flushed, and a name once
its directory is flushed. Until then, either may exist without the other.
"""

import builtins
import contextlib
import errno
import fcntl
import io
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from lockstep.checkpoints import tensor_files

Tree = dict | bytes | str  # a directory by name, the content of a file, or the target of a link
CALLS = {"open": "open", "fsync": "flush", "rename": "rename", "replace": "rename", "unlink": "unlink", "rmdir": "unlink"}
CALLS |= {"mkdir": "mkdir", "symlink": "link", "stat": "stat", "lstat": "stat", "scandir": "list", "listdir": "list"}
CHANGES = {"create", "write", "flush", "rename", "unlink", "link", "mkdir"}
# How an operation may fail, and which kinds of operations can. A disk may also be read-only from an operation on.
FAULTS = {
    "EIO": {*CALLS.values(), "create", "write"},
    "ENOSPC": {"create", "write", "mkdir", "link"},
    "short write": {"write"},
    "read-only from here on": CHANGES,
}


class Fault(NamedTuple):
    number: int  # which operation fails, counted from 1
    kind: str  # a key of FAULTS


class Entry(NamedTuple):
    directory: int
    names: dict[str, int | None]  # names that the directory gains (their node) or loses (None), all at once


class Data(NamedTuple):
    node: int
    content: bytes  # new content of the file


class Flush(NamedTuple):
    node: int  # the file or directory whose current state is on disk


class Disk(contextlib.ExitStack):
    """The directory `root` while a program works on it. `kinds` lists its operations; `ops` records its changes.

    Changes are found by looking at the directory before each operation. With a fault, nothing is recorded.
    """

    def __init__(self, root: Path, fault: Fault | None = None):
        super().__init__()
        self.root, self.fault, self.kinds, self.ops = os.path.abspath(root), fault, [], []
        self.is_looking, self.new_nodes = False, itertools.count()
        self.nodes = {}  # node numbers of existing inodes
        self.names, self.content = {}, {}  # names in each directory; content of each file or link
        self.promises = {}  # what the program has announced as saved, by the number of operations before that
        self.record()
        self.before = len(self.ops)  # what existed before always survives

    def __enter__(self):
        """Intercept the calls of this process."""
        for name, kind in CALLS.items():
            self.enter_context(mock.patch.object(os, name, self._stand_in(getattr(os, name), kind)))
        opened = self._stand_in(open, "open")
        for module in (builtins, io):
            self.enter_context(mock.patch.object(module, "open", opened))
        real = tensor_files.save_file  # safetensors writes directly, without Python's calls

        def save_file(tensors, path, metadata=None):
            real(tensors, path, metadata)
            self._count("write", os.path.abspath(path))

        self.enter_context(mock.patch.object(tensor_files, "save_file", save_file))
        return self

    def promise(self, value) -> None:
        """Record what the program has announced."""
        self.record()
        self.promises[len(self.ops)] = value

    def _stand_in(self, real, kind: str):
        """A replacement for `real`, one of Python's calls, that counts it before calling `real`."""

        def call(*args, **more):
            path = self._path(args[kind == "link"] if args else ".", more.get("dir_fd"))
            if self.is_looking or not path.startswith(self.root) or (real is io.open and isinstance(args[0], int)):
                return real(*args, **more)
            how = (*args[1:], more.get("mode", "r"))[0] if kind == "open" else "r"
            creates = how & os.O_CREAT if isinstance(how, int) else set(how) & set("wax+")
            if kind == "flush" and fcntl.fcntl(args[0], fcntl.F_GETFL) & os.O_ACCMODE:  # flushes what this descriptor wrote
                self._count("write", path)
            self._count("create" if creates else kind, path)
            result = real(*args, **more)
            if kind == "flush" and not self.fault:
                self.ops.append(Flush(self.nodes[os.fstat(args[0]).st_ino]))
            if creates and real is io.open:
                close = result.close

                def close_and_count():
                    if not result.closed:
                        close()
                        self._count("write", path)

                result.close = close_and_count
            return result

        return call

    def _path(self, path, dir_fd: int | None) -> str:
        """The absolute path that a call refers to."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        return os.path.abspath(path)

    def _count(self, kind: str, path: str) -> None:
        """Count an operation. Raises OSError if it is meant to fail."""
        self.kinds.append(kind)
        if kind in CHANGES:
            self.record()
        number, fault = self.fault or (0, "EIO")
        lasts = fault.startswith("read-only") and number <= len(self.kinds)
        if kind in FAULTS[fault] and (lasts or number == len(self.kinds)):
            if fault == "short write":
                os.truncate(path, os.path.getsize(path) // 2)
            code = errno.EROFS if lasts else errno.EIO if fault == "EIO" else errno.ENOSPC
            raise OSError(code, os.strerror(code), path)

    def record(self) -> None:
        """Record what has changed since the last call."""
        if self.fault:
            return
        nodes, names, content = {}, {}, {}

        def look(path: str) -> int:
            inode = os.lstat(path).st_ino
            node = nodes[inode] = self.nodes[inode] if inode in self.nodes else next(self.new_nodes)
            if os.path.islink(path):
                content[node] = os.readlink(path)
            elif os.path.isdir(path):
                names[node] = {name: look(os.path.join(path, name)) for name in sorted(os.listdir(path))}
            else:
                content[node] = Path(path).read_bytes()
            return node

        self.is_looking = True
        look(self.root)
        self.is_looking = False
        for directory, now in names.items():
            then = self.names.get(directory, {})
            if changed := {name: now.get(name) for name in then | now if then.get(name) != now.get(name)}:
                self.ops.append(Entry(directory, changed))
        changed = (node for node, now in content.items() if isinstance(now, bytes) and now != self.content.get(node, b""))
        self.ops += [Data(node, content[node]) for node in changed]
        self.nodes, self.names, self.content = nodes, self.names | names, self.content | content


def crash_states(disk: Disk) -> Iterator[tuple[str, int, Tree, object]]:
    """What a power cut may leave. Yields the kind of loss, the operations done, the tree, and the last promise by then.

    Of the operations that are not flushed yet, all may survive, the first few, none, all but one, or only one. Or all survive,
    but one file is torn in half or full of zeros.
    """
    disk.record()
    promised = None
    for end in range(disk.before, len(disk.ops) + 1):
        promised = disk.promises.get(end, promised)
        loose, flushed = [], set()
        for i in range(end - 1, disk.before - 1, -1):
            if isinstance(disk.ops[i], Flush):
                flushed.add(disk.ops[i].node)
            elif disk.ops[i][0] not in flushed:
                loose.insert(0, i)
        cuts = {"all": loose, "nothing": []}
        for place, i in enumerate(loose):
            cuts |= {f"until {i}": loose[:place], f"not {i}": loose[:place] + loose[place + 1 :], f"only {i}": [i]}
        for how, some in cuts.items():
            yield how, end, _tree(disk, sorted({*range(end)} - {*loose} | {*some}), {}), promised
        for i in loose:
            if isinstance(disk.ops[i], Data):
                content = disk.ops[i].content
                for how, torn in (("torn", content[: len(content) // 2]), ("zeros", bytes(len(content)))):
                    yield f"{how} {i}", end, _tree(disk, range(end), {i: torn}), promised


def _tree(disk: Disk, indices: Iterable[int], torn: dict[int, bytes]) -> Tree:
    """The directory tree after only these operations."""
    names, content = {}, {}
    for i in indices:
        op = disk.ops[i]
        if isinstance(op, Entry):
            names[op.directory] = names.get(op.directory, {}) | op.names
        elif isinstance(op, Data):
            content[op.node] = torn.get(i, op.content)

    def grow(node: int) -> Tree:
        if node in disk.names:
            return {name: grow(child) for name, child in sorted(names.get(node, {}).items()) if child is not None}
        link = disk.content[node]
        return link if isinstance(link, str) else content.get(node, b"")

    return grow(0)


def plant(tree: Tree, path: Path) -> None:
    """Create `tree` at `path`."""
    if isinstance(tree, bytes):
        path.write_bytes(tree)
    elif isinstance(tree, str):
        path.symlink_to(tree)
    else:
        path.mkdir(exist_ok=True)
        for name, child in tree.items():
            plant(child, path / name)
