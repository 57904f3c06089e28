"""Data parallelism whose result is the same on any number of ranks, bit for bit.

Floating-point addition is not associative, so a sum of gradients depends on how the ranks share the micro-batches, and on the
order of addition. Integer addition is associative. So here each micro-batch's gradient is converted to 64-bit fixed point, in
multiples of 2^-50. Only integers are added, within a rank and between ranks, and only the total is converted back to float32.

Every rank holds all weights, but only its share of the optimizer's state, as in ZeRO (Rajbhandari et al. 2020). It adds up all
ranks' gradients for its share of each parameter, updates that share of the weights, and sends it to all ranks. With AdamW, a
rank holds 4 bytes per parameter of weights, 8 of integers and 12 / W of the rest. In an update it sends (W-1) / W times 8 bytes
of integers, 4 / W for the gradient norm and 4 of weights.

One condition remains: the gradient of a micro-batch must not depend on the rank that computes it. That holds if all ranks use
the same kernels, the same number of threads and, for dropout, the same seed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.common.errors import RunError
from lockstep.numerics import optim
from lockstep.numerics.optim import all_gather_single, local
from lockstep.parallel.engine import Strategy
from lockstep.parallel.from_scratch import Buckets, register_hooks, views
from lockstep.parallel.shares import gather_own, share_of
from lockstep.parallel.world import World
from lockstep.strategies import EXACT_BLOCK

SCALE = 2.0**50
LIMIT = 2.0**13  # LIMIT * SCALE is 2^63, just above the largest int64
BUCKET_MB, FIRST_BUCKET_MB = 12.5, 0.5  # of float32 gradients per bucket; as integers, they take twice as many
CPU_BLOCK = 1 << 16  # elements that a CPU converts at a time, to stay in its cache through all passes


@dataclass
class Row:
    """A bucket's sums. Ranks exchange a bucket as a matrix [W, width], whose row r holds rank r's share of each parameter."""

    columns: dict[nn.Parameter, slice]  # each parameter's columns in the matrix
    width: int
    sums: Tensor  # int64 sums of whole parameters; once received, the first `width` are those of this rank's shares
    whole: dict[nn.Parameter, Tensor]  # each parameter's part of `sums` before the exchange


@dataclass
class Exchange:
    """A bucket in flight."""

    work: dist.Work
    outgoing: Tensor  # [W, width]: row r goes to rank r
    incoming: Tensor  # [W, width]: row r comes from rank r
    row: Row

    def wait(self) -> None:
        """Add up what has arrived."""
        self.work.wait()
        torch.sum(self.incoming, dim=0, out=self.row.sums[: self.row.width])


class Exact(nn.Module):
    """Adds the gradients of `micro_batches` micro-batches as integers. Of M, a rank may compute M // W or one more.

    Do not divide a micro-batch's loss by anything before backward. As in DDP, a forward that sees `require_backward_grad_sync`
    true makes the next backward end the update. After that backward, the `.grad` of each of `shares` is this rank's share of
    the update's mean gradient: the sum over all micro-batches of all ranks, divided by `micro_batches`. With one rank, the
    shares are the parameters themselves, and that rank converts and adds too, to round as several ranks do. Once the optimizer
    has updated them, `gather_weights` sends the new weights to all ranks.

    compiled: convert with compiled functions. This does not change a bit.
    """

    def __init__(self, module: nn.Module, micro_batches: int, compiled: bool = False):
        super().__init__()
        self.module, self.micro_batches = module, micro_batches
        self.require_backward_grad_sync = self.update_ends = True  # of the next forward, and of the next backward
        self.sync_is_queued = False
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.shares = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.trainable = list(self.shares.values())
        if self.world_size > 1:
            self.shares = {name: share_of(p, dist.get_rank(), self.world_size) for name, p in self.shares.items()}
        self.own = dict(zip(self.trainable, self.shares.values(), strict=True))
        self.largest = torch.zeros(len(self.trainable), device=self.trainable[0].device)  # |gradient| per parameter
        self.largest_of = dict(zip(self.trainable, self.largest, strict=True))
        self.add, self.mean = add_fixed_point, mean_from_fixed_point
        if compiled:
            self.add = torch.compile(self.add, dynamic=True)
            self.mean = torch.compile(self.mean, dynamic=True)
        on_cpu = self.largest.device.type == "cpu"
        self.block = CPU_BLOCK if on_cpu and not compiled else EXACT_BLOCK
        self.buckets = Buckets(self.trainable[::-1], BUCKET_MB, FIRST_BUCKET_MB)
        self.rows = [self.new_row(parameters) for parameters in self.buckets.groups]
        self.row_of = {p: row for row in self.rows for p in row.columns}
        self.in_flight: deque[Exchange] = deque()
        register_hooks(self)

    def new_row(self, parameters: list[nn.Parameter]) -> Row:
        """Return the `Row` of a bucket with these parameters."""
        columns, width = {}, 0
        for parameter in parameters:
            size = parameter.numel()
            if self.world_size > 1:
                size = share_of(parameter, 0, self.world_size).size
            columns[parameter] = slice(width, width + size)
            width += size
        # Shares are rounded up, so those of a few small parameters may take more room than the parameters.
        elements = max(width, sum(p.numel() for p in parameters))
        sums = torch.zeros(elements, dtype=torch.int64, device=parameters[0].device)
        whole = dict(zip(parameters, views(sums, parameters), strict=True))
        return Row(columns, width, sums, whole)

    # From backward to the ranks that add -----------------------------------------------------------------------------

    def forward(self, *args, **kwargs):
        """Run the module. As in DDP, the forward decides whether the next backward ends an update."""
        if torch.is_grad_enabled():  # an evaluation between forward and backward must not change that
            self.update_ends, self.sync_is_queued = self.require_backward_grad_sync, False
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Add a gradient to the integers, and send each bucket that is now full. Autograd calls this in backward."""
        if self.update_ends and not self.sync_is_queued:
            self.sync_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.sync_gradients)  # see ScratchAllReduce.prepare_sync
            self.receive()  # an earlier backward that raised may have left some in flight
            self.buckets.begin()
        gradient, parameter.grad = parameter.grad, None
        raise_largest(self.largest_of[parameter], gradient)
        self.in_blocks(self.add, self.row_of[parameter].whole[parameter].view(-1), gradient.reshape(-1))
        if self.update_ends:
            self.send(self.buckets.gradient_ready(parameter))

    def send(self, buckets: range) -> None:
        """Start sending each rank its row of each of `buckets`."""
        if self.world_size == 1:
            return
        for row in self.rows[buckets.start : buckets.stop]:
            if len(self.in_flight) == 2:  # no more at a time, to limit memory
                self.in_flight.popleft().wait()
            outgoing = torch.empty(self.world_size, row.width, dtype=torch.int64, device=row.sums.device)
            for parameter, columns in row.columns.items():
                for place, values in by_rows(outgoing[:, columns], row.whole[parameter].view(-1)):
                    place.copy_(values)
            incoming = torch.empty_like(outgoing)
            work = dist.all_to_all_single(incoming, outgoing, async_op=True)
            self.in_flight.append(Exchange(work, outgoing, incoming, row))

    def receive(self) -> None:
        """Add up the buckets in flight."""
        while self.in_flight:
            self.in_flight.popleft().wait()

    # From sums to weights --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Give each of `shares` its mean gradient, or NaN if a gradient was not finite.

        Raises RunError on every rank, naming the parameter, if the sum might not fit in 64 bits.
        """
        self.send(self.buckets.rest())
        self.receive()
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
            mean, row = local(share.grad).view(-1), self.row_of[parameter]
            self.in_blocks(partial(self.mean, self.micro_batches), row.sums[row.columns[parameter]][: len(mean)], mean)
            if not largest < float("inf"):
                mean.fill_(float("nan"))
        if self.world_size > 1:
            for row in self.rows:
                row.sums.zero_()
        self.largest.zero_()

    def in_blocks(self, function, sums: Tensor, values: Tensor) -> None:
        """Call `function` on int64 `sums` [n] and float32 `values` [n], a block at a time."""
        for part in zip(sums.split(self.block), values.split(self.block), strict=True):
            function(*part)

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Send each rank's updated share of the weights to all ranks."""
        if self.world_size == 1:
            return
        for row in self.rows:
            mine = torch.empty(row.width, device=row.sums.device)
            for parameter, columns in row.columns.items():
                values = self.own[parameter].to_local()
                mine[columns][: len(values)] = values
            matrix = mine.new_empty(self.world_size, row.width)
            all_gather_single(matrix.view(-1), mine)
            for parameter, columns in row.columns.items():
                for values, place in by_rows(matrix[:, columns], parameter.detach().view(-1)):
                    place.copy_(values)


