"""What does it cost to keep the ranks in step, and how much of that does overlap hide?

python bench/grad_sync.py cost|overlap [--flag=value ...]
"""

import contextlib
import ctypes
import functools
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import forks
import machine  # puts the project's folder on the path
from lockstep import settings
from lockstep.common.errors import UserError
from lockstep.reports import curves
from lockstep.strategies import STRATEGIES

FLAGS = dict(architecture="qwen3", n_layer=4, n_head=4, n_embd=256, seq_len=128, vocab_size=4096, micro_batch_size=4)
FLAGS |= dict(lr=1e-4, device="cpu", dtype="float32")


@dataclass(frozen=True)
class CostConfig(machine.Options):
    strategies: str = ",".join(STRATEGIES)
    ranks: str = "1,2,4"
    rounds: int = 3
    """How often each strategy is measured, in turns."""
    steps: int = 10
    """Updates of a run. The first two do not count."""
    compile: Literal["off", "on"] = "off"
    name: str = "grad_sync"


def cost(config: CostConfig) -> None:
    """How long does an update take? python bench/grad_sync.py cost

    Trains a Qwen3 of 4.3 M parameters by train.py with each strategy on 1, 2 and 4 local processes of one thread, in turns. The
    global batch is the same: 8 micro-batches of 4 x 128 tokens.
    """
    machine.prepare_tokens(config.tokens)
    pairs = [(strategy, int(ranks)) for ranks in config.ranks.split(",") for strategy in config.strategies.split(",")]
    measure = {f"{strategy} on {ranks}": functools.partial(update_ms, config, strategy, ranks) for strategy, ranks in pairs}
    each = machine.in_turns(config.rounds, measure)
    print(path := machine.write(config.name, {"update_ms_each": each}, config.out))
    if config.strategies == "ddp":
        for theme in ("light", "dark"):
            draw_scaling(each, path.with_name(f"{config.name}_{theme}.svg"), theme)


def update_ms(config: CostConfig, strategy: str, ranks: int) -> float:
    """The median time of an update in a run of train.py."""
    flags = FLAGS | dict(tokens=config.tokens, tokens_per_update=4096, strategy=strategy, compile=config.compile, threads=1)
    return statistics.median(machine.step_ms("", ranks, steps=config.steps, schedule="constant", **flags)[2:])


# ---------------------------------------------------------------------------------------------------------------------
# What overlap hides

BURSTS = {"2gbit": "1mb", "500mbit": "256kb"}  # what may pass at once: 4 ms of the rate
ALL = "all-reduce 0,reduce-scatter 0,overlap 0.01,overlap 1,overlap 2,overlap 4,overlap 25,one bucket 25"
ALL += ",ddp 1,ddp 2,ddp 4,ddp 25"
FEW = "all-reduce 0,one bucket 25,overlap 4,ddp 4"
SIZES = {"10 KB": 0.01, "1 MB": 1, "2 MB": 2, "4 MB": 4, "25 MB": 25}  # of the buckets in the picture
# The link's rate, the ranks, what a rank computes, and the ways to send.
SITUATIONS = [("2gbit", 2, "model", ALL), ("500mbit", 2, "model", ALL), ("2gbit", 2, "sleep", FEW), ("2gbit", 1, "model", FEW)]
SITUATIONS += [("2gbit", 4, "model", FEW), ("500mbit", 4, "model", FEW), ("loopback", 2, "model", FEW)]


@dataclass(frozen=True)
class OverlapConfig(machine.Out):
    rounds: int = 5
    """How often each way is measured, in turns with the same computation without communication."""
    only: str = ""
    """Measure only situations that contain these words, such as "2gbit 2 model", and write nothing."""


def overlap(config: OverlapConfig) -> None:
    """How much time does communication add, and how much does overlap hide? python bench/grad_sync.py overlap

    Ranks of one thread each compute the gradients of a model (23.5 MB) and average them, over a loopback that `tc` limits to
    the rate of a real link. The time that communication adds (exposed) is the time of a forward and backward pass with the
    averaging, less the time without, measured right before. Both end when the slowest rank is done. `sleep` stands for a GPU:
    each layer sleeps instead of computing, which leaves the cores to the communication. On one rank the true value is 0, so
    that row shows the noise. Needs Linux and the right to make a network namespace.
    """
    if config.rounds < 2:
        raise UserError("--rounds must be at least 2: DDP reports its buckets from its third backward on")
    if machine.output_of("unshare", "--net", "echo", "permitted") != "permitted":
        print("skipped: `unshare --net` is not permitted here (try it as root)")
        return
    forks.prepare_to_fork()
    rows = []
    with machine.workspace() as folder:
        for situation in SITUATIONS:
            label = " ".join(map(str, situation[:3]))
            if config.only in label:
                [found] = forks.in_forks(on_link, config, *situation, str(folder / "ranks"), folder=folder)
                rows += found
                print(label, machine.table([*found[0]], [[*row.values()] for row in found]), "", sep="\n", flush=True)
    if not config.only:
        print(path := machine.write("overlap", {"rows": rows}, config.out))
        for theme in ("light", "dark"):
            draw(rows, path.with_name(f"overlap_{theme}.svg"), theme)


