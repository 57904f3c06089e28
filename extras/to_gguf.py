"""Convert a model with the tokenizer train:N:llama3 to GGUF for llama.cpp: `python extras/to_gguf.py DIR --llama_cpp=CHECKOUT`.

This runs llama.cpp's convert_hf_to_gguf.py. On its own, that would reject a tokenizer trained here, because it recognizes
only published tokenizers, by a hash of the tokens that they make of a test text. This script checks the pattern in
tokenizer.json instead: Llama 3's pattern is the rule that llama.cpp knows as llama-bpe. A model with the tokenizer gpt2 needs
only llama.cpp's own command.
"""

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent.parent))

import tyro

from lockstep.common import cli, errors, files
from lockstep.common.errors import PIP, UserError
from lockstep.dataset.tokenizer import LLAMA3_PATTERN


@dataclass(frozen=True)
class GgufConfig:
    model: tyro.conf.Positional[str]
    """A Hugging Face model directory: an export or a checkpoint."""
    llama_cpp: str = ""
    """A checkout of llama.cpp, whose converter does the work."""
    out: str = ""
    """File to write (default: model.gguf in the directory)."""
    outtype: Literal["f32", "f16", "bf16", "q8_0", "auto"] = "auto"
    """Type of the weights (auto: as in the directory)."""


def main(config: GgufConfig) -> None:
    """Convert the model. Raises UserError if llama.cpp would split text differently from the model's tokenizer."""
    model, checkout = Path(config.model), Path(config.llama_cpp)
    if not config.llama_cpp or not (checkout / "convert_hf_to_gguf.py").exists():
        raise UserError(f"--llama_cpp={config.llama_cpp} must be a checkout of llama.cpp with convert_hf_to_gguf.py")
    definition = files.read_json(model / "tokenizer.json")
    if f'"{json.dumps(LLAMA3_PATTERN)[1:-1]}"' not in json.dumps(definition.get("pre_tokenizer")):
        remedy = "prepare the text with --tokenizer=train:N:llama3 or --tokenizer=gpt2, and train on that"
        raise UserError(f"{model}/tokenizer.json uses a pattern that llama.cpp does not know; {remedy}")
    sys.path.insert(0, str(checkout))
    try:
        importlib.import_module("conversion.base").TextModel.get_vocab_base_pre = lambda *_: "llama-bpe"
        converter = importlib.import_module("convert_hf_to_gguf")
    except ModuleNotFoundError as error:
        raise UserError(f"llama.cpp's converter needs {error.name}; try: {PIP} gguf sentencepiece transformers") from None
    sys.argv = [
        "convert_hf_to_gguf.py",
        str(model),
        f"--outfile={config.out or model / 'model.gguf'}",
        f"--outtype={config.outtype}",
    ]
    converter.main()


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(GgufConfig, sys.argv[1:], __doc__))
