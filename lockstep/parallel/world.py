"""The world as one rank sees it: rank, size, device, and communication. A world of one rank works without torchrun."""

import contextlib
import fcntl
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.common.errors import RunError, UserError, within

LONGEST_END = timedelta(days=1)  # how long a finished rank waits for the master, which may be copying to a mirror
STUCK_SECONDS = 5.0  # how long the main thread may run no Python code after a rank is lost
SAME_COMMAND = "run the same command again on all nodes"


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_size: int
    device: torch.device
    timeout: timedelta = timedelta(minutes=10)  # how long a rank waits for the others

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0, the only one that prints, logs and writes."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Return this rank's contiguous share of `count` items. If shares are unequal, the first ranks get one more."""
        each, more = divmod(count, self.size)
        first = self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))

    def zeros(self, count: int) -> torch.Tensor:
        """Return zeros [count] to sum over the ranks, in float64 (float32 on mps, which does not support float64)."""
        return torch.zeros(count, device=self.device, dtype=torch.float32 if self.device.type == "mps" else torch.float64)

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value):
        """Send the master's `value` (any picklable object) to every rank, and return it."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def all_gather(self, value) -> list:
        """Return every rank's `value` (any picklable object), in the order of ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def difference(self, facts: dict[str, Any]) -> str:
        """Say which of the `facts` first differs between a rank and the master; empty if none. All ranks must call this."""
        found = self.all_gather(facts)
        for rank, others in enumerate(found):
            for name in found[0] | others:
                if others.get(name) != found[0].get(name):
                    return f"{name} is {others.get(name)} on rank {rank} and {found[0].get(name)} on rank 0"
        return ""

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raise UserError on every rank, naming the first difference, unless all ranks have the same `facts`."""
        if difference := self.difference(facts):
            raise UserError(f"{difference}; all ranks need the same command, tokens and torch version")

    def leave(self) -> None:
        """Wait until every rank is done, even a master that is still writing. If a rank left earlier, the others would fail."""
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.timeout = LONGEST_END  # dist.barrier would time out after timeout_minutes
            dist.group.WORLD.allreduce([torch.zeros(1)], options).wait()

    @contextlib.contextmanager
    def reporting_lost_ranks(self, end: Callable[[RunError], None] = lambda error: None) -> Iterator[None]:
        """Turn the error of a collective that failed because another rank is gone into a one-line RunError.

        If this rank is stuck in a collective that never fails, `Watch` calls `end` with the error, and ends the process.
        """
        with Watch(self, end) if self.size > 1 else contextlib.nullcontext():
            try:
                yield
            except RuntimeError as error:
                if self.size == 1 or not is_communication(error):
                    raise
                lost = f"rank {self.rank} lost the other ranks: {reason(error)}; {SAME_COMMAND}"
                raise RunError(lack(self.rank, error) or lost) from None


class Watch(threading.Thread):
    """Ends this process if a rank is lost while the main thread is stuck in C code.

    If a rank is lost, NCCL's kernels on the others wait forever. Whoever waits for such a kernel runs no Python code, not even
    a signal handler. So each rank receives, in a thread, from the rank before it, which sends nothing until it leaves. If that
    rank is killed, its connection closes, which ends the wait. The number of the lost rank then travels from rank to rank.
    """

    TAG, NONE = 1, -1  # of the message; its content if no rank is lost

    def __init__(self, world: World, end: Callable[[RunError], None]):
        super().__init__(daemon=True)
        self.world, self.end, self.left, self.awake = world, end, threading.Event(), threading.Event()
        self.before, self.after = (world.rank - 1) % world.size, (world.rank + 1) % world.size

    def __enter__(self) -> None:
        self.lost = torch.tensor([self.NONE])
        self.work = dist.irecv(self.lost, self.before, tag=self.TAG)
        signal.signal(signal.SIGURG, lambda number, frame: self.awake.set())  # by default, this signal does nothing
        self.start()

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        self.left.set()
        self.send(self.world.rank if error else self.NONE)
        self.join(1)  # a thread that waits in C code could crash the interpreter's teardown

    def send(self, lost: int) -> None:
        """Tell the next rank which rank is lost. It may be gone itself."""
        with contextlib.suppress(RuntimeError):
            self.sent = torch.tensor([lost])
            self.sending = dist.isend(self.sent, self.after, tag=self.TAG)

    def run(self) -> None:
        try:
            self.work.wait(timedelta(days=10_000))
            lost = self.lost.item()
        except RuntimeError:
            lost = self.before
        if lost == self.NONE:
            return
        if not self.left.is_set():
            self.send(lost)
        self.awake.set()
        while self.awake.is_set():  # the main thread will notice by itself, unless it waits forever
            self.awake.clear()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGURG)
            if self.left.wait(STUCK_SECONDS):
                return
        error = RunError(f"rank {self.world.rank} lost rank {lost}, for which it was waiting; {SAME_COMMAND}")
        self.end(error)
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
        os._exit(1)


def is_communication(error: RuntimeError) -> bool:
    """Return whether `error` comes from a collective, not from this rank's own work. gloo's errors are plain RuntimeErrors."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout")
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and any(w in str(error).lower() for w in words))


