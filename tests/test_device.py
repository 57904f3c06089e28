"""What hardware/ and evaluate.py do on GPUs, checked on a CPU: torch's answers about a device are replaced."""

import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import settings
from common.errors import UserError
from conftest import ROOT, execute
from evaluate import evaluate
from hardware import device, footprint, host
from parallel.world import World, connect
from planning import choices

GIB = 1 << 30


def resolved(*args):
    """The settings of a preset as a GPU without a compiler takes them."""
    config = settings.load([str(ROOT / "config/gpt2_124m.toml"), *args], "")
    model = settings.resolve_model(config.model, 50257)
    return settings.replace(config, **vars(model), dtype="float32", muon_dtype="float32", compile="off")


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_auto_fits_the_micro_batch_to_the_memory_of_the_gpu(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 48 * GIB))
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(total_memory=48 * GIB))
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda device: 8 * GIB)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 48 * GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 8 * GIB)
    config, alone = resolved(), World(0, 1, 1, torch.device(kind))
    chosen = choices.fit_micro_batch(config, None, alone)
    assert chosen > 1

    def size(micro_batch):
        return sum(footprint.of_rank(settings.replace(config, micro_batch_size=micro_batch), 1, kind).values())

    assert size(chosen) <= footprint.USABLE * 40 * GIB < size(2 * chosen)


def test_a_short_micro_batch_on_a_cpu_has_few_logits():
    config = settings.replace(resolved("--seq_len=32", "--tokens_per_update=65536"), vocab_size=200_064, n_layer=1)
    assert footprint.largest_micro_batch(config, 1, "cpu", footprint.CPU_BYTES) > 1


class Without(TorchDispatchMode):
    """A device that lacks one operation."""

    def __init__(self, missing):
        super().__init__()
        self.missing = missing

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.missing in str(function):
            raise RuntimeError(f"no code for {function}")
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("missing", ["aten.mm", "native_layer_norm.", "native_layer_norm_backward", "gelu"])
def test_compiling_is_tried_on_what_a_block_consists_of(monkeypatch, missing):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    cpu = torch.device("cpu")
    assert device.choose_compile("on", cpu, "bfloat16", 0) == "on"
    with Without(missing), pytest.warns(UserWarning, match="torch.compile does not work here"):
        assert device.choose_compile("on", cpu, "bfloat16", 0) == "off"


@pytest.mark.parametrize(
    "architecture, has", [("gfx90a:sramecc+:xnack-", False), ("gfx942:sramecc+:xnack-", True), ("gfx1100", False)]
)
def test_float8_on_amd_is_told_by_the_architecture(monkeypatch, architecture, has):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # of gfx90a, too
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=architecture))
    assert device.has_float8(torch.device("cuda")) == has


