"""hf.py against transformers: directories written by one and read by the other, and what is refused."""

import dataclasses
import json
import re

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from conftest import randomized
from lockstep.architectures import ARCHITECTURES
from lockstep.checkpoints import huggingface
from lockstep.checkpoints.checkpoint import write_manifest
from lockstep.checkpoints.lookup import find, find_model
from lockstep.common import cli
from lockstep.common.errors import UserError
from lockstep.dataset import tokenizer
from lockstep.hardware import footprint
from lockstep.numerics import native
from lockstep.settings import ModelConfig, resolve_model
from model import GPT, on_meta

SHAPES = {
    "gpt2": ModelConfig(architecture="gpt2", n_layer=2, n_head=2, n_embd=16, seq_len=12),
    "gpt2_untied": ModelConfig(architecture="gpt2", n_layer=1, n_head=2, n_embd=16, d_ff=24, seq_len=12, tie_embeddings=False),
    "llama": ModelConfig(architecture="llama", n_layer=2, n_head=4, n_kv_head=2, n_embd=16, seq_len=12, rope_theta=5000.0),
    "qwen3": ModelConfig(architecture="qwen3", n_layer=2, n_head=4, n_kv_head=1, n_embd=32, seq_len=12, tie_embeddings=False),
    "qwen2": ModelConfig(architecture="qwen2", n_layer=2, n_head=4, n_kv_head=2, n_embd=16, seq_len=12, rope_theta=5000.0),
    "gpt2_erf": ModelConfig(architecture="gpt2", n_layer=1, n_head=2, n_embd=16, seq_len=12, gelu="erf"),
    "llama3": ModelConfig(
        architecture="llama", n_layer=2, n_head=2, n_embd=32, seq_len=12, head_dim=24, rope_theta=500.0, rope_scaling="8,1,4,64"
    ),
    "qwen3_wide": ModelConfig(architecture="qwen3", n_layer=1, n_head=4, n_kv_head=2, n_embd=32, seq_len=12, head_dim=16),
}
TEXT = "def f(x):\n    return x + 1  # größer\n"


