"""Strategies: what stands between the training loop and the ranks. The loop knows `Engine` and nothing behind it."""

import contextlib
import functools
import math
import os
import shutil
import warnings
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import optim
from ddp_from_scratch import ScratchAllReduce, ScratchOverlap, ScratchReduceScatter, check_replicas
from exact import Exact
from kernels import rows_at_a_time
from model import flops_per_token
from optim import Optimizers
from settings import Config, ModelConfig, OptimConfig, ParallelConfig, RunError, UserError
from world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPILE_PAYS_FLOPS = 3e13  # compiling for a CPU takes half a minute, which a shorter run does not win back


class Engine:
    """A model and how it is trained here: replicated or sharded, compiled, in mixed precision.

    `model(inputs, targets)` is the mean loss of a micro-batch. The loop sets `model.require_backward_grad_sync` before each
    forward; after the last backward every rank's gradients are the mean over the whole update of `micro_batches`.
    """

    def __init__(self, module: nn.Module, config: Config, world: World, micro_batches: int):
        self.module, self.world = module, world
        self.strategy = config.parallel.strategy
        self.dtype = DTYPES[config.train.dtype]
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.dtype is torch.float16)
        compiled = config.train.compile == "on"
        if config.train.fp8:
            use_float8(module, world)
        if config.train.activation_checkpointing:
            for block in module.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if self.strategy == "fsdp" and world.size > 1:
            from sharded import FullyShard  # here, for importing what it stands on takes a second

            for block in module.blocks if compiled else ():  # one by one: between them weights are gathered
                block.forward = torch.compile(block.forward)
            self.model = FullyShard(module, self.dtype, world, config.parallel.replicate)
            self.eval_model = module
        else:
            replica = replicate(module.to(world.device), config.parallel, world, micro_batches)
            self.model = torch.compile(replica) if compiled else replica
            # Another compilation for the forward alone pays on a GPU; on a CPU it takes longer than what it saves.
            self.eval_model = torch.compile(module) if compiled and world.device.type == "cuda" else module
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.everything = SimpleNamespace(param_groups=[{"params": list(self.names)}])  # what the scaler is to unscale
        self.parameters = {name: parameter for parameter, name in self.names.items()}

    def build_optimizers(self, config: OptimConfig) -> Optimizers:
        """The optimizers of the model, their state shared out over the ranks where the strategy says so."""
        optimizers = optim.build(self.module, config)
        if self.strategy == "zero1" and self.world.size > 1:
            from sharded import shard_optimizers

            return shard_optimizers(optimizers, self.world)
        return optimizers

    def autocast(self):
        """The precision of the forward pass."""
        return autocast(self.world.device, self.dtype)

    def backward(self, loss: Tensor, accumulation_steps: int) -> None:
        """Add the gradient of this rank's share of the mean loss; it has `accumulation_steps` micro-batches of its own."""
        if self.strategy != "exact":  # which divides integers, at the end, by the number of all
            loss = loss / accumulation_steps
        self.scaler.scale(loss).backward()

    def update(self, optimizers: Optimizers, grad_clip: float) -> float:
        """Clip the gradients, step, drop the gradients. Returns the global gradient norm before clipping.

        Where the norm is not finite nothing is stepped, on any rank: all of them see the same norm.
        """
        self.scaler.unscale_(self.everything)
        gradients = [p.grad for p in self.names if p.grad is not None]
        # The one wait of an update for a GPU: what it decides is whether to step. The optimizer hides the launches that follow.
        norm = whole(nn.utils.get_total_norm(gradients)).item()
        if 0 < grad_clip < norm < math.inf:
            torch._foreach_mul_(gradients, grad_clip / norm)
        if math.isfinite(norm):
            optimizers.step()
        self.scaler.update()
        # Gradients that stay would make the next update's first sum start from another number than a resumed run's.
        for parameter in self.names:
            parameter.grad = None
        return norm

    def gather(self, optimizers: Optimizers) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The whole model and optimizer state by name, copied to the master's memory tensor by tensor.

        All ranks must call it; the others get nothing.
        """
        model, state = {}, {}
        for parameter, name in self.names.items():
            self.keep(model, name, parameter)
        for parameter, key, value in optimizers.state():
            self.keep(state, f"{self.names[parameter]}.{key}", value)
        return model, state

    def keep(self, copies: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        """Add the whole tensor to the master's `copies` in host memory, which training does not change any more."""
        tensor = whole(tensor.detach())
        if self.world.is_master:
            copies[name] = tensor.to("cpu", copy=True)

    def scatter(self, optimizers: Optimizers, tensors: dict[str, Tensor]) -> None:
        """Give `optimizers` this rank's part of the state that `gather` made, under any strategy on any number of ranks."""
        state = {parameter: {} for parameter in self.names}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition(".")
            parameter = self.parameters[parameter]
            state[parameter][key] = value
            if is_sharded(parameter) and value.ndim:
                from sharded import shard_like

                state[parameter][key] = shard_like(value, parameter)
        optimizers.load_state(state)

    def check_replicas(self) -> None:
        """Raise RunError on all ranks, naming the first tensor, if a rank's weights differ from the master's by one bit."""
        try:
            check_replicas(self.module)
        except ValueError as error:
            raise RunError(
                f"{error}: memory or a GPU of these ranks is faulty, or a library is; the checkpoints are kept"
            ) from None


