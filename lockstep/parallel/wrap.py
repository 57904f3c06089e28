"""Which class stands behind each --strategy other than ddp, whose wrapper is in train.py."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lockstep.hardware.device import DTYPES
from lockstep.numerics.optim import load_rows
from lockstep.parallel.engine import Strategy, is_sharded
from lockstep.parallel.exact import ExactSums
from lockstep.parallel.from_scratch import ScratchAllReduce, ScratchOverlap, ScratchReduceScatter
from lockstep.parallel.world import World
from lockstep.settings import Config


def wrap(module: nn.Module, weights: Iterable[tuple[str, Any]], config: Config, world: World) -> Strategy:
    """Wrap `module`, which is on the meta device, so that the ranks train it together, and load its `weights`."""
    name, micro_batches = config.parallel.strategy, config.micro_batches
    if name == "fsdp" and world.size > 1:  # shards the module before it takes any memory
        from lockstep.parallel.sharded import Fsdp  # imported here because importing FSDP2 takes a second

        sharded = Fsdp(module, DTYPES[config.train.dtype], world, config.parallel, micro_batches)
        load_weights(module, weights, world.device)
        return sharded
    load_weights(module, weights, world.device)
    if name == "exact":
        return ExactSums(module, world, micro_batches, config.train.compile == "on")
    if name == "fsdp":  # on one rank, there is nothing to shard
        return Strategy(module, module, world, micro_batches)
    lessons = {
        "scratch_allreduce": ScratchAllReduce,
        "scratch_reduce_scatter": ScratchReduceScatter,
        "scratch_overlap": ScratchOverlap,
    }
    return Strategy(module, lessons[name](module), world, micro_batches)


def load_weights(module: nn.Module, weights: Iterable[tuple[str, Any]], own_device: torch.device) -> None:
    """Give memory and values to `module`, whose parameters are on the meta device.

    weights: names and values. A value is created on demand, or read by rows from a file. So a rank never holds more of a
    sharded model than its shards and one tensor.
    """
    if any(map(is_sharded, module.parameters())):
        module.to_empty(device=own_device)
    else:  # the same without `to_empty`, which imports the compiler's symbols for a meta tensor and takes half a second
        empty = {name: torch.empty(value.shape, device=own_device) for name, value in module.named_parameters()}
        module.load_state_dict(empty, assign=True)
        module.to(own_device)  # the buffers
    for name, value in weights:
        load_rows(module.get_parameter(name), value)
