"""The description of a dataset: its card, the command that made it, and its sources on the Hub."""

import re
import shlex
from pathlib import Path

from extras.publishing.hub import HubConfig
from lockstep.common import files
from lockstep.dataset.sources import HUB
from lockstep.dataset.tokens import Metadata, read_metadata

CARD = """---
{head}---

# {name}

Tokens for pretraining, made with Lockstep from {sources}:

| split | tokens | documents | bytes of text | shards |
|---|---|---|---|---|
{rows}

The tokenizer is {tokenizer}, with {vocab_size:,} tokens, and an end-of-text token ({eot_token}) comes before every document.
Shards use llm.c's layout: a header of 256 int32 values, followed by {dtype} tokens. `tokenizer.json` decodes the tokens, and
`dataset.json` lists the sha256 of every shard.

To download the dataset, check it, and train on it:

```sh
hf download {repository} --repo-type=dataset --local-dir={place}
python prepare_data.py --check {place}
python train.py --tokens={place}
```

The dataset was made with this command:

```sh
{command}
```
"""


def totals(metadata: Metadata, split: str) -> dict[str, int]:
    """Return the number of tokens, documents, bytes of text and shards in a split."""
    rows = [row for row in metadata["shards"] if row["split"] == split]
    return {key: sum(row[key] for row in rows) for key in ("tokens", "documents", "bytes_of_text")} | {"shards": len(rows)}


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


def dataset_card(directory: Path, options: HubConfig) -> str:
    """Return the card (README.md) of a dataset directory for the Hub. Raises UserError."""
    from huggingface_hub import DatasetCardData

    metadata = read_metadata(directory)
    head = DatasetCardData(
        task_categories=["text-generation"],
        source_datasets=hub_datasets(metadata) or None,
        tags=["lockstep", "tokenized"],
        viewer=False,  # the viewer cannot read token shards
        **options.card,
    )
    rows = [" | ".join(["", split, *(f"{n:,}" for n in totals(metadata, split).values()), ""]) for split in ("train", "val")]
    return CARD.format(
        head=head.to_yaml() + "\n",
        name=directory.resolve().name,
        place=shlex.quote(f"tokens/{directory.resolve().name}"),
        repository=" --revision=".join(filter(None, options.push.split("@"))),
        sources=files.shortened(row["path"] for row in metadata["source"]),
        rows="\n".join(row.strip() for row in rows),
        tokenizer=metadata["tokenizer"]["name"],
        command=prepare_command(directory, metadata),
        **{key: metadata[key] for key in ("vocab_size", "eot_token", "dtype")},
    )
