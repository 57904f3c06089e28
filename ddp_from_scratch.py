"""Data parallelism from scratch: a lesson in three strategies, to be read from top to bottom.

W processes ("ranks") hold the same model. Each runs forward and backward on its own share of the batch and then has
the gradient of its share. If all shares are equally large, the mean of these W gradients is the gradient of the whole
batch. So when every rank has the mean, every rank makes the same optimizer update, and the models stay the same for
ever. That is all there is to it: start equal, average the gradients (never the weights: AdamW is not linear), update.

How the mean gets to every rank is what the strategies differ in. For n bytes of gradients in P parameters:

    strategy               collectives a backward    bytes each rank sends     when
    ScratchAllReduce       P                         2 (W-1)/W n               after backward
    ScratchReduceScatter   2 (of one flat tensor)    2 (W-1)/W n               after backward
    ScratchOverlap         n / 25 MB                 2 (W-1)/W n               while backward is still running

No all-reduce can send less than 2 (W-1)/W n, and a ring sends just that (Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations"; brought to deep learning by Baidu in 2017): hardly more for 1000
ranks than for 10. What is left to win is the latency of P small messages, and to hide the sending behind the
computing. That is how torch's DistributedDataParallel works (Li et al. 2020, "PyTorch Distributed", VLDB 13(12)); the
last strategy rebuilds it.

All three wrap any `nn.Module` and have the surface of torch's DistributedDataParallel (DDP):

    model = ScratchOverlap(model)
    for i, (x, y) in enumerate(micro_batches):
        model.require_backward_grad_sync = i == len(micro_batches) - 1  # communicate once an update
        loss_of(model(x), y).backward()
    optimizer.step()  # .grad is the mean over the ranks of what each has accumulated

A parameter without a gradient on some ranks counts as zero there; one without a gradient on every rank keeps None, as
in a single process. Unlike DDP, buffers (batch norm's statistics) are made equal at the start only. What is frozen when
the wrapper is built stays out. Without a process group, or with one rank, the wrappers do nothing.
"""

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ScratchDataParallel(nn.Module):
    """What the strategies share: DDP's switches, and the moment at which gradients are averaged.

    A strategy says how, in `average_gradients`.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.group = group
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        # parameters() lists a tied parameter once, and autograd adds up its uses before its hook is called
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.require_backward_grad_sync = True
        self.sync_this_backward = False
        self.last_backward = -1
        if self.world_size > 1:
            for parameter in self.trainable:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def forward(self, *args, **kwargs):
        """The module's own; it decides, as in DDP, whether the backward that follows communicates."""
        if torch.is_grad_enabled():  # an evaluation between forward and backward changes nothing
            self.sync_this_backward = self.require_backward_grad_sync
        return self.module(*args, **kwargs)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Called by autograd when `parameter.grad` has its gradient of this backward."""
        backward = torch._C._current_graph_task_id()  # not a flag: a backward that raised would leave it set
        if self.sync_this_backward and backward != self.last_backward:
            self.last_backward = backward
            self.backward_started()

    def backward_started(self) -> None:
        """Called with the first gradient of a backward that communicates."""
        # No parameter knows that it is the last, and unused ones never report. The autograd engine knows: what a hook
        # queues here it runs when the whole backward is done, before `loss.backward()` returns. FSDP2 does the same.
        torch.autograd.Variable._execution_engine.queue_callback(self.sync_gradients)

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Replace the gradients by their mean over the ranks.

        Runs by itself at the end of a backward whose forward saw `require_backward_grad_sync`; after `no_sync` it may
        be called by hand, on all ranks. Costs the strategy's collectives and one more of 4 bytes a parameter.
        """
        if self.world_size == 1 or not self.trainable:
            return
        missing = [i for i, p in enumerate(self.trainable) if p.grad is None]
        # Ranks may miss different ones, but must call the same collectives in the same order, or they wait for ever.
        present = torch.ones(len(self.trainable), dtype=torch.int32)
        present[missing] = 0
        for i in missing:
            self.trainable[i].grad = torch.zeros_like(self.trainable[i])
        self.average_gradients()
        present = present.to(self.trainable[0].device)
        dist.all_reduce(present, group=self.group)
        for i in missing:  # reads `present`, which stalls a GPU, only where something is missing
            if present[i] == 0:
                self.trainable[i].grad = None

    def average_gradients(self) -> None:
        """Replace every gradient (none is missing) by its mean over the ranks.

        Division comes before the sum, which might overflow in float16.
        """
        raise NotImplementedError

    def enable_grad_sync(self) -> None:
        """From the next forward on, backward ends with the mean over the ranks."""
        self.require_backward_grad_sync = True

    def disable_grad_sync(self) -> None:
        """From the next forward on, backward only accumulates, on each rank its own gradients."""
        self.require_backward_grad_sync = False

    @contextmanager
    def no_sync(self):
        """`disable_grad_sync` for the forwards in this context."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


# 1. The idea, word for word ------------------------------------------------------------------------------------------


class ScratchAllReduce(ScratchDataParallel):
    """Check that the replicas start equal; after backward, one all-reduce per parameter.

    Bytes sent by each rank: 2 (W-1)/W n. Collectives: P, each waited for. A transformer has many vectors of a few KB,
    for which the wire is idle most of the time: the cost is P latencies. And backward has ended before the first byte
    is sent.

    Raises ValueError, on all ranks, where the ranks' parameters or buffers differ (see `check_replicas`).
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        check_replicas(module, group)
        super().__init__(module, group)

    def average_gradients(self) -> None:
        for parameter in self.trainable:
            parameter.grad.div_(self.world_size)
            dist.all_reduce(parameter.grad, group=self.group)


