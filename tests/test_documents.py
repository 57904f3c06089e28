"""--attend=document: no token sees another document of its window."""

import json
import pickle
import re
import sys

import numpy as np
import pytest
import torch
import transformers

from conftest import execute
from lockstep import settings
from lockstep.checkpoints import huggingface
from lockstep.parallel.replicas import digest
from lockstep.settings import ModelConfig
from model import GPT, initial_weights

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


@pytest.mark.parametrize(
    "architecture, mode, dtype",
    [
        *((architecture, "eager", torch.float32) for architecture in ARCHITECTURES),
        ("qwen3", "eager", torch.bfloat16),
        ("qwen3", "compiled", torch.bfloat16),
    ],
)
@torch.no_grad()
def test_logits_do_not_change_with_another_document_of_the_window(architecture, mode, dtype):
    model, (tokens, changed) = tiny(architecture), two_windows()
    if mode == "compiled":
        model.compile_blocks()
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


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory):
    """Tokens of documents of a few bytes: many start within a window."""
    folder = tmp_path_factory.mktemp("short")
    text = "".join(json.dumps({"text": f"{i} squared is {i * i}"}) + "\n" for i in range(400))
    (folder / "short.jsonl").write_text(text)
    execute([sys.executable, "prepare_data.py", folder / "short.jsonl", f"--out={folder}/tokens", "--tokenizer=bytes"])
    return folder / "tokens"


def test_exact_has_the_same_bits_on_any_number_of_ranks(train, short_documents):
    flags = dict(tokens=short_documents, strategy="exact", dtype="bfloat16", steps=4, eval_every=0)
    for ranks in (1, 3):
        train(f"ranks{ranks}", ranks=ranks, attend="document", **flags)
    train("window", **flags)
    weights = [(train.latest(name) / "model.safetensors").read_bytes() for name in ("ranks1", "ranks3", "window")]
    assert weights[0] == weights[1] != weights[2]


def test_evaluating_a_run_attends_as_the_run_did(train, short_documents):
    train("run", tokens=short_documents, attend="document", steps=5, eval_tokens=0)
    said = execute([sys.executable, "evaluate.py", train.runs / "run", "--dtype=float32"]).stdout
    (loss,) = re.findall(r"^loss ([\d.]+)", said, re.M)
    assert float(loss) == pytest.approx(train.metrics("run")[-1]["val_loss"], abs=6e-5)


def test_a_run_goes_on_as_it_attended(train):
    train("run", attend="document", steps=5)
    assert "--attend=window, but the checkpoint used document" in train("run", attend="window", steps=10, status=2).stderr
    assert "within documents" in train("run", steps=10).stdout


def test_tokens_whose_end_of_text_is_not_known_are_refused(train, tmp_path):
    for split in ("train", "val"):
        (np.arange(5000) % 60).astype("<u2").tofile(tmp_path / f"{split}.bin")
    flags = dict(tokens=tmp_path, attend="document", vocab_size=60, steps=1)
    said = train("unknown", **flags, status=2).stderr
    assert f"--attend=document: {tmp_path} does not say which token separates documents; put its tokenizer.json there" in said
    ids = {f"<{i}>": i for i in range(59)} | {"<|endoftext|>": 59}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": ids, "merges": []}, "added_tokens": []})
    )
    assert "token 59 separates documents (from its tokenizer)" in train("known", **flags).stdout
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 60}))  # nanoGPT's characters
    assert "use --attend=window" in train("characters", **flags | dict(vocab_size="auto"), status=2).stderr
