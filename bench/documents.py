"""What does attention within documents bring, and what does it cost? python bench/documents.py

Trains one model twice on the same tokens, with --attend=window and --attend=document, in turns: on the functions and classes of
Python's standard library, each a document, and on its files, which are long. Compares the validation losses, each with the
attention that the run was trained with. Then measures the time of an update for several context lengths, in turns.
"""

import ast
import json
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
from dataset.sources import embedded_corpus

MODEL = dict(architecture="qwen3", n_layer=4, n_head=4, n_embd=192, optimizer="muon", lr=7e-3)
MODEL |= dict(compile="off", save_every=0, eval_every=0)
ATTENDS = ("window", "document")


@dataclass(frozen=True)
class DocumentsConfig:
    steps: int = 120
    """Updates of each run whose loss is compared."""
    tokens_per_update: int = 8192
    seq_lens: str = "256,1024,4096"
    """Context lengths whose updates are timed."""
    rounds: int = 2
    out: str = str(machine.RESULTS)
    """Directory of the results."""


def main(config: DocumentsConfig) -> None:
    """Train, time, print and write."""
    with machine.workspace() as folder:
        texts = {"functions": write_functions(folder / "functions.jsonl"), "files": ""}
        losses, costs = {}, {}
        for text, source in texts.items():
            tokens = folder / text
            prepare = [machine.ROOT / "prepare_data.py", *filter(None, [source]), f"--out={tokens}", "--tokenizer=train:4096"]
            machine.timed(prepare, machine.ROOT)
            shape = json.loads((tokens / "dataset.json").read_text())["shards"]
            each = sum(s["tokens"] for s in shape) / sum(s["documents"] for s in shape)
            flags = dict(tokens=tokens, seq_len=256, steps=config.steps, tokens_per_update=config.tokens_per_update)
            records = {a: train(folder, f"{text}-{a}", attend=a, **flags) for a in ATTENDS}
            losses[text] = {a: found[-1]["val_loss"] for a, found in records.items()} | {"tokens per document": round(each, 1)}
            print(f"{text}: {losses[text]}", flush=True)
        for seq_len in map(int, config.seq_lens.split(",")):
            flags = dict(tokens=folder / "functions", seq_len=seq_len, steps=12, tokens_per_update=8192, log_every=1)
            flags |= dict(eval_tokens=seq_len, micro_batch_size=max(1, 4096 // seq_len))

            def update(attend: str, flags=flags) -> float:
                found = train(folder, "timed", attend=attend, resume="off", **flags)
                return statistics.median(r["step_ms"] for r in found if "step_ms" in r)

            measured = machine.in_turns(config.rounds, {f"{seq_len}, {a}, ms": lambda a=a: update(a) for a in ATTENDS})
            window, document = measured.values()
            costs[seq_len] = {name: machine.spread(values) for name, values in measured.items()}
            costs[seq_len]["document / window"] = machine.ratio(document, window)
    result = {"flags": {k: v for k, v in MODEL.items()}, "validation loss": losses, "milliseconds of an update": costs}
    print(machine.write("documents", result, Path(config.out)))
    for seq_len, row in costs.items():
        print(f"context {seq_len}: an update takes {row['document / window']:.2f} times as long within documents")


def write_functions(path: Path) -> str:
    """Write each function and class of the standard library as a document of a JSON-lines file. Returns its path."""
    with path.open("w") as file:
        for source in embedded_corpus():
            text = Path(source.path).read_text(encoding="utf-8", errors="replace")
            try:
                nodes = ast.parse(text).body
            except SyntaxError:
                continue
            lines = text.splitlines(keepends=True)
            for node in nodes:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    parts = [n for n in node.body if isinstance(n, ast.FunctionDef)] or [node]
                    for part in parts:
                        file.write(json.dumps({"text": "".join(lines[part.lineno - 1 : part.end_lineno])}) + "\n")
    return str(path)


def train(folder: Path, name: str, **flags) -> list[dict]:
    """Train from the beginning. Returns the run's records."""
    shutil.rmtree(folder / name, ignore_errors=True)
    command = machine.arguments(machine.ROOT / "train.py", **MODEL, **flags, out_dir=folder, name=name)
    machine.timed(command, machine.ROOT)
    return machine.metrics(folder / name)


if __name__ == "__main__":
    machine.command_line(__doc__, DocumentsConfig, main)
