"""A run that moves to another directory, and ranks that end together. tests/test_sharded.py goes from strategy to strategy."""

import os
import shutil
import sys

import pytest

from common.files import sha256
from conftest import execute


def test_a_run_continues_where_it_was_copied_to_with_its_tokens_elsewhere(train):
    train("whole", schedule="constant")
    train("here", steps=10, schedule="constant")
    there = train.runs.parent / "another machine"
    shutil.copytree(train.runs / "here", there / "runs" / "here", symlinks=True)
    shutil.copytree(train.tokens, there / "data" / "tokens")
    train("here", schedule="constant", out_dir=there / "runs", tokens=there / "data" / "tokens")
    whole = train.files("whole"), train.metrics("whole")
    train.runs = there / "runs"
    assert (train.files("here"), train.metrics("here")) == whole


def test_the_config_toml_of_a_copied_run_continues_the_copy(train):
    train("first", steps=5, schedule="constant")
    copy, before = train.runs.parent / "elsewhere" / "new", train.files("first")
    shutil.copytree(train.runs / "first", copy, symlinks=True)
    execute([sys.executable, "train.py", copy / "config.toml", "--steps=10"])
    assert os.readlink(copy / "checkpoints" / "latest") == "step-00000010" and train.files("first") == before
    execute([sys.executable, "train.py", copy / "config.toml", "--steps=1", "--name=third"])
    assert os.readlink(copy.parent / "third" / "checkpoints" / "latest") == "step-00000001"


@pytest.mark.parametrize("change, setting", [("choose_compile", "compile"), ("choose_dtype", "dtype")])
def test_ranks_that_would_choose_differently_agree_on_what_works_on_all(train, change, setting):
    values = {"compile": ("on", "off"), "dtype": ("bfloat16", "float32")}[setting]
    differ = f"from hardware import device\ndevice.{change} = lambda *args: {values}[int(os.environ['RANK'] == '1')]"
    train.changed(differ, "agreed", 3, steps=2, compile="off", dtype="float32")
    assert f'{setting} = "{values[1]}"' in (train.runs / "agreed" / "config.toml").read_text()


SLOW = """
import time
from common import files
def slow(path, hashed=[], sha256=files.sha256):
    if os.environ["RANK"] == "0" and not hashed:
        hashed.append(time.sleep(8))
    return sha256(path)
files.sha256 = slow
"""


def test_verifying_a_checkpoint_for_longer_than_the_timeout_does_not_end_the_other_ranks(train):
    train("slow", ranks=2, steps=3, eval_every=0)
    done = train.changed(SLOW, "slow", 2, steps=4, eval_every=0, timeout_minutes=0.05)
    assert "continuing from" in done.stdout


def test_a_last_save_longer_than_the_timeout_does_not_end_the_other_ranks(train):
    slow = "import time\nfrom checkpoints.checkpoint import Checkpoints\nwrite = Checkpoints.write\n"
    slow += "Checkpoints.write = lambda *args: (time.sleep(8), write(*args))"
    train.changed(slow, "slow", 2, steps=3, save_every=0, eval_every=0, timeout_minutes=0.05)
    assert os.path.exists(train.latest("slow") / "manifest.json")


def test_a_decay_from_a_stable_checkpoint_has_the_bits_of_the_straight_run(train):
    wsd = dict(schedule="wsd", cooldown_fraction=0.25, steps=12, warmup_steps=2)
    train("trunk", schedule="constant", steps=11, warmup_steps=2, save_every=3, keep_last=0)
    train("ending", resume=train.runs / "trunk" / "checkpoints" / "step-00000009", **wsd)
    train("straight", **wsd)
    model = "model.safetensors"
    ending, straight, trunk = (sha256(train.latest(name) / model) for name in ("ending", "straight", "trunk"))
    assert ending == straight != trunk