@pytest.mark.parametrize("capability, has", [((8, 0), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_float8_on_nvidia_is_told_by_the_compute_capability(monkeypatch, capability, has):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert device.has_float8(torch.device("cuda")) == has
    assert not device.has_float8(torch.device("cpu"))


def test_a_user_without_a_name_may_compile(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError, as in a container that does not know the user
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert device.choose_compile("on", torch.device("cpu"), "bfloat16", 0) == "on"
    assert os.environ.pop("TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.parametrize("limit, cores", [("150000 100000", 2), ("max 100000", 64), ("9900000 100000", 64), (None, 64)])
def test_the_cores_of_a_container_are_those_of_its_quota(monkeypatch, tmp_path, limit, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(host, "CPU_LIMIT", tmp_path / "cpu.max", raising=False)
    if limit:
        host.CPU_LIMIT.write_text(limit + "\n")
    assert host.cores() == cores


def test_the_peak_of_an_unknown_gpu_is_measured_once(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Nobody Knows 1")
    monkeypatch.setattr(torch, "randn", lambda *size, device: made.append(size) or torch.ones(64, 64))
    first, again = (device.peak_flops(torch.device("cuda", 3), "bfloat16", seconds=0.01) for _ in range(2))
    assert first == again and len(made) == 1


@pytest.mark.parametrize(
    "given, read",
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}),
        ({"PYTORCH_ALLOC_CONF": "y"}, {"PYTORCH_ALLOC_CONF": "y"}),
    ],
)
def test_cuda_s_allocator_has_expandable_segments_unless_the_user_says_otherwise(monkeypatch, given, read):
    monkeypatch.setattr(os, "environ", dict(given))
    host.prepare_torch()
    assert {name: value for name, value in os.environ.items() if "ALLOC_CONF" in name} == read


@pytest.mark.parametrize("script", ["train.py", "replay.py", "evaluate.py"])
def test_torch_is_told_before_it_is_imported(script, tmp_path):
    (tmp_path / "torch.py").write_text("import os; e = os.environ; raise SystemExit(e['PYTORCH_ALLOC_CONF'] + e['MKL_CBWR'])")
    env = {"PYTHONPATH": str(tmp_path)}
    done = execute([sys.executable, script, "--steps=1"], status=1, env=env, fork=False)
    assert done.stderr.strip() == "expandable_segments:TrueAUTO"
    done = execute([sys.executable, script, "--steps=1"], status=1, env=env | {"MKL_CBWR": "COMPATIBLE"}, fork=False)
    assert done.stderr.strip() == "expandable_segments:TrueCOMPATIBLE"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch multiplies by another library")
def test_mkl_multiplies_reproducibly(train):
    done = execute(train.command("mkl", steps=1), env={"MKL_VERBOSE": "1"}, fork=False)  # MKL tells the mode of each product
    modes = set(re.findall(r"SGEMM.* CNR:(\S+)", done.stdout))
    assert modes == {"AUTO"}, done.stdout[-2000:]


@pytest.mark.parametrize("kind, pinned", [("cuda", True), ("xpu", False), ("mps", False), ("cpu", False)])
def test_evaluation_sends_pinned_batches_to_cuda_alone_without_waiting(monkeypatch, kind, pinned):
    sent, pins = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pins.append(1) or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *where, **how: sent.append((where, how)) or tensor)
    windows = SimpleNamespace(
        check_length=lambda *_: None,
        num_windows=lambda seq_len: 6,
        read_windows=lambda numbers, seq_len: np.zeros((len(numbers), seq_len + 1), np.int64),
    )
    world = World(0, 1, 1, torch.device("cpu"))
    gpu = SimpleNamespace(
        size=1, device=torch.device(kind), share=world.share, zeros=world.zeros, sum_over_ranks=world.sum_over_ranks
    )
    evaluate(lambda inputs, targets: torch.tensor(1.0, dtype=torch.float64), windows, 4, 2, 0, gpu, torch.no_grad)
    copies = [how.get("non_blocking", False) for where, how in sent if where and where[0] == gpu.device]
    assert copies == [pinned] * 3 and len(pins) == 3 * pinned


@pytest.mark.parametrize(
    "ranks, exact, said",
    [
        ("2", False, "ranks cannot exchange tensors of Metal devices; start one process"),
        ("1", True, "--strategy=exact needs float64, which Metal devices do not have; use --device=cpu"),
    ],
)
def test_metal_is_for_one_process_without_exact(monkeypatch, ranks, exact, said):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    for name, value in {"RANK": "0", "WORLD_SIZE": ranks, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        connect("auto", threads=torch.get_num_threads(), integers_only=exact)


@pytest.mark.parametrize(
    "kind, gpus, cores, ranks", [("cuda", 8, 64, 8), ("cuda", 1, 16, 1), ("mps", 1, 12, 1), ("cpu", 0, 3, 2)]
)
def test_make_train_starts_a_rank_for_each_gpu_that_torch_finds(monkeypatch, kind, gpus, cores, ranks):
    """ROCm's GPUs are CUDA's to torch. Metal has one GPU, whatever the number of cores."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    for found in (torch.cuda, torch.mps):
        monkeypatch.setattr(found, "device_count", lambda: gpus)
    monkeypatch.setattr(device, "cores", lambda: cores)
    assert device.ranks_here() == ranks


def test_a_gpu_that_emulates_bfloat16_takes_float16_and_muon_in_float32(monkeypatch):
    """As a T4 does, which says that it supports bfloat16 if emulation counts."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    config, alone = settings.load(["--optimizer=muon"], ""), World(0, 1, 1, torch.device("cuda"))
    assert choices.choose_precision(config, alone, {}) == {"dtype": "float16", "muon_dtype": "float32"}
