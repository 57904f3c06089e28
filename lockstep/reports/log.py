"""A run's output: the console, train.log, metrics.jsonl, status.json, wandb and TensorBoard.

On ranks other than the master, `Log` does nothing.
"""

import io
import json
import os
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Required, TypedDict

import msgspec

from lockstep.common import files
from lockstep.common.errors import EX_TEMPFAIL, UserError, outcome, plural, printable, within
from lockstep.common.records import Count
from lockstep.settings import LogConfig

FINISH_SECONDS = (3600, 30)  # for trackers to send the rest: normally, and after a failure, when other ranks wait
STATES = {0: "complete", 2: "refused", EX_TEMPFAIL: "stopped"}  # `state` in status.json by exit status; otherwise failed
SPEED = ("tokens_per_second", "mfu", "step_ms", "data_wait_ms", "memory_gb")  # one group in wandb and TensorBoard
# The values that are read back from metrics.jsonl. Numbers may be NaN.
LOSSES = ("loss", "mean_loss", "val_loss", "val_bpb")
FIGURES = ("tokens", "lr", "grad_norm", "tokens_per_second", "mfu", "skipped")
Record = TypedDict(
    "Record", {"step": Required[Count]} | dict.fromkeys(LOSSES, float) | dict.fromkeys(FIGURES, float | None), total=False
)


def read_records(path: Path) -> Iterator[tuple[bytes, Record | None]]:
    """Yield each line of a metrics.jsonl with its record, or None if the line is not a record or was cut short by a kill.

    Besides the fields of `Record`, a record contains scores on tasks.
    """
    with open(path, "rb") as file:
        for line in filter(bytes.strip, file):
            try:
                values = json.loads(line)  # msgspec's own decoder does not read NaN
                record = msgspec.convert(values, Record)
                record |= {name: float(value) for name, value in values.items() if name.startswith("tasks/")}
            except (ValueError, TypeError, OverflowError, RecursionError):
                record = None
            yield line, record


