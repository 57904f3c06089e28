"""Kill and resume runs again and again: what does each kill leave, and does the run end with the same bits?

python bench/drill.py kills|resume [--flag=value ...]
"""

import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import machine  # puts the project's folder on the path

# isort: split
import forks
from lockstep import settings
from lockstep.common.errors import RunError, UserError
from lockstep.strategies import STRATEGIES

CHECKPOINTS_PER_ATTEMPT = 4  # at most; this limits the steps of the whole run
# A step of a tiny model is shorter than a save, so many kills hit a save. 1, 2, 3 and 6 ranks can share the 6 micro-batches
# equally, and every strategy supports the optimizer.
KILLS = machine.TINY | dict(dropout=0.1, tokens_per_update=192, optimizer="adamw", lr=1e-3, save_every=1)
KILLS |= dict(eval_every=100, eval_tokens=2048)
# 3, 4, 5 and 8 ranks can share the 120 micro-batches equally.
RESUME = machine.TINY_RUN | dict(tokens_per_update=16 * 120, micro_batch_size=1)
# RESUME's gradients all fit in DDP's first bucket of 1 MB. 9 million parameters fill buckets of 1, 25 and 10 MB.
SEVERAL_BUCKETS = dict(architecture="llama", n_layer=10, n_embd=256, vocab_size=4608, micro_batch_size=5)
VARIANTS = {"bfloat16": dict(dtype="bfloat16"), "several buckets": SEVERAL_BUCKETS, "compiled": dict(compile="on")}
OF_DDP = {"several buckets, compiled": SEVERAL_BUCKETS | dict(compile="on")}
OF_DDP |= {"several buckets, Muon, bfloat16": SEVERAL_BUCKETS | dict(optimizer="muon", dtype="bfloat16")}


def train(ranks: int, run: Path, flags: dict, **limits) -> list[int]:
    """Train in forks of this process, which need not import anything. `run` is the run's directory.

    Returns their wait statuses (see `forks.run_forks`). Their output is in RUN.out and RUN.err.
    """
    training = settings.load(machine.arguments(**flags, out_dir=run.parent, name=run.name)[1:], "")

    def work() -> int:
        import train

        return train.main(training)

    return forks.run_forks(ranks, work, run, **limits)


def train_to_the_end(ranks: int, run: Path, flags: dict) -> dict[str, str]:
    """Train to the end. Returns the sha256 of the run's files. Raises RunError if it fails."""
    if any(statuses := train(ranks, run, flags)):
        raise RunError(f"{run.name} on {ranks} ranks with {flags}: {forks.failure(run, statuses)}")
    return machine.digests(run)


@dataclass(frozen=True)
class KillsConfig(machine.Options):
    kills: int = 200
    strategy: Literal[tuple(STRATEGIES)] = "ddp"
    ranks: int = 1
    """Ranks. Under exact, each attempt has a random number of ranks up to this."""
    max_shard_bytes: int = 10**9
    """Largest file of tensors. 20000 splits them over 28 files, which the ranks write together under fsdp."""
    mirror: str = ""
    """URL of an empty store. Every other kill then also loses the disk."""


def kills(config: KillsConfig) -> int:
    """Kill a run hundreds of times, at random instants, and examine what each kill leaves.

    python bench/drill.py kills --kills=125 --strategy=fsdp --ranks=3

    After each kill, every published checkpoint is compared with its manifest, and the run is started again. The last attempt,
    an ordinary `python train.py`, runs to the end. Its files are compared with an undisturbed run's. Writes hard_kills.json, or
    hard_kills_STRATEGY[_sharded]_RANKS.json. The exit status is 0 only if every state was usable and both runs are the same.
    Takes about ten minutes for 200 kills on two cores.
    """
    if min(config.kills, config.ranks) < 1:
        raise UserError("--kills and --ranks must be at least 1")
    forks.prepare_to_fork()
    machine.prepare_tokens(config.tokens)
    from lockstep.checkpoints import checkpoint

    checkpoint.SHARD_BYTES = config.max_shard_bytes  # for the forks; the last attempt and the undisturbed run write whole files
    flags = KILLS | {name: getattr(config, name) for name in ("strategy", "tokens")}
    flags |= {"steps": (CHECKPOINTS_PER_ATTEMPT + 1) * config.kills + 10}
    with machine.workspace() as runs:
        mirror = {"mirror": config.mirror} if config.mirror else {}
        result = kill_again_and_again(config, flags | mirror, runs / "killed") | {"steps": flags["steps"]}
        for name, more in {"killed": mirror, "undisturbed": {}}.items():
            machine.run(config.ranks, **flags, **more, out_dir=runs, name=name)
        result["same"] = compare(runs / "killed", runs / "undisturbed")
    sharded = "_sharded" if config.max_shard_bytes < KillsConfig.max_shard_bytes else ""
    name = "hard_kills" + (f"_{config.strategy}{sharded}_{config.ranks}" if config.ranks > 1 else "") + "_mirror" * bool(mirror)
    given = flags | {"max_shard_bytes": config.max_shard_bytes, "ranks": config.ranks}
    print(machine.write(name, {"flags": given, **result}, config.out))
    return report_kills(result)


