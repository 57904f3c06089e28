"""Find the model, batch and number of tokens that fit your text and time, and predict the loss.

`python extras/ladder.py [config/NAME.toml] --tokens=tokens/mine --minutes=60 [--flag=value of train.py ...]`

Spends a fifth of the time on small models, fits a scaling law, and prints the best run's command and predicted loss. The small
models ("rungs") are ordinary runs in runs/ladder-NAME-KEY. Run the same command again to pick up where it left off.

`--depth=6` instead of a budget trains nothing, and prints the command for a model of this depth.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from lockstep import command

if __name__ == "__main__":
    command.run("extras.ladder", list)

import hashlib
import json
import math
import shlex
import signal
import statistics
import subprocess
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from extras import dial, law
from lockstep import settings
from lockstep.common import cli, files
from lockstep.common.errors import EX_TEMPFAIL, UserError, refuse, say
from lockstep.dataset.mixture import open_mixture
from lockstep.hardware.footprint import flops_per_token
from lockstep.reports.log import duration, read_records
from lockstep.settings import Config, ModelConfig, Ranks

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # depths allowed for a rung
HORIZONS = (1 / 4, 1 / 2, 1)  # lengths of the runs at each depth, relative to the longest
FEWEST_DEPTHS, MOST_DEPTHS = 2, 3  # depths in a ladder
FEWEST_TOKENS = 1 / 3  # fewest tokens for the largest rung, as a fraction of the dial's
PROBE_STEPS = 8


@dataclass(frozen=True)
class LadderConfig:
    depth: Annotated[int, Meta(ge=0, le=256)] = 0
    """Print train.py's command for a model of this depth (0: find the best depth)."""
    minutes: Annotated[float, Meta(ge=0, le=10**7)] = 0.0
    """Total training time for the ladder and the run that it recommends."""
    flops: Annotated[float, Meta(ge=0, le=1e30)] = 0.0
    """The budget in floating-point operations instead of minutes. The ladder then measures no time."""
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """The fraction of the budget to spend on the ladder itself."""
    ranks: Ranks = 1
    """Processes per run on this machine, started by torchrun; usually the number of GPUs."""


@dataclass(frozen=True)
class LadderCommand:
    config: Config = field(default_factory=Config)
    ladder: LadderConfig = field(default_factory=LadderConfig)


@dataclass(frozen=True)
class Ladder:
    """The parsed command and the values derived from it."""

    config: Config
    options: LadderConfig
    words: list[str]  # the preset and the flags of train.py on the command line
    given: set[str]  # the names of those flags
    directory: Path
    vocab_size: int
    unique_tokens: float  # tokens that a run can see before any of its datasets repeats
    batch: int  # --tokens_per_update if given, else 0

    def model(self, depth: int) -> ModelConfig:
        """Return the resolved model for `depth`."""
        return dial.model_of(self.config, depth, self.vocab_size, self.given)

    def length(self, tokens: float) -> dict:
        """Return the steps and batch size for a run of `tokens`."""
        return dial.length_of(tokens, self.config.model.seq_len, self.config.optim.optimizer, tokens_per_update=self.batch)

    def flags(self, depth: int, length: dict) -> dict:
        """Return the flags of train.py for a model of `depth` and a run of this length, except those of the user."""
        return dial.settings_of(self.config, depth, self.given, self.model(depth), length)

    def is_long_enough(self, tokens: float) -> bool:
        """Return whether `tokens` are enough for FEWEST_STEPS updates at the best batch size."""
        right = dial.batch_of(tokens, self.config.optim.optimizer)
        return tokens >= dial.FEWEST_STEPS * (self.batch or max(self.config.model.seq_len, right))


