"""export.py's card and uploads, through its front door."""

import dataclasses
import json
import shlex
import shutil
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import export
from conftest import content, execute
from extras.publishing import model_card
from hub_server import HubServer
from lockstep.checkpoints import checkpoint
from lockstep.common import cli
from lockstep.common.errors import UserError


def test_the_card_has_data_losses_settings_and_the_command_that_repeats_the_run(exported, shared, train):
    out, _ = exported
    card = (out / "README.md").read_text()
    assert card.startswith("---\n") and "\nlibrary_name: transformers\n" in card
    validations = shared.metrics("plain", "val_loss")
    assert f"| validation loss, nats per token | {validations[-1]['val_loss']:.4f} | 20 |" in card
    assert f"| lowest validation loss so far | {min(v['val_loss'] for v in validations):.4f} |" in card
    assert str(shared.tokens) in card and "tokenizer bytes" in card and "train.py" in card
    assert "for 20 steps on\n7,680 tokens, from scratch." in card
    assert f"replay.py {shared.runs / 'plain'} --verify" in card and "The export did not run this check." in card
    assert "verified" not in card
    command = next(line for line in card.splitlines() if line.startswith("python train.py"))
    assert command == "python train.py config.toml --name=plain-again"
    execute([sys.executable, "train.py", out / "config.toml", "--name=plain-again", f"--out_dir={train.runs}"])
    assert train.files("plain-again") == shared.files("plain")


def test_a_run_on_several_ranks_whose_settings_changed_says_so(train, tmp_path):
    train("grown", ranks=2, steps=2, eval_every=0)
    train("grown", ranks=2, steps=4, eval_every=0, lr=5e-3)
    with open(train.runs / "grown" / "metrics.jsonl", "a") as file:
        file.write('[1]\n{"step": 4, "lo')  # foreign, and torn by a kill
    export.main(cli.parse(export.ExportConfig, [str(train.runs / "grown"), f"--out={tmp_path}/out", "--dtype=float32"], ""))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "torchrun --standalone --nproc_per_node=2 train.py" in card and "changed after step 2." in card
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == train.weights("grown").keys()
    assert all(torch.equal(weights[name], value) for name, value in train.weights("grown").items())


