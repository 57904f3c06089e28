"""A run on a mixture of datasets: the same run on any number of ranks, with each dataset's loss in its records."""

import json
import re
import sys

import pytest

from conftest import ROOT, execute

FLAGS = dict(strategy="exact", dropout=0.1, eval_tokens=1280)


@pytest.fixture(scope="module")
def mixture(tokens, tmp_path_factory):
    """Three parts of the tests' own sources and one of their tests, as --tokens names it."""
    other = tmp_path_factory.mktemp("tokens") / "tests"
    sources = [str(ROOT / "tests" / name) for name in ("conftest.py", "test_data.py", "warm.py")]
    execute([sys.executable, "prepare_data.py", *sources, f"--out={other}", "--tokenizer=bytes"])
    return f"{tokens}:0.75,{other}:0.25"


def test_a_mixture_gives_the_same_bits_on_any_number_of_ranks_killed_or_not(train, mixture):
    flags = dict(FLAGS, tokens=mixture, save_every=1)
    train("w1", **flags)
    train("w3", ranks=3, **flags)
    train.assert_same("w3", "w1")
    for ranks, stop_at in ((3, " 7"), (1, "13")):
        train.kill("killed", f"step     {stop_at}/20  loss", ranks, **flags)
    train("killed", ranks=2, **flags)
    train.assert_same("killed", "w1")


def test_the_losses_of_each_dataset_and_of_the_mixture_are_recorded(train, mixture):
    shown = train("mixed", **FLAGS, tokens=mixture).stdout
    assert re.findall(r"to train on in .*; the run reads them [\d.]+ times, for (.*) of its sequences\n", shown) == [
        "75 %",
        "25 %",
    ]
    records = train.metrics("mixed", "val_loss")
    assert len(records) == 4
    for record in records:
        assert record["val_loss"] == 0.75 * record["val_loss/tiny"] + 0.25 * record["val_loss/tests"]
        assert record["val_bpb/tiny"] != record["val_bpb/tests"] > 0
    same = ["--eval_tokens=640", "--device=cpu", "--dtype=float32"]
    out = execute([sys.executable, "evaluate.py", train.latest("mixed"), *same]).stdout
    losses = re.findall(r"loss (\d+\.\d+)", out)
    assert len(losses) == 3 and f"{mixture}\nloss" in out
    assert losses[:2] == [f"{records[-1][f'val_loss/{name}']:.4f}" for name in ("tiny", "tests")]


def test_a_preset_names_a_mixture_as_a_list(train, mixture, tmp_path):
    preset = tmp_path / "mixed.toml"
    preset.write_text(f"[data]\ntokens = {json.dumps(mixture.split(','))}\n")
    flags = train.arguments("listed", **FLAGS, steps=2)
    flags = [flag for flag in flags[1:] if not flag.startswith("--tokens=")]
    execute([sys.executable, "train.py", preset, *flags])
    assert f'tokens = "{mixture}"' in (train.runs / "listed" / "config.toml").read_text()


def test_weights_change_with_a_new_run_not_within_one(train, mixture):
    train("first", **FLAGS, tokens=mixture, steps=5)
    other = mixture.replace("0.75", "0.5").replace("0.25", "0.5")
    errors = train("first", **FLAGS, tokens=other, steps=10, status=2).stderr
    assert errors.startswith(f"error: --tokens={other} is not the same tokens in the same shares as {mixture} was")
    train("annealed", **FLAGS, tokens=other, steps=10, resume=train.runs / "first")
    assert train.metrics("annealed", "loss")[0]["step"] == 6