class Log:
    """The text files of a run directory. Nothing is written there before `begin`. Raises UserError if the directory is in use.

    As a context manager, it records in status.json how the block ends: with an error, or with the exit status `self.status`.
    """

    def __init__(self, directory: Path, is_master: bool):
        self.directory, self.is_master, self.began = directory, is_master, time.monotonic()
        self.status, self._facts = 1, {}  # the exit status, and the content of status.json
        self.trackers: dict[str, tuple[Callable, Callable]] = {}  # for each name: show(record) and end(status)
        self._text, self._metrics = io.BytesIO(), io.BytesIO()  # buffers until the files are open
        # Locked from now on, or else from `claim` on: until then, a new run's directory does not exist.
        self._lock = lock(directory, "ab") if is_master and (directory / ".lock").exists() else None

    def __enter__(self):
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Record how the run ends: with `error`, or with the exit status `self.status`."""
        reason = {}
        if error:
            message, self.status = outcome(error)
            reason["reason"] = message.removeprefix("error: ") if message else f"{type(error).__name__}: {error}"
        self.set_status(state=STATES.get(self.status, "failed"), status=self.status, **reason)
        self.close(self.status)

    def begin(self, step: int) -> Record:
        """Create the directory if needed, and open its files at `step`. Returns the record of that step, or an empty one."""
        if not self.is_master:
            return {}
        self.claim()
        said, self._text = self._text, open_to_append(self.directory / "train.log")
        append(self._text, said.getvalue())
        recorded = self.rewind(step)
        self._metrics = open_to_append(self.directory / "metrics.jsonl")
        return recorded

    def claim(self) -> None:
        """Create the directory and lock it, if `__init__` found none. Raises UserError if another process did so since then.

        That process may even have ended: whatever this one decided before, such as to start from scratch, is outdated.
        """
        if self.is_master and not self._lock:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = lock(self.directory, "xb")
            except FileExistsError:
                problem = f"another process has started to train {self.directory} in the meantime"
                raise UserError(f"{problem}; run the same command again to continue it, or choose another --name") from None

    def rewind(self, step: int) -> Record:
        """Cut metrics.jsonl back to `step`, so that steps are not logged twice. Returns the record of `step`."""
        path, recorded = self.directory / "metrics.jsonl", {}
        lines = list(read_records(path)) if path.exists() else []
        if unreadable := sum(record is None for _, record in lines):
            self.warn(f"dropped {plural(unreadable, 'unreadable line')} from {path}")
        with files.publish(path) as file:
            for line, record in lines:
                if record and record["step"] <= step:
                    file.write(line.rstrip(b"\n") + b"\n")
                    recorded |= record if record["step"] == step else {}
        return recorded

    def say(self, message: str) -> None:
        """Write a line to the console and to train.log."""
        if self.is_master:
            message = printable(message)
            append(self._text, f"{message}\n".encode("utf-8", "replace"))
            try:
                print(message, flush=True)
            except OSError:  # nobody reads the output any more, as after `| head`; keep training
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def warn(self, message: str) -> None:
        """Write a warning."""
        self.say(f"warning: {message}")

    def set_status(self, **facts) -> None:
        """Add `facts` to status.json. Only the process that holds the directory's lock writes it."""
        if self._lock:
            self._facts |= facts
            process = {"pid": os.getpid(), "host": socket.gethostname(), "time": round(time.time(), 3)}
            with suppress(OSError), files.publish(self.directory / "status.json", durable=False) as file:  # ignore a full disk
                file.write(json.dumps(self._facts | process).encode() + b"\n")

    @contextmanager
    def surviving(self, what: str):
        """Catch any error in the block and warn that `what` failed. For reports, which the run can do without."""
        try:
            yield
        except Exception as error:
            self.warn(f"{what} failed: {(str(error) or type(error).__name__).splitlines()[0]}; the run continues without it")

    def start_trackers(self, options: LogConfig, settings: dict[str, Any], step: int, run_id: str) -> str:
        """Start TensorBoard and wandb at `step`, if they are on. Returns the id of wandb's run.

        settings: the run's config in wandb. run_id: the id of the wandb run to continue (empty: a new one).
        """
        if self.is_master and options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # Drop what a killed run wrote about later steps.
            board = SummaryWriter(self.directory / "tensorboard", purge_step=step + 1)
            self.trackers["tensorboard"] = partial(add_to_board, board), lambda status: board.close()
        if self.is_master and options.wandb != "off":
            run = start_wandb(options, self.directory, settings, run_id)
            # A kill loses what wandb holds in memory, up to 15 seconds. Offline, nobody knows what wandb has, so each start
            # writes the whole history, and the newest folder has everything.
            sent = run.summary.get("step", 0) if run.resumed else 0
            with self.surviving("sending earlier steps to wandb"):
                for line, record in read_records(self.directory / "metrics.jsonl"):
                    if record and record["step"] > sent:
                        run.log(tagged(json.loads(line)))
            if sent > step:
                self.say(f"wandb already has the steps from {step + 1} to {sent}; it keeps them, because it cannot go back")
            self.trackers["wandb"] = partial(add_to_wandb, run, sent), lambda status: run.finish(exit_code=status)
            return run.id
        return run_id

    def metrics(self, record: dict[str, Any]) -> None:
        """Record a step's values by name, with the time in seconds since 1970. Drops values that are None."""
        if self.is_master:
            record = {key: value for key, value in record.items() if value is not None} | {"time": round(time.time(), 3)}
            append(self._metrics, json.dumps(record).encode() + b"\n")
            self.set_status(step=record["step"])
            self.track(record)

    def sample(self, step: int, text: str) -> None:
        """Print, on one line, what the model sampled after `step` updates."""
        if self.is_master:
            self.say(f"step {step:>6}  sample {json.dumps(text, ensure_ascii=False)}")
            self.track({"step": step, "sample": text, "time": round(time.time(), 3)})

    def track(self, record: dict[str, Any]) -> None:
        """Send a record to the trackers, with names from `tagged`. A tracker that fails is turned off."""
        record = tagged(record)
        for name in list(self.trackers):
            show, end = self.trackers.pop(name)
            with self.surviving(name):
                show(record)
                self.trackers[name] = show, end

    def close(self, status: int) -> None:
        """Write what is still buffered, pass the exit status to the trackers, and unlock the directory."""
        with self.surviving(f"writing the last lines of {self.directory / 'metrics.jsonl'}"):
            self._metrics.flush()
        for name, (_, end) in self.trackers.items():
            seconds = FINISH_SECONDS[status == 1]
            with self.surviving(f"sending the rest to {name} within {seconds} s"):
                within(seconds, partial(end, status))
        if self._lock:
            self._lock.close()
            self._lock = None


