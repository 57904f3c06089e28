"""A run on a mixture of datasets: the same run on any number of ranks, with each dataset's loss in its records."""

import json
import re
import sys

import numpy as np
import pytest

from conftest import ROOT, execute, foreign_tokens, reseal
from lockstep import settings
from lockstep.common.errors import UserError
from lockstep.dataset.mixture import open_mixture
from test_data import make

CPU = ["--device=cpu", "--dtype=float32"]
FLAGS = dict(strategy="exact", dropout=0.1, eval_tokens=1280)


@pytest.fixture(scope="module")
def mixture(tokens, tmp_path_factory):
    """Three parts of the tests' own sources and one of their tests, as --tokens names it."""
    other = tmp_path_factory.mktemp("tokens") / "tests"
    sources = [str(ROOT / "tests" / name) for name in ("conftest.py", "test_data.py", "warm.py")]
    execute([sys.executable, "prepare_data.py", *sources, f"--out={other}", "--tokenizer=bytes"])
    return f"{tokens}:0.75,{other}:0.25"


def test_the_losses_of_each_dataset_and_of_the_mixture_are_recorded(train, mixture):
    shown = train("mixed", **FLAGS, tokens=mixture, steps=10).stdout
    assert re.findall(r"to train on in .*; the run reads them [\d.]+ times, for (.*) of its sequences\n", shown) == [
        "75 %",
        "25 %",
    ]
    records = train.metrics("mixed", "val_loss")
    assert len(records) == 2
    for record in records:
        assert record["val_loss"] == 0.75 * record["val_loss/tiny"] + 0.25 * record["val_loss/tests"]
        assert record["val_bpb/tiny"] != record["val_bpb/tests"] > 0
    out = execute([sys.executable, "evaluate.py", train.latest("mixed"), "--eval_tokens=640", *CPU]).stdout
    losses = re.findall(r"loss (\d+\.\d+)", out)
    assert len(losses) == 3 and f"{mixture}\nloss" in out
    assert [*map(float, losses[:2])] == pytest.approx([records[-1][f"val_loss/{name}"] for name in ("tiny", "tests")], abs=6e-5)


def test_all_datasets_must_have_the_same_tokenizer(tokens, mixture, tmp_path):
    for split in ("train", "val"):  # these do not say which
        (np.arange(3000) % 60).astype("<u2").tofile(tmp_path / f"{split}.bin")
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 500)
    execute([sys.executable, "prepare_data.py", text, f"--out={tmp_path / 'other'}", "--tokenizer=train:257"])
    for directories in ((tokens, tmp_path / "other"), (tmp_path, tokens, tmp_path / "other")):
        with pytest.raises(UserError, match="were made with different tokenizers"):
            open_mixture(settings.DataConfig(",".join(f"{directory}:1" for directory in directories)), 257)


def test_own_and_foreign_tokens_are_one_vocabulary_again_where_the_models_is_padded(train, tmp_path, rng):
    """GPT-2's 50,257 tokens, which foreign files do not state, in a model of 50,304."""
    own = make(tmp_path / "own", 50257, (4000,), (1000,))
    (own / "dataset.json").write_text((own / "dataset.json").read_text().replace('"eot_token": 0', '"eot_token": 50256'))
    other = foreign_tokens(tmp_path / "other", "llm.c", rng.integers(0, 50257, 4000))
    flags = dict(steps=2, eval_tokens=160, eval_every=0)
    train("before", tokens=f"{own}:3,{other}:1", **flags)
    train("after", tokens=f"{other}:1,{own}:1", **flags)
    run = train.runs / "after"
    assert "loss" in execute([sys.executable, "evaluate.py", run, "--eval_tokens=160", *CPU]).stdout
    assert "bit for bit" in execute([sys.executable, "replay.py", run]).stdout
    execute([sys.executable, "train.py", run / "config.toml", "--name=again"])
    assert train.files("again") == train.files("after")
    train("larger", tokens=f"{own}:1,{other}:1", vocab_size=50500, **flags)
    train("phase", tokens=other, phase=f"1:{own}", **flags)
    assert "bit for bit" in execute([sys.executable, "replay.py", train.runs / "phase"]).stdout
    bytes_only = make(tmp_path / "bytes", 257, (4000,), (1000,))
    refused = train("refused", tokens=f"{bytes_only}:1,{other}:1", vocab_size=50304, status=2, **flags).stderr
    assert f"{bytes_only} and {other} were made with different tokenizers" in refused


@pytest.fixture(scope="module")
def phase(mixture):
    """A phase from which on the second dataset of the mixture has three quarters, as --phase names it."""
    tiny, tests = (part.partition(":")[0] for part in mixture.split(","))
    return f"10:{tests}:0.75,{tiny}:0.25"


