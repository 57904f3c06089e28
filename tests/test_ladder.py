"""The ladder end to end, its law, and what it refuses."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import ladder
from common.errors import EX_TEMPFAIL, UserError
from conftest import ROOT, environment, execute
from planning import law

# 16 wide at every depth, so that the ladder takes seconds.
SMALL = dict(
    n_embd=16,
    n_head=1,
    seq_len=16,
    flops=8e10,
    tokens_per_update=64,
    share=0.3,
    threads=1,
    dtype="float32",
    compile="off",
    device="cpu",
)
SMALL |= dict(eval_tokens=640, name="small")


def command(tokens, runs, **flags):
    flags = dict(tokens=tokens, out_dir=runs) | SMALL | flags
    return [sys.executable, ROOT / "ladder.py", *(f"--{name}={value}" for name, value in flags.items())]


@pytest.fixture(scope="module")
def climbed(tokens, tmp_path_factory):
    """A ladder that was stopped, killed and continued: its runs' folder and what it printed at the end."""
    runs = tmp_path_factory.mktemp("ladder") / "runs"
    words = [*map(str, command(tokens, runs))]
    ends = [(os.kill, signal.SIGTERM), (os.killpg, signal.SIGINT), (os.killpg, signal.SIGKILL)]
    for number, (end, how) in enumerate(ends, start=1):
        process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True)
        deadline = time.monotonic() + 100
        while len([*runs.glob("ladder-small/*/metrics.jsonl")]) < number and time.monotonic() < deadline:
            time.sleep(0.05)
        end(process.pid, how)
        said = process.communicate(timeout=100)[0]
        assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else EX_TEMPFAIL)
        assert how == signal.SIGKILL or "stopped; the same command goes on" in said
    assert not (runs / "ladder-small" / "ladder.png").exists()
    return runs, execute(words).stdout


