"""bench/gpu.py goes through every question on a CPU, keeps its answers, and draws the right conclusion from measurements."""

import json
import re
import sys

import pytest

import forks
import gpu
import gpu_probe
import machine
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
    results, out = sorted(machine.RESULTS.iterdir()), tmp_path / "out"
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
    printed = ask(tmp_path, "--tiny=true", f"--out={out}", "--ask=one sha256")
    assert "One sha256 on 1, 2, 3, 4 ranks." in printed and "1 of 1 questions are answered" in printed
    (again,) = json.loads((out / "gpu.json").read_text()).values()
    assert again["measurements"].pop("sha256 exact W=2") == lost and again["measurements"] == record["measurements"]
    assert sorted(machine.RESULTS.iterdir()) == results


def test_without_a_gpu_nothing_is_measured_or_written(tmp_path):
    assert "error: no CUDA device" in ask(tmp_path, f"--out={tmp_path / 'out'}", status=2)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def bench(tmp_path):
    """A Bench whose time is over: it knows only what a test puts into its record."""
    record = {"datasheet_flops": 989e12, "measurements": {}, "answers": {}}
    return gpu.Bench(record, tmp_path, "cpu", False, deadline=0.0, nanogpt="", save=lambda: None)


def timed(milliseconds, **more):
    """A run whose updates took so long, without noise."""
    run = {"update_ms": [milliseconds] * 10, "tokens_per_update": 1000, "micro_batch_size": 8}
    return run | {"memory_gb": 10.0, "first_update_s": 9.0} | more


def test_what_the_minutes_do_not_suffice_for_is_left_and_what_is_known_is_not(bench):
    bench.record["measurements"]["sums"] = 3
    listed = {
        "unknown": lambda bench: str(bench.operation("more sums", sum, (1, 2))),
        "known": lambda bench: str(bench.operation("sums", sum, (1, 2))),
        "broken": lambda bench: (_ for _ in ()).throw(RunError("out of memory")),
        "elsewhere": gpu.against_nanogpt,
    }
    assert gpu.ask_all(bench, listed) == 1
    answers = bench.record["answers"]
    assert [*answers] == ["known", "broken", "elsewhere"] and answers["known"]["verdict"] == "3"
    assert answers["broken"] == {"verdict": "FAILED: out of memory", "passed": False}
    assert answers["elsewhere"]["verdict"].startswith("Impossible here: it needs a GPU") and answers["elsewhere"]["passed"]
    bench.deadline = float("inf")
    assert gpu.ask_all(bench, listed) == 0 and answers["unknown"]["verdict"] == "3"


def test_what_was_measured_is_saved_at_once_and_what_failed_is_tried_once(bench):
    bench.deadline, tries, saved = float("inf"), [], []
    bench.save = lambda: saved.append([*bench.record["measurements"]])

    def failing(folder):
        tries.append(folder)
        raise RunError("out of memory")

    bench.measure("first", lambda folder: 1, 60)
    for _ in range(2):
        with pytest.raises(RunError, match="out of memory"):
            bench.measure("second", failing, 60)
    assert len(tries) == 1 and saved == [["first"]]


def test_the_verdict_on_other_settings(bench):
    bench.train = lambda shape, compile="on", **changes: timed(100 if compile == "on" else 125, memory_gb=len(changes) + 1)
    verdict = "An update takes 1.250 times as long, and 2 GB instead of 1."
    assert gpu.change(bench, "gpt2_124m", compile="off") == verdict


def test_the_verdict_on_speed_is_of_the_best_settings_and_holds_it_against_both_peaks(bench):
    bench.record["measurements"]["matrix product"] = 494.5e12
    bench.train = lambda shape, deterministic=True, **more: timed(0.2 if deterministic else 0.1)
    verdict = gpu.speed_of(bench, "gpt2_124m")
    assert verdict.startswith("10,000,000 tokens/s, --deterministic=false") and "as it is 5,000,000" in verdict
    matmul, datasheet = (float(share) for share in re.findall(r"([\d.]+)% of the", verdict))
    assert matmul == pytest.approx(2 * datasheet, rel=0.01)
    bench.record["datasheet_flops"] = None
    assert "datasheet" not in gpu.speed_of(bench, "gpt2_124m")


def test_a_broken_promise_is_seen(bench):
    bench.digests = lambda name, ranks, **changes: {"resumed": False, "sha256": {"model": str(ranks)}}
    with pytest.raises(RunError, match="different weights on 1, 2, 3, 4 ranks"):
        gpu.exact_worlds(bench)
    bench.digests = lambda name, ranks, **changes: {"resumed": False, "sha256": {"model": "a"}}
    assert gpu.exact_worlds(bench) == "One sha256 on 1, 2, 3, 4 ranks."

    def resume(sha256, resumed=True):
        killed = {"resumed": resumed, "sha256": sha256}
        bench.digests = lambda *_, kill_after=0, **__: killed if kill_after else {"resumed": False, "sha256": "a"}
        return gpu.resume(bench)

    assert "bit for bit" in resume("a")
    with pytest.raises(RunError, match="not the same"):
        resume("b")
    with pytest.raises(RunError, match="began anew"):  # which proves nothing
        resume("a", resumed=False)


def test_a_device_on_which_a_model_learns_otherwise_is_seen(bench):
    def compare(other):
        bench.device = "cuda"
        bench.train = lambda *_, device, **__: {"losses": [10, 9] if device == "cpu" else other}
        return gpu.learns_as_on_a_cpu(bench)

    assert compare([10, 9.01]).startswith("Yes: while the loss fell by 1.00")
    with pytest.raises(RunError, match=r"differed by at most 1\.111%"):
        compare([10, 9.1])


def test_a_fork_that_fails_says_why_and_one_that_hangs_is_killed(tmp_path, capsys):
    (tmp_path / "b").mkdir()
    with capsys.disabled(), pytest.raises(RunError, match="failed within 60 s: ZeroDivisionError"):
        forks.in_forks(lambda: 1 / 0, folder=tmp_path, limit=60)
    with pytest.raises(RunError, match="was not done within 0 s"):
        forks.in_forks(lambda: __import__("time").sleep(60), folder=tmp_path / "b", limit=0.3)
    assert forks.in_forks(lambda: [1, None], folder=tmp_path / "b", limit=60) == [[1, None]]