def test_a_phase_gives_the_same_bits_on_any_number_of_ranks_killed_right_before_and_after_it_begins(train, mixture, phase):
    flags = dict(FLAGS, tokens=mixture, steps=14, save_every=1, keep_last=0, phase=phase)
    train("w1", **flags)
    for ranks, step in ((3, 11), (1, 12)):  # saved by then: the last step before the phase, and its first
        train.kill("killed", step, ranks, **flags)
    train("killed", ranks=2, **flags)
    train.assert_same("killed", "w1")
    train("one mixture", **flags | dict(phase=""))
    assert train.metrics("one mixture", "loss")[:10] == train.metrics("w1", "loss")[:10]
    assert train.metrics("one mixture", "loss")[10] != train.metrics("w1", "loss")[10]
    before, after = (train.metrics(name, "val_loss")[-1].keys() for name in ("one mixture", "w1"))
    assert before == after

    shown = execute([sys.executable, "replay.py", train.runs / "killed", "--step=12", "--sequences=0"]).stdout
    assert "bit for bit" in shown and 12 < len(re.findall(r"sequence \d+: .*/tests/train_", shown)) < 24
    assert "DOES NOT" not in (
        shown := execute([sys.executable, "replay.py", train.runs / "killed", "--verify", "--from=10"]).stdout
    )
    assert "step-00000011 follows from step-00000010" in shown


def test_a_phase_may_be_added_for_steps_to_come_and_no_done_step_sees_another_mixture(train, mixture, phase):
    flags = dict(FLAGS, tokens=mixture, eval_every=10, schedule="constant")
    train("planned", **flags, phase=phase)
    train("run", **flags, steps=10)
    shown = train("run", **flags, phase=phase).stdout
    assert f"changed: phase none -> {phase}" in shown and "% of its sequences" in shown
    assert re.search(
        r"for 75, then 25 % of its .*\n.*for 25, then 75 % of its .*\n  phase   after step 10: \S+:0.25,\S+", shown
    )
    train.assert_same("run", "planned")
    assert f'phase = "{phase}"' in (train.runs / "run" / "config.toml").read_text()

    epochs = [[record[f"epochs/{name}"] for name in ("tiny", "tests")] for record in train.metrics("run", "loss")]
    speeds = np.diff(np.array(epochs), axis=0)  # of a step
    assert speeds[:9, 0].sum() > 1.5 * speeds[10:, 0].sum()

    done = "but 20 steps are done; a new phase can begin after step 20 at the earliest"
    for other in ("", phase.replace("10:", "12:", 1), f"5:{train.tokens},{phase}", phase.replace(":0.75", ":0.5")):
        first = 6 if other.startswith("5:") else 11
        refused = train("run", **flags | dict(steps=30), phase=other, status=2).stderr
        assert refused.startswith(f"error: --phase={other} changes the mixture of step {first}, {done}\n"), refused
    later = f"{phase},20:{train.tokens},25:{phase[3:]}"
    assert f"changed: phase {phase} -> {later}" in train("run", **flags | dict(steps=30), phase=later).stdout
    out = execute([sys.executable, "replay.py", train.runs / "run", "--step=27"]).stdout
    assert "bit for bit" in out
    wrong = train("run", **flags | dict(steps=30), phase="30:tokens", status=2).stderr
    assert wrong == "error: --phase=30:tokens begins after the last step; --steps must be more than 30\n"


def test_a_preset_names_a_mixture_and_phases_as_lists(train, mixture, phase, tmp_path):
    preset = tmp_path / "phases.toml"
    phases = [phase, f"15:{train.tokens}"]
    preset.write_text(f"[data]\ntokens = {json.dumps(mixture.split(','))}\nphase = {json.dumps(phases)}\n")
    flags = [flag for flag in train.arguments("listed", **FLAGS)[1:] if not flag.startswith("--tokens=")]
    train_py = [sys.executable, "train.py", preset, *flags]
    execute(train_py)
    config = (train.runs / "listed" / "config.toml").read_text()
    assert f'tokens = "{mixture}"' in config and f'phase = "{",".join(phases)}"' in config
    twice = execute([*train_py, "--phase=5:a", "--phase=6:b"], status=2).stderr
    assert twice.startswith("error: --phase is set more than once; set it once, with commas between the items of a list")


