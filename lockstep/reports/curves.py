"""Read the curves of runs from metrics.jsonl and draw them: loss, learning rate, gradient norm, throughput and scores."""

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TypedDict

import numpy as np

from lockstep.common import files
from lockstep.common.errors import UserError
from lockstep.reports.log import Record, duration, read_records

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f5f5f")  # Okabe and Ito: color-blind safe
PANELS = dict(
    loss="loss (dots: validation)", lr="learning rate", grad_norm="gradient norm", tokens_per_second="tokens per second"
)
STYLES = ("-", "--", ":", "-.")  # one per task
DECADES = 30  # if the largest gradient norm exceeds this many times the smallest, its axis is logarithmic

Prediction = TypedDict("Prediction", {"val_loss": float, "margin": float})  # the fields of prediction.json that we read


@dataclass(frozen=True)
class Curves:
    """The records in a metrics.jsonl: updates, evaluations, and scores on tasks."""

    name: str
    training: list[Record]
    validation: list[Record]
    scores: list[Record]
    prediction: Prediction | None = None  # ladder.py's forecast of the final validation loss, and its margin

    def at(self, steps: list[float], x: str) -> list[float]:
        """Convert `steps` to positions on the axis `x`: steps, tokens, or seconds since the first record. Raises UserError."""
        if x == "step":
            return steps
        records = [record for record in self.training if is_finite(record.get("tokens"))]
        tokens = np.array([record["tokens"] for record in records])
        speeds = [record.get("tokens_per_second") or math.nan for record in records]
        if not records or (x == "time" and np.isnan(speeds).all()):
            raise UserError(f"{self.name} has not logged {'tokens_per_second' if records else 'tokens'} yet; use --x=step")
        if x == "time":  # the first update has no speed
            speeds = np.where(np.isnan(speeds), np.nanmedian(speeds), speeds)
            tokens = np.cumsum(np.diff(tokens, prepend=tokens[0]) / speeds)
        return np.interp(steps, [record["step"] for record in records], tokens).tolist()

    def points(self, key: str, x: str = "step") -> tuple[list[float], list[float]]:
        """Return all finite values logged as `key`: their positions on the axis `x`, and the values themselves."""
        records = self.training + self.validation + self.scores  # their keys differ
        found = [(record["step"], record[key]) for record in records if is_finite(record.get(key))]
        return self.at([step for step, _ in found], x), [y for _, y in found]


def is_finite(value) -> bool:
    """Return whether a logged value can be drawn: null, NaN and Infinity cannot."""
    return isinstance(value, int | float) and math.isfinite(value)


def read(run: Path) -> Curves:
    """Read the curves of a run directory, ignoring a last line that a kill cut short. Raises UserError."""
    path = run / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist; pass a run directory made by train.py, such as runs/NAME")
    records = [record for _, record in read_records(path)]
    if None in records[:-1]:
        raise UserError(f"{path}, line {records.index(None) + 1}: not a JSON object with a step and numbers")
    training, validation = ([record for record in records if record and key in record] for key in ("loss", "val_loss"))
    if not training and not validation:
        raise UserError(f"{path} is empty; train.py logs a line every --log_every steps")
    predicted = run / "prediction.json"
    prediction = files.read_json(predicted, Prediction) if predicted.exists() else None
    scores = [record for record in records if record and any(key.startswith("tasks/") for key in record)]
    return Curves(run.resolve().name, training, validation, scores, prediction)


