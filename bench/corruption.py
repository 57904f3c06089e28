"""The drill of a bit that flips silently: python bench/drill.py corruption"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import machine  # puts the project's folder on the path
import settings
from common.errors import RunError

RANKS = 3
FLAGS = machine.TINY_RUN | dict(tokens_per_update=16 * 12, steps=24, check_replicas_every=5, timeout_minutes=0.5)
FLAGS |= dict(save_every=1, keep_last=0)
KINDS = ("weight", "gradient before the average", "gradient after the average", "optimizer state")
REPLICAS, NOT_FINITE, OVERFLOW = "--check_replicas_every", "gradient not finite", "overflow of exact"
TIMEOUT = "--timeout_minutes"  # one rank left the update out, and the others waited for it
REPLAY, VERIFY, UNCHANGED, NOTHING = "replay.py", "replay.py --verify", "no effect", "NOT FOUND"


@dataclass(frozen=True)
class CorruptionConfig(machine.Options):
    strategies: str = "ddp,zero1,exact"
    trials: int = 4
    """Flips of each kind under each strategy."""
    seed: int = 0


def main(config: CorruptionConfig) -> int:
    """What finds a bit that flips silently, and how late?

    Trains on three ranks with --check_replicas_every=5. At a random step one random bit of a weight, a gradient or the
    optimizer state of one rank is flipped. If the run ends without having noticed, replay.py computes it again and compares the
    recorded losses and gradient norms, then the checkpoints. Prints which mechanism found the flip and how many steps later,
    and writes corruption_drill.json. The exit status is 0 only if every flip that changed the final weights was found. About 15
    minutes on two cores.
    """
    machine.prepare_tokens(config.tokens)
    machine.prepare_to_fork()
    import replay  # noqa: F401  for the forks

    chance, trials = random.Random(config.seed), []
    with machine.workspace() as runs:
        for strategy in config.strategies.split(","):
            flags = dict(FLAGS, strategy=strategy, tokens=config.tokens)
            if not train(strategy, runs, flags):
                raise RunError(f"{strategy} failed:\n{(runs / f'{strategy}.err').read_text()}")
            for number, kind in enumerate([kind for kind in KINDS for _ in range(config.trials)]):
                fault = Fault(kind, chance.randrange(RANKS), chance.randint(2, FLAGS["steps"] - 5), chance.randrange(2**32))
                trials.append(try_fault(f"{strategy}-{number}", runs, flags, fault, machine.digests(runs / strategy)))
                row = trials[-1]
                print(f"{strategy}, {kind}: {row['found_by']}, {row['steps_later']} steps later, {row['flip']}", flush=True)
    print(machine.write("corruption_drill", {"flags": FLAGS, "ranks": RANKS, "trials": trials}, Path(config.out)))
    for (strategy, kind, by), count in Counter((t["strategy"], t["kind"], t["found_by"]) for t in trials).items():
        print(f"{strategy}, {kind}: {count} {by}")
    return int(any(trial["found_by"] == NOTHING for trial in trials))


@dataclass(frozen=True)
class Fault:
    """A bit that flips on `rank` during update `step`, as metrics.jsonl counts updates. `seed` chooses which bit."""

    kind: str
    rank: int
    step: int
    seed: int


def flip(tensors: dict, chance: random.Random) -> dict:
    """Flip one bit of one element of float32 `tensors`; every element is equally likely. Returns what was done."""
    import numpy as np

    name = chance.choices(list(tensors), [tensor.numel() for tensor in tensors.values()])[0]
    values = tensors[name].detach().view(-1).numpy()
    element, bit = chance.randrange(len(values)), chance.randrange(32)
    before = float(values[element])
    values.view(np.uint32)[element] ^= np.uint32(1 << bit)
    return {"tensor": name, "element": element, "bit": bit, "before": repr(before), "after": repr(float(values[element]))}


def corrupt(run, fault: Fault, note: Callable[[dict], None]) -> None:
    """Flip the bit before the coming update, or arrange that it flips during the update."""
    chance, engine = random.Random(fault.seed), run.engine
    if fault.kind == "weight":
        note(flip(engine.parameters, chance))
    elif fault.kind == "optimizer state":
        states = [(i, state) for part in run.optimizers.parts for i, state in enumerate(part.state.values())]
        note(flip({f"{i}.{key}": value for i, state in states for key, value in state.items() if value.ndim}, chance))
    elif fault.kind == "gradient before the average":
        name = chance.choices(list(engine.parameters), [p.numel() for p in engine.parameters.values()])[0]

        def flip_incoming(gradient):
            gradient = gradient.clone()
            handle.remove()
            note(flip({name: gradient}, chance))
            return gradient

        handle = engine.parameters[name].register_hook(flip_incoming)
    else:
        clip = engine.clip

        def flip_and_clip(limit: float) -> float:
            engine.clip = clip
            note(flip({name: p.grad for name, p in engine.parameters.items()}, chance))
            return clip(limit)

        engine.clip = flip_and_clip


def train(name: str, runs: Path, flags: dict, fault: Fault | None = None) -> bool:
    """Train on RANKS ranks with the fault. Returns whether the run was completed. `name`.flip says what was flipped."""
    training = settings.load(machine.arguments(name=name, out_dir=runs, **flags)[1:], "")

    def work() -> int:
        import train

        update = train.update

        def update_with_fault(run, prefetcher):
            if fault and (run.world.rank, run.state.step + 1) == (fault.rank, fault.step):
                corrupt(run, fault, lambda what: (runs / f"{name}.flip").write_text(json.dumps(what)))
            return update(run, prefetcher)

        train.update = update_with_fault
        return train.main(training)

    return not any(machine.run_forks(RANKS, work, runs / name))


def replayed(name: str, runs: Path, strategy: str, **options) -> str:
    """What replay.py prints about a run."""

    def work() -> int:
        import replay

        return replay.main(replay.ReplayConfig(str(runs / name), **options))

    output = runs / f"{name}-replay-{len(options)}"
    statuses = machine.run_forks(1 if strategy == "exact" else RANKS, work, output)
    if not (text := Path(f"{output}.out").read_text()):
        raise RunError(f"replaying {name}: {machine.failure(output, statuses)}")
    return text


def try_fault(name: str, runs: Path, flags: dict, fault: Fault, undisturbed: dict[str, str]) -> dict:
    """Train with the fault. Returns what found it, and how many steps later."""
    strategy, completed = flags["strategy"], train(name, runs, flags, fault)
    errors, log = (runs / f"{name}.err").read_text(), (runs / name / "train.log").read_text()
    steps = [record["step"] for record in machine.metrics(runs / name) if "loss" in record]
    coming = max(steps, default=0) + 1
    unchanged = completed and machine.digests(runs / name) == undisturbed
    if skipped := re.search(r"step (\d+): the gradient is not finite", log):
        step, by = int(skipped[1]), NOT_FINITE
    elif "the replicas differ" in errors:
        step, by = steps[-1], REPLICAS
    elif "where the fixed point of --strategy=exact ends" in errors:
        step, by = coming, OVERFLOW
    elif "timed out" in errors.lower():
        step, by = coming, TIMEOUT
    elif not completed:
        raise RunError(f"{name} failed with {fault}:\n{errors}")
    else:
        rows = json.loads(replayed(name, runs, strategy, step=1, steps=FLAGS["steps"], json=True))["steps"]
        step, by = next((row["step"] for row in rows if not row["same"]), fault.step), REPLAY
        if all(row["same"] for row in rows):
            by = UNCHANGED
            if not unchanged:
                false = re.search(r"step-(\d+) DOES NOT follow", replayed(name, runs, strategy, verify=True))
                step, by = (int(false[1]), VERIFY) if false else (fault.step, NOTHING)
    where = {"strategy": strategy, **asdict(fault), "flip": json.loads((runs / f"{name}.flip").read_text())}
    named = f"of rank {fault.rank} is not" in errors if by == REPLICAS else None
    return {**where, "found_by": by, "steps_later": step - fault.step, "named": named}
