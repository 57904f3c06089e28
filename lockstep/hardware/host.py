"""A process's rank, the cores and memory it may use, and the environment that torch needs. Importing it is fast."""

import contextlib
import math
import os
import platform
import re
import time
import warnings
from pathlib import Path

from lockstep.common.errors import UserError

NVIDIA_DEVICE, NVIDIA_VERSION = Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version")
WSL_GPU = Path("/dev/dxg")  # WSL's GPU device, present whatever the kernel's name
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # Linux's control groups, and this process's
RANKS = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}  # defaults without torchrun


def read_ranks() -> tuple[int, ...]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises UserError."""
    with contextlib.suppress(ValueError):
        rank, size, local_rank, local_size = values = tuple(int(os.environ.get(name, RANKS[name])) for name in RANKS)
        if 0 <= rank < size and 0 <= local_rank < local_size and ("RANK" in os.environ) == ("WORLD_SIZE" in os.environ):
            return values
    found = " ".join(f"{name}={os.environ[name]}" for name in RANKS if name in os.environ)
    raise UserError(
        "RANK must be from 0 to WORLD_SIZE - 1, and LOCAL_RANK from 0 to LOCAL_WORLD_SIZE - 1; "
        f"found {found}; start with torchrun, which sets all four variables, or unset them"
    )


def in_notebook() -> bool:
    """Return whether a Jupyter kernel has started this process, as on Colab and Kaggle."""
    return "JPY_PARENT_PID" in os.environ or "backend_inline" in os.environ.get("MPLBACKEND", "")


def cores() -> int:
    """Return the number of CPU cores that this process may use. A fraction counts as a whole core."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([allowed, *map(cpu_quota, cpu_groups())])


def cpu_groups() -> set[Path]:
    """Return the directories of the control groups, version 1 or 2, that may limit this process's CPU time."""
    found = {GROUPS, GROUPS / "cpu"}  # in a container, its own group
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []:
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or not controllers:
            root = GROUPS / "cpu" if controllers else GROUPS  # version 2 has one hierarchy for all controllers
            group = root / path.lstrip("/")
            found |= {group, *(parent for parent in group.parents if parent.is_relative_to(root))}
    return found


def cpu_quota(group: Path) -> float:
    """Return how many cores a control group may use, as a whole number; infinite without a limit."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the limit is "max"
        if (group / "cpu.max").exists():
            limit, period = map(int, (group / "cpu.max").read_text().split())
        else:
            limit, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if limit > 0:  # -1: no limit
            return -(-limit // period)
    return math.inf


def default_threads() -> int:
    """Return how many CPU threads a rank uses: OMP_NUM_THREADS if the user has set it, else its share of the cores.

    torchrun sets this variable too, to 1 on several ranks, so under torchrun it does not count.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if wanted.isdecimal() and int(wanted) and "TORCHELASTIC_RUN_ID" not in os.environ:
        return int(wanted)
    return max(1, cores() // read_ranks()[3])


def prepare_torch() -> None:
    """Set the environment variables that torch and its libraries read at startup, unless the user has set them.

    Also silences a warning of torch's about an option that we have to use.
    """
    # Only in its reproducible mode does MKL guarantee the same float32 matmul results in every run. On AMD, that mode also puts
    # an otherwise idle thread to work (bench/LOG.md, "Classes of processors").
    os.environ.setdefault("MKL_CBWR", "AUTO")
    os.environ.setdefault("GOMP_SPINCOUNT", str(spin_count()))
    # DDP's option has another name in torch 2.13; 2.11 has only the old one.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler announces its start and stop on stderr
    # Expandable segments lose less CUDA memory to fragmentation. Which of the three names counts depends on torch's version.
    # Under WSL, CUDA's first allocation would fail with this setting (pytorch#192330, #182286).
    names = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
    wsl = "microsoft" in platform.release().lower() or WSL_GPU.exists()
    if platform.system() == "Linux" and not wsl and not names & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def spin_count() -> int:
    """Return how often an idle GNU OpenMP thread polls for work before it sleeps: 10,000 times, or 1,000 if others need CPU.

    Waking a thread takes as long as a small model's matmul, but a polling thread keeps a core from other programs
    (bench/LOG.md, "Waiting threads").
    """
    running, stat = [], Path("/proc/stat")
    for _ in range(5 if stat.exists() else 0):  # a busy program shows up in all five samples
        running.append(int(stat.read_text().partition("procs_running")[2].split()[0]))
        time.sleep(0.002)
    others = min(running, default=0) - read_ranks()[3]
    return 1_000 if others > (os.cpu_count() or 1) - cores() else 10_000


def cpuinfo(key: str) -> str:
    """Return the value of `key` in Linux's description of the first x86 core, such as `vendor_id`; empty if unknown."""
    path, x86 = Path("/proc/cpuinfo"), platform.machine() == "x86_64"  # under qemu the file describes the host
    found = re.search(rf"^{key}\s*: (.*)", path.read_text() if x86 and path.exists() else "", re.MULTILINE)
    return found[1] if found else ""


def cpu_name() -> str:
    """Return the CPU's name according to Linux, or its architecture."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the memory of this machine in bytes, or the container's limit if that is lower."""
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [limit.read_text().strip() for limit in limits if limit.exists()]
    allowed = [int(text) for text in texts if text.isdecimal()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *allowed])


def has_nvidia_gpu() -> bool:
    """Return whether this process may use an NVIDIA GPU."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return not hidden and (NVIDIA_VERSION.exists() or NVIDIA_DEVICE.exists())
