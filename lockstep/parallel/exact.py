"""Data parallelism whose result is the same on any number of ranks, bit for bit.

Floating-point addition is not associative, so a sum of gradients depends on how the ranks share the micro-batches, and on the
order of addition. Integer addition is associative. So here each micro-batch's gradient is converted to 64-bit fixed point, in
multiples of 2^-50. Only integers are added, within a rank and between ranks, and only the total is converted back to float32.

Every rank holds all weights, but only its share of the rest, as in ZeRO (Rajbhandari et al. 2020). It adds up all ranks'
gradients for its share of each parameter, updates that share of the weights, and sends it to all ranks:

    shard_gradients    each rank sends                                      holds besides the weights    sends in an update
                                                                            (bytes per parameter, AdamW) (times (W-1)/W)
    false              integers, once per update                            8 + 12 / W                   12 + 4 / W
    true               float32 gradients, after each of M micro-batches     20 / W                       4 M + 4 + 4 / W

One condition remains: the gradient of a micro-batch must not depend on the rank that computes it. That holds if all ranks use
the same kernels, the same number of threads and, for dropout, the same seed.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.common.errors import RunError
from lockstep.hardware.footprint import EXACT_BLOCK
from lockstep.numerics.optim import all_gather_single, local
from lockstep.parallel.from_scratch import ScratchAllReduce, ScratchOverlap, group_by_kind, views
from lockstep.parallel.shares import gather_own, share_of

SCALE = 2.0**50
LIMIT = 2.0**13  # LIMIT * SCALE is 2^63, just above the largest int64
BUCKET_BYTES = 25 * 2**19  # bytes of float32 gradients per bucket; as integers, they take twice as many
CPU_BLOCK = 1 << 16  # elements that a CPU converts at a time, to stay in its cache through all passes


@dataclass
class Bucket:
    """Parameters that are sent together, in a matrix [W, width]: row r holds rank r's share of each parameter."""

    columns: dict[nn.Parameter, slice]  # each parameter's columns in the matrix
    width: int
    # int64 sums of whole parameters until they are sent. Afterwards, the first `width` elements are the sums of this rank's
    # shares. With shard_gradients, it holds only these shares.
    sums: Tensor
    gradients: dict[nn.Parameter, Tensor | None]  # to send: views of `sums`, or with shard_gradients, float32
    waiting: set[nn.Parameter] = field(default_factory=set)  # parameters whose gradient is not yet ready in this backward


@dataclass
class Exchange:
    """A bucket in flight."""

    work: dist.Work | None
    outgoing: Tensor | None  # [W, width]: row r goes to rank r
    incoming: Tensor | None  # [W, width]: row r comes from rank r
    add: Callable[[Tensor], None]  # adds `incoming` to the sums

    def wait(self) -> None:
        """Add up what has arrived and free the memory. A second call does nothing."""
        if self.work is not None:
            self.work.wait()
            self.work = self.outgoing = None
            self.add(self.incoming)
            self.incoming = None