def smooth(values: list[float]) -> list[float]:
    """Take a centered running median over 5 % of the values (at most 201), which has no lag and ignores single spikes."""
    reach = min(len(values) // 40, 100)
    halves = [min(i, len(values) - 1 - i, reach) for i in range(len(values))]
    return [median(values[i - half : i + half + 1]) for i, half in enumerate(halves)]


def draw(runs: list[Path], out: Path, x: str = "step") -> None:
    """Draw the curves of `runs` in four or five panels, one color per run, and publish the image. Raises UserError."""
    os.environ["MPLBACKEND"] = "agg"  # matplotlib cannot be imported if a notebook has set a backend that is not installed here
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    drawn = list(zip(map(read, runs), cycle(COLORS), strict=False))  # each run's curves and color
    scored = [["tasks", "tasks"]] if any(run.scores for run, _ in drawn) else []
    figure = Figure(figsize=(10, 6.4 + 2.8 * len(scored)), dpi=150, layout="constrained")
    axes = figure.subplot_mosaic([list(PANELS)[:2], list(PANELS)[2:], *scored], sharex=True)
    for key in PANELS:
        draw_panel(axes[key], drawn, key, x)
    if scored:
        draw_scores(axes["tasks"], drawn, x)
    draw_validation(axes["loss"], drawn, x)
    norms = [y for run, _ in drawn for y in run.points("grad_norm")[1] if y > 0]
    is_wild = norms and max(norms) > DECADES * min(norms)
    for key in ("lr", "tokens_per_second", *(["grad_norm"] if not is_wild else [])):
        axes[key].set_ylim(bottom=0)
    axes["grad_norm"].set_yscale("log" if is_wild else "linear")
    short = EngFormatter(sep="")  # 1500 is 1.5k, 2e9 is 2G
    axes["tokens_per_second"].yaxis.set_major_formatter(short)
    for axis in list(axes.values())[2:]:
        axis.tick_params(labelbottom=True)
        axis.set_xlabel(x if x != "time" else "training time", color="0.3")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.xaxis.set_major_formatter(short if x != "time" else lambda seconds, _position: duration(seconds))

    lines, labels, names = [], [], {run.name for run, _ in drawn}
    for (run, color), path in zip(drawn, runs, strict=True):
        label = run.name if len(names) == len(runs) else str(path)
        labels.append(label + "".join(f", validation {loss:.3f}" for loss in run.points("val_loss")[1][-1:]))
        lines.append(Line2D([], [], color=color, linewidth=3))
    columns = max(1, 92 // (max(map(len, labels)) + 5))
    add_legend(figure, lines, labels, loc="outside upper center", ncols=columns, fontsize=12)
    save(figure, out)


def add_legend(owner, lines: list, labels: list[str], **style) -> None:
    """Add a legend to a figure or an axis, with the `labels` as they are. Characters that no installed font has are escaped."""
    # Given the labels, matplotlib would typeset what is between two $, and leave out a label that begins with _.
    legend = owner.legend(lines, ["label"] * len(labels), frameon=False, **style)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        families, missing = fonts_for(label)
        label = "".join(ascii(c)[1:-1] if ord(c) in missing else c for c in label)
        text.set(text=label, parse_math=False, usetex=False, fontfamily=families)


def fonts_for(text: str) -> tuple[list[str], set[int]]:
    """Return the default font families, with others for the characters that those lack, and the characters that no font has."""
    from matplotlib import font_manager, rcParams

    families, missing = list(rcParams["font.family"]), set(map(ord, text))
    for family in families:
        missing -= characters_in(font_manager.findfont(font_manager.FontProperties(family=[family])))
    for font in font_manager.fontManager.ttflist:
        if not missing:
            break
        if "Last" not in font.name and missing & (found := characters_in(font.fname)):  # the font of last resort draws boxes
            families.append(font.name)
            missing -= found
    return families, missing


def characters_in(font: str) -> set[int]:
    """Return the characters in a font file; none if it cannot be read."""
    from matplotlib import font_manager

    with suppress(OSError, RuntimeError):
        return set(font_manager.get_font(font).get_charmap())
    return set()


def draw_panel(axis, drawn: list[tuple[Curves, str]], key: str, x: str) -> None:
    """Draw one quantity for every run: a thin line as logged, and (except for the learning rate) a thick smoothed line."""
    for run, color in drawn:
        places, y = run.points(key, x)
        if key != "lr":
            axis.plot(places, y, color=color, linewidth=0.8, alpha=0.3)
            y = smooth(y)
        axis.plot(places, y, color=color, linewidth=1.7, marker="o" if len(y) == 1 else None)
    decorate(axis, PANELS[key])


def decorate(axis, title: str) -> None:
    """Give a panel a title, and an unobtrusive grid and axes."""
    axis.set_title(title, loc="left", fontsize=12, color="0.15")
    axis.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    axis.grid(color="0.91", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("0.6")
    axis.tick_params(which="both", color="0.6", labelcolor="0.3", labelsize=10)


def draw_scores(axis, drawn: list[tuple[Curves, str]], x: str) -> None:
    """Draw one score per task, each in its own style: acc_norm if available, else one that lies between 0 and 1."""
    chosen = {}
    for key in dict.fromkeys(key for run, _ in drawn for record in run.scores for key in record if key.startswith("tasks/")):
        task, _, metric = key.removeprefix("tasks/").rpartition("/")
        if metric == "acc_norm" or all(0 <= value <= 1 for run, _ in drawn for value in run.points(key)[1]):
            chosen[task] = key if metric == "acc_norm" else chosen.get(task, key)
    lines, labels = [], []
    for key, style in zip(chosen.values(), cycle(STYLES)):
        for run, color in drawn:
            axis.plot(*run.points(key, x), style, color=color, linewidth=1.7, marker="o", markersize=4)
        lines += axis.plot([], [], style, color="0.3")
        labels.append(key.removeprefix("tasks/").replace("/", " "))
    add_legend(axis, lines, labels, fontsize=10, ncols=4)
    decorate(axis, "scores on tasks")


def draw_validation(axis, drawn: list[tuple[Curves, str]], x: str) -> None:
    """Draw validation losses as dots and a forecast as a band. The axis cuts off the steep initial drop (the first tenth)."""
    shown = []
    for run, color in drawn:
        places, y = run.points("val_loss", x)
        axis.plot(places, y, "o", color=color, markersize=6, markeredgecolor="white", zorder=3)
        steps, logged = run.points("loss")
        shown += y + [loss for step, loss in zip(steps, logged, strict=True) if 10 * step > steps[-1]]
        if run.prediction:
            loss, margin = run.prediction["val_loss"], run.prediction["margin"]
            axis.axhspan(loss - margin, loss + margin, color=color, alpha=0.12, linewidth=0)
            axis.axhline(loss, color=color, linewidth=1, linestyle=":")
            shown += [loss - margin, loss + margin]
    if len(set(shown)) > 1:
        height = max(shown) - min(shown)
        axis.set_ylim(min(shown) - 0.06 * height, max(shown) + 0.06 * height)


def save(figure, out: Path) -> None:
    """Publish `figure` as `out`. Raises UserError for an unknown format, OSError if the file cannot be written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.publish(out) as file:
            figure.savefig(file, format=out.suffix[1:] or "png")
    except ValueError as error:
        raise UserError(f"cannot write {out}: {error}") from None
