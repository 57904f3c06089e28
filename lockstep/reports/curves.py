"""Read the curves of runs from metrics.jsonl and draw them: loss, learning rate, gradient norm, throughput and scores.

Runs that differ only in their seed are one `Group`, drawn as one curve.
"""

import math
import os
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TypedDict

import numpy as np

from lockstep.common import files
from lockstep.common.errors import UserError
from lockstep.reports.log import Record, duration, read_records

# The colors of Okabe and Ito, which color-blind people can tell apart. On black, yellow replaces dark blue.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f5f5f")
COLORS_ON_BLACK = ("#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#f0e442", "#b0b0b0")
# Colors of the background, the text, the numbers at the axes, the axes and the grid.
THEMES = {"light": ("white", "0.15", "0.3", "0.6", "0.91"), "dark": ("#0d1117", "0.9", "0.75", "0.45", "0.2")}
PANELS = dict(
    loss="loss (dots: validation, on other documents)",
    lr="learning rate",
    grad_norm="gradient norm",
    tokens_per_second="tokens per second",
)
STYLES = ("-", "--", ":", "-.")  # one per task, or one for every seven curves
DECADES = 30  # if the largest gradient norm exceeds this many times the smallest, its axis is logarithmic
# Student's t for 95 % and 1 to 20 degrees of freedom. Beyond that, the last one is a little too large.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)

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


@dataclass(frozen=True)
class Group:
    """One run, or several that differ only in their seed."""

    name: str
    runs: list[Curves]
    settings: dict[str, str] = field(default_factory=dict)  # those in which it differs from the groups drawn with it
    where: str = ""  # the path of its run, or a pattern for those of its runs

    def points(self, key: str, x: str = "step") -> tuple[list[float], list[float], list[float]]:
        """Return the mean over the runs of the values logged as `key`, where all have one: positions, means and margins.

        The margins are half of the 95 % confidence interval of the mean, and 0 for a single run.
        """
        found = [dict(zip(*run.points(key), strict=True)) for run in self.runs]
        steps = [step for step in found[0] if all(step in values for values in found)]
        places = np.mean([run.at(steps, x) for run in self.runs], axis=0)
        values, margins = np.array([[of_run[step] for step in steps] for of_run in found]), np.zeros(len(steps))
        if (runs := len(self.runs)) > 1:
            margins = STUDENT[min(runs - 1, len(STUDENT)) - 1] * values.std(axis=0, ddof=1) / math.sqrt(runs)
        return places.tolist(), values.mean(axis=0).tolist(), margins.tolist()


Drawn = list[tuple[Group, str, str]]  # groups with their colors and line styles


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
    for record in training:  # the mean since the line before is less noisy than the loss of one batch
        record["loss"] = record.get("mean_loss", record["loss"])
    scores = [record for record in records if record and any(key.startswith("tasks/") for key in record)]
    return Curves(run.resolve().name, training, validation, scores, prediction)