def check_replicas(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError on all ranks if a parameter or buffer is not, bit for bit, that of rank 0.

    The error names the first that differs and the ranks. What travels is not the tensors but their sha256 (32 bytes
    each, over name, shape, dtype and bits), so models of different shapes are told apart too, instead of hanging.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    tensors = [*module.named_parameters(), *module.named_buffers()]
    device = tensors[0][1].device if tensors else "cpu"
    longest = torch.tensor(len(tensors), device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    mine = torch.zeros(int(longest), 32, dtype=torch.uint8)
    for i, (name, tensor) in enumerate(tensors):
        mine[i] = torch.frombuffer(bytearray(digest(name, tensor)), dtype=torch.uint8)
    mine = mine.to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    differs = (torch.stack(everyone) != everyone[0]).any(dim=2).cpu()  # (W, tensors)
    if differs.any():
        first = int(differs.any(dim=0).nonzero()[0])
        name = tensors[first][0] if first < len(tensors) else f"number {first}, which this rank does not have"
        ranks = differs[:, first].nonzero().flatten().tolist()
        raise ValueError(f"the replicas differ: parameter or buffer {name} of rank(s) {ranks} is not that of rank 0")


def digest(name: str, tensor: Tensor) -> bytes:
    """sha256 over the name, shape, dtype and bits of a tensor of any dtype."""
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode() + bits.tobytes()).digest()


# 2. What an all-reduce is made of ------------------------------------------------------------------------------------


class ScratchReduceScatter(ScratchDataParallel):
    """One flat tensor, and the two halves of a ring all-reduce.

    The flat gradient is cut into W equal shards (zeros at its end make it divide). Reduce-scatter: in W-1 rounds every
    rank passes a shard to its neighbour, which adds its own; then rank r has the finished sum of shard r. All-gather:
    in W-1 more rounds the finished shards travel around the ring. In each of these 2 (W-1) rounds a rank sends n / W
    bytes.

    Bytes sent by each rank: 2 (W-1)/W n. Collectives: 2 for each dtype and device. Flattening takes n more bytes of
    memory, and backward still ends before anything is sent. ZeRO and FSDP put the optimizer's update between the two
    halves: each rank then updates only its shard, and needs only that shard's optimizer state.

    NCCL's reduce-scatter is such a ring. Gloo's (torch 2.8 and later) falls back to W all-reduces, of which each rank
    keeps one: the same sums, but 3 (W-1)/W n bytes in all. Read this one on a CPU; run it on GPUs.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        broadcast_module(module, group)
        super().__init__(module, group)

    def average_gradients(self) -> None:
        for parameters in same_kind(self.trainable):
            flat = torch.cat([p.grad.reshape(-1) for p in parameters])
            flat = nn.functional.pad(flat, (0, -flat.numel() % self.world_size)).div_(self.world_size)
            shards = list(flat.chunk(self.world_size))  # views, so that what is gathered lands in `flat`
            mine = torch.empty_like(shards[0])
            dist.reduce_scatter(mine, shards, group=self.group)
            dist.all_gather(shards, mine, group=self.group)
            for parameter, gradient in zip(parameters, views(flat, parameters), strict=True):
                parameter.grad = gradient


@torch.no_grad()
def broadcast_module(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank rank 0's parameters and buffers."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    for tensor in [*module.parameters(), *module.buffers()]:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, group=group, group_src=0)
        tensor.copy_(dense)


def same_kind(parameters: list[nn.Parameter], capacity: float = float("inf")) -> list[list[nn.Parameter]]:
    """`parameters` in groups that one flat tensor can hold: of one dtype and device, each full at `capacity` bytes."""
    groups, open_groups = [], {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        if kind not in open_groups:
            open_groups[kind] = []
            groups.append(open_groups[kind])
        open_groups[kind].append(parameter)
        if sum(p.numel() * p.element_size() for p in open_groups[kind]) >= capacity:
            del open_groups[kind]
    return groups


def views(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The pieces of the 1-D `flat`, one after the other in the shapes of `parameters`; the same memory."""
    pieces = flat[: sum(p.numel() for p in parameters)].split([p.numel() for p in parameters])
    return [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]


# 3. Communication behind computation ---------------------------------------------------------------------------------


@dataclass
class Bucket:
    """Gradients that travel together, as views of one flat tensor."""

    flat: Tensor
    gradients: dict[nn.Parameter, Tensor]
    waiting: set[nn.Parameter] = field(default_factory=set)  # of this backward
    work: dist.Work | None = None  # the all-reduce under way


class ScratchOverlap(ScratchDataParallel):
    """Buckets of about 25 MB, each all-reduced as soon as it is full, while backward computes the next: what DDP does.

    Backward reaches the last layer first, so buckets are filled in the reverse order of registration, and the first is
    on its way when backward has hardly begun. Only the time of the last bucket cannot be hidden.

    Bytes sent by each rank: 2 (W-1)/W n. Collectives: n / `bucket_bytes` for each dtype and device. Gradients live in
    the buckets: a new one is copied there once, later micro-batches add to it in place, and nothing is copied back.
    Larger buckets mean fewer latencies, smaller ones an earlier start; 25 MB is DDP's choice.

    A module compiled as one graph hands over all its gradients when its backward is done: nothing is left to overlap
    with. Compile its blocks one by one to keep it.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None, bucket_bytes: int = 25 * 2**20):
        broadcast_module(module, group)
        super().__init__(module, group)
        self.buckets = []
        for parameters in same_kind(self.trainable[::-1], bucket_bytes) if self.world_size > 1 else []:
            flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
            self.buckets.append(Bucket(flat, dict(zip(parameters, views(flat, parameters), strict=True))))
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.gradients}
        self.reset()

    def reset(self) -> None:
        """Before a backward: nothing has arrived and nothing is under way."""
        for bucket in self.buckets:
            if bucket.work:
                bucket.work.wait()
            bucket.waiting, bucket.work = set(bucket.gradients), None

    def backward_started(self) -> None:
        self.reset()  # the backward before may have raised halfway
        super().backward_started()

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        super().gradient_ready(parameter)
        self.move_into_bucket(parameter)
        if self.sync_this_backward:
            self.bucket_of[parameter].waiting.discard(parameter)
            self.start_full_buckets()

    def move_into_bucket(self, parameter: nn.Parameter) -> None:
        """Make `parameter.grad` its view of the bucket; from then on autograd accumulates there."""
        view = self.bucket_of[parameter].gradients[parameter]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def start_full_buckets(self) -> None:
        """Start the all-reduce of every full bucket whose predecessors are full.

        Gradients may arrive in another order on another rank, but all ranks must start their collectives in one order.
        """
        for bucket in self.buckets:
            if bucket.waiting:
                return
            if bucket.work is None:
                bucket.flat.div_(self.world_size)
                bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    def average_gradients(self) -> None:
        for parameter in self.trainable:
            self.move_into_bucket(parameter)
        for bucket in self.buckets:
            bucket.waiting.clear()  # a parameter that was not used now will not report any more
        self.start_full_buckets()
        self.reset()
