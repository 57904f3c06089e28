"""--plan and what it is calculated from: parameters, memory, micro-batches, time, money. Memory is held against a real run."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch

import settings
from common import errors
from conftest import ROOT, environment
from hardware import footprint
from model import GPT
from planning import plan
from settings import ModelConfig, PlanConfig


def run(*args, cwd, status=0, options=()):
    """`python OPTIONS train.py ARGS` in the directory `cwd`."""
    command = [sys.executable, *options, str(ROOT / "train.py"), *args]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def facts(*args, preset="gpt2_124m"):
    """The plan's facts, in this process."""
    command = settings.load_command([str(ROOT / f"config/{preset}.toml"), "--plan", *args], "")
    return plan.make(command.config, command.plan)


@pytest.mark.parametrize(
    "n_layer, n_head, n_embd, parameters",
    [(12, 12, 768, 124_439_808), (24, 16, 1024, 354_823_168), (36, 20, 1280, 774_030_080), (48, 25, 1600, 1_557_611_200)],
)
def test_parameters_of_the_four_gpt2(n_layer, n_head, n_embd, parameters):
    shape = [f"--n_layer={n_layer}", f"--n_head={n_head}", f"--n_embd={n_embd}", "--vocab_size=50257"]
    assert facts(*shape)["parameters"]["total"] == parameters


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture, n_kv_head", [("gpt2", 0), ("llama", 0), ("llama", 2), ("qwen3", 1)])
def test_parameters_are_those_of_the_model(architecture, n_kv_head, tied):
    model = ModelConfig(architecture, 1000, 3, 4, n_kv_head, 64, 0, 32, tie_embeddings=tied)
    model = settings.resolve_model(model, 1000)
    with torch.device("meta"):
        assert sum(footprint.parameters(model).values()) == GPT(model).parameter_count()


def test_plan_needs_neither_torch_nor_data_and_leaves_nothing(tmp_path):
    began = time.perf_counter()
    done = run(str(ROOT / "config/gpt2_124m.toml"), "--plan", cwd=tmp_path, options=["-X", "importtime"])
    assert re.search(r"\| +footprint$", done.stderr, re.MULTILINE) and not re.search(r"\| +torch", done.stderr)
    assert time.perf_counter() - began < 20
    verdict = done.stdout.splitlines()[0]
    assert re.fullmatch(r"gpt2_124m on 8 x H100, ddp, bfloat16: fits, \d+ min \d+ s, \$\d+", verdict), verdict
    assert max(map(len, done.stdout.splitlines())) <= 128
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks, micro_steps", [(1, 64), (4, 16)])
def test_micro_steps_of_an_update(ranks, micro_steps, tmp_path):
    shape = ["--seq_len=2048", "--micro_batch_size=4", "--tokens_per_update=524288", f"--plan_world_size={ranks}"]
    done = run(str(ROOT / "config/gpt2_124m.toml"), "--plan", "--plan_json", *shape, cwd=tmp_path)
    assert json.loads(done.stdout)["batch"]["micro_steps"] == micro_steps


def test_time_and_money_follow_from_the_mfu():
    found = facts("--plan_world_size=4", "--plan_gpu=a100", "--plan_mfu=0.5", "--dollars_per_gpu_hour=2", "--steps=1000")
    model = settings.resolve_model(settings.read_preset(ROOT / "config/gpt2_124m.toml").model, 50257)
    flops = footprint.flops_per_token(model) * 1000 * 524288
    assert found["time"]["flops"] == flops and found["time"]["mfu_is"] == "--plan_mfu"
    assert found["seconds"] == pytest.approx(flops / (4 * 312e12 * 0.5), rel=0.01)
    assert found["dollars"] == pytest.approx(found["seconds"] / 3600 * 4 * 2)
    slower = facts("--plan_world_size=4", "--plan_gpu=a100", "--plan_mfu=0.5", "--steps=1000", "--activation_checkpointing")
    assert slower["time"]["compute_s"] == pytest.approx(found["time"]["compute_s"] * 4 / 3)