def kill_again_and_again(config: KillsConfig, flags: dict, run: Path) -> dict:
    """Start the run and kill it, `kills` times. Returns the findings after each kill."""
    from tqdm import tqdm

    checkpoints, chance, moments, unusable = run / "checkpoints", random.Random(0), Counter(), []
    for number in tqdm(range(1, config.kills + 1), unit="kill", dynamic_ncols=True):
        before = newest_step(checkpoints)
        ranks = chance.randint(1, config.ranks) if config.strategy == "exact" else config.ranks
        statuses = train(ranks, run, flags, limit=120, enough=random_instant(checkpoints, before, chance))
        if any(status != signal.SIGKILL for status in statuses):
            raise RunError(f"attempt {number} ended before its kill: {forks.failure(run, statuses)}")
        moments[killed_while(checkpoints)] += 1
        if problems := examine(checkpoints, 0 if config.mirror else before):
            unusable.append({"kill": number, "problems": problems})
        if config.mirror and number % 2:
            shutil.rmtree(run)
    return {"kills": config.kills, "killed_while": moments, "unusable": unusable, "steps_survived": newest_step(checkpoints)}


def random_instant(checkpoints: Path, before: int, chance: random.Random):
    """A function that returns true from a random instant of an attempt on: while it starts, steps or saves."""
    count = chance.randrange(CHECKPOINTS_PER_ATTEMPT)  # 0: while it starts
    delay, due = chance.random() * (0.1 if count else 0.7), float("inf")

    def is_now() -> bool:
        nonlocal due
        saved, now = newest_step(checkpoints) - before, time.perf_counter()
        due = min(due, now + delay) if saved >= count else due
        return saved >= CHECKPOINTS_PER_ATTEMPT or now > due

    return is_now


def newest_step(checkpoints: Path) -> int:
    """The step in the name of the newest published checkpoint."""
    from lockstep.checkpoints import retention

    return max(map(retention.step_of, retention.published(checkpoints)), default=0)


def killed_while(checkpoints: Path) -> str:
    """What the run was doing to its checkpoints when it was killed, judging by the files."""
    names = os.listdir(checkpoints) if checkpoints.exists() else []
    newest, latest = newest_step(checkpoints), checkpoints / "latest"
    if any(name.startswith(".step-") and not name.endswith(".old.tmp") for name in names):
        return "writing a checkpoint"
    if newest and (not latest.is_symlink() or int(os.readlink(latest)[5:]) < newest):
        return "between publishing and `latest`"
    return "removing an old checkpoint" if any(name.endswith(".old.tmp") for name in names) else "no checkpoint under way"


def examine(checkpoints: Path, step_before: int) -> list[str]:
    """What is unusable in the state that a kill left. An empty list means that no checkpoint is lost."""
    from lockstep.checkpoints import retention

    links = [path for path in (checkpoints / "latest", checkpoints / "best") if path.is_symlink()]
    problems = [
        f"{path.name}: {why}" for path in [*retention.published(checkpoints), *links] if (why := retention.find_damage(path))
    ]
    newest, _ = retention.newest(checkpoints)
    step = retention.step_of(newest) if newest else 0
    if step < step_before:
        problems.append(f"the newest intact checkpoint was of step {step_before} and is now of step {step}")
    return problems


def compare(a: Path, b: Path) -> dict[str, bool]:
    """Whether each file is the same in two runs, bit for bit, ignoring times in the metrics."""
    files = [machine.digests(run) | {"metrics.jsonl": machine.unmeasured(machine.metrics(run))} for run in (a, b)]
    return {name: files[0][name] == files[1].get(name) for name in files[0]}


def report_kills(result: dict) -> int:
    """Print the findings and the verdict. Returns the exit status."""
    for moment, count in Counter(result["killed_while"]).most_common():
        print(f"{count:5d} kills: {moment}")
    for state in result["unusable"]:
        print(f"kill {state['kill']}: {'; '.join(state['problems'])}")
    for file, is_same in result["same"].items():
        print(f"{file}: as in an undisturbed run: {'yes' if is_same else 'NO'}")
    print(f"{result['kills']} kills, {result['steps']} steps: {len(result['unusable'])} unusable states")
    return int(bool(result["unusable"]) or not all(result["same"].values()))


@dataclass(frozen=True)
class ResumeConfig(machine.Options):
    only: str = ""
    """Run only the cases whose name contains this, such as "ddp on 3"."""
    steps: int = 6


def resume(config: ResumeConfig) -> int:
    """Is a run that was stopped and resumed the same as an undisturbed one? On 3, 4, 5 and 8 ranks, under every strategy.

    Trains each case three times: undisturbed, undisturbed again, and stopped halfway and resumed. Two ranks would prove little,
    because a + b and b + a have the same bits. Writes resume.json. The exit status is 0 only if weights and optimizer state are
    equal, bit for bit, in every case.
    """
    machine.prepare_tokens(config.tokens)
    forks.prepare_to_fork()
    cases = [(s, ranks, dict(strategy=s)) for s in STRATEGIES for ranks in (3, 4, 5, 8)]
    cases += [(f"{s}, {name}", 3, dict(flags, strategy=s)) for s in STRATEGIES for name, flags in VARIANTS.items()]
    cases += [(f"ddp, {name}", 3, flags) for name, flags in OF_DDP.items()]
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
    if not rows:
        raise UserError(f"--only={config.only}: no case has this in its name")
    print(machine.write("resume", {"flags": RESUME, "steps": config.steps, "cases": rows}, config.out))
    return report_resume(rows)


def report_resume(rows: list[dict]) -> int:
    """Print a verdict for each case. Returns the exit status."""
    different = [row for row in rows if any(other != row["sha256"][0] for other in row["sha256"])]
    for row in rows:
        weights = ", ".join(each["model.safetensors"][:8] for each in row["sha256"])
        print(f"{row['case']} on {row['ranks']}: {'DIFFERENT' if row in different else 'same'}, weights {weights}", flush=True)
    print(f"{len(rows) - len(different)} of {len(rows)} cases: the same undisturbed, repeated and resumed")
    return int(bool(different))


if __name__ == "__main__":
    machine.choose(__doc__, kills=(KillsConfig, kills), resume=(ResumeConfig, resume))
