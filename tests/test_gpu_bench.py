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
def test_every_question_is_answered_on_a_cpu_and_nothing_is_measured_twice(tmp_path):
    results, out = sorted(machine.RESULTS.iterdir()), tmp_path / "out"
    printed = ask(tmp_path, "--tiny=true", f"--out={out}")
    titles = [title for title, _ in gpu.questions()]
    assert "tyro is not installed" in printed and "wandb is not installed" in printed
    assert f"{len(titles)} of {len(titles)} questions are answered" in printed
    (record,) = json.loads((out / "gpu.json").read_text()).values()
    assert sorted(record["answers"]) == sorted(titles) and all(answer["passed"] for answer in record["answers"].values())
    run = record["measurements"]["training gpt2_124m W=1"]["value"]
    assert 0 < len(run["update_ms"]) <= 6 - gpu_probe.FIRST_UPDATES + 1 and run["memory_gb"] > 0 and run["first_update_s"] > 0

    # What another call finds is not measured again; what is lost is.
    (name,) = (records := json.loads((out / "gpu.json").read_text()))
    lost = "sha256 exact W=2"
    sha256 = records[name]["measurements"].pop(lost)
    record_file = tmp_path / "record.json"
    record_file.write_text(json.dumps(records))
    flags = [f"--out={tmp_path / 'again'}", f"--record={record_file}", "--ask=one sha256"]
    assert "One sha256 on 1, 2, 3, 4 ranks." in (printed := ask(tmp_path, "--tiny=true", *flags))
    assert "1 of 1 questions are answered" in printed
    again = json.loads((tmp_path / "again" / "gpu.json").read_text())[name]["measurements"]
    assert again.pop(lost) == sha256 and again == records[name]["measurements"]
    assert sorted(machine.RESULTS.iterdir()) == results


def test_without_a_gpu_nothing_is_measured_or_written(tmp_path):
    assert "error: no CUDA device" in ask(tmp_path, f"--out={tmp_path / 'out'}", status=2)
    assert "error: --minutes=1 must be at least" in ask(tmp_path, "--minutes=1", status=2)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def bench(tmp_path):
    """A Bench whose time is over: it knows only what a test puts into its record."""
    record = {"facts": {"datasheet_flops": 989e12}, "measurements": {}, "answers": {}}
    return gpu.Bench(record, tmp_path, "cpu", False, deadline=0.0, ranks=1, nanogpt="", save=lambda: None)


def known(bench, name, value, files=("kernels.py",)):
    """Put a measurement into the record."""
    bench.record["measurements"][name] = {"code": gpu.code_digest(files), "value": value}


def timed(milliseconds, **more):
    """A run whose updates took so long, without noise."""
    run = {"update_ms": [milliseconds] * 10, "tokens_per_update": 1000, "micro_batch_size": 8}
    return run | {"memory_gb": 10.0, "data_wait_ms": 0.01, "first_update_s": 9.0} | more


def test_what_the_minutes_do_not_suffice_for_is_left_and_what_is_known_is_not(bench):
    known(bench, "sums", 3)
    known(bench, "old sums", 3, files=("optim.py",))  # of other code
    listed = {
        "unknown": lambda bench: gpu.Answer(str(bench.operation("more sums", sum, (1, 2)))),
        "old": lambda bench: gpu.Answer(str(bench.operation("old sums", sum, (1, 2)))),
        "known": lambda bench: gpu.Answer(str(bench.operation("sums", sum, (1, 2)))),
        "broken": lambda bench: (_ for _ in ()).throw(RunError("out of memory")),
        "elsewhere": lambda bench: bench.needs_gpu(),
    }
    assert gpu.ask_all(bench, listed) == 2
    answers = bench.record["answers"]
    assert [*answers] == ["known", "broken", "elsewhere"] and answers["known"]["verdict"] == "3"
    assert answers["broken"]["verdict"] == "Could not be measured: out of memory" and not answers["broken"]["passed"]
    assert answers["elsewhere"]["verdict"] == "Impossible here: it needs a GPU." and answers["elsewhere"]["passed"]
    bench.deadline = float("inf")
    assert gpu.ask_all(bench, listed) == 0 and answers["unknown"]["verdict"] == answers["old"]["verdict"] == "3"


def test_what_was_measured_is_saved_at_once_and_what_failed_is_tried_once(bench):
    bench.deadline, tries, saved = float("inf"), [], []
    bench.save = lambda: saved.append([*bench.record["measurements"]])

    def failing(folder):
        tries.append(folder)
        raise RunError("out of memory")

    bench.measure("first", lambda folder: 1, (), 60)
    for _ in range(2):
        with pytest.raises(RunError, match="out of memory"):
            bench.measure("second", failing, (), 60)
    assert len(tries) == 1 and saved == [["first"]]