def use_float8(module: nn.Module, world: World) -> None:
    """Let the linear layers of the blocks multiply in float8 (Micikevicius et al. 2022); their weights stay as they are.

    Raises UserError where the device has no such products, a width does not fit them or torchao is not installed.
    """
    if world.device.type != "cuda" or torch.cuda.get_device_capability(world.device) < (8, 9):
        raise UserError(f"--fp8=true: this {world.device.type} device has no float8 products; use an H100 or newer")
    if odd := [name for name, p in module.blocks.named_parameters() if p.ndim == 2 and any(n % 16 for n in p.shape)]:
        raise UserError(
            f"--fp8=true multiplies matrices whose sides are multiples of 16; {odd[0]} is not; change --n_embd, --d_ff"
        )
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        raise UserError("--fp8=true is done by torchao, which is not installed: pip install torchao") from None
    convert_to_float8_training(module.blocks)
    torch._dynamo.config.optimize_ddp = False  # which cannot cut a graph of torchao's tensors into buckets


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which each rank has a part."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of which every rank has its shard; all ranks must call it. A plain tensor is whole already."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


class Single(nn.Module):
    """A world of one behind DDP's surface."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True

    def forward(self, *args, **kwargs):
        """The module's own."""
        return self.module(*args, **kwargs)


def replicate(module: nn.Module, config: ParallelConfig, world: World, micro_batches: int) -> nn.Module:
    """`module` behind the strategy's wrapper, which keeps the ranks' gradients equal."""
    match config.strategy:
        case "exact":
            return Exact(module, micro_batches)
        case "scratch_allreduce":
            return ScratchAllReduce(module)
        case "scratch_reduce_scatter":
            return ScratchReduceScatter(module)
        case "scratch_overlap":
            return ScratchOverlap(module)
    if world.size == 1:
        return Single(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for broadcast_buffers, 2.11 only this
        # The only buffers are tables that are computed alike on every rank.
        replica = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
    if config.grad_compression == "bf16":
        replica.register_comm_hook(None, bf16_gradients)
    return replica


def bf16_gradients(group, bucket):
    """torch's hook under another name: under its own DDP demands NCCL, though gloo adds bfloat16 too."""
    return bf16_compress_hook(group, bucket)


def make_deterministic(world: World) -> None:
    """Let CUDA use only kernels that give the same bits every time; a CPU has no others."""
    if world.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # no kernel chosen by timing it
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def autocast(device: torch.device, dtype: torch.dtype):
    """Context in which matrix products are in `dtype`."""
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)


def choose_dtype(asked: str, device: torch.device) -> str:
    """bfloat16 where the hardware multiplies it natively, float16 on older GPUs, else float32."""
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type == "cpu" and any(
        getattr(torch.cpu, probe, bool)() for probe in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    ):
        return "bfloat16"
    return "float32"


def choose_compile(asked: str, device: torch.device, run_flops: float) -> str:
    """on or off. auto compiles where it pays: on GPUs, and on CPUs for runs of more than COMPILE_PAYS_FLOPS.

    Where no compiler works it is off, with one warning.
    """
    if asked == "off" or (
        asked == "auto" and (device.type == "mps" or (device.type == "cpu" and run_flops < COMPILE_PAYS_FLOPS))
    ):
        return "off"
    try:
        if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise RuntimeError("no C++ compiler (g++ or clang++) is on the PATH")
        probe = torch.ones(8, device=device, requires_grad=True)
        torch.compile(lambda x: (x * x).sum())(probe).backward()
        return "on"
    except Exception as error:  # inductor raises many kinds
        warnings.warn(f"torch.compile does not work here, going on without it: {error}", stacklevel=2)
        return "off"


def fit_micro_batch(
    asked: int | str, before: int | None, model: ModelConfig, sequences: int, strategy: str, world: World
) -> int:
    """Sequences of a micro-batch: as asked, or the largest equal share of the update's `sequences` whose activations fit.

    A run keeps what it had `before`, for bits depend on it, where the ranks can share that.
    The estimate counts what backward keeps: per layer about 14 widths and 3 MLP widths of two bytes a token, and the logits
    that are made at a time. All ranks must call it: what fits is what fits on the rank with the least memory.
    Under `exact` the cut must not depend on the number of ranks; it is made for up to 8.
    """
    if asked != "auto":
        return int(asked)
    if before and sequences % (before * (1 if strategy == "exact" else world.size)) == 0:
        return before
    bytes_per_sequence = 2 * model.seq_len * model.n_layer * (14 * model.n_embd + 3 * model.d_ff)
    logits = 10 * model.vocab_size * rows_at_a_time(model.vocab_size, world.device)
    budget = 1 << 28  # on a CPU, small enough for caches to matter and large enough to hide Python
    if world.device.type == "cuda":
        weights = flops_per_token(model) / 6  # a few more than there are
        state = weights * (24 if strategy == "exact" else 16) / (world.size if strategy == "fsdp" else 1)
        budget = 0.7 * (world.least(torch.cuda.mem_get_info(world.device)[0]) - state)
    share = math.gcd(sequences, sequences // min(8, sequences)) if strategy == "exact" else sequences // world.size
    fitting = [n for n in range(1, share + 1) if share % n == 0 and n * bytes_per_sequence + logits <= budget]
    return max(fitting, default=1)


def check_share(micro_batches: int, strategy: str, world: World) -> None:
    """Raise UserError unless the ranks get equal numbers of micro-batches, or under `exact` at least one each."""
    if strategy == "exact" and micro_batches < world.size:
        raise UserError(
            f"{micro_batches} micro-batch(es) an update are too few for {world.size} ranks; lower --micro_batch_size"
        )
    if strategy != "exact" and micro_batches % world.size:
        raise UserError(
            f"{micro_batches} micro-batches an update cannot be shared equally by {world.size} ranks; change "
            "--tokens_per_update, --micro_batch_size or the number of ranks, or use --strategy=exact, which shares unequally"
        )
