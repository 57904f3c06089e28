"""A copy of a model to publish: `python export.py runs/NAME --out=DIR --dtype=bfloat16 --max_shard_size=5GB`.

DIR becomes a Hugging Face model directory: weights in one or more safetensors files, config.json, the tokenizer,
generation_config.json, the run's settings as config.toml, and a model card (README.md). `--push=OWNER/NAME` uploads it.
"""

from dataclasses import dataclass
from typing import Literal

import tyro

import command
from common import cli


@dataclass(frozen=True)
class ExportConfig:
    run: tyro.conf.Positional[str]
    """A run directory (its newest checkpoint is taken) or a checkpoint, such as runs/NAME/checkpoints/best."""
    out: str = ""
    """Directory to make; there must be nothing of that name. --push does without one."""
    push: str = ""
    """Model repository of the Hugging Face hub to upload the copy to, such as OWNER/NAME. A new one is public."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the weights in the files. The run keeps its own in float32."""
    max_shard_size: str = "5GB"
    """Largest size of a weights file in KB, MB, GB or TB (powers of 1000). A larger tensor gets a file of its own."""


if __name__ == "__main__":
    command.run("export", lambda args: cli.parse(ExportConfig, args, __doc__))

import tempfile
from pathlib import Path

import torch

import data
import settings
from checkpoints import checkpoint, huggingface, lookup
from checkpoints.checkpoint import TrainState
from common import errors, files
from common.errors import UserError, say
from dataset.tokens import read_metadata
from reports.log import read_records

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
LOSSES = {"val_loss": "validation loss, nats per token", "val_bpb": "bits per byte", "loss": "training loss, nats per token"}
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- lockstep
---

# {config.run.name}

A language model of {parameters:,} parameters ({config.model.architecture}), trained with Lockstep for {state.step:,} steps on
{state.tokens:,} tokens, {origin}. The weights are in {dtype}.

{losses}

## Data

{datasets}

Their sha256, as checkpoints record it, is `{state.dataset}`.

## The run

It ran on {ranks} ({versions}). This command repeats it, with the tokens in the same place:

```sh
{launcher} train.py config.toml --name={config.run.name}-again
```

{repeats}

On the machine that has the run and its tokens, `python replay.py {run} --verify` checks that each kept checkpoint follows from
the one before, bit for bit. This export has not run that check. `config.toml` has all settings.
"""


def main(config: ExportConfig) -> None:
    """Publish the copy, all of it or nothing. Raises UserError."""
    max_shard_size = cli.read_quantity(config.max_shard_size, UNITS)
    if not max_shard_size:
        raise UserError(f"--max_shard_size={config.max_shard_size} must be 1 or more of KB, MB, GB or TB, such as 5GB")
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "model") if config.push and not config.out else cli.new_directory(config.out)
        source, warnings = lookup.find(config.run)
        for warning in warnings:
            say(f"warning: {warning}")
        state, (model, weights) = checkpoint.load_state(source), lookup.read_model(source)
        eot_token = files.read_json(source / "generation_config.json")["eos_token_id"]
        with files.publish_directory(out) as directory:
            dtype = getattr(torch, config.dtype)
            tokenizer = source / "tokenizer.json" if (source / "tokenizer.json").exists() else None
            huggingface.write_model(directory, weights, model, tokenizer, eot_token, dtype, max_shard_size)
            (directory / "config.toml").write_text(settings.dumps(state.config), encoding="utf-8")
            parameters = sum(value.numel() for value in weights.values())
            (directory / "README.md").write_text(card(source, state, parameters, config.dtype), encoding="utf-8")
        sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
        where = push(out, config.push) if config.push else out
        say(f"{source} is now {where}: {errors.plural(len(sizes), 'weights file')}, {sum(sizes):,} bytes, {config.dtype}")


def push(directory: Path, repository: str) -> str:
    """Upload a directory to the model `repository` of the hub, made if need be. Returns its URL. Raises UserError."""
    try:
        from huggingface_hub import HfApi  # reads HF_ENDPOINT, which may be no address

        url = HfApi().create_repo(repository, exist_ok=True)
        HfApi().upload_folder(repo_id=url.repo_id, folder_path=directory)
        return url
    except Exception as error:  # a malformed name, no right to write, no network: the way out is the same
        way_out = "`hf auth login` gives this machine a token for uploads"
        raise UserError(f"--push={repository}: {errors.explain(error)}; {way_out}") from None


def card(source: Path, state: TrainState, parameters: int, dtype: str) -> str:
    """The model card of a checkpoint. Raises UserError."""
    run, last, config, ranks = source.parent.parent, state.history[-1], state.config, state.history[-1]["world_size"]
    began = settings.from_record(state.history[0]["settings"], str(source))
    start = began.model.init_from if began.run.resume in ("auto", "off") else began.run.resume
    launcher = "python" if ranks == 1 else f"torchrun --standalone --nproc_per_node={ranks}"
    number = "any" if config.parallel.strategy == "exact" else "the same"
    repeats = f"The weights are the same bit for bit on {number} number of ranks, with these versions and such hardware."
    if len(state.history) > 1:
        steps = ", ".join(str(era["step"]) for era in state.history[1:])
        repeats = f"Settings, versions or the number of ranks changed after step {steps}. The command has the last ones only."
    return CARD.format(
        config=config,
        state=state,
        parameters=parameters,
        origin="from scratch" if start == "scratch" else f"starting from `{start}`",
        dtype=dtype,
        losses=losses(run / "metrics.jsonl", state.step),
        datasets="\n".join(describe_dataset(Path(path)) for path in data.directories(config.data)),
        ranks=errors.plural(ranks, "rank"),
        versions=", ".join(f"{name} {version}" for name, version in last["versions"].items()),
        launcher=launcher,
        repeats=repeats,
        run=run,
    )


def losses(metrics: Path, step: int) -> str:
    """A table of the last losses up to `step`, as the run recorded them, and of the lowest."""
    records = [record for _, record in read_records(metrics) if record and record["step"] <= step] if metrics.exists() else []
    rows = ["| measured in training | value | at step |", "|---|---|---|"]
    for key, name in LOSSES.items():
        if measured := [(record[key], record["step"]) for record in records if key in record]:
            shown = {name: measured[-1]} | ({"lowest validation loss so far": min(measured)} if key == "val_loss" else {})
            rows += [f"| {name} | {value:.4f} | {at:,} |" for name, (value, at) in shown.items()]
    return "\n".join(rows)


def describe_dataset(directory: Path) -> str:
    """A line about a dataset: its tokens, its tokenizer and its sources, as far as its directory says."""
    if not (directory / "dataset.json").exists():
        return f"- `{directory}`"
    metadata = read_metadata(directory)
    train, val = (sum(row["tokens"] for row in metadata["shards"] if row["split"] == split) for split in ("train", "val"))
    counts = f"{train:,} training and {val:,} validation tokens, tokenizer {metadata['tokenizer']['name']}"
    return f"- `{directory}`: {counts}, of {files.shortened(row['path'] for row in metadata['source'])}"
