"""Byte-level BPE tokenizers, stored on disk as a Hugging Face tokenizer.json.

tiktoken encodes for train:N, OpenAI's tokenizers and .tiktoken files. Each is saved as a tokenizer.json, which lists the
merges that tiktoken makes. It gives the same tokens, because the patterns mean the same in both regex engines. tiktoken also
encodes for a file saved this way; any other tokenizer.json is left to Hugging Face's tokenizers library.
"""

import base64
import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from common import files
from common.errors import UserError, named_errors, within

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")  # known names of end-of-text
DOWNLOAD_SECONDS = 30
LONGEST_WORD = 1 << 12  # longest word that train:N learns from, in characters: time grows with the square of the length
LONGEST_TOKEN = 1 << 12  # longest token that train:N learns, in bytes: repetitive text would produce longer ones

# Pre-tokenization patterns. In ours, a word includes one space or punctuation mark before it, and punctuation includes the line
# end and indentation after it. It has no look-around, so tiktoken matches it in linear time, twice as fast as GPT-2's.
# With our pattern, code needs 7 to 10 % fewer tokens than with Llama 3's.
TRAINED_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:\s*\n\s*)?|\s+"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"'(?:[sSſdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"  # spells out both cases, as the engines fold case differently
_WORDS, _LINES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Llama 3's pattern as in llama.cpp, whose converter accepts only patterns that llama.cpp knows.
LLAMA3_PATTERN = rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORDS}[\r\n]*|{_LINES}"
CL100K_PATTERN = rf"{CONTRACTION}|{_WORDS}[\r\n]*|\s+\z|{_LINES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K_PATTERN = "|".join(
    [rf"[^\r\n\p{{L}}\p{{N}}]?{word}(?:{CONTRACTION})?" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")]
    + [r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"]
)
NAMED = {"gpt2": GPT2_PATTERN, "cl100k_base": CL100K_PATTERN, "o200k_base": O200K_PATTERN}
# OpenAI's .tiktoken files by number of ranks: the pattern, and the id of the end-of-text token.
KNOWN_RANKS = {50256: (GPT2_PATTERN, 50256), 100256: (CL100K_PATTERN, 100257), 199998: (O200K_PATTERN, 199999)}


@functools.cache
def byte_chars() -> dict[int, str]:
    """Return the printable character that represents each byte in a tokenizer.json (GPT-2's table)."""
    printable = [b for b in range(256) if chr(b).isprintable() and b != ord(" ")]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def _ranks(vocabulary: dict[str, int]) -> dict[bytes, int]:
    """Return the vocabulary of a tokenizer.json, with tokens as bytes."""
    byte_of = {char: byte for byte, char in byte_chars().items()}
    return {bytes(byte_of[char] for char in token): i for token, i in vocabulary.items()}


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A byte-level BPE, defined by `json`. `tiktoken` encodes if it is set; otherwise, `huggingface` does."""

    name: str
    json: str
    vocab_size: int
    eot_token: int
    bytes_per_token: np.ndarray  # [vocab_size] the bytes of text that each token represents; 0 for special tokens
    huggingface: tokenizers.Tokenizer
    tiktoken: tiktoken.Encoding | None

    @property
    def sha256(self) -> str:
        """Hex digest of the tokenizer.json."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Encode `text` into tokens, uint32 [n]. Special tokens spelled out in it count as ordinary text. Releases the GIL."""
        if self.name == "bytes":
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        if self.tiktoken:
            with contextlib.suppress(ValueError):  # a million spaces exhaust tiktoken's regex engine, but not Hugging Face's
                return self.tiktoken.encode_to_numpy(text, disallowed_special=())
        with named_errors(f"{self.name} failed to encode part of the text"):  # such as when a regex backtracks for too long
            found = self.huggingface.encode_batch_fast([text], add_special_tokens=False)  # a batch, to release the GIL
        return np.array(found[0].ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens into text. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are skipped."""
        return self.huggingface.decode(np.asarray(ids, dtype=np.uint32).tolist(), skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Publish the tokenizer at `path`, as a tokenizer.json."""
        files.publish_text(Path(path), self.json)


def load(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json. Raises UserError if it is not a byte-level BPE with an end-of-text token."""
    return from_json(files.read_text(Path(path)), str(path))


def load_if_readable(path: Path | None) -> Tokenizer | None:
    """Load a tokenizer.json, or return None if `load` does not accept it. Those of other tools may be of another type."""
    try:
        return load(path) if path else None
    except (UserError, FileNotFoundError):
        return None


def token_ids(path: Path) -> dict[str, int]:
    """Return the ids in a tokenizer.json of any type, by token. Raises UserError."""
    text = files.read_text(path)
    with named_errors(f"{path} is not a tokenizer.json"):
        return tokenizers.Tokenizer.from_str(text).get_vocab()


def end_of_text(ids: dict[str, int]) -> int | None:
    """Return the end-of-text token, if `ids` contains it under a known name."""
    return next((ids[token] for token in ENDS_OF_TEXT if token in ids), None)


def resolve(spec: str, sample: Callable[[], Iterable[str]] | None = None) -> Tokenizer:
    """Make the tokenizer for `--tokenizer=spec`. `sample` provides the text that train:N learns from. Raises UserError."""
    trained = re.fullmatch(r"train:(\d{3,6})(:llama3)?", spec)
    if trained and not sample:
        raise UserError(f"--tokenizer={spec} learns from text; pass the path of a tokenizer.json")
    if trained and int(trained[1]) >= 257:  # at least the bytes and end-of-text
        return train(sample(), int(trained[1]), spec, LLAMA3_PATTERN if trained[2] else TRAINED_PATTERN)
    if spec == "bytes":
        return from_ranks({bytes([b]): b for b in range(256)}, TRAINED_PATTERN, {END_OF_TEXT: 256}, spec)
    if spec in NAMED:
        return download(spec)
    if spec.endswith(".json"):
        return by_tiktoken(load(spec))
    if spec.endswith(".tiktoken"):
        return load_ranks(Path(spec))
    raise UserError(
        f"--tokenizer={spec} is not train:N (a vocabulary of 257 to 999,999), train:N:llama3, bytes, {', '.join(NAMED)}, or "
        "the path of a tokenizer.json or .tiktoken file"
    )


def by_tiktoken(found: Tokenizer) -> Tokenizer:
    """Switch a tokenizer to tiktoken, which is five times faster, if `from_ranks` would write the same file."""
    added = {token.content: i for i, token in found.huggingface.get_added_tokens_decoder().items()}
    ordinary = {token: i for token, i in found.huggingface.get_vocab(with_added_tokens=False).items() if token not in added}
    for pattern in (TRAINED_PATTERN, LLAMA3_PATTERN, *NAMED.values()):
        if json.dumps(pattern, ensure_ascii=False) in found.json:
            made = from_ranks(_ranks(ordinary), pattern, added, found.name)
            if made.json == found.json:
                return made
    return found


def train(texts: Iterable[str], vocab_size: int, name: str, pattern: str) -> Tokenizer:
    """Learn a byte-level BPE from `texts`: at most `vocab_size` tokens, including end-of-text (token 0) and the 256 bytes.

    pattern: the regex that splits text into words.
    """
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = _pre_tokenizer(pattern)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=list(byte_chars().values()),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    long = re.compile(rf"(\S{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}})")
    model.train_from_iterator((piece for text in texts for piece in long.split(text)), trainer)
    vocabulary = model.get_vocab()
    special = {END_OF_TEXT: vocabulary.pop(END_OF_TEXT)}
    return from_ranks(_ranks(vocabulary), pattern, special, name)


def download(name: str) -> Tokenizer:
    """Return one of OpenAI's tokenizers, from tiktoken's cache or the network. Raises UserError."""
    from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS

    try:  # tiktoken's download has no timeout
        found = within(DOWNLOAD_SECONDS, ENCODING_CONSTRUCTORS[name])
    except Exception as error:  # network, proxy or disk: the fix is the same
        remedy = "if offline, set TIKTOKEN_CACHE_DIR to a cache from another machine, or use train:N, bytes, or the path of a"
        reason = str(error)[:200] or f"nothing in {DOWNLOAD_SECONDS} s"
        problem = f"--tokenizer={name}: tiktoken could not download it ({reason})"
        raise UserError(f"{problem}\n       {remedy} tokenizer.json or .tiktoken file") from None
    return from_ranks(found["mergeable_ranks"], NAMED[name], found["special_tokens"], name)


def load_ranks(path: Path) -> Tokenizer:
    """Load a .tiktoken file, whose lines hold a base64 token and its rank. The number of ranks implies the pattern."""
    ranks, lines = {}, [line.split() for line in files.read_bytes(path).splitlines() if line]
    with contextlib.suppress(ValueError):
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    if sorted(ranks.values()) != list(range(len(lines))) or not all(bytes([b]) in ranks for b in range(256)):
        raise UserError(f"{path}: expected lines of a base64 token and its rank, from 0, with all 256 bytes among the tokens")
    pattern, eot_token = KNOWN_RANKS.get(len(ranks), (GPT2_PATTERN, len(ranks)))
    return from_ranks(ranks, pattern, {END_OF_TEXT: eot_token}, str(path))


def from_ranks(ranks: dict[bytes, int], pattern: str, special: dict[str, int], name: str) -> Tokenizer:
    """Make a tokenizer that follows tiktoken's rule: merge the adjacent tokens whose joined bytes have the lowest rank."""

    def spell(token: bytes) -> str:
        return "".join(chars[b] for b in token)

    chars, by_rank = byte_chars(), sorted(ranks, key=ranks.__getitem__)
    halves = [_merge(token, ranks) for token in by_rank if len(token) > 1]
    merges = [tuple(map(spell, pair)) for pair in halves if len(pair) == 2]
    vocabulary = {spell(token): ranks[token] for token in by_rank} | special
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    model.pre_tokenizer = _pre_tokenizer(pattern)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(sorted(special, key=special.__getitem__))
    return from_json(model.to_str(), name, pattern)


def _merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two parts that BPE merges into `token`: merge its bytes, but stop one merge early.

    BPE always merges a token's bytes in the same way, so no other pair makes this token.
    """
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks) + 256) for a, b in itertools.pairwise(parts)]
        best = min(range(len(joined)), key=joined.__getitem__)
        if joined[best] >= ranks[token]:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def from_json(text: str, name: str, pattern: str = "") -> Tokenizer:
    """Make a tokenizer from the text of a tokenizer.json. pattern: set if tiktoken encodes. Raises UserError."""
    with named_errors(f"{name} is not a tokenizer.json"):
        theirs = tokenizers.Tokenizer.from_str(text)
    tokens = theirs.get_added_tokens_decoder()
    added = {token.content: i for i, token in tokens.items()}
    ordinary = {token: i for token, i in theirs.get_vocab(with_added_tokens=False).items() if token not in added}
    alphabet = set(byte_chars().values())
    if not isinstance(theirs.model, models.BPE) or not alphabet <= ordinary.keys() or alphabet != set().union(*ordinary):
        raise UserError(f"{name} is not a byte-level BPE over all 256 bytes, the only supported type")
    if (eot_token := end_of_text(added)) is None:
        raise UserError(f"{name} has no end-of-text token; add one of {', '.join(ENDS_OF_TEXT)}")
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True  # treat a special token spelled out in text as ordinary text
    vocab_size = max(*ordinary.values(), *added.values()) + 1
    lengths = np.zeros(vocab_size, dtype=np.uint32)
    lengths[list(ordinary.values())] = [len(token) for token in ordinary]
    for i, token in tokens.items():  # unlike special tokens, these stand for text, such as GPT-NeoX's runs of spaces
        lengths[i] = 0 if token.special else len(token.content.encode())
    encoding = None
    if pattern:
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=_ranks(ordinary), special_tokens=added)
    return Tokenizer(name, text, vocab_size, eot_token, lengths, theirs, encoding)