def main(args: list[str]) -> None:
    """Train the rungs, fit the law and print the best run. Raises UserError."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, lambda *_: sys.exit(EX_TEMPFAIL))  # `run` then waits for the rung to save
    command = parse(args)
    if command.ladder.depth:
        say(of_depth(command, args))
        return
    ladder = begin(args)
    rungs = choose(ladder, ladder.options.flops or measure(ladder))
    say(f"ladder  {len(rungs)} runs, at depths {str(sorted({depth for depth, _ in rungs}))[1:-1]}, in {ladder.directory}")
    report(ladder, [climb(ladder, *rung) for rung in rungs])


def parse(args: list[str]) -> LadderCommand:
    """Parse the command line. Raises UserError."""
    preset, flags = settings.divide(args)
    command = cli.parse(LadderCommand, flags, __doc__, LadderCommand(settings.read_preset(preset)), "[config/NAME.toml]")
    settings.check(command.config)
    options = command.ladder
    if (options.depth > 0) + (options.minutes > 0) + (options.flops > 0) != 1:
        raise UserError("set either the budget, --minutes=60 or --flops=1e17 (floating-point operations), or --depth=6")
    return command


def of_depth(command: LadderCommand, args: list[str]) -> str:
    """Return the command that trains a model of --depth. Raises UserError."""
    preset, flags = settings.divide(args)
    given = settings.given(flags)
    values = {name: value for name, value in cli.flat_values(command.config).items() if name in given}
    values |= dial.turn(command.config, command.ladder.depth, given)
    return train_command(command.ladder, [*args[: len(args) - len(flags)], *as_flags(values)])


def begin(args: list[str]) -> Ladder:
    """Parse the command line. Different tokens, settings or presets get separate ladders. Raises UserError."""
    preset, flags = settings.divide(args)
    command = parse(args)
    config, options, names = command.config, command.ladder, settings.given(flags)
    found = ("steps", "decay_steps", "phase", "n_layer", "init_from", "resume", "max_minutes")
    refuse(f"--{name}: a ladder trains new models and chooses their size; leave it out" for name in found if name in names)
    values = {name: value for name, value in cli.flat_values(config).items() if name in names - {"name", "out_dir"}}
    words = [*args[: len(args) - len(flags)], *as_flags(values)]
    mixture = open_mixture(config.data, config.model.vocab_size)
    key = hashlib.sha256(json.dumps([mixture.identity, files.sha256(preset), *words]).encode()).hexdigest()[:8]
    directory = Path(config.run.out_dir, f"ladder-{config.run.name or mixture.datasets[0].directory.resolve().name}-{key}")
    batch = config.train.tokens_per_update if "tokens_per_update" in names else 0
    return Ladder(config, options, words, names, directory, mixture.vocab_size, min(mixture.once.values()), batch)


def as_flags(flags: dict) -> list[str]:
    """Return flags as command-line arguments."""
    return [f"--{name}={value}" for name, value in flags.items()]


def measure(ladder: Ladder) -> float:
    """Return the budget in FLOPs, from this machine's speed over a few steps at the largest depth that the budget allows."""
    for depth in DEPTHS[1:]:
        weights = dial.weights(ladder.model(depth))
        length = ladder.length(dial.TOKENS_PER_WEIGHT * weights) | {"steps": PROBE_STEPS}
        flags = {"log_every": 1, "eval_every": 0, "eval_tokens": 1}
        budget = 60 * ladder.options.minutes * run(ladder, f"probe-{depth}", depth, length, flags)[1]
        if 6 * weights * dial.TOKENS_PER_WEIGHT * weights > budget:  # the FLOPs of a run with the dial's tokens
            break
    return budget