def build(shape):
    return randomized(GPT(resolve_model(SHAPES[shape], 300)).eval(), 0.2)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    """A byte-level BPE whose first token is end-of-text."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.resolve("train:290", lambda: [TEXT] * 3).save(path)
    return path


@pytest.fixture(params=SHAPES)
def written(request, tmp_path, tokenizer_json):
    """A model and the directory that we wrote it to."""
    model = build(request.param)
    huggingface.write_model(tmp_path, model.state_dict(), model.config, tokenizer_json, eot_token=0)
    return model, tmp_path


TOKENS = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_transformers_opens_what_we_write(written, tokenizer_json):
    model, directory = written
    # For qwen2, AutoTokenizer of transformers 5 takes Qwen2Tokenizer, which splits text by another pattern.
    fast = model.config.architecture == "qwen2"
    theirs = (transformers.PreTrainedTokenizerFast if fast else transformers.AutoTokenizer).from_pretrained(directory)
    other, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert type(other).__name__ == model.config.record.hugging_face.model_class
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert other.dtype == torch.float32
    torch.testing.assert_close(other(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)

    assert theirs(TEXT)["input_ids"] == tokenizers.Tokenizer.from_file(str(tokenizer_json)).encode(TEXT).ids
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id, theirs.model_max_length) == (0, 0, 0, 12)
    prompt = theirs("def", return_tensors="pt")
    assert other.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def test_what_we_write_we_read_bit_for_bit_whole_and_by_rows(written):
    model, directory = written
    config, state = huggingface.read_model(directory, on_meta)
    assert config == model.config
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    GPT(config).load_state_dict(state)
    _, back = huggingface.open_model(directory, on_meta)
    for rows in (slice(0, 5), slice(5, 9), slice(9, 10_000), slice(10_000, 10_001)):
        assert all(torch.equal(back[name][rows], value[rows]) for name, value in state.items())


OTHER = dict(vocab_size=512, n_layer=3, n_head=8, n_kv_head=3, n_embd=64, head_dim=32, d_ff=40, seq_len=24)
OTHER |= dict(tie_embeddings=False, rope_theta=700.0, rope_scaling="4,1,4,64", gelu="erf", norm_eps=1e-3)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
def test_config_json_carries_every_setting_that_the_architecture_has(architecture, tmp_path):
    unused = {"gpt2": {"n_kv_head", "head_dim", "rope_theta", "rope_scaling"}, "qwen3": {"gelu"}}[architecture]
    changed = {name: value for name, value in OTHER.items() if name not in unused}
    assert cli.flat_fields(ModelConfig).keys() - OTHER.keys() == {"architecture", "dropout", "init_from", "own_code"}
    model = resolve_model(dataclasses.replace(SHAPES[architecture], **changed), 0)
    (tmp_path / "config.json").write_text(json.dumps(huggingface.config_json(model, eot_token=0)))
    assert huggingface.read_config(tmp_path) == model


def test_tokens_without_an_end_of_text_have_no_special_ids(tokenizer_json, tmp_path):
    model = build("gpt2")
    huggingface.write_model(tmp_path, model.state_dict(), model.config, tokenizer_json, eot_token=None)
    for name in ("config.json", "generation_config.json"):
        ids = json.loads((tmp_path / name).read_text())
        assert {ids.get(f"{which}_token_id") for which in ("bos", "eos", "pad")} == {None}
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token is None
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.generate(TOKENS[:1, :4], max_new_tokens=3).shape == (1, 7)


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "llama3"])
@torch.no_grad()
def test_we_read_what_transformers_saves(architecture, tmp_path):
    small = {
        "gpt2": transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=12, vocab_size=300),
        "llama": transformers.LlamaConfig(
            hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=300, max_position_embeddings=12, rope_theta=300.0,
        ),
        "qwen2": transformers.Qwen2Config(
            hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=300, max_position_embeddings=12, tie_word_embeddings=True,
        ),
        "qwen3": transformers.Qwen3Config(
            hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=6, vocab_size=300, max_position_embeddings=12, tie_word_embeddings=True,
        ),
        "llama3": transformers.LlamaConfig(
            hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, head_dim=12, vocab_size=300,
            max_position_embeddings=128, rope_theta=900.0, rope_scaling=LLAMA3 | {"original_max_position_embeddings": 64},
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    other = transformers.AutoModelForCausalLM.from_config(small[architecture]).eval()
    for parameter in other.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    other.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    config, state = huggingface.read_model(tmp_path, on_meta)
    model = GPT(config).eval()
    model.load_state_dict(state)
    torch.testing.assert_close(model(TOKENS), other(TOKENS).logits, rtol=1e-5, atol=1e-5)
    other.save_pretrained(tmp_path)  # leaves the index of the files that it removes
    (tmp_path / "model.safetensors.index.json").touch()
    assert huggingface.read_model(tmp_path, on_meta)[1].keys() == state.keys()


def test_scaled_positions_are_read_as_transformers_4_wrote_them_and_5_reads_them(tmp_path):
    shape = ModelConfig(architecture="llama", n_layer=1, n_head=2, n_embd=128, seq_len=9)
    old = huggingface.config_json(resolve_model(shape, 300), eot_token=0)
    del old["rope_parameters"]
    scaling = LLAMA3 | {"original_max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(old | {"rope_theta": 500000.0, "rope_scaling": scaling}))
    found = huggingface.read_config(tmp_path)
    assert (found.rope_theta, found.rope_scaling) == (500000.0, "32,1,4,8192")
    again = huggingface.config_json(found, eot_token=0)
    assert again["rope_scaling"] == scaling and again["rope_parameters"] == scaling | {"rope_theta": 500000.0}


def test_another_tokenizer_than_the_datasets_is_noticed(tokenizer_json, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
    assert huggingface.check_tokenizer(tmp_path / "model", tokenizer_json) == []
    definition = json.loads(tokenizer_json.read_text())
    extra = {"content": "<|pad|>", "id": 290, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    definition["added_tokens"].append(extra | {"single_word": False})
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(definition, indent=3))
    assert huggingface.check_tokenizer(tmp_path / "model", tokenizer_json) == []  # more tokens, and other bytes in the file
    assert "no tokenizer.json" in huggingface.check_tokenizer(tmp_path / "model", None)[0]
    assert f"{tmp_path} has no tokenizer.json" in huggingface.check_tokenizer(tmp_path, tokenizer_json)[0]
    other = tmp_path / "other.json"
    tokenizer.resolve("bytes").save(other)
    with pytest.raises(UserError, match=r"'Ā' is token 0 in .*other.json, but \d+ in the model's; .*--tokenizer="):
        huggingface.check_tokenizer(tmp_path / "model", other)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_a_shorter_context_is_cut_from_a_longer(shape, tmp_path):
    model = build(shape)
    huggingface.write_model(tmp_path, model.state_dict(), model.config, None, eot_token=0)
    config, state = huggingface.open_model(tmp_path, on_meta, seq_len=5)
    assert config == dataclasses.replace(model.config, seq_len=5)
    short = GPT(config).eval()
    short.load_state_dict({name: stored[:] for name, stored in state.items()})
    torch.testing.assert_close(short(TOKENS[:, :5]), model(TOKENS[:, :5]))


@pytest.mark.parametrize(
    ("shape", "change", "named"),
    [
        ("llama", {"model_type": "mistral"}, "model_type 'mistral'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
    ],
)
def test_what_is_not_exactly_ours_is_refused_by_name(shape, change, named, tmp_path):
    config = huggingface.config_json(resolve_model(SHAPES[shape], 300), eot_token=0) | change
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=named):
        huggingface.read_config(tmp_path)


def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path):
    model = build("llama")
    huggingface.write_model(tmp_path, model.state_dict(), model.config, None, eot_token=0)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for change, named in [
        ({"model.norm.weight": None}, "model.norm.weight missing"),
        ({"model.norm.bias": torch.zeros(16)}, "model.norm.bias unknown"),
        ({"model.norm.weight": torch.zeros(15)}, "model.norm.weight has the wrong shape"),
        ({"model.norm.weight": torch.zeros(16, dtype=torch.int8)}, "model.norm.weight is I8"),
    ]:
        save_file({name: value for name, value in (tensors | change).items() if value is not None}, path)
        with pytest.raises(UserError, match=named):
            huggingface.read_model(tmp_path, on_meta)
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="no model.safetensors, only config.json, .*pytorch_model.bin"):
        huggingface.read_model(tmp_path, on_meta)


def test_a_model_is_found_by_directory_run_or_not_at_all(tmp_path, monkeypatch):
    model = build("gpt2")
    saved = tmp_path / "run" / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    huggingface.write_model(saved, model.state_dict(), model.config, None, eot_token=0)
    with pytest.raises(UserError, match="step-00000001 has no manifest.json"):
        find_model(str(tmp_path / "run"))
    (saved / "optimizer.safetensors").touch()
    (saved / "trainer_state.json").write_text('{"step": 1}')
    write_manifest(saved)
    assert find_model(str(tmp_path / "run")) == find_model(str(saved)) == (saved, [])
    (saved.parent / "latest").symlink_to(saved.name)  # which moves while the run trains
    assert find_model(str(saved.parent / "latest")) == (saved, [])
    with pytest.raises(UserError, match="neither a run nor a model directory with a config.json"):
        find_model(str(tmp_path))
    with pytest.raises(UserError, match="absent is neither a run nor a model directory"):
        find_model(str(tmp_path / "absent"))
    (tmp_path / "its out").mkdir()
    (tmp_path / "its out" / "ckpt.pt").touch()
    hint = f"python extras/convert_nanogpt.py '{tmp_path}/its out/ckpt.pt' --out=models/NAME, then --init_from=models/NAME"
    for look in (find, find_model):  # --resume, --init_from
        for path in ("its out", "its out/", "its out/ckpt.pt"):
            with pytest.raises(UserError, match=re.escape(hint)):
                look(f"{tmp_path}/{path}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="is not a local directory and could not be fetched from the Hub"):
        find_model("nobody/no-such-model-of-ours")


@torch.no_grad()
def test_transformers_computes_an_activation_of_one_s_own_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "relu2", lambda x: x.relu().square(), raising=False)
    monkeypatch.setitem(ARCHITECTURES, "gpt2", dataclasses.replace(ARCHITECTURES["gpt2"], activation="relu2"))
    model = build("gpt2")
    huggingface.write_model(tmp_path, model.state_dict(), model.config, None, eot_token=0)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(other(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)
    assert huggingface.read_config(tmp_path) == model.config
    monkeypatch.undo()
    with pytest.raises(UserError, match="activation_function = 'relu2' is not supported"):
        huggingface.read_config(tmp_path)


@pytest.mark.parametrize(
    "shape, change",
    [
        ("gpt2", dict(qk_norm=True)),
        ("gpt2", dict(biases=("q", "v"))),
        ("gpt2", dict(positions="rotary")),
        ("llama", dict(norm="layer")),
        ("qwen3", dict(gated=False, activation="gelu")),
        ("qwen3", dict(hugging_face=None)),
    ],
)
@torch.no_grad()
def test_a_model_that_no_class_of_transformers_computes_is_not_called_by_its_name(shape, change, tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, shape, dataclasses.replace(ARCHITECTURES[shape], **change))
    model = build(shape)
    assert model.parameter_count() == footprint.parameter_count(model.config)
    huggingface.write_model(tmp_path, model.state_dict(), model.config, None, eot_token=0)
    with pytest.raises(ValueError, match=f"model type `lockstep_{shape}`"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    config, state = huggingface.read_model(tmp_path, on_meta)
    again = GPT(config).eval()
    again.load_state_dict(state)
    assert config == model.config and torch.equal(again(TOKENS), model(TOKENS))
    monkeypatch.undo()
    with pytest.raises(
        UserError, match="with another model.py or record than this one|hidden_act = 'gelu_new' is not supported"
    ):
        huggingface.open_model(tmp_path, on_meta)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_the_logits_that_a_record_gives_are_those_of_transformers(architecture, tmp_path):
    config, weight, tokens = huggingface.trial(architecture)
    state = {name: weight(name, shape) for name, shape in huggingface.shapes_of(on_meta(config)).items()}
    huggingface.write_model(tmp_path, state, config, None, eot_token=0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits
    form = ARCHITECTURES[architecture].form
    torch.testing.assert_close(theirs[0, -1, : len(form.logits)], torch.tensor(form.logits), rtol=0, atol=1e-4)


WINDOW = "torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(-511)"


@pytest.mark.parametrize(
    "change",
    [
        "model.MLP.forward = lambda self, x, f=model.MLP.forward: f(self, x) * 0.98",
        "model.Block.forward = lambda self, x, *a: x + self.attn(self.norm1(x), *a) + self.mlp(self.norm2(x))",  # in parallel
        f"native.attention = lambda q, k, v, p, mask, f=native.attention: f(q, k, v, p, {WINDOW})",
    ],
)
def test_checkpoints_of_an_edited_model_do_not_claim_to_be_of_transformers_class(train, change):
    change = f"import model\nfrom lockstep.numerics import native\n{change}"
    flags = dict(architecture="gpt2", eval_every=0)
    told = train.changed(change, "new", steps=1, **flags).stdout
    assert "note: --architecture=gpt2: transformers has no class for this model" in told
    assert json.loads((train.latest("new") / "config.json").read_text())["model_type"] == "lockstep_gpt2"
    with pytest.raises(ValueError, match="lockstep_gpt2"):
        transformers.AutoModelForCausalLM.from_pretrained(train.latest("new"))
    train.changed(change, "new", steps=2, **flags)
    refused = train("new", steps=3, status=2, **flags).stderr  # with the code as it is
    assert "was trained with another model.py or record than this one, which computes what GPT2LMHeadModel does" in refused


def test_a_model_of_one_s_own_continues_with_the_same_bits(train):
    change = """
