"""Tokenize text on many processes or machines with datatrove. train.py reads the result with --tokens=OUT.

    pip install "datatrove[io]"     # datatrove[io,ray] for Ray
    python extras/datatrove_tokens.py TEXT --out=tokens/web --tokenizer=gpt2 --tasks=64 --workers=16
    python extras/datatrove_tokens.py s3://bucket/text --out=/shared/web --executor=slurm --partition=cpu --tasks=1000

The extra "io" contains orjson, without which datatrove reads no .jsonl files.

TEXT is a folder of .jsonl files (also .gz and .zst), or its fsspec URL. With --format=parquet, it holds .parquet files with a
column "text". Each task reads its share of the files, so use at least as many files as tasks. After a kill, the same command
keeps finished tasks and picks up where it left off. As in prepare_data.py, a hash of a document's text decides whether it goes
to `val`. End-of-text comes after each document.
"""

import argparse
import hashlib
import importlib.util
import shutil
import sys
from functools import partial
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.utils.tokenization import load_tokenizer


class Tokenizer(DocumentTokenizer):
    """datatrove's tokenizer, except that special tokens spelled out in a document stay ordinary text and do not end it."""

    def run(self, data, rank: int = 0, world_size: int = 1):
        """Tokenize the documents of a task."""
        self.tokenizer.encode_special_tokens = True
        return super().run(data, rank, world_size)


def keep(documents, rank: int, world_size: int, split: str, val_fraction: float):
    """Yield the documents that belong to `split`."""
    for document in documents:
        beginning = document.text.encode()[: 1 << 16]
        number = int.from_bytes(hashlib.blake2b(beginning, digest_size=6).digest(), "big") / 2**48  # uniform in [0, 1)
        if (number < val_fraction) == (split == "val"):
            yield document


def executor(args: argparse.Namespace, name: str, pipeline: list):
    """Return an executor that runs the pipeline as --tasks tasks."""
    common = dict(tasks=args.tasks, workers=args.workers, logging_dir=f"{args.out}/logs/{name}")
    if args.executor == "local":
        return LocalPipelineExecutor(pipeline, **common)
    if args.executor == "ray":
        return RayPipelineExecutor(pipeline, **common)
    environment = f"export PATH={Path(sys.executable).parent}:$PATH"
    slurm = dict(partition=args.partition, qos=args.qos, time=args.time, env_command=environment)
    return SlurmPipelineExecutor(pipeline, job_name=f"tokens-{name}", **slurm, **common)


def main() -> None:
    """Read the command line, and run the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a folder of .jsonl or .parquet files, or its URL")
    parser.add_argument("--out", required=True, help="a new folder, at the same path on all machines")
    parser.add_argument("--tokenizer", default="gpt2", help="a tokenizer.json, or a name on the Hugging Face Hub")
    parser.add_argument("--eos_token", default="<|endoftext|>", help="the tokenizer's end-of-text token")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--column", default="text", help="the column or key of the text")
    parser.add_argument("--val_fraction", type=float, default=0.05)
    parser.add_argument("--tasks", type=int, default=1, help="number of tasks, each of which writes a file")
    parser.add_argument("--workers", type=int, default=-1, help="tasks at a time (-1: all)")
    parser.add_argument("--executor", choices=("local", "slurm", "ray"), default="local")
    parser.add_argument("--partition", default="cpu", help="SLURM partition")
    parser.add_argument("--qos", default="", help="SLURM quality of service")
    parser.add_argument("--time", default="24:00:00", help="SLURM time limit per task")
    args = parser.parse_args()
    if "://" in args.out:
        parser.error(f"--out={args.out} must be a local path, because train.py reads the tokens there")
    if args.format == "jsonl" and importlib.util.find_spec("orjson") is None:
        parser.error('--format=jsonl needs the package orjson: pip install orjson, or pip install "datatrove[io]"')

    beside = Path(args.out, "tokenizer.json")  # gives train.py the vocabulary and the end-of-text token
    beside.parent.mkdir(parents=True, exist_ok=True)
    if Path(args.tokenizer).is_file():
        shutil.copyfile(args.tokenizer, beside)
    else:
        load_tokenizer(args.tokenizer).save(str(beside))
    kind, pattern = (JsonlReader, "**/*.jsonl*") if args.format == "jsonl" else (ParquetReader, "**/*.parquet")
    for split in ("train", "val"):
        reader = kind(args.text, glob_pattern=pattern, text_key=args.column)
        documents = partial(keep, split=split, val_fraction=args.val_fraction)
        tokenizer = Tokenizer(f"{args.out}/{split}", str(beside), eos_token=args.eos_token, shuffle_documents=False)
        executor(args, split, [reader, documents, tokenizer]).run()


if __name__ == "__main__":
    main()
