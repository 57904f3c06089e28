"""What --numerics=portable costs, whether it learns as well, and why each of its methods is needed.

python bench/portable.py speed|loss|mutations [--flag=value ...]
"""

import hashlib
import itertools
import json
import os
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import forks
from lockstep.hardware import host

SSE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}  # what every x86 has
NANOGPT = dict(architecture="gpt2", n_layer=6, n_head=6, n_embd=384, seq_len=256, vocab_size=128, optimizer="adamw", lr=1e-3)
NUMERICS = ("native", "portable")
PRESET, STEPS = "config/laptop.toml", 110  # for `loss`


@dataclass(frozen=True)
class SpeedConfig(machine.Options):
    rounds: int = 5


def speed(config: SpeedConfig) -> None:
    """Compare the CPU time of an update with native float32, on one rank and one thread, in turns.

    Uses the laptop preset, and nanoGPT's 10.65 M model with 16 sequences per update. CPU time counts only this process, but
    other programs still slow it down by sharing memory and caches. Writes portable_speed.json.
    """
    machine.prepare_tokens(config.tokens)
    host.prepare_torch()
    result = {}
    with machine.workspace() as folder:
        machine.make_tokens(folder / "bytes", 2_000_000, 65)
        nanogpt = NANOGPT | dict(tokens=folder / "bytes", tokens_per_update=4096)
        for name, flags in {"laptop": dict(tokens=config.tokens), "10.65 M": nanogpt}.items():
            contenders = {numerics: updater(flags, numerics, folder / name, config.rounds) for numerics in NUMERICS}
            seconds = machine.in_turns(config.rounds + 1, contenders)
            native, portable = (seconds[numerics][1:] for numerics in NUMERICS)  # the first allocates memory
            result[name] = dict(native=machine.spread(native), portable=machine.spread(portable))
            result[name] |= dict(ratio=machine.ratio(portable, native), ratio_of_least=min(portable) / min(native))
            print(f"{name}: portable takes {result[name]['ratio']:.2f} times native's CPU time")
    print(machine.write("portable_speed", result, config.out))


def updater(flags: dict, numerics: str, folder: Path, rounds: int):
    """A function that makes a run's next update and returns its CPU time in seconds."""
    import train
    from lockstep import settings

    fixed = dict(numerics=numerics, dtype="float32", compile="off", threads=1, device="cpu", out_dir=folder, name=numerics)
    arguments = machine.arguments("", "config/laptop.toml", **flags, **fixed, eval_every=0, save_every=0)
    run, prefetcher = machine.ready(settings.load(arguments[1:], ""), rounds + 1)

    def update() -> float:
        began = time.process_time()
        train.update(run, prefetcher)
        return time.process_time() - began

    return update


