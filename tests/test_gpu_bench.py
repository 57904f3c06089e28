"""bench/gpu.py goes through every question on a CPU, keeps its answers, and draws the right conclusion from measurements."""

import json
import sys

import pytest

import forks
import gpu
from conftest import execute
from lockstep.common.errors import RunError

# What an image with PyTorch, transformers and matplotlib has, as far as we import it, and the one package to bring along.
PRESENT = "torch torchgen triton numpy safetensors tokenizers tiktoken tiktoken_ext regex tqdm matplotlib mpl_toolkits pyarrow "
PRESENT += "fsspec huggingface_hub transformers sympy mpmath networkx jinja2 markupsafe filelock typing_extensions packaging "
PRESENT += (
    "requests urllib3 certifi idna charset_normalizer httpx httpcore h11 anyio sniffio yaml PIL contourpy cycler kiwisolver "
)
PRESENT += (
    "dateutil six pyparsing fontTools setuptools pkg_resources functorch hf_xet rich click shellingham typer pygments psutil "
)
PRESENT += "markdown_it mdurl msgspec "
PRESENT += "autocommand backports importlib_metadata jaraco more_itertools platformdirs wheel zipp"  # come with setuptools
# Nothing else can be found, as on a machine that lacks it.
WITHOUT = f"""
import importlib.machinery, sys
PRESENT = set("{PRESENT}".split())
class Present(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        missing = spec and path is None and name not in PRESENT and "site-packages" in (spec.origin or "")
        return None if missing else spec
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Present
"""


def ask(folder, *flags, status=0):
    """Run bench/gpu.py where only PRESENT can be imported. Returns what it prints."""
    (folder / "sitecustomize.py").write_text(WITHOUT)
    command = [sys.executable, "bench/gpu.py", *flags]
    done = execute(command, status, env={"PYTHONPATH": str(folder)}, timeout=1800, fork=False)
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_question_is_answered_on_a_cpu_in_order_and_nothing_is_measured_twice(tmp_path):
    out, minutes = tmp_path / "out", "--minutes=90"  # ten times as many as on a GPU, because this machine may be busy
    printed = ask(tmp_path, "--tiny=true", f"--out={out}", minutes)
    titles = list(gpu.TITLES.values())
    assert "tyro is not installed" in printed and "wandb is not installed" in printed
    assert f"{len(titles)} of {len(titles)} questions are answered" in printed and "NCCL between GPUs" in printed
    (record,) = json.loads((out / "gpu.json").read_text()).values()
    assert sorted(record["answers"]) == sorted(gpu.TITLES) and all(answer["passed"] for answer in record["answers"].values())
    assert "4 of 4 checkpoints" in record["answers"]["portable"]["words"]
    found = [
        printed.index(f"\n{gpu.TITLES[name]} ") for name in gpu.TITLES if name not in ("portable", "exact", "exact_compiled")
    ]
    speeds = [printed.index(f"\n{gpu.TITLES[name]} ") for name in ("peak", "gpt2", "gpt2_any_order", "llama", "nanogpt")]
    assert speeds == sorted(speeds) and max(found[: len(gpu.VARIANTS)]) < speeds[0]
    run = record["answers"]["gpt2"]
    assert run["memory_gb"] > 0 and run["first_update_s"] > 0 and run["banner"]
    assert str(gpu.machine.ROOT) not in json.dumps(record["answers"])  # a result that is published names no folder

    # What another call finds is not measured again; what is lost is.
    (record,) = (records := json.loads((out / "gpu.json").read_text())).values()
    lost = record["answers"].pop("resume_overlap")
    (out / "gpu.json").write_text(json.dumps(records))
    printed = ask(tmp_path, "--tiny=true", f"--out={out}", "--ask=resume", minutes)
    count = len(gpu.VARIANTS)
    assert f"{count} of {count} questions are answered" in printed and printed.count("Yes, bit for bit.") == 1
    (again,) = json.loads((out / "gpu.json").read_text()).values()
    assert again["answers"].pop("resume_overlap")["sha256"] == lost["sha256"] and again["answers"] == record["answers"]


