"""Is it the same run on every kind of machine that we can emulate here?

python bench/machines.py --python=../torch-2.11/bin/python,"qemu-aarch64-static -L arm arm/usr/bin/python3.11"

Repeats the run of `make same` unchanged, limited to AVX2 and to SSE, with 1, 2 and 3 threads, and on 1, 2 and 3 ranks. It is
also killed six times, and repeated with other Pythons. Each "machine" prepares its own tokens, and also trains a GPT-2 and a
Qwen3 briefly. Prints the sha256 of each Llama and writes machines.json. The exit status is 0 only if all tokens, weights,
optimizer states and metrics are the same.
"""

import hashlib
import json
import platform
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import same
import same_run
from lockstep.hardware.host import cores

SSE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
WHERE = "import sys; sys.path.insert(0, 'bench'); import same, train, prepare_data; print(same.where())"
SHORT = same.FLAGS | dict(steps=6, eval_every=3, save_every=3, log_every=1, n_kv_head="auto")
MODELS = {
    "llama": same.FLAGS,
    "gpt2": SHORT | dict(architecture="gpt2", attend="document", schedule="wsd"),
    "gpt2-erf": SHORT | dict(architecture="gpt2", gelu="erf", optimizer="muon", grad_clip=0),
    "qwen3": SHORT | dict(architecture="qwen3", n_kv_head=1, tie_embeddings="false", optimizer="muon", rope_scaling="8,1,4,32"),
}


@dataclass(frozen=True)
class MachinesConfig(machine.Out):
    python: str = ""
    """Other Pythons that can run train.py, separated by commas: paths, or commands that start one."""


@dataclass(frozen=True)
class Machine:
    """A way to run Python."""

    how: str
    python: str = sys.executable
    variables: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    threads: int = 1
    kills: int = 0


def main(config: MachinesConfig) -> int:
    """The command."""
    ways = machines([command for command in config.python.split(",") if command])
    with machine.workspace() as folder, ThreadPoolExecutor(cores()) as pool:
        folders = [folder / str(number) for number in range(len(ways))]
        # Run these first, because a Python may lack a package. Any warnings precede the last line.
        places = [text.splitlines()[-1] for text in pool.map(lambda one: run(one, ["-c", WHERE]), ways)]
        rows = list(pool.map(measure, ways[::-1], places[::-1], folders))[::-1]  # the last ones, under qemu, take longest
    print(machine.write("machines", {"models": MODELS, "machines": rows}, config.out))
    print(markdown(rows))
    print("one sha256, the expected one, and the same files of all models" if all_the_same(rows) else "NOT THE SAME")
    return int(not all_the_same(rows))


def machines(pythons: list[str]) -> list[Machine]:
    """The machines, starting with this one unchanged."""
    found = [Machine("as it is")]
    if platform.machine() in ("x86_64", "AMD64"):
        found += [Machine("held to AVX2", variables=machine.AVX2), Machine("held to SSE", variables=SSE)]
    found += [Machine(f"{n} threads", threads=n) for n in (2, 3)] + [Machine(f"{n} ranks", ranks=n) for n in (2, 3)]
    found.append(Machine("killed six times, on 1 to 3 ranks", kills=6))
    return found + [Machine("under qemu" if "qemu" in command else "as it is", command) for command in pythons]


def measure(one: Machine, where: str, folder: Path) -> dict:
    """A description of a machine, and the sha256 of the files that it makes."""
    folder.mkdir()
    text, tokens = folder / "text.txt", folder / "tokens"
    text.write_bytes(same.text().encode())
    run(one, machine.arguments("prepare_data.py", str(text), out=tokens, tokenizer="bytes"))
    found = {"tokens": {path.name: machine.sha256(path) for path in sorted(tokens.glob("*.bin"))}}
    for model in ["llama"] if one.kills else MODELS:  # the other models' runs are too short for kills
        found[model] = train(one, model, folder)
    print(f"{one.how}: {found['llama']['model.safetensors']}", flush=True)
    return {"how": one.how, "where": where, "variables": one.variables, "found": found}


def run(one: Machine, arguments: list, ranks: int = 1) -> str:
    """Return what `python ARGUMENTS` prints. Raises RunError if it fails."""
    command = [*shlex.split(one.python), *machine.launcher(ranks)[1:], *arguments]
    variables = machine.environment(OMP_NUM_THREADS="1", **one.variables)
    return machine.output(command, env=variables).strip()


def train(one: Machine, model: str, folder: Path) -> dict[str, str]:
    """Train a model in an empty folder. Returns the sha256 of its tensor files and of its metrics."""
    flags = MODELS[model] | dict(name=model, out_dir=folder, tokens=folder / "tokens", threads=one.threads)
    if one.kills:
        plan = same_run.SameRunConfig(steps=flags["steps"], max_ranks=3, kills=one.kills)
        same_run.kill_and_continue(plan, folder / model, flags)
    else:
        run(one, machine.arguments(**flags), one.ranks)
    records = json.dumps(machine.unmeasured(machine.metrics(folder / model)), sort_keys=True)
    return machine.digests(folder / model) | {"metrics": hashlib.sha256(records.encode()).hexdigest()}


def digits(row: dict) -> str:
    """The sha256 of the weights from the run of `make same`."""
    return row["found"]["llama"]["model.safetensors"]


def all_the_same(rows: list[dict]) -> bool:
    """Whether the weights are the expected ones, and all machines have the same files."""
    *_, expected = same.expected().values()
    first = rows[0]["found"]
    return digits(rows[0]) == expected and all(first[name] == files for row in rows for name, files in row["found"].items())


def markdown(rows: list[dict]) -> str:
    """The table of docs/sameness.md."""
    cells = [f"| {row['how']} | {row['where']} | `{digits(row)[:16]}` |" for row in rows]
    return "\n".join(["| run | processor and versions | sha256 of the weights |", "|---|---|---|", *cells])


if __name__ == "__main__":
    machine.command_line(__doc__, MachinesConfig, main)
