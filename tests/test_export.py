"""export.py through its front door: what it publishes is what transformers and --init_from take, and what it refuses."""

import dataclasses
import json
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file

import export
from checkpoints import checkpoint
from common import cli
from common.errors import UserError
from conftest import execute
from hub_server import HubServer


@pytest.fixture(scope="module")
def exported(shared, tmp_path_factory):
    """The export of an undisturbed run in small shards, and what the command printed."""
    out = tmp_path_factory.mktemp("export") / "model"
    done = execute([sys.executable, "export.py", shared.runs / "plain", f"--out={out}", "--max_shard_size=20.0KB"])
    return out, done.stdout


def test_the_weights_are_the_runs_in_bfloat16_and_shards(exported, shared):
    out, printed = exported
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2 and f"{len(shards)} weights files" in printed and "bfloat16" in printed
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert index == {name: shard.name for shard in shards for name in load_file(shard)}
    weights = shared.weights("plain")
    assert tensors.keys() == weights.keys()
    assert all(
        value.dtype == torch.bfloat16 and torch.equal(value, weights[name].bfloat16()) for name, value in tensors.items()
    )
    names = {path.name for path in out.iterdir()} - {path.name for path in shards}
    assert names == {
        "README.md", "config.json", "config.toml", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_transformers_opens_it_and_a_run_starts_from_it(exported, shared, train):
    out, _ = exported
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
    train("tuned", init_from=out, steps=1, warmup_steps=0, lr=1e-6, optimizer="adamw")
    assert train.metrics("tuned")[0]["loss"] < shared.metrics("plain")[0]["loss"] - 1


def test_the_card_has_data_losses_settings_and_the_command_that_repeats_the_run(exported, shared, train):
    out, _ = exported
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    validations = shared.metrics("plain", "val_loss")
    assert f"| validation loss, nats per token | {validations[-1]['val_loss']:.4f} | 20 |" in card
    assert f"| lowest validation loss so far | {min(v['val_loss'] for v in validations):.4f} |" in card
    assert str(shared.tokens) in card and "tokenizer bytes" in card and "train.py" in card
    assert "for 20 steps on\n7,680 tokens, from scratch." in card
    assert f"replay.py {shared.runs / 'plain'} --verify" in card and "This export has not run that check." in card
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
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (train.latest("grown") / "model.safetensors").read_bytes()


def test_the_card_is_utf_8_whatever_the_locale(train, tmp_path):
    train("größe", steps=1, eval_every=0)
    (train.runs / "größe").rename(tmp_path / "run")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    execute([sys.executable, "export.py", tmp_path / "run", f"--out={tmp_path}/out"], env=locale, fork=False)
    assert "größe" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_the_same_copy_is_uploaded(exported, shared, tmp_path):
    out, _ = exported
    hub = HubServer(token="secret")
    command = [sys.executable, "export.py", shared.runs / "plain", "--push=me/model", "--max_shard_size=20.0KB"]
    env = {"HF_ENDPOINT": hub.url(), "HF_TOKEN": "secret", "HF_HUB_OFFLINE": "0", "TMPDIR": str(tmp_path)}
    done = execute(command, env=env)
    assert f"is now {hub.url()}/me/model: " in done.stdout and not any(tmp_path.iterdir())
    (sent,) = hub.repositories["me/model"].values()
    assert sent == {path.name: path.read_bytes() for path in out.iterdir()}
    refused = execute(command, 2, env=env | {"HF_TOKEN": "other"})
    assert refused.stderr.startswith("error: --push=me/model: ") and len(refused.stderr.splitlines()) == 1
    hub.close()


def test_bad_input_leaves_nothing_behind(shared, tmp_path):
    def refused(*arguments):
        with pytest.raises(UserError) as caught:
            export.main(cli.parse(export.ExportConfig, [str(a) for a in arguments], ""))
        return str(caught.value)

    run, out = shared.runs / "plain", tmp_path / "out"
    (tmp_path / "mine").write_text("precious")
    assert "nothing is overwritten" in refused(run, f"--out={tmp_path}")
    assert "nothing is overwritten" in refused(run, f"--out={tmp_path}/mine")
    assert "--out" in refused(run)
    assert "--push=OWNER/NAME" in refused(run, "--out=hf://me/model")
    for size in ("5", "GB", "-1GB", "0MB", "1.GB", "5XB"):
        assert "--max_shard_size" in refused(run, f"--out={out}", f"--max_shard_size={size}")
    assert "neither a run" in refused(tmp_path, f"--out={out}")
    state = dataclasses.replace(checkpoint.load_state(shared.latest("plain")), settings={"strategy": "other"})
    with pytest.raises(UserError, match=": strategy must be"):
        export.card(shared.latest("plain"), state, 1, "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
