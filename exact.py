"""Data parallelism whose result does not depend on the number of ranks, not by one bit.

Floating-point addition is not associative, so a sum of gradients depends on how ranks share the micro-batches and on the order
of the reduction. Integer addition is: each micro-batch's gradient becomes 64-bit fixed point (a multiple of 2^-50), and all
sums, within a rank and between ranks, are of integers. Only their total goes back to float32. What remains is that a
micro-batch's own gradient must not depend on the rank that computes it, which needs nothing but the same kernels, the same
number of threads and, for dropout, the same seed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_from_scratch import ScratchDataParallel
from settings import RunError

SCALE = 2.0**50
LIMIT = 2.0**13  # times SCALE it is 2^63, the end of int64
CHUNK = 1 << 16  # elements converted at a time on a CPU: they stay in its cache from the first pass to the last


class Exact(ScratchDataParallel):
    """Wraps replicas that start equal. Ranks may hold unequal numbers of micro-batches.

    After the backward of a forward that found `require_backward_grad_sync` true, every rank's gradients are the sum over all
    micro-batches of all ranks since the last such, divided by `micro_batches`, their number. The loss of each must be
    backpropagated as it is, not divided by anything.
    """

    def __init__(self, module: nn.Module, micro_batches: int):
        super().__init__(module)
        self.micro_batches = micro_batches
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        sizes = [p.numel() for p in self.trainable]
        device = self.trainable[0].device
        self.total = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.largest = torch.zeros(len(sizes), device=device)  # of each parameter, any |gradient| of a micro-batch
        self.parts = dict(zip(self.trainable, zip(self.total.split(sizes), self.largest, strict=True), strict=True))
        if self.world_size == 1:  # one rank converts and adds too, or it would round differently from two
            for parameter in self.trainable:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        super().gradient_ready(parameter)
        add_fixed_point(parameter.grad.reshape(-1), *self.parts[parameter])
        parameter.grad = None

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Add up over the ranks and put the mean into every `.grad`, or NaN where a gradient was not finite.

        Raises RunError on every rank, naming the parameter, where the sum might not fit.
        """
        if self.world_size > 1:
            self.largest.nan_to_num_(nan=float("inf"))  # the larger of a number and NaN may be either
            dist.all_reduce(self.total)
            dist.all_reduce(self.largest, op=dist.ReduceOp.MAX)
        largest = self.largest.tolist()
        for parameter, name, most in zip(self.trainable, self.names, largest, strict=True):
            # A sum of n terms below LIMIT / n stays below LIMIT: nothing has wrapped around.
            if LIMIT / self.micro_batches <= most < float("inf"):
                raise RunError(
                    f"a gradient of {name} has reached {most:.3g}: the sum of {self.micro_batches} such may pass {LIMIT:.0f}, "
                    "where the fixed point of --strategy=exact ends; lower --lr, or use --strategy=ddp"
                )
            parameter.grad = torch.empty_like(parameter)
            if most < float("inf"):
                mean_from_fixed_point(self.parts[parameter][0], self.micro_batches, parameter.grad.view(-1))
            else:
                parameter.grad.fill_(float("nan"))
        self.total.zero_()
        self.largest.zero_()


def chunks(*tensors: Tensor):
    """The flat `tensors` in equal pieces: cache-sized on a CPU, whole elsewhere."""
    size = CHUNK if tensors[0].device.type == "cpu" else max(1, len(tensors[0]))
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


@torch.no_grad()
def add_fixed_point(gradient: Tensor, total: Tensor, largest: Tensor) -> None:
    """Add float32 `gradient` [n] in multiples of 2^-50 to int64 `total` [n]; raise the scalar `largest` to its largest |value|.

    Overwrites `gradient`. Scaling by a power of two is exact; what is below 2^-50 is cut off.
    """
    for piece, sums in chunks(gradient, total):
        torch.maximum(largest, piece.abs().amax(), out=largest)
        sums.add_(piece.mul_(SCALE).to(torch.int64))


def mean_from_fixed_point(total: Tensor, count: int, out: Tensor) -> None:
    """The mean of `count` terms whose sum is `total` [n], into float32 `out` [n]."""
    for sums, piece in chunks(total, out):
        piece.copy_(sums.double().mul_(1 / SCALE).div_(count))