def open_to_append(path: Path) -> BinaryIO:
    """Open a file for appending, with a buffer that holds the content while the disk is full."""
    return open(path, "ab", buffering=1 << 20)


def append(file: BinaryIO, content: bytes) -> None:
    """Append `content`. While the disk is full or fails, the content stays in the file's buffer."""
    with suppress(OSError):
        file.write(content)
        file.flush()


def lock(directory: Path, mode: str) -> BinaryIO:
    """Lock the directory for as long as the returned file is open. Raises UserError if another process holds the lock.

    mode: in which to open the file, such as xb to create it.
    """
    file = open(directory / ".lock", mode)  # noqa: SIM115
    for _ in range(20):  # a killed process may take a moment to disappear
        if files.lock(file):
            return file
        time.sleep(0.1)
    raise UserError(f"{directory} is in use by another training process; wait, or choose another --name")


def require_wandb_key() -> None:
    """Raise UserError if wandb has no API key for --wandb=online. In a terminal, wandb asks for one."""
    os.environ["WANDB_MODE"] = "online"  # `login` reads no flag
    import wandb

    try:
        wandb.login(verify=False)
    except wandb.Error as error:
        raise UserError(f"--wandb=online: {str(error).rstrip('.')}; --wandb=offline needs no account") from None


def start_wandb(options: LogConfig, directory: Path, settings: dict[str, Any], run_id: str):
    """Start a wandb run, or continue the one with the id `run_id`. Raises UserError if wandb fails.

    Flags win over wandb's environment variables, and those over our defaults.
    """
    import wandb

    def unless_set(**defaults):
        return {name: value for name, value in defaults.items() if not os.environ.get(f"WANDB_{name.upper()}")}

    project = {"project": options.wandb_project} if options.wandb_project else unless_set(project="lockstep")
    place = project | unless_set(name=directory.name, dir=directory, resume="allow")
    quiet = wandb.Settings(**unless_set(console="off", quiet=True))
    try:
        run = wandb.init(**place, mode=options.wandb, config=settings, id=run_id or None, settings=quiet)
    except wandb.Error as error:
        way_out = "--wandb=offline needs no account" if options.wandb == "online" else "change --wandb_project or WANDB_*"
        raise UserError(f"--wandb={options.wandb}: {error}; {way_out}") from None
    run.define_metric("*", step_metric="step")
    for name in ("train/loss", "val/loss", "val/bpb"):
        run.define_metric(name, step_metric="step", summary="min,last")
    return run


def add_to_wandb(run, sent: int, record: dict[str, Any]) -> None:
    """Add a record to a wandb run, which already has everything up to the update of step `sent`, from a start that was killed.

    wandb's own way back to a checkpoint, `resume_from`, is a preview, and refuses a run that a kill has left unfinished
    (wandb#10438).
    """
    if record["step"] > sent or (record["step"] == sent and "train/loss" not in record):
        run.log(record)


def tagged(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with its names in wandb and TensorBoard, which group values by the first word."""

    def tag(name: str) -> str:
        if name in ("step", "time", "sample") or name.startswith("tasks/"):
            return name
        return f"val/{name[4:]}" if name.startswith("val_") else f"speed/{name}" if name in SPEED else f"train/{name}"

    return {tag(name): value for name, value in record.items()}


def add_to_board(board, record: dict[str, Any]) -> None:
    """Add a record to TensorBoard."""
    step, at = record["step"], record["time"]
    for name, value in record.items():
        if name == "sample":  # Markdown, in which four spaces keep text verbatim
            board.add_text(name, textwrap.indent(value, "    "), step, at)
        elif name not in ("step", "time") and not (name == "train/tokens" and "train/loss" not in record):  # already added
            board.add_scalar(name, value, step, at)


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 h, 2:03 min, 12 s or 1.2 s."""
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} h" if hours else f"{minutes}:{seconds:02} min"