def reason(error: Exception) -> str:
    """Return NCCL's last error, or the first sentence of torch's message, without the location in torch's source."""
    if last := str(error).partition("Last error:")[2].strip():
        return last.splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]


def lack(rank: int, error: Exception) -> str:
    """Return a message if NCCL failed for lack of memory on this machine, not because of another rank; else an empty string."""
    cause = reason(error)
    if "/dev/shm" in cause or "shared memory" in cause:
        return f"rank {rank}: NCCL has too little shared memory: {cause}; start the container with --ipc=host or --shm-size=1g"
    if "out of memory" in cause or "CUDA calloc" in cause:
        return f"rank {rank}: NCCL has too little GPU memory: {cause}; lower --micro_batch_size"
    return ""


def connect(world: World) -> None:
    """Meet the other ranks: NCCL between GPUs, gloo between CPUs. Raises UserError or RunError.

    RunError: ranks are still missing after the world's timeout; the master names them.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if world.device.type == "mps":
        raise UserError("--device=mps: ranks cannot exchange tensors of Metal devices; start one process, or use --device=cpu")
    if not host or not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError("MASTER_ADDR and MASTER_PORT must be the host and port of rank 0; torchrun sets them")
    given, known = os.environ.get("GLOO_SOCKET_IFNAME", ""), [name for _, name in socket.if_nameindex()]
    if not {*given.split(",")} <= {"", *known}:
        raise UserError(f"GLOO_SOCKET_IFNAME={given}: this machine has only the network interfaces {', '.join(known)}")
    try:  # `within`, because torch's own timeouts add up, and NCCL's initialization has none
        within(1.1 * world.timeout.total_seconds(), lambda: rendezvous(world, (host, int(port))))
    except (RuntimeError, TimeoutError) as error:
        if problem := lack(world.rank, error):
            raise RunError(problem) from None
        if "failed to listen" in str(error):
            why = str(error).rpartition("message: ")[2].rstrip(")")
            way_out = "end the process that uses it, or choose another MASTER_PORT (torchrun --master-port) on all nodes"
            raise RunError(f"rank 0 cannot listen on port {port}: {why}; {way_out}") from None
        found = f"within {world.timeout} (timeout_minutes): {reason(error) or 'no answer'}"
        if world.size > world.local_size and "missing" not in found:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
            found += f"; if rank 0 is up, set GLOO_SOCKET_IFNAME (here {interface}) to the interface to the other nodes"
        raise RunError(f"rank {world.rank} did not reach all ranks at {host}:{port} {found}; {SAME_COMMAND}") from None


def rendezvous(world: World, place: tuple[str, int]) -> None:
    """Meet the other ranks in the store at `place` and create the process group. Raises RuntimeError."""
    rank, size, timeout = world.rank, world.size, world.timeout
    deadline = time.monotonic() + timeout.total_seconds()
    if rank > 0:  # rank 0 gives up first, because it can name the missing ranks
        deadline += 0.05 * timeout.total_seconds()
    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's store outlives the ranks; else rank 0 holds it
    # A longer timeout here, because an unreachable store prints a stack trace when it expires.
    store = dist.TCPStore(*place, size, rank == 0 and not held, 2 * timeout, wait_for_workers=False, multi_tenant=True)
    store = join_round(store, rank, size, address_towards(place[0]), deadline)
    if size > world.local_size and (interface := gloo_interface(store, size, place[0])):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # Data about the run is in CPU tensors and goes through gloo, so that it never waits for a GPU.
    nccl = world.device.type == "cuda"
    if nccl:
        torch.cuda.set_device(world.device)  # for this thread, which is a new one
    # With device_id, NCCL splits the communicators of subgroups from the first one. If a run with --replicate hangs, suspect
    # this first (pytorch/pytorch#153960).
    options = dict(rank=rank, world_size=size, timeout=timeout, device_id=world.device if nccl else None)
    dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", store=store, **options)


def join_round(store: dist.Store, rank: int, size: int, address: str, deadline: float) -> dist.Store:
    """Wait for all ranks. Returns a part of the store that no earlier round has used, with the `address` of each rank.

    After a restart, torchrun's store still contains the keys of ranks that are gone. torchrun's count of restarts doesn't tell
    the rounds apart, because each node counts only its own failures. So rank 0 gives the round a new name. Each rank registers
    under that name, with a name of its own, and goes on once rank 0 has answered to it. Raises RuntimeError at the `deadline`.
    """
    me, missing, registered = uuid.uuid4().hex, list(range(size)), b""
    if rank == 0:
        store.set("round", me)
    while not store.check([me]):
        if time.monotonic() > deadline:
            found = f"{len(missing)} of {size} ranks are missing, such as {missing[:16]}"
            raise RuntimeError(found if rank == 0 else "ranks are missing; rank 0 names them, unless it is missing")
        if store.check(["round"]) and (name := store.get("round")) != registered:  # perhaps still an earlier round's
            store.set(f"{name.decode()}/{rank}", f"{address} {me}")
            registered = name
        if rank == 0 and not (missing := [other for other in missing if not store.check([f"{me}/{other}"])]):
            for other in range(size):
                store.set(store.get(f"{me}/{other}").decode().split()[-1], me)
        time.sleep(0.1 + size / 5_000)  # thousands of ranks ask less often
    return dist.PrefixStore(store.get(me).decode(), store)


def address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the route to `host`; empty without a route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # asks the kernel for a route and sends nothing
        return probe.getsockname()[0]
    return ""


def gloo_interface(store: dist.Store, size: int, host: str) -> str:
    """Return the network interface to the other nodes; empty if it is not found.

    gloo would use the address of this machine's name, which often belongs to the loopback device or a different network. `host`
    is rank 0's name, which may also mean loopback on its own node, so there the route to a rank on another node decides.
    """
    own = address_towards(host)
    if own.startswith("127."):
        others = (store.get(str(rank)).decode().rpartition(" ")[0] for rank in reversed(range(size)))
        own = address_towards(next((address for address in others if address and not address.startswith("127.")), host))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR of Linux
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return ""


class Stop:
    """A request to stop: SIGTERM, SIGINT, SIGHUP, SIGUSR1 or `max_minutes` after `began`; or to save.

    All ranks agree on both between two updates: `ask` starts an all-reduce before an update, and `agreed` reads the result
    afterwards, so the update hides its latency. A second SIGINT ends the process at once. Under nohup, SIGHUP is ignored.
    """

    def __init__(self, world: World, max_minutes: float, began: float):
        self.world, self.reason = world, ""
        self.deadline = began + 60 * max_minutes if max_minutes else float("inf")
        self._asked, self._work = torch.zeros(2), None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame) -> None:
        if self.world.is_master and not self.reason:
            with contextlib.suppress(OSError):  # print is not reentrant, so a signal handler must not call it
                os.write(2, b"\nstopping after this update or the next; press Ctrl-C again to end at once, without saving\n")
        self.reason = self.reason or signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def ask(self, save: bool) -> None:
        """Start asking all ranks whether any has seen a request to stop so far, or wants to `save`."""
        if time.monotonic() > self.deadline:
            self.reason = self.reason or "--max_minutes"
        self._asked = torch.tensor([float(bool(self.reason)), float(save)])
        if self.world.size > 1:
            self._work = dist.all_reduce(self._asked, op=dist.ReduceOp.MAX, async_op=True)

    def agreed(self) -> tuple[bool, bool]:
        """Return whether to stop and whether to save: what any rank wanted at the last `ask`."""
        if self._work is not None:
            self._work.wait()
        stop, save = self._asked.tolist()
        if stop:
            self.reason = self.reason or "requested on another rank"
        return bool(stop), bool(save)
