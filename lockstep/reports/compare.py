"""Compare runs: the settings in which they differ, what each run cost, and its lowest validation loss."""

import json
import math
from contextlib import suppress
from pathlib import Path

from lockstep.common import cli
from lockstep.common.errors import UserError
from lockstep.reports.curves import read
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


def choose_x(runs: list[Path]) -> str:
    """Return which x-axis to use: tokens if the runs have different global batches, else steps."""
    return "tokens" if any("tokens_per_update" in settings for settings in differences(runs)) else "step"


def table(runs: list[Path]) -> list[str]:
    """Return a table as aligned lines: a header, then one row per run, lowest validation loss first."""
    rows = []
    for run, settings in zip(runs, differences(runs), strict=True):
        curves = read(run)
        last = max(record["step"] for record in curves.training + curves.validation)
        losses = [record for record in curves.validation if math.isfinite(record["val_loss"])]
        best = min(losses, key=lambda record: record["val_loss"], default={})
        # The column `tokens` counts the tokens seen, so the dataset's column is called `--tokens`.
        settings = {"--tokens" if name == "tokens" else name: value for name, value in settings.items()}
        row = {"run": str(run)} | settings | {"steps": f"{last:,}", "tokens": MISSING, "time": MISSING}
        with suppress(UserError):  # the run has not logged them
            row["tokens"] = f"{curves.at([last], 'tokens')[0]:,.0f}"
            row["time"] = duration(curves.at([last], "time")[0])
        row |= {name: f"{best[name]:.4f}" if best.get(name) else MISSING for name in ("val_loss", "val_bpb")}
        rows.append((best.get("val_loss", math.inf), row))
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
