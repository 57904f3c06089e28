"""Draw the curves of one or several runs: loss, learning rate, gradient norm and throughput.

`python plot.py runs/A runs/B --out=curves.svg --x=time` compares two. `python plot.py runs/A --watch` follows one.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # which python -I and PYTHONSAFEPATH=1 leave out
    from common import errors

    errors.begin()

import contextlib
import math
import shutil
import time
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from common import cli, errors, files
from common.errors import UserError
from reports.curves import Curves, choose_x, read, smooth
from reports.log import duration

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f5f5f")  # Okabe and Ito: for all eyes
DECADES = 30  # a gradient norm whose largest value is this many times its smallest is drawn on a logarithmic axis
LABEL_GAP = 0.075  # between the validation values written at the lines, as a fraction of the axis
ANSI = (34, 33, 32, 35, 36, 31, 37)  # the same order of colours in a terminal
MARKS = {
    "continued": dict(linestyle="", marker="^", markersize=5),
    "left out": dict(linestyle="", marker="x", markersize=6, markeredgewidth=1.6),
}
# The eight dots of a braille character, U+2800, by row and column.
DOTS = np.array(((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)))


@dataclass(frozen=True)
class PlotConfig:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories."""
    out: str = "curves.png"
    """Picture to write. The suffix chooses png, svg or pdf."""
    x: Literal["auto", "step", "tokens", "time"] = "auto"
    """What the curves are drawn over. time: that of the updates alone, without evaluations, saves and pauses.
    auto: tokens if the runs have different global batches, else steps."""
    watch: bool = False
    """Show the loss in this terminal, anew whenever a run logs, until Ctrl-C. No picture is written."""


