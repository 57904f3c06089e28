"""The ladder end to end, its law, and what it refuses."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest

import warm
from conftest import PATIENCE, ROOT, environment, execute, wait_for
from extras import ladder, law
from lockstep.common.errors import EX_TEMPFAIL, UserError

# 16 wide at every depth, and shorter than a ladder may be, so that it takes seconds.
FEWEST_STEPS, FEWEST_TOKENS = 20, 0.08
SHORT = f"from extras import dial, ladder; dial.FEWEST_STEPS, ladder.FEWEST_TOKENS = {FEWEST_STEPS}, {FEWEST_TOKENS}\n"
SHORT += "from lockstep import command; command.run('extras.ladder', list)"
SMALL = dict(n_embd=16, n_head=1, seq_len=16, flops=1e10, tokens_per_update=192, share=0.6, threads=1, dtype="float32")
SMALL |= dict(compile="off", device="cpu", eval_tokens=640, name="small")


def flags_of(tokens, runs, **flags):
    flags = dict(tokens=tokens, out_dir=runs) | SMALL | flags
    return [f"--{name}={value}" for name, value in flags.items()]


@pytest.fixture(scope="module")
def climb(tmp_path_factory):
    """Run ladder.py in this process, and the runs that it starts in forks. Returns what it prints."""

    def fork(command, stdout):
        return warm.Process(command[1:], 1, environment(), ROOT, tmp_path_factory.mktemp("streams"))

    def climb(capsys, *args, **flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ladder.subprocess, "Popen", fork)
            patch.setattr(warm.Process, "wait", lambda self: self.communicate(PATIENCE) and self.returncode)
            patch.setattr(ladder.signal, "signal", lambda *_: None)
            patch.setattr(ladder.dial, "FEWEST_STEPS", FEWEST_STEPS)
            patch.setattr(ladder, "FEWEST_TOKENS", FEWEST_TOKENS)
            ladder.main(flags_of(*args, **flags))
        return capsys.readouterr().out

    return climb


@pytest.fixture(scope="module")
def stopped(tokens, tmp_path_factory):
    """The folder of the runs of a ladder that was stopped and then killed."""
    runs = tmp_path_factory.mktemp("ladder") / "runs"
    for number, (end, how) in enumerate([(os.kill, signal.SIGTERM), (os.killpg, signal.SIGKILL)], start=1):
        words = [sys.executable, "-c", SHORT, *flags_of(tokens, runs)]
        process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)
        wait_for(lambda least=number: len([*runs.glob("ladder-small-*/depth-*/metrics.jsonl")]) >= least)
        end(process.pid, how)
        assert process.wait(timeout=PATIENCE) == (-signal.SIGKILL if how == signal.SIGKILL else EX_TEMPFAIL)
    return runs


def test_a_ladder_that_was_killed_predicts_a_run_and_prints_its_command(stopped, tokens, climb, capsys):
    said = climb(capsys, tokens, stopped)
    words = shlex.split(said.strip().splitlines()[-1])
    assert words[:2] == ["python", "train.py"] and len(re.findall("^depth ", said, re.MULTILINE)) >= 6
    (name,) = (word.removeprefix("--name=") for word in words if word.startswith("--name="))
    predicted = json.loads((stopped / name / "prediction.json").read_text())
    assert re.fullmatch(rf"small-\w{{8}}-depth-{predicted['depth']}-tokens-\d+", name) and predicted["margin"] > 0
    execute([sys.executable, ROOT / "train.py", *words[2:]])
    execute([sys.executable, ROOT / "plot.py", stopped / name, f"--out={stopped / 'curves.png'}"])
    (stopped / name / "prediction.json").write_text("[]")
    assert "prediction.json: Expected `object`" in execute([sys.executable, ROOT / "plot.py", stopped / name], status=2).stderr
    losses = [json.loads(line).get("val_loss") for line in (stopped / name / "metrics.jsonl").read_text().splitlines()]
    assert abs(losses[-1] - predicted["val_loss"]) < 1  # nats; a ladder of seconds predicts no better

    # The same command trains nothing again.
    written = {path: path.stat().st_mtime_ns for path in stopped.glob("ladder-small-*/*/metrics.jsonl")}
    assert climb(capsys, tokens, stopped) == said
    assert written == {path: path.stat().st_mtime_ns for path in stopped.glob("ladder-small-*/*/metrics.jsonl")}


def begin(*args, **flags):
    return ladder.begin(flags_of(*args, **flags))


def test_other_tokens_or_settings_make_another_ladder(tokens, tmp_path):
    other, preset = tmp_path / "other", tmp_path / "mine.toml"
    execute(
        [sys.executable, ROOT / "prepare_data.py", ROOT / "lockstep/numerics/optim.py", f"--out={other}", "--tokenizer=bytes"]
    )
    ladders = [begin(tokens, tmp_path), begin(other, tmp_path), begin(tokens, tmp_path, lr=0.5)]
    for text in ("lr = 0.01", "lr = 0.02"):
        preset.write_text(text)
        ladders.append(ladder.begin([str(preset), *flags_of(tokens, tmp_path)]))
    assert len({one.directory for one in ladders}) == 5
    assert begin(tokens, tmp_path, flops=0, minutes=9).directory == ladders[0].directory


@pytest.mark.parametrize(
    "flags, said",
    [
        (dict(flops=0), "set either the budget, --minutes=60 or"),
        (dict(minutes=1), "set either the budget, --minutes=60 or"),
        (dict(flops=1e6), r"1e\+06 FLOPs and [\d,]+ tokens are too few for a ladder .*; --flops=[\d.e+]+ is enough; a shorter"),
        (
            dict(tokens_per_update=16 * 10**5),
            "too few for a ladder .*; prepare more text; a shorter --seq_len, a smaller --tokens_per_update or a smaller vocab",
        ),
        (dict(steps=3), "--steps: a ladder trains new models and chooses their size"),
        (dict(share=1.5), "--share must be"),
        (dict(resume="off"), "--resume: a ladder trains new models"),
        (dict(max_minutes=1), "--max_minutes: a ladder trains new models"),
        (dict(out_dir="s3://bucket/x"), "--out_dir=s3://bucket/x must be a local path"),
        (dict(mintues=1), "unknown flag --mintues; perhaps you meant --minutes"),
    ],
)
def test_wrong_flags_are_refused(tokens, tmp_path, flags, said):
    with pytest.raises(UserError, match=said):
        ladder.choose(begun := begin(tokens, tmp_path, **flags), begun.options.flops)


def test_a_budget_of_minutes_is_measured_and_may_be_too_small(tokens, tmp_path, climb, capsys):
    with pytest.raises(
        UserError, match=r"\d FLOPs and [\d,]+ tokens are too few for a ladder .*; --minutes=[\d.e-]+ is enough"
    ):
        climb(capsys, tokens, tmp_path, flops=0, minutes=1e-4)


def test_what_a_refusal_calls_enough_is_enough(tokens, tmp_path):
    begun = begin(tokens, tmp_path)
    with pytest.raises(UserError) as refused:
        ladder.choose(begun, 1e6)
    assert ladder.choose(begun, float(re.search(r"--flops=(\S+) is enough", str(refused.value))[1]))


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
        (predicted,), (margin,), _ = law.predict(runs, losses, [(2.1e6, 4e6)], unique_tokens=1e9)
        assert abs(predicted - loss(2.1e6, 4e6)) < 0.03 * loss(2.1e6, 4e6)
        inside.append(abs(predicted - loss(2.1e6, 4e6)) < margin)
    assert np.mean(inside) >= 0.8


def test_repeated_tokens_are_worth_less_and_less():
    effective = law.effective_tokens(np.array([0.5, 1, 4, 16, 1000]) * 1e6, 1e6) / 1e6
    assert effective == pytest.approx([0.5, 1, 3.73, 10.6, 16.4], rel=0.01)


def test_scores_on_tasks_do_not_hide_that_a_run_is_finished(tmp_path):
    records = [{"step": 4, "loss": 3.0}, {"step": 4, "val_loss": 2.0}, {"step": 4, "tasks/arc/acc": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert ladder.finished(tmp_path, 4)[-1]["val_loss"] == 2.0 and not ladder.finished(tmp_path, 5)
