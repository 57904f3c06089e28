"""What is decided before the ranks meet: NCCL and cuBLAS read their variables when they start."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import settings
from conftest import CHANGED, before_update, execute, wait_for
from hardware import device, host
from parallel import world
from planning import choices, plan

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
    monkeypatch.setattr(device, "find_device", lambda name, local_rank, share: torch.device("cuda", local_rank))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.update(current=device))
    monkeypatch.setattr(world, "meet", lambda *place: dist.HashStore())
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
    world.connect("cuda", **options)
    assert gpu_node["current"] == gpu_node["device_id"] == torch.device("cuda", 1)
    assert gpu_node["backend"] == "cpu:gloo,cuda:nccl" and gpu_node["deterministic"] == options["deterministic"]
    assert tuple(map(gpu_node.get, SWITCHES)) == wanted
    assert torch.get_float32_matmul_precision() == "high"  # products in TF32


@pytest.mark.parametrize("times, dtype", [(7.0, "bfloat16"), (1.9, "bfloat16"), (0.8, "float32"), (0.03, "float32")])
def test_auto_takes_the_precision_that_the_cpu_is_fast_at_and_the_plan_does_too(monkeypatch, times, dtype):
    monkeypatch.setattr(device, "product_rates", lambda: {"float32": 1e11, "bfloat16": times * 1e11})
    assert device.choose_dtype("auto", torch.device("cpu")) == dtype
    assert device.choose_dtype("float16", torch.device("cpu")) == "float16"
    config = settings.load(["--optimizer=muon"], "")
    alone = world.World(0, 1, 1, torch.device("cpu"))
    assert choices.choose_precision(config, alone, {}) == {"dtype": dtype, "muon_dtype": dtype}
    options = settings.PlanConfig(plan_gpu="cpu", plan_world_size=1)
    assert plan.make(config, options).config.train.dtype == dtype


def test_a_run_keeps_the_precision_that_it_began_with(monkeypatch):
    monkeypatch.setattr(device, "product_rates", lambda: {"float32": 1e11, "bfloat16": 3e9})
    config, alone = settings.load([], ""), world.World(0, 1, 1, torch.device("cpu"))
    elsewhere = {"device": "cpu", "dtype": "bfloat16", "muon_dtype": "bfloat16"}
    kept = choices.choose_precision(config, alone, elsewhere)
    assert kept == {"dtype": "bfloat16", "muon_dtype": "bfloat16"}
    remark = choices.precision_remarks(settings.replace(config, **kept), alone.device)
    assert len(remark) == 1 and "--dtype=float32 --muon_dtype=float32 would use it" in remark[0]
    # A version without the setting had Muon in bfloat16.
    older = {"device": "cpu", "dtype": "float32"}
    assert choices.choose_precision(config, alone, older) == {"dtype": "float32", "muon_dtype": "bfloat16"}
    # What was on a GPU says nothing about a CPU, and a flag wins.
    assert choices.choose_precision(config, alone, elsewhere | {"device": "cuda"})["dtype"] == "float32"
    assert choices.choose_precision(settings.replace(config, dtype="float16"), alone, elsewhere)["dtype"] == "float16"


def test_what_a_processor_is_fast_at_is_found_beside_other_programs():
    """The rate of a thread is of the time that the processor works for it. Threads that all want the cores do not lower it."""
    cpu = torch.device("cpu")
    quiet = device.fast_at_bfloat16(cpu)
    stop = threading.Event()

    def compute():
        while not stop.is_set():
            torch.ones(512, 512) @ torch.ones(512, 512)

    others = [threading.Thread(target=compute) for _ in range(2 * host.cores())]
    for thread in others:
        thread.start()
    try:
        for _ in range(5):
            device.product_rates.cache_clear()
            assert device.fast_at_bfloat16(cpu) == quiet
    finally:
        stop.set()
        for thread in others:
            thread.join()


@pytest.mark.parametrize("disturbed, seconds, fast", [(45e-3, 0.1e-3, True), (0, 10e-3, False)])
def test_a_processor_that_is_taken_away_for_a_moment_is_not_slow(monkeypatch, disturbed, seconds, fast):
    """Another virtual machine may have the core while the first products are timed, which counts as this thread's time."""
    clock = [0.0]

    def multiply(a, b):  # a product in float32 takes 0.2 ms
        clock[0] += 20e-3 if 0 < clock[0] < disturbed else 0.2e-3 if a.dtype == torch.float32 else seconds

    monkeypatch.setattr(device.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply)
    device.product_rates.cache_clear()
    try:
        assert device.fast_at_bfloat16(torch.device("cpu")) == fast
    finally:
        device.product_rates.cache_clear()


def test_ranks_that_share_cores_share_their_peak_rate(monkeypatch):
    monkeypatch.setattr(device, "peak_flops", lambda on, dtype: 5.0)
    cores, threads = host.cores(), torch.get_num_threads()
    for ranks, peak in ((1, 5.0), (4 * cores, 5.0 * cores / threads)):
        alone = world.World(0, ranks, ranks, torch.device("cpu"))
        assert choices.peak_flops(alone, "float32") == pytest.approx(peak)


