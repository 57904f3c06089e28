"""What would a GPU do, as far as a CPU can tell? Runs whole updates on tensors that claim to be on `cuda` and have no memory.

`python bench/fake_gpu.py` builds each preset with train.build, on rank 0 of a fake process group, and runs train.update twice.
In torch's FakeTensorMode, shapes, dtypes and lifetimes are as on a GPU, but nothing is computed. It compares the peak of live
bytes with lockstep/hardware/footprint.py, and lists what would make the host wait. A rank has two micro-batches of the largest
size with which one rank fits in 80 GB. Not covered: workspaces of kernels, fragmentation, and compiled code. Needs a C++
compiler, and five minutes on four cores. Writes fake_gpu.json.
"""

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import multiprocessing
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import machine  # puts the project's folder on the path

# isort: split
from lockstep import settings
from lockstep.common.errors import UserError
from lockstep.hardware import footprint
from lockstep.hardware.host import cores

MEMORY = 80e9  # bytes of the GPU for which the micro-batch is chosen
VOCAB = {"laptop": 4096, "shakespeare_char": 257}  # the others use GPT-2's vocabulary
# Autograd asks a device for its streams. In a CPU build, nothing answers for CUDA, so this library does.
ANSWERS = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct Hooks : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() { static Hooks hooks; return hooks; }
}
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(getDevice()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
"""
# Strategy, copies of the weights, ranks. AdamW is measured in all of them; Muon, which adds little memory, only in some.
WORLDS = [("ddp", 1, 1), ("ddp", 1, 8), ("ddp", 1, 512), ("fsdp", 1, 8), ("fsdp", 1, 64), ("fsdp", 1, 512)]
WORLDS += [("fsdp", 2, 8), ("fsdp", 8, 64), ("fsdp", 64, 512)]
LARGE = dict(vocab_size=128256, tie_embeddings=False, seq_len=8192, micro_batch_size=1)  # Llama 3's shapes
LLAMA_8B = LARGE | dict(n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, d_ff=14336)
LLAMA_70B = LARGE | dict(n_layer=80, n_head=64, n_kv_head=8, n_embd=8192, d_ff=28672)
MUON = [("ddp", 1, 1), ("ddp", 1, 8), ("fsdp", 1, 8), ("fsdp", 8, 64)]


@dataclass(frozen=True)
class FakeConfig(machine.Out):
    only: str = ""
    """Measure only the settings whose name contains this, and write nothing."""


def main(config: FakeConfig) -> int:
    """Measure all settings. Returns 1 if a prediction is more than 15 % off."""
    chosen, rows = [case for case in cases() if config.only in case[0]], []
    if not chosen:
        raise UserError(f"--only={config.only}: no setting has this in its name")
    with ProcessPoolExecutor(cores(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(measure, *zip(*chosen, strict=True)):
            error = row["predicted"] / row["measured"] - 1
            row |= {"waits": Counter(row["waits"]), "operations": len(row["operations"]), "error": error}
            print(f"{row['setting']:<50} {row['measured']:<10.4g} predicted {row['predicted']:<10.4g} {error:+.1%}", flush=True)
            rows.append(row)
    worst = max(abs(row["error"]) for row in rows)
    if not config.only:
        print(machine.write("fake_gpu", {"largest_error": worst, "settings": rows}, config.out))
    print(f"largest error of {len(rows)} predictions: {worst:.1%}")
    return int(worst > 0.15)


def cases():
    """Name, preset, ranks and flags of each row."""
    for preset in sorted(path.stem for path in (machine.ROOT / "config").glob("*.toml")):
        for optimizer, worlds in (("adamw", WORLDS), ("muon", MUON)):
            for strategy, copies, ranks in worlds:
                label = f"{preset} {'hsdp' if copies > 1 else strategy} on {ranks}, {optimizer}"
                flags = dict(strategy=strategy, replicate=copies, optimizer=optimizer)
                yield label, preset, ranks, flags
                if ranks == 8 and preset == "llama_1.3b":
                    yield f"{label}, checkpointing", preset, ranks, flags | {"activation_checkpointing": True}
    for size, shape in {"1.3 B": {}, "8 B": LLAMA_8B, "70 B": LLAMA_70B}.items():
        for ranks, shard in itertools.product((8, 64, 512), ("off", "on")):
            flags = shape | dict(strategy="fsdp", optimizer="adamw", activation_checkpointing=True, shard_gradients=shard)
            yield f"{size} on {ranks}, checkpointing, shard_gradients={shard}", "llama_1.3b", ranks, flags
        if size != "70 B":  # every rank of exact holds all weights
            for ranks in (8, 64):
                flags = shape | dict(strategy="exact", optimizer="adamw", activation_checkpointing=True)
                yield f"exact, {size} on {ranks}, checkpointing", "llama_1.3b", ranks, flags


def resolved(preset: str, ranks: int, **flags):
    """The `Config` of a preset as resolved on a GPU, with two micro-batches for each rank."""
    changes = dict(device="cuda", dtype="bfloat16", compile="off", muon_dtype="bfloat16", threads=1) | flags
    config = settings.replace(settings.read_preset(machine.ROOT / "config" / f"{preset}.toml"), **changes)
    model = settings.resolve_model(config.model, VOCAB.get(preset, 50257))
    optim = settings.resolve_schedule(config.optim, config.train.steps)
    config = settings.dataclasses.replace(config, model=model, optim=optim)
    if "micro_batch_size" not in flags:
        size = footprint.largest_micro_batch(config, 1, "cuda", footprint.USABLE * MEMORY)
        config = settings.replace(config, micro_batch_size=size)
    return settings.replace(config, tokens_per_update=2 * ranks * config.train.micro_batch_size * model.seq_len)


def measure(setting: str, preset: str, ranks: int, flags: dict) -> dict:
    """The peak bytes of rank 0 in two updates, the predicted ones, and what the host waited for in the second update."""
    if "torch" not in sys.modules:
        answer_for_cuda()
    config = resolved(preset, ranks, **flags)
    seen, parts = updates(config, ranks), footprint.of_rank(config, ranks, "cuda")
    row = {"setting": setting, "ranks": ranks, "flags": flags, "micro_batch_size": config.train.micro_batch_size}
    row |= {"measured": seen.peak, "predicted": sum(parts.values()), "parts": parts}
    return row | {"at": seen.peak_at, "waits": seen.waits, "operations": sorted(seen.names)}


def answer_for_cuda() -> None:
    """Load ANSWERS before torch, so that its functions take precedence over torch's."""
    assert "torch" not in sys.modules
    torch = Path(importlib.util.find_spec("torch").origin).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "answers.so")
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"]
        command = ["c++", "-x", "c++", "-", *flags, "-ltorch_cpu", "-lc10", "-o", str(library)]
        subprocess.run(command, input=ANSWERS, text=True, check=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def updates(config, ranks: int):
    """Build the model on rank 0 of `ranks` and update it twice. Returns a `Watch` of both, with the waits of the second."""
    import torch

    import train
    from lockstep.checkpoints.checkpoint import TrainState
    from lockstep.checkpoints.resume import Start
    from lockstep.parallel.world import World
    from watch import Watch

    shape = (config.train.micro_batch_size, config.model.seq_len)
    watch = Watch("cuda", fake=True)
    with fake_gpu(ranks), watch, mock.patch("data.make_batches"):
        world = World(0, ranks, min(ranks, 8), torch.device("cuda", 0))
        run = train.build(config, world, mock.Mock(document_token=lambda attend: None), Start(TrainState()))
        tokens = functools.partial(torch.zeros, 2, *shape, dtype=torch.long, device=world.device)
        if hasattr(run.engine.model, "reducer"):
            run.engine.model.register_comm_hook(None, all_reduce)
            # DDP would rebuild its buckets in rank 0's order, but a fake rank sends nothing. Its logger reads clocks.
            run.engine.model.reducer = mock.Mock(wraps=run.engine.model.reducer, _rebuild_buckets=lambda: False)
            run.engine.model.logger = mock.Mock()
        for _ in range(2):
            watch.waits = []
            train.update(run, SimpleNamespace(next=lambda: (0, *tokens())))
    return watch


def all_reduce(group, bucket):
    """DDP's own hook, with a future that has a result. The fake process group's has none."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextlib.contextmanager
def fake_gpu(ranks: int):
    """A context in which tensors on `cuda` are fake, on rank 0 of `ranks`, and nothing calls the driver."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils import _foreach_utils

    # There is one stream with nothing queued. Its events are mocks.
    answers = {name: mock.MagicMock() for name in ("Stream", "Event", "current_stream", "stream")}
    answers |= {"is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 8}
    answers |= {"current_device": lambda: 0, "set_device": lambda device: None, "get_device_capability": lambda *_: (9, 0)}
    answers |= {"is_bf16_supported": lambda including_emulation=True: True}
    kinds = [*_foreach_utils._foreach_supported_types, FakeTensor]
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(_foreach_utils, "_foreach_supported_types", kinds))
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", move_buffers))
        stack.enter_context(mock.patch("torch.nn.functional.scaled_dot_product_attention", flash))
        stack.enter_context(mock.patch("torch.nn.functional.rms_norm", fused_rms_norm(torch.nn.functional.rms_norm)))
        stack.enter_context(mock.patch("lockstep.numerics.native.silu", fused_silu()))
        for name in ("_verify_param_shape_across_processes", "_sync_module_states"):  # they read data from other ranks
            stack.enter_context(mock.patch(f"torch.nn.parallel.distributed.{name}"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            stack.callback(dist.destroy_process_group)
        import lockstep.parallel.sharded

        real = unset_fake_temporarily()(lockstep.parallel.sharded.init_device_mesh)  # it computes on real tensors of ranks
        stack.enter_context(mock.patch("lockstep.parallel.sharded.init_device_mesh", real))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def flash(q, k, v, mask, dropout_p, is_causal, enable_gqa):
    """The kernel that PyTorch uses on a GPU for 16-bit types. A CPU build would use a different one."""
    import torch

    assert mask is None and q.dtype in (torch.bfloat16, torch.float16)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


def fused_rms_norm(composite):
    """F.rms_norm that keeps what CUDA's kernel keeps. A CPU build lacks this kernel and composes many operations instead."""
    import torch

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx, grad):
            return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:2])

    converts = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")  # to float32, since torch 2.12

    def rms_norm(x, shape, weight, eps):
        if converts and torch.is_autocast_enabled("cuda"):
            x, weight = x.float(), weight.float()
        return Fused.apply(x, weight) if x.dtype == weight.dtype else composite(x, shape, weight, eps)

    return rms_norm


def fused_silu():
    """F.silu whose backward is one kernel, as on CUDA. For fake tensors, torch composes it, and keeps three more tensors."""
    import torch

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx, grad):
            return torch.empty_like(*ctx.saved_tensors)

    return Fused.apply


def move_buffers(module, device):
    """Module.to for buffers only: it cannot move fake parameters. These must be on `device` already, or operations fail."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return module


if __name__ == "__main__":
    machine.command_line(__doc__, FakeConfig, main)
