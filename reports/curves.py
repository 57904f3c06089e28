"""The curves of a run: what its metrics.jsonl and train.log hold, ready to be drawn."""

import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from common import files
from common.errors import UserError
from reports.log import LONGEST_LINE, Record, read_records


@dataclass(frozen=True)
class Curves:
    """The records of a metrics.jsonl, divided into those of training and those of evaluations."""

    name: str
    training: list[Record]
    validation: list[Record]
    restarts: list[int]  # steps from which the run was continued

    def tokens_per_step(self) -> int:
        """The global batch in tokens. 0 if the records do not say."""
        counted = [(record["step"], record["tokens"]) for record in self.training if is_finite(record.get("tokens"))]
        if not counted:
            return 0
        (step, tokens), (last_step, last_tokens) = counted[0] if len(counted) > 1 else (0, 0), counted[-1]
        return round((last_tokens - tokens) / max(last_step - step, 1))

    def skipped(self) -> list[int]:
        """The logged steps at or before which an update was left out because its gradient was not finite."""
        counts = [(0, 0), *((record["step"], record.get("skipped") or 0) for record in self.training)]
        return [step for (_, before), (step, count) in pairwise(counts) if count > before]

    def at(self, steps: list[float], x: str) -> list[float]:
        """Where `steps` are on the axis `x`: steps, tokens, or seconds since the first record. Raises UserError."""
        if x == "step":
            return steps
        records = [record for record in self.training if is_finite(record.get("tokens"))]
        tokens = np.array([record["tokens"] for record in records])
        speeds = [record.get("tokens_per_second") or math.nan for record in records]
        if not records or (x == "time" and np.isnan(speeds).all()):
            raise UserError(f"{self.name} has not logged {'tokens_per_second' if records else 'tokens'} yet; --x=step works")
        if x == "time":  # a first update has no speed of its own
            speeds = np.where(np.isnan(speeds), np.nanmedian(speeds), speeds)
            places = np.cumsum(np.diff(tokens, prepend=tokens[0]) / speeds)
        else:
            places = tokens
        return np.interp(steps, [record["step"] for record in records], places).tolist()

    def points(self, key: str, x: str = "step") -> tuple[list[float], list[float]]:
        """The places on the axis `x` and the values of everything finite that was logged as `key`."""
        records = self.validation if key.startswith("val_") else self.training
        found = [(record["step"], record[key]) for record in records if is_finite(record.get(key))]
        return self.at([step for step, _ in found], x), [y for _, y in found]


def is_finite(value) -> bool:
    """Whether a logged value can be drawn; null, NaN and Infinity cannot."""
    return isinstance(value, int | float) and math.isfinite(value)


def read(run: Path) -> Curves:
    """Read the curves of a run directory. A last line torn by a kill is ignored.

    Raises UserError if there is no metrics.jsonl, if one of its lines is no record, or if nothing was logged yet.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"no {path}; a run is a directory that train.py made, such as runs/NAME")
    found = [record for _, record in read_records(path)]
    if None in found[:-1]:
        raise UserError(f"{path}, line {found.index(None) + 1}: not a JSON object with a step and numbers")
    records = [record for record in found if record is not None]
    training, validation = ([record for record in records if key in record] for key in ("loss", "val_loss"))
    if not training and not validation:
        raise UserError(f"{path} is empty: nothing was logged yet; lines come every --log_every steps")
    last = max(record["step"] for record in training + validation)
    return Curves(run.resolve().name, training, validation, [step for step in restarts(run / "train.log") if step < last])


def restarts(log: Path) -> list[int]:
    """The steps from which a run was continued, as its train.log says."""
    if not log.exists():
        return []
    with files.open_regular(log) as file:
        lines = iter(lambda: file.readline(LONGEST_LINE), b"")
        found = [re.fullmatch(rb"continuing from .*step-(\d{8,15})\s*", line) for line in lines]
    return sorted({int(match[1]) for match in found if match})


def smooth(values: list[float]) -> list[float]:
    """Centred running median over 5 % of the values (at most 201). It neither lags nor follows a single spike."""
    reach = min(len(values) // 40, 100)
    halves = [min(i, len(values) - 1 - i, reach) for i in range(len(values))]
    return [median(values[i - half : i + half + 1]) for i, half in enumerate(halves)]


def choose_x(curves: list[Curves], x: str) -> str:
    """The axis that `auto` means: tokens if the runs have different global batches, else steps."""
    batches = [run.tokens_per_step() for run in curves]
    return x if x != "auto" else "tokens" if len(set(batches)) > 1 and all(batches) else "step"
