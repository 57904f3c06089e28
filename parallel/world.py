"""This process among the others: rank, world size, device, and what the ranks say to one another.

A world of one works without torchrun.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.cli import read_ranks
from common.errors import RunError, UserError, within
from hardware import device
from hardware.host import cores

PATIENCE = 5.0  # seconds until a rank says for whom it waits
STORE_RATE = 5000  # questions a second that all ranks together put to the store while they wait
LONGEST_END = 3600.0  # seconds for which a rank that is done waits for others, such as one that writes a large checkpoint


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_size: int
    device: torch.device
    store: dist.Store | None = None  # held by torchrun, so it outlives the ranks

    @property
    def is_master(self) -> bool:
        """Only the master process prints, logs and writes."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """This rank's contiguous share of `count` pieces. Where shares are unequal the first ranks take one more."""
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

    def from_master(self, value):
        """The master's `value` (any picklable object) on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def all_gather(self, value) -> list:
        """Every rank's `value` (any picklable object), by rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def require_same(self, facts: dict[str, Any]) -> None:
        """Raise UserError on every rank, naming the first that differs, unless all ranks have the same `facts`, by name."""
        expected = self.from_master(facts)
        different = [
            f"{name} is {facts.get(name)} on rank {self.rank} and {expected.get(name)} on rank 0"
            for name in facts | expected
            if facts.get(name) != expected.get(name)
        ]
        if found := next(filter(None, self.all_gather(different)), None):
            raise UserError("; ".join([*found, "all ranks need the same command, tokens and version of torch"]))

    def leave(self, failed: bool) -> None:
        """Wait until every rank is done: one that left earlier would fail those that still read from it.

        The master may still be writing a large checkpoint, so others have LONGEST_END. Nobody waits after a failure. Raises
        RunError, which names the ranks that are not done by then, or says that they cannot be asked any more.
        """
        if self.size == 1:
            return
        if failed:
            with contextlib.suppress(RunError):  # there is an error already
                ask(lambda: self.store.set("failed", ""), self.store, PATIENCE)
            return
        ask(lambda: self.store.set(f"left/{self.rank}", ""), self.store)
        failed, left = ["failed"], keys_of("left", self.size)

        def ended() -> bool:
            return ask(lambda: self.store.check(failed) or self.store.check(left), self.store)

        if not wait_until(ended, LONGEST_END, self.size):
            missing = ask(lambda: ranks_without("left", self.store, self.size), self.store)
            raise RunError(f"{named(missing)} did not end within {LONGEST_END:.0f} s after this one")
        if not ask(lambda: self.store.check(failed), self.store):
            dist.barrier()  # the store ends with rank 0 where torchrun does not hold it

    @contextlib.contextmanager
    def naming_missing_ranks(self):
        """Turn a failed collective into a RunError that names the ranks which no longer answer, if there are any.

        Each rank whose collective failed says so in the store, then looks who else did. A dead or hung rank did not. Where the
        store does not answer either, this rank is the one that is cut off.
        """
        try:
            yield
        except RuntimeError as error:
            if self.store is None or not is_communication(error):
                raise
            reason = str(error).splitlines()[0]
            try:
                missing = ask(self.silent_ranks, self.store, 3 * PATIENCE)
            except RunError as cut:
                raise RunError(f"rank {self.rank} no longer hears from the others: {reason}; and {cut}") from None
            if not missing:
                raise
            verb = "no longer answers" if len(missing) == 1 else "no longer answer"
            raise RunError(f"{named(missing)} {verb}: {reason}") from None

    def silent_ranks(self) -> list[int]:
        """Say that a collective failed on this rank. Returns the ranks that do not say so within seconds."""
        self.store.set(f"failed/{self.rank}", "")
        wait_until(lambda: self.store.check(keys_of("failed", self.size)), PATIENCE, self.size)
        return ranks_without("failed", self.store, self.size)


def wait_until(done: Callable[[], bool], seconds: float, size: int, tell: Callable[[], None] = lambda: None) -> bool:
    """Wait until `done()`, as `size` ranks may do together; False after `seconds`. tell: what to call while it takes long."""
    deadline, telling = time.monotonic() + seconds, time.monotonic() + PATIENCE
    while not done():
        now = time.monotonic()
        if now > deadline:
            return False
        if now > telling:
            tell()
            telling = now + 60
        time.sleep(max(0.05, size / STORE_RATE))
    return True


