"""Text from a trained model: `python sample.py runs/NAME --prompt="def " --max_new_tokens=200 --temperature=0.8 --top_k=50`.

In a terminal and without --prompt it goes on from what is typed, line after line.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # which python -I and PYTHONSAFEPATH=1 leave out
    from common import errors

    errors.begin()

import contextlib
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from msgspec import Meta

from checkpoints import lookup
from common import cli, errors, files
from common.errors import UserError
from common.records import Count, Seed, Size
from data import dropout_seed
from dataset import tokenizer
from hardware import device
from model import generate
from parallel.world import connect
from reports.progress import due
from settings import Config

PROMPT_TOKENS, NEW_TOKENS = 8, 64  # for --sample_every: tokens of the prompt, and tokens to generate


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
    world = connect(config.device)
    if not world.is_master:
        return
    own_device = world.device
    model.to(own_device)
    for_one_token = "float32" if config.dtype == "auto" and own_device.type == "cpu" else config.dtype  # no slower on a CPU
    dtype = device.choose_dtype(for_one_token, own_device)
    options = (config.max_new_tokens, config.temperature, config.top_k, torch.Generator().manual_seed(config.seed))
    with device.autocast(own_device, dtype):
        if typed:
            return converse(model, text, options)
        for _ in range(config.num_samples):
            show(model, text, list(prompt), len(prompt), options)
            print("\n---------------")


class Sampler:
    """Shows what a model writes while it is trained: a line, every config.eval.sample_every steps (0: never) after `since`.

    It goes on from the first PROMPT_TOKENS validation tokens, which mostly start a document. Raises UserError where the
    dataset has no tokenizer.
    """

    def __init__(self, config: Config, dataset, since: int):
        self.config, self.dataset, self.since, self.every = config, dataset, since, config.eval.sample_every
        if self.every and not dataset.tokenizer:
            raise UserError(f"--sample_every needs a tokenizer.json beside the tokens, and {dataset} has none")
        self.text = tokenizer.load(dataset.tokenizer) if self.every else None

    def show(self, engine, step: int, log) -> None:
        """Let the model of `engine` write after `step` updates, if a sample is due. Changes no bit of the run."""
        if step > self.since and due(self.every, step):
            log.sample(step, self.write(engine, step))

    def write(self, engine, step: int) -> str:
        """What the model writes. All ranks must call this, and all draw the same tokens."""
        size = min(PROMPT_TOKENS, self.config.model.seq_len)
        start = torch.from_numpy(self.dataset.streams("val")[0].read_windows(np.zeros(1, int), size)[:, :size])
        generator = torch.Generator().manual_seed(dropout_seed(self.config.run.seed, step, self.config.micro_batches))
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


def show(model, text, tokens: list[int], prompted: int, options: tuple) -> None:
    """Print the text of the last `prompted` of `tokens` and what the model writes after them, as it is drawn.

    tokens: those that are drawn are appended.
    """

    def new() -> Iterator[int]:
        for token in generate(model, torch.tensor([tokens]), *options, vocab_limit=text.vocab_size, eot=text.eot_token):
            tokens.append(token.item())
            yield tokens[-1]

    for piece in stream(text, tokens[len(tokens) - prompted :], new()):
        print(piece, end="", flush=True)


def converse(model, text, options: tuple) -> None:
    """Go on from each line that is typed, with all text before it as the context, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and earlier lines in `input`)
    print("Type a text to go on from. An empty line lets the model go on by itself. Ctrl-C stops the text, Ctrl-D ends.")
    context, seq_len = [], model.config.seq_len
    while True:
        signal.signal(signal.SIGINT, errors.interrupt)  # which answers once
        try:
            line = input("> ")
            prompt = encode(text, "\n" * bool(context) + line, model) if line or not context else []
        except EOFError:
            return print()
        except KeyboardInterrupt:
            print()
            raise
        except UserError as error:
            print(f"error: {str(error).removeprefix('--prompt: ')}")
            continue
        tokens = context + prompt
        with contextlib.suppress(KeyboardInterrupt):
            show(model, text, tokens, len(prompt), options)
        context = tokens
        print()
        if context[-1] == text.eot_token:
            print("--------------- the document has ended; the next line begins another")
            context = []
        elif len(context) >= seq_len:
            print(f"--------------- the context of {seq_len} tokens is full; the last half of it stays")
            context = context[-max(1, seq_len // 2) :]


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


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(SampleConfig, sys.argv[1:], __doc__))
