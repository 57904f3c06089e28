"""The real lm-eval opens a model directory of ours, offline. It is optional: pip install "lm_eval[hf]"."""

import importlib.util
import json
import re
import sys

import pytest
import torch

from checkpoints import huggingface, lookup
from conftest import execute
from dataset import tokenizer
from model import GPT, initial_weights
from settings import ModelConfig, resolve_model

DOCUMENTS = [
    ("Baking", "A man pours flour.", "he", ["adds water and stirs.", "flies away.", "sings [title] a song.", "is a cat."], 0),
    ("Running", "Two girls run.", "they", ["sleep.", "sit in a tree all day long.", "reach the end.", "melt."], 2),
    ("Painting", "A hand holds a brush.", "it", ["paints the wall.", "rains.", "is blue and loud.", "eats."], 0),
    ("Rowing", "A boat is on a lake.", "it", ["burns.", "moves on slowly.", "talks to the trees.", "is old."], 1),
    ("Reading", "A book lies open.", "a boy", ["turns a page.", "swims in it.", "drinks it all.", "is late."], 3),
]
needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model on bytes with weights far from their initial ones, and documents in HellaSwag's format."""
    folder = tmp_path_factory.mktemp("tasks")
    text = tokenizer.resolve("bytes")
    text.save(folder / "tokenizer.json")
    shape = ModelConfig(architecture="llama", n_layer=1, n_head=2, n_embd=32, seq_len=128)
    model = GPT(resolve_model(shape, text.vocab_size))
    model.load_state_dict(dict(initial_weights(model, seed=0)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    (folder / "model").mkdir()
    huggingface.write_model(folder / "model", model.state_dict(), model.config, folder / "tokenizer.json", text.eot_token)
    rows = [
        {"activity_label": label, "ctx_a": a, "ctx_b": b, "endings": endings, "label": str(gold)}
        for label, a, b, endings, gold in DOCUMENTS
    ]
    (folder / "hellaswag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@needs_lm_eval
@torch.no_grad()
def test_hellaswag_on_a_file_of_its_format(folder):
    from lm_eval.tasks import TaskManager

    data_files = {"validation": str(folder / "hellaswag.jsonl")}
    split = {"training_split": None, "validation_split": "validation", "test_split": None}
    changes = {
        "task": "ours",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": data_files},
        **split,
    }
    hellaswag = str(TaskManager().task_index["hellaswag"].yaml_path)
    (folder / "ours.yaml").write_text(json.dumps({"include": hellaswag, **changes}))
    offline = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={folder / 'model'},dtype=float32"]
    command += ["--tasks", folder / "ours.yaml", "--device", "cpu", "--batch_size", "8"]
    printed = execute(command, env=offline, cwd=folder, timeout=900).stdout
    found = {name: float(value) for name, value in re.findall(r"\|(acc\w*)\s*\|[^|]*\|\s*([\d.]+)", printed)}
    # Its rule: the likeliest ending, by the sum of its tokens' log-probabilities, and by the sum over its number of characters.
    _, model = lookup.load_model(str(folder / "model"))
    right = {"acc": 0, "acc_norm": 0}
    for label, a, b, endings, gold in DOCUMENTS:
        query, endings = f"{label}: {a} {b.capitalize()}", [ending.replace(" [title]", ". ") for ending in endings]
        endings = [ending.replace("  ", " ") for ending in endings]
        sums = []
        for ending in endings:
            tokens = torch.tensor([list(f"{query} {ending}".encode())])
            logprobs = model(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[0, :, 0]
            sums.append(logprobs[len(query) - 1 :].sum().item())
        right["acc"] += max(range(4), key=sums.__getitem__) == gold
        right["acc_norm"] += max(range(4), key=lambda i: sums[i] / len(endings[i])) == gold
    assert found == {name: pytest.approx(count / len(DOCUMENTS)) for name, count in right.items()}
