"""--plan and what it is calculated from: parameters, memory, micro-batches, time, money. Memory is held against a real run."""

import dataclasses
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT, execute
from lockstep import settings
from lockstep.common import errors
from lockstep.hardware import footprint, gpus
from lockstep.parallel.world import World
from lockstep.planning import choices, plan, rules, startup
from lockstep.settings import CheckpointConfig, ModelConfig
from model import GPT
from power_cut import Miniature


def planned(*args, preset="gpt2_124m"):
    """The resolved settings of a planned run, whether it `fits`, and its `table`: what --plan prints, cell by cell."""
    asked, options = plan.load_command([str(ROOT / f"config/{preset}.toml"), "--plan", *args], "")
    rules.check(asked, options.plan_world_size)
    config, remark = plan.resolve(asked, options)
    verdict, *lines = plan.text(config, remark, options).splitlines()
    table = {cells[0]: cells[1:] for cells in (re.split("  +", line.strip()) for line in lines)}
    return SimpleNamespace(config=config, verdict=verdict, table=table, fits="DOES NOT FIT" not in verdict)


def memory(*args, device="cuda", ranks=8):
    """The bytes of a planned rank, by part."""
    return footprint.of_rank(planned(f"--plan_world_size={ranks}", *args).config, ranks, device)


def total(parts):
    """The bytes of all parts."""
    return sum(parts.values())


def number(cell):
    """The number that a cell of the table begins with."""
    return float(re.match(r"[0-9.,]+", cell)[0].replace(",", ""))


@pytest.mark.parametrize(
    "n_layer, n_head, n_embd, parameters",
    [(12, 12, 768, 124_439_808), (24, 16, 1024, 354_823_168), (36, 20, 1280, 774_030_080), (48, 25, 1600, 1_557_611_200)],
)
def test_parameters_of_the_four_gpt2(n_layer, n_head, n_embd, parameters):
    shape = [f"--n_layer={n_layer}", f"--n_head={n_head}", f"--n_embd={n_embd}", "--vocab_size=50257"]
    assert total(footprint.parameters(planned(*shape).config.model)) == parameters


def test_the_plan_of_a_branch_is_that_of_its_decay():
    branch = planned("--decay_steps=300", "--resume=runs/trunk/checkpoints/step-00008000")
    assert branch.config.train.steps == 300 and branch.table["updates"] == ["300"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "architecture, n_kv_head", [("gpt2", "auto"), ("llama", "auto"), ("llama", 2), ("qwen2", 2), ("qwen3", 1)]
)
def test_parameters_are_those_of_the_model(architecture, n_kv_head, tied):
    shape = dict(n_layer=3, n_head=4, n_kv_head=n_kv_head, n_embd=64, d_ff=32, tie_embeddings=tied)
    model = ModelConfig(architecture=architecture, vocab_size=1000, **shape)
    model = settings.resolve_model(model, 1000)
    with torch.device("meta"):
        assert sum(footprint.parameters(model).values()) == GPT(model).parameter_count()


def test_plan_needs_neither_torch_nor_data_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-X", "importtime", ROOT / "train.py", ROOT / "config/gpt2_124m.toml", "--plan"]
    done = execute(command, cwd=tmp_path)
    assert re.search(r"\| +lockstep.hardware.footprint$", done.stderr, re.MULTILINE) and not re.search(
        r"\| +torch", done.stderr
    )
    verdict = done.stdout.splitlines()[0]
    assert re.fullmatch(r"gpt2_124m on 8 x H100, ddp, bfloat16: fits, \d+:\d\d min, \$\d+", verdict), verdict
    assert max(map(len, done.stdout.splitlines())) <= 128
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks, micro_steps", [(1, 64), (4, 16)])
def test_micro_steps_of_an_update(ranks, micro_steps):
    shape = ["--seq_len=2048", "--micro_batch_size=4", "--tokens_per_update=524288", f"--plan_world_size={ranks}"]
    assert planned(*shape).table["micro-steps per update"] == [str(micro_steps)]


