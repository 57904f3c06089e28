"""Which model, on which batch, for how many tokens, and what loss will it reach?

`python ladder.py [config/NAME.toml] --tokens=tokens/mine --minutes=60 [--flag=value of train.py ...]` trains a few small models
on the text for a part of the time, fits how the loss falls with weights and tokens, and prints the command of the best run with
its predicted loss. The rungs are ordinary runs in runs/ladder-NAME: the same command again continues, and repeats nothing.
"""

import command

if __name__ == "__main__":
    command.run("ladder", list)

import dataclasses
import json
import math
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple, TypedDict

from msgspec import Meta

import data
import settings
from common import cli, files
from common.errors import EX_TEMPFAIL, UserError, refuse, say
from hardware import host
from hardware.footprint import flops_per_token
from planning import dial, law
from reports import curves
from reports.log import duration, read_records
from settings import Config, ModelConfig, Ranks

TRAIN = Path(__file__).with_name("train.py")
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of the rungs
HORIZONS = (1 / 4, 1 / 2, 1)  # of each depth, in its longest one
FEWEST_DEPTHS, MOST_DEPTHS = 2, 3  # in a ladder
FEWEST_TOKENS = 1 / 3  # of those that the dial gives the largest rung
PROBE_STEPS = 8
SAVED = b"saved; the same command goes on"  # in the train.log of a run that was stopped


@dataclass(frozen=True)
class LadderConfig:
    minutes: Annotated[float, Meta(ge=0, le=10**7)] = 0.0
    """Total training time: the runs of the ladder and the run that it recommends."""
    flops: Annotated[float, Meta(ge=0, le=1e30)] = 0.0
    """The same budget in floating-point operations; then no time is measured."""
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """The part of it that the ladder may take."""
    ranks: Ranks = 1
    """Processes of a run on this machine, started by torchrun: as many as it has GPUs."""


@dataclass(frozen=True)
class LadderCommand:
    config: Config = field(default_factory=Config)
    ladder: LadderConfig = field(default_factory=LadderConfig)


class Rung(NamedTuple):
    """A run of a ladder that is done."""

    depth: int
    weights: int
    tokens: int
    flops: float
    loss: float  # of its last evaluation
    speed: float  # FLOP/s


# What is read of ladder.json. facts: what the runs share: the dataset's sha256, the command, the sha256 of its preset.
Record = TypedDict("Record", {"facts": dict})


@dataclass(frozen=True)
class Ladder:
    """What all steps of the command work with."""

    config: Config
    options: LadderConfig
    words: list[str]  # the preset and the flags of train.py that were given
    given: set[str]  # their names
    directory: Path
    vocab_size: int
    unique_tokens: float  # tokens until the text, or one of a mixture, has been read once
    most: float  # tokens of a run: repeated more often they are worth too little
    batch: int  # --tokens_per_update, if it was given; or 0
    facts: dict

    def model(self, depth: int) -> ModelConfig:
        """The resolved model at a depth of the dial."""
        config = settings.replace(self.config, depth=depth)
        return settings.resolve_model(dataclasses.replace(config.model, **dial.shape_of(config, self.given)), self.vocab_size)

    def fewest(self, tokens: float) -> float:
        """The tokens of FEWEST_STEPS updates with the batch that is right for a run of `tokens`."""
        right = dial.batch_of(tokens, self.config.optim.optimizer)
        return dial.FEWEST_STEPS * (self.batch or max(self.config.model.seq_len, right))

    def flags(self, depth: int, tokens: float) -> dict:
        """The flags of a run of a depth on so many tokens."""
        optimizer, seq_len = self.config.optim.optimizer, self.config.model.seq_len
        return {"depth": depth} | dial.length_of(tokens, seq_len, optimizer, tokens_per_update=self.batch)

    def predict(self, found: law.Law, depth: int, tokens: float) -> tuple[float, float]:
        """The loss of a run, and half of its interval."""
        return found.predict(dial.weights(self.model(depth)), law.effective_tokens(tokens, self.unique_tokens))


