"""Draw the curves of one or several runs: loss, learning rate, gradient norm and throughput.

`python plot.py runs/A runs/B --out=curves.svg --x=time` compares two, also in a table, the lowest validation loss first.
`python plot.py runs/* --csv=metrics.csv` writes their metrics for a spreadsheet.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # which python -I and PYTHONSAFEPATH=1 leave out
    from common import errors

    errors.begin()

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from common import cli, errors, files
from common.errors import UserError, say
from reports import compare, curves


@dataclass(frozen=True)
class PlotConfig:
    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories."""
    out: str = "curves.png"
    """Picture to write. The suffix chooses png, svg or pdf."""
    x: Literal["auto", "step", "tokens", "time"] = "auto"
    """What the curves are drawn over. time: that of the updates alone, without evaluations, saves and pauses.
    auto: tokens if the runs have different global batches, else steps."""
    csv: str = ""
    """Also write every record of metrics.jsonl to this file, as comma-separated values, with the settings that differ."""


def main() -> None:
    """The command."""
    with errors.user_errors():
        config = cli.parse(PlotConfig, sys.argv[1:], __doc__)
        if not config.runs:
            raise UserError(f"name at least one run: {cli.run_example()}")
        runs = [Path(run) for run in config.runs]
        if config.csv:
            Path(config.csv).parent.mkdir(parents=True, exist_ok=True)
            files.publish_text(Path(config.csv), compare.as_csv(runs))
        x = compare.choose_x(runs) if config.x == "auto" else config.x
        curves.draw(runs, Path(config.out), x, compare.labels(runs))
        if len(runs) > 1:
            say("\n".join(compare.table(runs)))
        say(config.out)


if __name__ == "__main__":
    main()