def test_time_and_money_follow_from_the_mfu():
    found = planned("--plan_world_size=4", "--plan_gpu=a100", "--plan_mfu=0.5", "--steps=10000")
    model = settings.resolve_model(settings.read_preset(ROOT / "config/gpt2_124m.toml").model, 50257)
    flops = footprint.flops_per_token(model) * 10000 * 524288
    hours = 4 * flops / (4 * 312e12 * 0.5) / 3600 / (1 - gpus.LOST_BETWEEN_GPUS)
    assert found.table["FLOPs"] == [f"{flops:.2e}"] and found.table["MFU"][1].startswith("--plan_mfu")
    assert number(found.table["the run"][1]) == pytest.approx(hours, rel=0.02) and found.verdict.endswith(f"${2.5 * hours:.0f}")
    slower = planned("--plan_world_size=4", "--plan_gpu=a100", "--plan_mfu=0.5", "--steps=10000", "--activation_checkpointing")
    assert number(slower.table["one update"][0]) == pytest.approx(number(found.table["one update"][0]) * 4 / 3, rel=0.01)


@pytest.mark.parametrize(
    "preset, flags, mfu, source",
    [
        ("gpt2_124m", [], "42%", "measured on one GPU with gpt2_124m"),
        ("llama_1.3b", [], "51%", "measured on one GPU with llama_1.3b"),
        ("gpt2_355m", [], "40%", "assumed"),
        ("gpt2_124m", ["--plan_gpu=b200"], "28%", "assumed"),
        ("gpt2_124m", ["--plan_mfu=0.3"], "30%", "--plan_mfu"),
    ],
)
def test_the_plan_says_where_its_mfu_comes_from(preset, flags, mfu, source):
    found, why = planned(*flags, preset=preset).table["MFU"]
    assert found == mfu and why.startswith(f"{source};")


def test_one_gpu_is_as_fast_as_its_mfu_and_more_wait_for_each_other():
    one, eight = (number(planned(f"--plan_world_size={ranks}").table["tokens/s"][0]) for ranks in (1, 8))
    assert eight / 8 / one == pytest.approx(0.91, abs=1e-3)


def test_the_plan_in_presets_md_is_up_to_date():
    table = (ROOT / "docs/presets.md").read_text().partition("## Plan before you rent")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    peak, recomputed, update, waiting, run, speed = (row[1:] for row in rows[2:])
    for i, strategy in enumerate(("ddp", "fsdp")):
        plans = [planned(f"--strategy={strategy}", f"--plan_world_size={n}", preset="llama_1.3b") for n in (1, 2, 4, 8)]
        found, tokens = plans[-1].table, [number(plan.table["tokens/s"][0]) for plan in plans]
        same = f"--micro_batch_size={plans[-1].config.train.micro_batch_size}"
        again = planned(f"--strategy={strategy}", same, "--activation_checkpointing=true", preset="llama_1.3b").table
        assert recomputed[i] == f"{again['peak during an update'][0]} GB"
        assert peak[i] == f"{found['peak during an update'][0]} GB" and update[i] == found["one update"][0]
        assert found["one update"][1].startswith(waiting[i]) and plans[-1].verdict.endswith(run[i])
        assert speed[i] == ", ".join(f"{each / tokens[0]:.2f}" for each in tokens[1:])


def test_the_vocabulary_is_that_of_the_dataset(tokens, tmp_path):
    flags = ["--seq_len=16", "--tokens_per_update=8192"]
    found = planned(f"--tokens={tokens}", *flags)
    assert footprint.parameters(found.config.model)["token embedding"] == 384 * 768  # 257 tokens, padded to a multiple of 128
    missing = f"--tokens={tokens}:0.75,{tmp_path / 'none'}:0.25"
    size, remark = planned(missing, *flags).table["vocabulary, padded"]
    assert size == "50,304" and remark.endswith("does not exist")
    assert planned(missing, *flags, "--vocab_size=640").config.model.vocab_size == 640


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_plan_that_does_not_fit_says_what_needs_less(optimizer):
    small = ["--plan_gpu=4090", "--plan_world_size=8", f"--optimizer={optimizer}", "--micro_batch_size=8"]
    found = planned(*small, preset="llama_1.3b")
    assert not found.fits
    tried = "--micro_batch_size=1 or --activation_checkpointing=true or --strategy=fsdp"
    assert found.table["peak during an update"][1] == f"try {tried}"
    assert planned(*small[:3], *tried.split(" or "), preset="llama_1.3b").fits


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact"])
def test_auto_takes_the_largest_micro_batch_that_fits(strategy):
    found = planned(f"--strategy={strategy}", "--plan_gpu=4090")
    assert found.fits
    chosen = found.config.train.micro_batch_size
    assert not planned(f"--strategy={strategy}", "--plan_gpu=4090", f"--micro_batch_size={2 * chosen}").fits


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
    exact = settings.replace(config, strategy="exact")
    assert {footprint.largest_micro_batch(exact, ranks, "cpu", footprint.CPU_BYTES) for ranks in (1, 2, 4, 8)} == {4}


