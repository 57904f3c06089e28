"""Damage done to runs on purpose, again and again: what is left each time, and does a run end with the bits of another one?

python bench/drill.py kills|resume|corruption [--flag=value ...]
"""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import machine  # puts the project's folder on the path

# isort: split
import forks
import settings
from common import cli
from common.errors import RunError, UserError
from settings import ParallelConfig

STRATEGIES = get_args(cli.flat_fields(ParallelConfig)["strategy"].type)
CHECKPOINTS_PER_ATTEMPT = 4  # at most; this limits the steps of the whole run
# A step of a tiny model is shorter than a save, so that many kills fall into one. 6 micro-batches, which 1, 2, 3 and 6 ranks
# share equally, and an optimizer that every strategy supports.
KILLS = machine.TINY | dict(dropout=0.1, tokens_per_update=192, optimizer="adamw", lr=1e-3, save_every=1)
KILLS |= dict(eval_every=100, eval_tokens=2048)
# 120 micro-batches, which 3, 4, 5 and 8 ranks can share equally.
RESUME = machine.TINY_RUN | dict(tokens_per_update=16 * 120, micro_batch_size=1)
# RESUME has all gradients in DDP's first bucket of 1 MB; 9 million parameters fill buckets of 1, 25 and 10 MB.
SEVERAL_BUCKETS = dict(architecture="llama", n_layer=10, n_embd=256, vocab_size=4608, micro_batch_size=5)
VARIANTS = {"bfloat16": dict(dtype="bfloat16"), "several buckets": SEVERAL_BUCKETS, "compiled": dict(compile="on")}
BF16 = dict(grad_compression="bf16")
DDP_VARIANTS = {"--grad_compression=bf16": BF16, "several buckets, compiled": SEVERAL_BUCKETS | dict(compile="on")}
DDP_VARIANTS |= {"several buckets, --grad_compression=bf16": SEVERAL_BUCKETS | BF16}
DDP_VARIANTS |= {"several buckets, Muon, bfloat16": SEVERAL_BUCKETS | dict(optimizer="muon", dtype="bfloat16")}
CORRUPTION_RANKS = 3
TRIALS = 4  # flips of each kind under each strategy
CORRUPTION = machine.TINY_RUN | dict(tokens_per_update=16 * 12, steps=24, check_replicas_every=5, timeout_minutes=0.5)
CORRUPTION |= dict(save_every=1, keep_last=0)
PLACES = ("weight", "gradient before the average", "gradient after the average", "optimizer state")
NOT_FINITE, REPLAY, VERIFY = "gradient not finite", "replay.py", "replay.py --verify"
UNCHANGED, NOTHING = "no effect", "NOT FOUND"
# What ends a run, by the words of its error; after a timeout one rank has left the update out and the others waited for it.
REPLICAS = "--check_replicas_every"
ENDS = {"the replicas differ": REPLICAS, "where the fixed point of --strategy=exact ends": "overflow of exact"}
ENDS |= {"timed out": "--timeout_minutes"}


def train(ranks: int, run: Path, flags: dict, fault: "Fault | None" = None, **limits) -> list[int]:
    """Train in forks of this process, which need not import anything. `run` is the directory of the run.

    Returns their wait statuses, see `forks.run_forks`. What they print is in RUN.out and RUN.err.
    """
    training = settings.load(machine.arguments(**flags, out_dir=run.parent, name=run.name)[1:], "")

    def work() -> int:
        import train

        update = train.update

        def update_with_fault(run, prefetcher):
            if fault and (run.world.rank, run.state.step + 1) == (fault.rank, fault.step):
                corrupt(run, fault)
            return update(run, prefetcher)

        train.update = update_with_fault
        return train.main(training)

    return forks.run_forks(ranks, work, run, **limits)


def train_to_the_end(ranks: int, run: Path, flags: dict) -> dict[str, str]:
    """Train. Returns the sha256 of what the run has left. Raises RunError if it fails."""
    if any(statuses := train(ranks, run, flags)):
        raise RunError(f"{run.name} on {ranks} ranks with {flags}: {forks.failure(run, statuses)}")
    return machine.digests(run)


# ---------------------------------------------------------------------------------------------------------------------
# Kills


@dataclass(frozen=True)
class KillsConfig(machine.Options):
    kills: int = 200
    strategy: Literal[STRATEGIES] = "ddp"
    ranks: int = 1
    """Under exact the most ranks: each attempt has a random number of them."""
    max_shard_bytes: int = 10**9
    """With 20000 the tensors are in 28 files, which the ranks write together under fsdp."""


