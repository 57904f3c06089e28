"""Damage done to runs on purpose, again and again: what is left each time, and does a run end with the bits of another one?

python bench/drill.py kills|resume|corruption|hub|nodes|slurm [--flag=value ...]
"""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import machine  # puts the project's folder on the path

# isort: split
import corruption
import hosts
import hub_drill
import settings
from common import cli
from common.errors import RunError, UserError
from settings import Config, ParallelConfig

STRATEGIES = get_args(cli.flat_fields(ParallelConfig)["strategy"].type)
CHECKPOINTS_PER_ATTEMPT = 4  # at most; this limits the steps of the whole run
DURING_START = 0.2  # share of the kills that fall before the first checkpoint of their attempt
# A step of a tiny model is shorter than a save, so that many kills fall into one. 6 micro-batches, which 1, 2, 3 and 6 ranks
# share equally, and an optimizer that every strategy supports.
KILLS = machine.TINY | dict(dropout=0.1, tokens_per_update=192, optimizer="adamw", lr=1e-3, eval_every=100, eval_tokens=2048)
# 120 micro-batches, which 3, 4, 5 and 8 ranks can share equally.
RESUME = machine.TINY_RUN | dict(tokens_per_update=16 * 120, micro_batch_size=1)
# RESUME has all gradients in DDP's first bucket of 1 MB; 9 million parameters fill buckets of 1, 25 and 10 MB.
SEVERAL_BUCKETS = dict(architecture="llama", n_layer=10, n_embd=256, vocab_size=4608, micro_batch_size=5)


def train_in_forks(training: Config, ranks: int, output: Path, **limits) -> list[int]:
    """Train in forks of this process, which need not import anything. Returns their wait statuses. See `machine.run_forks`."""
    import train

    return machine.run_forks(ranks, lambda: train.main(training), output, **limits)


# ---------------------------------------------------------------------------------------------------------------------
# Kills


@dataclass(frozen=True)
class KillsConfig(machine.Options):
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


def kills(config: KillsConfig) -> int:
    """Kill a run hundreds of times, at random instants, and examine what is left each time.

    python bench/drill.py kills --kills=125 --strategy=fsdp --ranks=3
    python bench/drill.py kills --kills=50 --strategy=any --ranks=3 --damage=0.1 --seed=1

    After each kill every published checkpoint is compared with its manifest, and the run is started again. The last attempt,
    an ordinary `python train.py`, runs to the end, and its files are compared with those of an undisturbed run. With
    --strategy=any each attempt has another strategy, number of ranks, retention and size of files; then every step must be
    recorded once, and pieces with different seeds add up in one file. Writes hard_kills.json, or
    hard_kills_STRATEGY[_sharded]_RANKS.json. The exit status is 0 only if every state was usable and both runs are the same.
    About ten minutes for 200 kills on two cores.
    """
    if min(config.kills, config.save_every, config.ranks) < 1:
        raise UserError("--kills, --save_every and --ranks must be at least 1")
    machine.prepare_to_fork()
    machine.prepare_tokens(config.tokens)
    steps = (CHECKPOINTS_PER_ATTEMPT + 1) * config.kills * config.save_every + 10
    names = ("save_every", "strategy", "async_save", "keep_last", "max_shard_bytes", "tokens")
    own, mixed = {name: getattr(config, name) for name in names}, config.strategy == "any"
    if mixed:
        own |= {"strategy": "ddp"}  # of the attempt that runs to the end
    with machine.workspace() as runs:
        flags = dict(KILLS, **own, steps=steps, out_dir=runs)
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
    sharded = "_sharded" if config.max_shard_bytes < KillsConfig.max_shard_bytes else ""
    name = "hard_kills" + (f"_{config.strategy}{sharded}_{config.ranks}" if config.ranks > 1 else "")
    result = {"flags": {**KILLS, **own, "ranks": config.ranks}, **result}
    if mixed:
        result = added(Path(config.out, f"{name}.json"), result | {"seeds": [config.seed], "damaged": result.get("damaged", 0)})
    print(machine.write(name, result, Path(config.out)))
    return report_kills(result)


