"""Whole updates on tensors that say `cuda` and have no memory: what a machine without a GPU can tell about one."""

import importlib.metadata
import shutil
from pathlib import Path

import pytest
import yaml

import fake_gpu
from forks import in_fresh_process

# A build for CUDA answers for itself, and its answers need a driver. For a build for CPUs a small library is compiled.
can = "+cpu" in importlib.metadata.version("torch") and shutil.which("g++")
pytestmark = pytest.mark.skipif(not can, reason="torch is not a build for CPUs, or there is no g++")
SMALL = dict(n_layer=4, micro_batch_size=8)
CASES = {
    "one rank, gpt2": ("gpt2_124m", 1, dict()),
    "one rank, llama, checkpointing": ("llama_1.3b", 1, dict(activation_checkpointing=True)),
    "one rank, qwen3, Muon": ("qwen3_124m", 1, dict(optimizer="muon")),
    "fsdp, llama, eager": ("llama_1.3b", 8, dict(strategy="fsdp", n_layer=12, micro_batch_size=4)),
    "exact, checkpointing": ("llama_1.3b", 8, dict(strategy="exact", n_layer=12, activation_checkpointing=True)),
    "ddp": ("gpt2_124m", 8, dict()),
    "scratch_reduce_scatter": ("gpt2_124m", 8, dict(strategy="scratch_reduce_scatter")),
    "fsdp, copies": ("qwen3_124m", 8, dict(strategy="fsdp", replicate=2, optimizer="muon", activation_checkpointing=True)),
}


def all_rows():
    return {name: fake_gpu.measure(name, preset, ranks, SMALL | flags) for name, (preset, ranks, flags) in CASES.items()}


@pytest.fixture(scope="module")
def rows():
    return in_fresh_process(all_rows)


@pytest.mark.parametrize("name", CASES)
def test_an_update_waits_once_and_its_footprint_is_within_15_percent_of_what_is_alive_at_the_peak(rows, name):
    assert rows[name]["predicted"] == pytest.approx(rows[name]["measured"], rel=0.15)
    if name.startswith("exact"):
        return  # it also reads the largest gradients, one tensor, whose elements are counted one by one
    waits = rows[name]["waits"]
    # The norm. The loss, which is on the host by then, and what ranks say to one another through gloo do not wait for a GPU.
    assert waits[0] == "aten::_local_scalar_dense cuda" and len(waits) >= 2
    assert set(waits[1:]) == {"aten::_local_scalar_dense cpu"}


def has_cuda_kernel(entries, name):
    """Whether torch has the operation for CUDA: a kernel of its own, or one that is made of others."""
    entry = entries.get(name, {})  # those that are not there are generated from others
    if "ufunc_inner_loop" in entry:
        return True
    if "structured_delegate" in entry:
        return has_cuda_kernel(entries, entry["structured_delegate"])
    keys = {key.strip() for keys in entry.get("dispatch", {}) for key in keys.split(",")}
    return not keys or "CUDA" in keys or any(key.startswith("Composite") for key in keys)


def test_no_operation_is_for_cpus_only(rows):
    import torchgen

    listed = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loaded = yaml.load(listed.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    entries = {entry["func"].split("(")[0]: entry for entry in loaded}
    assert not has_cuda_kernel(entries, "_scaled_dot_product_flash_attention_for_cpu")
    names = {name.removeprefix("aten::") for row in rows.values() for name in row["operations"] if name.startswith("aten::")}
    assert {"mm", "_fused_adamw_", "_scaled_dot_product_flash_attention_backward"} <= names
    assert [name for name in sorted(names) if not has_cuda_kernel(entries, name)] == []
