"""The drill of the hub: python bench/drill.py hub"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path
from common.files import sha256
from prepare import Cost, make_text, prepare

REPOSITORY = "owner/name"
FAULTS = ("drop", "truncate", "corrupt", 429, 500, 503)


@dataclass(frozen=True)
class HubDrillConfig(machine.Options):
    files: int = 12
    megabytes: int = 60
    """Text in each file."""
    kills: int = 3
    parts: int = 3
    seed: int = 0


def content(directory: Path) -> dict[str, str]:
    """The sha256 of each file of a dataset; of dataset.json without where the text came from."""
    digests = {path.name: sha256(path) for path in directory.iterdir() if path.is_file() and path.name != "dataset.json"}
    metadata = json.loads((directory / "dataset.json").read_text())
    return digests | {"dataset.json": json.dumps(metadata | {"source": None})}


def main(config: HubDrillConfig) -> int:
    """Is a dataset from the hub the same whatever happens on the way, and what does it cost?

    Serves parquet files on loopback by the hub's protocol, as the tests do. Makes a dataset of them with the real client four
    times: from local copies of the files, from the hub without trouble, killed three times on a server that fails one request
    in five, and in three parts that are joined. Prints the time, the peak memory of all processes and the peak size of the
    downloads. Writes hub_drill.json. The exit status is 0 only if all four have the same bytes. About a minute on two cores.
    """
    sys.path.append(str(machine.ROOT / "tests"))
    from hub_server import HubServer

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
        hub = machine.environment(HF_ENDPOINT=server.url(), HF_HOME=str(folder / "home"))
        prepare(local, hub, outs[0], copies, *common)
        prepare(calm, hub, outs[1], address, *common)
        shards, requests = len(list(outs[1].glob("*.bin"))), len(server.requests)
        server.misbehave = lambda number, method, path: chance.choice(FAULTS) if chance.random() < 0.2 else None
        for kill in range(1, config.kills + 1):
            prepare(storm, hub, outs[2], address, *common, kill_at=kill * shards // (config.kills + 1))
        prepare(storm, hub, outs[2], address, *common)
        server.misbehave = lambda number, method, path: None
        for part in range(1, config.parts + 1):
            prepare(joined, hub, outs[3], address, f"--part={part}/{config.parts}", *common)
        prepare(joined, hub, outs[3], "--join")
        same = [content(out) == content(outs[0]) for out in outs]
    server.close()
    preparations = {name: vars(cost) | {"same_bytes": s} for (name, cost), s in zip(costs.items(), same, strict=True)}
    result = {"text_mb": round(size / 1e6), "files": config.files, "shards": shards, "requests_undisturbed": requests}
    result["preparations"] = preparations
    print(machine.write("hub_drill", result, Path(config.out)))
    rows = [
        [name, f"{c.seconds:.1f}", c.starts, f"{c.memory_mb:.0f}", f"{c.downloads_mb:.0f}", "same" if s else "DIFFERENT"]
        for (name, c), s in zip(costs.items(), same, strict=True)
    ]
    print(f"{size / 1e6:.0f} MB of text in {config.files} files, {shards} shards")
    print(machine.table(["preparation", "seconds", "starts", "peak MB", "downloads MB", "bytes"], rows))
    return int(not all(same))
