"""What attention within documents brings, what it costs, and how many documents windows cut.

python bench/documents.py loss    # validation losses with --attend=window and document, and on packed windows
python bench/documents.py time    # the time of an update for several context lengths
python bench/documents.py cuts    # the documents that windows cut, as they are and packed; trains nothing
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
from dataset import tokens as dataset_tokens
from dataset.sources import embedded_corpus

MODEL = dict(architecture="qwen3", n_layer=4, n_head=4, n_embd=192, optimizer="muon", lr=7e-3, compile="off")
LENGTH = dict(tokens_per_update=8192, seq_len=256, steps=100, eval_every=0, save_every=0)


@dataclass(frozen=True)
class CutsConfig(machine.Out):
    wikitext: str = ""
    """A file of WikiText, whose articles and paragraphs are taken, too."""


@dataclass(frozen=True)
class TimeConfig(machine.Out):
    rounds: int = 2


def losses(config: CutsConfig) -> None:
    """Train models on the same tokens with --attend=window and --attend=document, for several seeds, in turns.

    Each loss is with the attention that its run was trained with. The functions are also packed: best-fit, so that no document
    of at most seq_len tokens is cut; their validation split is not, so that all losses are of the same windows.
    """
    with machine.workspace() as folder:
        sources = texts(folder, config.wikitext)
        for name, source in sources.items():
            prepare(folder / name, source)
        filled = pack_dataset(folder / "functions of Python", folder / "packed", LENGTH["seq_len"])

        def val_loss(text: str, attend: str, seed: int) -> float:
            shutil.rmtree(folder / "run", ignore_errors=True)
            flags = MODEL | LENGTH | dict(attend=attend, seed=seed, tokens=folder / text)
            machine.timed(machine.arguments("train.py", **flags, out_dir=folder, name="run"))
            return machine.metrics(folder / "run")[-1]["val_loss"]

        pairs = [(text, attend) for text in sources for attend in ("window", "document")]
        found = {", ".join(pair): [] for pair in [*pairs, ("packed", "document")]}
        for seed in (1, 2, 3):
            for name in found:
                found[name].append(val_loss(*name.split(", "), seed))
                print(f"seed {seed}  {name:<33} {found[name][-1]:.4f}", flush=True)
    result = {}
    compared = [(f"{text}, document", f"{text}, window") for text in sources]
    for one, other in [*compared, ("packed, document", "functions of Python, document")]:
        each = np.subtract(found[one], found[other])
        error = each.std(ddof=1) / len(each) ** 0.5
        result[f"{one} - {other}"] = {"mean": each.mean(), "standard error": error, "all": [*each]}
    print(json.dumps(result, indent=1))
    result = {"validation loss": found, "differences": result, "share of padding, packed": 1 - filled}
    print(machine.write("documents_loss", {"flags": MODEL | LENGTH} | result, Path(config.out)))


def times(config: TimeConfig) -> None:
    """Measure the time of an update with --attend=window and --attend=document for several context lengths, in turns."""
    costs = {}
    with machine.workspace() as folder:
        prepare(folder / "functions", functions(folder))
        for seq_len in (256, 1024, 4096):
            flags = MODEL | LENGTH | dict(seq_len=seq_len, micro_batch_size=4096 // seq_len, tokens=folder / "functions")

            def update(attend: str, flags=flags) -> float:
                return statistics.median(record["step_ms"] for record in machine.run_until(12, "", attend=attend, **flags)[1:])

            contenders = {attend: functools.partial(update, attend) for attend in ("window", "document")}
            measured = machine.in_turns(config.rounds, contenders)
            costs[seq_len] = {name: machine.spread(values) for name, values in measured.items()}
            costs[seq_len]["document / window"] = times = machine.ratio(measured["document"], measured["window"])
            print(f"context {seq_len}: an update takes {times:.2f} times as long within documents", flush=True)
    print(machine.write("documents_time", {"flags": MODEL, "milliseconds of an update": costs}, Path(config.out)))


def cuts(config: CutsConfig) -> None:
    """Count the documents that windows cut, as they are and by best-fit packing (Ding et al. 2024), which pads instead."""
    rows = {}
    with machine.workspace() as folder:
        for name, source in texts(folder, config.wikitext).items():
            prepare(folder / name, source)
            lengths = document_lengths(read_train(folder / name)[0])
            for seq_len in (256, 1024):
                row = {"documents": len(lengths), "mean length": lengths.mean()} | count(lengths, seq_len)
                rows[f"{name}, {seq_len}"] = row
    print(json.dumps(rows, indent=1))
    print(machine.write("documents_cuts", {"texts": rows}, Path(config.out)))


def document_lengths(tokens: np.ndarray, eot: int = 0) -> np.ndarray:
    """The length of each document of a stream, with the end-of-text token before it."""
    return np.diff([*np.flatnonzero(tokens == eot), len(tokens)])


def count(lengths: np.ndarray, seq_len: int) -> dict:
    """Shares of documents that are cut, and of tokens that do not see all of their document before them, as is and packed."""
    starts = np.cumsum(lengths) - lengths
    room = -starts % seq_len  # from a document's start to the next boundary
    whole = np.where(room, room, seq_len)
    rest = np.maximum(lengths - whole, 0)  # of the tokens after the first cut
    long = np.maximum(lengths - seq_len, 0)
    return {
        "cut": (rest > 0).mean(),
        "cut, packed": (long > 0).mean(),
        "tokens after a cut": rest.sum() / lengths.sum(),
        "tokens after a cut, packed": long.sum() / lengths.sum(),
        "padding, packed": 1 - lengths.sum() / (len(best_fit(lengths, seq_len)) * seq_len),
    }


def best_fit(lengths: np.ndarray, seq_len: int) -> list[list[tuple[int, int]]]:
    """Windows of at most `seq_len` tokens: each a list of pieces, (document, first token). The longest piece goes first.

    A document longer than `seq_len` is cut every `seq_len` tokens. No other is.
    """
    pieces = [(min(seq_len, n - first), i, first) for i, n in enumerate(lengths.tolist()) for first in range(0, n, seq_len)]
    windows, with_room = [], [[] for _ in range(seq_len + 1)]  # with_room[n]: windows that n more tokens fit into
    for size, document, first in sorted(pieces, reverse=True):
        room = next((n for n in range(size, seq_len + 1) if with_room[n]), None)
        if room is None:
            windows.append([])
        window = len(windows) - 1 if room is None else with_room[room].pop()
        windows[window].append((document, first))
        with_room[(seq_len if room is None else room) - size].append(window)
    return windows


def read_train(directory: Path) -> tuple[np.ndarray, dict]:
    """The train tokens of a dataset, and its dataset.json."""
    metadata = json.loads((directory / "dataset.json").read_text())
    shards = [record["file"] for record in metadata["shards"] if record["split"] == "train"]
    return np.concatenate([np.fromfile(directory / name, "<u2")[512:] for name in shards]), metadata


def pack_dataset(source: Path, out: Path, seq_len: int) -> float:
    """Copy a dataset with its train documents packed into windows, padded with end-of-text. Returns how full these are."""
    shutil.copytree(source, out)
    tokens, metadata = read_train(source)
    lengths = document_lengths(tokens)
    starts, windows = np.cumsum(lengths) - lengths, best_fit(lengths, seq_len)
    packed = np.zeros((len(windows), seq_len), tokens.dtype)  # 0 is end-of-text
    for row, pieces in zip(packed, windows, strict=True):
        text = [tokens[starts[i] + first : starts[i] + min(lengths[i], first + seq_len)] for i, first in pieces]
        row[: sum(map(len, text))] = np.concatenate(text)
    train, *others = (record for record in metadata["shards"] if record["split"] == "train")
    metadata["shards"] = [record for record in metadata["shards"] if record not in others]
    sha256 = dataset_tokens.write_shard(out / train["file"], packed.reshape(-1), metadata["vocab_size"])
    train |= {"tokens": packed.size, "documents": len(lengths), "sha256": sha256}
    (out / "dataset.json").write_text(json.dumps(metadata))
    return len(tokens) / packed.size


def texts(folder: Path, wikitext: str) -> dict[str, str]:
    """Short documents and long ones, as sources for `prepare`, by name: of Python's library, and of WikiText if it is given."""
    sources = {"functions of Python": functions(folder), "files of Python": ""}
    if wikitext:
        text = Path(wikitext).read_text().split("\n")
        starts = [0, *(i for i, line in enumerate(text) if line[:3] == " = " != line[2:5]), len(text)]
        articles = ("\n".join(text[first:end]) for first, end in itertools.pairwise(starts))
        sources["articles of WikiText"] = write_documents(folder / "articles.jsonl", articles)
        sources["paragraphs of WikiText"] = write_documents(folder / "paragraphs.jsonl", text)
    return sources


def functions(folder: Path) -> str:
    """Write each function and class of the standard library as a document of a JSON-lines file. Returns its path."""

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
    """Write a JSON-lines file of the texts that are more than white space. Returns its path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text.strip()))
    return str(path)


def prepare(out: Path, source: str = "") -> None:
    """Make a dataset of `source`, or of the embedded corpus."""
    machine.timed(["prepare_data.py", *filter(None, [source]), f"--out={out}", "--tokenizer=train:4096"])


if __name__ == "__main__":
    machine.choose(__doc__, loss=(CutsConfig, losses), time=(TimeConfig, times), cuts=(CutsConfig, cuts))