@pytest.mark.parametrize("memory", [19e9, 20e9, 21e9, 22e9])
def test_exact_takes_the_same_micro_batch_on_any_number_of_gpus(memory):
    """Also where a rank with one micro-batch, which keeps no earlier gradient, could take a larger one."""
    sizes = set()
    for ranks in (1, 2, 4, 8):
        machines = choices.Machines(ranks, ranks, "cuda", "cuda", "bfloat16", "bfloat16", memory, memory, 1, lambda *_: "off")
        config = settings.load([str(ROOT / "config/gpt2_124m.toml"), "--strategy=exact", "--tokens_per_update=8192"], "")
        sizes.add(choices.resolve(config, 50257, machines, {}).train.micro_batch_size)
    assert len(sizes) == 1


def test_a_model_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr("lockstep.hardware.device.memory_bytes", lambda: 24 << 30)
    config = planned("--plan_world_size=1", "--micro_batch_size=1", "--seq_len=2000000", "--tokens_per_update=2000000").config
    with pytest.raises(errors.UserError, match="has only 25.8 GB of memory; lower --micro_batch_size, --seq_len or"):
        startup.check_memory(config, World(0, 1, 1, torch.device("cpu")))


def test_a_disk_with_room_for_one_checkpoint_is_warned_of(monkeypatch, tmp_path):
    config = planned("--steps=100", "--save_every=10", f"--out_dir={tmp_path}").config
    size = footprint.checkpoint_bytes(config)
    free = {"few": 1.5, "enough": 5.1, "none": 0.5}
    said = {}
    for name, copies in free.items():
        monkeypatch.setattr(startup.shutil, "disk_usage", lambda _, n=copies: SimpleNamespace(free=n * size))
        try:
            said[name] = startup.check_disk(config)
        except errors.UserError as error:
            said[name] = str(error)
    assert "will write and keep 5 more checkpoints of 1,493.7 MB" in said["few"][0] and said["enough"] == []
    assert "a checkpoint needs 1,493.7 MB, but the disk has only 747 MB left" in said["none"]
    monkeypatch.setattr(startup.shutil, "disk_usage", lambda _: SimpleNamespace(free=1.5 * size))
    for step in (10, 20, 30, 40):
        (tmp_path / config.run.name / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    assert startup.check_disk(config) == []  # there are four already, and each new one takes the place of one


@pytest.mark.parametrize(
    "steps, every, kept, most", [(100, 500, 2, 1), (501, 500, 2, 2), (9000, 500, 2, 4), (9000, 500, 0, 18)]
)
def test_the_most_checkpoints_on_the_disk(steps, every, kept, most):
    config = CheckpointConfig(save_every=every, keep_last=kept, save_minutes=0)
    assert footprint.checkpoints_at_once(config, steps) == most
    assert footprint.checkpoints_at_once(dataclasses.replace(config, save_minutes=10), steps) == most + 1


def test_checkpointing_and_sharding_save_memory():
    ddp, fsdp, exact = (memory("--micro_batch_size=4", f"--strategy={strategy}") for strategy in ("ddp", "fsdp", "exact"))
    assert total(fsdp) < total(ddp) and exact["exact's integers"] == 8 * 124_475_904
    assert exact["optimizer state"] == ddp["optimizer state"] / 8 and exact["weights"] == ddp["weights"]
    assert total(memory("--micro_batch_size=4", "--activation_checkpointing=true")) < total(ddp)


LLAMA_8B = ["--architecture=llama", "--tie_embeddings=false", "--n_layer=32", "--n_head=32", "--n_kv_head=8", "--n_embd=4096"]
LLAMA_8B += ["--d_ff=14336", "--vocab_size=128256", "--seq_len=8192", "--plan_world_size=128", "--tokens_per_update=4194304"]


def test_gradients_are_sharded_where_a_rank_would_not_hold_them_otherwise():
    flags = [*LLAMA_8B, "--optimizer=adamw", "--strategy=fsdp"]
    found = planned(*flags)
    assert found.fits and found.config.parallel.shard_gradients == "on"
    assert not planned(*flags, "--shard_gradients=off").fits
    assert planned("--strategy=fsdp", "--micro_batch_size=4").config.parallel.shard_gradients == "off"


def test_a_run_of_fsdp_keeps_how_it_sends_gradients():
    def chosen(memory, previous, strategy="fsdp"):
        machines = choices.Machines(8, 8, "cuda", "cuda", "bfloat16", "bfloat16", memory, memory, 1, lambda *_: "off")
        config = settings.load([str(ROOT / "config/gpt2_124m.toml"), f"--strategy={strategy}", "--micro_batch_size=1"], "")
        return choices.resolve(config, 50257, machines, previous).parallel.shard_gradients

    before = {"device": "cuda", "dtype": "bfloat16", "compile": "off", "muon_dtype": "bfloat16", "shard_gradients": "off"}
    before["world_size"] = 8
    assert [chosen(memory, {}) for memory in (80e9, 2e9)] == ["off", "on"]
    assert chosen(2e9, before | {"strategy": "fsdp"}) == "off"
    assert chosen(2e9, before | {"strategy": "fsdp", "world_size": 16}) == "on"
    assert chosen(2e9, {}, "exact") == "off"


def test_the_mask_within_documents_is_counted_where_there_is_one():
    flags = ["--seq_len=4096", "--micro_batch_size=2", "--dtype=bfloat16", "--tokens_per_update=65536"]

    def mask(*more, **options):
        within, window = (total(memory(f"--attend={attend}", *flags, *more, **options)) for attend in ("document", "window"))
        return within - window

    assert mask(device="cpu", ranks=1) == 2 * 2 * 4096**2  # bfloat16, two sequences
    assert mask("--dropout=0.1") == 2 * 2 * 4096**2
    assert mask() == 2 * 16 * (4096 // 128) ** 2  # the numbers of FlexAttention's blocks


def test_init_from_takes_what_training_takes_and_downloads_no_weights(monkeypatch, tmp_path):
    run = Miniature(tmp_path / "run" / "checkpoints", keep_last=1)
    assert run.save(1)
    few = ["--seq_len=4", "--micro_batch_size=1", "--tokens_per_update=64", "--tokens=nowhere"]
    assert planned(f"--init_from={tmp_path / 'run'}", *few).config.model.n_embd == 2
    with pytest.raises(errors.UserError, match="has a context of 4.* use --seq_len=4 or less"):
        planned(f"--init_from={tmp_path / 'run'}", "--seq_len=8", *few[1:])
    saved, asked = run.checkpoints.directory / "latest", []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: asked.append(allow_patterns) or saved)
    assert planned("--init_from=somebody/model", *few).config.model.n_embd == 2 and asked == [["config.json"]]


def test_exact_takes_the_largest_micro_batch_that_leaves_eight_and_nodes_share_only_their_own_memory():
    for sequences, size in [(60, 6), (64, 8), (7, 1), (24, 3), (62, 2)]:
        flags = ["--seq_len=16", f"--tokens_per_update={16 * sequences}", "--strategy=exact", "--n_embd=32", "--n_head=2"]
        assert planned("--plan_world_size=4", *flags).config.train.micro_batch_size == size

    def sharded(local_ranks):
        machines = choices.Machines(16, local_ranks, "cpu", "cpu", *["float32"] * 2, 8e9, 8e9, 1, lambda *_: "off")
        config = settings.load([str(ROOT / "config/gpt2_124m.toml"), "--strategy=fsdp", "--micro_batch_size=1"], "")
        return choices.resolve(config, 50257, machines, {}).parallel.shard_gradients

    assert (sharded(16), sharded(2)) == ("on", "off")


def test_plan_flags_are_no_settings_of_the_run():
    config, options = plan.load_command(["--plan", "--plan_gpu=h200"], "")
    assert options == plan.PlanConfig(plan=True, plan_gpu="h200")
    assert "plan" not in settings.dumps(config)
