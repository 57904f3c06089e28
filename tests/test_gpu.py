"""What a GPU needs, as far as a machine without one can tell."""

import pytest
import torch

from hardware import device
from parallel import engine


@pytest.mark.parametrize(
    "name, teraflops",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA GeForce RTX 4090", 165),
        # Less than the whole GPU, or another one with a name like it: these are measured.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("GRID A100-10C", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_the_datasheet_is_that_of_the_whole_gpu_of_this_name(name, teraflops):
    assert device.datasheet_flops(name) == (teraflops and teraflops * 1e12)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (5, 13), (4, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_copy_through_staging_memory_is_whole_and_stays(shape, dtype):
    staging = torch.empty(64, dtype=torch.uint8)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    for source in (tensor, tensor.t() if tensor.ndim == 2 else tensor):  # the second is not contiguous
        copy = engine.copy_through(staging, source)
        expected = source.clone()
        staging.fill_(255)
        assert copy.dtype == dtype and torch.equal(copy, expected) and copy.is_contiguous()
    tensor.zero_()
    assert torch.equal(copy, expected)


STAGED = """
from parallel import engine
buffer = torch.empty(256, dtype=torch.uint8)
engine.Engine.staging = property(lambda engine: buffer, lambda engine, value: None)
"""


def test_checkpoints_are_the_same_through_staging_memory(train, shared):
    train.changed(STAGED, "staged")
    assert train.files("staged") == shared.files("plain")
