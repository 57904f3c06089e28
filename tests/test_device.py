"""What lockstep/hardware/ and evaluate.py do on GPUs, checked on a CPU: torch's answers about a device are replaced."""

import contextlib
import os
import re
import shutil
import sys

import pytest
import torch

from conftest import ROOT, execute
from lockstep import settings
from lockstep.common.errors import UserError
from lockstep.hardware import device, footprint, host
from lockstep.parallel.world import World, connect
from lockstep.planning import choices, startup

GIB = 1 << 30


def resolved(*args):
    """The settings of a preset as a GPU without a compiler takes them."""
    config = settings.load([str(ROOT / "config/gpt2_124m.toml"), *args], "")
    model = settings.resolve_model(config.model, 50257)
    return settings.replace(config, **vars(model), dtype="float32", muon_dtype="float32", compile="off")


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_auto_fits_the_micro_batch_to_the_memory_of_the_gpu(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 48 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 48 * GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 8 * GIB)
    config = resolved()
    chosen = choices.fit_micro_batch(config, None, startup.survey(World(0, 1, 1, torch.device(kind))))
    assert chosen > 1

    def size(micro_batch):
        return sum(footprint.of_rank(settings.replace(config, micro_batch_size=micro_batch), 1, kind).values())

    assert size(chosen) <= footprint.USABLE * 40 * GIB < size(2 * chosen)


