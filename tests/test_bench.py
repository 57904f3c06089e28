"""The benchmarks that are also proofs give the right verdict, and notice what they must not accept."""

import json
import re
import sys
from pathlib import Path

import pytest

import audit
import drill
import figures
import machine
import same_run
from conftest import execute, fake_checkpoint
from lockstep.common import files

# Of `grad_sync.py overlap`: the way, the size of its buckets, the time it adds, its sends and the gradients ready at the first.
ROW = r"sleep +([a-z -]+?) +([\d.]+) +([-\d.]+) +[-\d.]+ +[-\d.]+ +[-\d.]+ +(\d+) +(\d+)"


def run(script, out, result, case="", **flags):
    """Run a benchmark to its end. Returns its output and the JSON it wrote."""
    done = execute([sys.executable, *machine.arguments(f"bench/{script}.py", case, out=out, **flags)], fork=False)
    return done.stdout, json.loads((out / f"{result}.json").read_text())


def test_an_installed_package_does_not_hide_a_module_of_ours(tmp_path):
    (tmp_path / "evaluate.py").write_text("")  # as `pip install lm_eval[hf]` brings one
    code = f"import sys; sys.path.append({str(machine.ROOT / 'bench')!r}); import machine, evaluate; print(evaluate.__file__)"
    done = execute([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert done.stdout.strip() == str(machine.ROOT / "evaluate.py")


@pytest.mark.slow
def test_the_table_of_strategies_has_a_row_for_each_and_is_not_written_over_the_tracked_one(tokens, tmp_path):
    assert Path(machine.RESULTS).relative_to(machine.ROOT).parts[0] == "runs"
    few = dict(strategies="ddp,scratch_overlap", ranks=2, rounds=1, steps=4, tokens=tokens)
    _, result = run("grad_sync", tmp_path, "grad_sync", "cost", **few)
    assert list(result["update_ms_each"]) == ["ddp on 2", "scratch_overlap on 2"]


@pytest.mark.slow
def test_on_a_slow_link_buckets_leave_before_backward_ends():
    """On tensors that sleep instead of computing. Another program may still take the core that sends, so three tries."""
    command = [sys.executable, "bench/grad_sync.py", "overlap", "--only=2gbit 2 sleep", "--rounds=2"]
    one, every = ("one bucket", 25), ("all-reduce", 0)
    for _ in range(3):
        printed = execute(command, fork=False).stdout
        if printed.startswith("skipped"):
            pytest.skip(printed)
        rows = {(way, float(size)): cells for way, size, *cells in re.findall(ROW, printed)}
        sends, ready = ({key: int(cells[column]) for key, cells in rows.items()} for column in (1, 2))
        assert [sends[way] for way in (one, every, ("overlap", 4), ("ddp", 4))] == [1, 68, 6, 5]
        assert ready["overlap", 4] < ready["ddp", 4] < ready[one] == ready[every] == 68
        exposed = {key: float(cells[0]) for key, cells in rows.items()}
        if max(exposed["overlap", 4], exposed["ddp", 4]) < 0.7 * exposed[one]:
            return
    pytest.fail(printed)


@pytest.mark.slow
def test_same_run_accepts_equal_runs_and_under_exact_no_others(tokens, tmp_path):
    output, result = run("same_run", tmp_path, "same_run", strategy="exact", steps=8, max_ranks=2, kills=1, tokens=tokens)
    assert result["same"] == {"exact": True} and [row["run"] for row in result["runs"]] == ["W=1", "W=2", "killed"]
    assert {attempt["ranks"] for attempt in result["runs"][2]["attempts"]} == {1, 2}
    assert result["runs"][0]["model.safetensors"][:12] in output and "3 runs, one sha256" in output
    assert (tmp_path / "same_run.png").read_bytes().startswith(b"\x89PNG")

    first, second, third = ({**row, "metrics": [{"step": 1, "loss": 1.0}]} for row in result["runs"])
    assert same_run.report({"exact": [first, second, third]}) == 0
    for change in ({"model.safetensors": "0"}, {"optimizer.safetensors": "0"}, {"metrics": [{"step": 1, "loss": 1.1}]}):
        assert same_run.report({"exact": [first, second | change, third]}) == 1
    assert same_run.report({"ddp": [first, second | change, third]}) == 0  # it promises nothing on other numbers of ranks


@pytest.mark.slow
def test_resume_accepts_equal_runs_and_no_others(tokens, tmp_path, capsys):
    output, result = run("drill", tmp_path, "resume", "resume", only="ddp on 3", steps=2, tokens=tokens)
    [row] = result["cases"]
    undisturbed, repeated, resumed = row["sha256"]
    assert (row["case"], row["ranks"]) == ("ddp", 3) and undisturbed == repeated == resumed
    assert drill.report_resume([row]) == 0 and undisturbed["model.safetensors"][:8] in output
    changed = {**resumed, "optimizer.safetensors": "0" * 64}
    assert drill.report_resume([row, {**row, "sha256": [undisturbed, repeated, changed]}]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_hard_kills_finds_no_unusable_state_and_reports_one(tokens, tmp_path, capsys):
    output, result = run("drill", tmp_path, "hard_kills", "kills", kills=2, tokens=tokens)
    assert result["unusable"] == [] and sum(result["killed_while"].values()) == 2 and all(result["same"].values())
    assert "0 unusable states" in output and drill.report_kills(result) == 0
    assert drill.report_kills({**result, "unusable": [{"kill": 3, "problems": ["manifest.json is missing"]}]}) == 1
    assert "kill 3: manifest.json is missing" in capsys.readouterr().out
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


@pytest.mark.slow
def test_audit_finds_that_a_run_of_ours_is_the_same_run(tmp_path):
    _, result = run("audit", tmp_path, "audit", "lockstep", only="killed,flipped,two")
    row = result["trainers"]["lockstep"]
    killed, flipped, two = (row["found"][question] for question in ("killed", "flipped", "two"))
    assert (killed["from"], killed["same"], killed["of"], killed["difference"]) == (16, 16, 16, 0)
    assert (flipped["from"], flipped["same"], flipped["of"], flipped["difference"]) == (8, 24, 24, 0)
    assert two["same"] == two["of"] == 32 - two["from"]
    assert "WORK/RUN" in row["command"][0] and str(tmp_path) not in json.dumps(row)


def test_audit_sees_other_tokens_other_weights_and_failures():
    class Examined:
        reference = audit.Attempt(0, "", [["a"], ["b"], ["c"], ["d"]])

        def difference(self, case):
            return 0.5

    def outcome(*updates, error=""):
        attempt = audit.Attempt(0, error, [[update] for update in updates])
        return figures.outcome(audit.Examination.compare(Examined(), "run", attempt))

    assert outcome("a", "b", "c", "d") == "the same tokens and weights that differ by 5e-01"
    assert outcome("c", "d") == "resumes after update 2 with the same tokens and weights that differ by 5e-01"
    assert "different tokens in 2 of 2 updates (the first sees the tokens of update 1)" in outcome("a", "b")
    assert outcome(error="ValueError: no") == "fails: `ValueError: no`" and "no update" in outcome()
    Examined.difference = lambda self, case: 0.0
    assert outcome("c", "x") == "resumes after update 2 with different tokens in 1 of 2 updates and the same bits"
    assert (
        audit.failure("[rank0]: a.B: c\n[rank0]: ValueError: bad /some/place/file\nx.ChildFailedError:\n")
        == "ValueError: bad file"
    )


def test_the_page_of_the_audit_is_what_its_script_makes():
    rows = json.loads((machine.ROOT / "bench" / "results" / "audit.json").read_text())["trainers"]
    assert figures.AUDIT.read_text() == figures.audit_page(rows)


def test_the_page_of_figures_is_what_its_script_makes_and_begins_with_what_is_slower():
    assert figures.PAGE.read_text() == figures.page()
    ratios = [float(line.split("**")[1]) for line in figures.page().splitlines() if line.startswith("| **")]
    assert ratios[0] < 1 and ratios == sorted(ratios)