def kill_again_and_again(config: KillsConfig, training: Config, directory: Path) -> dict:
    """Start the run and kill it, `kills` times. Returns what was found after each kill."""
    from tqdm import tqdm

    checkpoints, output = directory / "checkpoints", directory.with_suffix(".attempt")
    chance, moments, unusable, damaged = random.Random(config.seed), Counter(), [], []
    for number in tqdm(range(1, config.kills + 1), unit="kill", dynamic_ncols=True):
        before, attempt = newest_intact_step(checkpoints), training
        ranks = chance.randint(1, config.ranks) if config.strategy == "exact" else config.ranks
        if config.strategy == "any":
            attempt, ranks = vary(training, config.ranks, chance)
        instant = random_instant(checkpoints, config.save_every, before, chance)
        statuses = train_in_forks(attempt, ranks, output, limit=120, enough=instant)
        if any(status != signal.SIGKILL for status in statuses):
            raise RunError(f"attempt {number} ended before its kill: {machine.failure(output, statuses)}")
        moments[killed_while(checkpoints)] += 1
        if problems := examine(checkpoints, before, damaged):
            unusable.append({"kill": number, "problems": problems})
        if chance.random() < config.damage and (name := damage(checkpoints, chance)):
            damaged.append(name)
    found = {"killed_while": dict(moments), "unusable": unusable, "steps_survived": newest_step(checkpoints)}
    return {"kills": config.kills, **found} | ({"damaged": len(damaged)} if config.damage else {})


def random_instant(checkpoints: Path, save_every: int, before: int, chance: random.Random):
    """A function that is true from a random instant on: while an attempt starts at step `before`, or in its steps or saves."""
    began, count = time.perf_counter(), 1 if chance.random() < DURING_START else CHECKPOINTS_PER_ATTEMPT
    first = 0 if count == 1 else chance.randint(1, CHECKPOINTS_PER_ATTEMPT - 1)
    delay, since = chance.random() * (0.1 if first else 0.7), None if first else began

    def is_now() -> bool:
        nonlocal since
        newest = newest_step(checkpoints)
        if since is None and newest >= before + first * save_every:
            since = time.perf_counter()
        return newest >= before + count * save_every or (since is not None and time.perf_counter() - since > delay)

    return is_now


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
    varied = dict(strategy=chance.choice(STRATEGIES), keep_last=chance.randint(1, 3), keep_best=chance.randint(0, 2))
    varied |= dict(async_save=chance.random() < 0.5, max_shard_bytes=chance.choice((20000, 10**9)))
    varied |= dict(eval_every=chance.choice((2, 5, 100)))
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
        raise UserError(f"{path} is of other flags or has this --seed; choose another one, or another --out")
    for key in ("seeds", "kills", "damaged", "unusable", "seconds", "steps"):
        result[key] = before.get(key, type(result[key])()) + result[key]
    result["killed_while"] = dict(Counter(before.get("killed_while", {})) + Counter(result["killed_while"]))
    result["same"] = {file: same and before.get("same", {}).get(file, True) for file, same in result["same"].items()}
    return result


def report_kills(result: dict) -> int:
    """Print what was found and the verdict. Returns the exit status."""
    kills, unusable, same = result["kills"], result["unusable"], result["same"]
    moments = Counter(result["killed_while"]).most_common()
    print(machine.table(["killed while", "kills", ""], [[name, count, f"{count / kills:.0%}"] for name, count in moments]))
    for state in unusable:
        print(f"kill {state['kill']}: {'; '.join(state['problems'])}")
    for file, is_same in same.items():
        compared = "has every step once" if "seeds" in result else f"after {kills} kills and undisturbed: the same"
        print(f"{file}: {compared}: {'yes' if is_same else 'NO'}")
    print(f"{kills} kills in {result['seconds']:.0f} s, {result['steps']} steps: {len(unusable)} unusable states")
    return int(bool(unusable) or not all(same.values()))


# ---------------------------------------------------------------------------------------------------------------------
# Resuming


