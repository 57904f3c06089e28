"""bench/gpu.py goes through every question on a CPU, keeps its answers, and draws the right conclusion from measurements."""

import json
import subprocess
import sys

import pytest

import gpu
import gpu_probe
import machine
from common.errors import RunError
from conftest import ROOT, environment

# As on a machine where neither is installed.
WITHOUT = "import sys\nsys.modules['tyro'] = sys.modules['wandb'] = None\n"


def ask(folder, *flags, status=0):
    """Run bench/gpu.py where tyro and wandb are missing. Returns what it prints."""
    (folder / "sitecustomize.py").write_text(WITHOUT)
    command = [sys.executable, "bench/gpu.py", *flags]
    env = environment(PYTHONPATH=str(folder))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_question_is_answered_on_a_cpu_and_no_answer_is_asked_for_twice(tmp_path):
    results = sorted(machine.RESULTS.iterdir())
    out = tmp_path / "out"
    printed = ask(tmp_path, "--tiny=true", f"--out={out}")
    titles = [title for title, _ in gpu.questions(1, tiny=True)]
    assert "tyro is not installed" in printed and "wandb is not installed" in printed
    assert f"{len(titles)} of {len(titles)} questions are answered" in printed
    (record,) = json.loads((out / "gpu.json").read_text()).values()
    assert sorted(record["answers"]) == sorted(titles) and all(answer["passed"] for answer in record["answers"].values())
    run = record["measurements"]["training gpt2_124m W=1"]
    assert 0 < len(run["update_ms"]) <= 6 - 1 - gpu_probe.FIRST_UPDATES and run["memory_gb"] > 0 and run["first_update_s"] > 0
    page = (out / "gpu.md").read_text()
    assert all(f"| {title} | " in page for title in titles)

    # A part of the answers is lost: only that part is asked again.
    (name,) = (records := json.loads((out / "gpu.json").read_text()))
    lost = "Is --strategy=exact one sha256 on any number of ranks?"
    sha256 = records[name]["answers"].pop(lost)["figures"]
    del records[name]["measurements"]["sha256 exact W=2"]
    (out / "gpu.json").write_text(json.dumps(records))
    printed = ask(tmp_path, "--tiny=true", f"--out={out}")
    assert printed.count("\n    ") == 1 and f"{lost}\n    One sha256 on 1, 2 ranks." in printed
    assert json.loads((out / "gpu.json").read_text())[name]["answers"][lost]["figures"] == sha256
    assert sorted(machine.RESULTS.iterdir()) == results


def test_without_a_gpu_nothing_is_measured_or_written(tmp_path):
    assert "error: no CUDA device" in ask(tmp_path, f"--out={tmp_path / 'out'}", status=2)
    assert "error: --minutes=1 must be at least" in ask(tmp_path, "--minutes=1", status=2)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def bench(tmp_path):
    """A Bench whose time is over: it knows only what a test puts into its record."""
    record = {"facts": {"datasheet_flops": 989e12}, "measurements": {}, "answers": {}}
    no_time = dict(deadline=0.0, limit=gpu.LIMIT)
    return gpu.Bench(record, tmp_path, tmp_path / "tokens", "cpu", tiny=False, ranks=1, save=lambda: None, **no_time)


def timed(milliseconds, **more):
    """A run whose updates took so long, without noise."""
    run = {"update_ms": [milliseconds] * 10, "tokens_per_update": 1000, "micro_batch_size": 8, "dtype": "bfloat16"}
    return run | {"memory_gb": 10.0, "data_wait_ms": 0.01, "logged_ms": milliseconds} | more


def test_what_the_minutes_do_not_suffice_for_is_left(bench):
    bench.record["measurements"]["sums"] = 3
    listed = {
        "known": lambda bench: gpu.Answer(str(bench.operation("sums", sum, (1, 2)))),
        "broken": lambda bench: (_ for _ in ()).throw(RunError("out of memory")),
        "unknown": lambda bench: gpu.Answer(str(bench.operation("more sums", sum, (1, 2)))),
        "last": lambda bench: gpu.Answer("never asked"),
    }
    assert gpu.ask_all(bench, listed) == 2
    answers = bench.record["answers"]
    assert [*answers] == ["known", "broken"] and answers["known"]["verdict"] == "3"
    assert answers["broken"]["verdict"] == "Could not be measured: out of memory" and not answers["broken"]["passed"]
    bench.deadline = float("inf")
    assert gpu.ask_all(bench, listed) == 0
    assert answers["unknown"]["verdict"] == "3" and answers["broken"]["failed"]  # it was asked once more, after the others


def test_what_was_measured_is_saved_at_once_and_what_failed_is_tried_once(bench):
    bench.deadline, tries, saved = float("inf"), [], []
    bench.save = lambda: saved.append([*bench.record["measurements"]])

    def failing(folder, limit):
        tries.append(limit)
        raise RunError("out of memory")

    bench.measure("first", lambda folder, limit: limit)
    for _ in range(2):
        with pytest.raises(RunError, match="out of memory"):
            bench.measure("second", failing, runs=2)
    assert tries == [2 * gpu.LIMIT] and saved == [["first"]] and bench.record["measurements"] == {"first": gpu.LIMIT}


