"""The hardware of one rank: which device, precision and compiler it gets, its peak rate, its memory, its determinism."""

import contextlib
import ctypes
import logging
import os
import re
import shutil
import sys
import time
import warnings

import torch

import cluster
from cluster import GPU_PEAK_FLOPS
from settings import UserError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # from the safest to the fastest
COMPILE_PAYS_FLOPS = 4e13  # compiling for a CPU takes 20 s, which a shorter run does not win back

# What is less than the whole GPU of the datasheet: a slice of it, a virtual one, or one with fewer units and watts.
GPU_PARTS = {"MIG", "GRID", "Laptop", "Max-Q", "D"}


def find_device(name: str, local_rank: int, share_gpus: bool) -> torch.device:
    """The device of this rank. auto: a GPU if there is one, then Metal, then the CPU.

    share_gpus: more ranks than GPUs may share them (gloo only: NCCL refuses). Raises UserError where the device is missing.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device=mps: this torch finds no Metal device; --device=cpu works everywhere")
    if name != "cuda":
        return torch.device(name)
    count = torch.cuda.device_count()
    if share_gpus and count:
        local_rank %= count
    if local_rank >= count:
        raise UserError(
            f"--device=cuda: rank {local_rank} of this node needs a GPU of its own and torch sees {count}; start "
            "torchrun with --nproc_per_node of at most that, or use --device=cpu"
        )
    return torch.device("cuda", local_rank)


def choose_dtype(name: str, device: torch.device) -> str:
    """`name`, or for auto the fastest precision: bfloat16 where the hardware is fast at it, else float16 on GPUs.

    It depends on the hardware alone, so the same command takes the same precision.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16" if device.type == "cpu" and cluster.fast_at_bfloat16() else "float32"


def choose_compile(name: str, device: torch.device, run_flops: float) -> str:
    """on or off. auto compiles where it pays: on GPUs, and on CPUs for runs of more than COMPILE_PAYS_FLOPS.

    Where no compiler works it is off, with a warning.
    """
    pays = device.type == "cuda" or (device.type == "cpu" and run_flops >= COMPILE_PAYS_FLOPS)
    if name == "off" or (name == "auto" and not pays):
        return "off"
    for module in ("torch", "ctx_manager"):  # they warn of the profiler hooks in optimizers and DDP, which cost nothing
        logging.getLogger(f"torch._dynamo.variables.{module}").setLevel(logging.ERROR)
    # The compiler would build and start a program for each kind of vector instructions that the CPU says it has: 4 seconds.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    try:
        if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise RuntimeError("no C++ compiler (g++ or clang++) is on the PATH")
        probe = torch.ones(8, device=device, requires_grad=True)
        torch.compile(lambda x: (x * x).sum())(probe).backward()
        return "on"
    except Exception as error:  # inductor raises many kinds
        warnings.warn(f"torch.compile does not work here, going on without it: {error}", stacklevel=2)
        return "off"


def autocast(device: torch.device, dtype: str):
    """Context in which matrix products are in `dtype`."""
    return contextlib.nullcontext() if dtype == "float32" else torch.autocast(device.type, DTYPES[dtype])


def make_deterministic(device: torch.device, integers_only: bool) -> None:
    """Let CUDA and NCCL use only kernels that give the same bits every time. A CPU has no others.

    Call it before the process group is made: NCCL reads its variables when the first communicator is.
    integers_only: the ranks add nothing but integers, whose sum does not depend on the order.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # choose no kernel by timing it
        if not integers_only:
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink switches add in any order (NVIDIA/nccl#1497)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def peak_flops(device: torch.device, dtype: str, seconds: float = 0.05) -> float:
    """Peak FLOP/s of this rank's device: the datasheet's for known GPUs, else that of the best matrix product.

    Ten products are made, or more for `seconds`.
    """
    if known := known_peak_flops(device, dtype):
        return known
    # Large enough that starting and awaiting a product, some 30 microseconds, does not count.
    size = {"cpu": 512, "cuda": 8192}.get(device.type, 4096)
    a = torch.randn(size, size, device=device).to(DTYPES[dtype])
    best, deadline, products = float("inf"), time.perf_counter() + seconds, 0
    while products < 10 or time.perf_counter() < deadline:  # on a busy machine the first one may wait for all of them
        products += 1
        began = time.perf_counter()
        product = a @ a
        if device.type != "cpu":
            product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def known_peak_flops(device: torch.device, dtype: str) -> float | None:
    """The peak in FLOP/s that the datasheet of this rank's GPU has for `dtype`. None: it has to be measured."""
    return datasheet_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" and dtype != "float32" else None


def datasheet_flops(name: str) -> float | None:
    """The dense bfloat16 peak in FLOP/s of the GPU that CUDA calls `name`. None: not known, or not a whole GPU."""
    words = set(re.split(r"[ -]", name)) | set(name.split())
    if words & GPU_PARTS:
        return None
    return next((peak for known, peak in GPU_PEAK_FLOPS.items() if words.issuperset(known.split())), None)


def peak_memory_gb(device: torch.device) -> float:
    """The most memory in GB that this process has held: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones, in huge pages where Linux grants them.

    By default glibc returns large blocks to the kernel at every free. The page faults of taking them again are a tenth of an
    eager training step on a CPU. Huge pages save another 1.5 % of a compiled step.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        # M_MMAP_THRESHOLD: take blocks up to this size from the heap. glibc before 2.35 refuses more than 32 MB.
        libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 1 << 25)
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: do not shrink the heap
        libc.mallopt(-2, 1 << 30)  # M_TOP_PAD: grow it by this much at once; memory is taken only where it is used
        for function in (libc.sbrk, libc.malloc):
            function.restype = ctypes.c_void_p
        first = libc.sbrk(0)
        libc.free(ctypes.c_void_p(libc.malloc(1 << 28)))
        size = libc.sbrk(0) - first
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), 14)  # MADV_HUGEPAGE
