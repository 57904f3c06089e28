"""What a process may use of the machine that it runs on, and what torch is told of it. Nothing slow is imported here."""

import os
import platform
import re
import time
from pathlib import Path

from common.cli import read_ranks

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time in a period of so many, or "max"


def cores() -> int:
    """How many CPU cores this process may use. A part of one counts as one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit, period = CPU_LIMIT.read_text().split() if CPU_LIMIT.exists() else ("max", "")
    return allowed if limit == "max" else min(allowed, -(-int(limit) // int(period)))


def prepare_torch() -> None:
    """Set the variables of the environment that torch and its libraries read at their start, unless the user has set them.

    MKL, which multiplies float32 matrices on most CPUs, promises the same bits in every run only in its reproducible mode. This
    mode also uses a thread of an AMD processor that is idle otherwise (bench/LOG.md, "Classes of processors").

    Expandable segments keep CUDA's allocator from losing memory to fragmentation. torch reads their variable under three
    names, and which one wins depends on its version: a user's setting under any of them stands alone.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")  # "conditional numerical reproducibility"
    os.environ.setdefault("GOMP_SPINCOUNT", str(spin_count()))
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def spin_count() -> int:
    """How often a thread of GNU OpenMP should look for work before it sleeps: 10,000 times, or 1,000 beside other programs.

    A small model waits often and briefly, and waking a thread takes as long as one of its products (bench/LOG.md). But a
    thread that looks for work takes a core from other programs.
    """
    running, stat = [], Path("/proc/stat")
    for _ in range(5 if stat.exists() else 0):  # a program that computes is running every time
        running.append(int(stat.read_text().partition("procs_running")[2].split()[0]))
        time.sleep(0.002)
    others = min(running, default=0) - read_ranks()[3]
    return 1_000 if others > (os.cpu_count() or 1) - cores() else 10_000


def cpu_name() -> str:
    """The CPU as Linux calls it, or its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes() -> int:
    """How much memory this machine has, or this container may use."""
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [limit.read_text().strip() for limit in limits if limit.exists()]
    allowed = [int(text) for text in texts if text.isdecimal()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *allowed])
