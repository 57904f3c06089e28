"""The benchmarks that are also proofs give the right verdict, and notice what they must not accept."""

import json
import shutil
import sys

import pytest

import drill
import machine
import same_run
from common import files
from conftest import execute, fake_checkpoint


def run(script, out, result, case="", **flags):
    """Run a benchmark to its end. Returns its output and the JSON it wrote."""
    done = execute([sys.executable, *machine.arguments(f"bench/{script}.py", case, out=out, **flags)], timeout=300, fork=False)
    return done.stdout, json.loads((out / f"{result}.json").read_text())


@pytest.mark.slow
def test_same_run_accepts_equal_runs_and_under_exact_no_others(tokens, tmp_path):
    output, result = run("same_run", tmp_path, "same_run", strategy="exact", steps=8, max_ranks=2, kills=1, tokens=tokens)
    assert result["same"] == {"exact": True} and [row["run"] for row in result["runs"]] == ["W=1", "W=2", "killed"]
    assert {attempt["ranks"] for attempt in result["runs"][2]["attempts"]} == {1, 2}
    assert result["runs"][0]["model.safetensors"][:12] in output and "3 runs, one sha256" in output
    assert (tmp_path / "same_run.png").read_bytes().startswith(b"\x89PNG")

    rows = [{**row, "metrics": [{"step": 1, "loss": 1.0}]} for row in result["runs"]]
    assert same_run.report({"exact": rows}) == 0
    digest, other_losses = "0" * 64, [{"step": 1, "loss": 1.1}]
    for change in ({"model.safetensors": digest}, {"optimizer.safetensors": digest}, {"metrics": other_losses}):
        assert same_run.report({"exact": [rows[0], {**rows[1], **change}, rows[2]]}) == 1
    different = [rows[0], {**rows[1], "model.safetensors": digest}, rows[2]]
    assert same_run.report({"ddp": different}) == 0  # ddp promises nothing on other numbers of ranks


@pytest.mark.slow
def test_resume_accepts_equal_runs_and_no_others(tokens, tmp_path, capsys):
    output, result = run("drill", tmp_path, "resume", "resume", only="ddp on 3", steps=2, tokens=tokens)
    [row] = result["cases"]
    undisturbed, repeated, resumed = row["sha256"]
    assert (row["case"], row["ranks"]) == ("ddp", 3) and undisturbed == repeated == resumed
    assert undisturbed["model.safetensors"][:8] in output

    assert drill.report_resume([row]) == 0
    changed = {**resumed, "optimizer.safetensors": "0" * 64}
    assert drill.report_resume([row, {**row, "sha256": [undisturbed, repeated, changed]}]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_prepare_measures_each_contender_with_the_same_text(tmp_path):
    output, result = run("prepare", tmp_path, "prepare", megabytes=1, rounds=1)
    speeds = {name: value["median"] for name, value in result.items() if name.endswith(", MB/s")}
    assert [name.split(",")[0] for name in speeds] == ["ours", "tiktoken encode_ordinary_batch", "tiktoken encode_to_numpy"]
    assert result["ours / tiktoken encode_to_numpy"] == speeds["ours, MB/s"] / speeds["tiktoken encode_to_numpy, MB/s"]
    assert result["bytes"] >= 1e6 and "ours / tiktoken encode_to_numpy: " in output


@pytest.mark.slow
def test_grad_sync_measures_each_strategy_and_its_distance_from_one_process(tmp_path):
    flags = dict(strategies="ddp,exact", ranks="1,2", rounds=1, updates=1, micro_batches=2)
    rows = run("grad_sync", tmp_path, "grad_sync", "strategies", **flags)[1]["rows"]
    assert [(row["strategy"], row["ranks"]) for row in rows] == [("ddp", 1), ("exact", 1), ("ddp", 2), ("exact", 2)]
    distance = [row["largest_difference"] for row in rows]
    assert distance[0] == 0 and distance[1] == distance[3] < 1e-5
    assert all(row["sent_mb"] > 0.9 * row["weights_mb"] for row in rows[2:])  # other tests send, too


def test_hard_kills_finds_no_unusable_state_and_reports_one(tokens, tmp_path, capsys):
    output, result = run("drill", tmp_path, "hard_kills", "kills", kills=5, tokens=tokens)
    assert result["unusable"] == [] and sum(result["killed_while"].values()) == 5 and all(result["same"].values())
    assert "0 unusable states" in output

    assert drill.report_kills(result) == 0
    assert (
        drill.report_kills({**result, "unusable": [{"kill": 3, "problems": ["step-00000007: manifest.json is missing"]}]}) == 1
    )
    assert "kill 3: step-00000007: manifest.json is missing" in capsys.readouterr().out
    assert drill.report_kills({**result, "same": {**result["same"], "metrics.jsonl": False}}) == 1


def test_hard_kills_sees_a_damaged_checkpoint_a_lost_one_and_when_the_kill_fell(tmp_path):
    assert drill.examine(tmp_path, 0) == [] and drill.newest_step(tmp_path) == 0
    for step in (3, 4):
        fake_checkpoint(tmp_path, step)
    files.link(tmp_path / "latest", tmp_path / "step-00000004")
    assert drill.examine(tmp_path, 4) == [] and drill.killed_while(tmp_path) == "no checkpoint under way"
    assert "of step 5 and is now of step 4" in drill.examine(tmp_path, 5)[0]

    (tmp_path / ".step-00000005.tmp").mkdir()
    assert drill.killed_while(tmp_path) == "writing a checkpoint"
    (tmp_path / ".step-00000005.tmp").rename(tmp_path / ".step-00000002.old.tmp")
    assert drill.killed_while(tmp_path) == "removing an old checkpoint"
    files.link(tmp_path / "latest", tmp_path / "step-00000003")
    assert drill.killed_while(tmp_path) == "between publishing and `latest`"

    (tmp_path / "step-00000003" / "model.safetensors").write_bytes(b'{"step": 4}')
    problems = drill.examine(tmp_path, 4)
    assert problems == [f"{name}: model.safetensors does not match its sha256" for name in ("step-00000003", "latest")]
    shutil.rmtree(tmp_path / "step-00000003")
    (problem,) = drill.examine(tmp_path, 4)
    assert problem.startswith("latest: ") and "no manifest.json" in problem