def kills(config: KillsConfig) -> int:
    """Kill a run hundreds of times, at random instants, and examine what is left each time.

    python bench/drill.py kills --kills=125 --strategy=fsdp --ranks=3

    After each kill every published checkpoint is compared with its manifest, and the run is started again. The last attempt,
    an ordinary `python train.py`, runs to the end, and its files are compared with those of an undisturbed run. Writes
    hard_kills.json, or hard_kills_STRATEGY[_sharded]_RANKS.json. The exit status is 0 only if every state was usable and both
    runs are the same. About ten minutes for 200 kills on two cores.
    """
    if min(config.kills, config.ranks) < 1:
        raise UserError("--kills and --ranks must be at least 1")
    forks.prepare_to_fork()
    machine.prepare_tokens(config.tokens)
    flags = KILLS | {name: getattr(config, name) for name in ("strategy", "max_shard_bytes", "tokens")}
    flags |= {"steps": (CHECKPOINTS_PER_ATTEMPT + 1) * config.kills + 10}
    with machine.workspace() as runs:
        result = kill_again_and_again(config, flags, runs / "killed") | {"steps": flags["steps"]}
        for name in ("killed", "undisturbed"):
            machine.run(config.ranks, **flags, out_dir=runs, name=name)
        result["same"] = compare(runs / "killed", runs / "undisturbed")
    sharded = "_sharded" if config.max_shard_bytes < KillsConfig.max_shard_bytes else ""
    name = "hard_kills" + (f"_{config.strategy}{sharded}_{config.ranks}" if config.ranks > 1 else "")
    print(machine.write(name, {"flags": flags | {"ranks": config.ranks}, **result}, Path(config.out)))
    return report_kills(result)


def kill_again_and_again(config: KillsConfig, flags: dict, run: Path) -> dict:
    """Start the run and kill it, `kills` times. Returns what was found after each kill."""
    from tqdm import tqdm

    checkpoints, chance, moments, unusable = run / "checkpoints", random.Random(0), Counter(), []
    for number in tqdm(range(1, config.kills + 1), unit="kill", dynamic_ncols=True):
        before = newest_step(checkpoints)
        ranks = chance.randint(1, config.ranks) if config.strategy == "exact" else config.ranks
        statuses = train(ranks, run, flags, limit=120, enough=random_instant(checkpoints, before, chance))
        if any(status != signal.SIGKILL for status in statuses):
            raise RunError(f"attempt {number} ended before its kill: {forks.failure(run, statuses)}")
        moments[killed_while(checkpoints)] += 1
        if problems := examine(checkpoints, before):
            unusable.append({"kill": number, "problems": problems})
    found = {"kills": config.kills, "killed_while": dict(moments), "unusable": unusable}
    return found | {"steps_survived": newest_step(checkpoints)}


def random_instant(checkpoints: Path, before: int, chance: random.Random):
    """A function that is true from a random instant on, while an attempt starts at step `before`, or in its steps or saves."""
    count = chance.randrange(CHECKPOINTS_PER_ATTEMPT)  # 0: while it starts
    delay, since = chance.random() * (0.1 if count else 0.7), None

    def is_now() -> bool:
        nonlocal since
        saved = newest_step(checkpoints) - before
        if since is None and saved >= count:
            since = time.perf_counter()
        return saved >= CHECKPOINTS_PER_ATTEMPT or (since is not None and time.perf_counter() - since > delay)

    return is_now


def newest_step(checkpoints: Path) -> int:
    """The step of the newest published checkpoint, by its name."""
    from checkpoints import retention

    return max(map(retention.step_of, retention.published(checkpoints)), default=0)


def killed_while(checkpoints: Path) -> str:
    """What the run was doing to its checkpoints when it was killed, judged by what it has left."""
    names = os.listdir(checkpoints) if checkpoints.exists() else []
    newest, latest = newest_step(checkpoints), checkpoints / "latest"
    if any(name.startswith(".step-") and not name.endswith(".old.tmp") for name in names):
        return "writing a checkpoint"
    if newest and (not latest.is_symlink() or int(os.readlink(latest)[5:]) < newest):
        return "between publishing and `latest`"
    return "removing an old checkpoint" if any(name.endswith(".old.tmp") for name in names) else "no checkpoint under way"


def examine(checkpoints: Path, step_before: int) -> list[str]:
    """What is unusable in the state that a kill has left. An empty list means that the run loses no checkpoint."""
    from checkpoints import retention

    links = [path for path in (checkpoints / "latest", checkpoints / "best") if path.is_symlink()]
    problems = [f"{path.name}: {why}" for path in [*retention.published(checkpoints), *links] if (why := retention.fault(path))]
    newest, _ = retention.newest(checkpoints)
    step = retention.step_of(newest) if newest else 0
    if step < step_before:
        problems.append(f"the newest intact checkpoint was of step {step_before} and is now of step {step}")
    return problems


