"""Which checkpoints a run has, which of them are intact, and which ones stay.

Ours are the directories called `step-` and eight digits, or more where the step has more. Everything else that lies beside
them is somebody else's: it is neither read nor removed. Two rules hold whatever happens:

- A checkpoint counts only if this process has written or verified it, and only what is older than enough of these is removed.
- What is newer than the start and damaged is moved aside, so nothing that the run saves afterwards ever looks old beside it.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from checkpoints import tensor_files
from checkpoints.snapshot import FileRecord, record
from common import files
from common.errors import UserError
from common.records import Count, FileName

MANIFEST = "manifest.json"
# What a checkpoint always has besides its tensors, and what it has where the dataset has a tokenizer.
FILES = {"config.json", "generation_config.json", "trainer_state.json"}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json"}
NAME = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})")
# The names that a killed process leaves in a run's checkpoints/.
LEFTOVER = re.compile(r"\.+(step-[0-9]{8,}|latest|best|probe)(\.old|\.link|\.tmp)*\.tmp")
Step = TypedDict("Step", {"step": Count})  # what is read of trainer_state.json here


def step_directory(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return checkpoints / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name says; None for a name that is not one of ours."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def published(checkpoints: Path) -> list[Path]:
    """The published checkpoints, oldest first, intact or not."""
    return sorted((path for path in checkpoints.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def strangers(checkpoints: Path) -> list[str]:
    """The other names in `checkpoints`, sorted: copies, what was moved aside, files of somebody else."""
    ours = {"latest", "best", *(path.name for path in published(checkpoints))}
    return sorted(path.name for path in checkpoints.glob("*") if path.name not in ours and path.name[0] != ".")


def write_manifest(directory: Path, known: dict[str, FileRecord] | None = None) -> None:
    """Write the size and sha256 of every file in `directory`. Those of some files may be known already."""
    known, names = known or {}, sorted(path.name for path in directory.iterdir())
    if missing := known.keys() - set(names):
        raise OSError(f"{min(missing)} was written on another node and is not here; all nodes must share --out_dir")
    manifest = {name: known.get(name) or record(directory / name) for name in names}
    tensor_files.write_json(directory / MANIFEST, manifest)


def read_manifest(directory: Path) -> dict[str, FileRecord]:
    """The records of a checkpoint's files. Raises UserError."""
    return files.read_json(directory / MANIFEST, dict[FileName, FileRecord])


def fault(directory: Path) -> str | None:
    """What is wrong with a checkpoint, or None if it has all files, each one matches its manifest, and the step its name."""
    try:
        manifest = read_manifest(directory)
        present = {name for name in TOKENIZER_FILES if (directory / name).exists()}
        tensors = {path.name for stem in ("model", "optimizer") for path in tensor_files.files_of(directory, stem)}
        if unlisted := (FILES | present | tensors) - manifest.keys():
            return f"{MANIFEST} does not list {', '.join(sorted(unlisted))}"
        for name, record in manifest.items():
            size = (directory / name).stat().st_size
            if size != record["size"]:
                return f"{name} has {size} bytes instead of {record['size']}"
        with ThreadPoolExecutor() as pool:  # hashlib lets go of the interpreter's lock
            digests = list(pool.map(files.sha256, [directory / name for name in manifest]))
        for (name, record), digest in zip(manifest.items(), digests, strict=True):
            if digest != record["sha256"]:
                return f"{name} does not match its sha256"
        named, step = step_of(directory), files.read_json(directory / "trainer_state.json", Step)["step"]
        if named not in (None, step):
            return f"it is a copy of step {step}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, UserError) as error:
        return str(error)
    return None


