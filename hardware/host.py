"""What a process knows of its rank and may use of its machine, and what torch is told of it. Nothing slow is imported here."""

import os
import platform
import re
import time
from pathlib import Path

from common.errors import UserError

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time in a period of so many, or "max"


def read_ranks() -> tuple[int, int, int, int]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets, or 0, 1, 0 and 1. Raises UserError."""
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    found = {name: os.environ[name] for name in defaults if name in os.environ}
    if all(value.isdecimal() for value in found.values()):
        rank, size, local_rank, local_size = (int(value) for value in (defaults | found).values())
        if rank < size < 1 << 20 and local_rank < local_size and ("RANK" in found) == ("WORLD_SIZE" in found):
            return rank, size, local_rank, local_size
    environment = " ".join(f"{name}={value}" for name, value in found.items())
    raise UserError(
        "RANK must be from 0 to WORLD_SIZE - 1, and LOCAL_RANK from 0 to LOCAL_WORLD_SIZE - 1; "
        f"the environment has {environment}; torchrun sets all four, and a single process needs none"
    )


def cores() -> int:
    """How many CPU cores this process may use. A part of one counts as one."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit, period = CPU_LIMIT.read_text().split() if CPU_LIMIT.exists() else ("max", "")
    return allowed if limit == "max" else min(allowed, -(-int(limit) // int(period)))


def prepare_torch() -> None:
    """Set the variables of the environment that torch and its libraries read at their start, unless the user has set them."""
    # MKL promises the same float32 products in every run only in its reproducible mode, which also uses a thread of an AMD
    # processor that is idle otherwise (bench/LOG.md, "Classes of processors").
    os.environ.setdefault("MKL_CBWR", "AUTO")
    os.environ.setdefault("GOMP_SPINCOUNT", str(spin_count()))
    # Less of CUDA's memory is lost to fragmentation. Which of three names wins depends on torch's version.
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
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(key: str) -> str:
    """What Linux says about the first core, such as its `vendor_id`, AuthenticAMD; empty for nothing."""
    path = Path("/proc/cpuinfo")
    found = re.search(rf"^{key}\s*: (.*)", path.read_text() if path.exists() else "", re.MULTILINE)
    return found[1] if found else ""


def memory_bytes() -> int:
    """How much memory this machine has, or this container may use."""
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [limit.read_text().strip() for limit in limits if limit.exists()]
    allowed = [int(text) for text in texts if text.isdecimal()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *allowed])
