"""Text from a trained model: `python sample.py runs/NAME --prompt="def " --max_new_tokens=200 --temperature=0.8 --top_k=50`.

In a terminal and without --prompt it goes on from what is typed, line after line.
"""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from msgspec import Meta

import command
from common import cli
from common.records import Count, Seed, Size


@dataclass(frozen=True)
class SampleConfig:
    run: tyro.conf.Positional[str]
    """A run directory (its newest checkpoint is taken), a checkpoint, or any Hugging Face model directory or hub id."""
    prompt: str = ""
    """Text to go on from; FILE:path takes the text of a file.
    Empty: what is typed in a terminal, or else the start of a document."""
    max_new_tokens: Annotated[int, Meta(ge=0, le=10**9)] = 200
    """Tokens of a sample; it is shorter where the model ends the document."""
    temperature: Annotated[float, Meta(ge=0, le=10**9)] = 0.8
    """0: always the likeliest token."""
    top_k: Count = 50
    """Draw from this many of the likeliest tokens (0: from all)."""
    seed: Seed = 1
    num_samples: Size = 1
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    tokenizer: str = ""
    """For a model without tokenizer.json: a tokenizer.json, gpt2, or what else prepare_data.py's --tokenizer names."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products. auto: float32 on a CPU, else bfloat16 where the hardware has it."""


if __name__ == "__main__":
    command.run("sample", lambda args: cli.parse(SampleConfig, args, __doc__))

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from checkpoints import lookup
from common import files
from common.errors import UserError
from data import Mixture, dropout_seed
from dataset import tokenizer
from hardware import device, host
from model import generate
from parallel.world import connect
from reports.progress import due

PROMPT_TOKENS, NEW_TOKENS = 8, 64  # for --sample_every: tokens of the prompt, and tokens to generate


def main(config: SampleConfig) -> None:
    """Print the prompt and what follows it, as it is drawn; a line of dashes after each sample. Raises UserError."""
    directory, model = lookup.load_model(config.run)
    if not config.tokenizer and not (directory / "tokenizer.json").exists():
        raise UserError(f"{directory} has no tokenizer.json; --tokenizer=FILE gives the one that made its tokens")
    text = tokenizer.resolve(config.tokenizer or str(directory / "tokenizer.json"))
    is_file = config.prompt.startswith("FILE:")
    given = files.read_text(Path(config.prompt.removeprefix("FILE:"))) if is_file else config.prompt
    typed = not config.prompt and config.num_samples == 1 and sys.stdin.isatty() and sys.stdout.isatty()
    prompt = [] if typed else encode(text, given, model)
    rank, world_size, local_rank, _ = host.read_ranks()
    world = connect(rank, world_size, device.prepare_device(config.device, local_rank))
    if not world.is_master:
        return
    model.to(world.device)
    dtype = "float32" if config.dtype == "auto" and world.device.type == "cpu" else config.dtype  # no slower for one token
    options = (config.max_new_tokens, config.temperature, config.top_k, torch.Generator().manual_seed(config.seed))
    with device.autocast(world.device, device.choose_dtype(dtype, world.device)):
        if typed:
            return converse(model, text, options)
        for _ in range(config.num_samples):
            show(model, text, prompt, options)
            print("\n---------------")


class Sampler:
    """Shows what a model writes after the first PROMPT_TOKENS validation tokens, every `every` steps (0: never) after `since`.

    Raises UserError where the dataset has no tokenizer.
    """

    def __init__(self, every: int, since: int, dataset: Mixture, seed: int, micro_batches: int):
        self.every, self.since, self.dataset, self.seed, self.micro_batches = every, since, dataset, seed, micro_batches
        if every and not dataset.tokenizer:
            raise UserError(f"--sample_every needs a tokenizer.json beside the tokens, and {dataset} has none")
        self.text = tokenizer.load(dataset.tokenizer) if every else None

    def show(self, engine, step: int, log) -> None:
        """Let the model of `engine` write after `step` updates, if a sample is due. Changes no bit of the run."""
        if step > self.since and due(self.every, step):
            log.sample(step, self.write(engine, step))

    def write(self, engine, step: int) -> str:
        """What the model writes. All ranks must call this, and all draw the same tokens."""
        size = min(PROMPT_TOKENS, engine.module.config.seq_len)
        start = torch.from_numpy(self.dataset.streams("val")[0].read_windows(np.zeros(1, int), size)[:, :size])
        generator = torch.Generator().manual_seed(dropout_seed(self.seed, step, self.micro_batches))
        # Each forward has another length, and compiled code would be made for each.
        eager = torch.compiler.set_stance("force_eager") if engine.compiled else contextlib.nullcontext()
        engine.module.eval()
        # It does not stop at an end of text: under fsdp each forward gathers the weights from all ranks.
        with engine.autocast(), eager:
            new = list(generate(engine.module, start, NEW_TOKENS, 0.8, 50, generator, self.dataset.vocab_size))
        engine.module.train()
        known = [token for token in start[0].tolist() if token != self.text.eot_token]
        return self.text.decode(known + [token.item() for token in new])


def encode(text, prompt: str, model) -> list[int]:
    """The tokens of `prompt`, or that of the start of a document. Raises UserError if the model does not have one of them."""
    tokens, size = text.encode(prompt).tolist() or [text.eot_token], model.config.vocab_size
    if max(tokens) < size:
        return tokens
    unknown = next((character for character in prompt if max(text.encode(character)) >= size), prompt)
    what = repr(unknown) if prompt else "the start of a document"
    knows = f"is token {max(tokens)}, but the model knows only {size} tokens"
    raise UserError(f"--prompt: {what} {knows}; try text like that it was trained on")


def show(model, text, prompt: list[int], options: tuple) -> None:
    """Print the text of `prompt` and of what the model writes after it."""
    new = generate(model, torch.tensor([prompt]), *options, vocab_limit=text.vocab_size, eot=text.eot_token)
    for piece in stream(text, prompt, map(torch.Tensor.item, new)):
        print(piece, end="", flush=True)


def converse(model, text, options: tuple) -> None:
    """Go on from each line that is typed, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and earlier lines in `input`)
    print("Type a text to go on from. An empty line begins a document. Ctrl-C stops the text, Ctrl-D ends.")
    while True:
        try:
            prompt = encode(text, input("> "), model)
        except EOFError:
            return print()
        except UserError as error:
            print(f"error: {str(error).removeprefix('--prompt: ')}")
            continue
        with contextlib.suppress(KeyboardInterrupt):
            show(model, text, prompt, options)
        print()


def stream(text, prompt: list[int], new: Iterable[int]) -> Iterator[str]:
    """The text of `prompt` and of each token of `new`, end-of-text left out; bytes wait for the rest of their character."""
    yield text.decode([token for token in prompt if token != text.eot_token])
    tokens = []  # since the last whole character
    for token in new:
        if token == text.eot_token:
            break
        tokens.append(token)
        if not (piece := text.decode(tokens)).endswith("\ufffd"):
            yield piece
            tokens = []
    yield text.decode(tokens)
