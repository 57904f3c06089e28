"""Tokenizers that can encode every text, stored on disk as a Hugging Face tokenizer.json.

tiktoken encodes for train:N, OpenAI's tokenizers and .tiktoken files. Each is saved as a tokenizer.json, which lists the
merges that tiktoken makes. It gives the same tokens, because the patterns mean the same in both regex engines. tiktoken also
encodes for a file saved this way; any other tokenizer.json is left to Hugging Face's tokenizers library: other byte-level BPEs,
and SentencePiece's tokenizers with byte fallback, such as Llama 2's.
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

from lockstep.common import files
from lockstep.common.errors import UserError, named_errors, one_line, within

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
# As in Meta's llama3/tokenizer.py and Qwen's tokenization_qwen.py, but for the way of ignoring case.
META_PATTERN = rf"{CONTRACTION}|{_WORDS}[\r\n]*|{_LINES}"
QWEN_PATTERN = META_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
PATTERNS = (TRAINED_PATTERN, LLAMA3_PATTERN, *NAMED.values(), META_PATTERN, QWEN_PATTERN)
# Published .tiktoken files by number of ranks: whose they are, the pattern, and the special tokens that matter in pretraining.
KNOWN_RANKS = {
    50256: ("GPT-2", GPT2_PATTERN, {END_OF_TEXT: 50256}),
    100256: ("cl100k_base", CL100K_PATTERN, {END_OF_TEXT: 100257}),
    199998: ("o200k_base", O200K_PATTERN, {END_OF_TEXT: 199999}),
    128000: ("Llama 3", META_PATTERN, {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001}),
    151643: ("Qwen", QWEN_PATTERN, {END_OF_TEXT: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}),
}
# Text that a tokenizer must give back: white space, line ends, languages, emoji, code, and all bytes that UTF-8 has.
PROBE = (
    *("two words", "  two  spaces", " before", "after ", "a\n\n\nb\n", "\r\na\r\n", "\ta\t\tb", " ", "\n", "\0"),
    *("Don't SHOUT, 12345!", "def f(x):\n    return x  # é\n", "naïve größer Ελλάδα Привет", "שלום مرحبا हिन्दी ไทย"),
    *("東京 日本語 한국어", "🚢 👩\u200d👩\u200d👧 🇩🇪", "e\u0301 ﬁ ½ ™ \u00a0\u2009\u3000.", "\ue000\ufb00\ufffd"),
    *("".join(map(chr, span)) for span in (range(1, 256), range(256, 0xD800, 64), range(1 << 16, 17 << 16, 1 << 16))),
)
# Where `sources.end_of_words` cuts a text: what may be before and after a cut.
BEFORE_CUT = ("word", "two words", "don't", "x1y", "}\n  foo", "größe", "日本語")
AFTER_CUT = (" x", "\nx", "  x", " \n\n  x\n", "\n\tx", " 1.5", " 'tis", " (", "\n")


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
    """A tokenizer, defined by `json`. `tiktoken` encodes if it is set; otherwise, `huggingface` does."""

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

    @property
    def eot_text(self) -> str:
        """The spelling of the end-of-text token."""
        return self.huggingface.id_to_token(self.eot_token)

    @property
    def adds_space(self) -> bool:
        """Whether the tokens of a text begin with a space that the text does not have, as SentencePiece's do."""
        return self.bytes_per_token[self.eot_token] < 0

    @functools.cached_property
    def cuttable(self) -> bool:
        """Whether the parts of a text cut at the end of a word (see `sources.end_of_words`) have the tokens of the whole."""
        if self.tiktoken:
            return True
        if not self.huggingface.pre_tokenizer:  # a token may span words, or each part gets a space in front
            return False
        for token in self.huggingface.get_added_tokens_decoder().values():
            if not token.special and (token.rstrip or re.search(r"\w[ \n]", token.content)):
                return False

        def words(text: str) -> list[str]:
            normalizer = self.huggingface.normalizer
            found = self.huggingface.pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text) if normalizer else text)
            return [word for word, _ in found]

        return all(words(a + b) == words(a) + words(b) for a in BEFORE_CUT for b in AFTER_CUT)

    def check_text(self) -> list[str]:
        """Raise UserError if the tokenizer loses text. Returns notes on what its normalizer changes, and on its first token."""
        notes, normalizer = [], self.huggingface.normalizer
        for text in PROBE:
            ids = self.encode(text)
            if (found := self.decode(ids)) == text:
                continue
            normalized = normalizer and self.cuttable and found == normalizer.normalize_str(text)
            if not normalized and not (self.adds_space and found == text.removeprefix(" ")):
                example = f"{one_line(text)[:40]!r} would become {one_line(found)[:40]!r}"
                needed = (
                    "a byte-level BPE needs ByteLevel as pre-tokenizer (without add_prefix_space) and decoder, and no Strip"
                )
                raise UserError(f"{self.name} loses text: {example}; {needed}; or use train:N, gpt2 or bytes")
            if not notes:
                notes.append(f"{self.name} changes text: {one_line(text)[:40]!r} becomes {one_line(found)[:40]!r}")
        first = self.first_token
        if first not in (None, self.eot_token):
            theirs = self.huggingface.id_to_token(first)
            notes.append(f"{self.name} begins texts with {theirs}, but documents here begin with {self.eot_text}")
        return notes

    @property
    def first_token(self) -> int | None:
        """The token that Hugging Face's library adds in front of a text, such as Llama's <s>."""
        given, plain = (self.huggingface.encode("a", add_special_tokens=special).ids for special in (True, False))
        return given[0] if given[0] != plain[0] else None

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

    def decode(self, ids: Sequence[int], continues: bool = False) -> str:
        """Decode tokens into text. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are skipped.

        continues: whether other text comes before. SentencePiece's decoders drop the first space of a text.
        """
        before = self.encode("a").tolist() if continues and self.adds_space else []
        text = self.huggingface.decode(before + np.asarray(ids, dtype=np.uint32).tolist(), skip_special_tokens=False)
        return text[1:] if before else text

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
    for pattern in PATTERNS:
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


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a .tiktoken file, whose lines hold a base64 token and its rank. Raises UserError."""
    ranks, lines = {}, [line.split() for line in files.read_bytes(path).splitlines() if line]
    with contextlib.suppress(ValueError):
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    if sorted(ranks.values()) != list(range(len(lines))) or not all(bytes([b]) in ranks for b in range(256)):
        raise UserError(f"{path}: expected lines of a base64 token and its rank, from 0, with all 256 bytes among the tokens")
    return ranks


def load_ranks(path: Path) -> Tokenizer:
    """Load a published .tiktoken file, recognized by its number of ranks. Raises UserError for any other.

    A .tiktoken file does not contain the pattern that splits text into words.
    """
    ranks = read_ranks(path)
    name, pattern, special = KNOWN_RANKS.get(len(ranks), ("", "", {}))
    if not name or not fits(ranks, pattern):
        known = ", ".join(f"{count:,} ({name})" for count, (name, *_) in KNOWN_RANKS.items())
        problem = f"{path} has {len(ranks):,} tokens, but does not say how it splits text into words"
        way_out = "use the tokenizer.json of its model, or make one (docs/input.md)"
        raise UserError(f"{problem}; only these files are known: {known}; {way_out}")
    return from_ranks(ranks, pattern, special, str(path))


def fits(ranks: dict[bytes, int], pattern: str) -> bool:
    """Return whether the tokens may come from text split by `pattern`: each is a single word, except for numbers."""
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for token in ranks:
        with contextlib.suppress(UnicodeDecodeError):
            text = token.decode()
            if not text.isdigit() and len(split.pre_tokenize_str(text)) > 1:
                return False
    return True


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
    bytes_alone = {f"<0x{b:02X}>" for b in range(256)}
    # A BPE that the tokenizers library trained has the bytes that it falls back to among the special tokens.
    known = theirs.get_added_tokens_decoder()
    tokens = {i: token for i, token in known.items() if not (token.special and token.content in bytes_alone)}
    added = {token.content: i for i, token in tokens.items()}
    ordinary = {token: i for token, i in theirs.get_vocab(with_added_tokens=False).items() if token not in added}
    alphabet = set(byte_chars().values())
    if isinstance(theirs.model, models.BPE) and alphabet <= ordinary.keys() and alphabet == set().union(*ordinary):
        sizes = {token: len(token) for token in ordinary}
    elif getattr(theirs.model, "byte_fallback", False) and bytes_alone <= ordinary.keys():
        sizes = {token: 1 if token in bytes_alone else len(token.replace("▁", " ").encode()) for token in ordinary}
    else:
        kinds = "is not a byte-level BPE over all 256 bytes, nor does it have byte_fallback and tokens <0x00> to <0xFF>"
        raise UserError(f"{name} {kinds}; use such a tokenizer, train:N, gpt2 or bytes")
    if (eot_token := end_of_text(added)) is None:
        raise UserError(f"{name} has no end-of-text token; add one of {', '.join(ENDS_OF_TEXT)}")
    if getattr(theirs.model, "dropout", None):
        raise UserError(f'{name} encodes at random, with a dropout of {theirs.model.dropout:g}; set "dropout" to null in it')
    if theirs.decoder is None:
        fix = 'set "decoder" in it to {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}'
        raise UserError(f"{name} has no decoder, so spaces would appear as Ġ; {fix}")
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True  # treat a special token spelled out in text as ordinary text
    vocab_size = max(*ordinary.values(), *added.values()) + 1
    lengths = np.zeros(vocab_size, dtype=np.int32)
    lengths[list(ordinary.values())] = [sizes[token] for token in ordinary]
    for i, token in tokens.items():  # unlike special tokens, these stand for text, such as GPT-NeoX's runs of spaces
        lengths[i] = 0 if token.special else len(token.content.encode())
    # Each document begins with end-of-text, so this token can make up for the space that SentencePiece adds to each text.
    with named_errors(f"{name} failed to encode a text"):
        lengths[eot_token] = 1 - lengths[theirs.encode("a", add_special_tokens=False).ids].sum()
    encoding = None
    if pattern:
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=_ranks(ordinary), special_tokens=added)
    return Tokenizer(name, text, vocab_size, eot_token, lengths, theirs, encoding)
