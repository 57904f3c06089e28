"""Profile some updates: write a trace with torch's profiler, and summarize the most expensive kinds of operations."""

import os
import re
import time
from collections import Counter
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType

from lockstep.common.errors import plural
from lockstep.reports.log import Log, duration

# The kind of a torch operator or GPU kernel, by parts of its name. The first match wins.
KINDS = {
    # Inductor names a kernel after everything it fuses, such as triton_poi_fused_addmm_gelu. Only its templates, triton_tem,
    # are matmuls or attention.
    "compiled code": "^triton_(?!tem)|compiled|cpp_fused|dynamo",
    "communication": "nccl|gloo|c10d|xccl|comms|all_reduce|all_gather|reduce_scatter|broadcast",
    "attention": "attention|flash|fmha|sdpa|cudnn",  # cuDNN computes nothing else here
    "matmuls": "mm(?!a)|gemv|linear|nvjet|cublas|cutlass",  # nvjet: cuBLAS's own on Hopper and later; mma: LayerNorm's gamma
    "optimizer": "adam|foreach|multi_tensor|lerp",
    "loss": "softmax|nll|logsumexp|gather|scatter",
    "norms": "norm|rsqrt|gammabeta",
    "embedding": "embedding|index",
    "copies": "copy|memcpy|memset|cat|fill|zero|empty|clone",
    "other": "",
}


class Trace:
    """A trace of the updates in --profile=STEP:COUNT, on the master alone."""

    def __init__(self, log: Log, wanted: str, device: torch.device):
        first, count = map(int, wanted.split(":")) if wanted and log.is_master else (0, 0)
        self.log, self.device, self.steps, self.profiler = log, device, range(first, first + count), None

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
        """End the current trace, if any, after the update of `step`: write it, and report where the time went."""
        if self.profiler is None:
            return
        seconds, first = time.perf_counter() - self.began, self.steps.start
        path = self.log.directory / f"trace-{first:08}.json.gz"
        self.profiler.stop()
        with self.log.surviving(f"writing {path}"):
            self.profiler.export_chrome_trace(str(path.with_name(f".{path.name}")))
            os.replace(path.with_name(f".{path.name}"), path)
            self.log.say(f"{path}: {plural(step + 1 - first, 'update')} in {duration(seconds)}; open it at ui.perfetto.dev")
            for line in self.table():
                self.log.say(line)
        self.profiler, self.steps = None, range(0)

    def table(self) -> list[str]:
        """Return one line per kind of operation, most expensive first: its share of the time, and its largest operations."""
        times, kinds = Counter(), {}
        for event in self.profiler.key_averages():
            on_gpu = event.device_type != DeviceType.CPU  # a kernel
            if on_gpu == (self.device.type not in ("cpu", "mps")) and not event.is_user_annotation:
                name = re.sub("^(aten::|autograd::engine::evaluate_function: |## Call )|(?<=CompiledFxGraph) .*", "", event.key)
                times[name] += event.self_device_time_total if on_gpu else event.self_cpu_time_total  # microseconds
        for name in times:
            kind = next(kind for kind, part in KINDS.items() if re.search(part, name.lower()))
            kinds.setdefault(kind, Counter())[name] = times[name]
        lines = []
        for kind, parts in sorted(kinds.items(), key=lambda pair: -pair[1].total()):
            largest = ", ".join(f"{name[:60]} {value / times.total():.1%}" for name, value in parts.most_common(3))
            lines.append(f"  {parts.total() / times.total():6.1%}  {kind}: {largest}")
        return lines