class Exact(ScratchOverlap):
    """A ScratchOverlap that adds integers. Of M micro-batches, a rank may compute M // W or one more.

    Do not divide a micro-batch's loss by anything before backward. If the forward saw `require_backward_grad_sync` true, then
    after backward the `.grad` of each of `shares` is this rank's share of the update's mean gradient. That is the sum over all
    micro-batches of all ranks, divided by `micro_batches`. With one rank, the shares are the parameters themselves. Once the
    optimizer has updated them, `gather_weights` sends the new weights to all ranks.

    shard_gradients: do not keep integers of whole parameters. compiled: convert with compiled functions. Neither changes a bit.
    """

    def __init__(self, module: nn.Module, micro_batches: int, shard_gradients: bool = False, compiled: bool = False):
        self.micro_batches, self.shard_gradients = micro_batches, shard_gradients
        # Whether this backward ends the update, and how many of the update's backwards have sent gradients.
        self.update_ends, self.rounds = True, 0
        super().__init__(module, bucket_bytes=BUCKET_BYTES)
        self.shares = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if self.world_size > 1:
            self.shares = {name: share_of(p, dist.get_rank(), self.world_size) for name, p in self.shares.items()}
        self.own = dict(zip(self.trainable, self.shares.values(), strict=True))
        self.largest = torch.zeros(len(self.trainable), device=self.trainable[0].device)  # |gradient| per parameter
        self.largest_of = dict(zip(self.trainable, self.largest, strict=True))
        self.add, self.mean = add_fixed_point, mean_from_fixed_point
        if compiled:
            self.add, self.mean = (torch.compile(function, dynamic=True) for function in (self.add, self.mean))
        on_cpu = self.largest.device.type == "cpu"
        self.block = CPU_BLOCK if on_cpu and not compiled else EXACT_BLOCK
        if self.world_size == 1:  # a single rank converts and adds too, to round as several ranks do
            self.shard_gradients = False
            self.register_hooks()

    def register_hooks(self) -> None:
        for parameters in group_by_kind(self.trainable[::-1], self.bucket_bytes):
            sizes = [share_of(p, 0, self.world_size).size if self.world_size > 1 else p.numel() for p in parameters]
            ends = [0, *itertools.accumulate(sizes)]
            columns = {p: slice(*ends[i : i + 2]) for i, p in enumerate(parameters)}
            whole = 0 if self.shard_gradients else sum(p.numel() for p in parameters)
            sums = torch.zeros(max(whole, ends[-1]), dtype=torch.int64, device=parameters[0].device)
            pieces = [None] * len(parameters) if self.shard_gradients else views(sums, parameters)
            self.buckets.append(Bucket(columns, ends[-1], sums, dict(zip(parameters, pieces, strict=True))))
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.columns}
        ScratchAllReduce.register_hooks(self)

    # From backward to the ranks that add -----------------------------------------------------------------------------

    def forward(self, *args, **kwargs):
        """Run the module. As in DDP, the forward decides whether the next backward ends an update."""
        output = super().forward(*args, **kwargs)
        if torch.is_grad_enabled():
            self.update_ends = self.require_backward_grad_sync
            self.sync_this_backward = self.update_ends or self.shard_gradients
        return output

    @torch.no_grad()
    def move_into_bucket(self, parameter: nn.Parameter) -> None:
        """Move the gradient out of the parameter: add it to the bucket's integers, or keep it until the bucket is full."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        raise_largest(self.largest_of[parameter], gradient)
        gradients = self.bucket_of[parameter].gradients
        if self.shard_gradients:
            gradients[parameter] = gradient
        else:
            self.in_blocks(self.add, gradients[parameter].view(-1), gradient.reshape(-1))

    def start_full_buckets(self) -> None:
        if self.world_size > 1:
            super().start_full_buckets()

    @torch.no_grad()
    def send(self, bucket: Bucket) -> Exchange:
        """Start sending each rank its row of the bucket. To limit memory, at most two exchanges are in flight."""
        for before in self.started[:-1]:
            before.wait()
        dtype = torch.float32 if self.shard_gradients else torch.int64
        outgoing = torch.empty(self.world_size, bucket.width, dtype=dtype, device=bucket.sums.device)
        for parameter, columns in bucket.columns.items():
            gradient = bucket.gradients[parameter]
            if gradient is None:
                outgoing[:, columns] = 0
                continue
            for row, values in rows(outgoing[:, columns], gradient.reshape(-1)):
                row.copy_(values)
            if self.shard_gradients:
                bucket.gradients[parameter] = None
        sums, incoming = bucket.sums[: bucket.width], torch.empty_like(outgoing)
        add = functools.partial(torch.sum, dim=0, out=sums)
        if self.shard_gradients:
            add = functools.partial(self.in_blocks, self.add, sums)
        return Exchange(dist.all_to_all_single(incoming, outgoing, async_op=True), outgoing, incoming, add)

    # From sums to weights --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Give each of `shares` its mean gradient, or NaN if a gradient was not finite.

        Raises RunError on every rank, naming the parameter, if the sum might not fit in 64 bits.
        """
        self.sync_is_queued = False
        self.rounds += 1
        self.average_gradients()
        if not self.update_ends:
            return
        each, more = divmod(self.micro_batches, self.world_size)
        if self.shard_gradients and more and self.rounds == each:  # other ranks have one more micro-batch
            self.average_gradients()
        self.rounds, average = 0, functools.partial(self.mean, self.micro_batches)
        if self.world_size > 1:
            self.largest.nan_to_num_(nan=float("inf"), posinf=float("inf"))  # the maximum of a number and NaN could be either
            dist.all_reduce(self.largest, op=dist.ReduceOp.MAX)
        for (name, share), parameter, largest in zip(self.shares.items(), self.own, self.largest.tolist(), strict=True):
            # A sum of n terms below LIMIT / n stays below LIMIT, so nothing has wrapped around.
            if LIMIT / self.micro_batches <= largest < float("inf"):
                raise RunError(
                    f"a gradient of {name} has reached {largest:.3g}; {self.micro_batches} of them could exceed {LIMIT:.0f}, "
                    "the limit of --strategy=exact; lower --lr, or use --strategy=ddp"
                )
            share.grad = torch.empty_like(share)
            mean, bucket = local(share.grad).view(-1), self.bucket_of[parameter]
            self.in_blocks(average, bucket.sums[bucket.columns[parameter]][: len(mean)], mean)
            if not largest < float("inf"):
                mean.fill_(float("nan"))
        for bucket in self.buckets * (self.world_size > 1):
            bucket.sums.zero_()
        self.largest.zero_()

    def in_blocks(self, function, sums: Tensor, values: Tensor) -> None:
        """Call `function` on int64 `sums` [n] and float32 `values` [..., n], a block at a time."""
        block = self.block // max(1, values.numel() // max(1, len(sums)))
        for part in zip(sums.split(block), values.split(block, -1), strict=True):
            function(*part)

    def total_norm(self, ops) -> Tensor:
        """Return the norm of all gradients, with the same bits as on one rank: one rank computes each tensor's part."""
        gradients = {name: share.grad for name, share in self.shares.items()}
        if self.world_size == 1:
            return ops.norm_of(ops.norm_parts(list(gradients.values())))
        shapes = ops.norm_parts([torch.empty(share.shape, device="meta") for share in self.shares.values()])
        places = [part.numel() for part in shapes]
        found = torch.zeros(sum(places), dtype=shapes[0].dtype, device=self.largest.device)
        parts = dict(zip(gradients, found.split(places), strict=True))
        owners = {name: i % self.world_size for i, name in enumerate(gradients)}
        for name, whole in gather_own(gradients, owners, dist.group.WORLD):
            parts[name].copy_(ops.norm_parts([whole])[0])
        dist.all_reduce(found)
        return ops.norm_of(list(parts.values()))

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Send each rank's updated share of the weights to all ranks."""
        for bucket in self.buckets * (self.world_size > 1):
            row = torch.empty(bucket.width, device=bucket.sums.device)
            for parameter, columns in bucket.columns.items():
                values = self.own[parameter].to_local()
                row[columns][: len(values)] = values
            matrix = row.new_empty(self.world_size, bucket.width)
            all_gather_single(matrix.view(-1), row)
            for parameter, columns in bucket.columns.items():
                for values, place in rows(matrix[:, columns], parameter.detach().view(-1)):
                    place.copy_(values)


