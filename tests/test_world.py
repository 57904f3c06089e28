"""What is decided before the ranks meet: NCCL and cuBLAS read their variables when they start."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conftest import CHANGED, PATIENCE, before_update, free_port
from lockstep.common.errors import RunError
from lockstep.hardware import device
from lockstep.parallel import world

SWITCHES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE", "TORCHINDUCTOR_DETERMINISTIC")


@pytest.fixture
def gpu_node(monkeypatch):
    """A node with GPUs as far as `connect` can tell; what the environment holds when the process group is made."""
    seen = {}

    def init_process_group(backend, **options):
        seen.update(os.environ, backend=backend, deterministic=torch.are_deterministic_algorithms_enabled(), **options)

    for variable in SWITCHES:
        monkeypatch.setenv(variable, "")  # so that the fixture's end removes what the test sets
        monkeypatch.delenv(variable)
    rank_1_of_8 = dict(RANK=1, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=8, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500)
    for name, value in rank_1_of_8.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(device, "find_device", lambda name, local_rank: torch.device("cuda", local_rank))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.update(current=device))
    monkeypatch.setattr(dist, "TCPStore", lambda *place, **options: dist.HashStore())
    monkeypatch.setattr(world, "join_round", lambda store, *others: store)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    threads = torch.get_num_threads()
    yield seen
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "options, users, wanted",
    [
        (dict(deterministic=True), None, (":4096:8", "0", "1")),
        (dict(deterministic=True, integers_only=True), None, (":4096:8", None, "1")),  # integers may be added in any order
        (dict(deterministic=True), "1", (":4096:8", "1", "1")),  # what the user has set stays
        (dict(deterministic=False), None, (None, None, None)),
    ],
)
def test_determinism_is_set_before_the_process_group_is_made(gpu_node, monkeypatch, options, users, wanted):
    if users:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", users)
    assert torch.get_float32_matmul_precision() == "highest"
    world.connect(world.World(1, 8, 8, device.prepare_device("cuda", 1, **options)))
    assert gpu_node["current"] == gpu_node["device_id"] == torch.device("cuda", 1)
    assert gpu_node["backend"] == "cpu:gloo,cuda:nccl" and gpu_node["deterministic"] == options["deterministic"]
    assert tuple(map(gpu_node.get, SWITCHES)) == wanted
    assert torch.get_float32_matmul_precision() == "high"  # products in TF32


def test_ranks_that_were_started_differently_are_refused(train):
    change = "if os.environ['RANK'] == '2':\n"
    change += "    settings.load = lambda *a, load=settings.load: settings.replace(load(*a), lr=0.5)"
    done = train.changed(change, "mixed up", 3, status=1)  # torchrun's status of a worker's 2
    assert "--lr is 0.5 on rank 2 and 0.01 on rank 0" in done.stderr
    assert "all ranks need the same command" in done.stderr and "Traceback" not in done.stderr.split("error:")[0]
    assert not train.runs.exists()


def test_ranks_meet_in_a_new_round_whatever_an_earlier_one_left_in_the_store():
    store, deadline = dist.HashStore(), time.monotonic() + 60
    for start in range(2):
        with ThreadPoolExecutor(2) as pool:
            join = lambda rank, start=start: world.join_round(store, rank, 3, f"10.0.{start}.{rank}", deadline)  # noqa: E731
            others = [pool.submit(join, rank) for rank in (1, 2)]
            time.sleep(0.3)  # they see only the earlier round
            parts = [join(0), *(other.result() for other in others)]
        for part in parts:
            found = [part.get(str(rank)).decode().split()[0] for rank in range(3)]
            assert found == [f"10.0.{start}.{rank}" for rank in range(3)]


@pytest.mark.parametrize(
    "rank, port, status, said",
    [
        (0, 0, 1, "{port} within 0:00:03 (timeout_minutes): 2 of 3 ranks are missing, such as [1, 2]; run the same"),
        (1, 0, 1, "within 0:00:03 (timeout_minutes): no answer; if rank 0 is up, set GLOO_SOCKET_IFNAME (here not set)"),
        (0, "", 2, "error: MASTER_ADDR and MASTER_PORT must be the host and port of rank 0"),
    ],
)
def test_a_rank_that_waits_for_others_ends_in_time_and_says_for_whom_it_waited(train, rank, port, status, said):
    if port == 0:
        port = free_port()
    env = dict(RANK=rank, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    done = train("alone", env={name: str(value) for name, value in env.items()}, timeout_minutes=3 / 60, status=status)
    assert said.format(port=port) in done.stderr and "Traceback" not in done.stderr
    assert not train.runs.exists()


@pytest.mark.parametrize(
    "ranks, flags", [(3, {}), (4, {"strategy": "fsdp", "replicate": 2, "micro_batch_size": 2})]
)  # the second has groups of two
def test_a_rank_that_hangs_ends_the_others_in_time_with_one_line(train, ranks, flags):
    hangs = before_update(2, f"os.environ['RANK'] == '0' and os.kill(os.getpid(), {signal.SIGSTOP:d})")  # it holds the store
    script = train.runs.parent / "hangs.py"
    script.write_text(CHANGED.format(change=hangs))
    flags = flags | dict(script=script, steps=100, timeout_minutes=0.1, save_every=0, eval_every=0)
    # Each is started by itself: torchrun ends all ranks once one has ended, perhaps before the others have said anything.
    job = dict(WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    places = [job | dict(RANK=rank, LOCAL_RANK=rank) for rank in range(ranks)]
    started = [train.start("hangs", env={name: str(value) for name, value in place.items()}, **flags) for place in places]
    for rank, process in enumerate(started[1:], 1):
        errors = process.communicate(timeout=PATIENCE)[1]
        line = rf"error: rank {rank} lost the other ranks: .+; run the same command again on all nodes \[rank {rank}\]\n"
        assert process.returncode == 1 and re.fullmatch(line, errors), errors


STUCK = """if os.environ['RANK'] == '1':
            import time
            while len(list(run.log.directory.glob("stuck*"))) < 2:
                time.sleep(0.1)
            time.sleep(1)  # until the others are stuck
            os._exit(9)
        (run.log.directory / f"stuck{run.world.rank}").touch()
        import ctypes, signal  # as in a wait for a kernel of NCCL: no Python code runs, whatever the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
        ctypes.CDLL(None).sleep(600)"""


def test_ranks_that_are_stuck_end_once_another_is_lost(train):
    script = train.runs.parent / "stuck.py"
    script.write_text(CHANGED.format(change=before_update(2, STUCK)))
    process = train.start("stuck", 3, script=script, steps=100)
    _, errors = process.communicate(timeout=PATIENCE)
    for rank in (0, 2):
        assert f"error: rank {rank} lost rank 1, for which it was waiting; run the same command again on all nodes" in errors
    status = json.loads((train.runs / "stuck" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 2) and status["reason"].startswith("rank 0 lost rank 1")


NCCL = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:94, unhandled system error (run with NCCL_DEBUG=INFO)
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
{}
Exception raised from checkForNCCLErrors"""


