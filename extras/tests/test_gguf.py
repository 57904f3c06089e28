"""llama.cpp reads a model whose tokenizer was trained here: the same tokens and the same logits.

LLAMA_CPP names a checkout of llama.cpp, and llama-cpp-python runs it (docs/export.md has the commands). Without them only the
refusals are tested.
"""

import os
import random
import sys

import numpy as np
import pytest
import torch

from conftest import execute, randomized
from lockstep.checkpoints import huggingface
from lockstep.dataset import tokenizer
from lockstep.settings import ModelConfig, resolve_model
from model import GPT
from test_tokenizer import ENGLISH, SNIPPETS, TEXT

CHECKOUT = os.environ.get("LLAMA_CPP", "")
SHAPES = {
    "gpt2": ModelConfig(architecture="gpt2", n_layer=2, n_head=2, n_embd=64, seq_len=64),
    "llama": ModelConfig(architecture="llama", n_layer=2, n_head=4, n_kv_head=2, n_embd=64, seq_len=64, rope_theta=5000.0),
    "qwen3": ModelConfig(architecture="qwen3", n_layer=2, n_head=4, n_kv_head=1, n_embd=64, seq_len=64, head_dim=32),
}


def write(directory, shape, spec):
    """A model directory with a tokenizer that was trained here."""
    own = tokenizer.resolve(spec, lambda: [TEXT, ENGLISH * 20])
    own.save(directory / "own.json")
    model = randomized(GPT(resolve_model(SHAPES[shape], own.vocab_size)).eval(), 0.05)
    huggingface.write_model(directory, model.state_dict(), model.config, directory / "own.json", own.eot_token)
    return own, model


def convert(directory, checkout, status=0):
    command = [sys.executable, "extras/to_gguf.py", directory, f"--llama_cpp={checkout}", "--outtype=f32"]
    return execute(command, status, fork=False)


@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_has_the_same_tokens_and_logits(tmp_path, shape):
    llama_cpp = pytest.importorskip("llama_cpp")
    if not CHECKOUT:
        pytest.skip("LLAMA_CPP is not set")
    own, model = write(tmp_path, shape, "train:1000:llama3")
    convert(tmp_path, CHECKOUT)
    full = dict(type_k=0, type_v=0)  # a cache in float32; its default is float16
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1, **full)
    draw = random.Random(1)
    for text in [ENGLISH, TEXT[:20000], *("".join(draw.choices(SNIPPETS, k=draw.randint(1, 12))) for _ in range(2000))]:
        assert theirs.tokenize(text.encode(), add_bos=False) == own.encode(text).tolist(), text
    tokens = theirs.tokenize(ENGLISH.encode())[:64]
    assert tokens[0] == own.eot_token  # a document begins with it, in training, too
    theirs.eval(tokens)
    with torch.no_grad():
        ours = model(torch.tensor([tokens]))[0].numpy()
    found = np.array(theirs.scores[: len(tokens)])[:, : ours.shape[1]]
    assert np.abs(found - ours).max() < (1e-3 if shape == "gpt2" else 3e-5) * np.abs(ours).max()  # its GELU is a float16 table
    theirs.close()


def test_other_tokenizers_and_folders_are_refused(tmp_path):
    write(tmp_path, "llama", "train:300")
    assert "--llama_cpp=nowhere must be a checkout" in convert(tmp_path, "nowhere", status=2).stderr
    (tmp_path / "convert_hf_to_gguf.py").touch()
    assert "--tokenizer=train:N:llama3" in convert(tmp_path, tmp_path, status=2).stderr
    write(tmp_path, "llama", "train:300:llama3")
    assert "pip install" in convert(tmp_path, tmp_path, status=2).stderr
    assert not list(tmp_path.glob("*.gguf"))
