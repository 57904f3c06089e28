"""The ladder end to end, its law, and what it refuses."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest

import ladder
import warm
from common.errors import EX_TEMPFAIL, UserError
from conftest import ROOT, environment, execute, wait_for
from planning import law

# 16 wide at every depth, so that the ladder takes seconds.
SMALL = dict(n_embd=16, n_head=1, seq_len=16, flops=4e10, tokens_per_update=192, share=0.6, threads=1, dtype="float32")
SMALL |= dict(compile="off", device="cpu", eval_tokens=640, name="small")


def flags_of(tokens, runs, **flags):
    flags = dict(tokens=tokens, out_dir=runs) | SMALL | flags
    return [f"--{name}={value}" for name, value in flags.items()]


def command(tokens, runs, **flags):
    return [sys.executable, str(ROOT / "ladder.py"), *flags_of(tokens, runs, **flags)]


@pytest.fixture(scope="module")
def climb(tmp_path_factory):
    """Run ladder.py in this process, and the runs that it starts in forks. Returns what it prints."""

    def fork(command, stdout):
        return warm.Process(command[1:], 1, environment(), ROOT, tmp_path_factory.mktemp("streams"))

    def climb(words, capsys):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ladder.subprocess, "Popen", fork)
            patch.setattr(warm.Process, "wait", lambda self: self.communicate(100) and self.returncode)
            patch.setattr(ladder.signal, "signal", lambda *_: None)
            ladder.main(words[2:])
        return capsys.readouterr().out

    return climb


@pytest.fixture(scope="module")
def stopped(tokens, tmp_path_factory):
    """The folder of the runs of a ladder that was stopped and then killed."""
    runs = tmp_path_factory.mktemp("ladder") / "runs"
    for number, (end, how) in enumerate([(os.kill, signal.SIGTERM), (os.killpg, signal.SIGKILL)], start=1):
        words = command(tokens, runs)
        process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)
        wait_for(lambda least=number: len([*runs.glob("ladder-small/depth-*/metrics.jsonl")]) >= least)
        end(process.pid, how)
        said = process.communicate(timeout=100)[0]
        assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else EX_TEMPFAIL)
        assert how == signal.SIGKILL or "stopped; the same command goes on" in said
    assert not (runs / "ladder-small" / "ladder.png").exists()
    return runs


def test_a_ladder_that_was_killed_predicts_a_run_and_prints_its_command(stopped, tokens, climb, capsys):
    said = climb(command(tokens, stopped), capsys)
    record = json.loads((stopped / "ladder-small" / "ladder.json").read_text())
    predicted, words = record["prediction"], shlex.split(said.strip().splitlines()[-1])
    assert words[:2] == ["python", "train.py"] and len(record["rungs"]) >= 6
    (name,) = (word.removeprefix("--name=") for word in words if word.startswith("--name="))
    assert name.startswith(f"small-depth-{predicted['depth']}-tokens-")
    assert json.loads((stopped / name / "prediction.json").read_text())["val_loss"] == predicted["val_loss"]
    assert predicted["margin"] > 0 and (stopped / "ladder-small" / "ladder.png").stat().st_size > 10_000
    execute([sys.executable, ROOT / "train.py", *words[2:]])
    execute([sys.executable, ROOT / "plot.py", stopped / name, f"--out={stopped / 'curves.png'}"])
    (stopped / name / "prediction.json").write_text("[]")
    assert "prediction.json: Expected `object`" in execute([sys.executable, ROOT / "plot.py", stopped / name], status=2).stderr
    losses = [json.loads(line).get("val_loss") for line in (stopped / name / "metrics.jsonl").read_text().splitlines()]
    assert abs(losses[-1] - predicted["val_loss"]) < 1  # nats; a ladder of seconds predicts no better

    # The same command trains nothing again, also with a ladder.json of an earlier version.
    path = stopped / "ladder-small" / "ladder.json"
    path.write_text(json.dumps(record | {"facts": {k: v for k, v in record["facts"].items() if k != "preset"}, "available": 1}))
    written = {path: path.stat().st_mtime_ns for path in stopped.glob("ladder-small/*/metrics.jsonl")}
    assert climb(command(tokens, stopped), capsys) == said
    assert written == {path: path.stat().st_mtime_ns for path in stopped.glob("ladder-small/*/metrics.jsonl")}


def begin(*args, **flags):
    return ladder.begin(flags_of(*args, **flags))


def test_a_ladder_of_other_tokens_or_settings_is_refused(tokens, tmp_path):
    ladder.record(begin(tokens, tmp_path))
    assert begin(tokens, tmp_path)
    other = tmp_path / "other"
    execute([sys.executable, ROOT / "prepare_data.py", ROOT / "optim.py", f"--out={other}", "--tokenizer=bytes"])
    with pytest.raises(UserError, match="is a ladder of another tokens, command; choose another --name"):
        begin(other, tmp_path)
    with pytest.raises(UserError, match="is a ladder of another command"):
        begin(tokens, tmp_path, lr=0.5)
    (tmp_path / "ladder-small" / "ladder.json").write_text('{"facts": 1}')
    with pytest.raises(UserError, match="ladder.json: Expected `object`"):
        begin(tokens, tmp_path)


def test_a_ladder_of_a_preset_that_was_edited_is_refused(tokens, tmp_path):
    preset, flags = tmp_path / "mine.toml", flags_of(tokens, tmp_path)
    preset.write_text("lr = 0.01")
    ladder.record(ladder.begin([str(preset), *flags]))
    preset.write_text("lr = 0.02")
    with pytest.raises(UserError, match="is a ladder of another preset; choose another --name"):
        ladder.begin([str(preset), *flags])


@pytest.mark.parametrize(
    "flags, said",
    [
        (dict(flops=0), "give the budget in one of two ways"),
        (dict(minutes=1), "in one of two ways: --minutes=60"),
        (dict(flops=1e6), r"the budget is too small for models of this shape; --flops=.* may do; a shorter --seq_len"),
        (dict(tokens_per_update=16 * 10**5), "tokens, too few for a ladder: its shortest run would have"),
        (dict(depth=3), "--depth is what the ladder finds"),
        (dict(share=1.5), "--share must be"),
        (dict(ranks=1000), "--ranks=1000: this machine has"),
        (dict(resume="off"), "--resume: a ladder is of new models"),
        (dict(mintues=1), "unknown flag --mintues; perhaps you meant --minutes"),
    ],
)
def test_wrong_flags_are_refused(tokens, tmp_path, flags, said):
    with pytest.raises(UserError, match=said):
        ladder.choose(begun := begin(tokens, tmp_path, **flags), begun.options.flops)


def test_after_a_budget_that_was_too_small_other_settings_may_be_tried(tokens, tmp_path, climb, capsys):
    for seq_len in (16, 8):
        with pytest.raises(UserError, match="of this shape; --minutes="):
            climb(command(tokens, tmp_path, flops=0, minutes=1e-4, seq_len=seq_len), capsys)


def test_a_run_that_was_stopped_under_torchrun_stops_the_ladder(tokens, tmp_path):
    """torchrun ends with status 1 whatever its processes ended with."""
    if ladder.host.cores() < 2:
        pytest.skip("two ranks need two cores")
    said = execute(command(tokens, tmp_path, ranks=2, max_minutes=1e-6), status=EX_TEMPFAIL, fork=False)
    assert "ended with status" not in said.stderr


def test_rungs_that_diverge_end_the_ladder(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "run", lambda *_: (math.inf, 1e9))
    with pytest.raises(UserError, match="lower --lr"):
        ladder.climb(begin(tokens, tmp_path), 2, 1e5)


def loss(weights, tokens):
    return 1.7 + 30 / weights**0.28 + 300 / tokens**0.4


@pytest.mark.parametrize("outlier", [0.0, 0.1])
def test_the_law_is_found_again_with_its_interval(rng, outlier):
    runs = [(n, d / part) for n, d in ((3.1e5, 1.6e6), (9.2e5, 6e5), (2.1e6, 2.5e5)) for part in (1, 2, 4)]
    inside = []
    for _ in range(40):
        losses = [loss(*run) + rng.normal(0, 0.008) for run in runs]
        losses[rng.integers(len(runs))] += outlier
        predicted, margin = law.fit(*zip(*runs, strict=True), losses).predict(2.1e6, 4e6)
        assert abs(predicted - loss(2.1e6, 4e6)) < 0.03 * loss(2.1e6, 4e6)
        inside.append(abs(predicted - loss(2.1e6, 4e6)) < margin)
    assert np.mean(inside) >= 0.8


def test_repeated_tokens_are_worth_less_and_less():
    effective = [law.effective_tokens(epochs * 1e6, 1e6) / 1e6 for epochs in (0.5, 1, 4, 16, 1000)]
    assert effective == pytest.approx([0.5, 1, 3.73, 10.6, 16.4], rel=0.01)
