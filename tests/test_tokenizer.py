"""The same text gives the same tokens through tiktoken and through the tokenizer.json, whatever the text."""

import base64
import json
import random
import sys
import time
from pathlib import Path

import pytest
import tiktoken
import tiktoken_ext.openai_public
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare_data
import sample
from conftest import execute, sentencepiece
from lockstep.common.errors import UserError
from lockstep.dataset import tokenizer

ROOT = Path(__file__).parent.parent
GPT2 = ROOT.parent / "shared" / "data" / "gpt2.tiktoken"
needs_gpt2 = pytest.mark.skipif(not GPT2.exists(), reason="gpt2.tiktoken is not here")
TEXT = "\n".join(
    (ROOT / name).read_text(encoding="utf-8") for name in ("lockstep/settings.py", "data.py", "lockstep/dataset/tokenizer.py")
)
ENGLISH = "It's the same run, isn't it? THEY'LL say we'd 12345 naïve cafés, Größe, 東京 和 مرحبا.\r\n\r\n  So:\n\n\tyes.\n"

SNIPPETS = [" ", "  ", "    ", "\t", "\n", "\r\n", "\r", "\n\n", "\u00a0", "\u2028", "\u3000", "\x85", "\x1c", "\v", "\f", "\0"]
SNIPPETS += ["'s", "'S", "'ſ", "'ll", "'LL", "don't", "'re", "a", "ab", "return", "self.", "def f(", "):\n", "    ", "#" * 9]
SNIPPETS += ["🙂", "👩‍👩‍👧", "🇩🇪", "é", "e\u0301", "ﬁ", "ß", "İ", "K", "٣"]
SNIPPETS += ["½", "Ⅷ", "一", "ｱ", "\ufeff", "\u200b", "\ufffd", "\U0010ffff"]
SNIPPETS += ["<|endoftext|>", "<|", "0", "123", "12345678", "/", "://", "\\", "_", "__init__", "!?", "...\n\n  "]
texts = st.one_of(
    st.text(),
    st.lists(
        st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=3), st.text(alphabet=" \n\r\t", max_size=5)), max_size=40
    ).map("".join),
)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Each kind of tokenizer, with the tokenizer.json it saves as Hugging Face tokenizers reads it."""
    directory = tmp_path_factory.mktemp("tokenizers")
    specs = ["train:1000", "train:1000:llama3", "bytes"] + [str(GPT2)] * GPT2.exists()
    found = {}
    for number, spec in enumerate(specs):
        ours = tokenizer.resolve(spec, lambda: [TEXT, ENGLISH * 20])
        path = directory / f"{number}.json"
        ours.save(path)
        found["gpt2" if spec == str(GPT2) else spec] = ours, read(path), path
    return found


def read(path):
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True  # "<|endoftext|>" in a text is text
    return theirs


@pytest.mark.parametrize("name", ["train:1000", "train:1000:llama3", "bytes", pytest.param("gpt2", marks=needs_gpt2)])
@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_both_libraries_agree_and_give_the_text_back(made, name, text):
    ours, theirs, _ = made[name]
    ids = ours.encode(text)
    assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == text
    assert ours.bytes_per_token[ids].sum() == len(text.encode())
    assert ours.eot_token not in ids


@pytest.fixture(scope="session")
def crossing():
    """Ranks learned without any splitting: tokens reach across every boundary, so a text split otherwise has other tokens."""
    draw = random.Random(1)
    learned = ["".join(draw.choices(SNIPPETS, k=30)) for _ in range(2000)] + [ENGLISH] * 20
    learned += ["".join(draw.choices(" \n\r\t", k=6)) for _ in range(3000)]
    return tokenizer.train(learned, 3000, "train:3000", r"[\s\S]{1,30}").tiktoken._mergeable_ranks


def test_training_is_deterministic_and_counts_the_end_of_text():
    one, two = (tokenizer.resolve("train:600", lambda: [TEXT]) for _ in range(2))
    assert one.json == two.json and one.sha256 == two.sha256
    assert one.vocab_size == 600 and one.eot_token == 0 and one.name == "train:600"
    assert tokenizer.resolve("train:257", lambda: [TEXT]).vocab_size == 257


def test_too_little_text_gives_the_vocabulary_reached():
    ours = tokenizer.resolve("train:5000", lambda: ["abab abab"])
    assert 257 < ours.vocab_size < 300
    assert ours.encode("abab").max() < ours.vocab_size


@pytest.mark.parametrize("text", ["=" * 300_000, "一" * 20_000], ids=["=", "一"])
def test_training_on_a_word_without_end_takes_seconds(text):
    began = time.monotonic()
    ours = tokenizer.resolve("train:300", lambda: [f"{text} {TEXT}", text])
    assert time.monotonic() - began < 60  # 300,000 of = took minutes
    assert ours.vocab_size == 300 and ours.decode(ours.encode(text[:9000])) == text[:9000]


def test_saved_and_loaded_is_the_same(made):
    for ours, _, path in made.values():
        again = tokenizer.load(path)
        assert (again.sha256, again.vocab_size, again.eot_token) == (ours.sha256, ours.vocab_size, ours.eot_token)
        assert ours.tiktoken and not again.tiktoken
        prepared = tokenizer.resolve(str(path))  # by tiktoken again, since the file is one of ours
        assert prepared.tiktoken and prepared.json == ours.json
        assert prepared.encode(TEXT).tolist() == ours.encode(TEXT).tolist()
        assert again.encode(TEXT).tolist() == ours.encode(TEXT).tolist()


def test_bytes_are_the_bytes(made):
    ours, _, _ = made["bytes"]
    assert ours.vocab_size == 257 and ours.eot_token == 256
    assert ours.encode("é\n").tolist() == list("é\n".encode())


def test_decode_shows_the_end_of_text_and_passes_over_padding_ids(made):
    for ours, _, _ in made.values():
        ids = [ours.eot_token, *ours.encode("hi").tolist(), ours.vocab_size + 5]
        assert ours.decode(ids) == "<|endoftext|>hi"
    assert made["bytes"][0].decode([0xC3]) == "\ufffd"


@needs_gpt2
def test_the_tiktoken_file_is_gpt2(made):
    ours, _, _ = made["gpt2"]
    assert (ours.vocab_size, ours.eot_token) == (50257, 50256)
    assert ours.encode("Hello, world! The quick brown fox").tolist() == [15496, 11, 995, 0, 383, 2068, 7586, 21831]
    spaces = " " * 200_000 + "x"  # more than the look-ahead of tiktoken's regex engine can take
    assert ours.decode(ours.encode(spaces)) == spaces


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base", "o200k_base"])
def test_openai_names_split_as_tiktoken_does(crossing, name, monkeypatch):
    ranks = {token: rank - 1 for token, rank in crossing.items()}  # theirs begin at 0
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(tiktoken_ext.openai_public, loader, lambda *a, **k: ranks)
    parts = tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()
    reference = tiktoken.Encoding(**{key: value for key, value in parts.items() if key != "explicit_n_vocab"})
    ours = tokenizer.resolve(name)
    assert ours.eot_token == reference.eot_token and ours.vocab_size == reference.n_vocab

    @settings(max_examples=500, deadline=None)
    @given(text=texts)
    def agree(text):
        assert ours.encode(text).tolist() == reference.encode(text, disallowed_special=())

    agree()


@pytest.mark.parametrize("cause", ["fails", "hangs"])
def test_without_network_the_error_names_the_ways_out(cause, monkeypatch):
    def fetch():
        if cause == "hangs":
            time.sleep(60)
        raise ConnectionError("no route to host")

    monkeypatch.setitem(tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS, "gpt2", fetch)
    monkeypatch.setattr(tokenizer, "DOWNLOAD_SECONDS", 0.2)
    began = time.perf_counter()
    with pytest.raises(UserError, match=r"(?s)--tokenizer=gpt2.*TIKTOKEN_CACHE_DIR.*train:N.*bytes.*path of a tokenizer.json"):
        tokenizer.resolve("gpt2")
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize(
    "spec", ["train:", "train:x", "train:256", "train:300:gpt2", "train:-1", "gpt3", "", "no/such.json", "no/such.tiktoken"]
)
def test_a_bad_spec_is_refused(spec):
    with pytest.raises(UserError):
        tokenizer.resolve(spec, lambda: [TEXT])


@pytest.mark.parametrize("text", ["", "not json", "{}", "[1]", '{"model": 1}', '{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        tokenizer.load(path)


@pytest.mark.parametrize("text", [b"QQ==", b"QQ== x", b"?? 1", b"QQ== 0\nQg== 7", b"\xff\xfe"])
def test_a_broken_tiktoken_file_is_refused(tmp_path, text):
    path = tmp_path / "x.tiktoken"
    path.write_bytes(text)
    with pytest.raises(UserError, match=r"x\.tiktoken"):
        tokenizer.resolve(str(path))


def test_a_tokenizer_json_is_encoded_by_tokenizers_and_another_type_is_refused(made, tmp_path):
    definition = json.loads(made["train:1000"][0].json)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition | {"normalizer": {"type": "NFC"}}), encoding="utf-8")
    assert not tokenizer.resolve(str(path)).tiktoken
    assert tokenizer.load(path).encode("e\u0301 x").tolist() == made["train:1000"][0].encode("é x").tolist()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    path.write_text(json.dumps(definition | {"pre_tokenizer": level}), encoding="utf-8")
    assert tokenizer.load(path).encode(ENGLISH).tolist() == read(path).encode(ENGLISH, add_special_tokens=False).ids

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a"))
    words.add_special_tokens(["<|endoftext|>"])
    words.save(str(path))
    with pytest.raises(UserError, match="not a byte-level BPE"):
        tokenizer.load(path)


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BROKEN = {  # how a tokenizer.json differs from a good one, and what the error says
    "no pre-tokenizer": ({"pre_tokenizer": None}, "loses text: 'two words' would become 'twowords'"),
    "words only": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, LEVEL]}},
        "loses text",
    ),
    "prefix": (
        {"pre_tokenizer": LEVEL | {"add_prefix_space": True}},
        "loses text: 'two words' would become ' two words'; .*add_prefix_space",
    ),
    "strip": ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "loses text: '  two  spaces'"),
    "no decoder": (
        {"decoder": None},
        'has no decoder, so spaces would appear as Ġ; set "decoder" in it to {"type": "ByteLevel"',
    ),
    "decoder": ({"decoder": {"type": "Fuse"}}, "loses text: 'two words' would become 'twoĠwords'"),
    "dropout": ({"model": {"dropout": 0.3}}, 'encodes at random, with a dropout of 0.3; set "dropout" to null'),
    "suffix": ({"model": {"end_of_word_suffix": "</w>"}}, "loses text"),
}


def changed(made, **parts):
    """A tokenizer.json of GPT-2's kind with other parts."""
    definition = json.loads(made["train:1000"][0].json) | {"pre_tokenizer": LEVEL}
    model = definition["model"] | parts.pop("model", {})
    return json.dumps(definition | parts | {"model": model})


