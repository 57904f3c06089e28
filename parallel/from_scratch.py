"""Data parallelism from scratch: a lesson in four parts, to be read from top to bottom.

W processes ("ranks") hold a copy each of the same model. Each rank computes the gradient of its own share of the batch.
If the shares are equally large, the mean of the W gradients is the gradient of the whole batch. With this mean, every
rank makes the same optimizer update, so the copies stay equal. The whole method is: start equal, average the gradients,
update. Averaging the weights after the update is something else, because AdamW is not linear in the gradient.

The parts are: (1) the idea, (2) when it runs, (3) what an all-reduce is made of, (4) communication while backward runs.
They give three strategies, which differ in how the mean reaches every rank. For P parameters with n bytes of gradients:

    strategy               collectives an update     bytes each rank sends     when
    ScratchAllReduce       P                         2 (W-1)/W n               after backward
    ScratchReduceScatter   2 (of one flat tensor)    2 (W-1)/W n               after backward
    ScratchOverlap         n / 25 MB                 2 (W-1)/W n               while backward is still running

No all-reduce can send fewer bytes than 2 (W-1)/W n, and a ring sends exactly that many (Patarasuk and Yuan 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations"; Baidu brought it to deep learning in 2017). So each
of 1000 ranks sends hardly more than each of 10. Two things can still be saved: the latency of P small messages, and the
time in which nothing is computed because gradients are being sent. The last strategy saves both, as torch's
DistributedDataParallel does (Li et al. 2020, "PyTorch Distributed", VLDB 13(12)). All three have DDP's interface:

    model = ScratchOverlap(model)
    for i, (x, y) in enumerate(micro_batches):
        model.require_backward_grad_sync = i == len(micro_batches) - 1  # communicate once an update
        loss_of(model(x), y).backward()
    optimizer.step()  # .grad is the mean over the ranks of what each has accumulated

If some ranks have no gradient for a parameter, it counts as zero there. If no rank has one, `.grad` stays None, as in a
single process. Parameters that are frozen when the wrapper is built are left out. Buffers (the statistics of batch norm)
are made equal at the start only, unlike in DDP. Without a process group, or with one rank, the wrappers do nothing.
"""

import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.replicas import check_replicas