@torch.no_grad()
def add_fixed_point(total: Tensor, gradients: Tensor) -> None:
    """Add float32 `gradients`, [n] or [k, n], to int64 `total` [n] as multiples of 2^-50.

    Scaling by a power of two is exact. Digits below 2^-50 are truncated.
    """
    integers = (gradients * SCALE).to(torch.int64)
    total.add_(integers if integers.ndim == 1 else integers.sum(0))


@torch.no_grad()
def raise_largest(largest: Tensor, gradient: Tensor) -> None:
    """Raise the scalar `largest` to the largest |value| of `gradient`. NaN stays NaN.

    This is never compiled, because the compiler plans the reduction for the first gradient that it sees. If that is a norm's
    small gradient, a single thread block later reduces a whole embedding (pytorch/pytorch#155941).
    """
    low, high = gradient.aminmax()
    largest.copy_(torch.maximum(largest, torch.maximum(-low, high)))


def mean_from_fixed_point(count: int, total: Tensor, out: Tensor) -> None:
    """Write to float32 `out` [n] the mean of `count` terms whose sum is `total` [n]. Sets `total` to zero."""
    divisor = out.new_full((), count, dtype=torch.float64)  # CUDA would multiply by the reciprocal of a Python number
    out.copy_(total.double().mul_(1 / SCALE).div_(divisor))
    total.zero_()


def rows(matrix: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield matching views of `matrix` [W, size] and of `flat`, which fills the matrix row by row."""
    full, rest = divmod(len(flat), matrix.shape[1])
    yield matrix[:full], flat[: len(flat) - rest].view(full, matrix.shape[1])
    if rest:
        yield matrix[full, :rest], flat[len(flat) - rest :]
