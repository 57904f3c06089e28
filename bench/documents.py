"""What does attention within documents gain, and what does it cost?

python bench/documents.py loss|time [--flag=value ...]
"""

import ast
import contextlib
import functools
import itertools
import json
import shutil
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import machine  # puts the project's folder on the path

# isort: split
from lockstep.dataset.sources import embedded_corpus

MODEL = dict(architecture="qwen3", n_layer=4, n_head=4, n_embd=192, optimizer="muon", lr=7e-3, compile="off")
LENGTH = dict(tokens_per_update=8192, seq_len=256, steps=100, eval_every=0, save_every=0)
ATTEND = ("window", "document")


@dataclass(frozen=True)
class LossConfig(machine.Out):
    wikitext: str = ""
    """A WikiText file. Its articles and paragraphs are used too."""


@dataclass(frozen=True)
class TimeConfig(machine.Out):
    rounds: int = 2


def losses(config: LossConfig) -> None:
    """Compare validation losses of --attend=window and --attend=document, with three seeds, on short and on long documents.

    Each run is evaluated with the attention it was trained with. Writes documents_loss.json.
    """
    found, differences = {}, {}
    with machine.workspace() as folder:
        sources = texts(folder, config.wikitext)
        for name, source in sources.items():
            machine.prepare_tokens(folder / name, *filter(None, [source]), tokenizer="train:4096")
        for seed, text, attend in itertools.product((1, 2, 3), sources, ATTEND):
            shutil.rmtree(folder / "run", ignore_errors=True)
            flags = MODEL | LENGTH | dict(attend=attend, seed=seed, tokens=folder / text)
            machine.timed(machine.arguments("train.py", **flags, out_dir=folder, name="run"))
            found.setdefault(f"{text}, {attend}", []).append(loss := machine.metrics(folder / "run")[-1]["val_loss"])
            print(f"seed {seed}  {text}, {attend}: {loss:.4f}", flush=True)
    for text in sources:
        each = np.subtract(found[f"{text}, document"], found[f"{text}, window"])
        error = each.std(ddof=1) / len(each) ** 0.5
        differences[text] = {"mean": each.mean(), "standard error": error, "all": [*each]}  # document - window
    print(json.dumps(differences, indent=1))
    result = {"flags": MODEL | LENGTH, "validation loss": found, "differences": differences}
    print(machine.write("documents_loss", result, config.out))


def times(config: TimeConfig) -> None:
    """Time updates with --attend=window and --attend=document in turns, for several context lengths.

    Writes documents_time.json.
    """
    costs = {}
    with machine.workspace() as folder:
        machine.prepare_tokens(folder / "functions", functions(folder), tokenizer="train:4096")
        for seq_len in (256, 1024, 4096):
            flags = MODEL | LENGTH | dict(steps=12, seq_len=seq_len, micro_batch_size=4096 // seq_len)
            flags["tokens"] = folder / "functions"

            def update(attend: str, flags=flags) -> float:
                return statistics.median(machine.step_ms(attend=attend, **flags))

            measured = machine.in_turns(config.rounds, {attend: functools.partial(update, attend) for attend in ATTEND})
            costs[seq_len] = {name: machine.spread(values) for name, values in measured.items()}
            costs[seq_len]["document / window"] = times = machine.ratio(measured["document"], measured["window"])
            print(f"context {seq_len}: an update takes {times:.2f} times as long within documents", flush=True)
    print(machine.write("documents_time", {"flags": MODEL, "milliseconds of an update": costs}, config.out))


def texts(folder: Path, wikitext: str) -> dict[str, str]:
    """Sources for `prepare_data.py` by name, with short and long documents: Python's library, and WikiText if given."""
    sources = {"functions of Python": functions(folder), "files of Python": ""}
    if wikitext:
        text = Path(wikitext).read_text().split("\n")
        starts = [0, *(i for i, line in enumerate(text) if line[:3] == " = " != line[2:5]), len(text)]
        articles = ("\n".join(text[first:end]) for first, end in itertools.pairwise(starts))
        sources["articles of WikiText"] = write_documents(folder / "articles.jsonl", articles)
        sources["paragraphs of WikiText"] = write_documents(folder / "paragraphs.jsonl", text)
    return sources


def functions(folder: Path) -> str:
    """Write each function and class of the standard library as a document to a JSON-lines file. Returns its path."""

    def parts() -> Iterator[str]:
        for source in embedded_corpus():
            text = Path(source.path).read_text(encoding="utf-8", errors="replace")
            lines = text.splitlines(keepends=True)
            with contextlib.suppress(SyntaxError):
                for node in ast.parse(text).body:
                    if isinstance(node, ast.FunctionDef | ast.ClassDef):
                        for part in [inner for inner in node.body if isinstance(inner, ast.FunctionDef)] or [node]:
                            yield "".join(lines[part.lineno - 1 : part.end_lineno])

    return write_documents(folder / "functions.jsonl", parts())


def write_documents(path: Path, texts: Iterable[str]) -> str:
    """Write all texts that are not blank to a JSON-lines file. Returns its path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text.strip()))
    return str(path)


if __name__ == "__main__":
    machine.choose(__doc__, loss=(LossConfig, losses), time=(TimeConfig, times))
