"""Data parallelism from scratch: a lesson in four parts. Read it from top to bottom.

W processes ("ranks") each hold a copy of the same model, and each computes the gradient of its share of the batch. If the
shares are equal in size, the mean of the W gradients is the gradient of the whole batch. Every rank passes that mean to the
same optimizer update, so the copies stay equal. That is the whole method: start equal, average the gradients, update. Averaging
the weights after the update would not give the same result, because AdamW is not linear in the gradient.

The parts are (1) the idea, (2) when it runs, (3) what an all-reduce is made of, and (4) communicating while backward runs. They
lead to three strategies, which differ in how the mean reaches every rank. With P parameter tensors, whose gradients take n
bytes in all:

    strategy               collectives per update    bytes each rank sends     when
    ScratchAllReduce       P                         2 (W-1)/W n               after backward
    ScratchReduceScatter   2 (of one flat tensor)    2 (W-1)/W n               after backward
    ScratchOverlap         n / 25 MB, or 2           2 (W-1)/W n               while backward is still running

No all-reduce can get by with fewer than 2 (W-1)/W n bytes per rank, and a ring sends exactly that many. (Patarasuk and Yuan
2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; Baidu brought it to deep learning in 2017.) So a
rank among 1000 sends hardly more than a rank among 10. Two costs remain: the latency of P small messages, and the time the
ranks spend sending instead of computing. The last strategy hides both, as torch's DistributedDataParallel does (Li et al. 2020,
"PyTorch Distributed", VLDB 13(12)). All three have DDP's interface:

    model = ScratchOverlap(model)
    for i, (x, y) in enumerate(micro_batches):
        model.require_backward_grad_sync = i == len(micro_batches) - 1  # communicate once per update
        loss_of(model(x), y).backward()
    optimizer.step()  # .grad is the mean over the ranks of what each has accumulated

A gradient that a rank lacks counts as zero. If all ranks lack it, `.grad` stays None, as in a single process. Parameters that
are frozen when the wrapper is built are left out. Buffers, such as batch norm's statistics, are made equal only at the start,
while DDP broadcasts them in every forward. With one rank, or without a process group, the wrappers do nothing.
"""

import math
import weakref
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.parallel.replicas import check_replicas


