"""Make a tokenizer.json of nanoGPT's characters: `python tools/char_tokenizer.py data/shakespeare_char/meta.pkl`.

Put beside train.bin and val.bin, it makes sample.py, transformers and prepare_data.py understand these tokens. The ids of the
characters stay. They are followed by the bytes that no character has, for other text, and by end-of-text.

meta.pkl is a pickle, which could execute anything when loaded. It is never loaded: its opcodes are only listed, and a file
with any that nanoGPT does not write is refused. The text that it was made from (input.txt) gives the same tokenizer.
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

# The opcodes that pickle writes for dictionaries, strings and whole numbers. None of them executes anything.
VALUES = {"SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "BINGET", "LONG_BINGET"}
DICTIONARIES = {"PROTO", "FRAME", "EMPTY_DICT", "MARK", "SETITEM", "SETITEMS", "STOP"}
MEMOS = {"MEMOIZE", "BINPUT", "LONG_BINPUT"}  # a value is given a number, by which it is referred to


@dataclass(frozen=True)
class CharConfig:
    source: tyro.conf.Positional[str]
    """nanoGPT's meta.pkl, or the text whose characters it holds."""
    out: str = ""
    """The file to write (empty: tokenizer.json beside the source)."""


def main(config: CharConfig) -> None:
    """Write the tokenizer.json. Raises UserError."""
    source = Path(config.source)
    try:
        characters = read_meta(source) if source.suffix == ".pkl" else read_text(source)
        if not characters or "\0" in characters:  # such as a train.bin, whose small ids are UTF-8 by chance
            raise UserError(f"{source} is not text; give nanoGPT's meta.pkl or the input.txt that it was made from")
        ranks = {character.encode(): i for i, character in enumerate(characters)}
    except UnicodeError:
        raise UserError(f"{source} is not text in UTF-8") from None
    for byte in (bytes([b]) for b in range(256)):
        ranks.setdefault(byte, len(ranks))
    made = tokenizer.from_ranks(ranks, r"[\s\S]", {tokenizer.END_OF_TEXT: len(ranks)}, "characters")
    out = Path(config.out) if config.out else source.with_name("tokenizer.json")
    if out.exists() and tokenizer.load(out).sha256 != made.sha256:
        raise UserError(f"{out} is another tokenizer; remove it, or choose another --out")
    made.save(out)
    say(f"{out}: {len(characters)} characters, {made.vocab_size} tokens; end-of-text is {made.eot_token}")


def read_text(path: Path) -> list[str]:
    """The characters of a text by id, with each line end as \\n, as nanoGPT reads it. Raises UserError or UnicodeError."""
    with open(files.require_file(path), encoding="utf-8") as text:
        return sorted(set(text.read()))


def read_meta(path: Path) -> list[str]:
    """The characters in a meta.pkl by id. Raises UserError if it is not as nanoGPT writes it.

    Its dictionary itos is the only place where an id is followed by a character that has not come before: pickle writes a
    string once, and refers to it afterwards.
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
                    raise ValueError(f"id {previous} comes twice")
                characters[previous] = argument
            previous = argument
        return [characters[i] for i in range(max(1, len(characters)))]
    except (ValueError, LookupError):
        raise UserError(f"{path} is not a meta.pkl of nanoGPT; give the input.txt that it was made from") from None


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(CharConfig, sys.argv[1:], __doc__))
