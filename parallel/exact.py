"""Data parallelism whose result does not depend on the number of ranks, not in a single bit.

Floating-point addition is not associative. So a sum of gradients depends on how the ranks share the micro-batches and on the
order in which they add. Integer addition is associative. Here each micro-batch's gradient becomes 64-bit fixed point (a
multiple of 2^-50), and all sums, within a rank and between ranks, are sums of integers. Only the total goes back to float32.

One condition is left: the gradient of a micro-batch must not depend on the rank that computes it. It does not if all ranks
use the same kernels, the same number of threads and, for dropout, the same seed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import RunError
from parallel.from_scratch import ScratchOverlap

SCALE = 2.0**50
LIMIT = 2.0**13  # LIMIT * SCALE is 2^63, where int64 ends
CPU_BLOCK = 1 << 16  # elements that a CPU converts at a time: few enough to stay in its cache from the first pass to the last


class Exact(ScratchOverlap):
    """ScratchOverlap with integers in its buckets. The ranks may hold unequal numbers of micro-batches.

    The loss of each micro-batch must be backpropagated as it is, not divided by anything. After the backward of a forward that
    found `require_backward_grad_sync` true, the gradients on every rank are the mean over the update: the sum over all
    micro-batches of all ranks since the last such backward, divided by `micro_batches`.

    compiled: convert by compiled functions. The integers are the same.
    """

    bucket_dtype = torch.int64

    def __init__(self, module: nn.Module, micro_batches: int, compiled: bool = False, bucket_bytes: int = 25 * 2**20):
        super().__init__(module, bucket_bytes=bucket_bytes // 2)  # counted in float32, which takes half as much
        self.micro_batches = micro_batches
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.largest = torch.zeros(len(self.trainable), device=self.trainable[0].device)  # |gradient| of each parameter
        self.largest_of = dict(zip(self.trainable, self.largest, strict=True))
        self.add, self.mean = add_fixed_point, mean_from_fixed_point
        if compiled:
            self.add, self.mean = (torch.compile(function, dynamic=True) for function in (self.add, self.mean))
        on_cpu = self.largest.device.type == "cpu"
        self.block = CPU_BLOCK if on_cpu and not compiled else max(p.numel() for p in self.trainable)
        if self.world_size == 1:  # one rank converts and adds as well; otherwise it would round differently from two
            self.register_hooks()

    def move_into_bucket(self, parameter: nn.Parameter) -> None:
        """Add the gradient to the integers in the bucket, and drop it."""
        if parameter.grad is not None:
            for total, gradient in self.blocks(parameter, parameter.grad):
                self.add(total, gradient)
                raise_largest(self.largest_of[parameter], gradient)
            parameter.grad = None

    def start_full_buckets(self) -> None:
        if self.world_size > 1:
            super().start_full_buckets()

    def start_all_reduce(self, flat: Tensor) -> dist.Work:
        """Begin to replace `flat` by its sum over the ranks."""
        return dist.all_reduce(flat, async_op=True)

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Add up over the ranks and put the mean into every `.grad`, or NaN where a gradient was not finite.

        Raises RunError on every rank, naming the parameter, where the sum might not fit into 64 bits.
        """
        self.sync_is_queued, self.sync_this_backward = False, True
        self.average_gradients()
        if self.world_size > 1:
            self.largest.nan_to_num_(nan=float("inf"))  # because the maximum of a number and NaN may be either
            dist.all_reduce(self.largest, op=dist.ReduceOp.MAX)
        for parameter, name, largest in zip(self.trainable, self.names, self.largest.tolist(), strict=True):
            # A sum of n terms that are all below LIMIT / n stays below LIMIT, so nothing has wrapped around.
            if LIMIT / self.micro_batches <= largest < float("inf"):
                raise RunError(
                    f"a gradient of {name} has reached {largest:.3g}: the sum of {self.micro_batches} like it may pass "
                    f"{LIMIT:.0f}, where the fixed point of --strategy=exact ends; lower --lr, or use --strategy=ddp"
                )
            parameter.grad = torch.empty_like(parameter)
            for total, mean in self.blocks(parameter, parameter.grad):
                self.mean(total, self.micro_batches, mean)
            if not largest < float("inf"):
                parameter.grad.fill_(float("nan"))
        self.largest.zero_()

    def blocks(self, parameter: nn.Parameter, gradient: Tensor):
        """The parameter's integers beside its `gradient`, both flat, in blocks to be converted one at a time."""
        total = self.bucket_of[parameter].gradients[parameter]
        return zip(*(tensor.reshape(-1).split(self.block) for tensor in (total, gradient)), strict=True)


@torch.no_grad()
def add_fixed_point(total: Tensor, gradient: Tensor) -> None:
    """Add float32 `gradient` [n] to int64 `total` [n] as multiples of 2^-50.

    Scaling by a power of two is exact. Digits below 2^-50 are cut off.
    """
    total.add_((gradient * SCALE).to(torch.int64))


@torch.no_grad()
def raise_largest(largest: Tensor, gradient: Tensor) -> None:
    """Raise the scalar `largest` to the largest |value| of `gradient`; NaN stays.

    Never compiled: the compiler lays the reduction out for the first gradient that it sees. If that is a small norm's, one
    thread block later reduces a whole embedding (pytorch/pytorch#155941).
    """
    low, high = gradient.aminmax()
    largest.copy_(torch.maximum(largest, torch.maximum(-low, high)))


def mean_from_fixed_point(total: Tensor, count: int, out: Tensor) -> None:
    """Write the mean of `count` terms, whose sum is `total` [n], into float32 `out` [n]; set `total` to zero."""
    out.copy_(total.double().mul_(1 / SCALE).div_(count))
    total.zero_()