class ScratchAllReduce(nn.Module):
    """Checks that the replicas start equal. After backward, runs one all-reduce per parameter, one after another.

    A transformer has many vectors of a few KB. While they are sent the network is idle most of the time: they cost P
    latencies. Raises ValueError on all ranks if the ranks' parameters or buffers differ (see `check_replicas`).
    """

    # 1. The idea -----------------------------------------------------------------------------------------------------

    def average_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks. Every trainable parameter has a gradient when this is called."""
        for parameter in self.trainable:
            parameter.grad.div_(self.world_size)  # before the sum, which might overflow in float16
            dist.all_reduce(parameter.grad, group=self.group)

    # 2. When it runs -------------------------------------------------------------------------------------------------
    #
    # Once an update, at the end of its last backward. The user says which backward is the last one by setting
    # `require_backward_grad_sync` before the forward. Autograd says when that backward is done.

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module, self.group = module, group
        self.world_size = dist.get_world_size(group) if dist.is_initialized() else 1
        # parameters() lists a tied parameter once, and autograd adds up all its uses before it calls the hook.
        self.trainable = [p for p in module.parameters() if p.requires_grad]
        self.require_backward_grad_sync = True
        self.sync_this_backward = self.sync_is_queued = False
        if self.world_size > 1:
            self.ensure_equal_replicas()
            self.register_hooks()

    def register_hooks(self) -> None:
        """Have autograd call `gradient_ready` for every trainable parameter."""
        # Weakly: a wrapper in its own parameters' hooks is a cycle that Python does not find, so nothing would ever be freed.
        wrapper = weakref.ref(self)

        def hook(parameter: nn.Parameter) -> None:
            if (alive := wrapper()) is not None:
                alive.gradient_ready(parameter)

        for parameter in self.trainable:
            parameter.register_post_accumulate_grad_hook(hook)

    def ensure_equal_replicas(self) -> None:
        """Make sure that all ranks start from the same parameters and buffers. This strategy refuses any difference."""
        check_replicas(self.module, self.group)

    def forward(self, *args, **kwargs):
        """Run the module. As in DDP, the forward decides whether the backward that follows communicates."""
        if torch.is_grad_enabled():  # an evaluation between forward and backward decides nothing
            self.sync_this_backward, self.sync_is_queued = self.require_backward_grad_sync, False
        return self.module(*args, **kwargs)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Autograd calls this as soon as `parameter.grad` holds its gradient of this backward."""
        if self.sync_this_backward and not self.sync_is_queued:
            self.prepare_sync()

    def prepare_sync(self) -> None:
        """Arrange that `sync_gradients` runs at the end of this backward. Called when its first gradient is ready."""
        # No gradient knows that it is the last one, and unused parameters have none. The autograd engine knows: it runs a
        # queued callback when the whole backward is done, before `loss.backward()` returns. FSDP2 does the same.
        self.sync_is_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self.sync_gradients)

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Replace the gradients by their mean over the ranks.

        Runs by itself at the end of a backward whose forward found `require_backward_grad_sync` true. After `no_sync` it may
        be called by hand, on all ranks. It costs the strategy's collectives and one more, of 4 bytes a parameter.
        """
        self.sync_is_queued = False
        if self.world_size == 1 or not self.trainable:
            return
        # All ranks must call the same collectives in the same order, whichever gradients they miss; otherwise they would
        # wait for each other for ever.
        # The counts are made on the device: copying them there would wait for all that a GPU still has to do.
        ranks_with_gradient = torch.ones(len(self.trainable), dtype=torch.int32, device=self.trainable[0].device)
        missing = [i for i, parameter in enumerate(self.trainable) if parameter.grad is None]
        for i in missing:
            self.trainable[i].grad = torch.zeros_like(self.trainable[i])
            ranks_with_gradient[i].zero_()
        self.average_gradients()
        dist.all_reduce(ranks_with_gradient, group=self.group)
        if missing:  # only then, because a GPU has to wait for the numbers
            for parameter, ranks in zip(self.trainable, ranks_with_gradient.tolist(), strict=True):
                if ranks == 0:
                    parameter.grad = None

    def enable_grad_sync(self) -> None:
        """From the next forward on, backward ends with the mean over the ranks."""
        self.require_backward_grad_sync = True

    def disable_grad_sync(self) -> None:
        """From the next forward on, backward only adds to this rank's own gradients."""
        self.require_backward_grad_sync = False

    @contextmanager
    def no_sync(self):
        """Do as after `disable_grad_sync` for the forwards in this context."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


# 3. What an all-reduce is made of ------------------------------------------------------------------------------------


class ScratchReduceScatter(ScratchAllReduce):
    """Puts all gradients into one flat tensor and runs the two halves of a ring all-reduce.

    The flat tensor is cut into W equal shards (zeros at its end make it divisible). Reduce-scatter takes W-1 rounds. In
    each, every rank passes a shard to its neighbour, which adds its own. At the end rank r has the finished sum of shard
    r. All-gather takes W-1 more rounds, in which the finished shards travel around the ring. In each of the 2 (W-1)
    rounds a rank sends n / W bytes. The flat tensor takes n more bytes of memory.

    ZeRO and FSDP put the optimizer's update between the two halves. Each rank then updates only its own shard, and needs
    only that shard's optimizer state.

    NCCL's reduce-scatter is such a ring. Gloo's (torch 2.8 and later) runs W all-reduces instead, and each rank keeps the
    result of one. The sums are the same, but 3 (W-1)/W n bytes are sent in all. So read this one on a CPU; run it on GPUs.
    """

    def ensure_equal_replicas(self) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        broadcast_module(self.module, self.group)

    def average_gradients(self) -> None:
        for parameters in group_by_kind(self.trainable):
            flat = torch.cat([p.grad.reshape(-1) for p in parameters])
            flat = nn.functional.pad(flat, (0, -flat.numel() % self.world_size)).div_(self.world_size)
            shards = list(flat.chunk(self.world_size))  # views: what is gathered lands in `flat`
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


def group_by_kind(parameters: list[nn.Parameter], capacity: float = float("inf")) -> list[list[nn.Parameter]]:
    """`parameters` in order, in groups for one flat tensor each: of one dtype and device, and full at `capacity` bytes."""
    groups, last_kind, size = [], None, 0
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        if kind != last_kind or size >= capacity:
            groups.append([])
            last_kind, size = kind, 0
        groups[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return groups


def views(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Views of the 1-D `flat`, one after another, in the shapes of `parameters`."""
    sizes = [p.numel() for p in parameters]
    return [piece.view(p.shape) for piece, p in zip(flat[: sum(sizes)].split(sizes), parameters, strict=True)]