def test_the_card_is_utf_8_whatever_the_locale(train, tmp_path):
    train("größe", steps=1, eval_every=0)
    (train.runs / "größe").rename(tmp_path / "run")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    execute([sys.executable, "export.py", tmp_path / "run", f"--out={tmp_path}/out"], env=locale, fork=False)
    assert "größe" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def upload(hub, *command, status=0, **env):
    """Run a command with --push to a hub. Returns what it printed."""
    env = {"HF_ENDPOINT": hub.url(), "HF_TOKEN": "secret", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"} | env
    return execute([sys.executable, *command], status, env=env)


@pytest.fixture
def hub():
    server = HubServer(token="secret")
    yield server
    server.close()


def test_the_same_copy_is_uploaded(exported, shared, tmp_path, hub):
    out, _ = exported
    command = ["export.py", shared.runs / "plain", "--push=me/model", "--max_shard_size=20.0KB"]
    done = upload(hub, *command, TMPDIR=str(tmp_path), HF_HUB_DISABLE_XET="0")
    assert f" to {hub.url()}/me/model: " in done.stdout and not any(tmp_path.iterdir())
    assert hub.head("me/model") == content(out)
    refused = upload(hub, *command, status=2, HF_TOKEN="other")
    assert refused.stderr.startswith("error: --push=me/model: ") and len(refused.stderr.splitlines()) == 1
    assert "hf auth login" in refused.stderr
    upload(hub, *command, f"--out={tmp_path}/copy", status=2, HF_TOKEN="other")
    upload(hub, *command, f"--out={tmp_path}/copy")  # the same command again
    assert content(tmp_path / "copy") == content(out)
    malformed = upload(hub, *command[:2], "--push=a/b/c", status=2).stderr
    assert malformed.startswith("error: --push=a/b/c: ") and "hf auth login" not in malformed


def test_an_upload_is_tried_again_and_resumed_and_leaves_no_file_of_an_earlier_one(exported, shared, hub):
    out, _ = exported
    hub.takes_large_files, faults = True, {"create": 503, "batch": "drop", "commit": 500}
    shards = sorted(out.glob("*.safetensors"))

    def misbehave(number, method, path):
        if method == "PUT" and len(hub.large) == 1 and "PUT" in faults:
            return faults.pop("PUT")
        return next((faults.pop(word) for word in list(faults) if method == "POST" and word in path.split("/")), None)

    hub.misbehave = misbehave
    command = ["export.py", shared.runs / "plain", "--push=me/model"]
    done = upload(hub, *command, "--max_shard_size=20.0KB")
    assert not faults and "retrying in 1 s" in done.stdout
    sent = [path for method, path in hub.requests if method == "PUT"]
    assert len(sent) == len(set(sent)) == len(shards)  # each once, although the commit failed
    assert hub.head("me/model") == content(out)
    upload(hub, *command)
    last = hub.head("me/model")
    assert [name for name in last if "safetensors" in name] == ["model.safetensors"] and last.keys() < {*content(out), *last}


def test_a_branch_and_a_private_repository_are_made_and_a_public_one_is_refused(shared, hub):
    command = ["export.py", shared.runs / "plain"]
    assert f"{hub.url()}/me/own/tree/step-20" in upload(hub, *command, "--push=me/own@step-20", "--private").stdout
    assert hub.private == {"me/own": True}
    assert "model.safetensors" in hub.head("me/own", "step-20") and not hub.head("me/own")
    upload(hub, *command, "--push=me/open")
    refused = upload(hub, *command, "--push=me/open", "--private", status=2).stderr
    assert refused.startswith(f"error: --push=me/open: {hub.url()}/me/open already exists and is public; make it private")
    assert len(hub.repositories["me/open"]) == 2  # the first is empty


def test_the_head_of_the_card_is_what_the_hub_reads(train, tmp_path):
    train("tasked", steps=2, eval_every=1, init_from="scratch")
    with open(train.runs / "tasked" / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "tasks/arc/acc": 0.5}\n{"step": 2, "tasks/arc/acc": 0.25, "tasks/arc/acc_norm": 0.125}\n')
    out, said = tmp_path / "out", ["--license=apache-2.0", "--language=en,de"]
    execute([sys.executable, "export.py", train.runs / "tasked", f"--out={out}", *said])
    card = ModelCard.load(out / "README.md")
    assert (card.data.license, card.data.language, card.data.datasets, card.data.base_model) == (
        "apache-2.0",
        ["en", "de"],
        None,
        None,
    )
    assert "| arc, acc | 0.2500 | 2 |" in card.text


def test_the_card_names_the_datasets_and_the_model_on_the_hub_that_the_run_came_from(shared, tmp_path):
    tokens, state = tmp_path / "tokens", checkpoint.load_state(shared.latest("plain"))
    shutil.copytree(shared.tokens, tokens)
    metadata = json.loads((tokens / "dataset.json").read_text())
    metadata["source"] = [
        {"path": "hf://datasets/owner/web@main/data/*.parquet", "revision": "a" * 40},
        {"path": "more text.txt"},
    ]
    metadata["options"] = {"max_tokens": 5000}
    (tokens / "dataset.json").write_text(json.dumps(metadata))
    flags = dict(tokens=str(tokens), init_from="openai-community/gpt2")
    (era,) = state.history
    state = dataclasses.replace(state, settings=state.settings | flags, history=[era | {"settings": era["settings"] | flags}])
    files = model_card.describe(shared.latest("plain"), state, 1, "float32", "", "")
    head = ModelCard(files["README.md"]).data
    assert (head.datasets, head.base_model) == (["owner/web"], "openai-community/gpt2")
    command = f"python prepare_data.py hf://datasets/owner/web@{'a' * 40}/data/*.parquet 'more text.txt' --out={tokens}"
    found = files["config.toml"].splitlines()[0]
    assert shlex.split(found.removeprefix("# The tokens: ")) == [
        *shlex.split(command),
        *shlex.split("--tokenizer=bytes --val_fraction=0.1 --shard_tokens=20000 --max_tokens=5000"),
    ]


def test_a_state_with_another_strategy_has_no_card(shared):
    state = dataclasses.replace(checkpoint.load_state(shared.latest("plain")), settings={"strategy": "other"})
    with pytest.raises(UserError, match=": strategy must be"):
        model_card.describe(shared.latest("plain"), state, 1, "float32", "", "")
