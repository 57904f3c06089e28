"""Several runs beside each other: in which settings they differ, what each took, and how low its validation loss came."""

import csv
import io
import json
import math
import tomllib
from pathlib import Path

from common import cli, files
from common.errors import UserError
from reports.curves import Curves, read
from reports.log import duration, read_records
from settings import REMOVED, LogConfig

# Settings in which runs differ without being different.
SILENT = {"name", "out_dir", "resume", "prepare_command", "threads", "sample_every", *cli.flat_fields(LogConfig), *REMOVED}
# Settings that follow from others where they are not set.
DERIVED = {"n_kv_head", "head_dim", "d_ff", "warmup_steps", "min_lr", "micro_batch_size", "dtype", "muon_dtype", "compile"}
MISSING = "-"


def settings_of(run: Path) -> dict[str, str]:
    """The settings of a run by flag name, as its config.toml says; none if it has no such file. Raises UserError."""
    path = run / "config.toml"
    if not path.exists():
        return {}
    try:
        tables = tomllib.loads(files.read_text(path, 1 << 20))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    settings = {name: value for table in tables.values() if isinstance(table, dict) for name, value in table.items()}
    return {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in settings.items()}


def differences(runs: list[Path]) -> list[dict[str, str]]:
    """For each run, the settings that are not the same in all `runs`, by flag name.

    One that may follow from another is left out if it tells the same runs apart.
    """
    found = [settings_of(run) for run in runs]
    known = [settings for settings in found if settings]  # a run without a config.toml differs in nothing that is known
    names = dict.fromkeys(name for settings in known for name in settings if name not in SILENT)
    names = [name for name in names if len({settings.get(name, MISSING) for settings in known}) > 1]
    columns = {name: [settings.get(name, MISSING) for settings in found] for name in names}
    told = {alike(values) for name, values in columns.items() if name not in DERIVED}
    columns = {name: values for name, values in columns.items() if name not in DERIVED or alike(values) not in told}
    return [{name: values[i] for name, values in columns.items()} for i in range(len(runs))]


def alike(values: list[str]) -> tuple[int, ...]:
    """Which of `values` are equal: for each of them the place of the first one like it."""
    return tuple(map(values.index, values))


def labels(runs: list[Path]) -> list[str]:
    """What to call each run in a legend: its settings that differ, if they tell all runs apart, else its name, or its path."""
    by_settings = [" ".join(f"{name}={value}" for name, value in row.items()) for row in differences(runs)]
    by_name = [run.resolve().name for run in runs]
    candidates = [by_settings, by_name] if max(map(len, by_settings), default=0) <= 40 else [by_name]
    return next((c for c in candidates if all(c) and len(set(c)) == len(c)), [str(run) for run in runs])


def choose_x(runs: list[Path]) -> str:
    """What to draw runs over: tokens if they have different global batches, else steps."""
    return "tokens" if any("tokens_per_update" in settings for settings in differences(runs)) else "step"


def table(runs: list[Path]) -> list[str]:
    """Aligned lines: a heading, and a row for each run, the lowest validation loss first."""
    rows = []
    for run, settings in zip(runs, differences(runs), strict=True):
        curves = read(run)
        last = max(record["step"] for record in curves.training + curves.validation)
        losses = [record for record in curves.validation if math.isfinite(record["val_loss"])]
        best = min(losses, key=lambda record: record["val_loss"], default={})
        # Under `tokens` are those that the run has seen.
        settings = {"--tokens" if name == "tokens" else name: value for name, value in settings.items()}
        row = {"run": str(run)} | settings | {"steps": f"{last:,}"} | cost(curves, last)
        row |= {name: f"{best[name]:.4f}" if best.get(name) else MISSING for name in ("val_loss", "val_bpb")}
        rows.append((best.get("val_loss", math.inf), row))
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def cost(curves: Curves, step: int) -> dict[str, str]:
    """The tokens that a run had seen at `step`, and the time of its updates until then."""
    found = {}
    for name, x, show in (("tokens", "tokens", "{:,.0f}".format), ("time", "time", duration)):
        try:
            found[name] = show(curves.at([step], x)[0])
        except UserError:  # it was not logged
            found[name] = MISSING
    return found


def as_csv(runs: list[Path]) -> str:
    """Every record of the runs' metrics.jsonl as a line of comma-separated values.

    In front are the run and the settings in which the runs differ, as --lr.
    """
    records = []
    for run, settings in zip(runs, differences(runs), strict=True):
        read(run)  # refuses what is no metrics.jsonl
        own = {"run": str(run)} | {f"--{name}": value for name, value in settings.items()}
        records += [own | json.loads(line) for line, record in read_records(run / "metrics.jsonl") if record]
    columns = dict.fromkeys(name for record in records for name in record)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
