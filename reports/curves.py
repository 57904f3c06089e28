"""The curves of runs: loss, learning rate, gradient norm and throughput, read from metrics.jsonl and train.log, and drawn."""

import math
import re
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import TypedDict

import numpy as np

from common import files
from common.errors import UserError
from reports.log import LONGEST_LINE, Record, duration, read_records

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f5f5f")  # Okabe and Ito: for all eyes
RINGS = ("o", "s", "D", "v", "p", "h")  # of validation losses: they tell runs apart in grey, and where a colour comes again
DECADES = 30  # a gradient norm whose largest value is this many times its smallest is drawn on a logarithmic axis
DASH = 5  # of lines that lie on one another, in widths of the line
RING = dict(linestyle="", markersize=5.5, markerfacecolor="white", markeredgewidth=1.5)
MARKS = {
    "continued": dict(linestyle="", marker="^", markersize=5),
    "skipped": dict(linestyle="", marker="x", markersize=6, markeredgewidth=1.6),
}


Prediction = TypedDict("Prediction", {"val_loss": float, "margin": float})  # what is read of ladder.py's prediction.json


@dataclass(frozen=True)
class Curves:
    """The records of a metrics.jsonl, divided into those of training and those of evaluations."""

    name: str
    training: list[Record]
    validation: list[Record]
    restarts: list[int]  # steps from which the run was continued
    prediction: tuple[float, float] | None = None  # by ladder.py: the last validation loss, and half of its interval

    def skipped(self) -> list[int]:
        """The logged steps at or before which an update was skipped because its gradient was not finite."""
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
    continued = [step for step in restarts(run / "train.log") if step < last]
    return Curves(run.resolve().name, training, validation, continued, prediction(run / "prediction.json"))


def prediction(path: Path) -> tuple[float, float] | None:
    """The loss that ladder.py predicts for a run, and half of its interval. Raises UserError for a file of another kind."""
    found = files.read_json(path, Prediction) if path.exists() else None
    return found and (found["val_loss"], found["margin"])


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