@pytest.mark.parametrize("kind", BROKEN)
def test_a_tokenizer_that_loses_text_is_refused(made, tmp_path, monkeypatch, kind):
    parts, said = BROKEN[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(changed(made, **parts))
    (tmp_path / "a.txt").write_text(ENGLISH)
    with pytest.raises(UserError, match=rf"^t\.json {said}"):
        prepare_data.prepare(prepare_data.PrepareConfig(("a.txt",), out="out", tokenizer="t.json"))
    assert not (tmp_path / "out").exists()


def test_what_a_normalizer_changes_is_said_in_one_line(made, tmp_path):
    path = tmp_path / "t.json"
    for normalizer, changes in (
        ("NFKC", "'e\u0301 ﬁ ½"),
        ("Lowercase", '"Don\'t SHOUT, 12345!" becomes "don\'t shout'),
        ("NFC", "'e\u0301"),
    ):
        path.write_text(changed(made, normalizer={"type": normalizer}))
        (note,) = tokenizer.resolve(str(path)).check_text()
        assert f"{path} changes text: {changes}" in note
    path.write_text(changed(made))
    assert not tokenizer.resolve(str(path)).check_text()


@pytest.mark.parametrize("kind", ["llama2", "gemma", "mistral", "trained"])
def test_tokenizers_of_sentencepiece_encode_as_transformers_does(tmp_path, kind):
    path = tmp_path / "t.json"
    sentencepiece(path, ENGLISH * 9, kind)
    ours, theirs = tokenizer.resolve(str(path)), read(path)
    notes = ours.check_text()
    assert notes[-1].endswith("begins texts with <s>, but documents here begin with </s>")
    assert len(notes) == (2 if kind == "mistral" else 1)  # it drops a space in front of a text
    for text in (ENGLISH, "x", "</s> spelled <0x0A> out", "größer 東京 🚢\n\n  x"):
        ids = ours.encode(text)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids and ours.decode(ids) == text
        assert ours.bytes_per_token[ids].sum() + ours.bytes_per_token[ours.eot_token] == len(text.encode())
        assert "".join(sample.stream(ours, ids[:1].tolist(), ids[1:].tolist())) == text
        assert "".join(sample.stream(ours, [ours.eot_token], ids.tolist())) == text


@pytest.mark.parametrize("pattern", ["GPT2_PATTERN", "META_PATTERN"])
def test_a_tiktoken_file_must_be_a_published_one(tmp_path, monkeypatch, pattern):
    ranks = tokenizer.train([TEXT], 600, "", getattr(tokenizer, pattern)).tiktoken._mergeable_ranks
    lines = [b"%s %d" % (base64.b64encode(token), rank - 1) for token, rank in ranks.items()]
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(
        UserError, match=r"x\.tiktoken has 599 tokens, .*50,256 \(GPT-2\).*128,000 \(Llama 3\).*tokenizer\.json"
    ):
        tokenizer.resolve(str(path))
    made = tokenizer.from_ranks(
        tokenizer.read_ranks(path), getattr(tokenizer, pattern), {"<|endoftext|>": 599}, "x"
    )  # docs/input.md
    made.save(tmp_path / "x.json")
    assert tokenizer.resolve(str(tmp_path / "x.json")).encode(TEXT).tolist() == made.encode(TEXT).tolist()
    published = {599: ("Llama 3", tokenizer.META_PATTERN, {"<|begin_of_text|>": 599, "<|end_of_text|>": 600})}
    monkeypatch.setattr(tokenizer, "KNOWN_RANKS", published)
    if pattern == "GPT2_PATTERN":  # of the same size, but learned from other words
        with pytest.raises(UserError, match=r"x\.tiktoken has 599 tokens"):
            tokenizer.resolve(str(path))
    else:
        found = tokenizer.resolve(str(path))
        meta = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        meta += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        reference = tiktoken.Encoding("", pat_str=meta, mergeable_ranks={t: r - 1 for t, r in ranks.items()}, special_tokens={})
        assert (found.vocab_size, found.eot_token) == (601, 600)
        for text in (TEXT, ENGLISH, "".join(SNIPPETS)):
            assert found.encode(text).tolist() == reference.encode(text, disallowed_special=())
        found.save(tmp_path / "t.json")
        assert tokenizer.resolve(str(tmp_path / "t.json")).tiktoken


def test_added_tokens_count_the_text_they_stand_for(made, tmp_path):
    wider = tokenizers.Tokenizer.from_str(made["train:1000"][0].json)
    wider.add_tokens([tokenizers.AddedToken("        ", normalized=False)])  # as GPT-NeoX's runs of spaces
    wider.save(str(tmp_path / "tokenizer.json"))
    found, text = tokenizer.load(tmp_path / "tokenizer.json"), "a" + " " * 8 + "b\n"
    ids = found.encode(text)
    assert 1000 in ids and found.bytes_per_token[ids].sum() == len(text)


def split_by(regex):
    """The part of a tokenizer.json that splits text by a regex."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}


def test_a_regex_that_only_the_corpus_sends_back_and_forth_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.resolve("bytes").json) | split_by(r"(é+)+$")))
    (tmp_path / "a.txt").write_text("é" * 100 + "!" + " words" * 100)
    command = [sys.executable, ROOT / "prepare_data.py", "a.txt", "--tokenizer=tokenizer.json", "--out=out"]
    refused = execute(command, 2, cwd=tmp_path).stderr
    assert refused.splitlines()[-1].startswith(
        "error: tokenizer.json failed to encode part of the text: Onig: Regex search error: retry-limit"
    )
    assert "Traceback" not in refused
