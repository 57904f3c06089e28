"""Write docs/audit.md from the rows of audit.json: python bench/audit_page.py --out=bench/results"""

import json
import textwrap
from pathlib import Path

import audit_trainers
import machine  # puts the project's folder on the path
from lockstep.common.files import publish_text

PAGE = machine.ROOT / "docs" / "audit.md"
HEAD = {
    "twice": "the same command twice",
    "killed": "killed with SIGKILL, then resumed",
    "terminated": "stopped with SIGTERM, then resumed",
    "saving": "killed while saving, then resumed",
    "flipped": "resumed after one bit in the newest checkpoint was flipped",
    "two": "on 2 ranks",
    "three": "on 3 ranks",
    "moved": "killed with SIGKILL on 1 rank, then resumed on 2",
}
READ = """
## What we only read

We read the following in each trainer's source, but did not run it. The README's table marks these points with ʳ. Numbers are
line numbers.

- nanoGPT, 3adf61e: a checkpoint is a pickle (`train.py` 277-286).
- litgpt, 2685705: a checkpoint is one pickle (`litgpt/pretrain.py` 226-237 defines the state, and 499-508 saves it).
  `README.md` says what litgpt is for.
- torchtitan, b5bcd76: each rank reads its own part of the data (`components/data/dataset.py` 136-150 and
  `components/data/loader.py` 148-166). `docs/checkpoint.md` and `README.md` document the rest.
- llm.c, f1e2ace: as in build-nanogpt, the ranks see different tokens at the ends of shards (`llmc/dataloader.h` 60-92). The
  last file written to a checkpoint is named DONE, and a resumed run is meant to be "bit-perfect" (`train_gpt2.cu` 1249-1254,
  1316-1358).
- modded-nanogpt, f411b3d: a step sees the same tokens on 1, 2, 4 or 8 GPUs until the first shard ends. At the end of a shard,
  the trainer drops the incomplete batch, whose size depends on the number of GPUs (`train_gpt.py` 1713-1860).
- Megatron-LM, d98e8a6: a step sees the same samples on any number of ranks (`data_samplers.py` 121-188).
"""
RANKS = ("two", "three", "moved")
PREFACE = """# The same test for every trainer

How well do trainers stop and resume? `bench/audit.py` starts each one on a CPU with its own command, stops it, and resumes it
in its own way. It then compares the tokens of every update, and the final weights, with an uninterrupted run on one rank. A
run makes 32 updates, each on 12 sequences of 32 tokens, and saves a checkpoint every 8 updates. We change no files in a
trainer's checkout, and settings that the command does not name keep the trainer's defaults. The models are tiny and train
only briefly, so compare differences in weights only within a row.

- **The same tokens** means that each update sees the same sequences, in any order, over all ranks together. An update always
  has 12 sequences. To keep it that way on W ranks, we give transformers' Trainer 6 / W accumulation steps, while the other
  trainers divide the batch themselves.
- **Killed while saving** means that the process dies while it writes the largest file of the checkpoint of update 24.
- **Fails** means that the trainer cannot resume from the newest checkpoint in its own way. If the trainer keeps older
  checkpoints, you can still point it at one of them.
- **The commands** below run in the trainer's checkout. PYTHON stands for its interpreter, WORK for a folder, and RUN for the
  run's folder.

`python bench/audit_page.py --out=bench/results` writes this page from [audit.json](../bench/results/audit.json).
"""


def main(config: machine.Out) -> int:
    """Write the page."""
    publish_text(PAGE, page(json.loads(Path(config.out, "audit.json").read_text())["trainers"]))
    return 0


def page(rows: dict) -> str:
    """Return the page: the table, then the commands of each trainer."""
    rows = {name: rows[name] for name in audit_trainers.TRAINERS if name in rows}
    lines = [PREFACE, "| " + " | ".join(["", *HEAD.values()]) + " |", "|---" * (len(HEAD) + 1) + "|"]
    lines += [f"| **{row['title']}** | " + " | ".join(cells(row["found"])) + " |" for row in rows.values()]
    for name, row in rows.items():
        kind = audit_trainers.TRAINERS[name]
        flags = " --path=PATH --python=PYTHON" if kind.repository else " --python=PYTHON" if kind.interpreter else ""
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        lines += [f"\n## {row['title']}\n", f"We ran `python bench/audit.py {name}{flags}` on {row['date']} ({row['cpu']}),"]
        lines += [f"at commit {row['commit']}, with {versions}." if kind.repository else f"with {versions}."]
        if "without" in row["found"]:
            where = "a CPU" if kind.always_on_cpu else "a CPU with several ranks"
            lines += ["", f"It does not start on {where}: `{row['found']['without']}`. {kind.on_cpu_note}"]
        lines += ["", kind.note] if kind.note else []
        lines += ["", "```sh", *dict.fromkeys(row["command"]), "```"]
    return "\n".join(lines) + "\n" + READ


def cells(found: dict) -> list[str]:
    """Return the cells of a trainer's row."""
    if "error" in found:
        return [outcome(found)] + ["-"] * (len(HEAD) - 1)
    shown = {question: outcome(answer) for question, answer in found.items() if isinstance(answer, dict)}
    shown |= {
        question: "starts over, because it cannot resume" for question, answer in found.items() if isinstance(answer, str)
    }
    if isinstance(found.get("terminated"), dict):
        saved = found["terminated"].get("from", 0) >= found["terminated"]["at"]
        shown["terminated"] = f"{'saves' if saved else 'saves nothing'}, and {shown['terminated']}"
    if isinstance(found.get("flipped"), dict):
        detected = "error" in found["flipped"] or found["flipped"]["from"] < found["killed"]["from"]
        shown["flipped"] = f"{'detects it' if detected else 'does not detect it'}, and {shown['flipped']}"
    if "error" in found.get("two", {}):  # then nothing was tested on several ranks
        shown |= {question: shown[question].replace("fails", "does not start here") for question in found if question in RANKS}
    return [shown.get(question, "not tested") for question in HEAD]


def outcome(found: dict) -> str:
    """Return the outcome of a run in words: where it began, its tokens and its weights."""
    if "error" in found:
        if found["error"].startswith("no update"):
            return f"fails: it makes {found['error'].replace(', ', ' and ends with ')}"
        return f"fails: `{textwrap.shorten(found['error'], 90, placeholder=' ...').replace('|', ' ')}`"
    other, difference = found["of"] - found["same"], found["difference"]
    tokens = f"different tokens in {other} of {found['of']} updates" if other else "the same tokens"
    tokens += f" (the first sees the tokens of update {found['again']})" if found["again"] else ""
    weights = (
        "weights of different shapes"
        if difference is None
        else f"weights that differ by {difference:.0e}"
        if difference
        else "the same bits"
    )
    return f"resumes after update {found['from']} with {tokens} and {weights}" if found["from"] else f"{tokens} and {weights}"


if __name__ == "__main__":
    machine.command_line(__doc__, machine.Out, main)