def draw(runs: list[Path], out: Path, x: str = "step", labels: list[str] | None = None) -> None:
    """Draw the curves of `runs` in four panels, one colour for each run, and publish the picture as `out`.

    labels: what to call each run (None: by its name).

    Raises UserError for a run without metrics, and for a file that cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    curves = [read(Path(run)) for run in runs]
    drawn = list(zip(curves, cycle(COLORS), strict=False))  # for each run: its curves, its colour
    figure = Figure(figsize=(10, 6.4), dpi=150, layout="constrained")
    loss, lr, norm, throughput = figure.subplots(2, 2, sharex=True).flat
    draw_panel(loss, drawn, "loss", "loss", x)
    draw_validation(loss, drawn, x)
    draw_panel(lr, drawn, "lr", "learning rate", x)
    draw_panel(norm, drawn, "grad_norm", "gradient norm", x)
    draw_panel(throughput, drawn, "tokens_per_second", "tokens per second", x)

    norms = [y for run in curves for y in run.points("grad_norm")[1] if y > 0]
    if norms and max(norms) > DECADES * min(norms):
        norm.set_yscale("log")
    else:
        norm.set_ylim(bottom=0)
    lr.set_ylim(bottom=0)
    throughput.set_ylim(bottom=0)
    short = EngFormatter(sep="")  # 1500 is 1.5k, 2e9 is 2G
    throughput.yaxis.set_major_formatter(short)
    for axis in (norm, throughput):
        axis.set_xlabel(x if x != "time" else "time of the updates", color="0.3")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.xaxis.set_major_formatter(short if x != "time" else lambda seconds, _position: duration(seconds))
    name_runs(figure, drawn, labels or [run.name for run in curves])
    save(figure, Path(out))


def draw_panel(axis, drawn: list[tuple], key: str, title: str, x: str) -> None:
    """Draw one value of every run: a thin line as logged, and a thick smoothed one (the learning rate needs no smoothing).

    Marks at the bottom show where a run was continued and where updates were skipped.
    """
    lines = [run.points(key, x) for run, _ in drawn]
    for i, ((run, color), (places, y)) in enumerate(zip(drawn, lines, strict=True)):
        same, before = lines.count((places, y)), lines[:i].count((places, y))
        dashes = (DASH * before, (DASH, DASH * (same - 1))) if same > 1 else "-"  # equal lines take turns
        if key != "lr":
            axis.plot(places, y, color=color, linewidth=0.8, alpha=0.3)
            y = smooth(y)
        axis.plot(places, y, color=color, linewidth=1.7, linestyle=dashes, marker="o" if len(y) == 1 else None)
        for mark, steps in zip(MARKS.values(), (run.restarts, run.skipped()), strict=True):
            if steps:
                bottom = axis.get_xaxis_transform()
                axis.plot(run.at(steps, x), [0.03] * len(steps), color=color, transform=bottom, zorder=4, **mark)
    axis.set_title(title, loc="left", fontsize=12, color="0.15")
    axis.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    axis.grid(color="0.91", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("0.6")
    axis.tick_params(which="both", color="0.6", labelcolor="0.3", labelsize=10)


def draw_validation(axis, drawn: list[tuple], x: str) -> None:
    """Draw validation losses as rings, and the predicted loss."""
    from matplotlib.lines import Line2D

    shown = []
    for (run, color), marker in zip(drawn, cycle(RINGS), strict=False):
        places, y = run.points("val_loss", x)
        axis.plot(places, y, marker=marker, markeredgecolor=color, zorder=3, **RING)
        steps, logged = run.points("loss")
        shown += y + [loss for step, loss in zip(steps, logged, strict=True) if 10 * step > steps[-1]]
        if run.prediction:
            loss, margin = run.prediction
            axis.axhspan(loss - margin, loss + margin, color=color, alpha=0.12, linewidth=0)
            axis.axhline(loss, color=color, linewidth=1, linestyle=":")
            shown += [loss - margin, loss + margin]
    if len(set(shown)) > 1:  # cut off the steep fall of the first tenth, so that the rest can be told apart
        height = max(shown) - min(shown)
        axis.set_ylim(min(shown) - 0.06 * height, max(shown) + 0.06 * height)
    handles = [Line2D([], [], color="0.35", linewidth=1.7, label="training")]
    handles += [Line2D([], [], marker=RINGS[0], markeredgecolor="0.35", label="validation", **RING)]
    present = any(run.restarts for run, _ in drawn), any(run.skipped() for run, _ in drawn)
    marks = [mark for mark, there in zip(MARKS.items(), present, strict=True) if there]
    handles += [Line2D([], [], color="0.35", label=name, **mark) for name, mark in marks]
    if any(run.prediction for run, _ in drawn):
        handles.append(Line2D([], [], color="0.35", linewidth=1, linestyle=":", label="predicted"))
    # Beside the title, where no curve and no number is.
    place = dict(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=len(handles))
    axis.legend(handles=handles, frameon=False, fontsize=9.5, handlelength=1, handletextpad=0.5, columnspacing=1, **place)


def name_runs(figure, drawn: list[tuple], names: list[str]) -> None:
    """Write the run's name and its last validation loss as the title, or a legend for several runs."""
    from matplotlib.lines import Line2D

    losses = [run.points("val_loss")[1][-1:] for run, _ in drawn]
    names = [name + "".join(f", validation {loss:.3f}" for loss in last) for name, last in zip(names, losses, strict=True)]
    if len(names) == 1:
        figure.suptitle(names[0], fontsize=14)
        return
    rows = math.ceil(len(names) / max(1, 80 // (max(map(len, names)) + 5)))
    style = dict(linewidth=3, markerfacecolor="white", markersize=6)
    lines = [
        Line2D([], [], color=color, marker=marker, label=name, **style)
        for name, (_, color), marker in zip(names, drawn, cycle(RINGS), strict=False)
    ]
    figure.legend(handles=lines, loc="outside upper center", ncols=math.ceil(len(lines) / rows), frameon=False, fontsize=12)


def save(figure, out: Path) -> None:
    """Publish `figure` as `out`. Raises UserError for an unknown format, OSError if it cannot be written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.publish(out) as file:
            figure.savefig(file, format=out.suffix[1:] or "png")
    except ValueError as error:
        raise UserError(f"cannot write {out}: {error}") from None
