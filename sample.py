"""Generate text with a model: `python sample.py runs/NAME --prompt="def " --max_new_tokens=200 --temperature=0.8`."""

from lockstep import command

if __name__ == "__main__":
    command.require_packages()

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro
from msgspec import Meta

from lockstep.common import cli
from lockstep.common.records import Count, Seed, Size


@dataclass(frozen=True)
class SampleConfig:
    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN", help_behavior_hint="")]]
    """A run directory (uses its newest checkpoint), a checkpoint, or any Hugging Face model directory or Hub id."""
    prompt: str = ""
    """Text to continue, or FILE:path to read it from a file. Empty: start a document."""
    max_new_tokens: Annotated[int, Meta(ge=0, le=10**9)] = 200
    """Length of a sample in tokens, unless the model ends the document first."""
    temperature: Annotated[float, Meta(ge=0, le=10**9)] = 0.8
    """0: always pick the most likely token."""
    top_k: Count = 50
    """Sample only from this many of the most likely tokens (0: all)."""
    seed: Seed = 1
    num_samples: Size = 1
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    tokenizer: str = ""
    """For a model without tokenizer.json: a tokenizer.json, gpt2, or anything else that prepare_data.py --tokenizer accepts."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of matmuls. auto: float32 on a CPU, else bfloat16 if the hardware supports it."""
    numerics: Literal["auto", "native", "portable"] = "auto"
    """portable: the same bits on any processor; auto: as the model was trained."""


if __name__ == "__main__":
    command.run("sample", lambda args: cli.parse(SampleConfig, args, __doc__))

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from lockstep.checkpoints import huggingface, lookup
from lockstep.common import files
from lockstep.common.errors import UserError
from lockstep.dataset import tokenizer
from lockstep.dataset.mixture import Mixture
from lockstep.hardware import device, host
from model import generate, on_meta

PROMPT_TOKENS, NEW_TOKENS = 8, 64  # lengths of the prompt and of a sample during training


def main(config: SampleConfig) -> None:
    """Print the prompt, then each token as it is sampled. A line of dashes ends each sample. Raises UserError."""
    rank, _, local_rank, _ = host.read_ranks()
    if rank > 0:  # one rank is enough
        return
    directory, model = lookup.load_model(config.run, on_meta, config.numerics, config.dtype)
    if not config.tokenizer and not (directory / "tokenizer.json").exists():
        raise UserError(f"{directory} has no tokenizer.json; pass the model's tokenizer with --tokenizer=FILE")
    text = tokenizer.resolve(config.tokenizer) if config.tokenizer else tokenizer.load(directory / "tokenizer.json")
    text = replace(text, vocab_size=min(text.vocab_size, huggingface.known_tokens(directory, model.config.vocab_size)))
    is_file = config.prompt.startswith("FILE:")
    prompt = files.read_text(Path(config.prompt.removeprefix("FILE:"))) if is_file else config.prompt
    portable = model.numerics == "portable"
    target = device.prepare_device(config.device, local_rank, integers_only=portable)
    model.to(target)
    # On a CPU, float32 is as fast for a single token.
    dtype = "float32" if portable or (config.dtype == "auto" and target.type == "cpu") else config.dtype
    options = (config.max_new_tokens, config.temperature, config.top_k, torch.Generator().manual_seed(config.seed))
    with device.autocast(target, device.choose_dtype(dtype, target)):
        for _ in range(config.num_samples):
            show(model, text, prompt, options)
            print("\n---------------")


def show(model, text, prompt: str, options: tuple) -> None:
    """Print `prompt` and the model's continuation. Raises UserError."""
    tokens = encode(text, prompt, model)
    new = generate(model, torch.tensor([tokens]), *options, vocab_limit=text.vocab_size, eot=text.eot_token)
    for piece in stream(text, tokens, map(torch.Tensor.item, new)):
        print(piece, end="", flush=True)


def encode(text, prompt: str, model) -> list[int]:
    """Encode `prompt`, or the start of a document if it is empty. Raises UserError if the model lacks one of the tokens.

    A prompt may begin with the spelling of the end-of-text token.
    """
    rest = prompt.removeprefix(text.eot_text)
    tokens, size = text.encode(rest).tolist(), min(text.vocab_size, model.config.vocab_size)
    if rest != prompt or not prompt:
        tokens.insert(0, text.eot_token)
    if max(tokens) >= size:
        unknown = next((repr(c) for c in prompt if max(text.encode(c)) >= size), "the start of a document")
        fix = "leave it out" if prompt else 'give a prompt, such as --prompt="The "'
        raise UserError(f"--prompt: {unknown} is token {max(tokens)}, but the model knows only {size} tokens; {fix}")
    return tokens


def stream(text, prompt: list[int], new: Iterable[int]) -> Iterator[str]:
    """Yield the text of `prompt`, then of each `new` token, without end-of-text tokens. Holds back incomplete characters."""
    begun = text.decode([token for token in prompt if token != text.eot_token])
    yield begun
    tokens = []  # since the last complete character
    for token in new:
        if token == text.eot_token:
            break
        tokens.append(token)
        if not (piece := text.decode(tokens, begun != "")).endswith("\ufffd"):
            yield piece
            tokens, begun = [], begun + piece
    yield text.decode(tokens, begun != "")


def require_tokenizer(dataset: Mixture) -> None:
    """Raise UserError unless `write_sample` can decode the tokens."""
    if not dataset.tokenizer:
        raise UserError(f"--sample_every needs a tokenizer.json, but {dataset} does not have one")
    try:
        tokenizer.load(dataset.tokenizer)
    except UserError as error:
        raise UserError(f"--sample_every: {error}") from None


def write_sample(engine, dataset: Mixture, seed: int) -> str:
    """For --sample_every: let a model in training continue the first validation tokens. Does not change the run's bits.

    All ranks must call this, and they all sample the same tokens.
    """
    text = tokenizer.load(dataset.tokenizer)
    start = torch.from_numpy(dataset.streams("val")[0].read(0, PROMPT_TOKENS)[None])
    # Do not stop at end-of-text: under fsdp, each forward gathers the weights from all ranks.
    with engine.inference():
        generator = torch.Generator().manual_seed(seed)
        new = list(generate(engine.module, start, NEW_TOKENS, 0.8, 50, generator, dataset.vocab_size))
    return text.decode([token for token in start[0].tolist() if token != text.eot_token] + torch.cat(new).tolist())
