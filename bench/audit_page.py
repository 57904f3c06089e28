"""Write docs/audit.md from the rows of audit.json: python bench/audit_page.py --out=bench/results"""

import json
from pathlib import Path

import audit_trainers
import machine  # puts the project's folder on the path
from common.files import publish_text

PAGE = machine.ROOT / "docs" / "audit.md"
HEAD = {
    "twice": "the same command twice",
    "killed": "SIGKILL, resumed",
    "terminated": "SIGTERM, resumed",
    "saving": "killed while saving, resumed",
    "flipped": "a flipped bit in the newest checkpoint",
    "two": "on 2 ranks",
    "three": "on 3 ranks",
    "moved": "SIGKILL on 1 rank, resumed on 2",
}
READ = """
## What was only read

This was read in the code, not measured. ʳ marks it in the README's table. The numbers are lines of the files.

- nanoGPT, 3adf61e: `train.py` 277-286 (a checkpoint is a pickle).
- litgpt, 2685705: `litgpt/pretrain.py` 226-237 (state), 499-508 (one pickle); `README.md` (what it is for).
- torchtitan, b5bcd76: `components/data/dataset.py` 136-150 and `components/data/loader.py` 148-166 (each rank
  reads its own part); `docs/checkpoint.md`, `README.md`.
- llm.c, f1e2ace: like build-nanogpt's, its ranks see other tokens at the ends of shards (`llmc/dataloader.h` 60-92). Its
  checkpoint has a last file named DONE, and its aim for a resumed run is "bit-perfect" (`train_gpt2.cu` 1249-1254, 1316-1358).
- modded-nanogpt, f411b3d: the same tokens on 1, 2, 4 or 8 GPUs until the first end of a shard. There it drops a batch that does
  not fit whole, and the size of that depends on the number of GPUs (`train_gpt.py` 1713-1860).
- Megatron-LM, d98e8a6: a step has the same samples on any number of ranks (`data_samplers.py` 121-188).
"""
RANKS = ("two", "three", "moved")
PREFACE = """# The same examination for every trainer

`bench/audit.py` starts each trainer on a CPU with its own command, stops it, and resumes it in its own way. Then it compares
the tokens of every update and the final weights with an undisturbed run on one rank. A run has 32 updates of 12 sequences of 32
tokens, and a checkpoint every 8 updates. Whatever a command does not set is the trainer's default. No file of a trainer is
changed. The models are tiny and train briefly, so compare differences in weights only within a row.

- **The same tokens**: each update embeds the same sequences, in any order, over all ranks together. The batch is always 12
  sequences. On W ranks, transformers' Trainer gets 6 / W accumulation steps for this; the others divide the batch themselves.
- **Killed while saving**: the process ends in the middle of the largest file of the checkpoint of update 24.
- **A trainer's commands** run in its checkout. PYTHON is its interpreter, WORK a folder, and RUN the run's folder.
- **Fails**: the trainer's own resume, from the newest checkpoint, fails. If it keeps older ones, its user can still name one.

`python bench/audit_page.py --out=bench/results` writes this page from [audit.json](../bench/results/audit.json).
"""


def main(config: machine.Out) -> int:
    """The command."""
    publish_text(PAGE, page(json.loads(Path(config.out, "audit.json").read_text())["trainers"]))
    return 0


def page(rows: dict) -> str:
    """The table, followed by the commands of each trainer."""
    rows = {name: rows[name] for name in audit_trainers.TRAINERS if name in rows}
    lines = [PREFACE, "| " + " | ".join(["", *HEAD.values()]) + " |", "|---" * (len(HEAD) + 1) + "|"]
    lines += [f"| **{row['title']}** | " + " | ".join(cells(row["found"])) + " |" for row in rows.values()]
    for name, row in rows.items():
        kind = audit_trainers.TRAINERS[name]
        flags = " --path=PATH --python=PYTHON" if kind.repository else " --python=PYTHON" if kind.interpreter else ""
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        lines += [f"\n## {row['title']}\n", f"`python bench/audit.py {name}{flags}` on {row['date']}, {row['cpu']}."]
        lines += [f"Commit {row['commit']} with {versions}." if kind.repository else f"With {versions}."]
        if "without" in row["found"]:
            where = "a CPU" if kind.always_on_cpu else "several ranks of a CPU"
            lines += ["", f"It does not start on {where}: `{row['found']['without']}`. {kind.on_cpu_note}"]
        lines += ["", kind.note] if kind.note else []
        lines += ["", "```sh", *dict.fromkeys(row["command"]), "```"]
    return "\n".join(lines) + "\n" + READ


def cells(found: dict) -> list[str]:
    """The cells of a trainer's row."""
    if "error" in found:
        return [outcome(found)] + ["-"] * (len(HEAD) - 1)
    shown = {question: outcome(answer) for question, answer in found.items() if isinstance(answer, dict)}
    shown |= {question: answer for question, answer in found.items() if isinstance(answer, str)}
    if isinstance(found.get("terminated"), dict):
        saved = found["terminated"].get("from", 0) >= found["terminated"]["at"]
        shown["terminated"] = f"{'saves' if saved else 'saves nothing'}; {shown['terminated']}"
    if isinstance(found.get("flipped"), dict):
        noticed = "error" in found["flipped"] or found["flipped"]["from"] < found["killed"]["from"]
        shown["flipped"] = f"{'noticed' if noticed else 'loaded'}; {shown['flipped']}"
    if "error" in found.get("two", {}):  # then several ranks were not examined
        shown |= {question: shown[question].replace("fails", "does not start here") for question in found if question in RANKS}
    return [shown.get(question, "not tested") for question in HEAD]


def outcome(found: dict) -> str:
    """The outcome of a run, in words: where it began, its tokens and its weights."""
    if "error" in found:
        return f"fails: `{found['error'][:90].replace('|', ' ')}`"
    other, difference = found["of"] - found["same"], found["difference"]
    tokens = f"other tokens in {other} of {found['of']} updates" if other else "the same tokens"
    tokens += f" (the first sees the tokens of update {found['again']})" if found["again"] else ""
    weights = (
        "weights of other shapes" if difference is None else f"weights off by {difference:.0e}" if difference else "same bits"
    )
    return f"from {found['from']}: {tokens}, {weights}" if found["from"] else f"{tokens}, {weights}"


if __name__ == "__main__":
    machine.command_line(__doc__, machine.Out, main)
