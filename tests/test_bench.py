"""The benchmarks that are also proofs give the right verdict through the front door, and notice what they must not pass."""

import importlib
import json
import shutil
import subprocess
import sys

import pytest

import checkpoint
import files
from conftest import ROOT, environment


@pytest.fixture
def bench(monkeypatch):
    """Imports a script of bench/ as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


def run(script, out, **flags):
    """Run a benchmark to its end; returns it and the JSON it wrote."""
    command = [sys.executable, f"bench/{script}.py", *(f"--{key}={value}" for key, value in flags.items()), f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return done, json.loads((out / f"{script}.json").read_text())


def test_same_run_finds_exact_to_be_one_run_and_a_changed_one_not_to_be(bench, tokens, tmp_path, capsys):
    done, told = run("same_run", tmp_path, strategy="exact", steps=8, max_ranks=2, kills=1, tokens=tokens)
    assert done.returncode == 0, done.stdout + done.stderr
    assert told["is_one"] == {"exact": True} and [row["run"] for row in told["runs"]] == ["W=1", "W=2", "killed"]
    assert {life["ranks"] for life in told["runs"][2]["lives"]} == {1, 2}
    assert told["runs"][0]["model.safetensors"][:12] in done.stdout and "3 runs are one, bit for bit" in done.stdout
    assert (tmp_path / "same_run.png").read_bytes().startswith(b"\x89PNG")

    same_run = bench("same_run")
    rows = [{**row, "metrics": [{"step": 1, "loss": 1.0}]} for row in told["runs"]]
    assert same_run.report(rows) == 0
    digest, other_losses = "0" * 64, [{"step": 1, "loss": 1.1}]
    for doctored in ({"model.safetensors": digest}, {"optimizer.safetensors": digest}, {"metrics": other_losses}):
        assert same_run.report([rows[0], {**rows[1], **doctored}, rows[2]]) == 1
    rows = [{**row, "strategy": "ddp"} for row in rows]  # of which nobody promised it
    assert same_run.report([rows[0], {**rows[1], "model.safetensors": digest}, rows[2]]) == 0


def test_hard_kills_finds_no_unusable_state_and_reports_one(bench, tokens, tmp_path, capsys):
    done, told = run("hard_kills", tmp_path, kills=5, tokens=tokens)
    assert done.returncode == 0, done.stdout + done.stderr
    assert told["unusable"] == [] and sum(told["places"].values()) == 5 and all(told["same"].values())
    assert "0 unusable states" in done.stdout

    hard_kills = bench("hard_kills")
    assert hard_kills.report(told) == 0
    assert hard_kills.report({**told, "unusable": [{"kill": 3, "wrong": ["step-00000007: manifest.json is missing"]}]}) == 1
    assert hard_kills.report({**told, "same": {**told["same"], "metrics.jsonl": False}}) == 1
    assert "kill 3: step-00000007: manifest.json is missing" in capsys.readouterr().out


def test_hard_kills_sees_a_torn_checkpoint_a_lost_one_and_where_the_kill_fell(bench, tmp_path):
    hard_kills = bench("hard_kills")
    assert hard_kills.examine(tmp_path, 0) == [] and hard_kills.newest_step(tmp_path) == 0
    for step in (3, 4):
        with files.publish_directory(tmp_path / f"step-{step:08d}") as directory:
            (directory / "model.safetensors").write_bytes(b"weights")
            checkpoint.write_manifest(directory)
    files.link(tmp_path / "latest", tmp_path / "step-00000004")
    assert hard_kills.examine(tmp_path, 4) == [] and hard_kills.place_of_death(tmp_path) == "no checkpoint under way"
    assert "of step 5 and is of step 4" in hard_kills.examine(tmp_path, 5)[0]

    (tmp_path / ".step-00000005.tmp").mkdir()
    assert hard_kills.place_of_death(tmp_path) == "writing a checkpoint"
    (tmp_path / ".step-00000005.tmp").rename(tmp_path / ".step-00000002.old.tmp")
    assert hard_kills.place_of_death(tmp_path) == "removing an old checkpoint"
    files.link(tmp_path / "latest", tmp_path / "step-00000003")
    assert hard_kills.place_of_death(tmp_path) == "between publishing and `latest`"

    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b"weighty")
    wrong = hard_kills.examine(tmp_path, 4)
    assert wrong == [f"{name}: model.safetensors does not match its sha256" for name in ("step-00000003", "latest")]
    shutil.rmtree(tmp_path / "step-00000003")
    assert hard_kills.examine(tmp_path, 4) == ["latest: manifest.json is missing"]
