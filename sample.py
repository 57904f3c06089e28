"""Text from a trained model: `python sample.py runs/NAME --prompt="def " --max_new_tokens=200 --temperature=0.8 --top_k=50`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

import settings
from settings import UserError


@dataclass(frozen=True)
class SampleConfig:
    run: tyro.conf.Positional[str]
    """A run directory (its newest checkpoint is taken), a checkpoint, or any Hugging Face model directory or hub id."""
    prompt: str = ""
    """Text to go on from; FILE:path takes the text of a file; empty: the start of a document."""
    max_new_tokens: int = 200
    """Tokens of a sample; it ends sooner where the model ends the document."""
    temperature: float = 0.8
    """0: always the likeliest token."""
    top_k: int = 50
    """Draw from so many likeliest tokens (0: all)."""
    seed: int = 1
    num_samples: int = 1
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products. auto: bfloat16 where the hardware has it."""


def main(args: list[str]) -> None:
    """Print the samples, each token as soon as it is there, with a line of dashes between samples."""
    config = settings.parse(SampleConfig, args, __doc__)
    check(config)
    prompt = read_prompt(config.prompt)

    import torch

    import hf
    import parallel
    import tokenizer
    from model import GPT, generate
    from world import pick_device

    directory = hf.find_model(config.run)
    if not (directory / "tokenizer.json").exists():
        raise UserError(f"{directory} has no tokenizer.json, only {hf.listing(directory)}")
    tokens = tokenizer.load(directory / "tokenizer.json")
    model_config, state = hf.read_model(directory)
    device = pick_device(config.device)
    with torch.device("meta"):
        model = GPT(model_config)
    model.load_state_dict(state, assign=True)
