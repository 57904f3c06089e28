"""A run that moves to another directory, and ranks that end together. tests/test_sharded.py goes from strategy to strategy."""

import json
import os
import re
import shutil
import sys

import pytest

from conftest import execute, foreign_tokens, reseal
from lockstep.dataset.tokens import open_dataset


def test_a_run_continues_where_it_was_copied_to_with_its_tokens_elsewhere(train):
    train("whole", schedule="constant", steps=10)
    train("here", steps=5, schedule="constant")
    there = train.runs.parent / "another machine"
    shutil.copytree(train.runs / "here", there / "runs" / "here", symlinks=True)
    shutil.copytree(train.tokens, tokens := there / "data" / train.tokens.name)
    train("here", steps=10, schedule="constant", out_dir=there / "runs", tokens=tokens)
    whole = train.files("whole"), train.metrics("whole")
    train.runs = there / "runs"
    assert (train.files("here"), train.metrics("here")) == whole


def test_a_run_on_another_tools_tokens_notices_other_content_of_the_same_size(train, tmp_path, rng):
    flags = dict(steps=4, eval_every=0, save_every=0, vocab_size=128, tokens=tmp_path / "other")
    folder = foreign_tokens(tmp_path / "other", "nanoGPT", rng.integers(0, 60, 4000))
    train("run", **flags)
    state = train.latest("run") / "trainer_state.json"
    content = json.loads(state.read_text())
    content["dataset"] = open_dataset(folder).earlier_identity  # as earlier versions recorded it
    state.write_text(json.dumps(content))
    reseal(state.parent)
    train("run", **flags | dict(steps=5))
    assert train.state("run")["dataset"] == open_dataset(folder).identity
    assert "bit for bit" in execute([sys.executable, "replay.py", train.runs / "run", "--step=3"]).stdout
    rng.integers(0, 60, 2000).astype("<u2").tofile(folder / "train.bin")
    assert "must hold the tokens that" in train("run", **flags | dict(steps=6), status=2).stderr


def test_the_config_toml_of_a_copied_run_continues_the_copy(train):
    train("first", steps=5, schedule="constant")
    copy, before = train.runs.parent / "elsewhere" / "new", train.files("first")
    shutil.copytree(train.runs / "first", copy, symlinks=True)
    execute([sys.executable, "train.py", copy / "config.toml", "--steps=10"])
    assert os.readlink(copy / "checkpoints" / "latest") == "step-00000010" and train.files("first") == before
    execute([sys.executable, "train.py", copy / "config.toml", "--steps=1", "--name=third"])
    assert os.readlink(copy.parent / "third" / "checkpoints" / "latest") == "step-00000001"


def test_the_config_toml_of_a_run_elsewhere_does_not_act_on_that_run(train):
    train("first", steps=5)
    record, before = train.runs.parent / "changed.toml", train.files("first")
    shutil.copy(train.runs / "first" / "config.toml", record)
    for flags in (["--steps=10"], ["--steps=10", "--plan"]):
        said = execute([sys.executable, "train.py", record, *flags], status=2).stderr
        assert said.startswith(
            f"error: {record} contains the settings of the run {train.runs}/first; start a new run with --name=NAME"
        )
    assert train.files("first") == before
    for steps in (1, 2):  # the same command again continues the new run
        execute([sys.executable, "train.py", record, f"--steps={steps}", "--name=second"])
        assert os.readlink(train.runs / "second" / "checkpoints" / "latest") == f"step-0000000{steps}"
    (train.runs / "first" / "metrics.jsonl").unlink()  # still in its place
    execute([sys.executable, "train.py", train.runs / "first" / "config.toml", "--steps=6"])
    assert os.readlink(train.runs / "first" / "checkpoints" / "latest") == "step-00000006"


@pytest.mark.parametrize("change, setting", [("choose_compile", "compile"), ("choose_dtype", "dtype")])
def test_ranks_that_would_choose_differently_agree_on_what_works_on_all(train, change, setting):
    values = {"compile": ("on", "off"), "dtype": ("bfloat16", "float32")}[setting]
    differ = f"from lockstep.hardware import device\ndevice.{change} = lambda *args: {values}[int(os.environ['RANK'] == '1')]"
    train.changed(differ, "agreed", 3, steps=2, compile="off", dtype="float32")
    assert f'{setting} = "{values[1]}"' in (train.runs / "agreed" / "config.toml").read_text()


