"""A run that moves to another directory, and ranks that end together. tests/test_sharded.py goes from strategy to strategy."""

import os
import shutil

import pytest


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


@pytest.mark.parametrize("change, setting", [("choose_compile", "compile"), ("choose_dtype", "dtype")])
def test_ranks_that_would_choose_differently_agree_on_what_works_on_all(train, change, setting):
    values = {"compile": ("on", "off"), "dtype": ("bfloat16", "float32")}[setting]
    differ = f"from hardware import device\ndevice.{change} = lambda *args: {values}[int(os.environ['RANK'] == '1')]"
    train.changed(differ, "agreed", 3, steps=2, compile="off", dtype="float32")
    assert f'{setting} = "{values[1]}"' in (train.runs / "agreed" / "config.toml").read_text()


def test_a_last_save_longer_than_the_timeout_does_not_end_the_other_ranks(train):
    slow = "import time\nfrom checkpoints import checkpoint\nwrite = checkpoint.write\n"
    slow += "checkpoint.write = lambda *args: (time.sleep(8), write(*args))"
    train.changed(slow, "slow", 2, steps=3, save_every=0, eval_every=0, timeout_minutes=0.05)
    assert os.path.exists(train.latest("slow") / "manifest.json")
