"""Make a tokenizer.json from nanoGPT's characters: `python tools/char_tokenizer.py data/shakespeare_char/meta.pkl`.

Put it beside train.bin and val.bin, and sample.py, transformers and prepare_data.py will understand these tokens. Characters
keep their ids. After them come the bytes that are not among the characters, so that any text can be encoded, and end-of-text.

meta.pkl is a pickle, which could execute anything when loaded, so it is never loaded. Instead, its opcodes are listed, and a
file with an opcode that nanoGPT does not write is rejected. The original text (input.txt) gives the same tokenizer.
"""

import pickletools
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import tyro

from common import cli, errors, files
from common.errors import UserError, say
from dataset import tokenizer

# The opcodes that pickle uses for dictionaries, strings and integers. They cannot execute anything.
VALUES = {"SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "BINGET", "LONG_BINGET"}
DICTIONARIES = {"PROTO", "FRAME", "EMPTY_DICT", "MARK", "SETITEM", "SETITEMS", "STOP"}
MEMOS = {"MEMOIZE", "BINPUT", "LONG_BINPUT"}  # these number a value for later reference


@dataclass(frozen=True)
class CharConfig:
    source: tyro.conf.Positional[str]
    """nanoGPT's meta.pkl, or the text that it was made from."""
    out: str = ""
    """File to write (empty: tokenizer.json beside the source)."""


def main(config: CharConfig) -> None:
    """Write the tokenizer.json. Raises UserError."""
    source = Path(config.source)
    try:
        characters = read_meta(source) if source.suffix == ".pkl" else read_text(source)
        if not characters or "\0" in characters:  # such as a train.bin, whose small ids are valid UTF-8
            raise UserError(f"{source} is not text; pass nanoGPT's meta.pkl, or the input.txt it was made from")
        ranks = {character.encode(): i for i, character in enumerate(characters)}
    except UnicodeError:
        raise UserError(f"{source} is not UTF-8 text") from None
    for byte in (bytes([b]) for b in range(256)):
        ranks.setdefault(byte, len(ranks))
    made = tokenizer.from_ranks(ranks, r"[\s\S]", {tokenizer.END_OF_TEXT: len(ranks)}, "characters")
    out = Path(config.out) if config.out else source.with_name("tokenizer.json")
    if out.exists() and tokenizer.load(out).sha256 != made.sha256:
        raise UserError(f"{out} already holds a different tokenizer; remove it, or choose another --out")
    made.save(out)
    say(f"{out}: {len(characters)} characters, {made.vocab_size} tokens; end-of-text is {made.eot_token}")


def read_text(path: Path) -> list[str]:
    """Return the characters of a text by id. Line ends become \\n, as in nanoGPT. Raises UserError or UnicodeError."""
    with open(files.require_file(path), encoding="utf-8") as text:
        return sorted(set(text.read()))


def read_meta(path: Path) -> list[str]:
    """Return the characters in a meta.pkl by id. Raises UserError if nanoGPT would not write such a file.

    Pickle writes each string once and refers to it afterwards, so a new character follows an id only in the dictionary itos.
    """
    characters, previous = {}, None
    try:
        for opcode, argument, _ in pickletools.genops(files.read_bytes(path)):
            if opcode.name in MEMOS:
                continue
            if opcode.name not in VALUES | DICTIONARIES:
                raise ValueError(f"the pickle has {opcode.name}")
            if isinstance(argument, str) and len(argument) == 1:
                if previous in characters:
                    raise ValueError(f"id {previous} appears twice")
                characters[previous] = argument
            previous = argument
        return [characters[i] for i in range(max(1, len(characters)))]
    except (ValueError, LookupError):
        raise UserError(f"{path} is not a nanoGPT meta.pkl; pass the input.txt it was made from instead") from None


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(CharConfig, sys.argv[1:], __doc__))