SLOW = """
import time
from lockstep.common import files
def slow(path, hashed=[], sha256=files.sha256):
    if os.environ["RANK"] == "0" and not hashed:
        hashed.append(time.sleep(8))
    return sha256(path)
files.sha256 = slow
"""


def test_verifying_a_checkpoint_for_longer_than_the_timeout_does_not_end_the_other_ranks(train):
    train("slow", ranks=2, steps=3, eval_every=0)
    done = train.changed(SLOW, "slow", 2, steps=4, eval_every=0, timeout_minutes=0.1)
    assert "continuing from" in done.stdout


@pytest.mark.parametrize("save_every, async_save", [(0, "true"), (2, "false")])
def test_a_save_longer_than_the_timeout_does_not_end_the_other_ranks(train, save_every, async_save):
    slow = "import time\nfrom lockstep.checkpoints.checkpoint import Checkpoints\nwrite = Checkpoints.write\n"
    slow += "Checkpoints.write = lambda *args, pauses=[7]: (time.sleep(pauses.pop() if pauses else 0), write(*args))"
    flags = dict(save_every=save_every, async_save=async_save, eval_every=0, timeout_minutes=0.1)
    train.changed(slow, "slow", 2, steps=3, **flags)
    assert os.path.exists(train.latest("slow") / "manifest.json")


def test_a_decay_from_a_stable_checkpoint_has_the_bits_of_the_straight_run(train):
    flags = dict(strategy="exact", eval_every=0, save_every=3, keep_last=0, log_every=1)
    trunk = train.runs / "trunk"
    train("trunk", schedule="constant", steps=14, **flags)

    def finish(step, name, *more, status=0):
        start = trunk / "checkpoints" / f"step-{step:08d}"
        flags = [f"--name={name}", f"--resume={start}", "--decay_steps=3", "--save_every=1", *more]
        return execute([sys.executable, "train.py", trunk / "config.toml", *flags], status)

    train("straight9", ranks=3, schedule="wsd", cooldown_fraction=3 / 12, steps=12, **flags)
    shown = finish(9, "ending9").stdout
    assert "changed: schedule constant -> wsd" in shown and "changed: steps 14 -> 12" in shown
    assert train.files("ending9") == train.files("straight9") != train.files("trunk")
    assert "ending9 is complete at step 12" in finish(9, "ending9").stdout  # the same command again
    latest = trunk / "checkpoints" / "latest"
    for flag in ("resume", "init_from"):  # they name the checkpoint, because the link moves
        train(flag, **{flag: latest}, steps=16, **flags)
        assert f'{flag} = "{trunk}/checkpoints/step-00000014"' in (train.runs / flag / "config.toml").read_text()
    latest.unlink()
    assert "continuing from" in train("init_from", init_from=latest, steps=17, **flags).stdout
    for lost in ("ending9/checkpoints/step-00000012", "trunk/checkpoints/step-00000009"):
        shutil.rmtree(train.runs / lost)
    finish(9, "ending9")
    assert train.files("ending9") == train.files("straight9")

    execute([sys.executable, "train.py", trunk / "config.toml", "--decay_steps=2"])  # in its own place
    train("straight", schedule="wsd", cooldown_fraction=2 / 16, steps=16, **flags)
    assert train.files("trunk") == train.files("straight")
    assert "phase" in (said := finish(6, "mistyped", f"--phase=99:{train.tokens}", status=2).stderr)
    assert said.startswith("error: --phase=99:... begins after the last step, 9")
    falls = finish(15, "late", status=2).stderr
    assert re.match(r"error: --decay_steps=3: at \S+15, the learning rate is 0.005, already below its peak of 0.01; use", falls)
    new = execute([sys.executable, "train.py", trunk / "config.toml", "--name=new", "--decay_steps=3"], status=2).stderr
    assert "error: --decay_steps=3 finishes a run from one of its checkpoints, so it needs --resume=PATH; for a new run" in new
    assert "--decay_steps=3 ends the run that many steps after its checkpoint" in train("new", decay_steps=3, status=2).stderr