def main(args: list[str]) -> None:
    """Train the rungs, fit the law and print the best run. Raises UserError."""

    def stop(*_) -> None:  # `run` waits until the run that trains now has saved its state
        print("stopped; the same command goes on", flush=True)
        sys.exit(EX_TEMPFAIL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    ladder = begin(args)
    chosen = choose(ladder, ladder.options.flops or measure(ladder))
    say(f"ladder  {len(chosen)} runs of depth {sorted({depth for depth, _ in chosen})} in {ladder.directory}")
    if not (ladder.directory / "ladder.json").exists():
        record(ladder)
    rungs = [climb(ladder, *rung) for rung in chosen]
    budget = ladder.options.flops or 60 * ladder.options.minutes * max(rungs, key=lambda rung: rung.flops).speed
    report(ladder, rungs, budget * (1 - ladder.options.share))


def begin(args: list[str]) -> Ladder:
    """Read the command line and look at the ladder's directory. Raises UserError."""
    preset, flags = settings.divide(args)
    command = cli.parse(LadderCommand, flags, __doc__, LadderCommand(settings.read_preset(preset)), "[config/NAME.toml]")
    config, options, names = command.config, command.ladder, settings.given(flags)
    if (options.minutes > 0) == (options.flops > 0):
        raise UserError("give the budget in one of two ways: --minutes=60, or --flops=1e17 (floating-point operations)")
    refuse(f"--{name} is what the ladder finds; leave it out" for name in ("depth", "steps", "n_layer") if name in names)
    refuse(f"--{name}: a ladder is of new models" for name in ("init_from", "resume") if name in names)
    settings.check(config)
    if options.ranks > host.cores() and config.train.device in ("auto", "cpu"):
        raise UserError(f"--ranks={options.ranks}: this machine has {host.cores()} cores")
    values = {name: value for name, value in cli.flat_values(config).items() if name in names - {"name", "out_dir"}}
    words = [*args[: len(args) - len(flags)], *as_flags(dict(sorted(values.items())))]
    mixture = data.open_mixture(config.data.tokens, config.model.vocab_size, config.data.prepare_command)
    directory = Path(config.run.out_dir, f"ladder-{config.run.name or mixture.names[0]}")
    facts = {"tokens": mixture.identity, "command": words, "preset": files.sha256(preset)}
    # An older ladder.json does not say what its preset held.
    if (path := directory / "ladder.json").exists() and facts | (before := files.read_json(path, Record)["facts"]) != facts:
        changed = ", ".join(name for name in facts if facts[name] != before.get(name, facts[name]))
        raise UserError(f"{directory} is a ladder of another {changed}; choose another --name, or delete it")
    once, batch = min(mixture.once.values()), config.train.tokens_per_update if "tokens_per_update" in names else 0
    return Ladder(config, options, words, names, directory, mixture.vocab_size, once, dial.EPOCHS * once, batch, facts)


def as_flags(flags: dict) -> list[str]:
    """Flags as the words of a command line."""
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in flags.items()]


def record(ladder: Ladder, **more) -> None:
    """Write ladder.json."""
    ladder.directory.mkdir(parents=True, exist_ok=True)
    files.publish_text(ladder.directory / "ladder.json", json.dumps({"facts": ladder.facts} | more, indent=1))


def measure(ladder: Ladder) -> float:
    """The budget in FLOPs: a run of a few steps says how fast this machine is, at the largest depth that the budget reaches."""
    budget = 0.0
    for depth in DEPTHS[1:]:
        if not (ladder.directory / "ladder.json").exists():  # no rung is begun: what is there was measured with other settings
            shutil.rmtree(ladder.directory / f"probe-{depth}", ignore_errors=True)
        weights = dial.weights(ladder.model(depth))
        flags = ladder.flags(depth, dial.TOKENS_PER_WEIGHT * weights)
        flags |= {"steps": PROBE_STEPS, "log_every": 1, "eval_every": 0, "eval_tokens": 1}
        budget = 60 * ladder.options.minutes * run(ladder, f"probe-{depth}", flags)[1]
        if 6 * weights * dial.TOKENS_PER_WEIGHT * weights > budget:  # 6 weights tokens, in the dial's ratio
            break
    return budget


def choose(ladder: Ladder, budget: float) -> list[tuple[int, float]]:
    """The rungs, each a depth and its tokens, the cheapest first, for the ladder's share of the budget. Raises UserError."""
    if rungs := divide(ladder, budget):
        return rungs
    shortest = min(HORIZONS) * ladder.most
    if shortest < (least := ladder.fewest(shortest)):
        raise UserError(
            f"the text has {ladder.unique_tokens:,.0f} tokens, too few for a ladder: its shortest run would have "
            f"{shortest:,.0f} tokens and needs {least:,.0f}; prepare more text, or lower --seq_len or --tokens_per_update"
        )
    times = next(1.2**i for i in range(1, 1000) if divide(ladder, 1.2**i * budget))
    least = f"--minutes={times * ladder.options.minutes:.2g}" if ladder.options.minutes else f"--flops={times * budget:.2g}"
    less = "a shorter --seq_len or a smaller vocabulary (prepare_data.py --tokenizer=bytes) needs less"
    raise UserError(f"the budget is too small for models of this shape; {least} may do; {less}")


