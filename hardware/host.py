"""What a process knows of its rank and may use of its machine, and how it prepares torch's start. It imports nothing slow."""

import contextlib
import os
import platform
import re
import time
from pathlib import Path

from common.errors import UserError

NVIDIA_DEVICE, NVIDIA_VERSION = Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version")
WSL_GPU = Path("/dev/dxg")  # how WSL passes a GPU on, whatever the kernel is called
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of CPU time in a period of so many, or "max"
RANKS = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}  # without torchrun, which sets these variables


def read_ranks() -> tuple[int, ...]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises UserError."""
    with contextlib.suppress(ValueError):
        rank, size, local_rank, local_size = values = tuple(int(os.environ.get(name, RANKS[name])) for name in RANKS)
        if 0 <= rank < size and 0 <= local_rank < local_size and ("RANK" in os.environ) == ("WORLD_SIZE" in os.environ):
            return values
    found = " ".join(f"{name}={os.environ[name]}" for name in RANKS if name in os.environ)
    raise UserError(
        "RANK must be from 0 to WORLD_SIZE - 1, and LOCAL_RANK from 0 to LOCAL_WORLD_SIZE - 1; "
        f"the environment has {found}; torchrun sets all four, and a single process needs none"
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
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's library says on stderr when it starts and stops
    # Less of CUDA's memory is lost to fragmentation. Which of three names wins depends on torch's version. Under WSL, CUDA's
    # first allocation fails with it (pytorch#192330, #182286).
    names = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
    wsl = "microsoft" in platform.release().lower() or WSL_GPU.exists()
    if platform.system() == "Linux" and not wsl and not names & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def spin_count() -> int:
    """How often a thread of GNU OpenMP looks for work before it sleeps: 10,000 times, or 1,000 beside other programs.

    Waking a thread takes as long as a small model's product, but one that looks for work takes a core from other programs
    (bench/LOG.md, "Waiting threads").
    """
    running, stat = [], Path("/proc/stat")
    for _ in range(5 if stat.exists() else 0):  # a program that computes is running every time
        running.append(int(stat.read_text().partition("procs_running")[2].split()[0]))
        time.sleep(0.002)
    others = min(running, default=0) - read_ranks()[3]
    return 1_000 if others > (os.cpu_count() or 1) - cores() else 10_000


def cpuinfo(key: str) -> str:
    """What Linux says about the first core, such as its `vendor_id`, AuthenticAMD; empty for nothing."""
    path = Path("/proc/cpuinfo")
    found = re.search(rf"^{key}\s*: (.*)", path.read_text() if path.exists() else "", re.MULTILINE)
    return found[1] if found else ""


def cpu_name() -> str:
    """The CPU as Linux calls it, or its architecture."""
    x86 = platform.machine() == "x86_64"  # under qemu /proc/cpuinfo is the host's
    return (x86 and cpuinfo("model name")) or platform.processor() or platform.machine()


def memory_bytes() -> int:
    """How much memory this machine has, or this container may use."""
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [limit.read_text().strip() for limit in limits if limit.exists()]
    allowed = [int(text) for text in texts if text.isdecimal()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *allowed])


def nvidia_driver() -> str | None:
    """The version of NVIDIA's driver for the GPUs that this process may use; empty if it is not known, None without a GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return None
    if NVIDIA_VERSION.exists():
        found = re.search(r"Kernel Module.*?  (\d+\.[\d.]+)", NVIDIA_VERSION.read_text())
        return found[1] if found else ""
    return "" if NVIDIA_DEVICE.exists() else None
