"""Is a dataset from the hub the same whatever happens on the way, and what does it cost? `python bench/hub_drill.py`

Serves parquet files on loopback by the hub's protocol, as the tests do. Makes a dataset of them with the real client four
times: from local copies of the files, from the hub without trouble, killed three times on a server that fails one request in
five, and in three parts that are joined. Prints the time, the peak memory of all processes and the peak size of the downloads.
The exit status is 0 only if all four have the same bytes. About a minute on two cores.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

import machine
from common import cli, errors
from common.errors import RunError
from common.files import sha256
from hub_server import HubServer
from prepare import family, make_text, memory_mb

REPOSITORY = "owner/name"
FAULTS = ("drop", "truncate", "corrupt", 429, 500, 503)


@dataclass(frozen=True)
class HubDrillConfig:
    files: int = 12
    megabytes: int = 60
    """Text in each file."""
    kills: int = 3
    parts: int = 3
    seed: int = 0
    tokens: str = "tokens/python"
    """Dataset with the tokenizer to use; the embedded corpus is prepared if it is not there."""
    out: str = str(machine.RESULTS)
    """Directory for hub_drill.json."""


@dataclass
class Cost:
    """What a preparation takes, in one or several starts."""

    seconds: float = 0.0
    memory_mb: float = 0.0  # peak of all processes; shared pages count once
    downloads_mb: float = 0.0  # peak
    starts: int = 0


def prepare(cost: Cost, server: HubServer, folder: Path, *arguments: str, kill_at: int = 0) -> None:
    """Run prepare_data.py to its end, or kill it when it has `kill_at` shards, and add to `cost`. Raises RunError."""
    out = next(Path(a.removeprefix("--out=")) for a in arguments if a.startswith("--out="))
    environment = machine.environment(HF_ENDPOINT=server.url(), HF_HOME=str(folder / "home"))
    began, log = time.perf_counter(), folder / "output"
    with open(log, "w") as output:
        command = [sys.executable, "prepare_data.py", *arguments]
        process = subprocess.Popen(command, cwd=machine.ROOT, env=environment, stdout=output, stderr=output)
        while process.poll() is None:
            cost.memory_mb = max(cost.memory_mb, sum(map(memory_mb, family(process.pid))))
            cost.downloads_mb = max(cost.downloads_mb, downloads_mb(out))
            if kill_at and len(list(out.glob("*.bin"))) >= kill_at:
                machine.kill(process)
                break
            time.sleep(0.05)
    cost.seconds += time.perf_counter() - began
    cost.starts += 1
    if bool(process.wait()) != bool(kill_at):
        raise RunError(f"prepare_data.py {' '.join(arguments)} ended with {process.returncode}:\n{log.read_text()[-2000:]}")


def downloads_mb(out: Path) -> float:
    """The size of the files under any `downloads` in a directory where files come and go."""
    total = 0
    for folder, _, names in os.walk(out):
        for path in (Path(folder) / name for name in names if "downloads" in Path(folder).parts):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
    return total / 1e6


def content(directory: Path) -> dict[str, str]:
    """The sha256 of each file of a dataset; of dataset.json without where the text came from."""
    digests = {path.name: sha256(path) for path in directory.iterdir() if path.is_file() and path.name != "dataset.json"}
    metadata = json.loads((directory / "dataset.json").read_text())
    return digests | {"dataset.json": json.dumps(metadata | {"source": None})}


def main(config: HubDrillConfig) -> int:
    """The command."""
    machine.prepare_tokens(config.tokens)
    server, chance = HubServer(), random.Random(config.seed)
    with machine.workspace() as folder:
        copies = folder / "copies" / "data"
        copies.mkdir(parents=True)
        size = sum(make_text(copies / f"{i:03d}.parquet", config.megabytes, seed=i) for i in range(config.files))
        server.commit_files(REPOSITORY, {f"data/{p.name}": p.read_bytes() for p in sorted(copies.iterdir())})
        address, tokenizer = f"hf://datasets/{REPOSITORY}/data", machine.ROOT / config.tokens / "tokenizer.json"
        common = [f"--tokenizer={tokenizer}", "--shard_tokens=2000000"]
        costs = {name: Cost() for name in ("local files", "hub", "hub, killed and failing", "hub, in parts and joined")}
        local, calm, storm, joined = costs.values()
        outs = [folder / f"out{i}" for i in range(4)]
        prepare(local, server, folder, str(copies), f"--out={outs[0]}", *common)
        prepare(calm, server, folder, address, f"--out={outs[1]}", *common)
        shards, requests = len(list(outs[1].glob("*.bin"))), len(server.requests)
        server.misbehave = lambda number, method, path: chance.choice(FAULTS) if chance.random() < 0.2 else None
        for kill in range(1, config.kills + 1):
            at = kill * shards // (config.kills + 1)
            prepare(storm, server, folder, address, f"--out={outs[2]}", *common, kill_at=at)
        prepare(storm, server, folder, address, f"--out={outs[2]}", *common)
        server.misbehave = lambda number, method, path: None
        for part in range(1, config.parts + 1):
            prepare(joined, server, folder, address, f"--out={outs[3]}", f"--part={part}/{config.parts}", *common)
        prepare(joined, server, folder, f"--out={outs[3]}", "--join")
        same = [content(out) == content(outs[0]) for out in outs]
    server.close()
    result = {
        "text_mb": round(size / 1e6),
        "files": config.files,
        "shards": shards,
        "requests_undisturbed": requests,
        "preparations": {name: vars(cost) | {"same_bytes": s} for (name, cost), s in zip(costs.items(), same, strict=True)},
    }
    print(machine.write("hub_drill", result, Path(config.out)))
    rows = [
        [name, f"{c.seconds:.1f}", c.starts, f"{c.memory_mb:.0f}", f"{c.downloads_mb:.0f}", "same" if s else "DIFFERENT"]
        for (name, c), s in zip(costs.items(), same, strict=True)
    ]
    print(f"{size / 1e6:.0f} MB of text in {config.files} files, {shards} shards")
    print(machine.table(["preparation", "seconds", "starts", "peak MB", "downloads MB", "bytes"], rows))
    return int(not all(same))


if __name__ == "__main__":
    with errors.user_errors():
        sys.exit(main(cli.parse(HubDrillConfig, sys.argv[1:], __doc__)))
