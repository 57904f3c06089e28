"""Training on a processor that has AVX2 and no bfloat16: what a newer one does when it is held to those instructions."""

import tomllib

import pytest

import machine
from conftest import execute
from lockstep.hardware import host

AVX2 = machine.AVX2
pytestmark = pytest.mark.skipif("avx2" not in host.cpuinfo("flags").split(), reason="this processor has no AVX2")
AUTO = dict(dtype="auto", optimizer="muon", steps=2, eval_every=0, save_every=0)


def run(train, name, **flags):
    """Train as a new process does: a fork of one that has imported torch would have its instructions."""
    execute(train.command(name, **AUTO | flags), env=AVX2, fork=False)


def test_a_run_takes_float32_for_the_model_and_for_muon_and_continues_with_the_same_bits(train):
    run(train, "whole", schedule="constant", steps=4)
    config = tomllib.loads((train.runs / "whole" / "config.toml").read_text())
    assert (config["train"]["dtype"], config["optim"]["muon_dtype"]) == ("float32", "float32")
    run(train, "parts", schedule="constant")
    assert train.state("parts")["versions"]["hardware"].endswith("AVX2")
    run(train, "parts", schedule="constant", steps=4)
    assert train.files("parts") == train.files("whole")


def test_a_run_from_a_processor_with_bfloat16_keeps_its_precision_and_says_what_that_costs(train):
    train("moved", **AUTO | dict(dtype="bfloat16", muon_dtype="bfloat16"))
    done = execute(train.command("moved", **AUTO | dict(steps=3)), env=AVX2, fork=False)
    faster = '--dtype=float32 with muon_dtype = "float32" in a preset may be faster'
    assert f"warning: this processor is not known to be fast in bfloat16; {faster}" in done.stdout
