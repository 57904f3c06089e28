"""This process among the others: rank, world size, device, and communication between ranks.

A world of one rank works without torchrun.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import RunError, UserError, within
from hardware.device import local_world_size, shares_gpu

LONGEST_END = timedelta(days=1)  # how long a finished rank waits for the master, which may still write a large checkpoint
SAME_COMMAND = "run the same command again on all nodes"


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_size: int
    device: torch.device

    @property
    def is_master(self) -> bool:
        """Only the master process prints, logs and writes."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """This rank's contiguous share of `count` pieces. If shares are unequal, the first ranks take one more."""
        each, more = divmod(count, self.size)
        first = self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))

    def zeros(self, count: int) -> torch.Tensor:
        """Zeros [count] to sum over the ranks, in float64 (float32 on mps, which has no float64)."""
        return torch.zeros(count, device=self.device, dtype=torch.float32 if self.device.type == "mps" else torch.float64)

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, value):
        """The master's `value` (any picklable object) on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def all_gather(self, value) -> list:
        """Every rank's `value` (any picklable object), by rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raise UserError on every rank, naming the first difference, unless all ranks have the same `facts`."""
        found = self.all_gather(facts)
        for rank, others in enumerate(found):
            for name in facts:
                if others.get(name) != found[0].get(name):
                    difference = f"{name} is {others.get(name)} on rank {rank} and {found[0].get(name)} on rank 0"
                    raise UserError(f"{difference}; all ranks need the same command, tokens and torch version")

    def leave(self) -> None:
        """Wait until every rank is done, including a master that is still writing. Leaving earlier would make others fail."""
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.timeout = LONGEST_END  # dist.barrier would give up after --timeout_minutes
            dist.group.WORLD.allreduce([torch.zeros(1)], options).wait()

    @contextlib.contextmanager
    def reporting_lost_ranks(self) -> Iterator[None]:
        """Turn the error of a collective that another rank did not answer into a one-line RunError."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not is_communication(error):
                raise
            raise RunError(f"rank {self.rank} lost the other ranks: {reason(error)}; {SAME_COMMAND}") from None


def is_communication(error: RuntimeError) -> bool:
    """Whether a collective failed, rather than this rank's own computation. gloo's errors are plain RuntimeErrors."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout")
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and any(w in str(error).lower() for w in words))


def reason(error: Exception) -> str:
    """The first sentence of torch's message, without the location in torch's source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error)).splitlines()[0].partition(". ")[0]


def connect(rank: int, world_size: int, device: torch.device, timeout_minutes: float = 10.0) -> World:
    """Join the other ranks at MASTER_ADDR and MASTER_PORT, or be a world of one rank.

    timeout_minutes: how long a rank waits for another, here and in each collective. Raises UserError, or RunError if ranks are
    missing after that; the master names them.
    """
    if world_size > 1:
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if device.type == "mps":
            raise UserError(
                "--device=mps: ranks cannot exchange tensors of Metal devices; start one process, or use --device=cpu"
            )
        if not host or not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise UserError("MASTER_ADDR and MASTER_PORT must be the host and port of rank 0; torchrun sets them")
        if world_size > local_world_size() and (interface := gloo_interface(host)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        timeout = timedelta(minutes=timeout_minutes)
        try:  # `within`, because torch's own timeouts add up, and NCCL's start has none
            within(1.1 * timeout.total_seconds(), lambda: rendezvous(rank, world_size, device, (host, int(port)), timeout))
        except (RuntimeError, TimeoutError) as error:
            found = f"within {timeout} (--timeout_minutes): {reason(error) if str(error) else 'no answer'}"
            raise RunError(f"rank {rank} did not reach all ranks at {host}:{port} {found}; {SAME_COMMAND}") from None
    return World(rank, world_size, local_world_size(), device)


def rendezvous(rank: int, size: int, device: torch.device, place: tuple[str, int], timeout: timedelta) -> None:
    """Meet the other ranks at the store at `place` and create the process group. Raises RuntimeError."""
    deadline = time.monotonic() + timeout.total_seconds()
    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun, so it outlives the ranks; else by rank 0
    # A longer timeout here, because an unreachable store prints its stack when that expires.
    store = dist.TCPStore(*place, size, rank == 0 and not held, 2 * timeout, wait_for_workers=False, multi_tenant=True)
    # After a restart, torchrun's store still has the addresses of ranks that are gone.
    store = dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{size}", store)
    store.set(f"here/{rank}", "")
    missing = list(range(size)) if rank == 0 else []
    while missing := [other for other in missing if not store.check([f"here/{other}"])]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(missing)} of {size} ranks are missing, such as {missing[:16]}")
        time.sleep(0.1)
    # CPU tensors, which carry data about the run, go through gloo, so that nothing waits for a GPU.
    backend = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(device.type) if not shares_gpu() else None
    if backend:
        getattr(torch, device.type).set_device(device)  # for this thread
    options = dict(rank=rank, world_size=size, timeout=timeout, device_id=device if backend else None)
    dist.init_process_group(backend or "gloo", store=store, **options)


def gloo_interface(host: str) -> str:
    """The network interface that leads to `host`, if gloo would pick loopback because of /etc/hosts. Otherwise empty."""
    with contextlib.suppress(OSError):
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return ""
    with contextlib.suppress(OSError):
        address = int.from_bytes(socket.inet_aton(socket.gethostbyname(host)), sys.byteorder)
        routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
        fitting = [(int(mask, 16), name) for name, to, *_, mask, _, _, _ in routes if address & int(mask, 16) == int(to, 16)]
        return max(fitting, key=lambda route: route[0].bit_count(), default=(0, ""))[1]
    return ""


class Stop:
    """A request to stop: SIGTERM, SIGINT, SIGUSR1 or `max_minutes`. All ranks agree on it between two updates.

    `ask` starts the exchange before an update and `agreed` reads the result afterwards, so the update hides its latency. A
    second SIGINT ends the process at once.
    """

    def __init__(self, world: World, max_minutes: float):
        self.world, self.reason = world, ""
        self.deadline = time.monotonic() + 60 * max_minutes if max_minutes else float("inf")
        self._asked, self._work = torch.zeros(1), None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame) -> None:
        if self.world.is_master and not self.reason:
            with contextlib.suppress(OSError):  # print is not reentrant, so a signal handler must not call it
                os.write(2, b"\nstopping after this update or the next; press Ctrl-C again to end at once, without saving\n")
        self.reason = self.reason or signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def ask(self) -> None:
        """Start asking all ranks whether any has seen a request so far."""
        if time.monotonic() > self.deadline:
            self.reason = self.reason or "--max_minutes"
        self._asked = torch.tensor([float(bool(self.reason))])
        if self.world.size > 1:
            self._work = dist.all_reduce(self._asked, op=dist.ReduceOp.MAX, async_op=True)

    def agreed(self) -> bool:
        """Whether any rank had seen a request at the last `ask`."""
        if self._work is not None:
            self._work.wait()
        if self._asked:
            self.reason = self.reason or "requested on another rank"
        return bool(self._asked)
