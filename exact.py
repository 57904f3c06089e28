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

from ddp_from_scratch import ScratchAllReduce
from settings import RunError

SCALE = 2.0**50
LIMIT = 2.0**13  # LIMIT * SCALE is 2^63, where int64 ends
CPU_BLOCK = 1 << 16  # elements that a CPU converts at a time: few enough to stay in its cache from the first pass to the last


class Exact(ScratchAllReduce):
    """Wraps replicas that start equal. The ranks may hold unequal numbers of micro-batches.

    The loss of each micro-batch must be backpropagated as it is, not divided by anything. After the backward of a forward that
    found `require_backward_grad_sync` true, the gradients on every rank are the mean over the update: the sum over all
    micro-batches of all ranks since the last such backward, divided by `micro_batches`.
    """

    def __init__(self, module: nn.Module, micro_batches: int):
        super().__init__(module)
        self.micro_batches = micro_batches
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        sizes = [p.numel() for p in self.trainable]
        device = self.trainable[0].device
        self.total = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.largest = torch.zeros(len(sizes), device=device)  # of each parameter: the largest |gradient| of a micro-batch
        self.sums = dict(zip(self.trainable, zip(self.total.split(sizes), self.largest, strict=True), strict=True))
        if self.world_size == 1:  # one rank converts and adds as well; otherwise it would round differently from two
            for parameter in self.trainable:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        super().gradient_ready(parameter)
        add_fixed_point(parameter.grad.reshape(-1), *self.sums[parameter])
        parameter.grad = None

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Add up over the ranks and put the mean into every `.grad`, or NaN where a gradient was not finite.

        Raises RunError on every rank, naming the parameter, where the sum might not fit into 64 bits.
        """
        self.sync_is_queued = False
        if self.world_size > 1:
            self.largest.nan_to_num_(nan=float("inf"))  # because the maximum of a number and NaN may be either
            dist.all_reduce(self.total)
            dist.all_reduce(self.largest, op=dist.ReduceOp.MAX)
        for parameter, name, largest in zip(self.trainable, self.names, self.largest.tolist(), strict=True):
            # A sum of n terms that are all below LIMIT / n stays below LIMIT, so nothing has wrapped around.
            if LIMIT / self.micro_batches <= largest < float("inf"):
                raise RunError(
                    f"a gradient of {name} has reached {largest:.3g}: the sum of {self.micro_batches} like it may pass "
                    f"{LIMIT:.0f}, where the fixed point of --strategy=exact ends; lower --lr, or use --strategy=ddp"
                )
            parameter.grad = torch.empty_like(parameter)
            if largest < float("inf"):
                mean_from_fixed_point(self.sums[parameter][0], self.micro_batches, parameter.grad.view(-1))
            else:
                parameter.grad.fill_(float("nan"))
        self.total.zero_()
        self.largest.zero_()


def blocks(*tensors: Tensor):
    """The 1-D `tensors` of equal length side by side, in blocks that fit a CPU's cache; in one block on other devices."""
    size = CPU_BLOCK if tensors[0].device.type == "cpu" else max(1, len(tensors[0]))
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


@torch.no_grad()
def add_fixed_point(gradient: Tensor, total: Tensor, largest: Tensor) -> None:
    """Add float32 `gradient` [n] in multiples of 2^-50 to int64 `total` [n]; raise the scalar `largest` to its largest |value|.

    Overwrites `gradient`. Scaling by a power of two is exact; digits below 2^-50 are cut off.
    """
    for values, sums in blocks(gradient, total):
        torch.maximum(largest, values.abs().amax(), out=largest)
        sums.add_(values.mul_(SCALE).to(torch.int64))


def mean_from_fixed_point(total: Tensor, count: int, out: Tensor) -> None:
    """Write the mean of `count` terms, whose sum is `total` [n], into float32 `out` [n]."""
    for sums, values in blocks(total, out):
        values.copy_(sums.double().mul_(1 / SCALE).div_(count))
