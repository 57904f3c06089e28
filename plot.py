"""Draw the curves of one or more runs: loss, learning rate, gradient norm and throughput.

`python plot.py runs/A runs/B --out=curves.svg --x=time` compares two runs and prints a table, sorted by the last validation
loss. Runs that differ only in --seed become one curve: their mean, with a band that is its 95 % confidence interval.
"""

from lockstep import command

if __name__ == "__main__":
    command.require_packages()

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from lockstep.common import cli


@dataclass(frozen=True)
class PlotConfig:
    runs: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")]]
    """Run directories."""
    out: str = "curves.png"
    """Image file to write, in the format of its suffix: png, svg or pdf."""
    x: Literal["auto", "step", "tokens", "time"] = "auto"
    """The x-axis. time: training time without evaluations, saves and pauses.
    auto: tokens if the runs' global batches differ, else step."""
    theme: Literal["light", "dark"] = "light"
    """Colors for a light or a dark page."""
    table: Literal["text", "md", "csv"] = "text"
    """Format of the table. md and csv print nothing else; csv has all digits, and times in seconds."""


if __name__ == "__main__":
    command.run("plot", lambda args: cli.parse(PlotConfig, args, __doc__))

from pathlib import Path

from lockstep.common.errors import UserError, say
from lockstep.reports import compare, curves


def main(config: PlotConfig) -> None:
    """Draw the curves, and print a table. With --table=text, a single run needs none. Raises UserError."""
    if not config.runs:
        raise UserError(f"name at least one run, such as runs/NAME{cli.similar_runs('runs')}")
    cli.require_local("out", config.out, "write the image to a local file, then copy it there")
    groups = compare.group([Path(run) for run in config.runs])
    x = compare.choose_x(groups) if config.x == "auto" else config.x
    curves.draw(groups, Path(config.out), x, config.theme)
    if len(config.runs) > 1 or config.table != "text":
        say(compare.written(compare.table(groups), config.table))
    if config.table == "text":
        say(config.out)