def compare(a: Path, b: Path) -> dict[str, bool]:
    """Whether each file is the same in two runs, bit for bit (the metrics without times)."""
    files = [machine.digests(run) | {"metrics.jsonl": machine.unmeasured(machine.metrics(run))} for run in (a, b)]
    return {name: files[0][name] == files[1].get(name) for name in files[0]}


def report_kills(result: dict) -> int:
    """Print what was found and the verdict. Returns the exit status."""
    for moment, count in Counter(result["killed_while"]).most_common():
        print(f"{count:5d} kills: {moment}")
    for state in result["unusable"]:
        print(f"kill {state['kill']}: {'; '.join(state['problems'])}")
    for file, is_same in result["same"].items():
        print(f"{file}: as in an undisturbed run: {'yes' if is_same else 'NO'}")
    print(f"{result['kills']} kills, {result['steps']} steps: {len(result['unusable'])} unusable states")
    return int(bool(result["unusable"]) or not all(result["same"].values()))


# ---------------------------------------------------------------------------------------------------------------------
# Resuming


@dataclass(frozen=True)
class ResumeConfig(machine.Options):
    only: str = ""
    """Only the cases whose name contains this, such as "ddp on 3"."""
    steps: int = 6


def resume(config: ResumeConfig) -> int:
    """Is a run that was stopped and resumed the same as an undisturbed one? On 3, 4, 5 and 8 ranks, under every strategy.

    Trains each case three times: undisturbed, undisturbed again, and stopped halfway and resumed. Two ranks would show little,
    because a + b and b + a have the same bits. Writes resume.json. The exit status is 0 only if weights and optimizer state are
    the same, bit for bit, in every case.
    """
    machine.prepare_tokens(config.tokens)
    forks.prepare_to_fork()
    cases = [(s, ranks, dict(strategy=s)) for s in STRATEGIES for ranks in (3, 4, 5, 8)]
    cases += [(f"{s}, {name}", 3, dict(flags, strategy=s)) for s in STRATEGIES for name, flags in VARIANTS.items()]
    cases += [(f"ddp, {name}", 3, flags) for name, flags in DDP_VARIANTS.items()]
    rows = []
    with machine.workspace() as runs:
        for name, ranks, flags in cases:
            if config.only in f"{name} on {ranks}":
                flags = RESUME | flags | dict(tokens=config.tokens, steps=config.steps)
                undisturbed, repeated, resumed = (runs / f"{len(rows)}-{run}" for run in ("undisturbed", "repeated", "resumed"))
                train_to_the_end(ranks, resumed, flags | dict(steps=config.steps // 2))
                digests = [train_to_the_end(ranks, run, flags) for run in (undisturbed, repeated, resumed)]
                rows.append({"case": name, "ranks": ranks, "sha256": digests})
                print(f"{name} on {ranks} ranks: done", flush=True)
    print(machine.write("resume", {"flags": RESUME, "steps": config.steps, "cases": rows}, Path(config.out)))
    return report_resume(rows)


def report_resume(rows: list[dict]) -> int:
    """Print a verdict for each case. Returns the exit status."""
    different = [row for row in rows if any(other != row["sha256"][0] for other in row["sha256"])]
    for row in rows:
        weights = ", ".join(each["model.safetensors"][:8] for each in row["sha256"])
        print(f"{row['case']} on {row['ranks']}: {'DIFFERENT' if row in different else 'same'}, weights {weights}", flush=True)
    print(f"{len(rows) - len(different)} of {len(rows)} cases: the same undisturbed, repeated and resumed")
    return int(bool(different))


# ---------------------------------------------------------------------------------------------------------------------
# A bit that flips silently


@dataclass(frozen=True)
class Fault:
    """A bit that flips on `rank` during update `step`, as metrics.jsonl counts updates. `seed` chooses which bit."""

    kind: str  # of PLACES
    rank: int
    step: int
    seed: int


def corruption(config: machine.Options) -> int:
    """What finds a bit that flips silently, and how late?

    Trains on three ranks with --check_replicas_every=5. At a random step one random bit of a weight, a gradient or the
    optimizer state of one rank is flipped. If the run ends without having noticed, replay.py computes it again and compares the
    recorded losses and gradient norms, then the checkpoints. Prints which mechanism found the flip and how many steps later,
    and writes corruption_drill.json. The exit status is 0 only if every flip that changed the final weights was found. About 15
    minutes on two cores.
    """
    machine.prepare_tokens(config.tokens)
    forks.prepare_to_fork()
    import replay  # noqa: F401  for the forks

    chance, trials = random.Random(0), []
    with machine.workspace() as runs:
        for strategy in ("ddp", "zero1", "exact"):
            flags = dict(CORRUPTION, strategy=strategy, tokens=config.tokens)
            undisturbed = train_to_the_end(CORRUPTION_RANKS, runs / strategy, flags)
            for number, kind in enumerate(kind for kind in PLACES for _ in range(TRIALS)):
                rank, step = chance.randrange(CORRUPTION_RANKS), chance.randint(2, flags["steps"] - 5)
                fault = Fault(kind, rank, step, seed=chance.randrange(2**32))
                run = runs / f"{strategy}-{number}"
                completed = not any(train(CORRUPTION_RANKS, run, flags, fault))
                by, step = discovery(strategy, run, fault, completed, completed and machine.digests(run) == undisturbed)
                named = f"of rank {fault.rank} is not" in Path(f"{run}.err").read_text() if by == REPLICAS else None
                found = {"found_by": by, "steps_later": step - fault.step, "named": named}
                trials.append({"strategy": strategy, **asdict(fault), **found})
                print(trials[-1], flush=True)
    result = {"flags": CORRUPTION, "ranks": CORRUPTION_RANKS, "trials": trials}
    print(machine.write("corruption_drill", result, Path(config.out)))
    for (strategy, kind, by), count in Counter((t["strategy"], t["kind"], t["found_by"]) for t in trials).items():
        print(f"{strategy}, {kind}: {count} {by}")
    return int(any(trial["found_by"] == NOTHING for trial in trials))


def flip(tensors: list, chance: random.Random) -> None:
    """Flip one bit of one element of float32 `tensors`; every element is equally likely."""
    import numpy as np

    [tensor] = chance.choices(tensors, [tensor.numel() for tensor in tensors])
    values = tensor.detach().view(-1).numpy().view(np.uint32)
    values[chance.randrange(len(values))] ^= np.uint32(1 << chance.randrange(32))


def corrupt(run, fault: Fault) -> None:
    """Flip the bit before the coming update, or arrange that it flips during the update."""
    chance, engine = random.Random(fault.seed), run.engine
    parameters = list(engine.parameters.values())
    if fault.kind == "weight":
        flip(parameters, chance)
    elif fault.kind == "optimizer state":
        states = [state for part in run.optimizers.parts for state in part.state.values()]
        flip([tensor for state in states for tensor in state.values() if tensor.ndim], chance)
    elif fault.kind == "gradient before the average":
        [parameter] = chance.choices(parameters, [p.numel() for p in parameters])

        def flip_incoming(gradient):
            handle.remove()
            gradient = gradient.clone()
            flip([gradient], chance)
            return gradient

        handle = parameter.register_hook(flip_incoming)
    else:
        clip = engine.clip

        def flip_and_clip(limit: float) -> float:
            engine.clip = clip
            flip([p.grad for p in parameters], chance)
            return clip(limit)

        engine.clip = flip_and_clip


def discovery(strategy: str, run: Path, fault: Fault, completed: bool, unchanged: bool) -> tuple[str, int]:
    """What has found the fault in a run, and at which step."""
    errors, log = Path(f"{run}.err").read_text(), (run / "train.log").read_text()
    if skipped := re.search(r"step (\d+): the gradient is not finite", log):
        return NOT_FINITE, int(skipped[1])
    for words, by in ENDS.items():
        if words in errors.lower():
            return by, machine.last_step(run) + (by != REPLICAS)  # the replicas are compared after an update, not in it
    if not completed:
        raise RunError(f"{run.name} failed with {fault}:\n{errors}")
    rows = json.loads(replayed(strategy, run, step=1, steps=CORRUPTION["steps"], json=True))["steps"]
    if different := [row["step"] for row in rows if not row["same"]]:
        return REPLAY, different[0]
    if unchanged:
        return UNCHANGED, fault.step
    false = re.search(r"step-(\d+) DOES NOT follow", replayed(strategy, run, verify=True))
    return (VERIFY, int(false[1])) if false else (NOTHING, fault.step)


def replayed(strategy: str, run: Path, **options) -> str:
    """What replay.py prints about a run."""

    def work() -> int:
        import replay

        return replay.main(replay.ReplayConfig(str(run), **options))

    output = Path("-".join([str(run), *options]))
    statuses = forks.run_forks(1 if strategy == "exact" else CORRUPTION_RANKS, work, output)
    if not (text := Path(f"{output}.out").read_text()):
        raise RunError(f"replaying {run.name}: {forks.failure(output, statuses)}")
    return text


if __name__ == "__main__":
    machine.choose(
        __doc__,
        kills=(KillsConfig, kills),
        resume=(ResumeConfig, resume),
        corruption=(machine.Options, corruption),
    )
