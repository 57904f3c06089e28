"""What a run reports: the console, train.log, metrics.jsonl and wandb. Only the master's `Log` does anything."""

import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Required, TypedDict

import msgspec

from common import files
from common.cli import flat_values
from common.errors import FULL_DISK, RunError, UserError, plural, printable, survive_lost_console, within
from common.records import Count
from settings import Config

FINISH_SECONDS = (3600, 30)  # what wandb has to send the rest; after a failure, others wait
LONGEST_LINE = 1 << 20  # bytes of a record in metrics.jsonl
# What is read again of a line of metrics.jsonl. Numbers may be NaN.
LOSSES, FIGURES = ("loss", "val_loss", "val_bpb"), ("tokens", "lr", "grad_norm", "tokens_per_second", "mfu", "skipped")
Record = TypedDict(
    "Record", {"step": Required[Count]} | dict.fromkeys(LOSSES, float) | dict.fromkeys(FIGURES, float | None), total=False
)


def read_records(path: Path, links: bool = True) -> Iterator[tuple[bytes, Record | None]]:
    """Each line of a metrics.jsonl with its record; None for a line that is torn or foreign. Raises UserError.

    links: whether it may be a symbolic link.
    """
    with files.open_regular(path, links=links) as file:
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            record = None
            try:
                record = msgspec.convert(json.loads(line), Record)  # msgspec's own decoder does not read NaN
            except (ValueError, OverflowError, RecursionError):
                if not line.strip():
                    continue
            yield line, record


class Log:
    """The text files of a run directory, which nothing writes to before `begin`: a refused command leaves nothing behind.

    Raises UserError if another process uses the directory.
    """

    def __init__(self, directory: Path, is_master: bool):
        self.directory, self.is_master, self.began = directory, is_master, time.monotonic()
        self.bar = self.board = self.wandb = None
        self._text, self._metrics = AppendFile(), AppendFile()
        self._is_new = not (directory / "metrics.jsonl").exists()
        self._lock = lock(directory) if is_master and os.path.lexists(directory / ".lock") else None

    def begin(self, step: int) -> Record | None:
        """Make the directory, if need be, and open its files at `step`. Returns the evaluation recorded there, if any."""
        if not self.is_master:
            return None
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = self._lock or lock(self.directory)
        if self._is_new and (self.directory / "metrics.jsonl").exists():
            raise UserError(f"{self.directory}: another process has begun this run meanwhile; the same command continues it")
        self._text.open(self.directory / "train.log")
        return self.rewind(step)

    def say(self, message: str) -> None:
        """Write a line to the console and to train.log."""
        if self.is_master:
            message = printable(message)
            self._text.write(message + "\n")
            with survive_lost_console():
                if self.bar is None:
                    print(message, flush=True)
                else:
                    self.bar.write(message)

    def warn(self, message: str) -> None:
        """Write a line that asks for attention."""
        self.say(f"warning: {message}")

    @contextmanager
    def surviving(self, what: str):
        """Warn where `what`, which only reports, fails: the run can go on without it."""
        try:
            yield
        except Exception as error:
            self.warn(f"{what} failed: {(str(error) or type(error).__name__).splitlines()[0]}; the run goes on without it")

    def rewind(self, step: int) -> Record | None:
        """Cut metrics.jsonl back to `step`, so that no step is recorded twice. Returns the evaluation recorded at `step`.

        Lines that cannot be read are moved to metrics.jsonl.unreadable.
        """
        path = self.directory / "metrics.jsonl"
        kept, unreadable, evaluation = [], [], None
        for line, record in read_records(path, links=False) if os.path.lexists(path) else ():
            if record is None:
                unreadable.append(line)
            elif record["step"] <= step:
                kept.append(line.rstrip(b"\n") + b"\n")
                if record["step"] == step and "val_loss" in record:
                    evaluation = record
        if unreadable:
            aside = path.with_name(f"{path.name}.unreadable")
            with files.open_own(aside) as file:
                unreadable = [file.read(), *unreadable]
            with files.publish(aside) as file:
                file.writelines(unreadable)
            self.warn(f"{path} has {plural(len(unreadable) - 1, 'unreadable line')}, now in {aside.name}")
        with files.publish(path) as file:
            file.writelines(kept)
        self._metrics.open(path)
        return evaluation

    def check_wandb(self, config: Config) -> None:
        """Raise UserError if --wandb=online has no key, before a run leaves any file. A terminal is asked for it."""
        if not self.is_master or config.log.wandb != "online":
            return
        import wandb

        try:
            if wandb.login(verify=False):
                return
            reason = f"WANDB_MODE={os.environ.get('WANDB_MODE', '')} forbids it"
        except wandb.Error as error:
            reason = str(error).rstrip(".")
        raise UserError(f"--wandb=online: {reason}; --wandb=offline needs no account")

    def start_trackers(self, config: Config, step: int, run_id: str, more: dict) -> str:
        """Start TensorBoard's files and wandb's run, where they are on. Returns the id of the latter.

        wandb continues its run `run_id` if there is one. Its config has all settings and `more`. TensorBoard forgets what it
        has of steps after `step`: those that a killed run did not save.
        """
        if self.is_master and config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(self.directory / "tensorboard", purge_step=step + 1)
        if not self.is_master or config.log.wandb == "off":
            return run_id
        import wandb

        try:
            self.wandb = wandb.init(
                project=config.log.wandb_project,
                name=config.run.name,
                dir=self.directory,
                config=flat_values(config) | more,
                mode=config.log.wandb,
                id=run_id or None,
                resume="allow",
                settings=wandb.Settings(console="off", quiet=True),
            )
        except wandb.Error as error:
            raise UserError(f"--wandb={config.log.wandb}: {error}; --wandb=offline needs no account") from None
        self.wandb.define_metric("*", step_metric="step")
        for name in ("loss", "val_loss", "val_bpb"):
            self.wandb.define_metric(name, step_metric="step", summary="min,last")
        return self.wandb.id

    def start_bar(self, steps: int, step: int) -> None:
        """Show a progress bar if the console is a terminal."""
        if self.is_master and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=steps, initial=step, unit="step", dynamic_ncols=True)

    def progress(self, step: int) -> None:
        """Move the bar to `step`."""
        if self.bar is not None:
            with suppress(OSError):  # the terminal may be gone
                self.bar.update(step - self.bar.n)

    def metrics(self, record: dict) -> None:
        """Write one record to metrics.jsonl and wandb, without its None values and with the time (seconds since 1970)."""
        if self.is_master:
            record = {key: value for key, value in record.items() if value is not None} | {"time": round(time.time(), 3)}
            self._metrics.write(json.dumps(record) + "\n")
            self.show(record)

    def sample(self, step: int, text: str) -> None:
        """Say what the model has written after `step` updates, on one line, and show it to wandb and TensorBoard."""
        if self.is_master:
            self.say(f"step {step:>6}  sample {json.dumps(text, ensure_ascii=False)}")
            self.show({"step": step, "sample": text, "time": round(time.time(), 3)})

    def show(self, record: dict) -> None:
        """Give a record to wandb and TensorBoard, where they are on."""
        with self.surviving("wandb"):
            if self.wandb is not None:
                run, self.wandb = self.wandb, None
                run.log(record)
                self.wandb = run
        with self.surviving("tensorboard"):
            if self.board is not None:
                board, self.board = self.board, None
                counted = {"tokens"} if "val_loss" in record else set()  # the record of the update has them, too
                for name in record.keys() - {"step", "time", "sample"} - counted:
                    board.add_scalar(name, record[name], record["step"], record["time"])
                if "sample" in record:  # Markdown, in which four spaces keep text as it is
                    board.add_text("sample", textwrap.indent(record["sample"], "    "), record["step"], record["time"])
                self.board = board

    def close(self, status: int) -> None:
        """End the bar, and wandb with the exit status."""
        if self._metrics.waiting:
            self.warn(f"the last lines of {self.directory / 'metrics.jsonl'} could not be written: the disk is full")
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
            self.bar = None
        if self.board is not None:
            with self.surviving("tensorboard"):
                self.board.close()
        if self.wandb is not None:
            seconds = FINISH_SECONDS[status == 1]
            with self.surviving(f"what wandb has not sent in {seconds} s"):
                within(seconds, lambda: self.wandb.finish(exit_code=status))


