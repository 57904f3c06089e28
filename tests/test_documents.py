"""--attend=document: no token sees another document of its window."""

import json
import sys

import numpy as np
import pytest
import torch
import transformers

import documents
import settings
from checkpoints import huggingface
from conftest import execute
from model import GPT, compile_blocks, initial_weights
from parallel.replicas import digest
from settings import ModelConfig

START = 0  # the token that starts a document
ARCHITECTURES = ["gpt2", "llama", "qwen3"]


def tiny(architecture):
    """A model whose attention is far from uniform."""
    shape = ModelConfig(architecture=architecture, n_layer=2, n_head=2, n_embd=32, seq_len=32, vocab_size=128)
    model = GPT(settings.resolve_model(shape, 128)).eval()
    model.load_state_dict(dict(initial_weights(model, seed=0)))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.3, generator=generator)
    model.document_token = START
    return model


def two_windows():
    """Two batches [2, 32] that differ only in the second document of the first window, which is from place 5 to 19."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 128, (2, 32), generator=generator)
    tokens[0, 5] = tokens[0, 20] = tokens[1, 0] = tokens[1, 31] = START
    changed = tokens.clone()
    changed[0, 6:20] = torch.randint(1, 128, (14,), generator=generator)
    return tokens, changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_logits_do_not_change_with_another_document_of_the_window(architecture, mode, dtype):
    model, (tokens, changed) = tiny(architecture), two_windows()
    if mode == "compiled":
        compile_blocks(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        before, after = model(tokens), model(changed)
    same = (before == after).all(-1)
    assert same[0, :5].all() and same[0, 20:].all() and same[1].all()
    assert not same[0, 7:20].any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_logits_are_those_of_transformers_for_each_document_alone(architecture, tmp_path):
    model, (tokens, _) = tiny(architecture), two_windows()
    huggingface.write_model(tmp_path, model.state_dict(), model.config, None, START)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    logits = model(tokens)[0]
    for first, end in ((0, 5), (5, 20), (20, 32)):
        torch.testing.assert_close(logits[first:end], theirs(tokens[:1, first:end]).logits[0], atol=2e-5, rtol=1e-4)


def test_gradients_stay_within_documents():
    model, (tokens, _) = tiny("qwen3"), two_windows()
    x = model.embed(tokens).detach().requires_grad_()
    run_from(model, tokens, x)[0, 20:].sum().backward()
    assert not x.grad[0, :20].any() and x.grad[0, 20:].any() and not x.grad[1].any()


def test_every_backward_of_two_threads_gives_the_same_bits():
    shape = ModelConfig(architecture="gpt2", n_layer=1, n_head=1, n_embd=64, seq_len=64, vocab_size=128)
    model, threads = GPT(settings.resolve_model(shape, 128)), torch.get_num_threads()
    model.load_state_dict(dict(initial_weights(model, seed=0)))
    model.document_token = START
    tokens = torch.randint(0, 128, (32, 65), generator=torch.Generator().manual_seed(0))
    gradients = set()
    torch.set_num_threads(2)
    try:
        for _ in range(12):
            model.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            gradients.add(tuple(digest(name, parameter.grad) for name, parameter in model.named_parameters()))
    finally:
        torch.set_num_threads(threads)
    assert len(gradients) == 1


def run_from(model, tokens, x):
    """The last hidden states of `model` for embeddings `x` of `tokens`."""
    _, mask = model.find_documents(tokens, x.dtype)
    for block in model.blocks:
        x = block(x, model.rope.table[:, : x.shape[1]], None, mask)
    return x


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory):
    """Tokens of documents of a few bytes: many start within a window."""
    folder = tmp_path_factory.mktemp("short")
    text = "".join(json.dumps({"text": f"{i} squared is {i * i}"}) + "\n" for i in range(400))
    (folder / "short.jsonl").write_text(text)
    execute([sys.executable, "prepare_data.py", folder / "short.jsonl", f"--out={folder}/tokens", "--tokenizer=bytes"])
    return folder / "tokens"


def test_exact_has_the_same_bits_on_any_number_of_ranks(train, short_documents):
    flags = dict(tokens=short_documents, strategy="exact", dtype="bfloat16", steps=6)
    for ranks in (1, 2, 3):
        train(f"ranks{ranks}", ranks=ranks, attend="document", **flags)
    train("window", **flags)
    weights = [(train.latest(name) / "model.safetensors").read_bytes() for name in ("ranks1", "ranks2", "ranks3", "window")]
    assert weights[0] == weights[1] == weights[2] != weights[3]


def test_evaluating_a_run_attends_as_the_run_did(train, short_documents):
    train("run", tokens=short_documents, attend="document", steps=5, eval_tokens=0)
    said = execute([sys.executable, "evaluate.py", train.runs / "run", "--dtype=float32"]).stdout
    assert f"loss {train.metrics('run')[-1]['val_loss']:.4f}" in said


def test_a_run_goes_on_as_it_attended(train):
    train("run", attend="document", steps=5)
    assert "--attend=window, and the checkpoint has document" in train("run", steps=10, status=2).stderr


def test_tokens_without_starts_of_documents_are_refused(train, tmp_path):
    for split in ("train", "val"):
        (np.arange(5000) % 60).astype("<u2").tofile(tmp_path / f"{split}.bin")
    (tmp_path / "meta.pkl").write_bytes(meta_of_characters(60))
    said = train("characters", tokens=tmp_path, attend="document", status=2).stderr
    assert "--attend=document" in said and "use --attend=window" in said


def meta_of_characters(count):
    """nanoGPT's meta.pkl for `count` characters."""
    import pickle

    characters = [chr(97 + i) for i in range(count)]
    content = {"vocab_size": count, "itos": dict(enumerate(characters)), "stoi": {c: i for i, c in enumerate(characters)}}
    return pickle.dumps(content)


def test_the_benchmark_counts_what_windows_cut_and_packs_without_loss(rng):
    seq_len, lengths = 32, rng.integers(1, 80, size=200)
    text = np.repeat(np.arange(200), lengths)  # which document each token belongs to
    windows = [text[at : at + seq_len] for at in range(0, len(text), seq_len)]
    found = documents.count(lengths, seq_len)
    cut = [sum(i in window for window in windows) > 1 for i in range(200)]
    assert found["cut"] == np.mean(cut) and found["cut, packed"] == np.mean(lengths > seq_len) < found["cut"]
    after = sum(np.sum(window == i) for i in range(200) for window in [w for w in windows if i in w][1:])
    assert found["tokens after a cut"] == pytest.approx(after / len(text))

    packed = documents.best_fit(lengths, seq_len)
    pieces = {(i, first): min(lengths[i], first + seq_len) - first for window in packed for i, first in window}
    assert all(sum(pieces[piece] for piece in window) <= seq_len for window in packed)
    assert len(pieces) == sum(map(len, packed)) and sum(pieces.values()) == len(text)
    assert {i for i, _ in pieces} == set(range(200))
