"""The model card (README.md) of an export: what the weights are, what was measured, and how to repeat the run."""

import re
import shlex
from pathlib import Path

from lockstep import command, settings
from lockstep.checkpoints.checkpoint import TrainState
from lockstep.common import errors, files
from lockstep.dataset.mixture import directories
from lockstep.dataset.sources import HUB
from lockstep.dataset.tokens import Metadata, read_metadata
from lockstep.reports.log import read_records

LOSSES = {"val_loss": "validation loss, nats per token", "val_bpb": "bits per byte", "loss": "training loss, nats per token"}
CARD = """---
{head}---

# {config.run.name}

A language model with {parameters:,} parameters ({config.model.architecture}), trained with Lockstep for {state.step:,} steps on
{state.tokens:,} tokens, {origin}. The weights are in {dtype}.

{losses}

## Data

{datasets}

Checkpoints identify these tokens by the sha256 `{state.dataset}`.

## The run

The run used {ranks} ({versions}). To repeat it, put the tokens in the same place and run:

```sh
{command}
```

{repeats}

`config.toml` lists all settings. On the machine with the run and its tokens, `{verify}` checks that each
kept checkpoint follows from the previous one, bit for bit. The export did not run this check.
"""


def describe(source: Path, state: TrainState, parameters: int, dtype: str, license: str, language: str) -> dict[str, str]:
    """Return the files that describe an exported checkpoint, by name: its card and its settings. Raises UserError.

    license, language: as named on the Hub; may be empty.
    """
    known = known_datasets(state)
    commands = [prepare_command(Path(path), metadata) for path, metadata in known.items() if metadata]
    settings_text = "".join(f"# The tokens: {command}\n" for command in commands) + settings.dumps(state.config)
    given = {"license": license or None, "language": language.split(",") if language else None}
    card = model_card(source, state, known, parameters, dtype, given)
    return {"README.md": card, "config.toml": settings_text}


def known_datasets(state: TrainState) -> dict[str, Metadata | None]:
    """Return the directories of the run's tokens, each with the content of its dataset.json (None if it has none)."""
    paths = directories(state.config.data)
    return {path: read_metadata(Path(path)) if Path(path, "dataset.json").exists() else None for path in paths}


def model_card(source: Path, state: TrainState, known: dict, parameters: int, dtype: str, given: dict) -> str:
    """Return the card of a checkpoint. Raises UserError."""
    run, last, config, ranks = source.parent.parent, state.history[-1], state.config, state.history[-1]["world_size"]
    began = settings.from_record(state.history[0]["settings"], str(source))
    start = began.model.init_from if began.run.resume in ("auto", "off") else began.run.resume
    number = "any" if config.parallel.record.any_ranks else "the same"
    repeats = f"It reproduces the weights bit for bit on {number} number of ranks, given the same versions and hardware."
    if len(state.history) > 1:
        steps = ", ".join(f"step {era['step']}" for era in state.history[1:])
        repeats = f"Settings, versions or the number of ranks changed after {steps}. The command uses only the latest ones."
    measured = measurements(run / "metrics.jsonl", state.step)
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", start) and not Path(start).exists()
    return CARD.format(
        head=head(known, given | {"base_model": start if on_hub else None}),
        config=config,
        state=state,
        parameters=parameters,
        origin="from scratch" if start == "scratch" else f"starting from `{start}`",
        dtype=dtype,
        losses=table(measured),
        datasets="\n".join(describe_dataset(path, metadata) for path, metadata in known.items()),
        ranks=errors.plural(ranks, "rank"),
        versions=", ".join(f"{name} {version}" for name, version in last["versions"].items()),
        command=f"{command.launcher(ranks)} {shlex.join(['train.py', 'config.toml', f'--name={config.run.name}-again'])}",
        repeats=repeats,
        verify=shlex.join(["python", "replay.py", str(run), "--verify"]),
    )


def measurements(metrics: Path, step: int) -> dict[str, list[tuple[float, int]]]:
    """Return the run's measurements up to `step`, by name: pairs of value and step, in order."""
    found = {}
    for _, record in read_records(metrics) if metrics.exists() else []:
        if record and record["step"] <= step:
            for name, value in record.items():
                if name in LOSSES or (name.count("/") > 1 and name.startswith("tasks/")):
                    found.setdefault(name, []).append((value, record["step"]))
    return found


def table(measured: dict[str, list[tuple[float, int]]]) -> str:
    """Return a Markdown table with the last value of each measurement, and the lowest validation loss."""
    rows = ["| measured during training | value | at step |", "|---|---|---|"]
    for key in sorted(measured, key=[*LOSSES, *measured].index):
        name = LOSSES.get(key) or key.removeprefix("tasks/").replace("/", ", ", 1)
        shown = {name: measured[key][-1]}
        if key == "val_loss":
            shown["lowest validation loss so far"] = min(measured[key])
        rows += [f"| {name} | {value:.4f} | {at:,} |" for name, (value, at) in shown.items()]
    return "\n".join(rows)


def prepare_command(directory: Path, metadata: Metadata) -> str:
    """Return the command that recreates this dataset from the same sources."""
    sources = [row["path"] for row in metadata["source"] if not row["path"].startswith("the standard library of Python ")]
    commits = {row["path"]: row["revision"] for row in metadata["source"] if "revision" in row}
    pinned = [
        re.sub(rf"^({HUB}[^/]+/[^/@]+)(@[^/]+)?", rf"\1@{commits[path]}", path) if path in commits else path for path in sources
    ]
    options = {"out": directory, "tokenizer": metadata["tokenizer"]["name"], "val_fraction": metadata["val_fraction"]}
    train = [row["tokens"] for row in metadata["shards"] if row["split"] == "train"]
    if len(train) > 1 and train[0] != 100_000_000:
        options["shard_tokens"] = train[0]
    options |= metadata.get("options", {})
    return shlex.join(["python", "prepare_data.py", *pinned, *(f"--{key}={value}" for key, value in options.items())])


def hub_datasets(metadata: Metadata) -> list[str]:
    """Return the datasets on the Hugging Face Hub that the text came from, as OWNER/NAME."""
    found = [re.match(rf"{HUB}([^/]+/[^/@]+)", row["path"]) for row in metadata["source"]]
    return sorted({match[1] for match in found if match})


def head(known: dict, given: dict) -> str:
    """Return the card's YAML metadata for the Hub."""
    from huggingface_hub import ModelCardData

    datasets = sorted({dataset for metadata in known.values() if metadata for dataset in hub_datasets(metadata)})
    common = dict(library_name="transformers", pipeline_tag="text-generation", tags=["lockstep"], datasets=datasets or None)
    return ModelCardData(**common, **given).to_yaml() + "\n"


def describe_dataset(path: str, metadata: Metadata | None) -> str:
    """Return one line about a dataset: its tokens, tokenizer and sources, if its directory records them."""
    if not metadata:
        return f"- `{path}`"
    train, val = (sum(row["tokens"] for row in metadata["shards"] if row["split"] == split) for split in ("train", "val"))
    counts = f"{train:,} training and {val:,} validation tokens, tokenizer {metadata['tokenizer']['name']}"
    return f"- `{path}`: {counts}, from {files.shortened(row['path'] for row in metadata['source'])}"
