"""Data parallelism from scratch, step by step: `python lesson.py -w 4`, or `torchrun --nproc_per_node=4 lesson.py`.

Starts its own processes ("ranks") on the CPU, with a small model and a synthetic text, in less than a minute. Each step prints
what it shows, and checks it. The code behind it is lockstep/parallel/from_scratch.py, and docs/ddp.md explains it.
"""

import argparse
import os

from lockstep import command

SEQUENCES, LENGTH, STEPS = 36, 32, 5  # sequences per update, characters per sequence, updates of a step of the lesson
WORLD_SIZES = (2, 3, 4, 6, 12)  # they divide the sequences into equal shares of three micro-batches
TEXT = b"Start equal, average the gradients, take the same step, and the copies stay equal. "


def parse(args: list[str]) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser("lesson.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-w", "--world_size", type=int, choices=WORLD_SIZES, default=2, help="ranks to start (2)")
    return parser.parse_args(args)


if __name__ == "__main__":
    command.run("lesson", parse)

import functools
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.common.errors import UserError
from lockstep.parallel.from_scratch import ScratchAllReduce, ScratchOverlap, ScratchReduceScatter

# ---------------------------------------------------------------------------------------------------------------------
# A model, a text, and the loop


def build(seed: int) -> nn.Module:
    """A model of 1.4 million weights that predicts the next character from the current one."""
    torch.manual_seed(seed)  # before building the model: the layers draw their weights as they are made
    hidden = [layer for _ in range(5) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(nn.Embedding(128, 512), *hidden, nn.Linear(512, 128))


def batch(step: int) -> Tensor:
    """The characters [SEQUENCES, LENGTH + 1] of an update: a function of the step alone, whatever the number of ranks."""
    starts = torch.randint(len(TEXT), (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return torch.tensor(list(TEXT))[(starts + torch.arange(LENGTH + 1)) % len(TEXT)]


def loss_of(model: nn.Module, characters: Tensor) -> Tensor:
    """The mean cross-entropy of each next character."""
    return F.cross_entropy(model(characters[:, :-1]).flatten(0, 1), characters[:, 1:].flatten())


def update(model: nn.Module, module: nn.Module, step: int, share: slice, micro_batches: int = 1, always=False) -> Tensor:
    """One update from a share of the batch, in so many micro-batches. Returns the gradient, flat.

    The last backward averages the gradients over the ranks, or if `always`, each one does.
    """
    module.zero_grad()
    for number, part in enumerate(batch(step)[share].chunk(micro_batches)):
        model.require_backward_grad_sync = always or number == micro_batches - 1
        (loss_of(model, part) / micro_batches).backward()
    with torch.no_grad():
        for weight in module.parameters():
            weight -= 0.1 * weight.grad
    return flat(weight.grad for weight in module.parameters())


def flat(tensors) -> Tensor:
    """All numbers of some tensors, in one row."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def difference(module: nn.Module) -> float:
    """The largest difference between any two ranks' weights."""
    weights = flat(module.parameters())
    rows = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, weights)
    return (torch.stack(rows).max(0).values - torch.stack(rows).min(0).values).max().item()


def my_share() -> slice:
    """This rank's sequences of a batch."""
    each = SEQUENCES // dist.get_world_size()
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def say(text: str = "") -> None:
    """Print once, on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The lesson


def start_equal() -> None:
    """1. Replicas must start equal."""
    say("1. Start equal. If every rank draws its own weights, the wrapper refuses:")
    try:
        ScratchAllReduce(build(seed=dist.get_rank()))
    except ValueError as error:
        say(f"     ValueError: {error}")
    else:
        raise AssertionError("replicas that differ were accepted")
    ScratchAllReduce(build(seed=0))
    say("   With the same seed on every rank, it accepts them.")


def drift_apart() -> None:
    """2. Without communication, the copies drift apart."""
    module, found = build(seed=0), []
    for step in range(STEPS):
        update(module, module, step, my_share())
        found.append(difference(module))
    assert min(found) > 0
    say("\n2. Average nothing. Each rank learns from its own sequences, and the weights drift apart. The largest difference")
    say("   between two ranks' weights, after each update:")
    say("     " + "  ".join(f"{value:.1e}" for value in found))


def stay_equal() -> None:
    """3. With averaged gradients, they stay equal."""
    module = build(seed=0)
    model, found = ScratchAllReduce(module), []
    for step in range(STEPS):
        update(model, module, step, my_share())
        found.append(difference(module))
    assert found == [0.0] * STEPS
    say("\n3. Average the gradients after each backward. The same difference:")
    say("     " + "  ".join(f"{value:.0f}" for value in found))


def same_as_one_process() -> None:
    """4. W ranks compute what one process would."""
    alone, module = build(seed=0), build(seed=0)
    model, worst, largest = ScratchAllReduce(module), 0.0, 0.0
    for step in range(STEPS):
        whole, averaged = update(alone, alone, step, slice(None)), update(model, module, step, my_share())
        worst, largest = max(worst, (whole - averaged).abs().max().item()), max(largest, whole.abs().max().item())
    assert worst < 1e-5 * largest
    say(f"\n4. One process with the whole batch and {dist.get_world_size()} ranks with their shares find the same gradient.")
    say(f"   They differ by at most {worst:.1e} in gradients of up to {largest:.2f}: floats are added in another order.")


def accumulate() -> None:
    """5. Gradient accumulation communicates once per update."""
    gradients, counts, all_reduce = [], [], dist.all_reduce

    def counted(*args, **options):
        counts[-1] += 1
        return all_reduce(*args, **options)

    dist.all_reduce = counted
    for always in (True, False):
        module = build(seed=0)
        counts.append(0)
        gradients.append(update(ScratchAllReduce(module), module, 0, my_share(), micro_batches=3, always=always))
    dist.all_reduce, alone = all_reduce, build(seed=0)
    whole = update(alone, alone, 0, slice(None))
    assert counts[0] == 3 * counts[1] and all(torch.allclose(gradient, whole, atol=1e-6) for gradient in gradients)
    say(f"\n5. Accumulate 3 micro-batches. Averaging after each takes {counts[0]} all-reduces. Averaging only after the last")
    say(f"   takes {counts[1]}, for the same gradient; `require_backward_grad_sync` and `no_sync` are for this.")


def four_ways() -> None:
    """6. Four ways to the same mean."""
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "one all-reduce per tensor": ScratchAllReduce,
        "reduce-scatter, then all-gather": ScratchReduceScatter,
        "buckets of 1 MB, sent during backward": functools.partial(ScratchOverlap, bucket_mb=1),
        "torch's DDP, buckets of 1 MB": functools.partial(DistributedDataParallel, bucket_cap_mb=1),
    }
    say(
        "\n6. Four ways to the same mean. All but the first also give every rank the weights of rank 0 at the start. The median"
    )
    say("   update of 20 takes:")
    expected = None
    for name, wrap in ways.items():
        module = build(seed=0 if wrap is ScratchAllReduce else dist.get_rank())
        model, times = wrap(module), []
        for step in range(20):
            began = time.perf_counter()
            update(model, module, step, my_share())
            times.append(1000 * (time.perf_counter() - began))
        weights = flat(module.parameters())
        expected = weights if expected is None else expected
        apart = (weights - expected).abs().max().item()
        assert difference(module) == 0 and apart < 1e-5, name
        say(f"     {name:<40} {statistics.median(times):6.1f} ms, weights within {apart:.0e} of the first way's")
    say("   Within one machine there is little to hide. docs/ddp.md measures what overlap hides on a slow network.")


def when() -> None:
    """7. When to use it."""
    say("""
7. Use data parallelism when the model, its gradients and the optimizer's state fit on each device, and each rank has work for
   at least one micro-batch. If the state does not fit, shard it (--strategy=fsdp). If the network is slower than backward, use
   a larger batch per rank. Now read lockstep/parallel/from_scratch.py, then run
   torchrun --standalone --nproc_per_node=2 train.py --strategy=scratch_overlap --name=overlap""")


def lesson() -> None:
    """All steps, on every rank."""
    if dist.get_world_size() not in WORLD_SIZES:
        raise UserError(f"the lesson needs {', '.join(map(str, WORLD_SIZES))} ranks, not {dist.get_world_size()}")
    torch.set_num_threads(1)
    for step in (start_equal, drift_apart, stay_equal, same_as_one_process, accumulate, four_ways, when):
        step()
    dist.destroy_process_group()


def of_rank(rank: int, world_size: int, meeting: str) -> None:
    """The lesson on one of the ranks that `main` starts. They find each other through the file `meeting`."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    lesson()


def main(config: argparse.Namespace) -> None:
    """Run the lesson as a rank of torchrun, or else start the ranks."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        return lesson()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (config.world_size, f"{folder}/meeting"), config.world_size)