def test_a_large_model_gets_more_time(bench):
    assert gpu.LIMIT < bench.limit("gpt2_124m") < bench.limit("llama_1.3b") < 300


@pytest.mark.parametrize("other, said", [(125, "costs 20.0%"), (80, "gains 25.0%"), (100.1, "nothing that can be measured")])
def test_the_verdict_on_other_settings(bench, other, said):
    bench.train = lambda shape, compile="on", **changes: timed(100 if compile == "on" else other)
    assert said in gpu.change(bench, "gpt2_124m", "--compile=off", compile="off").verdict
    noisy = timed(100, update_ms=[50, 75, 100, 125, 150])
    bench.train = lambda shape, compile="on", **changes: noisy if compile == "on" else timed(other)
    assert "nothing that can be measured" in gpu.change(bench, "gpt2_124m", "--compile=off", compile="off").verdict


def test_the_verdict_on_speed_is_of_the_best_settings_and_holds_it_against_both_peaks(bench):
    known(bench, "fastest matrix product", 494.5e12)
    bench.train = lambda shape, deterministic=True, **more: timed(20 if deterministic else 10)
    answer = gpu.speed_of(bench, "gpt2_124m")
    assert answer.verdict.startswith("100,000 tokens/s, --deterministic=false") and "as it is 50,000" in answer.verdict
    assert answer.figures["MFU of the matmul"] == pytest.approx(2 * answer.figures["MFU of the datasheet"])
    bench.record["facts"]["datasheet_flops"] = None
    assert "datasheet" not in gpu.speed_of(bench, "gpt2_124m").verdict


def test_a_broken_promise_is_seen(bench):
    bench.digests = lambda name, ranks, **changes: {"resumed": False, "sha256": {"model": str(ranks)}}
    assert not gpu.exact_worlds(bench).passed and "BROKEN" in gpu.exact_worlds(bench).verdict
    bench.digests = lambda name, ranks, **changes: {"resumed": False, "sha256": {"model": "a"}}
    assert gpu.exact_worlds(bench).passed

    def resumed(sha256, resumed=True):
        killed = {"resumed": resumed, "sha256": sha256}
        bench.digests = lambda *_, kill_after=0, **__: killed if kill_after else {"resumed": False, "sha256": "a"}
        return gpu.resume(bench).passed

    assert resumed("a") and not resumed("b")
    assert not resumed("a", resumed=False)  # the run began anew, which proves nothing


def test_the_verdict_on_kernels_names_the_fastest_that_keeps_its_bits(bench):
    times = {
        "deterministic": {"the trainer's": 2.0, "CUDNN": None, "FLASH 3": 1.0},
        "free": {"the trainer's": 1.5, "CUDNN": 0.5, "OTHER": None},
    }
    bench.operation = lambda name, *_: times[name.split()[-1]]
    verdict = gpu.attention(bench, "gpt2_124m").verdict
    assert "use FLASH 3" in verdict and "the fastest of all is CUDNN with 0.5 ms; not offered here: OTHER" in verdict
    times["deterministic"]["the trainer's"] = 1.0
    assert "The trainer's kernel (1 ms) is the fastest deterministic one" in gpu.attention(bench, "gpt2_124m").verdict


def test_two_runs_differ_in_precision_alone_if_they_learn_the_same(bench):
    def losses(full, half):
        bench.train = lambda *_, dtype, **__: {"losses": full if dtype == "float32" else half}
        return gpu.learns_alike(bench, {"dtype": "float32"}, {"dtype": "bfloat16"}, most=0.02).passed

    assert losses([10, 9], [10, 9.1]) and not losses([10, 9], [10, 9.5]) and not losses([10, 10], [10, 10])


def test_a_fork_that_fails_says_why_and_one_that_hangs_is_killed(tmp_path, capsys):
    (tmp_path / "b").mkdir()
    with capsys.disabled(), pytest.raises(RunError, match="failed within 60 s: ZeroDivisionError"):
        machine.in_forks(lambda: 1 / 0, folder=tmp_path, limit=60)
    with pytest.raises(RunError, match="was not done within 0 s"):
        machine.in_forks(lambda: __import__("time").sleep(60), folder=tmp_path / "b", limit=0.3)
    assert machine.in_forks(lambda: [1, None], folder=tmp_path / "b", limit=60) == [[1, None]]
