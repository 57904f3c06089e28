"""Damage done to runs on purpose, again and again: what is left each time, and does a run end with the bits of another one?

python bench/drill.py kills|resume|corruption|hub|nodes|slurm [--flag=value ...]
"""

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
    recorded once. Writes hard_kills.json, or hard_kills_STRATEGY[_sharded]_RANKS.json. The exit status is 0 only if every state
    was usable and both runs are the same. About ten minutes for 200 kills on two cores.
    """
    if min(config.kills, config.save_every, config.ranks) < 1:
        raise UserError("--kills, --save_every and --ranks must be at least 1")
    machine.prepare_to_fork()
    machine.prepare_tokens(config.tokens)
    mixed, steps = config.strategy == "any", (CHECKPOINTS_PER_ATTEMPT + 1) * config.kills * config.save_every + 10
    flags = KILLS | {name: getattr(config, name) for name in ("save_every", "strategy", "max_shard_bytes", "tokens")}
    flags |= {"steps": steps, "strategy": "ddp" if mixed else config.strategy}  # any: of the attempt that runs to the end
    with machine.workspace() as runs:
        killed, undisturbed = runs / "killed", runs / "undisturbed"
        training = settings.load(machine.arguments(**flags, out_dir=runs, name="killed")[1:], "")
        began = time.monotonic()
        result = kill_again_and_again(config, training, killed)
        result |= {"seconds": round(time.monotonic() - began, 1), "steps": steps}
        machine.run(config.ranks, **flags, out_dir=runs, name="killed")
        if mixed:
            recorded = [row["step"] for row in machine.metrics(killed) if "loss" in row]
            result["same"] = {"metrics.jsonl": recorded == [*range(1, steps + 1)]}
        else:
            machine.run(config.ranks, **flags, out_dir=runs, name="undisturbed")
            result["same"] = compare(killed, undisturbed)
    sharded = "_sharded" if config.max_shard_bytes < KillsConfig.max_shard_bytes else ""
    name = "hard_kills" + (f"_{config.strategy}{sharded}_{config.ranks}" if config.ranks > 1 else "")
    flags |= {"ranks": config.ranks, "seed": config.seed}
    print(machine.write(name, {"flags": flags, **result}, Path(config.out)))
    return report_kills(result)


def kill_again_and_again(config: KillsConfig, training: Config, directory: Path) -> dict:
    """Start the run and kill it, `kills` times. Returns what was found after each kill."""
    from tqdm import tqdm

    checkpoints, output = directory / "checkpoints", directory.with_suffix(".attempt")
    chance, moments, unusable, damaged = random.Random(config.seed), Counter(), [], []
    for number in tqdm(range(1, config.kills + 1), unit="kill", dynamic_ncols=True):
        before, attempt, ranks = newest_intact_step(checkpoints), training, config.ranks
        if config.strategy in ("exact", "any"):
            ranks = chance.randint(1, ranks)
        if config.strategy == "any":
            attempt = vary(training, chance)
        instant = random_instant(checkpoints, config.save_every, before, chance)
        statuses = train_in_forks(attempt, ranks, output, limit=120, enough=instant)
        if any(status != signal.SIGKILL for status in statuses):
            raise RunError(f"attempt {number} ended before its kill: {machine.failure(output, statuses)}")
        moments[killed_while(checkpoints)] += 1
        if problems := examine(checkpoints, before, damaged):
            unusable.append({"kill": number, "problems": problems})
        if chance.random() < config.damage:
            damaged += damage(checkpoints, chance)
    found = {"kills": config.kills, "killed_while": dict(moments), "unusable": unusable, "damaged": len(damaged)}
    return found | {"steps_survived": newest_step(checkpoints)}


def random_instant(checkpoints: Path, save_every: int, before: int, chance: random.Random):
    """A function that is true from a random instant on, while an attempt starts at step `before`, or in its steps or saves."""
    count = chance.randrange(CHECKPOINTS_PER_ATTEMPT)  # 0: while it starts
    delay, since = chance.random() * (0.1 if count else 0.7), None

    def is_now() -> bool:
        nonlocal since
        saved = (newest_step(checkpoints) - before) // save_every
        if since is None and saved >= count:
            since = time.perf_counter()
        return saved >= CHECKPOINTS_PER_ATTEMPT or (since is not None and time.perf_counter() - since > delay)

    return is_now


def newest_step(checkpoints: Path) -> int:
    """The step of the newest published checkpoint, by its name."""
    from checkpoints import retention

    return max(map(retention.step_of, retention.published(checkpoints)), default=0)


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

    links = [path for path in (checkpoints / "latest", checkpoints / "best") if path.is_symlink()]
    whole = [path for path in retention.published(checkpoints) if path.name not in damaged]
    whole += [link for link in links if os.readlink(link) not in damaged]
    problems = [f"{path.name}: {why}" for path in whole if (why := retention.fault(path))]
    step = newest_intact_step(checkpoints)
    if step < step_before:
        problems.append(f"the newest intact checkpoint was of step {step_before} and is now of step {step}")
    return problems


def vary(training: Config, chance: random.Random) -> Config:
    """Another strategy and way of saving for an attempt."""
    varied = dict(strategy=chance.choice(STRATEGIES), keep_last=chance.randint(1, 3), keep_best=chance.randint(0, 2))
    varied |= dict(async_save=chance.random() < 0.5, max_shard_bytes=chance.choice((20000, 10**9)))
    return settings.replace(training, **varied, eval_every=chance.choice((2, 5, 100)))


def damage(checkpoints: Path, chance: random.Random) -> list[str]:
    """Flip a bit of a random file of a checkpoint, or cut it, if two are intact. Returns the checkpoint's name."""
    from checkpoints import retention

    intact = [path for path in retention.published(checkpoints) if retention.fault(path) is None]
    if len(intact) < 2:
        return []
    directory = chance.choice(intact)
    path = chance.choice(sorted(directory.iterdir()))
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    path.write_bytes(chance.choice((content, content[:place])))
    return [directory.name]


