"""Write the table of docs/audit.md from the rows of audit.json: python bench/audit_page.py --out=bench/results"""

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
RANKS = ("two", "three", "moved")


def main(config: machine.Out) -> int:
    """Write the page."""
    publish_text(PAGE, page(json.loads(Path(config.out, "audit.json").read_text())["trainers"]))
    return 0


def page(rows: dict) -> str:
    """Return the page with a new table and commands of each trainer."""
    rows = {name: rows[name] for name in audit_trainers.TRAINERS if name in rows}
    lines = ["| " + " | ".join(["", *HEAD.values()]) + " |", "|---" * (len(HEAD) + 1) + "|"]
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
        lines += ["", "```sh", *dict.fromkeys(row["command"]), "```"]
    return machine.renewed(PAGE, "\n".join(lines) + "\n")


def cells(found: dict) -> list[str]:
    """Return the cells of a trainer's row."""
    if "error" in found:
        return [outcome(found)] + ["-"] * (len(HEAD) - 1)
    shown = {question: outcome(answer) for question, answer in found.items() if isinstance(answer, dict)}
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
