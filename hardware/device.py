"""The hardware of one rank: which device, precision and compiler it gets, its peak rate, its memory, its determinism.

What a processor is fast at is measured, because names do not tell it. Of two processors with the same instructions for
bfloat16, one is twice as fast with them as without, and the other is slower (bench/LOG.md, "Classes of processors").
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

from common.errors import UserError
from hardware.gpus import GPU_PEAK_FLOPS
from hardware.host import cores, cpu_name, memory_bytes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # from the safest to the fastest
FASTER = 1.25  # bfloat16 is chosen where its products are so many times as fast as those in float32
# Compiling for a CPU takes COMPILE_SECONDS. It saves a part of training, whose operations run at about EAGER_FLOPS on a core
# (bench/LOG.md, "Classes of processors"). These numbers are rounded and do not change with the load of the machine, because
# the same command must make the same choice: compiled code gives other bits.
COMPILE_SECONDS = 20.0
COMPILE_SAVES = {"float32": 0.05, "bfloat16": 0.17}
MOST_RANKS = 4  # of `make train` on a CPU; more were not measured
EAGER_FLOPS = {"float32": 65e9, "bfloat16": 200e9}

# Words in the name of a GPU that has less than the datasheet says: a slice, a virtual one, or fewer units and watts.
GPU_PARTS = {"MIG", "GRID", "Laptop", "Max-Q", "D"}


def find_device(name: str, local_rank: int, share_gpus: bool) -> torch.device:
    """The device of this rank. auto: the accelerator that torch finds (CUDA, Intel's xpu or Apple's mps), else the CPU.

    share_gpus: more ranks than GPUs may share them (gloo only: NCCL refuses). Raises UserError where the device is missing.
    """
    if name == "auto":
        found = {"cuda": torch.cuda.is_available, "xpu": torch.xpu.is_available, "mps": torch.backends.mps.is_available}
        name = next((kind for kind, is_there in found.items() if is_there()), "cpu")
    if name == "cpu":
        return torch.device(name)
    count = getattr(torch, name).device_count()
    if share_gpus and count:
        local_rank %= count
    if local_rank >= count:
        raise UserError(
            f"--device={name}: rank {local_rank} of this node needs a GPU of its own and torch sees {count}; start "
            "torchrun with --nproc_per_node of at most that, or use --device=cpu"
        )
    return torch.device(name, local_rank)


def ranks_here() -> int:
    """How many ranks `make train` starts: one for each GPU. Metal has one GPU. On a CPU a power of two, at most one a core.

    Small models train faster on four ranks of one thread than on one rank of four threads (bench/LOG.md, "Ranks and threads").
    """
    own = find_device("auto", 0, share_gpus=False)
    if own.type != "cpu":
        return getattr(torch, own.type).device_count()
    return 1 << min(MOST_RANKS, cores()).bit_length() - 1


def choose_dtype(name: str, device: torch.device) -> str:
    """`name`, or for auto the fastest precision: bfloat16 where the hardware is fast at it, else float16 on CUDA.

    It depends on the hardware alone, so the same command takes the same precision.
    """
    if name != "auto":
        return name
    if fast_at_bfloat16(device):
        return "bfloat16"
    return "float16" if device.type == "cuda" else "float32"


def fast_at_bfloat16(device: torch.device) -> bool:
    """Whether `device` multiplies bfloat16 matrices clearly faster than float32 ones. mps: no, nobody has measured it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        rates = product_rates()
        return rates["bfloat16"] > FASTER * rates["float32"]
    return device.type == "xpu"


@functools.cache
def product_rates(dtype: str = "bfloat16") -> dict[str, float]:
    """FLOP/s of matrix products in float32 and in `dtype` on one thread of this CPU: the best of 50 ms, in turns.

    The clock counts only the time that the processor works for this thread, so other programs add nothing. What another virtual
    machine takes is counted, and may be some milliseconds.
    """
    size, best, threads = 256, {"float32": math.inf, dtype: math.inf}, torch.get_num_threads()
    matrices = {name: torch.ones(size, size, dtype=DTYPES[name]) for name in best}
    torch.set_num_threads(1)
    start, turns = time.thread_time(), 0
    while turns < 5 or time.thread_time() - start < 0.05:
        for name, matrix in matrices.items():
            began = time.thread_time()
            matrix @ matrix
            best[name] = min(best[name], time.thread_time() - began)
        turns += 1
    torch.set_num_threads(threads)
    return {name: 2 * size**3 / seconds for name, seconds in best.items()}


def compiling_pays(device: torch.device, dtype: str, run_flops: float) -> bool:
    """Whether a run is so long that compiling saves time: always on a GPU, but never on mps, where nobody has tried it."""
    if device.type != "cpu":
        return device.type in ("cuda", "xpu")
    kind = "bfloat16" if dtype == "bfloat16" else "float32"
    return COMPILE_SAVES[kind] * run_flops / (cores() * EAGER_FLOPS[kind]) > COMPILE_SECONDS


