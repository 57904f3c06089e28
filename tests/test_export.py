"""export.py through its front door: what it publishes is what transformers and --init_from take, and what it refuses."""

import json
import shutil
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file

import export
from conftest import ROOT, content, execute, sentencepiece
from lockstep.common import cli
from lockstep.common.errors import UserError


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
    assert names - {"README.md"} == {
        "config.json", "config.toml", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
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


def test_two_exports_have_the_same_bytes(exported, shared, tmp_path):
    for number in range(2):
        execute([sys.executable, "export.py", shared.runs / "plain", f"--out={tmp_path}/{number}", "--max_shard_size=20.0KB"])
        assert content(tmp_path / str(number)) == content(exported[0])


def test_bad_input_leaves_nothing_behind(shared, tmp_path):
    def refused(*arguments):
        with pytest.raises(UserError) as caught:
            export.main(cli.parse(export.ExportConfig, [str(a) for a in arguments], ""))
        return str(caught.value)

    run, out = shared.runs / "plain", tmp_path / "out"
    (tmp_path / "mine").write_text("precious")
    assert "will not be overwritten" in refused(run, f"--out={tmp_path}")
    assert "will not be overwritten" in refused(run, f"--out={tmp_path}/mine")
    assert "--out" in refused(run)
    assert "--push=OWNER/NAME" in refused(run, "--out=hf://me/model")
    for size in ("5", "GB", "-1GB", "0MB", "1.GB", "5XB"):
        assert "--max_shard_size" in refused(run, f"--out={out}", f"--max_shard_size={size}")
    assert "neither a run" in refused(tmp_path, f"--out={out}")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_model_on_the_tokens_of_sentencepiece_keeps_its_tokenizer(train, tmp_path):
    text, tokens, out = (ROOT / "README.md").read_text(), tmp_path / "tokens", tmp_path / "out"
    (tmp_path / "a.txt").write_text(text)
    sentencepiece(tmp_path / "t.json", text)
    execute([sys.executable, "prepare_data.py", tmp_path / "a.txt", f"--out={tokens}", f"--tokenizer={tmp_path}/t.json"])
    train("run", tokens=tokens, steps=1)
    execute([sys.executable, "export.py", train.runs / "run", f"--out={out}"])
    kept = {(folder / "tokenizer.json").read_bytes() for folder in (tokens, train.latest("run"), out)}
    assert kept == {(tmp_path / "t.json").read_bytes()}
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words.decode(words(text[:99])["input_ids"], skip_special_tokens=True) == text[:99]
    sampled = execute([sys.executable, "sample.py", out, "--prompt=Start  here", "--max_new_tokens=4"]).stdout
    assert sampled.startswith("Start  here")


def test_the_token_that_begins_texts_in_the_first_model_is_kept(shared, train, tmp_path):
    shutil.copytree((shared.runs / "plain/checkpoints/latest").resolve(), tmp_path / "first")
    (tmp_path / "first/manifest.json").unlink()
    settings = json.loads((tmp_path / "first/tokenizer_config.json").read_text())
    first = next(
        token for token, i in json.loads((tmp_path / "first/tokenizer.json").read_text())["model"]["vocab"].items() if i == 7
    )
    (tmp_path / "first/tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": {"content": first}}))
    told = train("own", init_from=tmp_path / "first", steps=2).stdout
    assert f"first begins texts with {first}, but the documents of this dataset begin with <|endoftext|>" in told
    train("own", steps=3, schedule="constant")
    execute([sys.executable, "export.py", train.runs / "own", f"--out={tmp_path}/export"])
    for model in (train.runs / "own/checkpoints/latest", tmp_path / "export"):
        found = json.loads((model / "tokenizer_config.json").read_text())
        assert (found["bos_token"], found["eos_token"]) == (first, settings["eos_token"])
        assert all(
            json.loads((model / f"{name}.json").read_text())["bos_token_id"] == 7 for name in ("config", "generation_config")
        )