def choose(ladder: Ladder, budget: float) -> list[tuple[int, float]]:
    """Return the rungs for a budget in FLOPs. Raises UserError if the budget or the text is too small for a ladder."""
    if not (rungs := choose_rungs(ladder, budget)):
        enough = next((times for times in (2**n for n in range(1, 20)) if choose_rungs(ladder, times * budget)), 0)
        name, most = ("minutes", ladder.options.minutes) if ladder.options.minutes else ("flops", budget)
        more = f"--{name}={enough * most:.3g} is enough" if enough else "prepare more text"
        cheaper = "a shorter --seq_len, a smaller --tokens_per_update or a smaller vocabulary (--tokenizer=bytes) needs less"
        few = f"{budget:.2g} FLOPs and {ladder.unique_tokens:,.0f} tokens are too few for a ladder of this shape"
        raise UserError(f"{few}; {more}; {cheaper}")
    return rungs


def choose_rungs(ladder: Ladder, budget: float) -> list[tuple[int, float]]:
    """Return the rungs (depth and tokens), cheapest first, for the ladder's share of the budget; empty if that is too small.

    The largest model is the deepest that gets at least a third of the dial's tokens. Smaller ones get more tokens per weight,
    so that the fit can separate weights from tokens. A one-layer model behaves differently, because it cannot look up what
    followed an earlier token. So it is a rung only if the budget does not allow three layers.
    """
    models = {depth: ladder.model(depth) for depth in DEPTHS}
    sizes, flops = ({depth: of(model) for depth, model in models.items()} for of in (dial.weights, flops_per_token))
    for count in range(len(DEPTHS), FEWEST_DEPTHS - 1, -1):
        depths = DEPTHS[max(count > 2, count - MOST_DEPTHS) : count]
        tokens = {depth: dial.TOKENS_PER_WEIGHT * math.sqrt(sizes[depth] * sizes[depths[-1]]) for depth in depths}
        part = ladder.options.share * budget / sum(HORIZONS) / sum(tokens[depth] * flops[depth] for depth in depths)
        if part >= FEWEST_TOKENS:
            break
    most = dial.EPOCHS * ladder.unique_tokens
    rungs = [(depth, horizon * min(part * tokens[depth], most)) for depth in depths for horizon in HORIZONS]
    if part < FEWEST_TOKENS or not all(ladder.is_long_enough(tokens) for _, tokens in rungs):
        return []
    return sorted(rungs, key=lambda rung: (rung[1] * flops[rung[0]], rung[0]))


def climb(ladder: Ladder, depth: int, tokens: float) -> dict:
    """Train a rung unless it is done. Returns its depth, weights, tokens, FLOPs, loss and speed in FLOP/s. Raises UserError."""
    length, model = ladder.length(tokens), ladder.model(depth)
    tokens, weights = length["steps"] * length["tokens_per_update"], dial.weights(model)
    loss, speed = run(ladder, name := f"depth-{depth}-tokens-{tokens}", depth, length, {"eval_every": 0})
    if not loss < math.log(ladder.vocab_size):
        raise UserError(f"{ladder.directory / name} diverged (validation loss {loss:.4g}); lower --lr")
    say(f"depth {depth:2}  {weights:>13,} weights  {tokens:>14,} tokens  loss {loss:.4f}")
    return dict(depth=depth, weights=weights, tokens=tokens, flops=flops_per_token(model) * tokens, loss=loss, speed=speed)


def run(ladder: Ladder, name: str, depth: int, length: dict, flags: dict) -> tuple[float, float]:
    """Train a run to the end unless it is done. Returns the validation loss and the speed in FLOP/s. Raises UserError.

    length: its steps and batch size. flags: others of train.py, unless the user gave them.
    """
    directory, ranks = ladder.directory / name, ladder.options.ranks
    if not (records := finished(directory, length["steps"])):
        own = {key: value for key, value in flags.items() if key not in ladder.given} | ladder.flags(depth, length)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        words = [*ladder.words, *as_flags(own | {"out_dir": ladder.directory, "name": name})]
        train = [sys.executable, *torchrun, str(Path(__file__).parent.parent / "train.py")]
        process = subprocess.Popen([*train, *words], stdout=subprocess.DEVNULL)
        try:
            status = process.wait()
        finally:
            if process.poll() is None:  # this command was interrupted: let the run save first
                process.terminate()
                process.wait()
        if status == EX_TEMPFAIL:
            sys.exit(status)
        if status:
            raise UserError(f"{directory} ended with status {status}; the reason is above or in its train.log")
        records = finished(directory, length["steps"])
    speeds = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    return records[-1]["val_loss"], statistics.median(speeds or [math.nan]) * flops_per_token(ladder.model(depth))