def test_epochs_and_vocabulary_are_those_of_the_dataset(tokens):
    found = facts(f"--tokens={tokens}", "--seq_len=16", "--tokens_per_update=8192", "--steps=50")
    metadata = json.loads((tokens / "dataset.json").read_text())
    train = sum(shard["tokens"] for shard in metadata["shards"] if shard["split"] == "train")
    assert found["tokens"]["epochs"] == {tokens.name: pytest.approx(50 * 8192 / train)}
    assert found["parameters"]["token embedding"] == 384 * 768  # 257 tokens, padded to a multiple of 128


def test_an_error_says_how_many_ranks_the_plan_is_for():
    with pytest.raises(errors.UserError, match=r"x 8 ranks; try .*\n .*--plan_world_size=8\)"):
        facts("--tokens_per_update=5000", "--seq_len=256")


def test_ranks_on_a_cpu_share_its_cores():
    found = facts("--plan_gpu=cpu", "--plan_world_size=4", "--micro_batch_size=1")
    assert found["scaling"][1] == 1 and found["scaling"][4] < 0.26
    assert (
        found["time"]["tokens_per_second"]
        < facts("--plan_gpu=cpu", "--plan_world_size=1", "--micro_batch_size=1")["time"]["tokens_per_second"]
    )


def test_a_mixture_has_the_epochs_of_each_dataset(tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "other")
    flags = ["--seq_len=16", "--tokens_per_update=8192", "--steps=50"]
    alone = facts(f"--tokens={tokens}", *flags)["tokens"]["epochs"][tokens.name]
    mixed = facts(f"--tokens={tokens}:0.75,{tmp_path / 'other'}:0.25", *flags)
    assert mixed["tokens"]["epochs"] == {tokens.name: pytest.approx(0.75 * alone), "other": pytest.approx(0.25 * alone)}
    assert "epochs of other " in plan.text(mixed)
    missing = facts(f"--tokens={tokens}:0.75,{tmp_path / 'none'}:0.25", *flags)
    assert not missing["tokens"]["epochs"] and "it is not there" in plan.text(missing)
    assert missing["tokens"]["vocabulary_by"] == "nobody, so GPT-2's is taken"


@pytest.mark.parametrize("preset, rows", [("shakespeare_char", 384), ("laptop", 4096), ("gpt2_124m", 50304)])
def test_without_tokens_the_vocabulary_is_that_of_the_command_that_makes_them(monkeypatch, tmp_path, preset, rows):
    monkeypatch.chdir(tmp_path)
    found = facts("--plan_world_size=1", preset=preset)
    assert found["vocab_size"] == rows and "which makes tokens/" in plan.text(found)
    given = facts("--plan_world_size=1", "--vocab_size=640", preset=preset)
    assert given["vocab_size"] == 640 and given["tokens"]["vocabulary_by"] == "--vocab_size"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_would_fit_does_fit(optimizer):
    small = ["--plan_gpu=4090", "--plan_world_size=8", f"--optimizer={optimizer}"]
    found = facts(*small, "--micro_batch_size=8", preset="llama_1.3b")
    assert not found["fits"] and "DOES NOT FIT" in plan.text(found).splitlines()[0]
    for words in found["memory"]["remedies"]:
        flags, _, gpus = words.partition(" on ")
        ranks = [f"--plan_world_size={gpus.split()[0]}"] if gpus else []
        again = ["--micro_batch_size=8"] * ("micro_batch" not in flags)
        assert facts(*small, *again, *flags.split(), *ranks, preset="llama_1.3b")["fits"], words
    assert found["memory"]["remedies"]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "exact"])
def test_auto_takes_the_largest_micro_batch_that_fits(strategy):
    found = facts(f"--strategy={strategy}", "--plan_gpu=4090")
    assert found["fits"]
    chosen = found["batch"]["micro_batch_size"]
    assert not facts(f"--strategy={strategy}", "--plan_gpu=4090", f"--micro_batch_size={2 * chosen}")["fits"]