def keys_of(name: str, size: int) -> list[str]:
    """The keys under which `size` ranks write `name` to the store."""
    return [f"{name}/{rank}" for rank in range(size)]


def ranks_without(name: str, store: dist.Store, size: int) -> list[int]:
    """The ranks that have not written `name` to the store. It takes a question for each rank, so ask it once."""
    return [rank for rank, key in enumerate(keys_of(name, size)) if not store.check([key])]


def ask(question: Callable[[], Any], store: dist.Store, seconds: float = 0.0) -> Any:
    """What `question()` reads from the store. Raises RunError where that takes longer than `seconds` (0: --timeout_minutes).

    The store's own calls have no limit once the connection is there: they would wait for a host that is gone.
    """
    seconds = seconds or store.timeout.total_seconds()
    try:
        return within(seconds, question)
    except TimeoutError:
        reason = f"no answer in {seconds:.0f} s"
    except RuntimeError as error:  # a DistError is one
        reason = str(error).splitlines()[0]
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    raise RunError(f"the store of the ranks at {place} cannot be reached ({reason}): the network is cut, or its host is gone")


def named(ranks: list[int]) -> str:
    """rank 3, or ranks 1, 2, 5."""
    listed = ", ".join(map(str, ranks[:16])) + ", ..." * (len(ranks) > 16)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def is_communication(error: RuntimeError) -> bool:
    """Whether a collective failed, not this rank's own computation. gloo's errors are plain RuntimeErrors."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout")
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and any(w in str(error).lower() for w in words))


def connect(
    device_name: str = "auto",
    threads: int = 0,
    timeout_minutes: float = 10.0,
    deterministic: bool = False,
    integers_only: bool = False,
) -> World:
    """Join the world that RANK and WORLD_SIZE describe (torchrun sets them), or be a world of one.

    device_name: auto, cpu, cuda, xpu or mps; each rank takes the accelerator LOCAL_RANK. threads: CPU threads of each rank
    (0: cores // local ranks). timeout_minutes: how long a rank waits for another. deterministic, integers_only: see
    `device.make_deterministic`. Raises UserError where the device is not there.
    """
    rank, size, local_rank, local_size = read_ranks()
    share_gpus = os.environ.get("LOCKSTEP_SHARE_GPU") == "1"  # to try several ranks on one GPU
    own_device = device.find_device(device_name, local_rank, share_gpus)
    torch.set_num_threads(threads or max(1, cores() // local_size))
    if own_device.type == "mps" and size > 1:
        raise UserError("--device=mps: ranks cannot exchange tensors of Metal devices; start one process, or use --device=cpu")
    if own_device.type == "mps" and integers_only:
        raise UserError("--strategy=exact needs float64, which Metal devices do not have; use --device=cpu")
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
        torch.set_float32_matmul_precision("high")  # TF32: see --dtype
    elif own_device.type == "xpu":
        torch.xpu.set_device(own_device)
    if deterministic:
        device.make_deterministic(own_device, integers_only)
    store = None
    if "RANK" in os.environ:
        port = os.environ.get("MASTER_PORT", "")
        if not os.environ.get("MASTER_ADDR") or not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise UserError(
                "RANK is set, but MASTER_ADDR and MASTER_PORT do not say where rank 0 is (a host, and a port from 1 to 65535); "
                "torchrun sets all of them"
            )
        store = meet(rank, size, os.environ["MASTER_ADDR"], int(port), timedelta(minutes=timeout_minutes))
        # CPU tensors, which carry what is about the run and not the model, go through gloo: no GPU is waited for.
        backends = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(own_device.type) if not share_gpus else None
        backend, device_id = (backends, own_device) if backends else ("gloo", None)

        def join_group():
            if own_device.type in ("cuda", "xpu"):
                getattr(torch, own_device.type).set_device(own_device)  # of this thread
            timeout = timedelta(minutes=timeout_minutes)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)

        try:
            within(60 * timeout_minutes + PATIENCE, join_group)
        except (RuntimeError, TimeoutError) as error:
            reason = (str(error) or f"no answer in {timeout_minutes:g} minutes").splitlines()[0]
            raise RunError(f"rank {rank} could not connect to the other ranks: {reason}") from None
    return World(rank, size, local_size, own_device, store)


def meet(rank: int, size: int, host: str, port: int, timeout: timedelta) -> dist.Store:
    """The store that all ranks share, once all of them are there. Raises RunError, which names those that are not."""
    deadline = time.monotonic() + timeout.total_seconds()
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # otherwise rank 0 holds it
    holder, place = "torchrun" if of_torchrun else "rank 0", f"{host}:{port}"
    holds = rank == 0 and not of_torchrun

    def tell_holder():
        print(f"waiting for {holder} at {place} [rank {rank}]", flush=True)

    # The store's own waiting prints the stack and takes twice the time.
    if not holds and not wait_until(lambda: answers(host, port), timeout.total_seconds(), size, tell_holder):
        raise RunError(f"{holder} did not answer at {place} in {timeout} (--timeout_minutes)")
    try:
        store = within(
            max(1.0, deadline - time.monotonic()),
            lambda: dist.TCPStore(host, port, size, holds, timeout, wait_for_workers=False, multi_tenant=True),
        )
    except (RuntimeError, TimeoutError) as error:  # a DistError is a RuntimeError
        raise RunError(f"{holder} has no store at {place}: {(str(error) or 'no answer').splitlines()[0]}") from None
    # torchrun's store outlives a restart, and with it the addresses of ranks that are gone.
    store = dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{size}", store)
    ask(lambda: store.set(f"here/{rank}", ""), store)
    ask(lambda: store.add("here", 1), store)

    def tell_missing():
        missing = ask(lambda: ranks_without("here", store, size), store)
        if missing and rank == 0:
            print(f"waiting for {len(missing)} of {size} ranks at {place}: {named(missing)}", flush=True)

    def all_here() -> bool:
        return ask(lambda: store.add("here", 0), store) >= size

    in_time = wait_until(all_here, deadline - time.monotonic(), size, tell_missing)
    if not in_time and (missing := ask(lambda: ranks_without("here", store, size), store)):  # unless they have just come
        raise RunError(f"{named(missing)} of {size} did not reach {place} in {timeout} (--timeout_minutes)")
    return store


def answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def launch_note() -> list[str]:
    """A warning for the console where SLURM has started several tasks and this process knows of no other rank."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    if "WORLD_SIZE" in os.environ or not tasks.isdecimal() or int(tasks) < 2:
        return []
    started = "start torchrun by srun, which sets WORLD_SIZE, as launch/README.md does"
    return [f"warning: SLURM_NTASKS={tasks}, but this run has one rank: {started}"]


class Stop:
    """A request to stop, by SIGTERM, SIGINT, SIGUSR1 or after `max_minutes`, that all ranks agree on between two updates.

    `ask` starts the agreement before an update and `agreed` reads it afterwards, so the exchange hides behind the update.
    A second SIGINT ends the process at once.
    """

    def __init__(self, world: World, max_minutes: float):
        self.world, self.reason = world, ""
        self.deadline = time.monotonic() + 60 * max_minutes if max_minutes else float("inf")
        self._requested = self._work = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame) -> None:
        if self.world.is_master and not self.reason:
            # stderr may be closed, and print is not reentrant, so a signal handler must not call it.
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this update or the next; Ctrl-C ends at once, without saving\n")
        self.reason = self.reason or signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def ask(self) -> None:
        """Begin to exchange what each rank has seen so far."""
        if time.monotonic() > self.deadline:
            self.reason = self.reason or "--max_minutes"
        self._requested = torch.tensor([float(bool(self.reason))])
        if self.world.size > 1:
            self._work = dist.all_reduce(self._requested, op=dist.ReduceOp.MAX, async_op=True)

    def agreed(self) -> bool:
        """Whether any rank had a request to stop at the last `ask`."""
        if self._work is not None:
            self._work.wait()
        stop = self._requested is not None and bool(self._requested.item())
        self.reason = self.reason or ("asked on another rank" if stop else "")
        return stop
