"""Strategies: what stands between the training loop and the ranks. The loop knows `Engine` and nothing behind it."""

import functools
import math
import sys
import warnings
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import optim
from common.errors import RunError, UserError
from hardware import device
from kernels import activate_attention_kernel
from model import compile_blocks
from optim import Optimizers, load_rows
from parallel.exact import Exact
from parallel.from_scratch import ScratchAllReduce, ScratchOverlap, ScratchReduceScatter
from parallel.replicas import check_replicas
from parallel.world import World
from settings import Config, OptimConfig, ParallelConfig

STAGING_BYTES = 1 << 26  # of page-locked memory, through which checkpoints leave a GPU


class Engine:
    """A model as it is trained here: replicated or sharded, compiled, in mixed precision.

    `model(inputs, targets)` is the mean loss of a micro-batch. The loop sets `model.require_backward_grad_sync` before each
    forward and divides each loss by `loss_divisor`. After the last backward of an update the gradients of every rank are the
    mean over all micro-batches of all ranks.

    weights: names and values for a `module` on the meta device. The values are tensors, made one at a time, or tensors in a
    file, read by rows. So no rank ever holds more of a sharded model than its shards and one tensor.
    """

    def __init__(self, module: nn.Module, config: Config, world: World, weights: Iterable[tuple[str, Any]] = ()):
        self.module, self.world, self.dtype = module, world, config.train.dtype
        self.strategy = config.parallel.strategy
        self.sharded = self.strategy == "fsdp" and world.size > 1
        # Ranks average their gradients; exact adds integers and divides them once, by the number of all micro-batches.
        self.loss_divisor = 1 if self.strategy == "exact" else len(world.share(config.micro_batches))
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.dtype == "float16")
        self.compiled = config.train.compile == "on"
        if config.train.fp8:
            use_float8(module, world)
        activate_attention_kernel(config.model, device.DTYPES[self.dtype], world.device)  # on every rank, also in a replay
        if self.compiled:
            compile_blocks(module)
        if config.train.activation_checkpointing:
            for block in module.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        # FSDP takes and frees memory in pieces of many sizes. Where the C library kept them all, a rank of fsdp needed twice
        # the memory, nearly as much as one of ddp.
        if world.device.type == "cpu" and sys.platform == "linux" and not self.sharded:
            device.keep_freed_memory()
        if self.sharded:
            from parallel.sharded import FullyShard  # here, because importing FSDP2 takes a second

            self.model = FullyShard(module, device.DTYPES[self.dtype], world, config.parallel.replicate)
        if weights:
            if self.sharded:
                module.to_empty(device=world.device)
            else:  # the same, but `to_empty` of a tensor on the meta device imports the compiler's symbols: half a second
                empty = {name: torch.empty(value.shape, device=world.device) for name, value in module.named_parameters()}
                module.load_state_dict(empty, assign=True)
            for name, value in weights:
                load_rows(module.get_parameter(name), value)
        if not self.sharded:  # after the weights are loaded: DDP's constructor broadcasts those of rank 0
            self.model = replicate(module.to(world.device), config.parallel, world, config.micro_batches, self.compiled)
        # Compiling the forward pass alone, for evaluation, pays on a GPU. On a CPU it takes longer than it saves.
        eager = self.compiled and world.device.type == "cpu"
        self.eval_model = torch.compiler.set_stance("force_eager")(module) if eager else module
        self.parameters = dict(module.named_parameters())
        self.name_of = {parameter: name for name, parameter in self.parameters.items()}
        self.staging: Tensor | None = None
        # Whether the optimizer's step runs collectives although each rank computed its own gradient norm. Under fsdp the
        # norm is global.
        exchanges = self.strategy == "zero1" or config.optim.optimizer == "muon"
        self.shares_step = world.size > 1 and not self.sharded and exchanges

    def build_optimizers(self, config: OptimConfig) -> Optimizers:
        """The optimizers of the model. The strategy may share their work and their state out over the ranks."""
        optimizers = optim.build(self.module, config, self.choose_orthogonalize())
        if self.strategy == "zero1" and self.world.size > 1:
            from parallel.sharded import shard_optimizers

            return shard_optimizers(optimizers, self.world)
        return optimizers

    def choose_orthogonalize(self) -> optim.Orthogonalize:
        """How Muon orthogonalizes its matrices: each of them on one rank of all."""
        if self.world.size == 1 or self.strategy == "zero1":  # zero1's optimizers have their own matrices only
            return optim.orthogonalize
        shares = functools.partial(optim.orthogonalize_shares, multiple=optim.BATCH if self.strategy == "exact" else 1)
        if not self.sharded:
            return functools.partial(shares, group=dist.group.WORLD, orthogonalize=optim.orthogonalize)
        owners = functools.partial(optim.orthogonalize_by_owners, group=self.model.mesh.get_group("shard"))
        if self.model.mesh.ndim == 1:
            return owners
        return functools.partial(shares, group=self.model.mesh.get_group("replicate"), orthogonalize=owners)

    def warm_up(self, micro_batch_size: int, seq_len: int) -> None:
        """Run a forward and a synchronized backward on dummy tokens, and drop the gradients, where something starts with them.

        This compiles. It also lets torch's DDP settle its buckets: after the first backward it lays them out anew, in the
        order of arrival, and the order of a sum over ranks depends on the place in a bucket. Without it the first update
        of a resumed run would round differently from the same update of an undisturbed run.
        """
        if self.world.size == 1 and not self.compiled:
            return
        size = (micro_batch_size, seq_len + 1)
        tokens = torch.arange(size[0] * size[1], device=self.world.device).view(size) % self.module.config.vocab_size
        self.model.require_backward_grad_sync = True
        with self.autocast():
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self.drop_gradients()

    def autocast(self):
        """The precision of the forward pass."""
        return device.autocast(self.world.device, self.dtype)

    def clip(self, limit: float) -> float:
        """Clip the gradients to the global norm `limit` (0: do not). Returns the norm before, the same on all ranks."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        # Here an update waits for the GPU. The optimizer's work hides the launches of the next one.
        norm = full_tensor(nn.utils.get_total_norm(gradients)).item() / self.scaler.get_scale()
        if self.shares_step:
            # Otherwise the others would wait in the step's collectives for a rank that skipped it. Only a faulty rank has
            # another norm.
            finite = torch.tensor(float(math.isfinite(norm)))
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
            if not finite:
                norm = math.nan
                gradients[0].fill_(norm)  # so that the scaler finds it, too, and every rank has the same scale
        unscale_gradients(self.scaler, self.parameters.values())
        if 0 < limit < norm < math.inf:
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    def drop_gradients(self) -> None:
        """Start the next update without gradients.

        Zeros instead of None would do for a single run, but a resumed one starts with None: the first sums would differ.
        """
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self, optimizers: Optimizers) -> dict[str, Any]:
        """The state of `optimizers` by "parameter.key": plain tensors, or tensors that are divided among the ranks."""
        return {f"{self.name_of[parameter]}.{key}": value for parameter, key, value in optimizers.state()}

    @torch.no_grad()
    def gather(self, tensors: dict[str, Any], writers: dict[str, int]) -> dict[str, Tensor]:
        """Copy the tensors that this rank writes, whole, to host memory, where training does not change them any more.

        `writers` names the rank that writes each of `tensors`; the other ranks keep nothing of it. All ranks must call this.
        """
        copies, divided, rank = {}, {}, self.world.rank
        if self.sharded:
            from parallel.sharded import gather_own

            divided, group = {name: t for name, t in tensors.items() if is_sharded(t)}, self.model.mesh.get_group("shard")
            if rank < group.size():  # the other groups have copies of the same rows
                copies = {name: self.to_host(tensor) for name, tensor in gather_own(divided, writers, group)}
        for name in [name for name in tensors if name not in divided]:
            tensor = full_tensor(tensors[name])
            if writers[name] == rank:
                copies[name] = self.to_host(tensor.clone() if tensor.device.type == "cpu" else tensor)
        return copies

    def to_host(self, tensor: Tensor) -> Tensor:
        """`tensor` in host memory; itself, if it is there."""
        if self.staging is None and tensor.device.type == "cuda":
            self.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        return tensor.cpu() if self.staging is None else copy_through(self.staging, tensor)

    def load_optimizers(self, optimizers: Optimizers, tensors: dict[str, Any]) -> None:
        """Give `optimizers` this rank's part of the state that was saved, by any strategy and on any number of ranks.

        The tensors may be in a file. Then each rank reads the rows that it holds.
        """
        state = {parameter: {} for parameter in self.parameters.values()}
        for name, value in tensors.items():
            parameter_name, _, key = name.rpartition(".")
            state[self.parameters[parameter_name]][key] = value
        optimizers.load_state(state)

    def check_replicas(self) -> None:
        """Raise RunError on all ranks, naming the first tensor, if one bit of any rank's weights is not the others'."""
        try:
            check_replicas(self.module)
        except ValueError as error:
            raise RunError(
                f"{error}: memory or a GPU of these ranks is faulty, or a library is; the checkpoints are kept"
            ) from None


def unscale_gradients(scaler: torch.amp.GradScaler, parameters) -> None:
    """Divide the gradients by the loss scale of float16. GradScaler wants an optimizer; ours are none of torch's."""
    if scaler.is_enabled():
        scaler.unscale_(SimpleNamespace(param_groups=[{"params": list(parameters)}]))


