"""The hardware of one rank: its device, precision, compiler, determinism, peak rate and memory.

Choices that affect bits depend on the hardware alone, so a command makes the same choices whatever else is running.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import re
import resource
import shutil
import sys
import sysconfig
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

from lockstep.common.errors import UserError
from lockstep.common.records import Auto
from lockstep.hardware import host
from lockstep.hardware.gpus import GPU_PEAK_FLOPS
from lockstep.hardware.host import cores, cpu_name, cpuinfo, default_threads, has_nvidia_gpu, memory_bytes
from lockstep.settings import Config

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # from the safest to the fastest
# ONEDNN_MAX_CPU_ISA limits oneDNN to older instructions. With these values, it may use the matrix unit and AVX512_BF16.
NO_LIMIT = ("", "ALL", "DEFAULT")
MOST_RANKS = 4  # limit for `make train` on a CPU; more were not measured
# MKL ignores AVX512 on AMD's processors, so oneDNN multiplies float32 matrices up to 2.3 times as fast there, and up to 1.17
# times where only AVX2 is allowed, except for weights' gradients (bench/LOG.md, "Classes of processors"). We have not compared
# them on Intel's.
ONEDNN_IS_FASTER = torch.backends.mkldnn.is_available() and cpuinfo("vendor_id") == "AuthenticAMD"
ONEDNN_IS_WIDE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
# Compiling for a CPU takes COMPILE_SECONDS and saves a fraction COMPILE_SAVES of the time of eager training, which runs at
# about EAGER_FLOPS per core (bench/LOG.md, "Classes of processors"). They are constants because the choice affects the bits.
COMPILE_SECONDS = 20.0
COMPILE_SAVES = {"float32": 0.05, "bfloat16": 0.17}
EAGER_FLOPS = {"float32": 130e9 if ONEDNN_IS_FASTER and ONEDNN_IS_WIDE else 65e9, "bfloat16": 200e9}
# Words that mark GPUs whose peak is not the datasheet's: slices, virtual GPUs, and variants with other core counts or power.
GPU_PARTS = {"MIG", "GRID", "Laptop", "Max-Q", "D", "Ti", "SUPER"}


def prepare_device(
    name: str, local_rank: int = 0, threads: int | Auto = "auto", deterministic: bool = False, integers_only: bool = False
) -> torch.device:
    """Return the device of this rank, made current and ready. Raises UserError if it is missing.

    Call this before creating the process group: NCCL reads its environment variables when it creates the first communicator.

    name: auto, cpu, cuda or mps; each rank uses the accelerator with index `local_rank`. threads: CPU threads per rank (auto:
    see `default_threads`). deterministic: CUDA and NCCL use only kernels that give the same bits every time (the model's CPU
    kernels always do). integers_only: the ranks add only integers, whose sum does not depend on the order.
    """
    device = find_device(name, local_rank)
    if name == "auto" and device.type == "cpu":
        require_no_gpu()
    torch.set_num_threads(default_threads() if threads == "auto" else threads)
    if device.type == "mps" and integers_only:
        raise UserError("exact and portable runs need float64, which Metal devices do not support; use --device=cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32: see --dtype
    if device.type == "cuda" and deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # do not choose kernels by timing them
        if not integers_only:
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink switches add in any order (NVIDIA/nccl#1497)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    return device


def prepare_training(config: Config, local_rank: int) -> torch.device:
    """Return the device of a rank that trains. See `prepare_device`."""
    record, portable = config.parallel.record, config.numerics.numerics == "portable"
    threads = config.train.threads
    if record.any_ranks and threads == "auto" and not portable:
        threads = 1  # sums within a rank depend on its number of threads
    # FSDP allocates and frees memory in blocks of many sizes. If the C library held on to all of them, an fsdp rank would need
    # twice the memory, nearly as much as a ddp rank.
    if not record.shards_weights:
        keep_freed_memory()
    integers_only = record.any_ranks or portable  # portable always uses exact
    deterministic = config.train.deterministic or integers_only
    return prepare_device(config.train.device, local_rank, threads, deterministic, integers_only)


def find_device(name: str, local_rank: int) -> torch.device:
    """Return the device of this rank. auto: CUDA or mps if torch finds one, else the CPU. Raises UserError if it is missing."""
    if name == "auto":
        found = {"cuda": torch.cuda, "mps": torch.backends.mps}
        name = next((kind for kind, module in found.items() if module.is_available()), "cpu")
    if name == "cpu":
        return torch.device(name)
    count = getattr(torch, name).device_count()
    if not count:
        if name == "cuda":
            require_no_gpu()
        raise UserError(f"--device={name}: torch finds no such device on this machine; use --device=cpu")
    if local_rank >= count:
        raise UserError(
            f"--device={name}: rank {local_rank} of this node needs its own GPU, but torch sees only {count}; "
            "lower torchrun's --nproc_per_node to that, or use --device=cpu"
        )
    return torch.device(name, local_rank)


def require_no_gpu() -> None:
    """Raise UserError if this machine has an NVIDIA GPU that torch cannot use. A run must not train on the CPU by mistake."""
    if has_nvidia_gpu():
        build = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
        problem = "docs/platforms.md says which build its driver needs, and a container needs --gpus=all"
        raise UserError(f"this machine has an NVIDIA GPU, but {build} cannot use it; {problem}; --device=cpu trains on the CPU")


def ranks_here() -> int:
    """Return the number of ranks for `make train`: a power of two, so that batches divide evenly, at most one per GPU or core.

    Small models train faster on four ranks of one thread than on one rank of four threads (bench/LOG.md, "Ranks and threads").
    """
    own = find_device("auto", 0)
    most = min(MOST_RANKS, cores()) if own.type == "cpu" else getattr(torch, own.type).device_count()
    return 1 << most.bit_length() - 1


def choose_dtype(name: str, device: torch.device) -> str:
    """Return `name`, or for auto the fastest precision: bfloat16 if that is fast here, else float16 on CUDA, else float32."""
    if name != "auto":
        return name
    if fast_at_bfloat16(device):
        return "bfloat16"
    return "float16" if device.type == "cuda" else "float32"


def fast_at_bfloat16(device: torch.device) -> bool:
    """Return whether `device` is known to multiply bfloat16 matrices faster than float32 ones.

    On a CPU, the speed relative to float32 is 10 with a matrix unit (Intel's AMX), 0.37 with AVX512 alone, and 0.03 with AVX2.
    With AVX512_BF16, it is 1.9 on AMD, but below 1 on Intel (bench/LOG.md, "Classes of processors" and "Tokens per second"). We
    have measured neither Metal nor Arm, where oneDNN lacks fast code for some matmuls (pytorch#180447).
    """
    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available() or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if torch.cpu._init_amx() and (limit in NO_LIMIT or "AMX" in limit):  # Linux lets this process use it
        return True
    allowed = limit in NO_LIMIT or any(word in limit for word in ("BF16", "FP16", "AVX10"))
    return allowed and torch.cpu._is_avx512_bf16_supported() and cpuinfo("vendor_id") == "AuthenticAMD"


def compiling_pays(device: torch.device, dtype: str, run_flops: float) -> bool:
    """Return whether a run is long enough for compiling to save time: always on CUDA, never on mps, where it is untested."""
    if device.type != "cpu":
        return device.type == "cuda"
    kind = "bfloat16" if dtype == "bfloat16" else "float32"
    return COMPILE_SAVES[kind] * run_flops / (cores() * EAGER_FLOPS[kind]) > COMPILE_SECONDS


def choose_compile(name: str, device: torch.device, dtype: str, run_flops: float) -> str:
    """Resolve --compile to on or off. auto is on if compiling pays off. Warns and returns off if no compiler works."""
    if name == "off" or (name == "auto" and not compiling_pays(device, dtype, run_flops)):
        return "off"
    prepare_compiler(device)
    try:
        if device.type == "cpu" and not compilers(device):  # the cache could hide this
            raise RuntimeError
        x, weight = torch.ones(2, 16, 16, device=device)
        with torch.no_grad(), autocast(device, dtype):  # without backward, which takes two more seconds to compile
            block = torch.compile(lambda x, weight: F.gelu(F.layer_norm(x @ weight, weight.shape[:1])).sum())
            block(x, weight)  # a matmul, a norm and an elementwise function, as in a model's block
        return "on"
    except Exception as error:  # inductor raises many kinds
        problem = missing_for_compiler(device) or str(error).strip().partition("\n")[0]
        warnings.warn(f"torch.compile does not work here, so the run will be slower: {problem}", stacklevel=2)
        return "off"


def compilers(device: torch.device) -> list[str]:
    """Return the compilers on the PATH that torch.compile can use for `device`: of C++, or of C for Triton on a GPU."""
    return [*filter(shutil.which, ("g++", "clang++", "c++") if device.type == "cpu" else ("gcc", "clang", "cc"))]


def missing_for_compiler(device: torch.device) -> str:
    """Return what torch.compile lacks on this machine to build code for `device`; empty if nothing obvious."""
    if not compilers(device):
        return f"there is no compiler; install {'g++ or clang++' if device.type == 'cpu' else 'gcc or clang'}"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's own scheme has no headers
    if not Path(sysconfig.get_path("include", scheme), "Python.h").exists():
        return "Python.h is missing; install python3-dev"
    return ""


def prepare_compiler(device: torch.device) -> None:
    """Set up torch.compile for `device`. Call this before compiling anything."""
    for module in ("torch", "ctx_manager"):  # they warn about profiler hooks in optimizers and DDP, which cost nothing
        logging.getLogger(f"torch._dynamo.variables.{module}").setLevel(logging.ERROR)
    # Otherwise the compiler would spend 4 seconds on a test program for each of the CPU's vector instruction sets.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if device.type == "cpu":
        # The compiler's cache ignores the processor, and code for wider vectors would corrupt memory on another one.
        kind = hashlib.sha256(describe(device).encode()).hexdigest()[:8]
        cache = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{kind}")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def autocast(device: torch.device, dtype: str):
    """Return a context in which matmuls use `dtype`."""
    return contextlib.nullcontext() if dtype == "float32" else torch.autocast(device.type, DTYPES[dtype])


def kind(device: torch.device) -> str:
    """Return cpu, mps, cuda, or for GPUs that torch calls cuda as well, rocm (AMD's) or volta (NVIDIA's before Ampere)."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return "rocm"
    return "cuda" if torch.cuda.get_device_capability(device) >= (8, 0) else "volta"


def peak_flops(device: torch.device, dtype: str) -> float:
    """Return the peak FLOP/s of this rank's device, from the datasheet or measured; on a CPU, count one thread per core."""
    threads = min(torch.get_num_threads(), cores() / host.read_ranks()[3]) if device.type == "cpu" else 1
    return known_peak_flops(device, dtype) or best_product(device, dtype) * threads


def known_peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the datasheet's peak for `dtype` in FLOP/s of this rank's GPU, or None if it has to be measured."""
    return datasheet_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" and dtype != "float32" else None


def datasheet_flops(name: str) -> float | None:
    """Return the dense bfloat16 peak in FLOP/s of the GPU that CUDA calls `name`, or None if unknown or not a whole GPU."""
    words = set(re.split(r"[ -]", name)) | set(name.split())
    fitting = [peak for known, peak in GPU_PEAK_FLOPS.items() if words.issuperset(known.split()) and not words & GPU_PARTS]
    return fitting[0] if fitting else None


@functools.cache
def best_product(device: torch.device, dtype: str) -> float:
    """Return the FLOP/s of the fastest of ten or more matmuls in 50 ms, measured only once; on a CPU, with one thread.

    On a CPU, the clock counts only this thread's processor time, so other programs do not distort it.
    """
    size, now = {"cpu": 256, "cuda": 8192}.get(device.type, 4096), time.perf_counter
    fill = torch.randn  # ones would make a GPU faster
    if device.type == "cpu":
        fill, now = torch.ones, time.thread_time  # do not disturb the CPU's random numbers, which the run uses
    a, threads, times = fill(size, size, device=device).to(DTYPES[dtype]), torch.get_num_threads(), []
    multiply = torch.matmul
    if device.type == "cpu" and dtype == "float32" and ONEDNN_IS_FASTER:
        multiply = functools.partial(torch.ops.mkldnn._linear_pointwise, B=None, attr="none", scalars=[], algorithm="")
    torch.set_num_threads(1)
    while len(times) < 10 or sum(times) < 0.05:  # on a busy machine, the first may take the whole 50 ms
        began = now()
        multiply(a, a)[0, 0].item()  # waits for the device
        times.append(now() - began)
    torch.set_num_threads(threads)
    return 2 * size**3 / min(times)


def describe(device: torch.device) -> str:
    """Name the hardware that bits may depend on: a GPU, or a CPU and the vector instructions that torch uses on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def libraries() -> dict[str, str]:
    """Return the versions of the libraries besides torch that compute on a GPU, by name."""
    found = {"cuda": torch.version.cuda or torch.version.hip, "cudnn": torch.backends.cudnn.version()}
    found |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if torch.distributed.is_nccl_available() else {}
    if importlib.util.find_spec("triton"):
        import triton  # imported here because it is slow

        found["triton"] = triton.__version__
    return {name: str(version) for name, version in found.items()}


def memory(device: torch.device) -> tuple[int, int]:
    """Return the free and total memory in bytes: of this rank's GPU or, on a CPU, of the machine.

    On mps, only this process's memory counts as used; how much other processes use is unknown.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    return memory_bytes(), memory_bytes()


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory of this process in GB: allocated on the GPU, or resident on a CPU and on mps."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of freed tensors.

    By default, it returns large freed blocks to the kernel at once. The page faults when they are allocated again take a tenth
    of an eager training step on a CPU.
    """
    with contextlib.suppress(AttributeError):  # a C library other than glibc
        libc = ctypes.CDLL(None)
        # M_MMAP_THRESHOLD: allocate blocks up to this size from the heap. glibc before 2.35 refuses more than 32 MB.
        libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 1 << 25)
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: do not shrink the heap
        libc.mallopt(-2, 1 << 30)  # M_TOP_PAD: grow the heap by this much at once; untouched pages use no memory


if __name__ == "__main__":
    print(ranks_here())
