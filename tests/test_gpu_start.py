"""What a start says on machines whose GPU torch cannot use, by files and functions in place of a GPU."""

import dataclasses
import os
import platform
import re

import pytest
import torch

from conftest import before_update
from lockstep import settings
from lockstep.checkpoints import checkpoint
from lockstep.common.errors import UserError
from lockstep.hardware import device, host
from lockstep.parallel.world import World
from lockstep.planning import rules, startup


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU, as Linux shows it."""
    monkeypatch.setattr(host, "NVIDIA_VERSION", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(gpu):
    for name in ("auto", "cuda"):
        with pytest.raises(UserError, match="docs/platforms.md says which build .* --device=cpu trains on the CPU"):
            device.prepare_device(name)
    assert device.prepare_device("cpu") == torch.device("cpu")


def test_a_gpu_that_the_user_hides_is_none(gpu, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.prepare_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("release, system, gpu_of_wsl, expandable", [
    ("6.1.0-amd64", "Linux", False, True),
    ("5.15.153.1-microsoft-standard-WSL2", "Linux", True, False),
    ("4.4.0-19041-Microsoft", "Linux", False, False),
    ("6.12.0-mine", "Linux", True, False),  # WSL with a kernel of one's own
    ("23.1.0", "Darwin", False, False),
])  # fmt: skip
def test_wsl_keeps_cuda_s_own_allocator(monkeypatch, tmp_path, release, system, gpu_of_wsl, expandable):
    monkeypatch.setattr(host, "WSL_GPU", tmp_path if gpu_of_wsl else tmp_path / "none")
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(os, "environ", {})
    host.prepare_torch()
    assert ("PYTORCH_ALLOC_CONF" in os.environ) == expandable


def test_a_gpu_that_is_too_small_is_refused_before_the_model_is_built(monkeypatch):
    monkeypatch.setattr(device, "memory", lambda _: (23 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    config = settings.load(["config/llama_1.3b.toml", "--vocab_size=50304", "--micro_batch_size=1", "--dtype=bfloat16"], "")
    config = dataclasses.replace(config, model=settings.resolve_model(config.model, 0))
    with pytest.raises(UserError, match=r"this GPU has only 25\.8 GB of memory.*several GPUs with --strategy=fsdp$"):
        startup.check_memory(config, World(0, 1, 1, torch.device("cuda")))


OOM = "(_ for _ in ()).throw(torch.OutOfMemoryError('CUDA out of memory. Tried to allocate'))"


@pytest.mark.parametrize("change", [before_update(2, OOM), f"train.build_engine = lambda *_: {OOM}"])
def test_running_out_of_memory_ends_in_one_line_that_says_what_needs_less(train, change):
    done = train.changed(change, "oom", steps=5, micro_batch_size=2, status=1)
    said = "error: rank 0 ran out of memory with --micro_batch_size=2; continue with --micro_batch_size=1 or "
    assert f"{said}--activation_checkpointing=true or several GPUs with --strategy=fsdp\n" in done.stderr


@pytest.mark.parametrize("flags, ranks, said", [
    ([], 8, "--activation_checkpointing=true or --strategy=fsdp"),
    (["--strategy=exact"], 8, "--activation_checkpointing=true or --strategy=fsdp"),
    (["--strategy=fsdp", "--activation_checkpointing=true"], 8, "--shard_gradients=on"),
    (["--strategy=fsdp", "--activation_checkpointing=true", "--shard_gradients=on"], 8, "a GPU with more memory"),
    (["--activation_checkpointing=true"], 1, "several GPUs with --strategy=fsdp"),
    (["--activation_checkpointing=true", "--strategy=fsdp"], 1, "several GPUs"),
])  # fmt: skip
def test_only_what_would_help_is_advised_when_memory_runs_out(flags, ranks, said):
    assert rules.less_memory(settings.load(flags, ""), ranks) == said


CONFIG = ["config/gpt2_124m.toml", "--dtype=bfloat16", "--micro_batch_size=8", "--vocab_size=50304"]


@pytest.fixture
def h100(monkeypatch):
    """A node with eight H100, as far as torch.cuda is asked at the start. Returns what the versions are, to be changed."""
    found = {"nccl": (2, 29, 7), "name": "NVIDIA H100 80GB HBM3", "kernel": "FlashAttention 2"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: found["name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))  # a build for CUDA asks for it
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: found["nccl"])
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for module in (startup, checkpoint):
        monkeypatch.setattr(module, "attention_kernel", lambda *_: found["kernel"])
    return found


def settled(*flags):
    config = settings.load([*CONFIG, *flags], "")
    return dataclasses.replace(config, model=settings.resolve_model(config.model, 0))


@pytest.mark.parametrize("changed", [{"nccl": (2, 28, 9)}, {"name": "NVIDIA H100 PCIe"}, {"kernel": "cuDNN's attention"}])
def test_ranks_that_compute_otherwise_are_refused_under_exact_and_named_elsewhere(h100, monkeypatch, changed):
    cuda = torch.device("cuda")
    ours, world = checkpoint.versions(settled(), cuda), World(0, 2, 2, cuda)
    assert ours["nccl"] == "2.29.7" and ours["hardware"] == "NVIDIA H100 80GB HBM3" and ours["attention"] == "FlashAttention 2"
    assert {"cuda", "cudnn", "torch"} <= ours.keys()
    h100.update(changed)
    theirs = checkpoint.versions(settled(), cuda)
    (name,) = (name for name in ours if ours[name] != theirs[name])
    said = f"{name} is {theirs[name]} on rank 1 and {ours[name]} on rank 0"
    monkeypatch.setattr(World, "all_gather", lambda world, value: [value, theirs])
    (warning,) = startup.compare(settled(), world, ours)
    assert warning.startswith(f"warning: {said}; ")
    with pytest.raises(UserError, match=f"{said}; --strategy=exact needs identical hardware and libraries"):
        startup.compare(settled("--strategy=exact"), world, ours)
    assert startup.compare(settled("--strategy=exact", "--numerics=portable"), world, ours) == []
    monkeypatch.setattr(World, "all_gather", lambda world, value: [value, value])
    assert startup.compare(settled("--strategy=exact"), world, ours) == []


OTHER = "from lockstep.hardware import device\nif os.environ['RANK'] == '1':\n    device.describe = lambda own: 'an abacus'"


def test_one_rank_on_other_hardware_ends_a_run_under_exact_and_a_resume_names_what_has_changed(train):
    done = train.changed(OTHER, "mixed", 2, strategy="exact", status=1)
    assert (
        "error: hardware is an abacus on rank 1 and " in done.stderr
        and "exact needs identical hardware and libraries" in done.stderr
    )
    assert not train.runs.exists()
    train.changed(OTHER, "mixed", 2, steps=5)
    assert "warning: hardware is an abacus on rank 1 and " in train.log("mixed")
    train.changed(OTHER.replace("'1'", "'0'"), "mixed", 2, steps=6)
    assert re.search("^changed: hardware .+ -> an abacus$", train.log("mixed"), re.M)


@pytest.mark.parametrize("gpus, local, said", [
    (8, 1, "note: 7 GPUs of this node will be idle; torchrun --nproc_per_node=8 train.py ... uses 8"),
    (7, 1, "note: 6 GPUs of this node will be idle; torchrun --nproc_per_node=4 train.py ... uses 4"),
    (7, 4, None),
    (8, 8, None),
])  # fmt: skip
def test_gpus_that_no_rank_uses_are_named(h100, monkeypatch, gpus, local, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(device, "memory", lambda _: (80 << 30, 80 << 30))
    notes = startup.check(settled(), World(0, local, local, torch.device("cuda")))
    assert notes == [said] * bool(said)