def use_float8(module: nn.Module, world: World) -> None:
    """Let the linear layers of the blocks multiply in float8 (Micikevicius et al. 2022). Their weights stay as they are.

    Raises UserError where the device has no such products, a width does not fit them or torchao is not installed.
    """
    if not device.has_float8(world.device):
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


def copy_through(staging: Tensor, tensor: Tensor) -> Tensor:
    """A copy of `tensor` in ordinary host memory. It passes piece by piece through `staging` [bytes], page-locked memory.

    A GPU writes only to page-locked memory at the full speed of its bus. For other memory the driver copies a second time,
    on one core. torch uses all cores for that.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    staging = staging.view(tensor.dtype)
    for source, target in zip(tensor.reshape(-1).split(len(staging)), copy.view(-1).split(len(staging)), strict=True):
        piece = staging[: len(source)]
        piece.copy_(source, non_blocking=True)
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()
        target.copy_(piece)
    return copy


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, or a `sharded.Divided`, which have a part on each rank."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a shard; all ranks must call it. A plain tensor is whole already."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def replicate(module: nn.Module, config: ParallelConfig, world: World, micro_batches: int, compiled: bool) -> nn.Module:
    """`module` in the strategy's wrapper, which keeps the ranks' gradients equal."""
    match config.strategy:
        case "exact":
            return Exact(module, micro_batches, compiled)
        case "scratch_allreduce":
            return ScratchAllReduce(module)
        case "scratch_reduce_scatter":
            return ScratchReduceScatter(module)
        case "scratch_overlap":
            return ScratchOverlap(module)
        case other if other not in ("ddp", "zero1", "fsdp"):
            raise ValueError(f"no wrapper for --strategy={other}")
    if world.size == 1:
        return module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames broadcast_buffers; 2.11 has only this name
        # The only buffers are tables that every rank computes alike.
        replica = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False)
    if config.grad_compression == "bf16":
        replica.register_comm_hook(None, bf16_gradients)
    return replica


def bf16_gradients(group, bucket):
    """torch's hook under another name: under its own, DDP demands NCCL, though gloo adds bfloat16 too."""
    return bf16_compress_hook(group, bucket)
