"""Kill a run hundreds of times, at random instants, and examine what is left each time.

python bench/hard_kills.py --kills=200 --save_every=1
python bench/hard_kills.py --kills=125 --strategy=fsdp --ranks=3
python bench/hard_kills.py --kills=300 --strategy=fsdp --ranks=3 --max_shard_bytes=20000
python bench/hard_kills.py --kills=50 --strategy=any --ranks=3 --damage=0.1 --seed=1

After each kill the run is started again. Each attempt is a fork of this process (or --ranks=N of them), which has imported
torch already, so an attempt is cheap. SIGKILL to its process group ends it at a random instant of its start, its steps or its
saves. Then every published checkpoint is compared with its manifest. The last attempt, an ordinary `python train.py`, runs to
the end, and its files are compared with those of an undisturbed run. The exit status is 0 only if every state was usable and
both runs are the same, bit for bit. About ten minutes for 200 kills on two cores.

With --strategy=any each attempt has another strategy, number of ranks, retention and size of files. Then the end is not
compared with another run. Instead every step must be recorded once, and pieces with different seeds add up in one file.
--damage changes a random file of a checkpoint after that share of the kills; the run must continue from the newest intact one.
"""

import functools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import cli, errors
from common.errors import RunError
from settings import Config, ParallelConfig

STRATEGIES = get_args(cli.flat_fields(ParallelConfig)["strategy"].type)
# A step of a tiny model is shorter than a save, so that many kills fall into one.
FLAGS = machine.TINY | dict(
    dropout=0.1,
    tokens_per_update=192,  # 6 micro-batches, which 1, 2, 3 and 6 ranks share equally
    optimizer="adamw",  # which every strategy supports
    lr=1e-3,
    eval_every=100,
    eval_tokens=2048,
)
CHECKPOINTS_PER_ATTEMPT = 4  # at most; this limits the steps of the whole run
DURING_START = 0.2  # share of the kills that fall before the first checkpoint of their attempt


@dataclass(frozen=True)
class HardKillsConfig:
    kills: int = 200
    save_every: int = 1
    strategy: Literal[(*STRATEGIES, "any")] = "ddp"
    ranks: int = 1
    """Under exact and any the most ranks: each attempt has a random number of them."""
    damage: float = 0.0
    """Share of the kills after which a random file of a checkpoint is damaged, if another one is intact."""
    async_save: bool = True
    keep_last: int = 2
    max_shard_bytes: int = 10**9
    """With 20000 the tensors are in 28 files, which the ranks write together under fsdp."""
    seed: int = 0
    """Seeds the instants of the kills."""
    tokens: str = "tokens/python"
    """Dataset; the embedded corpus is prepared if it is not there."""
    out: str = str(machine.RESULTS)
    """Directory for hard_kills.json, or hard_kills_STRATEGY[_sharded]_RANKS.json."""


