"""Make a tokenizer.json from nanoGPT's characters: `python extras/char_tokenizer.py data/shakespeare_char/input.txt`.

Put it beside train.bin and val.bin, and sample.py, transformers and prepare_data.py will understand these tokens. Characters
keep their ids. After them come the bytes that are not among the characters, so that any text can be encoded, and end-of-text.

nanoGPT also stores the characters in meta.pkl, but loading a pickle can execute anything, and the text contains the same ones.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import tyro

from lockstep.common import cli, errors, files
from lockstep.common.errors import UserError, say
from lockstep.dataset import tokenizer


@dataclass(frozen=True)
class CharConfig:
    source: tyro.conf.Positional[str]
    """nanoGPT's input.txt: the text that train.bin and val.bin were made from."""
    out: str = ""
    """File to write (empty: tokenizer.json beside the text)."""


def main(config: CharConfig) -> None:
    """Write the tokenizer.json. Raises UserError."""
    source = Path(config.source)
    try:
        with open(files.require_file(source), encoding="utf-8") as text:  # line ends become \n, as in nanoGPT
            characters = sorted(set(text.read()))
    except UnicodeError:
        characters = []
    if not characters or "\0" in characters:  # such as a train.bin, whose small ids are valid UTF-8
        raise UserError(f"{source} is empty or not UTF-8 text; pass the input.txt that the tokens were made from")
    ranks = {character.encode(): i for i, character in enumerate(characters)}
    for byte in (bytes([b]) for b in range(256)):
        ranks.setdefault(byte, len(ranks))
    made = tokenizer.from_ranks(ranks, r"[\s\S]", {tokenizer.END_OF_TEXT: len(ranks)}, "characters")
    out = Path(config.out) if config.out else source.with_name("tokenizer.json")
    if out.exists() and tokenizer.load(out).sha256 != made.sha256:
        raise UserError(f"{out} already holds a different tokenizer; remove it, or choose another --out")
    made.save(out)
    say(f"{out}: {len(characters)} characters, {made.vocab_size} tokens; end-of-text is {made.eot_token}")


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(CharConfig, sys.argv[1:], __doc__))