class ScratchAllReduce(nn.Module):
    """Checks that the replicas start equal, and after backward runs one all-reduce per parameter, one after another.

    A transformer has many vectors of only a few KB, so sending them one by one costs P latencies and leaves the network mostly
    idle. Raises ValueError on all ranks if their parameters or buffers differ (see `check_replicas`).
    """

    # 1. The idea -----------------------------------------------------------------------------------------------------

    def average_gradients(self) -> None:
        """Replace every gradient with its mean over the ranks. Every trainable parameter must have a gradient."""
        for parameter in self.trainable:
            parameter.grad.div_(self.world_size)  # before the sum, which might overflow in float16
            dist.all_reduce(parameter.grad, group=self.group)

    # 2. When it runs -------------------------------------------------------------------------------------------------
    #
    # Once per update, when its last backward ends. The training loop marks that backward by setting
    # `require_backward_grad_sync` before the forward, and autograd tells us when it is done.

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module, self.group = module, group
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        # parameters() lists a tied parameter once, and autograd adds up all its uses before calling the hook.
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.require_backward_grad_sync = True
        self.sync_this_backward = self.sync_is_queued = False
        if self.world_size > 1:
            self.ensure_equal_replicas()
            register_hooks(self)

    def ensure_equal_replicas(self) -> None:
        """Make sure that all ranks start from the same parameters and buffers. This strategy raises an error if they don't."""
        check_replicas(self.module, self.group)

    def forward(self, *args, **kwargs):
        """Run the module. As in DDP, the forward decides whether the next backward communicates."""
        if torch.is_grad_enabled():  # an evaluation between forward and backward must not change that
            self.sync_this_backward, self.sync_is_queued = self.require_backward_grad_sync, False
        return self.module(*args, **kwargs)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """React to a gradient: autograd calls this as soon as `parameter.grad` holds the gradient of this backward."""
        if self.sync_this_backward and not self.sync_is_queued:
            self.prepare_sync()

    def prepare_sync(self) -> None:
        """Queue `sync_gradients` for the end of this backward. Called when its first gradient is ready."""
        # Hooks cannot tell which gradient is the last, because unused parameters never get one. The autograd engine can: it
        # runs queued callbacks when the whole backward is done, before `loss.backward()` returns. FSDP2 relies on this too.
        self.sync_is_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self.sync_gradients)

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Replace the gradients with their mean over the ranks.

        This runs by itself at the end of a backward whose forward saw `require_backward_grad_sync` true. After `no_sync`, you
        may call it yourself, on all ranks. It costs the strategy's collectives, plus one of 4 bytes per parameter tensor.
        """
        self.sync_is_queued = False
        if self.world_size == 1 or not self.trainable:
            return
        # All ranks must call the same collectives in the same order, or they would wait for each other forever. So a rank sends
        # zeros for a gradient it lacks, and the ranks count how many have one. The counts are created on the device, because
        # copying them there would wait for all the work queued on a GPU.
        ranks_with_gradient = torch.ones(len(self.trainable), dtype=torch.int32, device=self.trainable[0].device)
        missing = [i for i, parameter in enumerate(self.trainable) if parameter.grad is None]
        for i in missing:
            self.trainable[i].grad = torch.zeros_like(self.trainable[i])
            ranks_with_gradient[i].zero_()
        self.average_gradients()
        dist.all_reduce(ranks_with_gradient, group=self.group)
        if missing:  # only then, because reading the counts makes the host wait for the GPU
            for parameter, ranks in zip(self.trainable, ranks_with_gradient.tolist(), strict=True):
                if ranks == 0:
                    parameter.grad = None

    def enable_grad_sync(self) -> None:
        """Let backward end by averaging the gradients over the ranks, from the next forward on."""
        self.require_backward_grad_sync = True

    def disable_grad_sync(self) -> None:
        """Let backward only add to this rank's own gradients, from the next forward on."""
        self.require_backward_grad_sync = False

    @contextmanager
    def no_sync(self):
        """Disable the averaging for every forward in this context, as `disable_grad_sync` does."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def register_hooks(wrapper: nn.Module) -> None:
    """Have autograd call `wrapper.gradient_ready` for each of `wrapper.trainable`."""
    # A weak reference, because otherwise the hooks of its parameters would keep the wrapper alive forever.
    reference = weakref.ref(wrapper)

    def hook(parameter: nn.Parameter) -> None:
        if (alive := reference()) is not None:
            alive.gradient_ready(parameter)

    for parameter in wrapper.trainable:
        parameter.register_post_accumulate_grad_hook(hook)


# 3. What an all-reduce is made of ------------------------------------------------------------------------------------


class ScratchReduceScatter(ScratchAllReduce):
    """Puts all gradients into one flat tensor and runs the two halves of a ring all-reduce on it.

    The flat tensor, which takes another n bytes of memory, is padded with zeros and cut into W equal shards. Reduce-scatter
    takes W-1 rounds, in which every rank passes a shard to its neighbor, which adds its own values. At the end, rank r holds
    the finished sum of shard r. All-gather takes W-1 more rounds, in which the finished shards travel around the ring. A rank
    sends n / W bytes in each of the 2 (W-1) rounds.

    ZeRO and FSDP put the optimizer's update between the two halves. Each rank then updates only its own shard, and needs
    optimizer state only for that shard.

    NCCL's reduce-scatter is such a ring. Gloo's (torch 2.8 and later) runs W all-reduces instead, and each rank keeps the
    result of one. The sums are the same, but each rank sends 3 (W-1)/W n bytes, so don't expect this class to be fast on CPUs.
    """

    def ensure_equal_replicas(self) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        broadcast_module(self.module, self.group)

    def average_gradients(self) -> None:
        for parameters in group_by_kind(self.trainable):
            flat = torch.cat([p.grad.reshape(-1) for p in parameters])
            flat = nn.functional.pad(flat, (0, -flat.numel() % self.world_size)).div_(self.world_size)
            shards = list(flat.chunk(self.world_size))  # views: all_gather writes into `flat`
            own_shard = torch.empty_like(shards[0])
            dist.reduce_scatter(own_shard, shards, group=self.group)
            dist.all_gather(shards, own_shard, group=self.group)
            for parameter, gradient in zip(parameters, views(flat, parameters), strict=True):
                parameter.grad = gradient


@torch.no_grad()
def broadcast_module(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dense = tensor.detach().contiguous()
        dist.broadcast(dense, group=group, group_src=0)
        tensor.copy_(dense)


def group_by_kind(
    parameters: list[nn.Parameter], capacity: float = math.inf, first_capacity: float = math.inf
) -> list[list[nn.Parameter]]:
    """Split `parameters`, in order, into groups of one dtype and device.

    A group is full at `capacity` bytes or more, and the first one already at `first_capacity`.
    """
    groups, last_kind, size = [], None, 0
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        full = capacity if len(groups) > 1 else min(first_capacity, capacity)
        if kind != last_kind or size >= full:
            groups.append([])
            last_kind, size = kind, 0
        groups[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return groups


def views(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return consecutive views of the 1-D `flat`, in the shapes of `parameters`."""
    sizes = [p.numel() for p in parameters]
    return [piece.view(p.shape) for piece, p in zip(flat[: sum(sizes)].split(sizes), parameters, strict=True)]


