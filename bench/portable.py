"""What does --numerics=portable cost? `python bench/portable.py`

Compares the CPU time of an update with native float32, on one rank and one thread, in turns. Uses the laptop preset, and
nanoGPT's 10.65 M model with 16 sequences per update. CPU time counts only our process, but other programs still slow it down by
sharing memory and caches. Writes portable_speed.json.
"""

import functools
import resource
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

NANOGPT = dict(architecture="gpt2", n_layer=6, n_head=6, n_embd=384, seq_len=256, vocab_size=128, optimizer="adamw", lr=1e-3)
FIXED = dict(preset="config/laptop.toml", dtype="float32", compile="off", threads=1, device="cpu", eval_every=0, save_every=0)
NUMERICS = ("native", "portable")


@dataclass(frozen=True)
class SpeedConfig(machine.Options):
    rounds: int = 5


def main(config: SpeedConfig) -> None:
    """The command."""
    machine.prepare_tokens(config.tokens)
    result = {}
    with machine.workspace() as folder:
        machine.make_tokens(folder / "bytes", 2_000_000, 65)
        nanogpt = NANOGPT | dict(tokens=folder / "bytes", tokens_per_update=4096)
        for name, flags in {"laptop": dict(tokens=config.tokens), "10.65 M": nanogpt}.items():
            flags |= FIXED | dict(eval_tokens=1, out_dir=folder)
            contenders = {numerics: functools.partial(update_seconds, flags | dict(numerics=numerics)) for numerics in NUMERICS}
            seconds = machine.in_turns(config.rounds, contenders)
            ratio = machine.ratio(seconds["portable"], seconds["native"])
            result[name] = {numerics: machine.spread(values) for numerics, values in seconds.items()} | {"ratio": ratio}
            print(f"{name}: portable takes {ratio:.2f} times native's CPU time")
    print(machine.write("portable_speed", result, config.out))


def update_seconds(flags: dict, updates: int = 4) -> float:
    """The CPU time of an update: what a run of some more updates takes beyond a run of one."""
    return (run_seconds(flags, 1 + updates) - run_seconds(flags, 1)) / updates


def run_seconds(flags: dict, steps: int) -> float:
    """The CPU time of a run, from start to end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    machine.run(**flags, steps=steps, resume="off", name=f"{Path(flags['tokens']).name}-{flags['numerics']}-{steps}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    machine.command_line(__doc__, SpeedConfig, main)