def test_a_user_without_a_name_may_compile(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError, as in a container that does not know the user
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert device.choose_compile("on", torch.device("cpu"), "bfloat16", 0) == "on"
    assert os.environ.pop("TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "compilers, headers, said",
    [
        ([], True, r"there is no compiler; install (g\+\+ or clang\+\+|gcc or clang)"),
        (["gcc", "g++"], False, "Python.h is missing; install python3-dev"),
        (["gcc", "g++"], True, "backend='inductor' raised:"),
    ],
)
def test_what_the_compiler_lacks_is_named(monkeypatch, tmp_path, kind, compilers, headers, said):
    def fail(function):
        raise RuntimeError("backend='inductor' raised:\nCalledProcessError: Command '['gcc', ...]'\nand more")

    if headers:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(device.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setattr(device.shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(size))
    monkeypatch.setattr(device, "autocast", lambda *_: contextlib.nullcontext())
    with pytest.warns(UserWarning) as found:
        assert device.choose_compile("on", torch.device(kind), "bfloat16", 0) == "off"
    assert re.fullmatch(f"torch.compile does not work here, so the run will be slower: {said}", str(found[0].message))


def test_make_names_the_package_that_creates_environments(tmp_path):
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ensurepip'] = None")  # as in Debian's own Python
    command = ["make", "setup", f"PYTHON={sys.executable}"]
    done = execute(command, status=2, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert (
        "error: this Python cannot create environments; on Debian, Ubuntu and Colab, run: apt install python3-venv"
        in done.stderr
    )
    assert not (tmp_path / ".venv").exists()


V1, V2 = "3:memory:/\n2:cpu,cpuacct:{}\n1:cpuset:/\n0::/\n", "0::{}\n"
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.mark.parametrize(
    "groups, own, files, cores",
    [
        (V2, "/", {"cpu.max": "150000 100000"}, 2),
        (V2, "/", {"cpu.max": "max 100000"}, 64),
        (V2, "/", {"cpu.max": "9900000 100000"}, 64),
        (V2, "/", {}, 64),
        (V2, "/user.slice/job", {"user.slice/job/cpu.max": "max 100000", "user.slice/cpu.max": "300000 100000"}, 3),
        (V1, "/", {f"cpu/{QUOTA}": "50000", f"cpu/{PERIOD}": "100000"}, 1),
        (V1, "/", {f"cpu/{QUOTA}": "-1", f"cpu/{PERIOD}": "100000"}, 64),
        (V1, "/docker/1f", {f"cpu/{QUOTA}": "250000", f"cpu/{PERIOD}": "100000"}, 3),  # as a container sees it
        (V1, "/slurm/job", {f"cpu/slurm/job/{QUOTA}": "800000", f"cpu/slurm/job/{PERIOD}": "100000", f"cpu/{QUOTA}": "-1"}, 8),
        (None, "", {}, 64),
    ],
)
def test_the_cores_of_a_container_or_job_are_those_of_its_quota(monkeypatch, tmp_path, groups, own, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(host, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(host, "OWN_GROUPS", tmp_path / "own")
    if groups:
        host.OWN_GROUPS.write_text(groups.format(own))
    for name, text in files.items():
        path = host.GROUPS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert host.cores() == cores


def test_the_peak_of_an_unknown_gpu_is_measured_once(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Nobody Knows 1")
    monkeypatch.setattr(torch, "randn", lambda *size, device: made.append(size) or torch.ones(64, 64))
    first, again = (device.peak_flops(torch.device("cuda", 3), "bfloat16") for _ in range(2))
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


@pytest.mark.parametrize("command", ["train.py --steps=1", "replay.py runs/x --step=1", "evaluate.py runs/x"])
def test_torch_is_told_before_it_is_imported(command, tmp_path):
    (tmp_path / "torch.py").write_text(
        "import os\nprint(*map(os.environ.get, ('PYTORCH_ALLOC_CONF', 'MKL_CBWR')))\nraise SystemExit(3)"
    )
    for given, mode in (({}, "AUTO"), ({"MKL_CBWR": "COMPATIBLE"}, "COMPATIBLE")):
        done = execute([sys.executable, *command.split()], status=3, env={"PYTHONPATH": str(tmp_path)} | given, fork=False)
        assert done.stdout.split() == ["expandable_segments:True", mode]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch multiplies by another library")
def test_mkl_multiplies_reproducibly(train):
    done = execute(
        train.command("mkl", steps=1, eval_tokens=64), env={"MKL_VERBOSE": "1"}, fork=False
    )  # MKL tells the mode of each product
    modes = set(re.findall(r"SGEMM.* CNR:(\S+)", done.stdout))
    assert modes == {"AUTO"}, done.stdout[-2000:]


def test_metal_is_for_one_process_without_exact(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    with pytest.raises(UserError, match="need float64, which Metal devices do not support; use --device=cpu"):
        device.prepare_device("auto", threads=torch.get_num_threads(), integers_only=True)
    with pytest.raises(UserError, match="ranks cannot exchange tensors of Metal devices; start one process"):
        connect(World(0, 2, 2, torch.device("mps")))


@pytest.mark.parametrize(
    "kind, gpus, cores, ranks", [("cuda", 8, 64, 8), ("cuda", 7, 64, 4), ("mps", 1, 12, 1), ("cpu", 0, 3, 2), ("cpu", 0, 64, 4)]
)
def test_make_train_starts_a_power_of_two_of_ranks(monkeypatch, kind, gpus, cores, ranks):
    """ROCm's GPUs are CUDA's to torch. Metal has one GPU, whatever the number of cores."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
    for found in (torch.cuda, torch.mps):
        monkeypatch.setattr(found, "device_count", lambda: gpus)
    monkeypatch.setattr(device, "cores", lambda: cores)
    assert device.ranks_here() == ranks


def precision(config, kind="cpu", previous=None):
    """dtype and muon_dtype of a run as they are resolved on a device."""
    resolved = choices.resolve(config, 257, startup.survey(World(0, 1, 1, torch.device(kind))), previous or {})
    return resolved.train.dtype, resolved.optim.muon_dtype


def test_a_gpu_that_emulates_bfloat16_takes_float16_and_muon_in_float32(monkeypatch):
    """As a T4 does, which says that it supports bfloat16 if emulation counts."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 48 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert precision(settings.load(["--compile=off"], ""), "cuda") == ("float16", "float32")
    assert precision(settings.load(["--compile=off", "--strategy=exact"], ""), "cuda") == ("float32", "float32")
    with pytest.raises(UserError, match="exact does not support --dtype=float16, .*; use --dtype=float32"):
        precision(settings.load(["--compile=off", "--strategy=exact", "--dtype=float16"], ""), "cuda")


def processor(monkeypatch, capability, amx, bfloat16, vendor, limit=""):
    """Act as a class of processors, on which nothing may be timed."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(device, "cpuinfo", lambda key: vendor)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(device.time, "thread_time", None)


@pytest.mark.parametrize(
    "kind, dtype",
    [
        (("AVX2", False, False, "AuthenticAMD"), "float32"),  # EPYC up to Zen 3
        (("AVX512", False, True, "AuthenticAMD"), "bfloat16"),  # EPYC from Zen 4 on
        (("AVX512", False, True, "GenuineIntel"), "float32"),
        (("AVX512", True, True, "GenuineIntel"), "bfloat16"),
        # Held to fewer instructions.
        (("AVX2", True, True, "GenuineIntel", "AVX2"), "float32"),
        (("AVX512", True, True, "GenuineIntel", "AVX512_CORE_BF16"), "float32"),
        (("AVX512", False, True, "AuthenticAMD", "AVX512_CORE"), "float32"),
    ],
)
def test_auto_takes_the_precision_of_the_instructions_and_times_nothing(monkeypatch, kind, dtype):
    processor(monkeypatch, *kind)
    assert device.choose_dtype("auto", torch.device("cpu")) == dtype
    assert precision(settings.load([], "")) == (dtype, dtype)


def test_a_run_keeps_the_precision_that_it_began_with(monkeypatch):
    processor(monkeypatch, "AVX2", False, False, "AuthenticAMD")
    config, elsewhere = settings.load([], ""), {"device": "cpu", "dtype": "bfloat16", "muon_dtype": "bfloat16"}
    assert precision(config, previous=elsewhere) == ("bfloat16", "bfloat16")
    moved = choices.resolve(config, 257, startup.survey(World(0, 1, 1, torch.device("cpu"))), elsewhere)
    (remark,) = startup.check(moved, World(0, 1, 1, torch.device("cpu")))
    assert '--dtype=float32 with muon_dtype = "float32" in a preset may be faster' in remark
    # What was on a GPU says nothing about a CPU, and a flag wins.
    assert precision(config, previous=elsewhere | {"device": "cuda"}) == ("float32", "float32")
    assert precision(settings.replace(config, dtype="float16"), previous=elsewhere)[0] == "float16"
