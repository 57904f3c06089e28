"""What is decided before the ranks meet: NCCL and cuBLAS read their variables when they start."""

import os

import pytest
import torch
import torch.distributed as dist

import device
import world


@pytest.fixture
def gpu_node(monkeypatch):
    """A node with GPUs as far as `connect` can tell; what the environment holds when the process group is made."""
    seen = {}

    def init_process_group(backend, **options):
        seen.update(os.environ, backend=backend, deterministic=torch.are_deterministic_algorithms_enabled(), **options)

    for variable in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv(variable, "")  # so that the fixture's end removes what the test sets
        monkeypatch.delenv(variable)
    rank_1_of_8 = dict(RANK=1, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=8, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500)
    for name, value in rank_1_of_8.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(device, "find_device", lambda name, local_rank, share: torch.device("cuda", local_rank))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.update(current=device))
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(dist.HashStore(), 1, 8)]))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    threads = torch.get_num_threads()
    yield seen
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_float32_matmul_precision("highest")


def test_determinism_is_set_before_the_process_group_is_made(gpu_node):
    world.connect("cuda", deterministic=True)
    assert gpu_node["current"] == gpu_node["device_id"] == torch.device("cuda", 1)
    assert gpu_node["backend"] == "cpu:gloo,cuda:nccl" and gpu_node["deterministic"]
    assert gpu_node["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and gpu_node["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    assert gpu_node["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize("deterministic", [True, False])
def test_float32_products_on_a_gpu_are_in_tf32(gpu_node, deterministic):
    assert torch.get_float32_matmul_precision() == "highest"
    world.connect("cuda", deterministic=deterministic)
    assert torch.get_float32_matmul_precision() == "high"


def test_ranks_that_add_integers_keep_the_switches_that_add_in_any_order(gpu_node):
    world.connect("cuda", deterministic=True, integers_only=True)
    assert gpu_node["deterministic"] and "NCCL_NVLS_ENABLE" not in gpu_node


def test_what_the_user_has_set_stays(gpu_node, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    world.connect("cuda", deterministic=True)
    assert gpu_node["NCCL_NVLS_ENABLE"] == "1"


def test_without_deterministic_nothing_is_set(gpu_node):
    world.connect("cuda", deterministic=False)
    assert not gpu_node["deterministic"]
    assert not {"CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE", "TORCHINDUCTOR_DETERMINISTIC"} & gpu_node.keys()


@pytest.mark.parametrize(
    "has_unit, has_instructions, speedup, dtype",
    [
        (True, True, 0.5, "bfloat16"),
        (False, True, 2.0, "bfloat16"),
        (False, True, 0.9, "float32"),
        (False, False, 2.0, "float32"),
    ],
)
def test_auto_takes_the_faster_precision_on_a_cpu(monkeypatch, has_unit, has_instructions, speedup, dtype):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_unit)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    monkeypatch.setattr(device, "peak_flops", lambda on, name, seconds: speedup if name == "bfloat16" else 1.0)
    assert device.choose_dtype("auto", torch.device("cpu")) == dtype
    assert device.choose_dtype("float16", torch.device("cpu")) == "float16"
