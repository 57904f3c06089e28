"""Make a tokenizer.json of nanoGPT's characters: `python tools/char_tokenizer.py data/shakespeare_char/meta.pkl`.

Put beside train.bin and val.bin, it makes sample.py, transformers and prepare_data.py understand these tokens. The ids of the
characters stay. They are followed by the bytes that no character has, for other text, and by end-of-text.

meta.pkl is a pickle. It is not unpickled: its opcodes are read one by one, and any that makes something else than dictionaries,
strings and numbers is refused. The text that it was made from (input.txt) does as well.
"""

import pickletools
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import tyro

from common import cli, errors
from common.errors import UserError
from dataset import tokenizer


@dataclass(frozen=True)
class CharConfig:
    source: tyro.conf.Positional[str]
    """nanoGPT's meta.pkl, or the text whose characters it holds."""
    out: str = ""
    """The file to write (empty: tokenizer.json beside the source)."""


def main(config: CharConfig) -> None:
    """Write the tokenizer.json. Raises UserError."""
    source = Path(config.source)
    if source.is_dir():
        raise UserError(f"{source} is a directory; give meta.pkl in it, or the text that it was made from")
    try:
        characters = read_meta(source) if source.suffix == ".pkl" else sorted(set(source.read_text(encoding="utf-8")))
        if "\0" in characters:  # such as a train.bin, whose small ids are UTF-8 by chance
            raise UserError(f"{source} is not text; give nanoGPT's meta.pkl or the input.txt that it was made from")
        if not characters:
            raise UserError(f"{source} holds no text")
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
    print(f"{out}: {len(characters)} characters, {made.vocab_size} tokens; end-of-text is {made.eot_token}")


def read_meta(path: Path) -> list[str]:
    """The characters in a meta.pkl by id. Raises UserError if it is anything else than nanoGPT writes."""
    try:
        itos = read_plain(path.read_bytes())["itos"]
        characters = [itos[i] for i in range(len(itos))]
        if all(len(character) == 1 for character in characters):
            return characters
    except (ValueError, LookupError, TypeError):
        pass
    raise UserError(f"{path} is not a meta.pkl of nanoGPT with an itos of characters; its input.txt does as well")


def read_plain(content: bytes):
    """The value of a pickle of dictionaries, strings and whole numbers. Raises ValueError, LookupError or TypeError."""
    stack, memo, mark = [], [], object()
    for opcode, argument, _ in pickletools.genops(content):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BININT" | "BININT1" | "BININT2":
                stack.append(argument)
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                stack.append(mark)
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                memo.append(stack[-1])  # in order, whatever the protocol
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1][key] = value
            case "SETITEMS":
                start = len(stack) - 1 - stack[::-1].index(mark)
                items = stack[start + 1 :]
                del stack[start:]
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "STOP":
                return stack.pop()
            case other:
                raise ValueError(f"a pickle with {other}")
    raise ValueError("no end")


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(CharConfig, sys.argv[1:], __doc__))
