"""One record per strategy: what a rank holds under it, and what works with it. Another strategy is another record.

The rules, `--plan` and `--help` follow the record, and `wrap` in `lockstep/parallel/wrap.py` has the class that trains. This
module does not import torch, so that `--help` and `--plan` answer at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

EXACT_BLOCK = 1 << 26  # elements that exact converts at a time on a GPU


@dataclass(frozen=True)
class Update:
    """An update, as far as a strategy's memory depends on it."""

    ranks: int
    replicate: int  # --replicate
    micro_steps: int  # micro-batches of one rank
    shard_gradients: bool  # --shard_gradients=on
    number_bytes: int  # per number in matmuls
    parameters: int
    unblocked: int  # parameters outside the blocks
    embedding: int  # parameters of the largest tensor
    tied: bool
    on_cpu: bool

    @property
    def shards(self) -> int:
        """The number of ranks that share one copy of what is sharded."""
        return self.ranks // self.replicate


class Temporary(NamedTuple):
    """Bytes that a rank needs for a moment, besides weights, gradients and activations."""

    backward: float = 0.0  # as the last micro-batch's backward begins
    sync: float = 0.0  # while the ranks add gradients
    step: float = 0.0  # while the optimizer updates the weights


# ---------------------------------------------------------------------------------------------------------------------
# Formulas: bytes of temporary memory


def tied_embedding(update: Update) -> Temporary:
    """Backward adds a tied embedding's gradients, from lookup and matmul, before it adds them to earlier micro-batches'."""
    if not update.tied:
        return Temporary()
    copies = 2 if update.micro_steps > 1 else 1
    return Temporary(sync=4.0 * update.embedding * copies)


def flat_gradients(update: Update) -> Temporary:
    """All gradients in one flat tensor, and a padded copy."""
    return Temporary(sync=8.0 * update.parameters)


def unsharded_gradients(update: Update) -> Temporary:
    """fsdp reduces everything outside the blocks as one unit."""
    return Temporary(sync=(4.0 + update.number_bytes) * update.unblocked)


def exact_buffers(update: Update) -> Temporary:
    """Exact sends and receives one tensor at a time (a gradient's integers, later the weights) and converts in pieces."""
    gradient = 4.0 * update.embedding
    piece = 0.0 if update.on_cpu else min(gradient, 4.0 * EXACT_BLOCK)
    exchange = returned = 0.0
    if update.ranks > 1:
        exchange = 4.0 * gradient  # int64, outgoing and incoming
        returned = gradient * (1 + 1 / update.ranks)
    if update.tied:
        return Temporary(0.0, max(exchange, 2 * gradient + 3 * piece), max(2 * piece, returned))
    # The output layer's gradient is sent first, as backward begins.
    return Temporary(exchange, max(exchange, gradient + 3 * piece), max(2 * piece, returned))


# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StrategyRecord:
    """What distinguishes a strategy. The defaults: each rank holds everything, and all-reduces gradients after backward."""

    help: str
    # Memory
    shards_weights: bool = False  # a rank holds a share, and gathers blocks in the matmuls' dtype while they compute
    shards_update: bool = False  # a rank gets a share of the mean gradient, and updates that share of the weights
    holds: dict[str, float] = field(default_factory=dict)  # what else a rank holds all the time, in bytes per parameter
    moves_gradients: bool = False  # a gradient moves to what the rank `holds` as soon as it is complete
    reduces_in_place: bool = False  # the mean gradients are in what the rank `holds`
    temporary: Callable[[Update], Temporary] = tied_embedding
    # What works with it
    any_ranks: bool = False  # the same bits on any number of ranks, also on one, and with unequal shares of the batch
    equal_weights: bool = True  # all ranks hold the same weights after each update, which --check_replicas_every compares
    no_float16: str = ""  # why --dtype=float16, which multiplies gradients, does not work; empty: it does


BUCKETS = {"gradient buckets": 4.0}
STRATEGIES = {
    "ddp": StrategyRecord("torch's DistributedDataParallel", holds=BUCKETS, reduces_in_place=True),
    "fsdp": StrategyRecord(
        "shard weights, gradients and optimizer state across ranks",
        shards_weights=True,
        shards_update=True,
        temporary=unsharded_gradients,
        equal_weights=False,
    ),
    "exact": StrategyRecord(
        "the same bits on any number of ranks",
        shards_update=True,
        holds={"exact's integers": 8.0},
        moves_gradients=True,
        temporary=exact_buffers,
        any_ranks=True,
        no_float16="whose loss scale overflows its integers",
    ),
    # The lesson in lockstep/parallel/from_scratch.py
    "scratch_allreduce": StrategyRecord("one all-reduce per parameter, from scratch"),
    "scratch_reduce_scatter": StrategyRecord(
        "reduce-scatter and all-gather of all gradients at once, from scratch", temporary=flat_gradients
    ),
    "scratch_overlap": StrategyRecord(
        "all-reduce in buckets during backward, from scratch",
        holds=BUCKETS,
        moves_gradients=True,
        reduces_in_place=True,
    ),
}
ALONE = StrategyRecord("a single process")
