"""The tools for those who come from nanoGPT: its checkpoints and characters, built by hand as nanoGPT writes them."""

import pickle
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from conftest import ROOT, execute
from extras import convert_nanogpt
from lockstep.checkpoints import lookup
from lockstep.common.errors import UserError
from lockstep.dataset import tokenizer
from lockstep.dataset.tokens import characters_in
from model import on_meta

TEXT = "To be, or not to be: größer € 日\n"
ARGS = dict(n_layer=2, n_head=2, n_embd=16, block_size=12, bias=True, vocab_size=50304, dropout=0.1)


def convert(*arguments, status=0):
    """Run extras/convert_nanogpt.py."""
    return execute([sys.executable, ROOT / "extras" / "convert_nanogpt.py", *arguments], status=status)


def parameters(args):
    """The state dictionary of nanoGPT's model, random."""
    generator = torch.Generator().manual_seed(0)
    C, V = args["n_embd"], args["vocab_size"]
    shapes = {"transformer.wte": (V, C), "transformer.wpe": (args["block_size"], C), "transformer.ln_f": (C,)}
    for i in range(args["n_layer"]):
        shapes |= {f"transformer.h.{i}.{norm}": (C,) for norm in ("ln_1", "ln_2")}
        shapes |= {f"transformer.h.{i}.attn.c_attn": (3 * C, C), f"transformer.h.{i}.attn.c_proj": (C, C)}
        shapes |= {f"transformer.h.{i}.mlp.c_fc": (4 * C, C), f"transformer.h.{i}.mlp.c_proj": (C, 4 * C)}
    state = {}
    for name, shape in shapes.items():
        state[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.3
        if args["bias"] and ".w" not in name:
            state[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.3
    return state | {"lm_head.weight": state["transformer.wte.weight"]}


def logits(state, args, tokens, approximate):
    """What nanoGPT's model computes, in torch's words."""

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state.get(f"{name}.bias"))

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][: tokens.shape[1]]
    for layer in (f"transformer.h.{i}" for i in range(args["n_layer"])):
        qkv = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (args["n_head"], -1)).transpose(1, 2) for part in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(y, f"{layer}.attn.c_proj")
        hidden = F.gelu(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc"), approximate=approximate)
        x = x + linear(hidden, f"{layer}.mlp.c_proj")
    return F.linear(norm(x, "transformer.ln_f"), state["lm_head.weight"])


@pytest.mark.parametrize("args", [ARGS, ARGS | {"bias": False}], ids=["biases", "no biases"])
@torch.no_grad()
def test_a_checkpoint_of_nanogpt_gives_the_same_logits(args, tmp_path):
    state = parameters(args)
    compiled = {f"_orig_mod.{name}": value for name, value in state.items()}
    more = {"optimizer": {"state": {}}, "iter_num": 7, "best_val_loss": torch.tensor(1.5), "config": {"dataset": "x"}}
    torch.save({"model": compiled, "model_args": args, **more}, tmp_path / "ckpt.pt")
    convert(tmp_path / "ckpt.pt", f"--out={tmp_path}/model")
    _, model = lookup.load_model(str(tmp_path / "model"), on_meta)
    tokens = torch.randint(50257, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens), logits(state, args, tokens, "none"), rtol=1e-5, atol=1e-5)
    assert (model(tokens) - logits(state, args, tokens, "tanh")).abs().max() > 1e-4  # the two kinds of GELU do differ
    assert "will not be overwritten" in convert(tmp_path / "ckpt.pt", f"--out={tmp_path}/model", status=2).stderr


class GPTConfig:
    """build-nanogpt pickles its settings as an object of the main program."""


GPTConfig.__module__, GPTConfig.__qualname__ = "__main__", "GPTConfig"