def on_link(config: OverlapConfig, rate: str, ranks: int, compute: str, ways: str, folder: str) -> list[dict]:
    """The rows of one situation, measured in a network namespace whose loopback has this rate."""
    ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET; os.unshare is new in Python 3.12
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if rate in BURSTS:
        limit = f"tc qdisc add dev lo root tbf rate {rate} burst {BURSTS[rate]} latency 400ms"
        subprocess.run(limit.split(), check=True)
    Path(folder).mkdir(exist_ok=True)
    found = forks.in_forks(exposed, config, compute, ways.split(","), folder=Path(folder), ranks=ranks)[0]
    return [{"rate": rate, "ranks": ranks, "compute": compute} | row for row in found]


def exposed(config: OverlapConfig, compute: str, ways: list[str]) -> list[dict]:
    """The time that communication adds to forward and backward, for each of `ways`, measured on every rank."""
    import torch
    import torch.distributed as dist

    from lockstep.hardware.host import read_ranks
    from model import GPT, initial_weights

    rank, world_size, _, _ = read_ranks()
    torch.set_num_threads(1)
    meeting = None if world_size > 1 else "tcp://127.0.0.1:29500"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    flags = {name: FLAGS[name] for name in ("architecture", "n_head", "n_embd", "seq_len")}
    shape = settings.resolve_model(settings.replace(settings.ModelConfig(), **flags, n_layer=6), FLAGS["vocab_size"])

    def build() -> torch.nn.Module:
        module = GPT(shape)
        for name, value in initial_weights(module, 0):
            module.get_parameter(name).data.copy_(value)
        return module if compute == "model" else sleeping(module)

    alone, wrapped = build(), {way: wrap(build(), way) for way in ways}
    size = (16 // max(2, world_size), shape.seq_len + 1)
    tokens = torch.randint(0, shape.vocab_size, size, generator=torch.Generator().manual_seed(rank))

    def step_ms(model) -> float:
        """The time until the slowest rank has done a forward and a backward pass."""
        model.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        dist.barrier()
        return 1000 * (time.perf_counter() - began)

    for model in wrapped.values():  # DDP divides its buckets anew after the first backward
        step_ms(model)
    alones, times, sent = ({way: [] for way in ways} for _ in range(3))
    for _ in range(config.rounds):
        for way, model in wrapped.items():
            alones[way].append(step_ms(alone))
            before = loopback_bytes()
            times[way].append(step_ms(model))
            sent[way].append((loopback_bytes() - before) / world_size / 1e6)
    rows = []
    for way, model in wrapped.items():
        added = [with_it - without for with_it, without in zip(times[way], alones[way], strict=True)]
        row = {"way": way.rpartition(" ")[0], "bucket_mb": float(way.rpartition(" ")[2])}
        row |= {"exposed_ms": statistics.median(added), "min": min(added), "max": max(added)}
        row |= {"alone_ms": statistics.median(alones[way])}
        row |= sends_of(model, way) if world_size > 1 else {"sends": 0, "ready_at_first": 0}
        rows.append(row | {"sent_mb": statistics.median(sent[way]), "each_ms": [round(value, 1) for value in added]})
    return rows


def wrap(module, way: str):
    """`module` with its gradients averaged in one of the ways of ALL."""
    from torch.nn.parallel import DistributedDataParallel

    from lockstep.parallel import from_scratch

    name, _, size = way.rpartition(" ")
    if name == "ddp":  # its first bucket has 1 MB only if it chooses the others' size, 25 MB, itself
        return DistributedDataParallel(
            module, gradient_as_bucket_view=True, bucket_cap_mb=float(size) if size != "25" else None
        )
    if name == "overlap":
        return from_scratch.ScratchOverlap(module, bucket_mb=float(size))
    if name == "one bucket":
        return from_scratch.ScratchOverlap(module, bucket_mb=float(size), first_bucket_mb=float(size))
    return {"all-reduce": from_scratch.ScratchAllReduce, "reduce-scatter": from_scratch.ScratchReduceScatter}[name](module)


def loopback_bytes() -> int:
    """Bytes sent so far over Linux's loopback device, which gloo's ranks on one machine use."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def sends_of(model, way: str) -> dict[str, int]:
    """How often a wrapped model sends in a backward pass, and how many gradients are ready when it begins to."""
    gradients = len(list(model.module.parameters()))
    if way.startswith("ddp"):  # it lists the gradients of each bucket in the order in which they become ready
        first, *others = model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"].split(", ")
        return {"sends": 1 + len(others), "ready_at_first": len(first.split())}
    if hasattr(model, "ready_at_send"):
        return {"sends": len(model.ready_at_send), "ready_at_first": model.ready_at_send[0]}
    return {"sends": gradients if way.startswith("all-reduce") else 2, "ready_at_first": gradients}


def sleeping(module):
    """A model with the parameters of `module` whose blocks sleep instead of computing."""
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *parameters):
            ctx.save_for_backward(*parameters)
            time.sleep(0.03)
            return x + 0

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.06)
            return grad, *map(torch.zeros_like, ctx.saved_tensors)

    def forward(tokens, targets):
        x = 0 * module.embed.weight.sum()
        for block in module.blocks:
            x = Sleep.apply(x, *block.parameters())
        return x + 0 * module.norm.weight.sum()

    module.forward = forward
    return module


@contextlib.contextmanager
def chart(out: Path, theme: str, xlabel: str, ylabel: str):
    """An axis of a picture in a theme of GitHub's, which is published at the end."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink, background = {"light": ("#1f2328", "#ffffff"), "dark": ("#e6edf3", "#0d1117")}[theme]
    keys = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with rc_context({"svg.fonttype": "none", "font.size": 11} | dict.fromkeys(keys, ink)):
        figure = Figure(figsize=(8, 4.2), layout="constrained", facecolor=background)
        axis = figure.subplots()
        axis.set(facecolor=background, xlabel=xlabel, ylabel=ylabel)
        yield axis
        axis.set_ylim(bottom=0)
        axis.grid(color=ink, alpha=0.15)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
        curves.save(figure, out)


def draw(rows: list[dict], out: Path, theme: Literal["light", "dark"]) -> None:
    """Draw the exposed time on two ranks against the size of a bucket, with its range, at two rates."""
    styles = {"2gbit": ("2 Gbit/s", "#0072b2"), "500mbit": ("500 Mbit/s", "#d55e00")}
    rows = [row for row in rows if (row["ranks"], row["compute"]) == (2, "model") and row["rate"] in styles]
    with chart(out, theme, "bucket size", "ms that communication adds to an update") as axis:
        for rate, (label, color) in styles.items():
            for way, name, line in (("overlap", "ScratchOverlap", "o-"), ("ddp", "torch's DDP", "s--")):
                found = {row["bucket_mb"]: row for row in rows if (row["rate"], row["way"]) == (rate, way)}
                whole = [row for row in rows if way == "overlap" and (row["rate"], row["way"]) == (rate, "one bucket")]
                points = [(x, found[size]) for x, size in enumerate(SIZES.values()) if size in found]
                points += [(len(SIZES), row) for row in whole]
                y = [row["exposed_ms"] for _, row in points]
                below, above = ([abs(row[end] - row["exposed_ms"]) for _, row in points] for end in ("min", "max"))
                style = dict(color=color, capsize=3, linewidth=1.7, markersize=5, label=f"{name}, {label}")
                axis.errorbar([x for x, _ in points], y, yerr=[below, above], fmt=line, **style)
        axis.set_xticks(range(len(SIZES) + 1), [*SIZES, "all in one"])


def draw_scaling(each: dict[str, list[float]], out: Path, theme: Literal["light", "dark"]) -> None:
    """Draw how many times as fast several processes are as one, beside the ideal and what courses promise for GPUs."""
    counts = {int(name.rpartition(" ")[2]): name for name in each}
    ours = [machine.ratio(each[counts[1]], each[name]) for name in counts.values()]
    with chart(out, theme, "processes", "times as fast as one process") as axis:
        axis.plot([1, 8], [1, 8], ":", color="0.5", label="ideal")
        axis.plot([1, 2, 4, 8], [1, 1.9, 3.8, 7.5], "s--", color="#0072b2", label="typical for GPUs, as courses give it")
        axis.plot([*counts], ours, "o-", color="#d55e00", label=f"this machine, {machine.describe()['machine']['cores']} cores")
        axis.set_xticks([1, 2, 4, 8])


if __name__ == "__main__":
    machine.choose(__doc__, cost=(CostConfig, cost), overlap=(OverlapConfig, overlap))
