"""What a GPU needs, as far as a machine without one can tell."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import settings
import train as trainer
from checkpoints.checkpoint import TrainState
from checkpoints.lookup import Start
from conftest import TINY
from hardware import device, gpus
from parallel import engine


@pytest.mark.parametrize(
    "name, teraflops",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA GeForce RTX 4090", 165),
        # Less than the whole GPU, or another one with a name like it: these are measured.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("GRID A100-10C", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A10G", None),
        ("NVIDIA H20", None),
    ],
)
def test_the_datasheet_is_that_of_the_whole_gpu_of_this_name(name, teraflops):
    assert device.datasheet_flops(name) == (teraflops and teraflops * 1e12)


def test_a_slice_of_a_gpu_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    monkeypatch.setattr(torch, "randn", lambda *size, device: torch.ones(64, 64))  # no CUDA device to put it on
    measured = device.peak_flops(torch.device("cuda"), "bfloat16", seconds=0.01)
    assert measured > 0 and measured not in gpus.GPU_PEAK_FLOPS.values()


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


def test_checkpoints_are_the_same_through_staging_memory(train):
    train("plain")
    train.changed(STAGED, "staged")
    assert train.files("staged") == train.files("plain")


class Operations(TorchDispatchMode):
    """Records the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_an_update_computes_its_loss_before_it_waits_for_the_norm_and_then_waits_no_more(tokens):
    config = settings.load([f"--{name}={value}" for name, value in (TINY | {"tokens": tokens}).items()], "")
    world = trainer.join(config)
    dataset = trainer.data.open_mixture(str(tokens))
    config = trainer.choices.resolve(config, dataset.vocab_size, world, None, {})
    run = trainer.build(config, world, dataset, Start(TrainState()))
    prefetcher = trainer.data.Prefetcher(run.batches, [(0, m) for m in range(config.micro_batches)], world.device)
    with Operations() as operations:
        loss, norm = trainer.update(run, prefetcher)
    prefetcher.close()
    reads = [i for i, name in enumerate(operations.names) if name == "aten::_local_scalar_dense"]
    assert len(reads) == 2 and loss > 0 and norm > 0  # the norm, and the loss that is on the host by then
    last_mean = max(i for i, name in enumerate(operations.names) if name.startswith("aten::mean"))
    assert last_mean < reads[0] < max(i for i, name in enumerate(operations.names) if "adamw" in name) < reads[1]
