"""Which checkpoints exist, which of them are intact, and which ones to keep.

Checkpoints are the directories named `step-` followed by eight or more digits; anything else is neither read nor removed. Only
checkpoints that this process wrote or verified count towards `keep_last`, so damaged checkpoints from later steps never push
out a fresh save.
"""

import contextlib
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from lockstep.checkpoints import tensor_files
from lockstep.common import files
from lockstep.common.errors import UserError
from lockstep.common.records import Count, FileName, Sha256

MANIFEST, STATE = "manifest.json", "trainer_state.json"
NAME = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})")
FileRecord = TypedDict("FileRecord", {"size": Count, "sha256": Sha256})  # an entry of manifest.json

Step = TypedDict("Step", {"step": Count})  # what we read here of STATE


def step_directory(checkpoints: Path, step: int) -> Path:
    """Return the directory of the checkpoint at `step`."""
    return checkpoints / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def published(checkpoints: Path) -> list[Path]:
    """Return the published checkpoints, oldest first, intact or not."""
    return sorted((path for path in checkpoints.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def record(path: Path) -> FileRecord:
    """Return the size and sha256 of a file. Raises OSError if it does not exist."""
    return {"size": path.stat().st_size, "sha256": files.sha256(path)}


def write_manifest(directory: Path, known: dict[str, FileRecord] | None = None) -> None:
    """Write the manifest of `directory`: the record of every file. known: the records already computed. Raises OSError."""
    known, names = known or {}, sorted(path.name for path in directory.iterdir())
    if missing := known.keys() - set(names):
        raise OSError(f"{min(missing)} was written on another node and is missing here; all nodes must share --out_dir")
    manifest = {name: known.get(name) or record(directory / name) for name in names}
    tensor_files.write_json(directory / MANIFEST, manifest)


def read_manifest(directory: Path) -> dict[str, FileRecord]:
    """Return the manifest of a checkpoint: the record of each file. Raises UserError."""
    return files.read_json(directory / MANIFEST, dict[FileName, FileRecord])


def find_damage(directory: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if every file matches the manifest, and its name the step in it."""
    try:
        manifest = read_manifest(directory)
        with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
            records = list(pool.map(record, [directory / name for name in manifest]))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, UserError) as error:
        return str(error)
    for (name, expected), found in zip(manifest.items(), records, strict=True):
        if found["size"] != expected["size"]:
            return f"{name} has {found['size']} bytes, not {expected['size']}"
        if found != expected:
            return f"{name} does not match its sha256"
    with contextlib.suppress(UserError):  # not a checkpoint of ours; whoever reads the state says why
        if NAME.fullmatch(directory.name) and (step := files.read_json(directory / STATE, Step)["step"]) != step_of(directory):
            return f"{STATE} is of step {step}"
    return None


def newest(checkpoints: Path, reserve: bool = False) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint, and a line for each newer, damaged one.

    reserve: it may belong to a run that goes on and removes checkpoints, so `hold` it.
    """
    while True:
        damaged, removed = [], False
        for path in reversed(published(checkpoints)):
            if reserve and not hold(path):
                removed = True
            elif (reason := find_damage(path)) is None:
                return path, damaged
            elif path.is_dir():
                damaged.append(f"skipped {path}: {reason}")
            else:
                removed = True
        if not removed:
            return None, damaged
        time.sleep(0.01)  # the run has removed a checkpoint, so there is a newer one


def hold(directory: Path) -> bool:
    """Keep a checkpoint of another run until this process ends. Returns False if that run has removed it."""
    try:
        manifest = os.open(directory / MANIFEST, os.O_RDONLY)  # stays open, and so locked
    except OSError:  # `find_damage` says why
        return directory.is_dir()
    if files.lock(manifest, shared=True):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(manifest), os.stat(directory / MANIFEST)):
                return True
    os.close(manifest)
    return False


def retire_unread(directory: Path) -> None:
    """Remove a checkpoint, unless another process holds it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):
            manifest = stack.enter_context(open(directory / MANIFEST, "rb+"))  # NFS locks only files open for writing
            if not files.lock(manifest):
                return
        files.retire(directory)


# ---------------------------------------------------------------------------------------------------------------------
# What a run keeps. `intact`: the checkpoints that this process wrote or verified.


def prepare(checkpoints: Path, start: Path) -> set[Path]:
    """Remove what a kill left half-written, and point `latest` at `start`, which is intact if it exists.

    Returns the checkpoints known to be intact. Raises UserError if checkpoints cannot be saved here.
    """
    try:
        files.make_directory(checkpoints)
        for path in checkpoints.glob(".*.tmp"):
            files.remove(path)
        files.publish_text(probe := checkpoints / ".probe.tmp", "")
        files.link(probe, checkpoints)
        files.remove(probe)
        if start.is_dir():
            files.link(checkpoints / "latest", start)
    except OSError as error:
        remedy = "move that file away" if checkpoints.is_file() else "make the directory writable"
        problem = f"cannot save checkpoints here: {error}; {remedy}, or choose another --out_dir"
        raise UserError(f"{checkpoints}: {problem}") from None
    return {start} if start.is_dir() else set()


def verify(checkpoints: Path, intact: set[Path], keep_last: int) -> None:
    """Verify checkpoints, newest first, until `keep_last` have proved intact. Call this before removing older ones."""
    existing, count = published(checkpoints), 0
    while count < keep_last < count + len(existing):  # otherwise there is nothing to remove
        path = existing.pop()
        if path not in intact and find_damage(path) is None:
            intact.add(path)
        count += path in intact


def prune(checkpoints: Path, intact: set[Path], keep_last: int, best: list[Path], between: set[Path]) -> None:
    """Remove checkpoints older than the last `keep_last` (0: all) `intact` ones, except `best`. Raises OSError.

    between: checkpoints that do not count towards `keep_last`, and are removed once there is a newer one.
    """
    existing = published(checkpoints)
    counted = [path for path in existing if path in intact and path not in between]
    newest = max(intact, key=step_of, default=None)
    doomed = existing[: existing.index(counted[-keep_last])] if 0 < keep_last <= len(counted) else []
    for path in sorted({*doomed, *between} - {newest, *best}, key=step_of):
        intact.discard(path)
        if path.exists():
            retire_unread(path)
    between.intersection_update(intact)