def has_exited(pid: int) -> bool:
    """Whether a child process has ended. It can still be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def newest_step(checkpoints: Path) -> int:
    """The step of the newest published checkpoint, by its name."""
    from checkpoints import retention

    names = os.listdir(checkpoints) if checkpoints.exists() else []
    return max((int(match[1]) for match in map(retention.NAME.fullmatch, names) if match), default=0)


def newest_intact_step(checkpoints: Path) -> int:
    """The step of the newest intact checkpoint."""
    from checkpoints import retention

    newest, _ = retention.newest(checkpoints)
    return retention.step_of(newest) if newest else 0


def wait_for_instant(checkpoints: Path, save_every: int, before: int, chance: random.Random, ended) -> None:
    """Return at a random instant: while an attempt starts at step `before`, or during one of its first steps and saves."""

    def until(condition, seconds):
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline and not condition() and not ended():
            time.sleep(0.0005)

    def published(count):
        return lambda: newest_step(checkpoints) >= before + count * save_every

    if chance.random() < DURING_START:
        until(published(1), 0.7 * chance.random())
    else:
        until(published(chance.randint(1, CHECKPOINTS_PER_ATTEMPT - 1)), 120)
        until(published(CHECKPOINTS_PER_ATTEMPT), 0.1 * chance.random())


def killed_while(checkpoints: Path) -> str:
    """What the run was doing to its checkpoints when it was killed, judged by what it has left."""
    names = os.listdir(checkpoints) if checkpoints.exists() else []
    newest, latest = newest_step(checkpoints), checkpoints / "latest"
    if any(name.startswith(".step-") and not name.endswith(".old.tmp") for name in names):
        return "writing a checkpoint"
    if newest and (not latest.is_symlink() or int(os.readlink(latest)[5:]) < newest):
        return "between publishing and `latest`"
    return "removing an old checkpoint" if any(name.endswith(".old.tmp") for name in names) else "no checkpoint under way"


def examine(checkpoints: Path, step_before: int, damaged: Collection[str] = ()) -> list[str]:
    """What is unusable in the state that a kill has left. An empty list means that the run loses no checkpoint.

    damaged: the names of checkpoints that were damaged on purpose.
    """
    from checkpoints import retention

    whole = [path for path in retention.published(checkpoints) if path.name not in damaged]
    problems = [f"{path.name}: {why}" for path in whole if (why := retention.fault(path))]
    step = newest_intact_step(checkpoints)
    if step < step_before:
        problems.append(f"the newest intact checkpoint was of step {step_before} and is now of step {step}")
    links = [path for path in (checkpoints / "latest", checkpoints / "best") if path.is_symlink()]
    links = [link for link in links if os.readlink(link) not in damaged]
    return problems + [f"{link.name}: {why}" for link in links if (why := retention.fault(link))]


def vary(training: Config, ranks: int, chance: random.Random) -> tuple[Config, int]:
    """Another strategy, number of ranks and way of saving for an attempt."""
    varied = dict(
        strategy=chance.choice(STRATEGIES),
        keep_last=chance.randint(1, 3),
        keep_best=chance.randint(0, 2),
        async_save=chance.random() < 0.5,
        max_shard_bytes=chance.choice((20000, 10**9)),
        eval_every=chance.choice((2, 5, 100)),
    )
    return settings.replace(training, **varied), chance.randint(1, ranks)


def damage(checkpoints: Path, chance: random.Random) -> str | None:
    """Flip a byte of a random file of a checkpoint, cut it, or remove it, if two are intact. Returns the checkpoint's name."""
    from checkpoints import retention

    intact = [path for path in retention.published(checkpoints) if retention.fault(path) is None]
    if len(intact) < 2:
        return None
    directory = chance.choice(intact)
    path = chance.choice(sorted(directory.iterdir()))
    content, how = bytearray(path.read_bytes()), chance.choice(("flip", "cut", "remove"))
    if how == "remove":
        path.unlink()
    else:
        place = chance.randrange(len(content))
        content[place] ^= 1 << chance.randrange(8)
        path.write_bytes(content if how == "flip" else content[:place])
    return directory.name


def kill_again_and_again(config: HardKillsConfig, training: Config, directory: Path) -> dict:
    """Start the run and kill it, `kills` times. Returns what was found after each kill."""
    from tqdm import tqdm

    checkpoints, errors = directory / "checkpoints", directory.with_suffix(".err")
    chance, moments, unusable, damaged = random.Random(config.seed), Counter(), [], []
    for number in tqdm(range(1, config.kills + 1), unit="kill", dynamic_ncols=True):
        before, attempt = newest_intact_step(checkpoints), training
        ranks = chance.randint(1, config.ranks) if config.strategy == "exact" else config.ranks
        if config.strategy == "any":
            attempt, ranks = vary(training, config.ranks, chance)
        pids = machine.fork(attempt, ranks, errors)
        try:
            wait_for_instant(checkpoints, config.save_every, before, chance, functools.partial(has_exited, pids[0]))
        finally:
            statuses = machine.end(pids)
        if any(status != signal.SIGKILL for status in statuses):
            output = errors.read_text() if errors.exists() else ""
            raise RunError(f"attempt {number} ended before its kill, with wait statuses {statuses}\n{output}")
        moments[killed_while(checkpoints)] += 1
        if problems := examine(checkpoints, before, damaged):
            unusable.append({"kill": number, "problems": problems})
        if chance.random() < config.damage and (name := damage(checkpoints, chance)):
            damaged.append(name)
    found = {"killed_while": dict(moments), "unusable": unusable, "steps_survived": newest_step(checkpoints)}
    found |= {"damaged": len(damaged)} if config.damage else {}
    return {"kills": config.kills, **found}