class ExactSums(Strategy):
    """Each rank holds all weights, and updates its share of every parameter."""

    def __init__(self, module: nn.Module, world: World, micro_batches: int, compiled: bool):
        super().__init__(module, Exact(module, micro_batches, compiled), world, micro_batches)
        self.parameters, self.ops = self.model.shares, module.ops
        self.accumulation_steps = 1  # the sum is divided once, for the whole batch

    def total_norm(self) -> Tensor:
        """Return the norm of all gradients, with the same bits on any number of ranks: one rank computes each tensor's part."""
        gradients = {name: share.grad for name, share in self.parameters.items()}
        if self.world.size == 1:
            return self.ops.norm_of(self.ops.norm_parts(list(gradients.values())))
        # Each rank fills in the parts of the tensors that it owns. All other parts are zero, so the sum over ranks is exact.
        likes = self.ops.norm_parts([torch.empty(share.shape, device="meta") for share in self.parameters.values()])
        sizes = [like.numel() for like in likes]
        flat = torch.zeros(sum(sizes), dtype=likes[0].dtype, device=self.model.largest.device)
        parts = dict(zip(gradients, flat.split(sizes), strict=True))
        owners = {name: i % self.world.size for i, name in enumerate(gradients)}
        for name, whole in gather_own(gradients, owners, self.group):
            (part,) = self.ops.norm_parts([whole])
            parts[name].copy_(part)
        dist.all_reduce(flat)
        return self.ops.norm_of(list(parts.values()))

    def orthogonalize(self, matrices: list, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Orthogonalize Muon's matrices of one shape in the same batches as a single rank does."""
        if self.world.size == 1:
            return optim.orthogonalize(matrices, dtype, self.ops)
        return optim.orthogonalize_by_owners(matrices, dtype, self.group, optim.BATCH, self.ops)

    def after_step(self) -> None:
        """Send each rank's updated share of the weights to all ranks."""
        self.model.gather_weights()


@torch.no_grad()
def add_fixed_point(total: Tensor, gradient: Tensor) -> None:
    """Add the float32 `gradient` [n] to int64 `total` [n] as multiples of 2^-50.

    Scaling by a power of two is exact. Digits below 2^-50 are truncated.
    """
    total.add_((gradient * SCALE).to(torch.int64))


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


def by_rows(matrix: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield matching views of `matrix` [W, size] and of `flat`, which fills the matrix row by row."""
    full, rest = divmod(len(flat), matrix.shape[1])
    yield matrix[:full], flat[: len(flat) - rest].view(full, matrix.shape[1])
    if rest:
        yield matrix[full, :rest], flat[len(flat) - rest :]