def finished(directory: Path, steps: int) -> list[dict]:
    """Return the metrics of a run that finished with an evaluation, else an empty list."""
    lines = [record for path in directory.glob("metrics.jsonl") for _, record in read_records(path) if record]
    records = [record for record in lines if record.keys() & {"loss", "val_loss"}]  # not the scores on tasks
    return records if records and records[-1]["step"] == steps and "val_loss" in records[-1] else []


def recommend(ladder: Ladder, rungs: list[dict], budget: float) -> tuple[dict, str]:
    """Return the depth and tokens with the lowest predicted loss for a budget in FLOPs, that loss with its margin, and the law.

    The run gets at least as many tokens per weight as the largest rung if possible, because below that, the law is a guess.
    """
    models = {depth: ladder.model(depth) for depth in range(1, 65)}
    most, largest = dial.EPOCHS * ladder.unique_tokens, rungs[-1]
    runs = [(depth, dial.weights(model), min(budget / flops_per_token(model), most)) for depth, model in models.items()]
    if not (runs := [run for run in runs if ladder.is_long_enough(run[2])]):
        raise UserError(f"--share={ladder.options.share:g} leaves too little budget for the recommended run; lower it")
    runs = [run for run in runs if run[2] / run[1] >= largest["tokens"] / largest["weights"]] or runs
    done, losses = [(rung["weights"], rung["tokens"]) for rung in rungs], [rung["loss"] for rung in rungs]
    losses, margins, formula = law.predict(done, losses, [run[1:] for run in runs], ladder.unique_tokens)
    loss, margin, (depth, _, tokens) = min(zip(losses, margins, runs, strict=True))
    return dict(val_loss=loss, margin=margin, depth=depth, tokens=tokens), formula


def report(ladder: Ladder, rungs: list[dict]) -> None:
    """Fit the law, print the run to start, and write its prediction to that run's directory. Raises UserError."""
    options, top = ladder.options, rungs[-1]
    budget = options.flops or 60 * options.minutes * top["speed"]
    found, formula = recommend(ladder, rungs, (1 - options.share) * budget)
    loss, margin, depth, tokens = found.values()
    model, length = ladder.model(depth), ladder.length(tokens)
    flops, size = tokens * flops_per_token(model), f"depth-{depth}-tokens-{length['steps'] * length['tokens_per_update']}"
    best = ladder.directory.with_name(f"{ladder.directory.name.removeprefix('ladder-')}-{size}")
    if not (best / "metrics.jsonl").exists():  # once the run has started, its prediction is fixed
        best.mkdir(exist_ok=True)
        files.publish_text(best / "prediction.json", json.dumps(found))
    flags = as_flags(ladder.flags(depth, length) | {"out_dir": best.parent, "name": best.name})
    say(
        f"law     {formula}\n"
        f"best    depth {depth}: {dial.weights(model):,} weights, {tokens:,.0f} tokens, in about "
        f"{duration(flops / top['speed'])}; {flops / top['flops']:.0f} times the FLOPs of the largest rung\n"
        f"loss    {loss:.3f}; 90 % interval {loss - margin:.3f} to {loss + margin:.3f}\n\n"
        f"{train_command(options, [*ladder.words, *flags])}"
    )


def train_command(options: LadderConfig, words: list[str]) -> str:
    """Return the command that trains with these words of a command line."""
    return f"{command.launcher(options.ranks)} train.py {shlex.join(words)}"