def test_a_dataset_of_a_phase_alone_is_evaluated_beside_the_mean(train, mixture):
    tiny, tests = (part.partition(":")[0] for part in mixture.split(","))
    train("alone", **FLAGS, tokens=tiny, steps=4)
    train("phases", **FLAGS, tokens=tiny, phase=f"2:{tests}", steps=4)
    (alone,), (both,) = train.metrics("alone", "val_loss"), train.metrics("phases", "val_loss")
    assert both["val_loss"] == both["val_loss/tiny"] != alone["val_loss"] and both["val_loss/tests"] > 0
    assert "val_loss/tests" not in alone
    out = execute([sys.executable, "evaluate.py", train.latest("phases"), "--eval_tokens=1280", *CPU]).stdout
    losses = re.findall(r"loss (\d+\.\d+)", out)
    assert [*map(float, losses)] == pytest.approx([both[f"val_loss/{name}"] for name in ("tiny", "tests", "tiny")], abs=6e-5)


def test_weights_change_with_a_new_run_not_within_one(train, mixture):
    train("first", **FLAGS, tokens=mixture, steps=5)
    other = mixture.replace("0.75", "0.5").replace("0.25", "0.5")
    errors = train("first", **FLAGS, tokens=other, steps=10, status=2).stderr
    assert errors.startswith(f"error: --tokens={other} must hold the tokens that {mixture} held, in the same shares")
    train("annealed", **FLAGS, tokens=other, steps=10, resume=train.runs / "first")
    assert train.metrics("annealed", "loss")[0]["step"] == 6


def test_a_decay_on_another_mixture_has_the_bits_of_the_run_that_had_planned_both(train, mixture, phase):
    train("trunk", **FLAGS, tokens=mixture, schedule="constant", steps=10, keep_last=0)
    train("planned", ranks=3, **FLAGS, tokens=mixture, phase=phase, schedule="wsd", cooldown_fraction=1 / 6, steps=12)
    start = train.runs / "trunk" / "checkpoints" / "step-00000010"
    finish = ["--name=annealed", f"--resume={start}", "--decay_steps=2", f"--phase={phase}"]
    command = [sys.executable, "train.py", train.runs / "trunk" / "config.toml", *finish]
    execute(command)
    assert train.files("annealed") == train.files("planned")
    assert train.metrics("annealed", "epochs/tests") == train.metrics("planned", "epochs/tests")[10:]


# All datasets of a mixture have the same order, as in version 0.1.0.
SHARED = """
import data
def make_batches(*args, own_orders, original=data.make_batches):
    return original(*args, own_orders=False)
data.make_batches = make_batches
"""
RECORDED = dict(prepare_command="make", max_skipped_steps=9, max_shard_bytes=10**9, tasks_limit=3)


def as_an_earlier_version_left_it(run, **more):
    """Let a run's records name settings that no longer exist, instead of the order of its mixture."""
    path, recorded = run / "config.toml", RECORDED | more
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in recorded.items()) + path.read_text())
    for checkpoint in (run / "checkpoints").glob("step-*"):
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        assert state.pop("mixture_order") == "own"
        for record in (state["settings"], *(era["settings"] for era in state["history"])):
            record |= recorded
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        reseal(checkpoint)


def test_a_run_of_an_earlier_version_keeps_its_order(train, mixture):
    flags = dict(FLAGS, tokens=mixture, schedule="constant", eval_every=0, save_every=3, keep_last=0)
    train.changed(SHARED, "old", **flags, steps=6)
    train("new", **flags, steps=6)
    assert train.metrics("old", "loss") != train.metrics("new", "loss")
    train.changed(SHARED, "undisturbed", **flags, steps=9)
    as_an_earlier_version_left_it(train.runs / "old")
    trunk = train.runs / "old" / "checkpoints" / "step-00000003"
    train("branch", **flags, steps=9, resume=trunk)
    assert train.metrics("branch", "loss") == train.metrics("undisturbed", "loss")[3:]
    assert train.state("branch")["mixture_order"] == "shared"
    for step in (2, 5):
        assert "bit for bit" in execute([sys.executable, "replay.py", train.runs / "old", f"--step={step}"]).stdout
    train("old", **flags, steps=9)
    assert train.metrics("old", "loss") == train.metrics("undisturbed", "loss")
    assert train.files("old") == train.files("undisturbed")
    for step in (5, 8):
        assert "bit for bit" in execute([sys.executable, "replay.py", train.runs / "old", f"--step={step}"]).stdout
    assert "DOES NOT" not in execute([sys.executable, "replay.py", train.runs / "old", "--verify"]).stdout
    as_an_earlier_version_left_it(train.runs / "new", mixture_order="own")
    train("new", **flags, steps=9)
    train("straight", **flags, steps=9)
    assert train.metrics("new", "loss") == train.metrics("straight", "loss")
    assert train.files("new") == train.files("straight")