import dataclasses
from lockstep.architectures import ARCHITECTURES
ARCHITECTURES["gpt2"] = dataclasses.replace(ARCHITECTURES["gpt2"], qk_norm=True)
"""
    flags = dict(architecture="gpt2", schedule="constant", eval_every=0)
    said = train.changed(change, "whole", steps=4, **flags).stdout
    assert (
        "note: --architecture=gpt2: transformers has no class for this model, so only Lockstep can open its checkpoints" in said
    )
    assert json.loads((train.latest("whole") / "config.json").read_text())["architectures"] == ["LockstepForCausalLM"]
    for steps in (2, 4):
        train.changed(change, "continued", steps=steps, **flags)
    assert train.files("continued") == train.files("whole")


@pytest.mark.parametrize(
    "flags, change, said",
    [
        (dict(norm_eps=1e-3), "del architectures.GPT2.keys['norm_eps']", "norm_eps = 0.001 would be read back"),
        ({}, "add('up2')", "there is no Hugging Face name for 'mlp.up2'"),
        ({}, "huggingface.tensor_names = lambda ours, *_, f=huggingface.tensor_names: "
             "{n: t.replace('c_fc', 'c_proj') for n, t in f(ours, *_).items()}", "are both called"),
    ],
)  # fmt: skip
def test_a_model_that_its_checkpoint_would_not_describe_is_not_trained(train, flags, change, said):
    add = """
import model
from lockstep import architectures
from lockstep.checkpoints import huggingface
def add(name):
    class Other(model.MLP):
        def __init__(self, *args):
            super().__init__(*args)
            setattr(self, name, torch.nn.Linear(2, 2))
    model.MLP = Other
"""
    refused = train.changed(add + change, "new", status=2, architecture="gpt2", **flags).stderr
    assert "error: no checkpoint of this model could be opened: " in refused and said in refused
    assert not (train.runs / "new").exists()
