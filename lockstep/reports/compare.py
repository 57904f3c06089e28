"""Compare runs: the settings in which they differ, what each run cost, and its validation loss."""

import csv
import io
import json
import math
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from lockstep.common import cli
from lockstep.common.errors import UserError
from lockstep.reports import curves
from lockstep.reports.curves import Group, is_finite
from lockstep.reports.log import duration
from lockstep.settings import LogConfig, read_preset

# Settings that the comparison ignores.
SILENT = {
    *("name", "out_dir", "resume", "mirror", "threads", "sample_every", "tasks", "tasks_every", *cli.flat_fields(LogConfig)),
}
# Settings that usually follow from others.
DERIVED = {"n_kv_head", "head_dim", "d_ff", "warmup_steps", "min_lr", "micro_batch_size", "dtype", "muon_dtype", "compile"}
MISSING = "-"


def settings_of(run: Path) -> dict[str, str]:
    """Return a run's settings by flag name, from its config.toml; empty without one. Raises UserError."""
    path = run / "config.toml"
    settings = cli.flat_values(read_preset(path)) if path.exists() else {}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}


def differences(runs: list[Path]) -> list[dict[str, str]]:
    """Return the settings in which `runs` differ, by flag name, for each run. Settings that follow from others are left out."""
    found = [settings_of(run) for run in runs]
    names = dict.fromkeys(name for settings in found for name in settings if name not in SILENT)
    columns = {name: [settings.get(name, MISSING) for settings in found] for name in sorted(names, key=DERIVED.__contains__)}
    kept, seen = {}, []
    for name, values in columns.items():
        alike = [values.index(value) for value in values]  # for each run, the first run with the same value
        known = {value for value, settings in zip(values, found, strict=True) if settings}  # ignore runs without config.toml
        if len(known) > 1 and not (name in DERIVED and alike in seen):
            kept[name] = values
            seen.append(alike)
    return [{name: values[i] for name, values in kept.items()} for i in range(len(runs))]


def same_but_seed(runs: list[Path]) -> list[list[Path]]:
    """Put `runs` that differ only in their seed together. A run without config.toml is alone. Raises UserError.

    Runs with the same seed, such as a repetition, are never together, because they would count as evidence that they are not.
    """
    groups, repetitions = {}, Counter()
    for run in runs:
        settings = {name: value for name, value in settings_of(run).items() if name not in SILENT} or {"run": str(run)}
        repetitions[str(settings)] += 1
        number = repetitions[str(settings)]
        settings.pop("seed", None)
        groups.setdefault((str(settings), number), []).append(run)
    return list(groups.values())


def group(runs: list[Path]) -> list[Group]:
    """Read `runs` in groups that differ only in their seed. A group is named by what differs, a single run by its directory.

    Groups that differ in one number are in ascending order. Raises UserError.
    """
    found, together = [], same_but_seed(runs)
    several, names = len(together) < len(runs), {run.resolve().name for run in runs}
    for paths, settings in zip(together, differences([paths[0] for paths in together]), strict=True):
        if several:
            settings.pop("seed", None)
        if len(paths) == 1:
            where = str(paths[0])
            name = paths[0].resolve().name if len(names) == len(runs) else where
        else:
            where = os.path.commonprefix([str(path) for path in paths]) + "*"
            values = [f"{name}={value}" for name, value in settings.items()] or [where]
            name = ", ".join([*values, f"{len(paths)} seeds"])
        found.append(Group(name, [curves.read(path) for path in paths], settings, where))
    values = curves.numbers(found)
    return [found[i] for i in sorted(range(len(found)), key=values.__getitem__)] if values else found


def choose_x(groups: list[Group]) -> str:
    """Return which x-axis to use: tokens if the groups have different global batches, else steps."""
    return "tokens" if any("tokens_per_update" in group.settings for group in groups) else "step"


def table(groups: list[Group]) -> list[dict[str, Any]]:
    """Return a row per group, lowest last validation loss first. None stands for what is not known."""
    several = any(len(group.runs) > 1 for group in groups)
    rows = []
    for group in groups:
        last = min(max(record["step"] for record in run.training + run.validation) for run in group.runs)
        # The column `tokens` counts the tokens seen, so the dataset's column is called `--tokens`.
        settings = {"--tokens" if name == "tokens" else name: value for name, value in group.settings.items()}
        row = {"run": group.where} | settings | ({"seeds": len(group.runs)} if several else {})
        row |= {"steps": last, "tokens": None, "time": None}
        with suppress(UserError):  # the runs have not logged them
            row["tokens"] = round(group.runs[0].at([last], "tokens")[0])
            row["time"] = mean(run.at([last], "time")[0] for run in group.runs)
        _, losses, margins = group.points("val_loss")
        lowest = [min(run.points("val_loss")[1], default=math.nan) for run in group.runs]
        # A run that ends with a loss that is not finite has diverged, however low its loss was before.
        has_diverged = any(run.validation and not is_finite(run.validation[-1]["val_loss"]) for run in group.runs)
        row["val_loss"] = math.nan if has_diverged else losses[-1] if losses else None
        if several:
            row["±"] = margins[-1] if losses and not has_diverged and len(group.runs) > 1 else None
        row["lowest"] = mean(lowest) if losses else None
        bits = group.points("val_bpb")[1]
        row["val_bpb"] = bits[-1] if bits and not has_diverged else None
        rows.append(row)
    return sorted(rows, key=lambda row: row["val_loss"] if is_finite(row["val_loss"]) else math.inf)


def written(rows: list[dict[str, Any]], form: str) -> str:
    """Return a table as aligned text, Markdown (md) or comma-separated values (csv), whose numbers are not rounded."""
    if form == "csv":
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([rows[0], *(row.values() for row in rows)])
        return lines.getvalue().rstrip("\n")
    lines = [list(rows[0]), *([cell(name, value) for name, value in row.items()] for row in rows)]
    if form == "md":
        lines.insert(1, ["---"] * len(rows[0]))
        return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def cell(name: str, value: Any) -> str:
    """Return a value of the column `name` for people to read."""
    if value is None:
        return MISSING
    if name == "time":
        return duration(value)
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else value