@pytest.mark.parametrize(
    "free, said", [(96, "cost 4.0%: keep them on"), (80, "find the operation"), (99.9, "nothing that can be measured")]
)
def test_the_verdict_on_deterministic_kernels(bench, free, said):
    bench.train = lambda shape, deterministic=True, **changes: timed(100 if deterministic else free)
    assert said in gpu.deterministic(bench, "gpt2_124m").verdict


def test_noise_is_not_a_cost(bench):
    noisy = timed(100, update_ms=[90, 95, 100, 105, 110])
    bench.train = lambda shape, deterministic=True, **changes: noisy if deterministic else timed(98)
    assert "cost nothing that can be measured" in gpu.deterministic(bench, "gpt2_124m").verdict


def test_the_verdict_on_speed_holds_it_against_both_peaks(bench):
    bench.record["measurements"]["fastest matrix product"] = 494.5e12
    bench.train = lambda shape: timed(10)
    answer = gpu.speed(bench, "gpt2_124m")
    assert answer.figures["tokens/s"] == pytest.approx(1e5)
    assert answer.figures["MFU of the matmul"] == pytest.approx(2 * answer.figures["MFU of the datasheet"])
    bench.record["facts"]["datasheet_flops"] = None
    assert "datasheet" not in gpu.speed(bench, "gpt2_124m").verdict


def test_a_broken_promise_is_seen(bench):
    bench.digests = lambda name, ranks, **changes: {"updates": 12, "sha256": {"model": str(ranks)}}
    assert not gpu.exact_worlds(bench).passed and "BROKEN" in gpu.exact_worlds(bench).verdict
    bench.digests = lambda name, ranks, **changes: {"updates": 12, "sha256": {"model": "a"}}
    assert gpu.exact_worlds(bench).passed

    def resumed(sha256, updates):
        killed = {"updates": updates, "sha256": sha256}
        bench.digests = lambda *_, kill_after=0, **__: killed if kill_after else {"updates": 12, "sha256": "a"}
        return [gpu.resume(bench, 1, variables).passed for variables in ({}, {"NCCL_NVLS_ENABLE": "1"})]

    assert resumed("a", 8) == [True, True]
    assert resumed("b", 8) == [False, True]  # with NVLS, which the trainer switches off, nothing is promised
    assert resumed("a", 12) == [False, False]  # the run began anew, which proves nothing


def test_the_verdict_on_kernels_names_the_fastest_that_keeps_its_bits(bench):
    times = {
        "deterministic": {"the trainer's": 2.0, "CUDNN": None, "FLASH 3": 1.0},
        "free": {"the trainer's": 1.5, "CUDNN": 0.5},
    }
    bench.operation = lambda name, *_: times[name.split()[-1]]
    verdict = gpu.attention(bench, "gpt2_124m").verdict
    assert "use FLASH 3" in verdict and "the fastest of all is CUDNN with 0.5 ms" in verdict
    times["deterministic"]["the trainer's"] = 1.0
    assert "The trainer's kernel (1 ms) is the fastest deterministic one" in gpu.attention(bench, "gpt2_124m").verdict


def test_two_runs_differ_in_precision_alone_if_they_learn_the_same(bench):
    def losses(full, half):
        bench.train = lambda *_, dtype, **__: {"losses": full if dtype == "float32" else half}
        return gpu.precision(bench).passed

    assert losses([10, 9], [10, 9.1]) and not losses([10, 9], [10, 9.5]) and not losses([10, 10], [10, 10])


def test_the_trainer_is_clocked_from_norm_to_norm(tmp_path):
    engine = type("Engine", (), {"clip": lambda self, limit: 2 * limit})
    gpu_probe.note_norms(engine, tmp_path / "norms")
    assert [engine().clip(1.0), engine().clip(2.0)] == [2.0, 4.0]
    first, second = map(float, (tmp_path / "norms").read_text().split())
    assert first <= second


def test_a_fork_that_fails_says_why_and_one_that_hangs_is_killed(tmp_path, capsys):
    with capsys.disabled(), pytest.raises(RunError, match="failed within 60 s: ZeroDivisionError"):
        gpu_probe.in_fork(lambda: 1 / 0, folder=tmp_path, limit=60)
    with pytest.raises(RunError, match="was not done within 0 s"):
        gpu_probe.in_fork(lambda: __import__("time").sleep(60), folder=tmp_path, limit=0.3)
    assert gpu_probe.in_fork(lambda: [1, None], folder=tmp_path, limit=60) == [1, None]


def test_the_page_has_a_row_for_each_shape_and_each_question():
    answers = {
        "gpt2_124m: how fast does it train?": {
            "verdict": "fast | enough",
            "figures": {"tokens/s": 1e5, "MFU of the datasheet": None},
        },
        "Does training wait for data?": {"verdict": "no", "figures": {}},
    }
    page = gpu.markdown("1 x GPU", {"answers": answers, "facts": {"torch": "2.13"}})
    assert "| gpt2_124m | 100,000 |  |  |" in page and "| Does training wait for data? | no |" in page
    assert "fast / enough" in page and "torch 2.13" in page