@dataclass(frozen=True)
class ResumeConfig(machine.Options):
    ranks: str = "3,4,5,8"
    strategies: str = ",".join(STRATEGIES)
    steps: int = 6
    more: bool = True
    """Also try bfloat16, compiled, compressed gradients and a model of several buckets, on three ranks."""


def resume(config: ResumeConfig) -> int:
    """Is a run that was stopped and resumed the same as an undisturbed one? On 3, 4, 5 and 8 ranks, under every strategy.

    Trains each case three times: undisturbed, undisturbed again, and stopped halfway and resumed. Two ranks would show little,
    because a + b and b + a have the same bits. Writes resume.json. The exit status is 0 only if weights and optimizer state are
    the same, bit for bit, in every case.
    """
    from tqdm import tqdm

    machine.prepare_tokens(config.tokens)
    machine.prepare_to_fork()
    began, rows = time.monotonic(), []
    with machine.workspace() as runs:
        for number, (name, ranks, flags) in enumerate(tqdm(resume_cases(config), unit="case", dynamic_ncols=True)):

            def train(kind: str, steps: int, flags=flags, ranks=ranks, number=number) -> dict[str, str]:
                run = f"{number}-{kind}"
                own = dict(RESUME, tokens=config.tokens, steps=steps, name=run, out_dir=runs) | flags
                statuses = train_in_forks(settings.load(machine.arguments(**own)[1:], ""), ranks, runs / run)
                if any(statuses):
                    raise RunError(f"{run} on {ranks} ranks with {flags}: {machine.failure(runs / run, statuses)}")
                return machine.digests(runs / run)

            train("resumed", config.steps // 2)
            digests = [train(kind, config.steps) for kind in ("undisturbed", "repeated", "resumed")]
            rows.append({"case": name, "ranks": ranks, "sha256": digests})
    result = {"flags": RESUME, "steps": config.steps, "seconds": round(time.monotonic() - began), "cases": rows}
    print(machine.write("resume", result, Path(config.out)))
    return report_resume(rows)


def resume_cases(config: ResumeConfig) -> list[tuple[str, int, dict]]:
    """Every case: its name, its number of ranks, and its flags."""
    strategies, large = config.strategies.split(","), SEVERAL_BUCKETS
    rows = [(s, int(ranks), dict(strategy=s)) for s in strategies for ranks in config.ranks.split(",")]
    if not config.more:
        return rows
    for s in strategies:
        rows.append((f"{s}, bfloat16", 3, dict(strategy=s, dtype="bfloat16")))
        rows.append((f"{s}, several buckets", 3, dict(large, strategy=s)))
        rows.append((f"{s}, compiled", 3, dict(strategy=s, compile="on")))
    rows.append(("ddp, --grad_compression=bf16", 3, dict(grad_compression="bf16")))
    rows.append(("ddp, several buckets, compiled", 3, dict(large, compile="on")))
    rows.append(("ddp, several buckets, --grad_compression=bf16", 3, dict(large, grad_compression="bf16")))
    rows.append(("ddp, several buckets, Muon, bfloat16", 3, dict(large, optimizer="muon", dtype="bfloat16")))
    return rows


def report_resume(rows: list[dict]) -> int:
    """Print the table and a verdict for each case. Returns the exit status."""
    lines, status = [], 0
    for row in rows:
        same = all(other == row["sha256"][0] for other in row["sha256"])
        weights = [each["model.safetensors"][:8] for each in row["sha256"]]
        lines.append([row["case"], row["ranks"], *weights, "same" if same else "DIFFERENT"])
        status |= int(not same)
    print(machine.table(["case", "ranks", "undisturbed", "repeated", "resumed", ""], lines))
    return status


if __name__ == "__main__":
    machine.choose(
        __doc__,
        kills=(KillsConfig, kills),
        resume=(ResumeConfig, resume),
        corruption=(corruption.CorruptionConfig, corruption.main),
        hub=(hub_drill.HubDrillConfig, hub_drill.main),
        nodes=(hosts.NodesConfig, hosts.nodes),
        slurm=(hosts.SlurmConfig, hosts.slurm),
    )
