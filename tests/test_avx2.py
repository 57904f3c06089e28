"""Training on a processor that has AVX2 and no bfloat16: what a newer one does when it is held to those instructions."""

import json
import sys
import tomllib

import pytest

import machine
from conftest import execute

AVX2 = machine.PROCESSORS["avx2"]
AUTO = dict(dtype="auto", optimizer="muon", steps=12, eval_every=0, save_every=0)
# Seconds of the processor for the updates after the first, by optimizer. Wide enough for Muon's products to count.
UPDATES = """
import json, sys, time
import data, settings, train
from planning import choices
from checkpoints.checkpoint import TrainState
from checkpoints.lookup import Start

seconds = {}
for optimizer in ("adamw", "muon"):
    config = settings.load([*sys.argv[1:], f"--optimizer={optimizer}"], "")
    world = train.join(config)
    dataset = data.open_mixture(config.data.tokens)
    config = choices.resolve(config, dataset.vocab_size, world, None, {})
    run = train.build(config, world, dataset, Start(TrainState()))
    ahead = data.Prefetcher(run.batches, [(step, 0) for step in range(4)], world.device)
    for step in range(4):
        began = time.process_time()
        train.update(run, ahead)
        seconds.setdefault(optimizer, []).append(time.process_time() - began)
    ahead.close()
print(json.dumps({optimizer: min(times[1:]) for optimizer, times in seconds.items()}))
"""


@pytest.fixture(scope="module", autouse=True)
def held_to_avx2():
    """Skip where the processor cannot be held to AVX2."""
    shown = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    if execute([sys.executable, "-c", shown], env=AVX2).stdout.strip() != "AVX2":
        pytest.skip("this processor has no AVX2")


def run(train, name, ranks=1, status=0, **flags):
    """Train as a new process does: a fork of one that has imported torch would have its instructions."""
    execute(train.command(name, ranks, **AUTO | flags), status=status, env=AVX2, fork=False)


def test_a_run_takes_float32_for_the_model_and_for_muon_and_continues_with_the_same_bits(train):
    run(train, "whole", schedule="constant")
    config = tomllib.loads((train.runs / "whole" / "config.toml").read_text())
    assert (config["train"]["dtype"], config["optim"]["muon_dtype"]) == ("float32", "float32")
    run(train, "parts", steps=6, schedule="constant")
    assert train.state("parts")["versions"]["hardware"].endswith("AVX2")
    run(train, "parts", schedule="constant")
    assert train.files("parts") == train.files("whole")


def test_exact_has_the_same_bits_on_three_ranks(train):
    run(train, "one", strategy="exact")
    run(train, "three", ranks=3, strategy="exact")
    assert train.files("one") == train.files("three")


def test_a_run_from_a_processor_with_bfloat16_keeps_its_precision_and_says_what_that_costs(train):
    run(train, "moved", steps=2, dtype="bfloat16", muon_dtype="bfloat16")
    done = execute(train.command("moved", **AUTO | dict(steps=3)), env=AVX2, fork=False)
    assert "warning: this processor is " in done.stdout
    assert "times as fast in float32 as in bfloat16; --dtype=float32 --muon_dtype=float32 takes it" in done.stdout


def test_muon_costs_little_more_than_adamw(train):
    shape = dict(n_layer=1, n_head=2, n_embd=192, seq_len=64, micro_batch_size=32, tokens_per_update=2048, threads=1)
    flags = train.arguments("updates", **shape, steps=4, dtype="auto")[1:]
    seconds = json.loads(execute([sys.executable, "-c", UPDATES, *flags], env=AVX2).stdout)
    assert seconds["muon"] < 1.6 * seconds["adamw"], seconds  # in emulated bfloat16 it takes six times as long