@pytest.mark.parametrize(
    "difference, said",
    [
        ("lr=0.5", "--lr is 0.5 on rank 2 and 0.01 on rank 0"),
        ("name='other'", "--name is other on rank 2 and mixed up on rank 0"),
        ("tokens={other!r}", "the sha256 of --tokens is "),
    ],
)
def test_ranks_that_were_started_differently_are_refused(train, tokens, tmp_path, difference, said):
    metadata = json.loads((shutil.copytree(tokens, tmp_path / "other") / "dataset.json").read_text())
    metadata["shards"][0]["sha256"] = "0" * 64
    (tmp_path / "other" / "dataset.json").write_text(json.dumps(metadata))
    change = "load = settings.load\ndef differently(*a):\n    config = load(*a)\n"
    change += f"    return settings.replace(config, {difference.format(other=str(tmp_path / 'other'))}) "
    change += "if os.environ['RANK'] == '2' else config\nsettings.load = differently"
    done = train.changed(change, "mixed up", 3, status=1)  # torchrun's status of a worker's 2
    assert said in done.stderr
    assert "all ranks need the same command" in done.stderr and "Traceback" not in done.stderr.split("error:")[0]
    assert not train.runs.exists()


@pytest.mark.parametrize(
    "rank, port, waits, ends",
    [
        (0, 0, "waiting for 2 of 3 ranks at 127.0.0.1:{port}: ranks 1, 2", "ranks 1, 2 of 3 did not reach 127.0.0.1:{port}"),
        (1, 0, "waiting for rank 0 at 127.0.0.1:{port}", "rank 0 did not answer at 127.0.0.1:{port}"),
        (0, "", "", "MASTER_ADDR and MASTER_PORT do not say where rank 0 is"),
    ],
)
def test_a_rank_that_waits_for_others_says_so_and_ends_in_time(train, rank, port, waits, ends):
    if port == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    env = dict(RANK=rank, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    change, flags = "from parallel import world; world.PATIENCE = 0.3", dict(timeout_minutes=0.02, status=1 if waits else 2)
    done = train.changed(change, "alone", env={name: str(value) for name, value in env.items()}, **flags)
    assert waits.format(port=port) in done.stdout and ends.format(port=port) in done.stderr
    assert not train.runs.exists()


def test_a_rank_does_not_wait_for_a_store_whose_host_hangs(train):
    # Rank 0 holds the store and stops without a word: its kernel still answers for it.
    change = "import signal; from parallel import world; world.PATIENCE = 0.3\n"
    change += before_update(2, "os.environ['RANK'] == '0' and os.kill(os.getpid(), signal.SIGSTOP)")
    script = train.runs.parent / "stops.py"
    script.write_text(CHANGED.format(change=change))
    process = train.start("stops", 2, script=script, steps=100, timeout_minutes=0.03, save_every=0, eval_every=0)
    errors = Path(process.streams[1])
    wait_for(lambda: errors.exists() and "rank 1 no longer hears from the others" in errors.read_text())
    assert "cannot be reached (no answer in 1 s)" in errors.read_text()


@pytest.mark.parametrize(
    "script, variable", [("train.py", "TORCH_LOGS"), ("sample.py", "TORCH_DISTRIBUTED_DEBUG"), ("evaluate.py", "TORCH_LOGS")]
)
def test_a_variable_that_torch_does_not_take_is_named(script, variable):
    done = execute([sys.executable, script, *["x"] * (script != "train.py")], env={variable: "junk"}, status=2, fork=False)
    assert done.stderr.startswith("error: an import failed: ") and variable in done.stderr and "Traceback" not in done.stderr


def test_tasks_of_slurm_without_torchrun_are_warned_of(train):
    told = train("told", steps=1, eval_tokens=16, env={"SLURM_NTASKS": "4"}).stdout
    assert "warning: SLURM_NTASKS=4, but this run has one rank: start torchrun by srun" in told


def test_every_rank_activates_the_attention_kernel_also_in_a_replay(train):
    # It may switch FlashAttention 3 on, for its own process; ranks and replays must not differ.
    note = "from parallel import engine\nactivate = engine.activate_attention_kernel\n"
    note += "def told(*a):\n    print('activated by', os.environ.get('RANK', '0'), flush=True)\n    return activate(*a)\n"
    note += "engine.activate_attention_kernel = told"
    done = train.changed(note, "two", ranks=2, strategy="exact", steps=2, save_every=1, eval_every=0)
    assert "activated by 0" in done.stdout and "activated by 1" in done.stdout
    replayed = note + "\nimport replay\ntrain.main = lambda config: replay.main(replay.ReplayConfig("
    replayed += "config.run.out_dir + '/two', step=2))"
    assert "activated by 0" in train.changed(replayed, "replayed", steps=2).stdout


def test_threads_look_for_work_less_often_beside_a_program_that_computes(monkeypatch):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    try:
        wait_for(lambda: host.spin_count() == 1_000)
        monkeypatch.setattr(os, "cpu_count", lambda: 1000)  # there are cores enough for all
        assert host.spin_count() == 10_000
    finally:
        for process in busy:
            process.kill()
            process.wait()