def compare(a: Path, b: Path) -> dict[str, bool]:
    """Whether each file is the same in two runs, bit for bit (the metrics without times)."""
    other = machine.digests(b)
    same = {file: digest == other[file] for file, digest in machine.digests(a).items()}
    records = [machine.unmeasured(machine.metrics(run)) for run in (a, b)]
    return {**same, "metrics.jsonl": records[0] == records[1]}


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
    machine.prepare_to_fork()
    rows = []
    with machine.workspace() as runs:
        for name, ranks, flags in resume_cases():
            if config.only not in f"{name} on {ranks}":
                continue

            def train(kind: str, steps: int, flags=flags, ranks=ranks) -> dict[str, str]:
                run = runs / f"{len(rows)}-{kind}"
                own = RESUME | dict(flags, tokens=config.tokens, steps=steps, name=run.name, out_dir=runs)
                statuses = train_in_forks(settings.load(machine.arguments(**own)[1:], ""), ranks, run)
                if any(statuses):
                    raise RunError(f"{run.name} on {ranks} ranks with {flags}: {machine.failure(run, statuses)}")
                return machine.digests(run)

            train("resumed", config.steps // 2)
            digests = [train(kind, config.steps) for kind in ("undisturbed", "repeated", "resumed")]
            rows.append({"case": name, "ranks": ranks, "sha256": digests})
            print(f"{name} on {ranks} ranks: done", flush=True)
    print(machine.write("resume", {"flags": RESUME, "steps": config.steps, "cases": rows}, Path(config.out)))
    return report_resume(rows)


def resume_cases() -> list[tuple[str, int, dict]]:
    """Every case: its name, its number of ranks, and its flags."""
    rows = [(s, ranks, dict(strategy=s)) for s in STRATEGIES for ranks in (3, 4, 5, 8)]
    more = {"bfloat16": dict(dtype="bfloat16"), "several buckets": SEVERAL_BUCKETS, "compiled": dict(compile="on")}
    rows += [(f"{s}, {name}", 3, dict(flags, strategy=s)) for s in STRATEGIES for name, flags in more.items()]
    bf16, muon = dict(grad_compression="bf16"), dict(optimizer="muon", dtype="bfloat16")
    rows.append(("ddp, --grad_compression=bf16", 3, bf16))
    rows.append(("ddp, several buckets, compiled", 3, SEVERAL_BUCKETS | dict(compile="on")))
    rows.append(("ddp, several buckets, --grad_compression=bf16", 3, SEVERAL_BUCKETS | bf16))
    rows.append(("ddp, several buckets, Muon, bfloat16", 3, SEVERAL_BUCKETS | muon))
    return rows


def report_resume(rows: list[dict]) -> int:
    """Print a verdict for each case. Returns the exit status."""
    different = [row for row in rows if any(other != row["sha256"][0] for other in row["sha256"])]
    for row in rows:
        weights = ", ".join(each["model.safetensors"][:8] for each in row["sha256"])
        print(f"{row['case']} on {row['ranks']}: {'DIFFERENT' if row in different else 'same'}, weights {weights}", flush=True)
    print(f"{len(rows) - len(different)} of {len(rows)} cases: the same undisturbed, repeated and resumed")
    return int(bool(different))


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