def choose_compile(name: str, device: torch.device, dtype: str, run_flops: float) -> str:
    """on or off. auto compiles where it pays. Where no compiler works it is off, with a warning."""
    if name == "off" or (name == "auto" and not compiling_pays(device, dtype, run_flops)):
        return "off"
    for module in ("torch", "ctx_manager"):  # they warn of the profiler hooks in optimizers and DDP, which cost nothing
        logging.getLogger(f"torch._dynamo.variables.{module}").setLevel(logging.ERROR)
    # The compiler would build and start a program for each kind of vector instructions that the CPU says it has: 4 seconds.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if device.type == "cpu":
        # Its cache does not tell processors apart: code made for one with wider vectors corrupts the memory of another.
        kind = hashlib.sha256(describe(device).encode()).hexdigest()[:8]
        cache = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{kind}")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    try:
        if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise RuntimeError("no C++ compiler (g++ or clang++) is on the PATH")
        x, weight = (torch.ones(16, 16, device=device, requires_grad=True) for _ in range(2))
        with autocast(device, dtype):
            block = torch.compile(lambda x, weight: F.gelu(F.layer_norm(x @ weight, weight.shape[:1])).sum())
            loss = block(x, weight)  # a product, a norm and a function of each element, as in a block of a model
        loss.backward()
        return "on"
    except Exception as error:  # inductor raises many kinds
        warnings.warn(f"torch.compile does not work here, going on without it: {error}", stacklevel=2)
        return "off"


def autocast(device: torch.device, dtype: str):
    """Context in which matrix products are in `dtype`."""
    return contextlib.nullcontext() if dtype == "float32" else torch.autocast(device.type, DTYPES[dtype])


def has_float8(device: torch.device) -> bool:
    """Whether `device` multiplies matrices in float8: NVIDIA's Ada and later, AMD's MI300, MI350 and RDNA 4."""
    if device.type != "cuda":
        return False
    if torch.version.hip:  # the compute capability of an MI200, gfx90a, is 9.0, as that of an H100
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95", "gfx120"))
    return torch.cuda.get_device_capability(device) >= (8, 9)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of `tensor`, which is on the CPU, on `device`. CUDA copies from pinned memory while the CPU goes on.

    Others copy before this returns: memory that is not pinned may be freed before the device has read it (pytorch#189690).
    """
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def make_deterministic(device: torch.device, integers_only: bool) -> None:
    """Let CUDA and NCCL use only kernels that give the same bits every time. On a CPU the model needs no others.

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

    A CPU has the rate of one thread times the number of threads. Other programs hardly lower this figure; threads that share
    a core reach less together.
    """
    if known := known_peak_flops(device, dtype):
        return known
    if device.type == "cpu":
        rates = product_rates()  # measured already, where the precision was chosen
        return (rates if dtype in rates else product_rates(dtype))[dtype] * torch.get_num_threads()
    return best_product(device, dtype, seconds)


@functools.cache
def best_product(device: torch.device, dtype: str, seconds: float) -> float:
    """FLOP/s of the fastest of ten matrix products, or of more if there is time for more in `seconds`. Measured once."""
    size = 8192 if device.type == "cuda" else 4096  # so large that starting and awaiting a product does not count
    a = torch.randn(size, size, device=device).to(DTYPES[dtype])
    best, deadline, products = float("inf"), time.perf_counter() + seconds, 0
    while products < 10 or time.perf_counter() < deadline:  # on a busy machine the first one may wait for all of them
        products += 1
        began = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def describe(device: torch.device) -> str:
    """The hardware on which bits may depend: a GPU's name, or a CPU's with the vector instructions that torch uses."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def known_peak_flops(device: torch.device, dtype: str) -> float | None:
    """The peak in FLOP/s that the datasheet of this rank's GPU has for `dtype`. None: it has to be measured."""
    return datasheet_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" and dtype != "float32" else None


def datasheet_flops(name: str) -> float | None:
    """The dense bfloat16 peak in FLOP/s of the GPU that CUDA calls `name`. None: not known, or not a whole GPU."""
    words = set(re.split(r"[ -]", name)) | set(name.split())
    if words & GPU_PARTS:
        return None
    return next((peak for known, peak in GPU_PEAK_FLOPS.items() if words.issuperset(known.split())), None)


def memory(device: torch.device) -> tuple[int, int]:
    """The bytes of memory that are free for this rank, and all bytes: of its GPU, or of the machine for a CPU.

    On xpu and mps only this process's own memory counts as used; that of other processes is not known.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    if device.type == "xpu":
        total = torch.xpu.get_device_properties(device).total_memory
        return total - torch.xpu.memory_reserved(device), total
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    return memory_bytes(), memory_bytes()


def peak_memory_gb(device: torch.device) -> float:
    """The most memory in GB that this process has held: allocated on the GPU, or resident on a CPU and on mps."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).max_memory_allocated(device) / 1e9
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


if __name__ == "__main__":
    print(ranks_here())
