"""evaluate.py --tasks with the real lm-eval, offline. It is optional: pip install "lm_eval[hf]"."""

import importlib.util
import json
import re
import sys

import pytest
import torch

from checkpoints import huggingface, lookup
from conftest import execute
from dataset import tokenizer
from model import GPT, initialize
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
    initialize(model, 0)
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


def evaluated(folder, *flags, status=0, **env):
    """Run evaluate.py on the model, without a network."""
    env = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} | env
    command = [sys.executable, "evaluate.py", folder / "model", "--device=cpu", *flags]
    return execute(command, status=status, env=env, timeout=900)


@needs_lm_eval
@torch.no_grad()
def test_hellaswag_by_name_on_its_data(folder):
    printed = evaluated(folder, "--tasks=hellaswag", f"--task_data={folder}/hellaswag.jsonl").stdout
    found = {name: float(value) for name, value in re.findall(r"^hellaswag  (\w+) ([\d.]+)", printed, re.M)}
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


@needs_lm_eval
def test_a_task_of_ones_own(folder):
    (folder / "own.jsonl").write_text('{"question": "1 + 1 =", "options": ["2", "3"], "answer": 0}\n')
    (folder / "own.yaml").write_text(
        "task: own\ndataset_path: json\noutput_type: multiple_choice\nvalidation_split: validation\n"
        f"dataset_kwargs: {{data_files: {{validation: {folder}/own.jsonl}}}}\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\ndoc_to_choice: "{{options}}"\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    assert re.search(r"^own  acc [01]\.0000", evaluated(folder, f"--tasks={folder}/own.yaml").stdout, re.M)
    assert "--tasks=no_such_task" in evaluated(folder, "--tasks=no_such_task", status=2).stderr


def test_without_lm_eval_the_error_says_what_to_install(folder, tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ImportError")
    refused = evaluated(folder, "--tasks=hellaswag", status=2, PYTHONPATH=str(tmp_path)).stderr
    assert 'pip install "lm_eval[hf]"' in refused
    for flags in (["--task_data=absent.jsonl"], ["--tasks=hellaswag", "--task_data=absent.jsonl"]):
        assert "--task_data=absent.jsonl must be a file" in evaluated(folder, *flags, status=2).stderr