# As before memory was calculated by part: bits depend on the choice.
@pytest.mark.parametrize(
    "preset, vocab_size, chosen", [("laptop", 4096, [16, 16, 8, 4]), ("shakespeare_char", 50257, [32, 16, 8, 4])]
)
def test_the_choice_of_a_cpu_has_not_changed(preset, vocab_size, chosen):
    config = settings.read_preset(ROOT / f"config/{preset}.toml")
    config = settings.replace(config, vocab_size=vocab_size)
    config = dataclasses.replace(config, model=settings.resolve_model(config.model, 256))
    sizes = [footprint.largest_micro_batch(config, ranks, "cpu", footprint.CPU_BYTES) for ranks in (1, 2, 4, 8)]
    assert sizes == chosen
    flags = [f"--vocab_size={vocab_size}", "--tokens=nowhere", "--plan_gpu=cpu", "--plan_world_size=2"]
    assert facts(*flags, preset=preset)["batch"]["micro_batch_size"] == chosen[1]
    exact = settings.replace(config, strategy="exact")
    assert {footprint.largest_micro_batch(exact, ranks, "cpu", footprint.CPU_BYTES) for ranks in (1, 2, 4, 8)} == {4}


def test_checkpointing_and_sharding_save_memory():
    flags = ["--micro_batch_size=4", "--plan_world_size=8"]
    parts = {strategy: facts(f"--strategy={strategy}", *flags)["memory"] for strategy in ("ddp", "zero1", "fsdp", "exact")}
    totals = {strategy: memory["total"] for strategy, memory in parts.items()}
    assert totals["fsdp"] < totals["zero1"] < totals["ddp"]
    assert parts["exact"]["parts"]["exact's integers"] == 8 * 124_475_904
    for memory in parts.values():
        assert sum(memory["other_parts"].values()) < memory["total"]


def test_scaling_is_worse_for_what_waits_and_on_slow_networks():
    def efficiency(*args):
        return facts("--micro_batch_size=4", *args)["scaling"]

    assert efficiency()[1] == 1
    for args in ([], ["--strategy=fsdp"], ["--strategy=exact"], ["--plan_gpu=4090", "--plan_world_size=16"]):
        shares = list(efficiency(*args).values())
        assert all(0 < share <= 1 for share in shares)
    assert efficiency("--strategy=scratch_allreduce")[8] < efficiency()[8]
    slow = ["--plan_gpu=4090", "--plan_world_size=16"]
    assert efficiency("--strategy=exact", *slow)[16] < efficiency(*slow)[16]  # twice the bytes
    fsdp = facts("--strategy=fsdp", "--plan_world_size=16", "--micro_batch_size=4")
    hybrid = facts("--strategy=fsdp", "--plan_world_size=16", "--micro_batch_size=4", "--replicate=2")
    assert hybrid["time"]["sent_bytes"] < fsdp["time"]["sent_bytes"]
    assert hybrid["memory"]["total"] > fsdp["memory"]["total"]


def test_a_measured_speed_is_shown(train):
    train("fast", steps=3)
    flags = [f"--out_dir={train.runs}", "--name=fast", "--plan_gpu=cpu", "--plan_world_size=1"]
    found = facts(*flags, f"--tokens={train.tokens}", preset="laptop")["time"]["measured"]
    assert found["file"] == str(train.runs / "fast" / "metrics.jsonl") and found["tokens_per_second"] > 0
    assert facts(f"--out_dir={train.runs}", "--name=fast")["time"]["measured"] is None  # of another device


def test_plan_flags_are_no_settings_of_the_run():
    command = settings.load_command(["--plan", "--plan_gpu=h200"], "")
    assert command.plan == PlanConfig(plan=True, plan_gpu="h200")
    assert "plan" not in settings.dumps(command.config)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--plan_gpu=h900"], "--plan_gpu must be a100|h100|h200|b200|4090|cpu, not 'h900'"),
        (["--plan_world_size=0"], "--plan_world_size must be greater than 0"),
        (["--plan_mfu=40"], "--plan_mfu must be at least 0 and at most 1"),
        (["--plan_world_size=7"], "try 523264 or 530432; or --strategy=exact"),
        (["--plan_gpus=h100"], "perhaps you meant --plan_gpu"),
        (["--vocab_size=100", "--plan_world_size=1", "--n_head=7"], "--n_embd=768 is not a multiple of --n_head=7"),
    ],
)
def test_bad_flags_are_refused(args, message, tmp_path):
    done = run(str(ROOT / "config/gpt2_124m.toml"), "--plan", *args, cwd=tmp_path, status=2)
    assert done.stderr.startswith("error: ") and message in done.stderr


@pytest.mark.slow
def test_predicted_memory_is_that_of_a_run(tmp_path):
    command = [sys.executable, "bench/memory.py", "settings", "--only=ddp, accumulating", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "1 predictions" in done.stdout, done.stdout + done.stderr
