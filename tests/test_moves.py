"""A run that moves to another directory, number of ranks or strategy, and keeps all the bits that it can keep."""

import os
import random
import shutil

import pytest

from conftest import STRATEGIES, largest_difference

MOVES = 20
WALK = dict(optimizer="adamw", schedule="constant", lr=1e-4, warmup_steps=0, eval_every=0, save_every=0)


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


@pytest.mark.slow
def test_a_walk_over_strategies_and_numbers_of_ranks_ends_at_the_same_weights_up_to_rounding(train):
    train("straight", steps=MOVES, **WALK)
    chance, visited = random.Random(0), []
    for step in range(1, MOVES + 1):
        strategy, ranks = chance.choice(STRATEGIES), chance.randint(1, 3)
        train("walk", ranks=ranks, steps=step, strategy=strategy, **WALK)
        visited.append((strategy, ranks))
    assert [era["world_size"] for era in train.state("walk")["history"]] == [ranks for _, ranks in visited]
    assert len(set(visited)) >= 5
    assert largest_difference(train.weights("walk"), train.weights("straight")) < 2e-5


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