def test_a_ladder_predicts_a_run_and_prints_its_command(climbed):
    runs, said = climbed
    predicted = json.loads((runs / "ladder-small" / "ladder.json").read_text())["foretold"]
    words = shlex.split(said.strip().splitlines()[-1])
    (name,) = (word.removeprefix("--name=") for word in words if word.startswith("--name="))
    assert name.startswith(f"small-depth-{predicted['depth']}-tokens-")
    assert json.loads((runs / name / "prediction.json").read_text())["val_loss"] == predicted["val_loss"]
    assert predicted["margin"] > 0 and (runs / "ladder-small" / "ladder.png").stat().st_size > 10_000
    assert "twice   the time: --depth=" in said and "python train.py --" in said
    assert words[:2] == ["python", "train.py"]
    execute([sys.executable, ROOT / "train.py", *words[2:]])
    execute([sys.executable, ROOT / "plot.py", runs / name, f"--out={runs / 'curves.png'}"])
    (runs / name / "prediction.json").write_text("[]")
    assert "prediction.json: Expected `object`" in execute([sys.executable, ROOT / "plot.py", runs / name], status=2).stderr
    losses = [json.loads(line).get("val_loss") for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    assert abs(losses[-1] - predicted["val_loss"]) < 1  # nats; a ladder of seconds predicts no better


def test_the_same_command_trains_nothing_again(climbed, tokens):
    runs, said = climbed
    written = {path: path.stat().st_mtime_ns for path in runs.glob("ladder-small/*/metrics.jsonl")}
    assert len(written) >= 6
    assert execute(command(tokens, runs)).stdout == said
    assert written == {path: path.stat().st_mtime_ns for path in runs.glob("ladder-small/*/metrics.jsonl")}


def test_the_plan_of_several_depths_has_the_loss_that_the_ladder_predicts(climbed, tokens):
    runs, _ = climbed
    config = ROOT / "config" / "laptop.toml"
    flags = [f"--tokens={tokens}", f"--out_dir={runs}", "--n_embd=16", "--n_head=1", "--seq_len=16", "--plan_depths=1,2"]
    (runs / f"ladder-{tokens.name}").symlink_to(runs / "ladder-small")
    said = execute([sys.executable, ROOT / "train.py", config, "--plan", *flags]).stdout
    assert said.splitlines()[0].endswith("loss") and "±" in said.splitlines()[1] and "predicts it" in said
    (runs / f"ladder-{tokens.name}").unlink()


def test_a_damaged_ladder_is_refused(climbed, tokens, tmp_path):
    runs, _ = climbed
    (tmp_path / "ladder-small").mkdir()
    for damaged in ("{", "[]", '{"facts": 1}'):
        (tmp_path / "ladder-small" / "ladder.json").write_text(damaged)
        assert "ladder.json" in execute(command(tokens, tmp_path), status=2).stderr


RUNG = dict(depth=2, weights=1000, tokens=1000, flops=6e6, loss=3.0, speed=1e9)


@pytest.mark.parametrize("wrong", [{"rungs": []}, {"available": 0}, {"rungs": [RUNG | {"weights": 0}]}])
def test_a_ladder_that_no_law_fits_is_refused(tmp_path, wrong):
    path = tmp_path / "ladder.json"
    whole = {"facts": {"tokens": "", "command": []}, "available": 1000, "rungs": [RUNG]}
    path.write_text(json.dumps(whole))
    assert law.read(path)["rungs"] == [law.Rung(**RUNG)]
    path.write_text(json.dumps(whole | wrong))
    with pytest.raises(UserError, match=rf"ladder.json: Expected .* at `\$.{next(iter(wrong))}"):
        law.read(path)


def test_a_ladder_of_other_tokens_or_settings_is_refused(climbed, tokens, tmp_path):
    runs, _ = climbed
    other = tmp_path / "other"
    execute([sys.executable, ROOT / "prepare_data.py", ROOT / "optim.py", f"--out={other}", "--tokenizer=bytes"])
    assert "is a ladder of other tokens; choose another --name" in execute(command(other, runs), status=2).stderr
    assert "is a ladder of other settings" in execute(command(tokens, runs, lr=0.5), status=2).stderr


def test_a_ladder_of_a_preset_that_was_edited_is_refused(tokens, tmp_path):
    preset, flags = tmp_path / "mine.toml", command(tokens, tmp_path)[2:]
    preset.write_text("lr = 0.01")
    begun = ladder.begin([str(preset), *flags])
    begun.directory.mkdir()
    ladder.record(begun)
    assert ladder.begin([str(preset), *flags]).facts == begun.facts
    preset.write_text("lr = 0.02")
    with pytest.raises(UserError, match=rf"is a ladder of other settings \({preset} has changed\); choose another --name"):
        ladder.begin([str(preset), *flags])


@pytest.mark.parametrize(
    "flags, said",
    [
        (dict(flops=0), "give the budget in one of two ways"),
        (dict(minutes=1), "in one of two ways: --minutes=60"),
        (dict(flops=1e6), "the budget is too small for a ladder of models of this shape; --flops="),
        (dict(tokens_per_update=16 * 10**5), "tokens, too few for a ladder: its shortest run would have"),
        (dict(depth=3), "--depth is what the ladder finds"),
        (dict(steps=3), "--steps is what the ladder finds"),
        (dict(share=1.5), "--share must be"),
        (dict(ranks=1000), "--ranks=1000: this machine has"),
        (dict(resume="off"), "--resume: a ladder is of new models"),
        (dict(name="a/b"), "--name"),
        (dict(mintues=1), "unknown flag --mintues; perhaps you meant --minutes"),
    ],
)
def test_wrong_flags_are_refused(tokens, tmp_path, flags, said):
    assert said in execute(command(tokens, tmp_path, **flags), status=2).stderr


def test_a_budget_of_a_second_says_how_much_would_do(tokens, tmp_path):
    assert "of this shape; --minutes=" in execute(command(tokens, tmp_path, flops=0, minutes=0.0001), status=2).stderr


def test_rungs_that_diverge_end_the_ladder(tokens, tmp_path):
    said = execute(command(tokens, tmp_path, lr=1000, grad_clip=0), status=2).stderr
    assert "lower --lr" in said


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
