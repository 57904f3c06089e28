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

import statistics
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.common.errors import UserError
from lockstep.parallel.from_scratch import ScratchAllReduce, ScratchOverlap, ScratchReduceScatter

LETTERS = torch.tensor(list(TEXT))


def build(seed: int) -> nn.Module:
    """A model of 1.4 million weights that predicts the next character from the current one."""
    torch.manual_seed(seed)  # before building the model: the layers draw their weights as they are made
    hidden = [layer for _ in range(5) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(nn.Embedding(128, 512), *hidden, nn.Linear(512, 128))


def backward(model: nn.Module, step: int, share: slice, micro_batches: int = 1, always: bool = False) -> Tensor:
    """Compute the gradient of a share of an update's batch, in micro-batches. Returns the gradient, flat.

    The last backward averages the gradients over the ranks, or if `always`, each one does. The batch is a function of the step
    alone, whatever the number of ranks.
    """
    model.zero_grad()
    starts = torch.randint(len(TEXT), (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    characters = LETTERS[(starts + torch.arange(LENGTH + 1)) % len(TEXT)]
    for number, part in enumerate(characters[share].chunk(micro_batches)):
        model.require_backward_grad_sync = always or number == micro_batches - 1
        loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        (loss / micro_batches).backward()
    return flat(weight.grad for weight in model.parameters())


def descend(model: nn.Module) -> None:
    """One step of gradient descent."""
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad


def flat(tensors) -> Tensor:
    """All numbers of some tensors, in one row."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def spread(model: nn.Module) -> float:
    """The largest difference between rank 0's weights and another rank's."""
    copies = [flat(model.parameters()) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat(model.parameters()))
    return (torch.stack(copies) - copies[0]).abs().max().item()


def say(text: str) -> None:
    """Print once, on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def lesson() -> None:
    """All steps in order, on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size not in WORLD_SIZES:
        raise UserError(f"the lesson needs {', '.join(map(str, WORLD_SIZES))} ranks, not {world_size}")
    torch.set_num_threads(1)
    each = SEQUENCES // world_size
    mine, whole = slice(rank * each, (rank + 1) * each), slice(None)

    say("1. Start equal. If every rank draws its own weights, the wrapper refuses:")
    try:
        ScratchAllReduce(build(seed=rank))
    except ValueError as error:
        say(f"     ValueError: {error}")
    else:
        raise AssertionError("replicas that differ were accepted")
    model = ScratchAllReduce(build(seed=0))
    say("   With the same seed on every rank, it accepts them.")

    say("\n2. Average nothing. Each rank learns from its own sequences, and the weights drift apart. The largest difference")
    say("   from rank 0's weights, after each update:")
    loner, found = build(seed=0), []
    for step in range(STEPS):
        backward(loner, step, mine)
        descend(loner)
        found.append(spread(loner))
    assert min(found) > 0
    say("     " + "  ".join(f"{value:.1e}" for value in found))

    alone, found, errors = build(seed=0), [], []
    for step in range(STEPS):
        errors.append(backward(alone, step, whole) - backward(model, step, mine))
        descend(alone), descend(model)
        found.append(spread(model))
    assert found == [0.0] * STEPS
    say("\n3. Average the gradients after each backward. The same difference:")
    say("     " + "  ".join(f"{value:.0f}" for value in found))
    worst, largest = torch.stack(errors).abs().max().item(), backward(alone, 0, whole).abs().max().item()
    assert worst < 1e-5 * largest
    say(f"\n4. One process with the whole batch and {world_size} ranks with their shares find the same gradient.")
    say(f"   They differ by at most {worst:.1e} in gradients of up to {largest:.2f}: floats are added in another order.")

    gradients, counts = [backward(alone, 0, whole)], []
    for always in (True, False):
        model = ScratchAllReduce(build(seed=0))
        model.module.load_state_dict(alone.state_dict())
        with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as all_reduce:
            gradients.append(backward(model, 0, mine, micro_batches=3, always=always))
        counts.append(all_reduce.call_count)
    assert counts[0] == 3 * counts[1] and all(torch.allclose(gradient, gradients[0], atol=1e-6) for gradient in gradients)
    say(f"\n5. Accumulate 3 micro-batches. Averaging after each takes {counts[0]} all-reduces. Averaging only after the last")
    say(f"   takes {counts[1]}, for the same gradient; `require_backward_grad_sync` and `no_sync` are for this.")

    say("\n6. Four ways to the same mean. All but the first also give every rank rank 0's weights at the start. The median")
    say("   update of 20 takes:")
    ways = {
        "one all-reduce per tensor": ScratchAllReduce(build(seed=0)),
        "reduce-scatter, then all-gather": ScratchReduceScatter(build(seed=rank)),
        "buckets of 1 MB, sent during backward": ScratchOverlap(build(seed=rank), bucket_mb=1),
        "torch's DDP, buckets of 1 MB": DistributedDataParallel(build(seed=rank), bucket_cap_mb=1),
    }
    results = []
    for name, model in ways.items():
        times = []
        for step in range(20):
            began = time.perf_counter()
            backward(model, step, mine)
            times.append(1000 * (time.perf_counter() - began))
            descend(model)
        results.append(flat(model.parameters()))
        apart = (results[-1] - results[0]).abs().max().item()
        assert spread(model) == 0 and apart < 1e-5, name
        say(f"     {name:<40} {statistics.median(times):6.1f} ms, weights within {apart:.0e} of the first way's")
    say("   Within one machine there is little to hide. docs/ddp.md measures what overlap hides on a slow network.")

    norms, losses = [], []
    for model in (ScratchAllReduce(build(seed=0)), Forgetful(build(seed=0))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(20):
            gradient = backward(model, step, mine)
            norms.append(gradient.norm().item())
            optimizer.step()
        losses.append(F.cross_entropy(model.module(LETTERS[:-1]), LETTERS[1:]).item())
    times = norms[20] / norms[0]
    assert abs(times - world_size) < 1e-3 and abs(losses[1] / losses[0] - 1) < 0.05
    say("\n7. Forget to divide by the number of ranks. AdamW divides each gradient by its own size, which hides the mistake:")
    say(f"   after 20 updates, the loss is {losses[1]:.4f} instead of {losses[0]:.4f}. The gradient norm tells: it is")
    say(f"   {times:.2f} times as large.")

    say("""
8. Use data parallelism when the model, its gradients and the optimizer's state fit on each device, and each rank has work for
   at least one micro-batch. If the state does not fit, shard it (--strategy=fsdp). If the network is slower than backward, use
   a larger batch per rank. Now read lockstep/parallel/from_scratch.py, then run
   torchrun --standalone --nproc_per_node=2 train.py --strategy=scratch_overlap --name=overlap""")
    dist.destroy_process_group()


class Forgetful(ScratchAllReduce):
    """Adds up the gradients without dividing by the number of ranks."""

    def average_gradients(self) -> None:
        for parameter in self.trainable:
            dist.all_reduce(parameter.grad)


def main(config: argparse.Namespace) -> None:
    """Run the lesson as one of torchrun's ranks, or else start torchrun."""
    if "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={config.world_size}"]
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, with a warning
        os.execv(sys.executable, [sys.executable, *torchrun, __file__])
    dist.init_process_group("gloo")
    lesson()
