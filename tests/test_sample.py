"""sample.py through its front door, on a small model with random weights, and samples during training."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sample
import warm
from conftest import PATIENCE, ROOT, environment, execute
from lockstep.checkpoints import huggingface
from lockstep.checkpoints.checkpoint import write_manifest
from lockstep.common import cli, errors
from lockstep.dataset import tokenizer
from lockstep.settings import ModelConfig, resolve_model
from model import GPT, generate, initial_weights, on_meta

TEXT = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with one checkpoint and what else sampling reads."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    checkpoint = folder / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest").symlink_to(checkpoint.name)
    text = tokenizer.resolve("train:300", lambda: [TEXT] * 3)
    text.save(folder / "tokenizer.json")
    model = GPT(resolve_model(ModelConfig(architecture="llama", n_layer=1, n_head=2, n_embd=32, seq_len=16), text.vocab_size))
    model.load_state_dict(dict(initial_weights(model, seed=0)))
    huggingface.write_model(checkpoint, model.state_dict(), model.config, folder / "tokenizer.json", text.eot_token)
    (checkpoint / "optimizer.safetensors").touch()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"step": 1, "settings": vars(model.config)}))
    write_manifest(checkpoint)
    return folder


def sampled(capsys, run, *flags):
    """What `sample.py RUN FLAGS` prints."""
    arguments = [str(run), "--device=cpu", "--dtype=float32", "--max_new_tokens=24", *flags]
    sample.main(cli.parse(sample.SampleConfig, arguments, ""))
    return capsys.readouterr().out


def test_the_command_prints_prompt_and_sample(run):
    flags = ["--prompt=def ", "--max_new_tokens=30", "--num_samples=2", "--seed=3"]
    done = execute([sys.executable, "sample.py", run, *flags])
    first, second, rest = done.stdout.split("\n---------------\n")
    assert first.startswith("def ") and second.startswith("def ")
    assert first != second
    assert not rest


def test_the_sample_is_the_models_and_repeats_by_its_seed(run, capsys):
    out = sampled(capsys, run, "--prompt=def a", "--temperature=0")
    text = tokenizer.load(run / "checkpoints/latest/tokenizer.json")
    config, state = huggingface.read_model(run / "checkpoints/latest", on_meta)
    model = GPT(config)
    model.load_state_dict(state)
    prompt = torch.tensor([text.encode("def a").tolist()])
    new = generate(model, prompt, 24, temperature=0, vocab_limit=text.vocab_size, eot=text.eot_token)
    expected = [token.item() for token in new if token.item() != text.eot_token]
    assert out == text.decode([*prompt[0].tolist(), *expected]) + "\n---------------\n"
    one = sampled(capsys, run, "--prompt=def a", "--seed=1")
    assert one == sampled(capsys, run / "checkpoints" / "latest", "--prompt=def a", "--seed=1")
    assert one != sampled(capsys, run, "--prompt=def a", "--seed=2")


def test_prompts_from_a_file_and_from_nothing(run, capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text(TEXT)
    assert sampled(capsys, run, f"--prompt=FILE:{tmp_path}/prompt.txt").startswith(TEXT)
    assert "endoftext" not in sampled(capsys, run)


def test_a_prompt_may_begin_with_the_end_of_text(run, capsys):
    text, model = tokenizer.load(run / "tokenizer.json"), SimpleNamespace(config=SimpleNamespace(vocab_size=300))
    assert sample.encode(text, "<|endoftext|>def", model) == [text.eot_token, *text.encode("def").tolist()]
    assert sample.encode(text, "<|endoftext|>", model) == [text.eot_token] == sample.encode(text, "", model)
    assert text.eot_token not in sample.encode(text, "a<|endoftext|>", model)
    assert sampled(capsys, run, "--prompt=<|endoftext|>") == sampled(capsys, run)


@pytest.mark.parametrize("temperature", ["1e-45", "1e-30", "1e-10"])
def test_a_tiny_temperature_picks_the_most_likely_token(run, capsys, temperature):
    assert sampled(capsys, run, f"--temperature={temperature}") == sampled(capsys, run, "--temperature=0")


def test_a_character_is_shown_whole(run):
    text = tokenizer.load(run / "checkpoints/latest/tokenizer.json")
    tokens = text.encode("größer €").tolist()
    assert len(tokens) > len("größer €")
    decoded = []
    counting = SimpleNamespace(
        eot_token=text.eot_token, decode=lambda ids, _=False: decoded.append(len(ids)) or text.decode(ids)
    )
    pieces = list(sample.stream(counting, [], tokens))
    assert max(decoded) <= 4  # bytes of a character: a long text is not decoded again with each token
    assert "".join(pieces) == "größer €"
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_that_the_model_does_not_know_is_named():
    small = SimpleNamespace(config=SimpleNamespace(vocab_size=128))
    with pytest.raises(errors.UserError, match="--prompt: 'é' is token 195, but the model knows only 128 tokens"):
        sample.encode(tokenizer.resolve("bytes"), "a café", small)


@pytest.mark.parametrize("words", [["sample.py", "--max_new_tokens=2"], ["evaluate.py", "--eval_tokens=64"]])
def test_of_several_ranks_only_the_first_prints(shared, tmp_path, words):
    process = warm.Process([words[0], shared.runs / "plain", words[1]], 2, environment(), ROOT, tmp_path)
    said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert sum(said[0].count(what) for what in ("\n---------------\n", "validation tokens\n")) == 1


def test_bad_input_names_what_is_there(run, tmp_path):
    def refused(*arguments):
        with pytest.raises(errors.UserError) as caught:
            sample.main(cli.parse(sample.SampleConfig, [str(a) for a in arguments], ""))
        return str(caught.value)

    assert "absent is neither a run nor a model directory" in refused(run.parent / "absent")
    assert f"perhaps you meant {run}" in refused(run.parent / "tiyn")
    assert f"with a config.json; perhaps you meant {run}" in refused(run.parent)
    assert "absent.txt" in refused(run, f"--prompt=FILE:{tmp_path}/absent.txt")
    assert "--temperature" in refused(run, "--temperature=-1")
    for wrong in ("--promt=x", "--start=x"):  # --start is nanoGPT's
        assert "perhaps you meant --prompt" in refused(run, wrong)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((run / "checkpoints/latest" / name).read_bytes())
    assert "pass the model's tokenizer with --tokenizer=FILE" in refused(tmp_path)
    assert "--tokenizer=nonsense is not train:N" in refused(tmp_path, "--tokenizer=nonsense")
    (tmp_path / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes())
    (tmp_path / "model.safetensors").unlink()
    assert "no model.safetensors" in refused(tmp_path)


# Rank by rank, instead of the seventh update.
KILL = """
update = train.update
train.update = lambda run, *more: (run.state.step == 6 and os.kill(os.getpid(), 9), update(run, *more))[1]
"""


def samples(train, name):
    """What the samples of a run show, by the beginning of their lines in train.log: the step."""
    lines = (train.runs / name / "train.log").read_text().splitlines()
    return dict(line.split("  sample ") for line in lines if "  sample " in line)


@pytest.mark.parametrize("strategy", ["exact", "fsdp"])
def test_samples_during_training_change_no_bit(train, strategy):
    flags = dict(strategy=strategy, dropout=0.1, steps=8)
    shown = flags | dict(sample_every=4)
    train("without", 3, **flags)
    train("with", 3, **shown)
    train.changed(KILL, "killed", 3, status=1, **shown)
    train("killed", 3, **shown)
    for name in ("with", "killed"):
        assert train.files(name) == train.files("without") and train.metrics(name) == train.metrics("without")
    found = samples(train, "with")
    assert [int(line.split()[1]) for line in found] == [4, 8] and len(set(found.values())) == 2
    assert samples(train, "killed") == found and not samples(train, "without")
    if strategy == "exact":
        train("one", 1, **shown)
        assert train.files("one") == train.files("without") and samples(train, "one") == found


def test_boards_show_the_samples_of_a_resumed_run_once(train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (4, 8):
        train("run", steps=steps, schedule="constant", sample_every=4, tensorboard=True)
    board = EventAccumulator(str(train.runs / "run/tensorboard")).Reload()
    events = board.Tensors("sample/text_summary")
    assert [event.step for event in events] == [4, 8]
    lines = [line for event in events for line in event.tensor_proto.string_val[0].split(b"\n") if line.strip()]
    assert lines and all(line.startswith(b"    ") for line in lines)  # as code, in which spaces count


def test_samples_need_a_tokenizer(train, tmp_path):
    for split in ("train", "val"):
        (np.arange(5000) % 60).astype("<u2").tofile(tmp_path / f"{split}.bin")
    refused = train("foreign", tokens=tmp_path, vocab_size=60, sample_every=5, status=2).stderr
    assert "error: --sample_every needs a tokenizer.json" in refused and not (train.runs / "foreign").exists()