def test_a_deadline_in_the_middle_leaves_the_rest_for_another_call(tmp_path):
    printed = ask(tmp_path, "--tiny=true", f"--out={tmp_path}", "--ask=peak|gpt2$", "--minutes=0.5", status=75)
    assert "1 of 2 questions are answered" in printed and "repeat the command to continue" in printed
    (record,) = json.loads((tmp_path / "gpu.json").read_text()).values()
    assert list(record["answers"]) == ["peak"]


def test_without_a_gpu_nothing_is_measured_or_written(tmp_path):
    assert "error: no CUDA device" in ask(tmp_path, f"--out={tmp_path / 'out'}", status=2) and not (tmp_path / "out").exists()


@pytest.fixture
def bench(tmp_path):
    """A Bench without answers."""
    (tmp_path / "work").mkdir()
    return gpu.Bench({}, 989e12, tmp_path, "cpu", False, deadline=float("inf"), scale=1.0, nanogpt="")


def test_a_broken_promise_is_seen(bench, monkeypatch):
    found = {"exact": {1: "a", 2: "b"}, "plain": {0: "a", 7: "a"}, "resumed": True}

    def digests(config, ranks, folder, limit, kill_after=0):
        of = found["exact"][ranks] if config.parallel.strategy == "exact" else found["plain"][kill_after]
        return {"resumed": found["resumed"], "sha256": {"model": of}}

    monkeypatch.setattr(gpu.gpu_probe, "digests", digests)
    with pytest.raises(RunError, match="different weights on 1 and 2 processes"):
        gpu.exact(bench, 10, "off")
    found["exact"][2] = "a"
    assert gpu.exact(bench, 10, "on")["words"].startswith("Yes")

    assert "bit for bit" in gpu.resume(bench, 10, "plain")["words"]
    found["plain"][7] = "b"
    with pytest.raises(RunError, match="not the same"):
        gpu.resume(bench, 10, "muon")
    found["resumed"] = False  # which proves nothing
    with pytest.raises(RunError, match="started over"):
        gpu.resume(bench, 10, "ddp")

    monkeypatch.setattr(gpu.gpu_probe, "train", lambda *_: ([], [0]))
    expected = {path.split("/")[-2]: digest for path, digest in gpu.same.expected().items() if "same-1" in path}
    monkeypatch.setattr(gpu.gpu_probe, "sha256_of_each", lambda run: expected)
    assert "4 of 4" in gpu.portable(bench, 10)["words"]
    (bench.folder / "work" / "portable").rmdir()
    monkeypatch.setattr(gpu.gpu_probe, "sha256_of_each", lambda run: expected | {"step-00000048": "0"})
    with pytest.raises(RunError, match="different bits"):
        gpu.portable(bench, 10)


def test_a_question_that_fails_does_not_stop_the_others():
    assert gpu.answered(lambda limit: 1 / 0, 1.0)["words"] == "FAILED: division by zero"
    assert not gpu.answered(lambda limit: 1 / 0, 1.0)["passed"]
    assert gpu.answered(lambda limit: {"words": f"{limit} s"}, 1.0)["words"] == "1.0 s"


def test_a_question_has_its_own_limit_and_is_left_if_too_little_time_remains(bench, monkeypatch):
    now = gpu.time.monotonic()
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now)
    for left, limit in ((1000, 100), (60, 60), (39, 0)):
        bench.deadline = now + left
        assert bench.limit(100) == pytest.approx(limit)
    bench.deadline, bench.scale = now + 1000, 3.0
    assert bench.limit(100) == 300


def test_a_fork_that_fails_says_why_and_one_that_hangs_is_killed(tmp_path, capsys):
    (tmp_path / "b").mkdir()
    with capsys.disabled(), pytest.raises(RunError, match="failed within 60 s: ZeroDivisionError"):
        forks.in_forks(lambda: 1 / 0, folder=tmp_path, limit=60)
    with pytest.raises(RunError, match="was not done within 0 s"):
        forks.in_forks(lambda: __import__("time").sleep(60), folder=tmp_path / "b", limit=0.3)
    assert forks.in_forks(lambda: [1, None], folder=tmp_path / "b", limit=60) == [[1, None]]
