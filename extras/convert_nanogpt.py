"""Convert a nanoGPT or build-nanogpt checkpoint to a model: `python extras/convert_nanogpt.py out/ckpt.pt --out=DIR`.

`--init_from=DIR`, sample.py, evaluate.py and transformers then accept DIR, with the same logits. The optimizer state is left
behind, because we read the data in a different order. The checkpoint is a pickle, so only tensors and plain values are read,
and anything else is rejected (torch.load with weights_only=True).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import tyro
from torch import Tensor

from lockstep import settings
from lockstep.checkpoints import huggingface
from lockstep.common import cli, errors, files
from lockstep.common.errors import UserError, refuse, say
from lockstep.dataset import tokenizer
from lockstep.dataset.tokens import GPT2_VOCAB_SIZE
from lockstep.planning import rules
from lockstep.settings import ModelConfig
from model import on_meta

SIZES = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {"block_size": "seq_len"}  # theirs, ours


@dataclass(frozen=True)
class ConvertConfig:
    checkpoint: tyro.conf.Positional[str]
    """A nanoGPT ckpt.pt, or a build-nanogpt model_*.pt."""
    out: str = ""
    """Directory to create; it must not exist."""
    tokenizer: str = ""
    """The tokenizer.json to put beside the model. A character-level model needs one: see extras/char_tokenizer.py."""


class GPTConfig:
    """Stand-in for the settings class in build-nanogpt's checkpoints. Reading one only sets attributes."""


def main(config: ConvertConfig) -> None:
    """Convert the whole checkpoint, or write nothing. Raises UserError."""
    out = cli.new_directory(config.out)
    tensors, model = read_checkpoint(Path(config.checkpoint))
    if config.tokenizer:
        eot_token = tokenizer.load(config.tokenizer).eot_token
        eot_token = eot_token if eot_token < model.vocab_size else None  # a character-level model has none
    elif model.vocab_size >= GPT2_VOCAB_SIZE:
        eot_token = GPT2_VOCAB_SIZE - 1
    else:
        raise UserError(f"a vocabulary of {model.vocab_size} is not GPT-2's; pass its --tokenizer=tokenizer.json")
    state = to_ours(tensors, model)
    with files.publish_directory(out) as directory:
        huggingface.write_model(directory, state, model, Path(config.tokenizer) if config.tokenizer else None, eot_token)
    say(f"{out}: {model.n_layer} layers, {model.n_embd} wide, vocabulary {model.vocab_size}, context {model.seq_len}")


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], ModelConfig]:
    """Read the tensors and the shape of a model, without executing anything. Raises UserError.

    nanoGPT uses exact GELU; build-nanogpt uses GPT-2's approximation.
    """
    try:
        with torch.serialization.safe_globals([(GPTConfig, "__main__.GPTConfig")]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except Exception:  # a file that torch did not write, or one with other classes, can raise anything
        raise UserError(
            f"{path} is not a nanoGPT or build-nanogpt checkpoint, or contains more than tensors and numbers"
        ) from None
    content = content if isinstance(content, dict) else {}
    tensors, args, theirs = (content.get(name) for name in ("model", "model_args", "config"))
    nanogpt = args is not None
    args = vars(theirs) if not nanogpt and isinstance(theirs, GPTConfig) else args
    named = isinstance(tensors, dict) and all(isinstance(n, str) and isinstance(t, Tensor) for n, t in tensors.items())
    if not isinstance(args, dict) or not named:
        needed = "a valid model and model_args (nanoGPT), or model and config (build-nanogpt)"
        raise UserError(f"{path} is not a nanoGPT or build-nanogpt checkpoint: expected {needed}")
    values, wrong = cli.read_values(ModelConfig, {ours: args.get(name) for name, ours in SIZES.items()}, strict=True)
    refuse(f"{path}: its {name} {wrong[ours]}" for name, ours in SIZES.items() if ours in wrong)
    model = ModelConfig(architecture="gpt2", gelu="erf" if nanogpt else "tanh", **values)
    refuse(rules.shape_problems(model))
    return tensors, settings.resolve_model(model, model.vocab_size)


def to_ours(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename nanoGPT's parameters to ours, with zeros for missing biases. Raises UserError if they do not match `config`."""
    compiled = "_orig_mod."  # the prefix of the names in a compiled model
    theirs = {name.removeprefix(compiled): value.float() for name, value in tensors.items()}
    unused = {name for name in theirs if not name.endswith((".attn.bias", "lm_head.weight"))}  # the mask, the tied embedding
    shapes, found = {name: parameter.shape for name, parameter in on_meta(config).named_parameters()}, {}
    for name, key in huggingface.tensor_names(shapes, config).items():
        (module, _, leaf), shape = name.rpartition("."), shapes[name]
        value = theirs.get(key, torch.zeros(shape) if leaf == "bias" else None)
        if value is not None and key in theirs and "c_attn" in key:
            value = value.chunk(3)["qkv".index(module[-1])]
        if value is None or value.shape != shape:
            raise UserError(f"the checkpoint has no {key} of shape {list(shape)}, which our {name} needs")
        found[name] = value
        unused.discard(key)
    if unused:
        raise UserError(f"the checkpoint has {min(unused)}, but GPT-2 does not")
    return found


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(ConvertConfig, sys.argv[1:], __doc__))
