"""Who am I: rank, world size, device and the reductions over ranks. A world of one works without torchrun."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from settings import RunError, UserError, cores


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    store: dist.Store | None = None  # kept by torchrun, outlives the ranks

    @property
    def is_master(self) -> bool:
        """Only the master process prints, logs and writes."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def zeros(self, count: int) -> torch.Tensor:
        """float64 zeros [count] where sums over ranks are made (float32 on mps, which has no float64)."""
        return torch.zeros(count, device=self.device, dtype=torch.float32 if self.device.type == "mps" else torch.float64)

    def share(self, count: int) -> range:
        """This rank's contiguous share of `count` pieces; the first ranks take one more where it is unequal."""
        each, more = divmod(count, self.size)
        first = self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))

    def from_master(self, value):
        """The master's `value` (any picklable object) on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def least(self, value: float) -> float:
        """The smallest of the ranks' values."""
        if self.size > 1:
            dist.all_reduce(value := torch.tensor(value, dtype=torch.float64), op=dist.ReduceOp.MIN)
        return float(value)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    @contextlib.contextmanager
    def naming_missing_ranks(self):
        """Turn the failure of a collective into a RunError that names the ranks which no longer answer, if there are any.

        A rank whose collective failed or timed out says so in the store and looks who else does: who is hung or dead does not.
        """
        try:
            yield
        except RuntimeError as error:
            if self.store is None or not is_communication(error):
                raise
            self.store.set(f"failed/{self.rank}", "")
            keys, deadline = [f"failed/{rank}" for rank in range(self.size)], time.monotonic() + 5
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.1)
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            if not missing:
                raise
            raise RunError(f"rank(s) {missing} no longer answer: {str(error).splitlines()[0]}") from None


def is_communication(error: RuntimeError) -> bool:
    """Whether a collective failed, not this rank's own computation. gloo's errors are plain RuntimeErrors."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout")
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and any(w in str(error).lower() for w in words))


def connect(device: str = "auto", threads: int = 0, timeout_minutes: float = 10.0) -> World:
    """Join the world that RANK and WORLD_SIZE describe (torchrun sets them), or be a world of one.

    device: auto, cpu, cuda or mps; each rank takes cuda:LOCAL_RANK. threads: CPU threads of each rank (0: cores // local ranks;
    more threads than cores spin against each other). timeout_minutes: after which a rank gives up waiting for another.
    Raises UserError where the device is not there.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = os.environ.get("LOCKSTEP_SHARE_GPU") == "1"  # to try several ranks on one GPU, which NCCL refuses
    place = _place(device, local_rank, shared)
    torch.set_num_threads(threads or max(1, cores() // local_size))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    elif sys.platform == "linux":
        keep_freed_memory()
    store = None
    if "RANK" in os.environ:
        timeout = timedelta(minutes=timeout_minutes)
        # torchrun's store outlives a restart, and with it the addresses of ranks that are gone.
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{size}"
        store = dist.PrefixStore(attempt, next(dist.rendezvous("env://"))[0])
        # What is about the run, not the model, goes through gloo, so that no GPU is waited for.
        backend, device_id = ("cpu:gloo,cuda:nccl", place) if place.type == "cuda" and not shared else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)
    return World(rank, size, local_rank, local_size, place, store)


class Stop:
    """A request to stop, by SIGTERM, SIGINT, SIGUSR1 or after `max_minutes`, that all ranks agree on at a step boundary.

    A second SIGINT ends the process at once. `ask` starts the agreement before an update and `agreed` reads it after, so that
    the exchange hides behind the update.
    """

    def __init__(self, world: World, max_minutes: float):
        self.world, self.reason = world, ""
        self.deadline = time.monotonic() + 60 * max_minutes if max_minutes else float("inf")
        self._asked = self._work = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame) -> None:
        self.reason = self.reason or signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def ask(self) -> None:
        """Begin to exchange what each rank has seen so far."""
        if time.monotonic() > self.deadline:
            self.reason = self.reason or "--max_minutes"
        self._asked = torch.tensor([float(bool(self.reason))])
        if self.world.size > 1:
            self._work = dist.all_reduce(self._asked, op=dist.ReduceOp.MAX, async_op=True)

    def agreed(self) -> bool:
        """Whether any rank had been asked to stop at the last `ask`."""
        if self._work is not None:
            self._work.wait()
        stop = self._asked is not None and bool(self._asked.item())
        self.reason = self.reason or ("asked on another rank" if stop else "")
        return stop


def keep_freed_memory() -> None:
    """Let glibc keep the memory of large tensors for the next ones, in huge pages where Linux grants them.

    By default it returns it to the kernel at every free, and the page faults of taking it again are a tenth of an eager
    training step on a CPU; looking up small pages is another 1.5 % of a compiled one.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        # M_MMAP_THRESHOLD: take up to so much from the heap; before 2.35 glibc refuses more than 32 MB
        libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 1 << 25)
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: do not shrink it
        libc.mallopt(-2, 1 << 30)  # M_TOP_PAD: let it grow by so much at once; it takes memory only where it is used
        for function in (libc.sbrk, libc.malloc):
            function.restype = ctypes.c_void_p
        first = libc.sbrk(0)
        libc.free(ctypes.c_void_p(libc.malloc(1 << 28)))
        size = libc.sbrk(0) - first
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), 14)  # MADV_HUGEPAGE


def _place(device: str, local_rank: int, shared: bool) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device=mps: this torch finds no Metal device; --device=cpu works everywhere")
    if device != "cuda":
        return torch.device(device)
    count = torch.cuda.device_count()
    if shared and count:
        local_rank %= count
    if local_rank >= count:
        raise UserError(
            f"--device=cuda: rank {local_rank} of this node needs a GPU of its own and torch sees {count}; start "
            "torchrun with --nproc_per_node of at most that, or use --device=cpu"
        )
    return torch.device("cuda", local_rank)
