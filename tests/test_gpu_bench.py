"""bench/gpu.py goes through every question on a CPU, keeps its answers, and draws the right conclusion from measurements."""

import json
import sys
import time

import pytest

import forks
import gpu
import gpu_probe
from common.errors import RunError
from conftest import execute

# As on a machine where neither is installed.
WITHOUT = "import sys\nsys.modules['tyro'] = sys.modules['wandb'] = None\n"


def ask(folder, *flags, status=0):
    """Run bench/gpu.py where tyro and wandb are missing. Returns what it prints."""
    (folder / "sitecustomize.py").write_text(WITHOUT)
    command = [sys.executable, "bench/gpu.py", *flags]
    done = execute(command, status, env={"PYTHONPATH": str(folder)}, timeout=1800, fork=False)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_question_is_answered_on_a_cpu_and_nothing_is_measured_twice(tmp_path):
    out = tmp_path / "out"
    printed = ask(tmp_path, "--tiny=true", f"--out={out}")
    titles = [title for title, _ in gpu.questions()]
    assert "tyro is not installed" in printed and "wandb is not installed" in printed
    assert f"{len(titles)} of {len(titles)} questions are answered" in printed
    (record,) = json.loads((out / "gpu.json").read_text()).values()
    assert sorted(record["answers"]) == sorted(titles) and all(answer["passed"] for answer in record["answers"].values())
    run = record["measurements"]["training gpt2_124m turn 1"]
    assert 0 < len(run["update_ms"]) <= 6 - gpu_probe.UNTIMED + 1 and run["memory_gb"] > 0 and run["first_update_s"] > 0

    # What another call finds is not measured again; what is lost is.
    (record,) = (records := json.loads((out / "gpu.json").read_text())).values()
    lost = record["measurements"].pop("sha256 exact W=2")
    (out / "gpu.json").write_text(json.dumps(records))
    printed = ask(tmp_path, "--tiny=true", f"--out={out}", "--ask=exact give one sha256")
    assert "One sha256 on 1, 2, 3, 4 ranks." in printed and "1 of 1 questions are answered" in printed
    (again,) = json.loads((out / "gpu.json").read_text()).values()
    assert again["measurements"].pop("sha256 exact W=2") == lost and again["measurements"] == record["measurements"]


def test_without_a_gpu_nothing_is_measured_or_written(tmp_path):
    assert "error: no CUDA device" in ask(tmp_path, f"--out={tmp_path / 'out'}", status=2) and not (tmp_path / "out").exists()


@pytest.fixture
def bench(tmp_path):
    """A Bench whose time is over: it knows only what a test puts into its record."""
    record = {"datasheet_flops": 989e12, "measurements": {}, "answers": {}}
    return gpu.Bench(record, tmp_path, "cpu", False, deadline=0.0, nanogpt="", save=lambda: None)


def test_a_broken_promise_is_seen(bench):
    bench.digests = lambda name, ranks, **changes: {"resumed": False, "sha256": {"model": str(ranks)}}
    with pytest.raises(RunError, match="different weights on 1, 2, 3, 4 ranks"):
        gpu.exact_worlds(bench)
    bench.digests = lambda name, ranks, **changes: {"resumed": False, "sha256": {"model": "a"}}
    assert gpu.exact_worlds(bench) == "One sha256 on 1, 2, 3, 4 ranks."

    killed = {"resumed": True, "sha256": "a"}
    bench.digests = lambda *_, kill_after=0, **__: killed if kill_after else {"resumed": False, "sha256": "a"}
    assert "bit for bit" in gpu.resume(bench)
    for fault, words in (({"sha256": "b"}, "not the same"), ({"resumed": False}, "started over")):  # which proves nothing
        killed |= {"resumed": True, "sha256": "a"} | fault
        with pytest.raises(RunError, match=words):
            gpu.resume(bench)

    bench.device, losses = "cuda", [10, 9.01]
    bench.train = lambda *_, device, **__: {"losses": [10, 9] if device == "cpu" else losses}
    assert gpu.learns_as_on_a_cpu(bench).startswith("Yes: while the loss fell by 1.00")
    losses[1] = 9.1
    with pytest.raises(RunError, match=r"differed by at most 1\.111%"):
        gpu.learns_as_on_a_cpu(bench)


def test_a_fork_that_fails_says_why_and_one_that_hangs_is_killed(tmp_path, capsys):
    (tmp_path / "b").mkdir()
    with capsys.disabled(), pytest.raises(RunError, match="failed within 60 s: ZeroDivisionError"):
        forks.in_forks(lambda: 1 / 0, folder=tmp_path, limit=60)
    with pytest.raises(RunError, match="was not done within 0 s"):
        forks.in_forks(lambda: __import__("time").sleep(60), folder=tmp_path / "b", limit=0.3)
    assert forks.in_forks(lambda: [1, None], folder=tmp_path / "b", limit=60) == [[1, None]]


def test_a_cold_compiler_cache_may_take_what_is_left_of_the_minutes(bench, monkeypatch):
    now, given = time.monotonic(), []
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now)
    run = lambda at, limit: given.append(limit)  # noqa: E731
    for left, limit in ((1000, 100 + gpu.COLD), (200, 200), (100.5, 100.5)):
        bench.deadline = now + left
        bench.measure(f"with {left} s left", run, 100)
        assert given[-1] == pytest.approx(limit, abs=0.4)
    bench.deadline = now + 99
    with pytest.raises(gpu.OutOfTime):
        bench.measure("with too few", run, 100)


def test_what_needs_two_gpus_says_so_on_one(bench):
    bench.record["gpus"] = ["NVIDIA H100"]
    with pytest.raises(gpu.Impossible, match="two GPUs"):
        gpu.overlapped(bench, "gpt2_124m")
