"""Export a model for publication: `python export.py runs/NAME --out=DIR --dtype=bfloat16 --max_shard_size=5GB`.

DIR becomes a Hugging Face model directory: one or more safetensors files, config.json, the tokenizer, generation_config.json,
the run's config.toml, and a model card (README.md). `--push=OWNER/NAME` uploads it.
"""

from lockstep import command

if __name__ == "__main__":
    command.require_packages()

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from lockstep.common import cli


@dataclass(frozen=True)
class ExportConfig:
    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]]
    """A run directory (uses its newest checkpoint) or a checkpoint, such as runs/NAME/checkpoints/best."""
    out: str = ""
    """Directory to create; it must not exist. Optional with --push."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the exported weights. The run keeps float32."""
    max_shard_size: str = "5GB"
    """Maximum size of a file of weights, in KB, MB, GB or TB (powers of 1000). A larger tensor gets its own file."""
    push: str = ""
    """Upload the model to this repository on the Hugging Face Hub, OWNER/NAME[@BRANCH], creating it if needed."""
    private: bool = False
    """Create the repository of --push as private, and reject an existing public one."""
    license: str = ""
    """License for the card, as named on the Hub, such as apache-2.0."""
    language: str = ""
    """Languages for the card, such as en or en,de."""


if __name__ == "__main__":
    command.run("export", lambda args: cli.parse(ExportConfig, args, __doc__))

import tempfile
from pathlib import Path

import torch

from lockstep import settings
from lockstep.checkpoints import checkpoint, huggingface, lookup
from lockstep.common import errors, files
from lockstep.common.errors import UserError, say
from model import on_meta

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def main(config: ExportConfig) -> None:
    """Publish the exported model, completely or not at all. Raises UserError."""
    max_shard_size = cli.read_quantity(config.max_shard_size, UNITS)
    if not max_shard_size:
        raise UserError(f"--max_shard_size={config.max_shard_size} must be a size in KB, MB, GB or TB, such as 5GB")
    model_card, hub = import_publishing(config)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "model") if config.push and not config.out else cli.new_directory(config.out)
        source, warnings = lookup.find(config.run)
        for warning in warnings:
            say(warning)
        state, (model, weights) = checkpoint.load_state(source), huggingface.read_model(source, on_meta)
        special = files.read_json(source / "generation_config.json")
        known = dict(bos_token=special["bos_token_id"], vocab_size=huggingface.known_tokens(source, model.vocab_size))
        with files.publish_directory(out) as directory:
            dtype = getattr(torch, config.dtype)
            tokenizer = source / "tokenizer.json" if (source / "tokenizer.json").exists() else None
            about = weights, model, tokenizer, special["eos_token_id"], dtype, max_shard_size
            huggingface.write_model(directory, *about, **known)
            parameters = sum(value.numel() for value in weights.values())
            about_it = {"config.toml": settings.dumps(state.config)}
            if model_card:
                given = config.license, config.language
                about_it = model_card.describe(source, state, parameters, config.dtype, *given)
            for name, text in about_it.items():
                (directory / name).write_text(text, encoding="utf-8")
            sizes = [path.stat().st_size for path in directory.glob("*.safetensors")]
            # If the upload fails, `out` is not published, so the same command may run again.
            where = hub.push(directory, config.push, config.private) if config.push else out
        say(f"exported {source} to {where}: {errors.plural(len(sizes), 'weights file')}, {sum(sizes):,} bytes, {config.dtype}")


def import_publishing(config: ExportConfig):
    """Return the modules that write cards and upload. A copy without them exports without a card. Raises UserError."""
    needs = [name for name in ("push", "license", "language") if getattr(config, name)]
    try:
        flag = f"--{needs[0]}" if needs else "the model card"
        return errors.extra(flag, "publishing.model_card"), errors.extra(flag, "publishing.hub")
    except UserError:
        if needs:
            raise
        say("note: without a model card, which needs extras/publishing")
        return None, None