@pytest.mark.parametrize(
    "last, expected",
    [
        (
            "Error while creating shared memory segment /dev/shm/nccl-NzwJ7O (size 9637888), error: No space left on device",
            "rank 0: NCCL has too little shared memory: {}; start the container with --ipc=host or --shm-size=1g",
        ),
        ("Cuda failure 2 'out of memory'", "rank 0: NCCL has too little GPU memory: {}; lower --micro_batch_size"),
        ("Failed to CUDA calloc 6291456 bytes", "rank 0: NCCL has too little GPU memory: {}; lower --micro_batch_size"),
        (
            "socketProgress: Connection closed by remote peer node1<51159>",
            "rank 0 lost the other ranks: {}; run the same command again on all nodes",
        ),
    ],
)
def test_the_last_error_of_nccl_says_whether_ranks_or_memory_are_missing(monkeypatch, last, expected):
    monkeypatch.setattr(world, "Watch", lambda *_: contextlib.nullcontext())
    ours = world.World(0, 2, 2, torch.device("cpu"))
    with pytest.raises(RunError) as found, ours.reporting_lost_ranks():
        raise dist.DistBackendError(NCCL.format(last))
    assert str(found.value) == expected.format(last)


def test_garbage_is_collected_at_the_same_steps_on_all_ranks(train):
    notes = train.runs.parent / "collections"
    facts = "run.state.step, gc.isenabled(), gc.get_freeze_count() > 0, gc.get_stats()[2]['collections']"
    note = f"print({facts}, file=open('{notes}' + os.environ['RANK'], 'a'))"
    train.changed(f"import gc\ntrain.COLLECT_EVERY = 3\n{before_update('run.state.step', note)}", "garbage", 2, steps=8)
    for rank in range(2):
        rows = [line.split() for line in Path(f"{notes}{rank}").read_text().splitlines()]
        assert all(row[1:3] == ["False", "True"] for row in rows)
        counts = [int(row[3]) - int(rows[0][3]) for row in rows]
        assert counts == [0, 0, 0, 1, 1, 1, 2, 2]


def test_ranks_that_are_done_do_not_wait_for_a_master_that_died(train):
    dies = "from lockstep.reports.log import Log\ndef close(self, status, original=Log.close):\n    original(self, status)\n"
    dies += "    if os.environ['RANK'] == '0':\n        os._exit(9)\nLog.close = close"
    train.changed(dies, "dies", 3, steps=1, eval_every=0, status=1)  # within PATIENCE, which is less than timeout_minutes


@pytest.mark.parametrize("variables, status, said", [
    ({}, 1, "rank 0 cannot listen on port {port}: address already in use; end the process that uses it, or choose"),
    (dict(GLOO_SOCKET_IFNAME="lo,nope0"), 2, "GLOO_SOCKET_IFNAME=lo,nope0: this machine has only the network interfaces lo"),
])  # fmt: skip
def test_a_rank_that_cannot_be_reached_says_why(train, variables, status, said):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **variables)
        assert f"error: {said.format(port=port)}" in train("alone", env=env, status=status).stderr