@torch.no_grad()
def test_a_checkpoint_of_build_nanogpt_gives_the_same_logits(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig, raising=False)
    state, config = parameters(ARGS), GPTConfig()
    vars(config).update({name: ARGS[name] for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")})
    torch.save({"model": state, "config": config, "step": 3, "val_loss": 2.0}, tmp_path / "model_00003.pt")
    convert(tmp_path / "model_00003.pt", f"--out={tmp_path}/model")
    _, model = lookup.load_model(str(tmp_path / "model"), on_meta)
    tokens = torch.randint(50257, (2, 12), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens), logits(state, ARGS, tokens, "tanh"), rtol=1e-5, atol=1e-5)


class Evil:
    """What a pickle may do when it is loaded."""

    def __reduce__(self):
        return subprocess.call, (["touch", "was_here"],)


def test_nothing_else_in_a_pickle_is_read(tmp_path):
    torch.save({"model": parameters(ARGS), "model_args": ARGS, "config": Evil()}, tmp_path / "evil.pt")
    assert "is not a nanoGPT or build-nanogpt" in convert(tmp_path / "evil.pt", f"--out={tmp_path}/model", status=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["evil.pt"]
    assert not (ROOT / "was_here").exists()
    (tmp_path / "text.pt").write_text("text")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("text.pt", "list.pt", "absent.pt"):
        assert name in convert(tmp_path / name, f"--out={tmp_path}/model", status=2).stderr


@pytest.mark.parametrize(
    "content, said",
    [
        ({"model": {}, "config": {"dataset": "x"}}, "expected a valid model and model_args"),
        ({"model": {0: torch.zeros(2)}, "model_args": ARGS}, "expected a valid model and model_args"),
        ({"model": {}, "model_args": ARGS | {"n_layer": 1 << 23}}, "its n_layer must be greater than 0 and at most 4,096"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(tmp_path, content, said):
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=re.escape(said)):
        convert_nanogpt.main(convert_nanogpt.ConvertConfig(str(tmp_path / "ckpt.pt"), f"{tmp_path}/model"))


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """nanoGPT's data folder of a text: train.bin, val.bin, meta.pkl, input.txt."""
    folder = tmp_path_factory.mktemp("nanogpt") / "chars"
    folder.mkdir()
    text = "".join(f"{TEXT}{i}\n" for i in range(400))
    (folder / "input.txt").write_text(text)
    itos = dict(enumerate(sorted(set(text))))
    stoi = {character: i for i, character in itos.items()}
    meta = {"vocab_size": len(itos), "itos": itos, "stoi": stoi}
    for protocol in range(2, 6):
        (folder / f"meta{protocol}.pkl").write_bytes(pickle.dumps(meta, protocol))
    ids = torch.tensor([stoi[character] for character in text], dtype=torch.uint16).numpy()
    ids[: len(ids) * 9 // 10].tofile(folder / "train.bin")
    ids[len(ids) * 9 // 10 :].tofile(folder / "val.bin")
    return folder, stoi


def test_characters_keep_their_ids(characters, tmp_path):
    folder, stoi = characters
    execute([sys.executable, ROOT / "extras" / "char_tokenizer.py", folder / "input.txt", f"--out={tmp_path}/tokenizer.json"])
    text = tokenizer.load(tmp_path / "tokenizer.json")
    assert text.encode(TEXT).tolist() == [stoi[character] for character in TEXT]
    assert text.decode(text.encode(TEXT)) == TEXT
    assert text.decode(text.encode("Ω <b>")) == "Ω <b>"  # by bytes, whose ids come after the characters'
    assert text.eot_token == text.vocab_size - 1


def test_characters_train_as_they_are_and_are_sampled_later(characters, train, tmp_path):
    folder, stoi = tmp_path / "chars", characters[1]
    folder.mkdir()
    for name in ("train.bin", "val.bin", "input.txt", "meta2.pkl"):
        (folder / name.replace("2", "")).write_bytes((characters[0] / name).read_bytes())
    for protocol in range(2, 6):
        assert characters_in(characters[0] / f"meta{protocol}.pkl") == len(stoi)
    told = train("chars", tokens=folder, steps=2).stdout
    how = f"sample.py will need the tokenizer of these tokens: python extras/char_tokenizer.py {folder}/input.txt"
    assert f"vocabulary {len(stoi)} (from meta.pkl), largest id seen {len(stoi) - 1}; {how}" in told
    assert "vocabulary 128," in told  # padded
    sample = [sys.executable, "sample.py", train.runs / "chars", "--max_new_tokens=20"]
    assert "pass the model's tokenizer with --tokenizer=FILE" in execute(sample, status=2).stderr
    made = folder / "tokenizer.json"
    maker = [sys.executable, ROOT / "extras" / "char_tokenizer.py"]
    assert "is empty or not UTF-8 text" in execute([*maker, folder / "train.bin"], status=2).stderr and not made.exists()
    execute([*maker, folder / "input.txt"])
    tokenizer = f"--tokenizer={folder}/tokenizer.json"
    assert execute([*sample, tokenizer, "--prompt=To be"]).stdout.startswith("To be")
    assert re.search("start of a document is token .* give a prompt, such as", execute([*sample, tokenizer], status=2).stderr)
    train("chars", tokens=folder, steps=4)  # the next checkpoint has the tokenizer, which also encodes other characters
    beyond = execute([*sample, "--prompt=To be (act 2)"], status=2).stderr
    assert "--prompt: '(' is token " in beyond and f"but the model knows only {len(stoi)} tokens; leave it out" in beyond
    execute([sys.executable, "export.py", train.runs / "chars", f"--out={tmp_path}/export"])
    for model in (train.runs / "chars", tmp_path / "export"):
        sampled = execute([sys.executable, "sample.py", model, "--prompt=To", "--max_new_tokens=200", "--top_k=0"]).stdout
        assert set(sampled.removesuffix("---------------\n")) <= stoi.keys()


def test_a_character_model_trains_samples_and_converts(characters, train, tmp_path):
    folder, stoi = characters
    execute([sys.executable, ROOT / "extras" / "char_tokenizer.py", folder / "input.txt"])
    told = train("chars", tokens=folder, vocab_size=len(stoi), architecture="gpt2", gelu="erf", steps=2).stdout
    assert told.endswith(f'next: python sample.py {train.runs}/chars --prompt="..."\n')
    sampled = execute([sys.executable, "sample.py", train.runs / "chars", "--prompt=To be", "--max_new_tokens=20"]).stdout
    assert sampled.startswith("To be") and "endoftext" not in sampled
    args = ARGS | {"vocab_size": len(stoi)}
    torch.save({"model": parameters(args), "model_args": args}, tmp_path / "ckpt.pt")
    assert "extras/convert_nanogpt.py" in train("lost", init_from=tmp_path / "ckpt.pt", status=2).stderr
    assert "--tokenizer" in convert(tmp_path / "ckpt.pt", f"--out={tmp_path}/model", status=2).stderr
    convert(tmp_path / "ckpt.pt", f"--out={tmp_path}/model", f"--tokenizer={folder}/tokenizer.json")
    flags = dict(tokens=folder, vocab_size=len(stoi), seq_len=8, init_from=tmp_path / "model", steps=1, optimizer="adamw")
    assert "2 layers, 16 wide" in train("tuned", **flags).stdout