def compare(a: Path, b: Path) -> dict[str, bool]:
    """Whether each file is the same in two runs, bit for bit (the metrics without times)."""
    other = machine.digests(b)
    same = {file: digest == other[file] for file, digest in machine.digests(a).items()}
    records = [machine.unmeasured(machine.metrics(run)) for run in (a, b)]
    return {**same, "metrics.jsonl": records[0] == records[1]}


def each_step_once(run: Path, steps: int) -> dict[str, bool]:
    """Whether the metrics of a complete run have every step once."""
    return {"metrics.jsonl": [row["step"] for row in machine.metrics(run) if "loss" in row] == [*range(1, steps + 1)]}


def added(path: Path, result: dict) -> dict:
    """`result` and what pieces with other seeds have found, by their file."""
    before = json.loads(path.read_text()) if path.exists() else {"seeds": [], "flags": result["flags"]}
    if before["flags"] != result["flags"] or result["seeds"][0] in before["seeds"]:
        raise errors.UserError(f"{path} is of other flags or has this --seed; choose another one, or another --out")
    for key in ("seeds", "kills", "damaged", "unusable", "seconds", "steps"):
        result[key] = before.get(key, type(result[key])()) + result[key]
    result["killed_while"] = dict(Counter(before.get("killed_while", {})) + Counter(result["killed_while"]))
    result["same"] = {file: same and before.get("same", {}).get(file, True) for file, same in result["same"].items()}
    return result


def report(result: dict) -> int:
    """Print what was found and the verdict. Returns the exit status."""
    kills, unusable, same = result["kills"], result["unusable"], result["same"]
    moments = Counter(result["killed_while"]).most_common()
    rows = [[moment, count, f"{count / kills:.0%}"] for moment, count in moments]
    print(machine.table(["killed while", "kills", ""], rows))
    for state in unusable:
        print(f"kill {state['kill']}: {'; '.join(state['problems'])}")
    for file, is_same in same.items():
        compared = "has every step once" if "seeds" in result else f"after {kills} kills and undisturbed: the same"
        print(f"{file}: {compared}: {'yes' if is_same else 'NO'}")
    print(f"{kills} kills in {result['seconds']:.0f} s, {result['steps']} steps: {len(unusable)} unusable states")
    return int(bool(unusable) or not all(same.values()))


def main(config: HardKillsConfig) -> int:
    """The command."""
    if min(config.kills, config.save_every, config.ranks) < 1:
        raise errors.UserError("--kills, --save_every and --ranks must be at least 1")
    machine.prepare_to_fork()
    machine.prepare_tokens(config.tokens)
    steps = (CHECKPOINTS_PER_ATTEMPT + 1) * config.kills * config.save_every + 10
    names = ("save_every", "strategy", "async_save", "keep_last", "max_shard_bytes", "tokens")
    own, mixed = {name: getattr(config, name) for name in names}, config.strategy == "any"
    if mixed:
        own |= {"strategy": "ddp"}  # of the attempt that runs to the end
    with machine.workspace() as runs:
        flags = dict(FLAGS, **own, steps=steps, out_dir=runs)
        killed, undisturbed = runs / "killed", runs / "undisturbed"
        training = settings.load(machine.arguments(name="killed", **flags)[1:], "")
        began = time.monotonic()
        result = kill_again_and_again(config, training, killed)
        seconds = time.monotonic() - began
        machine.run(config.ranks, name="killed", **flags)
        if not mixed:
            machine.run(config.ranks, name="undisturbed", **flags)
        same = each_step_once(killed, steps) if mixed else compare(killed, undisturbed)
        result |= {"seconds": round(seconds, 1), "steps": steps, "same": same}
    sharded = "_sharded" if config.max_shard_bytes < HardKillsConfig.max_shard_bytes else ""
    name = "hard_kills" + (f"_{config.strategy}{sharded}_{config.ranks}" if config.ranks > 1 else "")
    result = {"flags": {**FLAGS, **own, "ranks": config.ranks}, **result}
    if mixed:
        result = added(Path(config.out, f"{name}.json"), result | {"seeds": [config.seed], "damaged": result.get("damaged", 0)})
    print(machine.write(name, result, Path(config.out)))
    return report(result)


if __name__ == "__main__":
    with errors.user_errors():
        sys.exit(main(cli.parse(HardKillsConfig, sys.argv[1:], __doc__)))