def newest(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint, and a line for each newer one that is damaged."""
    damaged = []
    for path in reversed(published(checkpoints)):
        if (reason := fault(path)) is None:
            return path, damaged
        damaged.append(f"passed over {path}: {reason}")
    return None, damaged


def set_aside(path: Path) -> Path:
    """Rename what is not an intact checkpoint to a name that nothing reads or removes: step-00000500.damaged[-2 ...]."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    os.rename(path, aside)
    files.sync(path.parent)
    return aside


def stamp(path: Path) -> set[tuple] | None:
    """Names, sizes and times of a checkpoint's files: they tell that it was not written to since. None if it is gone."""
    try:
        with os.scandir(path) as entries:
            return {(entry.name, (s := entry.stat()).st_ino, s.st_size, s.st_mtime_ns) for entry in entries}
    except OSError:
        return None


class Retention:
    """Removes the checkpoints of a run that need not stay. One thread may call `saved` while another one calls the rest."""

    def __init__(self, directory: Path, keep_last: int, keep_best: int, start_step: int):
        """start_step: the run continues from the checkpoint of that step, which was verified, if it is in `directory`."""
        self.directory, self.keep_last, self.keep_best = directory, keep_last, keep_best
        self.start = step_directory(directory, start_step)
        # What counts as intact, as long as it looks like this. It was written and read back by this process, or verified.
        self._intact = {self.start: stamp(self.start)} if self.start.is_dir() else {}

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that counts."""
        return max(filter(self.counts, list(self._intact)), key=step_of, default=None)

    def begin(self) -> list[str]:
        """Remove leftovers, move damaged checkpoints newer than the start aside and point `latest` at it. Returns notes.

        Everything that a save will need is tried once. Raises UserError where that fails.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in self.directory.iterdir():
                if LEFTOVER.fullmatch(path.name):
                    files.remove(path)
            probe, notes = self.directory / ".probe.tmp", []
            with files.publish_directory(probe) as directory:
                (directory / "file").write_bytes(b"0")
            files.link(self.directory / ".probe.link.tmp", probe)
            files.remove(self.directory / ".probe.link.tmp")
            files.retire(probe)
            for parent in self.directory.absolute().parents:  # the names that lead here must last, too
                with contextlib.suppress(OSError):  # of those that are not ours
                    files.sync(parent)
            for path in published(self.directory):
                if step_of(path) > step_of(self.start):
                    if (reason := fault(path)) is None:  # saved by another process, or a disk has recovered
                        raise UserError(f"{path} has become intact; run the same command again to continue from there")
                    notes.append(f"{path} is damaged, and is now {set_aside(path).name}: {reason}")
            if self.start.is_dir():
                files.link(self.directory / "latest", self.start)
        except OSError as error:
            raise UserError(
                f"{self.directory}: no checkpoint could be saved here: {error}; make it writable, or choose another --out_dir"
            ) from None
        return notes

    def saved(self, path: Path) -> None:
        """Count `path` as intact: this process has just written and flushed it. Verify older ones that must count, too."""
        self._intact[path] = stamp(path)
        with contextlib.suppress(OSError):  # what cannot be looked at does not count
            existing, intact = published(self.directory), 0
            while intact < self.keep_last < intact + len(existing):  # else none has to go
                path = existing.pop()
                now = stamp(path)
                if not self.counts(path) and fault(path) is None:
                    self._intact[path] = now
                intact += self.counts(path)

    def counts(self, path: Path) -> bool:
        """Whether `path` counts as intact: it was written or verified, and nothing has changed there since."""
        now = stamp(path)
        return now is not None and self._intact.get(path) == now

    def prune(self, best: Iterable[Path]) -> list[str]:
        """Remove what is older than the last `keep_last` intact checkpoints and not among the first `keep_best` of `best`.

        What the run continued from stays until two newer ones are intact. Returns a warning for each that cannot be removed.
        """
        if not self.keep_last:
            return []
        existing = published(self.directory)
        intact = [path for path in existing if self.counts(path)]
        if len(intact) < self.keep_last:
            return []
        stay, warnings = {*list(best)[: self.keep_best]}, []
        if sum(step_of(path) > step_of(self.start) for path in intact) < 2:
            stay.add(self.start)
        for path in existing[: existing.index(intact[-self.keep_last])]:
            if path not in stay:
                try:
                    files.retire(path)
                    self._intact.pop(path, None)
                except OSError as error:  # the run can go on
                    warnings.append(f"{path} could not be removed: {error}")
        return warnings