# 4. Communicating while backward runs --------------------------------------------------------------------------------


class Buckets:
    """Divides parameters into buckets, and says when to send each: as soon as all of its gradients are ready.

    Gradients may become ready in a different order on each rank, but all ranks must start collectives in the same order. So a
    full bucket waits for those before it. Buckets hold parameters of one dtype and device, and at least `bucket_mb` MB of them,
    or in the first bucket `first_bucket_mb`, unless there are no more.
    """

    def __init__(self, parameters: list[nn.Parameter], bucket_mb: float, first_bucket_mb: float):
        self.groups = group_by_kind(parameters, bucket_mb * 2**20, first_bucket_mb * 2**20)
        self.bucket_of = {p: i for i, group in enumerate(self.groups) for p in group}
        self.ready_at_send: list[int] = []  # how many gradients were ready when each bucket was sent, in the last update
        self.begin()

    def begin(self) -> None:
        """Begin a backward whose gradients will be sent."""
        self.waiting = [set(group) for group in self.groups]  # parameters whose gradient is not ready yet
        self.ready = self.sent = 0  # gradients and buckets
        self.ready_at_send.clear()

    def gradient_ready(self, parameter: nn.Parameter) -> range:
        """Note that a gradient is ready. Returns the buckets to send now."""
        self.ready += 1
        self.waiting[self.bucket_of[parameter]].discard(parameter)
        first = self.sent
        while self.sent < len(self.groups) and not self.waiting[self.sent]:
            self.sent += 1
            self.ready_at_send.append(self.ready)
        return range(first, self.sent)

    def rest(self) -> range:
        """Return the buckets to send at the end of backward: parameters still without a gradient were not used in it."""
        left = range(self.sent, len(self.groups))
        self.ready_at_send[left.start :] = [self.ready] * len(left)
        self.sent = 0
        return left


class ScratchOverlap(ScratchAllReduce):
    """Fills buckets of about 25 MB and all-reduces each as soon as it is full, while backward continues. DDP does the same.

    Backward starts at the last layer. The buckets hold the parameters in reverse order of registration, so the first one is
    sent soon after backward begins. Only the last bucket's all-reduce cannot be hidden. Larger buckets cost fewer latencies,
    but smaller ones start earlier; 25 MB is DDP's choice, and so is 1 MB for the first bucket, without which a small model
    would have only one. Gradients live in the buckets: a new gradient is copied there once, later micro-batches add to it in
    place, and nothing is copied back. `ready_at_send` says how many gradients were ready as each bucket was sent.

    A module compiled as one graph returns all its gradients at the end of backward, which leaves nothing to overlap with.
    Compile its blocks one by one to keep the overlap.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup | None = None, bucket_mb: float = 25, first_bucket_mb: float = 1
    ):
        super().__init__(module, group)
        self.buckets = Buckets(self.trainable[::-1], bucket_mb, first_bucket_mb)
        self.ready_at_send = self.buckets.ready_at_send
        self.started = []  # all-reduces in flight
        self.flats, self.view_of = [], {}  # by bucket; by parameter, a view of its bucket's flat tensor
        if self.world_size == 1:
            return
        for parameters in self.buckets.groups:
            first, count = parameters[0], sum(p.numel() for p in parameters)
            self.flats.append(torch.zeros(count, dtype=first.dtype, device=first.device))
            self.view_of |= zip(parameters, views(self.flats[-1], parameters), strict=True)

    def ensure_equal_replicas(self) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        broadcast_module(self.module, self.group)

    def prepare_sync(self) -> None:
        super().prepare_sync()
        self.finish_all_reduces()  # an earlier backward that raised may have left some in flight
        self.buckets.begin()

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        super().gradient_ready(parameter)
        self.move_into_bucket(parameter)
        if self.sync_this_backward:
            self.send(self.buckets.gradient_ready(parameter))

    def move_into_bucket(self, parameter: nn.Parameter) -> None:
        """Make `parameter.grad` a view of its bucket, into which autograd then accumulates."""
        view = self.view_of[parameter]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def send(self, buckets: range) -> None:
        """Start replacing the gradients in `buckets` with their mean over the ranks."""
        for flat in self.flats[buckets.start : buckets.stop]:
            flat.div_(self.world_size)
            self.started.append(dist.all_reduce(flat, group=self.group, async_op=True))

    def finish_all_reduces(self) -> None:
        """Wait for the all-reduces in flight."""
        for work in self.started:
            work.wait()
        self.started.clear()

    def average_gradients(self) -> None:
        for parameter in self.trainable:
            self.move_into_bucket(parameter)
        self.send(self.buckets.rest())
        self.finish_all_reduces()
