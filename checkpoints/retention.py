"""Which checkpoints a run has, which of them are intact, and which ones stay.

Ours are the directories named `step-` and eight digits, or more where the step has more. Whatever else lies beside them is
neither read nor removed. A checkpoint counts only if this process has written or verified it, and only what is older than
enough of these is removed. So what was just saved stays, whatever damaged and newer ones lie beside it.
"""

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from checkpoints import tensor_files
from common import files
from common.errors import UserError
from common.records import Count, FileName, Sha256

MANIFEST = "manifest.json"
FILES = {"config.json", "generation_config.json", "trainer_state.json"}  # in every checkpoint, besides its tensors
NAME = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})")
FileRecord = TypedDict("FileRecord", {"size": Count, "sha256": Sha256})  # in manifest.json


def step_directory(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return checkpoints / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def published(checkpoints: Path) -> list[Path]:
    """The published checkpoints, oldest first, intact or not."""
    return sorted((path for path in checkpoints.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def record(path: Path) -> FileRecord:
    """The record of a file."""
    return {"size": path.stat().st_size, "sha256": files.sha256(path)}


def write_manifest(directory: Path, known: dict[str, FileRecord] | None = None) -> None:
    """Write the size and sha256 of every file in `directory`; `known` has some of them. Raises OSError."""
    known, names = known or {}, sorted(path.name for path in directory.iterdir())
    if missing := known.keys() - set(names):
        raise OSError(f"{min(missing)} was written on another node and is not here; all nodes must share --out_dir")
    manifest = {name: known.get(name) or record(directory / name) for name in names}
    tensor_files.write_json(directory / MANIFEST, manifest)


def read_manifest(directory: Path) -> dict[str, FileRecord]:
    """The records of a checkpoint's files. Raises UserError."""
    return files.read_json(directory / MANIFEST, dict[FileName, FileRecord])


def find_damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint. None if it has all its files, as its manifest says."""
    try:
        manifest = read_manifest(directory)
        tensors = {path.name for stem in ("model", "optimizer") for path in tensor_files.files_of(directory, stem)}
        if unlisted := (FILES | tensors) - manifest.keys():
            return f"{MANIFEST} does not list {', '.join(sorted(unlisted))}"
        for name, expected in manifest.items():
            size = (directory / name).stat().st_size
            if size != expected["size"]:
                return f"{name} has {size} bytes instead of {expected['size']}"
        with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter's lock
            digests = list(pool.map(files.sha256, [directory / name for name in manifest]))
        for (name, expected), digest in zip(manifest.items(), digests, strict=True):
            if digest != expected["sha256"]:
                return f"{name} does not match its sha256"
        return None
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, UserError) as error:
        return str(error)


def newest(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint, and a line for each newer one that is damaged."""
    damaged = []
    for path in reversed(published(checkpoints)):
        if (reason := find_damage(path)) is None:
            return path, damaged
        damaged.append(f"passed over {path}: {reason}")
    return None, damaged


class Retention:
    """Removes the checkpoints of a run that need not stay. One thread may call `saved` while another one calls the rest."""

    def __init__(self, directory: Path, keep_last: int, keep_best: int):
        self.directory, self.keep_last, self.keep_best = directory, keep_last, keep_best
        self.intact: set[Path] = set()  # written and flushed by this process, or verified

    @property
    def newest(self) -> Path | None:
        """The newest intact checkpoint."""
        return max(self.intact, key=step_of, default=None)

    def begin(self, start: Path) -> None:
        """Remove what a kill has left half written, and point `latest` at `start`, if there is one, which is intact.

        Raises UserError where nothing can be saved.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in self.directory.glob(".*.tmp"):
                files.remove(path)
            files.publish_text(self.directory / ".probe.tmp", "")
            files.remove(self.directory / ".probe.tmp")
            if start.is_dir():
                files.link(self.directory / "latest", start)
                self.intact.add(start)
        except OSError as error:
            problem = f"no checkpoint could be saved here: {error}; make it writable, or choose another --out_dir"
            raise UserError(f"{self.directory}: {problem}") from None
        for parent in self.directory.absolute().parents:  # the names that lead here must last, too
            with contextlib.suppress(OSError):  # of those that are not ours
                files.sync(parent)

    def saved(self, path: Path) -> None:
        """Count `path`, just written and flushed, as intact. Verify older ones that must count, too."""
        self.intact.add(path)
        existing, count = published(self.directory), 0
        while count < self.keep_last < count + len(existing):  # otherwise none has to go
            path = existing.pop()
            if path not in self.intact and find_damage(path) is None:
                self.intact.add(path)
            count += path in self.intact

    def prune(self, best: list[Path]) -> None:
        """Remove what is older than the last `keep_last` intact ones and not among the first of `best`. Raises OSError."""
        existing = published(self.directory)
        intact = [path for path in existing if path in self.intact]
        if self.keep_last and len(intact) >= self.keep_last:
            for path in existing[: existing.index(intact[-self.keep_last])]:
                if path not in best[: self.keep_best]:
                    files.retire(path)
                    self.intact.discard(path)
