"""Copy a run's checkpoints to a place that outlives the machine: an object store, the Hub or another disk (`--mirror=URL`).

Each checkpoint is uploaded file by file, with manifest.json last, and removed with manifest.json first. So even after a
failure, any checkpoint whose files match its manifest is complete. Training never waits for the store.
"""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from lockstep.checkpoints.checkpoint import load_state, while_others_wait
from lockstep.checkpoints.retention import MANIFEST, NAME, find_damage, newest, read_manifest, step_of
from lockstep.common import errors, files
from lockstep.common.errors import RunError, UserError
from lockstep.parallel.world import World
from lockstep.reports.log import Log

RECORDS = ("metrics.jsonl", "train.log")  # files of the run, also copied into each checkpoint in the store
TRIES, LONGEST_PAUSE = 4, 60.0  # attempts to read the store at the start; longest pause between copies, in seconds
LAST_COPY_SECONDS = 600.0  # how long a finished run waits for the store


def step_in(name: str) -> int:
    """Return the step in the name of a checkpoint."""
    return step_of(Path(name))


class Mirror:
    """The store at `url`, of any kind that fsspec opens, for the run that writes `log`.

    One thread of the master copies to the store. A request that arrives during a copy is served right after it.
    """

    def __init__(self, url: str, log: Log):
        import fsspec  # imported here because most runs have no mirror

        self.url, self.run, self.log = url.rstrip("/"), log.directory, log
        try:
            self.system, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError, OSError) as error:
            raise UserError(f"--mirror={url}: {errors.explain(error)}") from None
        self.root = root.rstrip("/")
        self.wanted: tuple[list[Path], int, list[str]] = ([], 0, [])
        self.served = self.wanted  # the last request that was carried out
        self.copier, self.work = ThreadPoolExecutor(1), None
        self.identity: str | None = None  # of this run; None while it is unknown, because there is nothing on this disk
        self.own: set[bytes] = set()  # manifests in the store that are known to be of this run
        self.damaged: set[str] = set()  # checkpoints in the store that do not match their manifest
        self.ending = False

    def manifests(self) -> dict[str, bytes]:
        """Return the manifest of each checkpoint in the store, keyed by name, oldest first; b"" if it is incomplete.

        Raises RunError if the store contains a different run.
        """
        self.system.invalidate_cache()
        found = {}
        with contextlib.suppress(FileNotFoundError):
            names = [path.rstrip("/").rpartition("/")[2] for path in self.system.ls(self.root, detail=False)]
            for name in sorted(filter(NAME.fullmatch, names), key=step_in):
                found[name] = b""
                with contextlib.suppress(FileNotFoundError):
                    found[name] = self.system.cat_file(f"{self.root}/{name}/{MANIFEST}")
                    self.require_own(name, found[name])
        return found

    def require_own(self, name: str, manifest: bytes) -> None:
        """Raise RunError if a different run wrote a checkpoint."""
        if manifest in self.own:
            return
        state = self.system.cat_file(f"{self.root}/{name}/trainer_state.json")
        with contextlib.suppress(UserError, KeyError, TypeError):  # damaged: `download` will say so
            found = files.decode(state, dict, name)
            run, identity = found["settings"]["name"], found.get("identity", "")
            if run != self.run.name:
                problem = f"has checkpoints of the run {run}, not of {self.run.name}"
                raise RunError(f"--mirror={self.url} {problem}; give each run its own URL")
            if self.identity is None:
                return
            if identity != self.identity:
                problem = f"has checkpoints of another run that is also called {run}"
                raise RunError(f"--mirror={self.url} {problem}; give each run its own URL")
            self.own.add(manifest)

    # -----------------------------------------------------------------------------------------------------------------
    # From the store

    def restore(self, checkpoints: Path, world: World) -> None:
        """Download the newest checkpoint to every node that lacks it. All ranks must call this."""
        several_nodes = world.size > world.local_size

        def find_newest() -> tuple[str, bytes]:
            here, _ = newest(checkpoints)
            self.identity = load_state(here).identity if here else None
            name = self.fetch(step_of(here) if here else -1) or (here.name if here else "")
            if name and several_nodes:  # other nodes may need it
                self.retried(lambda: self.copy([checkpoints / name], 0, []))
            return name, (checkpoints / name / MANIFEST).read_bytes() if name else b""

        def fetch() -> None:
            own = checkpoints / name  # a damaged or different one may have this name if the nodes share no disk
            if find_damage(own) or (own / MANIFEST).read_bytes() != manifest:
                self.fetch(-1, name)

        name, manifest = while_others_wait(world, find_newest)
        if name and several_nodes:
            while_others_wait(world, fetch, mine=world.rank > 0 and world.rank % world.local_size == 0)

    def fetch(self, newer_than: int, only: str = "") -> str:
        """Download the newest intact checkpoint after step `newer_than`, or the one called `only`. Returns its name, or "".

        Raises RunError if the store contains a different run, does not answer, or has only damaged checkpoints, so that the run
        does not start over.
        """
        for name, manifest in reversed(self.retried(self.manifests).items()):
            if step_in(name) <= newer_than:
                break
            if not manifest or (only and name != only):
                continue
            self.log.say(f"downloading {name} from {self.url}")
            if not (problem := self.retried(lambda name=name: self.download(name))):
                return name
            self.log.warn(f"skipped {self.url}/{name}: {problem}")
            self.damaged.add(name)
        if self.damaged and newer_than < 0 and not only:
            raise RunError(f"--mirror={self.url} has no intact checkpoint; to start over, use another URL")
        return ""

    def download(self, name: str) -> str | None:
        """Download a checkpoint and its RECORDS. Returns what is wrong if it is damaged or incomplete, else None."""
        target = self.run / "checkpoints" / name
        self.log.claim()
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with files.publish_directory(target) as directory:
                self.system.get_file(f"{self.root}/{name}/{MANIFEST}", str(directory / MANIFEST))
                for file in read_manifest(directory):
                    self.system.get_file(f"{self.root}/{name}/{file}", str(directory / file))
                if damage := find_damage(directory):
                    raise UserError(damage)
                for record in RECORDS:  # before the checkpoint appears, because once it is here, nothing more is downloaded
                    if self.system.exists(f"{self.root}/{name}/{record}"):
                        with files.publish(self.run / record) as file:
                            file.write(self.system.cat_file(f"{self.root}/{name}/{record}"))
        except (UserError, FileNotFoundError) as error:
            return str(error)
        return None

    def retried(self, work: Callable[[], Any]) -> Any:
        """Return `work()`, retrying while it raises or returns a str (a problem). Raises RunError if it keeps raising."""
        for attempt in range(TRIES):
            try:
                if not isinstance(result := work(), str) or attempt == TRIES - 1:
                    return result
            except RunError:
                raise
            except Exception as error:  # each kind of store has its own exception classes
                if attempt == TRIES - 1:
                    problem = f"--mirror={self.url} cannot be reached: {errors.explain(error)}"
                    raise RunError(f"{problem}; check the URL, the credentials and the network") from None
            time.sleep(2.0**attempt)

    # -----------------------------------------------------------------------------------------------------------------
    # To the store

    def update(self, intact: list[Path], keep_last: int, best: list[str]) -> None:
        """Start copying the `intact` checkpoints to the store, and removing old ones there.

        The store keeps the newest `keep_last` checkpoints (0: all) and those named in `best`.
        """
        self.wanted = (intact, keep_last, best)
        self.work = self.copier.submit(self.copy_until_done)  # does nothing if the copy in progress also serves this request

    def copy_until_done(self) -> None:
        """Copy until the store is up to date. Report a failure once, and retry for as long as the run lasts."""
        pause, reported = 1.0, ""
        while (wanted := self.wanted) is not self.served:
            try:
                self.copy(*wanted)
                self.served = wanted
                if reported:
                    self.log.say(f"{self.url} has caught up")
                pause, reported = 1.0, ""
            except RunError as error:  # a different run's checkpoints: retrying would not help
                self.log.warn(f"copied nothing: {error}")
                self.served = wanted
            except Exception as error:  # each kind of store has its own exception classes
                if reported != (reported := errors.explain(error)):
                    self.log.warn(f"cannot write to {self.url}; retrying while training continues: {reported}")
                deadline = time.monotonic() + pause
                time.sleep(1.0)  # also while the run is ending
                while time.monotonic() < deadline and not self.ending:
                    time.sleep(0.1)
                pause = min(2 * pause, LONGEST_PAUSE)

    def copy(self, intact: list[Path], keep_last: int, best: list[str]) -> None:
        """Copy missing checkpoints, newest first, then remove those that need not be kept."""
        there = self.manifests()
        for path in sorted(intact, key=step_of, reverse=True):
            try:
                manifest = (path / MANIFEST).read_bytes()
                if there.get(path.name) != manifest or path.name in self.damaged:
                    self.put(path, manifest)
                    there[path.name] = manifest
                    self.damaged.discard(path.name)
            except FileNotFoundError:
                if (path / MANIFEST).exists():  # the store reports that it does not exist
                    raise
                # Otherwise the checkpoint was removed from this disk in the meantime.
        complete = sorted((name for name, manifest in there.items() if manifest and name not in self.damaged), key=step_in)
        # Damaged checkpoints stay until there is a newer one, because perhaps only the download failed.
        doubtful = {name for name in self.damaged if not complete or step_in(name) > step_in(complete[-1])}
        for name in there.keys() - {*best, *complete[-keep_last:], *doubtful}:
            if there[name]:
                self.system.rm_file(f"{self.root}/{name}/{MANIFEST}")
            self.system.rm(f"{self.root}/{name}", recursive=True)

    def put(self, path: Path, manifest: bytes) -> None:
        """Upload the checkpoint at `path`, its manifest last."""
        target = f"{self.root}/{path.name}"
        self.system.makedirs(target, exist_ok=True)
        for name, record in read_manifest(path).items():
            self.system.put_file(str(path / name), f"{target}/{name}")
            self.system.invalidate_cache()
            if (size := self.system.info(f"{target}/{name}")["size"]) != record["size"]:
                raise OSError(f"{path.name}/{name} has {size} bytes in the store, not {record['size']}")
        for record in RECORDS:
            if (self.run / record).exists():
                self.system.pipe_file(f"{target}/{record}", (self.run / record).read_bytes())
        self.system.pipe_file(f"{target}/{MANIFEST}", manifest)

    def finish(self) -> None:
        """Wait for the copy in progress, for at most ten minutes."""
        self.ending = True
        if self.work and not wait([self.work], LAST_COPY_SECONDS).done:
            self.log.warn(f"{self.url} does not have the newest checkpoint yet; run the same command again to copy it")
