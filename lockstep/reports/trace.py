"""Profile some updates: write a trace with torch's profiler."""

import os
import time
from contextlib import contextmanager

import torch

from lockstep.common.errors import plural
from lockstep.reports.log import Log, duration


class Trace:
    """A trace of the updates in --profile=STEP:COUNT, on the master alone."""

    def __init__(self, log: Log, wanted: str):
        first, count = map(int, wanted.split(":")) if wanted and log.is_master else (0, 0)
        self.log, self.steps, self.profiler = log, range(first, first + count), None

    @contextmanager
    def around(self, step: int):
        """Trace the update in this block, if it is one of those to trace."""
        if self.profiler is None and step in self.steps:
            self.profiler, self.steps = torch.profiler.profile(), range(step, self.steps.stop)
            self.profiler.start()
            self.began = time.perf_counter()
        with torch.profiler.record_function(f"update {step}"):
            yield
        if step + 1 == self.steps.stop:
            self.stop(step)

    def stop(self, step: int) -> None:
        """End the current trace, if any, after the update of `step`, and write it."""
        if self.profiler is None:
            return
        seconds, first = time.perf_counter() - self.began, self.steps.start
        path = self.log.directory / f"trace-{first:08}.json.gz"
        self.profiler.stop()
        with self.log.surviving(f"writing {path}"):
            self.profiler.export_chrome_trace(str(path.with_name(f".{path.name}")))
            os.replace(path.with_name(f".{path.name}"), path)
            self.log.say(f"{path}: {plural(step + 1 - first, 'update')} in {duration(seconds)}; open it at ui.perfetto.dev")
        self.profiler, self.steps = None, range(0)