def spread(heights: list[float], gap: float) -> list[float]:
    """Push `heights` upwards until any two are at least `gap` apart. Their order is kept."""
    moved = list(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    for below, i in pairwise(order):
        moved[i] = max(moved[i], moved[below] + gap)
    return moved


def short(value: float, _position=None) -> str:
    """A tick label: 1500 is 1.5K, 2e9 is 2B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def draw(runs: list[Path], out: Path, x: str = "auto") -> None:
    """Draw the curves of `runs` in four panels, one colour for each run, and publish the picture as `out`.

    Raises UserError for a run without metrics, and for a file that cannot be written.
    """
    from matplotlib.figure import Figure

    curves = [read(Path(run)) for run in runs]
    x = choose_x(curves, x)
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
    throughput.yaxis.set_major_formatter(short)
    for axis in (norm, throughput):
        axis.set_xlabel(x if x != "time" else "time of the updates", color="0.3")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.xaxis.set_major_formatter(short if x != "time" else lambda seconds, _position: duration(seconds))
    name_runs(figure, drawn, [str(run) for run in runs])
    save(figure, Path(out))


def draw_panel(axis, drawn: list[tuple], key: str, title: str, x: str) -> None:
    """Draw one value of every run: a thin line as logged, and a thick smoothed one (the learning rate needs no smoothing).

    Marks at the bottom show where a run was continued and where updates were left out.
    """
    for run, color in drawn:
        places, y = run.points(key, x)
        if key != "lr":
            axis.plot(places, y, color=color, linewidth=0.8, alpha=0.3)
            y = smooth(y)
        axis.plot(places, y, color=color, linewidth=1.7, marker="o" if len(y) == 1 else None)
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
    """Draw validation losses as rings. The number beside the last ring of each run is its loss."""
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import offset_copy

    ring = dict(linestyle="", marker="o", markersize=5.5, markerfacecolor="white", markeredgewidth=1.5)
    ends, shown = [], []
    for run, color in drawn:
        places, y = run.points("val_loss", x)
        axis.plot(places, y, markeredgecolor=color, zorder=3, **ring)
        ends += [(places[-1], y[-1], color)] if y else []
        logged = run.points("loss")[1]
        shown += y + logged[len(logged) // 20 :]
    if len(set(shown)) > 1:  # cut off the steep fall of the first 5 %, so that the rest can be told apart
        height = max(shown) - min(shown)
        axis.set_ylim(min(shown) - 0.06 * height, max(shown) + 0.06 * height)
    bottom, top = axis.get_ylim()
    heights = spread([y for _, y, _ in ends], LABEL_GAP * (top - bottom))
    words = dict(fontsize=12, fontweight="bold", path_effects=[withStroke(linewidth=3, foreground="white")], zorder=4)
    for (place, y, color), height in zip(ends, heights, strict=True):
        beside = offset_copy(axis.transData, axis.figure, x=7, units="points")
        axis.text(place, height, f"{y:.3f}", color=color, va="center", transform=beside, **words)
    handles = [Line2D([], [], color="0.35", linewidth=1.7, label="training")]
    handles += [Line2D([], [], markeredgecolor="0.35", label="validation", **ring)]
    present = any(run.restarts for run, _ in drawn), any(run.skipped() for run, _ in drawn)
    marks = [mark for mark, there in zip(MARKS.items(), present, strict=True) if there]
    handles += [Line2D([], [], color="0.35", label=name, **mark) for name, mark in marks]
    # Beside the title, where no curve and no number is.
    place = dict(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=len(handles))
    axis.legend(handles=handles, frameon=False, fontsize=9.5, handlelength=1, handletextpad=0.5, columnspacing=1, **place)


def name_runs(figure, drawn: list[tuple], paths: list[str]) -> None:
    """Write the run's name as the title, or a legend for several runs: their names, or their paths if names repeat."""
    from matplotlib.lines import Line2D

    names = [run.name for run, _ in drawn]
    names = names if len(set(names)) == len(names) else paths
    if len(names) == 1:
        figure.suptitle(names[0], fontsize=14)
        return
    lines = [Line2D([], [], color=color, linewidth=3, label=name) for name, (_, color) in zip(names, drawn, strict=True)]
    figure.legend(handles=lines, loc="outside upper center", ncols=min(4, len(lines)), frameon=False, fontsize=12)


def save(figure, out: Path) -> None:
    """Publish `figure` as `out`. Raises UserError for an unknown format, OSError if it cannot be written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with files.publish(out) as file:
            figure.savefig(file, format=out.suffix[1:] or "png")
    except ValueError as error:
        raise UserError(f"cannot write {out}: {error}") from None


def watch(runs: list[Path], x: str) -> None:
    """Show the runs in this terminal, and again whenever one has logged or the window has another size, until Ctrl-C."""
    shown, colored = None, sys.stdout.isatty()
    while True:
        sizes = [(run / "metrics.jsonl").stat().st_size for run in runs if (run / "metrics.jsonl").exists()]
        if (now := (sizes, shutil.get_terminal_size())) != shown:
            lines = screen([read(run) for run in runs], x, *now[1], colored)
            print("\x1b[2J\x1b[H" * colored + "\n".join(lines), flush=True)
            shown = now
        time.sleep(0.5)


def screen(curves: list[Curves], x: str, columns: int, rows: int, colored: bool) -> list[str]:
    """The lines of a screen: what each run logged last, and below it the smoothed losses in braille characters."""
    x = choose_x(curves, x)
    colors = [f"\x1b[{code}m" * colored for code in (0, *(ANSI[i % len(ANSI)] for i in range(len(curves))))]
    told = []
    for run, color in zip(curves, colors[1:], strict=True):
        last = {key: run.points(key)[1][-1:] for key in ("loss", "val_loss", "grad_norm", "tokens_per_second")}
        values = [f"{key} {value:,.5g}" for key, values in last.items() for value in values]
        step = max(record["step"] for record in run.training + run.validation)
        told.append("  ".join([f"{color}{run.name}{colors[0]}", f"step {step}", *values]))
    lines = [(*run.points("loss", x), i) for i, run in enumerate(curves, 1)]
    lines = [(places, smooth(y), i) for places, y, i in lines if y]
    if not lines:
        return told
    shown = [y for _, ys, _ in lines for y in ys[len(ys) // 20 :]]  # without the steep fall of the first 5 %
    low, high = min(shown), max(shown)
    left, right = min(places[0] for places, *_ in lines), max(places[-1] for places, *_ in lines)
    width, height = max(columns - 9, 8), max(rows - len(told) - 2, 4)
    dots = np.zeros((4 * height, 2 * width), int)  # the number of the run that is drawn there, from 1, or 0
    for places, ys, i in lines:
        curve = np.interp(np.linspace(left, right, 2 * width), places, ys, left=math.nan, right=math.nan)
        levels = (high - curve) / (high - low or 1) * (4 * height - 1)
        for column, ends in enumerate(pairwise([levels[0], *levels])):
            if all(0 <= end < 4 * height for end in ends):
                dots[round(min(ends)) : round(max(ends)) + 1, column] = i
    for row, cells in enumerate(dots.reshape(height, 4, width, 2).swapaxes(1, 2)):
        label = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}.get(row, "")
        marks = [colors[cell.max()] * bool(cell.any()) + chr(0x2800 + DOTS[cell > 0].sum()) for cell in cells]
        told.append(f"{colors[0]}{label:>7} " + "".join(marks))
    first, last = ((duration if x == "time" else short)(place) for place in (left, right))
    return [*told, colors[0] + " " * 8 + first + f"{last} {x}".rjust(width - len(first))]


def main() -> None:
    """The command."""
    with errors.user_errors():
        config = cli.parse(PlotConfig, sys.argv[1:], __doc__)
        if not config.runs:
            raise UserError(f"name at least one run: {cli.run_example()}")
        runs = [Path(run) for run in config.runs]
        if config.watch:
            with contextlib.suppress(KeyboardInterrupt):
                watch(runs, config.x)
        else:
            draw(runs, Path(config.out), config.x)
            print(config.out)


if __name__ == "__main__":
    main()
