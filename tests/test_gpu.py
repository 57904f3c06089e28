"""What a GPU needs, as far as a machine without one can tell."""

import pytest
import torch
import torch.nn.functional as F

from lockstep.hardware import device
from lockstep.numerics.attention import attention
from lockstep.parallel import engine


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


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    device = property(lambda tensor: torch.device("cuda"))


def test_grouped_queries_without_flash_attention_are_given_a_key_each(monkeypatch):
    seen = []
    keep = lambda q, k, v, *_, enable_gqa, **__: seen.append((k.shape[1], v.shape[1], enable_gqa)) or q  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", keep)
    for dtype, mask in [(torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.zeros(1, 1, 32, 32))]:
        q = torch.zeros(1, 6, 32, 16, dtype=dtype)
        attention(q.as_subclass(OnGpu), q[:, :2], q[:, :2], mask=mask)
    assert seen == [(2, 2, True), (6, 6, False), (6, 6, False)]


STAGED = """
from lockstep.parallel import engine
buffer = torch.empty(256, dtype=torch.uint8)
engine.Engine.staging = property(lambda engine: buffer, lambda engine, value: None)
"""


def test_checkpoints_are_the_same_through_staging_memory(train, shared):
    train.changed(STAGED, "staged")
    assert train.files("staged") == shared.files("plain")