def divide(ladder: Ladder, budget: float) -> list[tuple[int, float]]:
    """`choose` for one budget; nothing where it is too small.

    The largest model is the deepest that gets a third of the dial's tokens or more. A smaller one gets more tokens for each of
    its weights, so that the rungs tell what is for want of weights from what is for want of tokens. One layer is another kind
    of model, which cannot look up what followed a token before: it is a rung only where the budget does not reach three.
    """
    models = {depth: ladder.model(depth) for depth in DEPTHS}
    sizes, flops = ({depth: of(model) for depth, model in models.items()} for of in (dial.weights, flops_per_token))
    for count in range(len(DEPTHS), FEWEST_DEPTHS - 1, -1):
        depths = DEPTHS[max(count > 2, count - MOST_DEPTHS) : count]
        tokens = {depth: dial.TOKENS_PER_WEIGHT * math.sqrt(sizes[depth] * sizes[depths[-1]]) for depth in depths}
        part = ladder.options.share * budget / sum(HORIZONS) / sum(tokens[depth] * flops[depth] for depth in depths)
        if part >= FEWEST_TOKENS:
            break
    rungs = [(depth, horizon * min(part * tokens[depth], ladder.most)) for depth in depths for horizon in HORIZONS]
    # A rung whose batch is smaller only for the sake of FEWEST_STEPS says nothing about longer runs.
    enough = part >= FEWEST_TOKENS and all(tokens >= ladder.fewest(tokens) for _, tokens in rungs)
    return sorted(rungs, key=lambda rung: (rung[1] * flops[rung[0]], rung[0])) if enough else []


def climb(ladder: Ladder, depth: int, tokens: float) -> Rung:
    """Train a rung, or read one that is done. Raises UserError if it diverged."""
    flags = ladder.flags(depth, tokens)
    tokens = flags["steps"] * flags["tokens_per_update"]
    model, name = ladder.model(depth), f"depth-{depth}-tokens-{tokens}"
    loss, speed = run(ladder, name, {"eval_every": 0} | flags)
    if not loss < math.log(ladder.vocab_size):
        lower = "lower --lr, or try the preset of another architecture"
        raise UserError(f"{ladder.directory / name} diverged (validation loss {loss:.4g}), so no law fits; {lower}")
    print(f"depth {depth:2}  {dial.weights(model):>13,} weights  {tokens:>14,} tokens  loss {loss:.4f}", flush=True)
    return Rung(depth, dial.weights(model), tokens, flops_per_token(model) * tokens, loss, speed)


def run(ladder: Ladder, name: str, flags: dict) -> tuple[float, float]:
    """Train to the end unless that is done. Returns the validation loss and the speed in FLOP/s. Raises UserError."""
    directory, log = ladder.directory / name, ladder.directory / name / "train.log"
    if not (records := finished(directory, flags["steps"])):
        own = {key: value for key, value in flags.items() if key not in ladder.given}
        ranks, words = ladder.options.ranks, [*ladder.words, *as_flags(own | {"out_dir": ladder.directory, "name": name})]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        said_before = log.stat().st_size if log.exists() else 0
        process = subprocess.Popen([sys.executable, *torchrun, str(TRAIN), *words], stdout=subprocess.DEVNULL)
        try:
            status = process.wait()
        finally:
            if process.poll() is None:  # this command is stopped: the run saves its state first
                process.terminate()
                process.wait()
        if status and log.exists() and SAVED in log.read_bytes()[said_before:]:  # under torchrun its 75 becomes 1
            sys.exit(EX_TEMPFAIL)
        if status:
            raise UserError(f"{directory} ended with status {status}, for the reason above or in its train.log")
        records = finished(directory, flags["steps"])
    speeds = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    return records[-1]["val_loss"], statistics.median(speeds or [math.nan]) * flops_per_token(ladder.model(flags["depth"]))


def finished(path: Path, steps: int) -> list[dict]:
    """The records of a run that was evaluated at its last step; none of another."""
    path = path / "metrics.jsonl"
    records = [record for _, record in read_records(path) if record] if path.exists() else []
    return records if records and records[-1]["step"] == steps and "val_loss" in records[-1] else []