class AppendFile:
    """A file that lines are appended to. They wait in memory before it is open, and while the disk is full."""

    def __init__(self):
        self.waiting, self.file, self.path, self.opened = bytearray(), None, Path(), None

    def open(self, path: Path) -> None:
        """Begin to append to `path`. Raises UserError where it is not a regular file."""
        self.file, self.path = files.open_own(path), path
        self.file.seek(0, os.SEEK_END)
        self.opened = os.fstat(self.file.fileno())
        self.write("")

    def write(self, text: str) -> None:
        """Append `text`, now or as soon as it can be. Raises RunError where the file was moved or removed meanwhile."""
        self.waiting += text.encode("utf-8", "replace")
        if self.file and not self.is_there():
            self.file = None
            raise RunError(
                f"{self.path} was moved or removed while the run goes on, which therefore ends; if it was moved, "
                "--out_dir and --name say where it is now, and the same command continues from its newest checkpoint"
            )
        try:
            while self.file and self.waiting:
                del self.waiting[: self.file.write(self.waiting)]
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise

    def is_there(self) -> bool:
        """Whether the open file still has its name."""
        try:
            return os.path.samestat(self.path.stat(), self.opened)
        except FileNotFoundError:
            return False


def lock(directory: Path):
    """Hold the directory until this process ends. Raises UserError if another live process holds it. See `files.lock`."""
    file = files.open_own(directory / ".lock")  # the lock lasts as long as the file is open
    for _ in range(20):  # a killed run's process may take a moment to be gone
        if files.lock(file):
            return file
        time.sleep(0.1)
    raise UserError(f"{directory} is in use by another training process; choose another --name or wait for it")


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 h, 2:03 min, 12 s or 1.2 s."""
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} h" if hours else f"{minutes}:{seconds:02} min"
