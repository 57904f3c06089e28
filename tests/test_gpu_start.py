"""What a start says on machines whose GPU torch cannot use, by files and functions in place of a GPU."""

import dataclasses
import os
import platform

import pytest
import torch

import settings
from common.errors import UserError
from conftest import before_update
from hardware import device, host
from parallel.world import World
from planning import startup

PROC = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12.2\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU, as Linux shows it."""
    for name, text in {"NVIDIA_VERSION": PROC, "NVIDIA_DEVICE": ""}.items():
        path = tmp_path / name
        path.write_text(text)
        monkeypatch.setattr(host, name, path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize("text, driver", [(PROC, "535.104.05"), (OPEN, "580.65.06"), ("something else", "")])
def test_the_driver_is_read_from_proc(gpu, text, driver):
    (gpu / "NVIDIA_VERSION").write_text(text)
    assert host.nvidia_driver() == driver


@pytest.mark.parametrize(
    "cuda, said",
    [
        ("13.0", "an NVIDIA GPU with driver 535.104.05, but torch .* its CUDA 13.0 needs driver 580 or newer"),
        (None, "is a build without CUDA"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(gpu, monkeypatch, cuda, said):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError, match=said + ".*--device=cpu trains on the CPU"):
        device.prepare_device("auto")
    assert device.prepare_device("cpu") == torch.device("cpu")


def test_a_gpu_that_the_user_hides_is_none(gpu, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.prepare_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    "capability, architectures, fits",
    [
        ((9, 0), ["sm_75", "sm_80", "sm_90", "compute_120"], True),
        ((8, 9), ["sm_75", "sm_80", "sm_90"], True),  # by the kernels for 8.0
        ((10, 3), ["sm_100a", "sm_90"], True),
        ((12, 1), ["sm_90", "compute_90"], True),  # by PTX
        ((7, 0), ["sm_75", "sm_80", "sm_90", "compute_120"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((7, 0), [], True),  # not known
    ],
)
def test_a_gpu_without_kernels_is_refused_by_name(monkeypatch, capability, architectures, fits):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    if fits:
        device.require_kernels(torch.device("cuda"))
    else:
        with pytest.raises(UserError, match=r"Tesla V100 has compute capability \d+\.\d.* only for 7.5|8.0"):
            device.require_kernels(torch.device("cuda"))


@pytest.mark.parametrize("release, system, expandable", [
    ("6.1.0-amd64", "Linux", True),
    ("5.15.153.1-microsoft-standard-WSL2", "Linux", False),
    ("4.4.0-19041-Microsoft", "Linux", False),
    ("23.1.0", "Darwin", False),
])  # fmt: skip
def test_wsl_keeps_cuda_s_own_allocator(monkeypatch, release, system, expandable):
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(os, "environ", {})
    host.prepare_torch()
    assert ("PYTORCH_ALLOC_CONF" in os.environ) == expandable


def test_a_gpu_that_is_too_small_is_refused_before_the_model_is_built(monkeypatch):
    monkeypatch.setattr(device, "memory", lambda _: (23 << 30, 24 << 30))
    config = settings.load(["config/llama_1.3b.toml", "--vocab_size=50304", "--micro_batch_size=1", "--dtype=bfloat16"], "")
    config = dataclasses.replace(config, model=settings.resolve_model(config.model, 0))
    with pytest.raises(UserError, match=r"this GPU has 25\.8 GB of memory.*--strategy=fsdp"):
        startup.check_memory(config, World(0, 1, 1, torch.device("cuda")))


def test_running_out_of_memory_ends_in_one_line_that_says_what_needs_less(train):
    change = before_update(2, "(_ for _ in ()).throw(torch.OutOfMemoryError('CUDA out of memory. Tried to allocate'))")
    done = train.changed(change, "oom", steps=5, micro_batch_size=2, status=1)
    said = "error: rank 0 ran out of memory with --micro_batch_size=2; continue with --micro_batch_size=1, "
    assert f"{said}--activation_checkpointing=true or --strategy=fsdp" in done.stderr and "Traceback" not in done.stderr
