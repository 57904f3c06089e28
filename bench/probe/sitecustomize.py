"""Watch and stop an unchanged trainer. Python imports this file at startup if its folder is in PYTHONPATH.

Once torch is imported, every update adds a line to AUDIT_NOTES/RANK-PID: a JSON list of sha256 digests, one for each sequence
seen on this rank. AUDIT_STOP=NUMBER:UPDATE sends this process a signal after that update. AUDIT_CUT=BYTES ends it, as SIGKILL
would, in the middle of the first file that grows larger (the kernel's SIGXFSZ). AUDIT_ON_CPU lets a trainer that insists on a
GPU start with the CPU and gloo; the functions put_..._for_... say how.
"""

import collections
import hashlib
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
import types

RANK, LENGTH = os.environ.get("RANK", "0"), int(os.environ.get("AUDIT_LENGTH", 32))
seen, last, updates = [], None, 0


def note(tokens) -> None:
    """Keep the hashes of sequences embedded for training. tokens: [batch, length], or all in one row."""
    global last
    positions = tokens.dim() == 1 and bool((tokens.diff() == 1).all())
    if tokens.device.type != "meta" and not positions:
        tokens = tokens.reshape(-1, LENGTH)
        rows = [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in tokens.cpu().numpy().astype("int64")]
        if rows != last:  # a second embedding of the same batch
            seen.extend(rows)
        last = rows


def updated() -> None:
    """Write what an update saw, and stop after it if requested. An optimizer may call this once per group."""
    global last, updates
    if not seen:
        return
    updates += 1
    with open(os.path.join(os.environ["AUDIT_NOTES"], f"{RANK}-{os.getpid()}"), "a") as file:
        file.write(json.dumps(seen) + "\n")
    seen.clear()
    last = None
    number, _, update = os.environ.get("AUDIT_STOP", "").partition(":")
    if update == str(updates):
        os.kill(os.getpid(), int(number))
    if RANK == "0" and updates == 1 and "AUDIT_CUT" in os.environ:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["AUDIT_CUT"]),) * 2)


def watch(torch) -> None:
    """Call `note` at every embedding, and `updated` after every update by torch's optimizers or its AdamW function."""
    from torch.optim import adamw, optimizer

    embedding, update = torch.nn.functional.embedding, adamw.adamw

    def embed(tokens, *args, **more):
        if torch.is_grad_enabled():  # not an evaluation
            note(tokens)
        return embedding(tokens, *args, **more)

    def step(*args, **more):
        update(*args, **more)
        updated()

    torch.nn.functional.embedding, adamw.adamw = embed, step
    optimizer.register_optimizer_step_post_hook(lambda *_: updated())
    changes = {"cuda": put_cuda_on_cpu, "gloo": put_gloo_for_nccl, "accelerator": put_cpu_for_accelerator}
    if os.environ.get("AUDIT_ON_CPU") in changes:
        changes[os.environ["AUDIT_ON_CPU"]](torch)


def put_cuda_on_cpu(torch) -> None:
    """Map calls that name a CUDA device or nccl to the CPU and gloo."""

    def moved(value):
        is_cuda = str(value).startswith("cuda") if isinstance(value, str | torch.device) else False
        return "cpu" if is_cuda else value

    class OnCpu(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, _, args=(), kwargs=None):
            if function is torch.Tensor.pin_memory:
                return args[0]
            if function is torch.device and args and moved(args[0]) == "cpu":
                return function("cpu")  # without the number
            return function(*map(moved, args), **{key: moved(value) for key, value in (kwargs or {}).items()})

    def change(owner, name, **changes):
        function = getattr(owner, name)

        def changed(*args, **more):
            return function(*map(moved, args), **{key: changes.get(key, moved(value)) for key, value in more.items()})

        setattr(owner, name, changed)

    OnCpu().__enter__()
    answer(torch.cuda)
    torch.cuda.is_available = lambda: True
    change(torch, "load")
    change(torch.autocast, "__init__", device_type="cpu")
    change(torch.distributed, "init_process_group", backend="gloo", device_id=None)
    change(torch.nn.parallel.DistributedDataParallel, "__init__", device_ids=None)


def answer(device) -> None:
    """Make torch.cuda or torch.cpu answer as a GPU would, without doing anything. One function each, for torch.compile."""
    device.get_device_name, device.current_device, device.device_count = lambda *_: "cpu", lambda: 0, lambda: 8
    device.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30, major=7, minor=0)
    device.memory_stats, device.max_memory_allocated = lambda *_: collections.defaultdict(int), lambda *_: 0
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"):
        setattr(device, name, types.FunctionType((lambda *_: None).__code__, {}, name))
    device.is_bf16_supported = lambda *_: False


def put_gloo_for_nccl(torch) -> None:
    """Replace a process group for CPU and GPU with one for the CPU."""
    answer(torch.cuda)
    init = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *args, **more: init(*args[1:], **more | {"backend": "gloo"})


def put_cpu_for_accelerator(torch) -> None:
    """Make the CPU torchtitan's accelerator: its device, its memory, and its attention with the same mask."""
    from torch.nn.attention import flex_attention

    def attend(q, k, v, block_mask=None, scale=None, enable_gqa=False, return_aux=None, **_):
        mask = flex_attention.create_mask(block_mask.mask_mod, 1, 1, q.shape[2], k.shape[2], device="cpu")
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        return out if return_aux is None else (out, types.SimpleNamespace(lse=None))

    flex_attention.flex_attention = attend
    torch._utils._get_available_device_type = lambda: "cpu"
    answer(torch.cpu)
    torch.distributed.set_timeout = lambda *_: None  # torch 2.13 does not have it


def put_ddp_for_fsdp(strategies) -> None:
    """Replace Lightning's FSDP, which needs a GPU, with its DDP."""

    class FSDPStrategy(strategies.DDPStrategy):
        def __new__(cls, **_):
            return strategies.DDPStrategy(process_group_backend="gloo")

    strategies.FSDPStrategy = FSDPStrategy


class AfterImport(importlib.abc.MetaPathFinder):
    """Call a function on a module once the process imports it."""

    def __init__(self, name, function):
        self.name, self.function = name, function

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            self.function(module)

        spec.loader.exec_module = execute_and_change
        return spec


if "AUDIT_NOTES" in os.environ:
    sys.meta_path.insert(0, AfterImport("torch", watch))
    if os.environ.get("AUDIT_ON_CPU") == "fsdp":
        sys.meta_path.insert(0, AfterImport("lightning.fabric.strategies", put_ddp_for_fsdp))