# 4. Communication while backward runs --------------------------------------------------------------------------------


@dataclass
class Bucket:
    """Gradients that are sent together."""

    flat: Tensor
    gradients: dict[nn.Parameter, Tensor]  # views of `flat`
    waiting: set[nn.Parameter] = field(default_factory=set)  # whose gradient of this backward is not ready yet


class ScratchOverlap(ScratchAllReduce):
    """Fills buckets of about 25 MB and all-reduces each as soon as it is full, while backward goes on: what DDP does.

    Backward begins with the last layer. So the buckets take the parameters in the reverse order of their registration,
    and the first bucket is sent when backward has hardly begun. Only the time of the last bucket cannot be hidden.
    Larger buckets cost fewer latencies, smaller ones start earlier; 25 MB is DDP's choice. Gradients live in the buckets:
    a new one is copied there once, later micro-batches add to it in place, and nothing is copied back.

    A module that is compiled as one graph returns all its gradients at the end of its backward, so there is nothing left
    to overlap with. Compile its blocks one by one to keep the overlap.
    """

    bucket_dtype: torch.dtype | None = None  # None: that of the gradients

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None, bucket_bytes: int = 25 * 2**20):
        self.buckets, self.bucket_bytes = [], bucket_bytes
        self.started = []  # the all-reduces under way, in the order of their buckets
        super().__init__(module, group)

    def register_hooks(self) -> None:
        for parameters in group_by_kind(self.trainable[::-1], self.bucket_bytes):
            first, count = parameters[0], sum(p.numel() for p in parameters)
            flat = torch.zeros(count, dtype=self.bucket_dtype or first.dtype, device=first.device)
            self.buckets.append(Bucket(flat, dict(zip(parameters, views(flat, parameters), strict=True))))
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.gradients}
        super().register_hooks()

    def ensure_equal_replicas(self) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        broadcast_module(self.module, self.group)

    def prepare_sync(self) -> None:
        super().prepare_sync()
        self.finish_all_reduces()  # there are some if the backward before raised halfway
        for bucket in self.buckets:
            bucket.waiting = set(bucket.gradients)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        super().gradient_ready(parameter)
        self.move_into_bucket(parameter)
        if self.sync_this_backward:
            self.bucket_of[parameter].waiting.discard(parameter)
            self.start_full_buckets()

    def move_into_bucket(self, parameter: nn.Parameter) -> None:
        """Make `parameter.grad` its view of the bucket. From then on autograd accumulates there."""
        view = self.bucket_of[parameter].gradients[parameter]
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def start_full_buckets(self) -> None:
        """Start the all-reduce of each full bucket, but never before that of the bucket in front of it.

        Gradients may become ready in another order on another rank, but all ranks must start collectives in the same order.
        """
        for bucket in self.buckets[len(self.started) :]:
            if bucket.waiting:
                return
            self.started.append(self.start_all_reduce(bucket.flat))

    def start_all_reduce(self, flat: Tensor) -> dist.Work:
        """Begin to replace `flat` by its mean over the ranks."""
        return dist.all_reduce(flat.div_(self.world_size), group=self.group, async_op=True)

    def finish_all_reduces(self) -> None:
        """Wait for the all-reduces under way."""
        for work in self.started:
            work.wait()
        self.started.clear()

    def average_gradients(self) -> None:
        for parameter in self.trainable:
            self.move_into_bucket(parameter)
        for bucket in self.buckets:
            bucket.waiting.clear()  # a parameter whose gradient is not ready by now was not used
        self.start_full_buckets()
        self.finish_all_reduces()