def loss(config: machine.Options) -> None:
    """Does a run learn as well? Trains the laptop preset with both numerics and three seeds. Writes portable_loss.json."""
    machine.prepare_tokens(config.tokens)
    with machine.workspace() as folder, ThreadPoolExecutor(host.cores()) as pool:

        def losses(numerics: str, seed: int) -> list:
            flags = dict(tokens=config.tokens, steps=STEPS, numerics=numerics, seed=seed, dtype="float32", compile="off")
            flags |= dict(out_dir=folder, name=f"{numerics}-{seed}", eval_every=STEPS // 2, save_every=0, threads=1)
            machine.run(preset=PRESET, **flags)
            records = [record for record in machine.metrics(folder / flags["name"]) if "val_loss" in record]
            return [f"{numerics}, seed {seed}", *(record["val_loss"] for record in records)]

        runs = list(itertools.product(reversed(NUMERICS), (1, 2, 3)))  # the slower ones first
        rows = sorted(pool.map(lambda run: losses(*run), runs))
    print(machine.table(["validation loss", *(f"step {step}" for step in (STEPS // 2, STEPS))], rows))
    print(machine.write("portable_loss", dict(preset=PRESET, steps=STEPS, losses=rows), config.out))


@dataclass(frozen=True)
class MutationsConfig(machine.Out):
    other: str = ""
    """Other Pythons, separated by commas: with another torch, or under qemu, for another processor."""


def mutations(config: MutationsConfig) -> int:
    """Is each method needed? Replaces one at a time with torch's own operation, and shows where the bits change.

    Trains three small models for three updates: with all instructions of this processor, AVX2, SSE, two threads, and
    --micro_batch_size=2. With --other, also trains them with other Pythons. Returns 1 if the bits change without any
    replacement. Writes portable_mutations.json.
    """
    places = {"here": {}, "AVX2": machine.AVX2, "SSE": SSE, "2 threads": {"THREADS": "2"}, "batch of 2": {"TOGETHER": "2"}}
    others = {f"other {number}": command for number, command in enumerate(filter(None, config.other.split(",")), 1)}
    with ThreadPoolExecutor(host.cores()) as pool:
        own = [pool.submit(digests_in, sys.executable, variables) for variables in places.values()]
        rest = [pool.submit(digests_in, command, {}) for command in others.values()]
        found = dict(zip([*places, *others], [future.result() for future in [*own, *rest]], strict=True))
    where = {place: digests.pop("where") for place, digests in found.items()}
    differs = {name: [place for place in found if found[place][name] != found["here"][name]] for name in found["here"]}
    print(
        machine.table(["replaced by torch's own", "the bits change at"], [[n, ", ".join(d) or "-"] for n, d in differs.items()])
    )
    print(machine.write("portable_mutations", dict(where=where, differs=differs), config.out))
    return int(bool(differs["none"]))


def digests_in(python: str, variables: dict[str, str]) -> dict[str, str]:
    """The output of `digests` in a process of this Python with these environment variables."""
    command = [*shlex.split(python), __file__, "digests"]
    env = machine.environment(OMP_WAIT_POLICY="PASSIVE") | variables
    return json.loads(machine.output(command, env=env).splitlines()[-1])


def digests(_) -> None:
    """Print the digest of each mutation as JSON, and where it was computed."""
    import same
    from lockstep.numerics import portable  # noqa: F401  imported once, for all forks

    with machine.workspace() as folder:
        found = {name: forks.in_forks(digest, name, folder=folder)[0] for name in ["none", *MUTATIONS]}
    print(json.dumps(found | {"where": same.where()}))


def digest(mutation: str) -> str:
    """The sha256 of three small models after three updates, with one method replaced."""
    import torch

    from lockstep.numerics import optim, portable
    from lockstep.settings import ModelConfig, OptimConfig, resolve_model
    from model import GPT, initial_weights

    torch.set_num_threads(int(os.environ.get("THREADS", 1)))
    together = int(os.environ.get("TOGETHER", 1)) if mutation == "one sequence at a time" else 1
    if mutation != "none":
        MUTATIONS[mutation](portable, torch)
    sha = hashlib.sha256()
    for architecture, gelu, optimizer in (("gpt2", "erf", "adamw"), ("gpt2", "tanh", "adamw"), ("qwen3", "tanh", "muon")):
        shape = dict(n_layer=2, n_head=2, n_embd=96, seq_len=160, dropout=0.1)
        settings = resolve_model(ModelConfig(architecture, gelu=gelu, **shape), 384)
        model = GPT(settings, numerics="portable")
        model.load_state_dict(dict(initial_weights(model, 1)))
        optimizers = optim.build(dict(model.named_parameters()), OptimConfig(optimizer, muon_dtype="float32"), portable)
        tokens = (torch.arange(3 * 4 * 161).view(3, 4, 161) ** 2 // 7) % 383
        for step, batch in enumerate(tokens):
            optimizers.set_learning_rate(optim.learning_rate(step, 3, OptimConfig(warmup_steps=0, min_lr=0.0), portable.cosine))
            torch.manual_seed(step)
            sums = [torch.zeros(p.shape, dtype=torch.int64) for p in model.parameters()]
            for part in batch.split(together):  # added up as integers: see lockstep/parallel/exact.py
                model(part[:, :-1], part[:, 1:]).backward()
                for p, total in zip(model.parameters(), sums, strict=True):
                    total += (p.grad * 2.0**50).to(torch.int64)
                    p.grad = None
            for p, total in zip(model.parameters(), sums, strict=True):
                p.grad = (total.double() / 2.0**50).float()
            norm = portable.norm_of(portable.norm_parts([p.grad for p in model.parameters()])).item()
            torch._foreach_mul_([p.grad for p in model.parameters()], 1 / norm)
            optimizers.step()
            sha.update(repr(norm).encode())
        for p in model.parameters():
            sha.update(p.detach().numpy().tobytes())
    return sha.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# Replacements. Each takes the module `portable`, which it modifies, and torch.


def replace(**functions):
    """A replacement for functions of `portable`. The given functions build the new ones from torch."""

    def change(portable, torch):
        for name, make in functions.items():
            setattr(portable, name, make(torch))

    return change


def lookups(portable, torch) -> None:
    """The gradient of an embedding in float32."""
    grid = portable.to_grid
    portable.to_grid = lambda x, bits, dim: x if isinstance(dim, tuple) else grid(x, bits, dim)


def softmax(portable, torch) -> None:
    """The denominator of softmax in float64, without a grid."""
    portable.Softmax.forward = staticmethod(plain_softmax)


def plain_softmax(ctx, x):
    """`portable.Softmax.forward` with torch's softmax."""
    import torch

    x.copy_(torch.softmax(x, -1))
    ctx.mark_dirty(x)
    ctx.save_for_backward(x)
    return x


def fused_adamw(portable, torch) -> None:
    """AdamW with torch's fused kernel."""
    from lockstep.numerics import native

    portable.adamw = native.adamw


MUTATIONS = {
    "products: float32": replace(factor=lambda torch: lambda x, dim: x),
    "products: float64, no grid": replace(factor=lambda torch: lambda x, dim: x.double()),
    "sums: float32": replace(total=lambda torch: lambda x, dim: x.sum(dim, keepdim=True).double()),
    "sums: float64, no grid": replace(total=lambda torch: lambda x, dim: x.double().sum(dim, keepdim=True)),
    "sums: embedding's gradient": lookups,
    "sums: softmax": softmax,
    "sums: the global norm": replace(
        norm_parts=lambda torch: lambda gradients: [norm.square()[None] for norm in torch._foreach_norm(gradients)]
    ),
    "exp": replace(exp=lambda torch: lambda x: x.float().exp().double()),
    "exp: float64": replace(exp=lambda torch: torch.exp),
    "log": replace(log=lambda torch: lambda x: x.float().log().double()),
    "sine, cosine": replace(
        sin=lambda torch: lambda x: x.float().sin().double(), cos=lambda torch: lambda x: x.float().cos().double()
    ),
    "roots: sqrt": replace(inverse_root=lambda torch: lambda x: 1 / x.clamp(min=1e-30).float().sqrt().double()),
    "roots: rsqrt": replace(inverse_root=lambda torch: lambda x: x.clamp(min=1e-30).float().rsqrt().double()),
    "AdamW": fused_adamw,
    "Muon: lerp": replace(lerp_=lambda torch: torch._foreach_lerp_),
    "Muon: add with alpha": replace(
        add_=lambda torch: lambda values, terms, alpha: torch._foreach_add_(values, terms, alpha=alpha)
    ),
    "Muon: baddbmm": replace(baddbmm=lambda torch: torch.baddbmm),
    "initial weights": replace(normal_=lambda torch: torch.Tensor.normal_),
    "dropout": replace(dropout=lambda torch: torch.nn.functional.dropout),
    "one sequence at a time": replace(),  # `digest` handles it
}

if __name__ == "__main__":
    machine.choose(
        __doc__,
        speed=(SpeedConfig, speed),
        loss=(machine.Options, loss),
        mutations=(MutationsConfig, mutations),
        digests=(machine.Out, digests),
    )