def report(ladder: Ladder, rungs: list[Rung], budget: float) -> None:
    """Fit the law, say which run to start, write its prediction into the directory of that run, and draw it."""
    fresh = [law.effective_tokens(rung.tokens, ladder.unique_tokens) for rung in rungs]
    found = law.fit([rung.weights for rung in rungs], fresh, [rung.loss for rung in rungs])
    depth, tokens, loss, margin = recommend(ladder, rungs, found, budget)
    prediction = dict(val_loss=loss, margin=margin, depth=depth, tokens=tokens)
    record(ladder, rungs=[rung._asdict() for rung in rungs], prediction=prediction)
    draw(ladder, rungs, found, prediction)
    flags, ranks, top = ladder.flags(depth, tokens), ladder.options.ranks, max(rungs, key=lambda rung: rung.flops)
    name = f"{ladder.directory.name.removeprefix('ladder-')}-depth-{depth}-tokens-{flags['steps'] * flags['tokens_per_update']}"
    best = ladder.directory.with_name(name)
    if not (best / "metrics.jsonl").exists():  # a prediction stays
        best.mkdir(exist_ok=True)
        files.publish_text(best / "prediction.json", json.dumps(prediction))
    flops, epochs = tokens * flops_per_token(ladder.model(depth)), tokens / ladder.unique_tokens
    start = f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python"
    print(
        f"law     {found.text()}; drawn in {ladder.directory / 'ladder.png'}\n"
        f"best    --depth={depth}: {dial.weights(ladder.model(depth)):,} weights, {tokens:,.0f} tokens, "
        f"in about {duration(flops / top.speed)}; {flops / top.flops:.0f} times the FLOPs of the largest rung\n"
        f"loss    {loss:.3f}, with 90 % between {loss - margin:.3f} and {loss + margin:.3f}"
        + f"\ntext    it is read {epochs:.1f} times; more text would help" * (epochs > 1)
        + f"\n\n{start} train.py {shlex.join([*ladder.words, *as_flags(flags | {'out_dir': best.parent, 'name': name})])}",
        flush=True,
    )


def recommend(ladder: Ladder, rungs: list[Rung], found: law.Law, budget: float) -> tuple[int, float, float, float]:
    """The depth with the lowest loss for a budget in FLOPs, its tokens, the loss, and half of its interval.

    It gets as many tokens for each weight as the largest rung, or more: below that the law is a guess.
    """
    runs, largest = [], max(rungs, key=lambda rung: rung.flops)
    for depth in range(1, 65):
        tokens = min(budget / flops_per_token(ladder.model(depth)), ladder.most)
        if tokens >= ladder.fewest(tokens):
            runs.append((depth, tokens, *ladder.predict(found, depth, tokens)))
    if not runs:
        raise UserError(f"--share={ladder.options.share:g} leaves too little for the run that the ladder is for")
    known = [run for run in runs if run[1] / dial.weights(ladder.model(run[0])) >= largest.tokens / largest.weights]
    return min(known or runs, key=lambda run: run[2])


def draw(ladder: Ladder, rungs: list[Rung], found: law.Law, prediction: dict) -> None:
    """Draw the rungs, the law at each of their depths, and what it predicts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axis = figure.subplots()
    flops = {depth: flops_per_token(ladder.model(depth)) for depth in {prediction["depth"], *(rung.depth for rung in rungs)}}
    end = prediction["tokens"] * flops[prediction["depth"]]
    for color, depth in zip(curves.COLORS, sorted(flops), strict=False):
        own = [rung for rung in rungs if rung.depth == depth]
        start = min((rung.flops for rung in own), default=max(rung.flops for rung in rungs))
        line = [start * (end / start) ** (i / 60) for i in range(61)]
        losses = [ladder.predict(found, depth, x / flops[depth])[0] for x in line]
        axis.plot(line, losses, color=color, label=f"depth {depth}, {dial.weights(ladder.model(depth)):,} weights")
        axis.plot([rung.flops for rung in own], [rung.loss for rung in own], "o", color=color)
        if depth == prediction["depth"]:
            axis.errorbar(end, prediction["val_loss"], prediction["margin"], marker="*", markersize=12, color=color, capsize=4)
    axis.set(xscale="log", xlabel="FLOPs", ylabel="validation loss")
    axis.xaxis.minorticks_off()  # labels between the powers of ten would overlap
    axis.set_title("dots: measured; lines: the law; star: predicted, with its 90 % interval", loc="left", fontsize=11)
    axis.legend(frameon=False)
    curves.save(figure, ladder.directory / "ladder.png")