def smooth(values: list[float]) -> list[float]:
    """Take a centered running median over 5 % of the values (at most 201), which has no lag and ignores single spikes."""
    reach = min(len(values) // 40, 100)
    halves = [min(i, len(values) - 1 - i, reach) for i in range(len(values))]
    return [median(values[i - half : i + half + 1]) for i, half in enumerate(halves)]


def single(run: Path) -> Group:
    """Read the curves of one run. Raises UserError."""
    curves = read(run)
    return Group(curves.name, [curves])


def draw(groups: list[Group], out: Path, x: str = "step", theme: str = "light") -> None:
    """Draw the curves of `groups` in four or five panels, and publish the image. Raises UserError."""
    os.environ["MPLBACKEND"] = "agg"  # matplotlib cannot be imported if a notebook has set a backend that is not installed here
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    with rc_context(look(theme)):
        drawn = with_colors(groups, theme)
        scored = [["tasks", "tasks"]] if any(run.scores for group in groups for run in group.runs) else []
        figure = Figure(figsize=(10, 6.4 + 2.8 * len(scored)), dpi=150, layout="constrained")
        axes = figure.subplot_mosaic([list(PANELS)[:2], list(PANELS)[2:], *scored], sharex=True)
        for key in PANELS:
            draw_panel(axes[key], drawn, key, x)
        if scored:
            draw_scores(axes["tasks"], drawn, x)
        draw_validation(axes["loss"], drawn, x)
        label_ends(axes["loss"], drawn)
        norms = [y for group in groups for y in group.points("grad_norm")[1] if y > 0]
        is_wild = norms and max(norms) > DECADES * min(norms)
        for key in ("lr", "tokens_per_second", *(["grad_norm"] if not is_wild else [])):
            axes[key].set_ylim(bottom=0)
        axes["grad_norm"].set_yscale("log" if is_wild else "linear")
        short = EngFormatter(sep="")  # 1500 is 1.5k, 2e9 is 2G
        axes["tokens_per_second"].yaxis.set_major_formatter(short)
        for axis in list(axes.values())[2:]:
            axis.tick_params(labelbottom=True)
            axis.set_xlabel(x if x != "time" else "training time")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.xaxis.set_major_formatter(short if x != "time" else lambda seconds, _position: duration(seconds))
        name_groups(figure, drawn)
        save(figure, out)


def look(theme: str) -> dict:
    """Return matplotlib's settings for a theme: its colors, and an unobtrusive grid and axes."""
    background, text, numbers, edge, grid = THEMES[theme]
    return {
        **{"figure.facecolor": background, "axes.facecolor": background, "text.color": text, "axes.titlecolor": text},
        **{"axes.labelcolor": numbers, "xtick.labelcolor": numbers, "ytick.labelcolor": numbers},
        **{"axes.edgecolor": edge, "xtick.color": edge, "ytick.color": edge, "grid.color": grid, "grid.linewidth": 0.8},
        **{"axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False},
        **{"axes.titlelocation": "left", "axes.titlesize": 12, "xtick.labelsize": 10, "ytick.labelsize": 10},
    }


def numbers(groups: list[Group]) -> list[float]:
    """Return the values of the groups, if they differ in one setting, which is a number; else nothing."""
    if len({name for group in groups for name in group.settings}) == 1:
        with suppress(ValueError):
            return [float(value) for group in groups for value in group.settings.values()]
    return []


def with_colors(groups: list[Group], theme: str) -> Drawn:
    """Give each group a color and a line style. Many groups that differ in one number go from dark to light."""
    from matplotlib import colormaps

    colors = COLORS if theme == "light" else COLORS_ON_BLACK
    if len(groups) > len(colors) and numbers(groups):
        ends = (0, 0.87) if theme == "light" else (0.2, 1)  # without the colors that the background hides
        shades = colormaps["viridis"](np.linspace(*ends, len(groups)))
        return [(group, shade, "-") for group, shade in zip(groups, shades, strict=True)]
    styles = [STYLES[i // len(colors) % len(STYLES)] for i in range(len(groups))]
    return list(zip(groups, cycle(colors), styles, strict=False))


def name_groups(figure, drawn: Drawn) -> None:
    """Add a legend above the panels: names and last validation losses. A long one is small, and makes the figure taller."""
    from matplotlib.lines import Line2D

    lines, labels = [], []
    for group, color, style in drawn:
        label = group.name
        for _, loss, margin in list(zip(*group.points("val_loss"), strict=True))[-1:]:
            label += f", validation {loss:.3f}" + (f" ± {margin:.3f}" if len(group.runs) > 1 else "")
        labels.append(label)
        lines.append(Line2D([], [], color=color, linestyle=style, linewidth=3))
    longest, size = max(map(len, labels)) + 5, 12
    if len(labels) > 4 * (92 // longest):
        size = 8
        figure.set_figheight(figure.get_figheight() + 0.17 * max(0, math.ceil(len(labels) / max(1, 138 // longest)) - 4))
    columns = max(1, 92 * 12 // size // longest)
    add_legend(figure, lines, labels, loc="outside upper center", ncols=columns, fontsize=size, handlelength=2.5)


def label_ends(axis, drawn: Drawn) -> None:
    """Write the names of a few groups right of the panel, at the heights where their curves end, moved apart if needed."""
    if not 1 < len(drawn) <= 4 or max(len(group.name) for group, *_ in drawn) > 20:
        return
    bottom, top = axis.get_ylim()
    ends = [(smooth(group.points("loss")[1])[-1:], group.name, color) for group, color, _ in drawn]
    lowest = bottom
    for end, name, color in sorted(ends, key=lambda end: end[0]):
        height = max(lowest, min([*end, top]))
        lowest = height + (top - bottom) / 12
        where = dict(xycoords=("axes fraction", "data"), textcoords="offset points", va="center", annotation_clip=False)
        write(axis.annotate("label", (1, height), (4, 0), color=color, fontsize=9, **where), name)


def add_legend(owner, lines: list, labels: list[str], **style) -> None:
    """Add a legend to a figure or an axis, with the `labels` as they are."""
    # Given the labels, matplotlib would leave out a label that begins with _.
    legend = owner.legend(lines, ["label"] * len(labels), frameon=False, **style)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        write(text, label)


def write(text, label: str) -> None:
    """Make a matplotlib text show `label` as it is, without typesetting what is between two $. Escape what no font has."""
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


def draw_panel(axis, drawn: Drawn, key: str, x: str) -> None:
    """Draw one quantity: a thin line as logged, and (except for the learning rate) a thick smoothed line.

    The mean loss of several runs has a band instead of the thin line.
    """
    for group, color, style in drawn:
        places, y, margins = group.points(key, x)
        if key == "loss" and len(group.runs) > 1:
            y, margins = np.array(smooth(y)), np.array(smooth(margins))
            axis.fill_between(places, y - margins, y + margins, color=color, alpha=min(0.2, 1.2 / len(drawn)), linewidth=0)
        elif key != "lr":
            axis.plot(places, y, color=color, linewidth=0.8, alpha=0.3)
            y = smooth(y)
        axis.plot(places, y, style, color=color, linewidth=1.7, marker="o" if len(y) == 1 else None)
    decorate(axis, PANELS[key])


def decorate(axis, title: str) -> None:
    """Give a panel a title and plain numbers."""
    axis.set_title(title)
    axis.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")


def draw_scores(axis, drawn: Drawn, x: str) -> None:
    """Draw one score per task, each in its own style: acc_norm if available, else one that lies between 0 and 1."""
    from matplotlib import rcParams

    records = [record for group, *_ in drawn for run in group.runs for record in run.scores]
    chosen = {}
    for key in dict.fromkeys(key for record in records for key in record if key.startswith("tasks/")):
        task, _, metric = key.removeprefix("tasks/").rpartition("/")
        if metric == "acc_norm" or all(0 <= value <= 1 for group, *_ in drawn for value in group.points(key)[1]):
            chosen[task] = key if metric == "acc_norm" else chosen.get(task, key)
    lines, labels = [], []
    for key, style in zip(chosen.values(), cycle(STYLES)):
        for group, color, _ in drawn:
            axis.plot(*group.points(key, x)[:2], style, color=color, linewidth=1.7, marker="o", markersize=4)
        lines += axis.plot([], [], style, color=rcParams["axes.labelcolor"])
        labels.append(key.removeprefix("tasks/").replace("/", " "))
    add_legend(axis, lines, labels, fontsize=10, ncols=4)
    decorate(axis, "scores on tasks")


def draw_validation(axis, drawn: Drawn, x: str) -> None:
    """Draw validation losses as dots and a forecast as a band. The axis cuts off the steep initial drop (the first tenth)."""
    shown = []
    for group, color, _ in drawn:
        places, y, margins = group.points("val_loss", x)
        size = 6 if len(drawn) <= 7 else 4
        axis.plot(places, y, "o", color=color, markersize=size, markeredgecolor=axis.get_facecolor(), zorder=3)
        if len(group.runs) > 1:
            axis.errorbar(places, y, margins, fmt="none", ecolor=color, elinewidth=1.2, zorder=3)
        steps, logged, _ = group.points("loss")
        shown += y + [loss for step, loss in zip(steps, logged, strict=True) if 10 * step > steps[-1]]
        for prediction in [run.prediction for run in group.runs if run.prediction]:
            loss, margin = prediction["val_loss"], prediction["margin"]
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
