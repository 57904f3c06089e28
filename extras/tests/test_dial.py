"""The dial: what a depth sets, what wins over it, and what a run keeps."""

import dataclasses
import shlex
import sys

import numpy as np
import pytest
import torch

from conftest import ROOT, execute, reseal
from extras import dial, ladder
from lockstep import settings
from lockstep.common.errors import UserError
from lockstep.dataset.tokens import open_dataset
from lockstep.numerics import optim
from lockstep.planning import rules
from model import GPT, initial_weights


def turned(*args):
    """The settings of the command that ladder.py prints. Its dataset is not there, as for a plan."""
    args = [*args, "--tokens=tokens/none"]
    return settings.load(shlex.split(ladder.of_depth(ladder.parse(args), args))[2:], "test")


def test_depth_12_is_the_shape_of_gpt2():
    config = turned("--depth=12", "--architecture=gpt2", "--vocab_size=50304")
    assert (config.model.n_layer, config.model.n_embd, config.model.n_head) == (12, 768, 12)
    assert config.train.steps * config.train.tokens_per_update == pytest.approx(12 * 123_600_000, rel=0.01)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_deeper_model_has_a_larger_batch_and_a_smaller_rate(architecture, optimizer):
    small, large = (turned(f"--depth={n}", f"--architecture={architecture}", f"--optimizer={optimizer}") for n in (4, 16))
    assert small.train.tokens_per_update < large.train.tokens_per_update and small.train.steps < large.train.steps
    # At the same batch and number of steps.
    same = ["--steps=1000", "--tokens_per_update=65536", f"--optimizer={optimizer}"]
    small, large = (turned(f"--depth={n}", *same) for n in (4, 16))
    assert large.optim.lr < 0.6 * small.optim.lr


def test_a_flag_wins_over_the_dial_and_the_dial_over_the_preset():
    config = turned("--depth=3", "--lr", "0.5", "--n-embd=96")
    assert (config.optim.lr, config.model.n_embd, config.model.n_head) == (0.5, 96, 2)
    assert config.model.n_layer == 3 and config.train.steps != settings.load([], "").train.steps


def test_a_preset_is_read_as_utf_8_whatever_the_locale(tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_bytes('name = "größe"\n'.encode())
    command = [sys.executable, "-X", "utf8=0", ROOT / "train.py", preset, "--plan", "--tokens=tokens/none"]
    assert (
        "größe"
        in execute(command, env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}, fork=False).stdout
    )


def test_an_optimizer_that_was_not_swept_gets_adamws_numbers():
    model = settings.resolve_model(turned("--depth=2").model, 50257)
    unknown, adamw = ((dial.length_of(1e8, 256, name), dial.rate_of(model, name, 1000, 65536)) for name in ("lion", "adamw"))
    assert unknown == adamw


def test_steps_and_batch_agree_whichever_is_given():
    whole = turned("--depth=6")
    by_steps = turned("--depth=6", f"--steps={whole.train.steps}")
    by_batch = turned("--depth=6", f"--tokens_per_update={whole.train.tokens_per_update}")
    assert by_batch == whole
    assert by_steps.train.tokens_per_update == pytest.approx(whole.train.tokens_per_update, rel=0.25)  # each is rounded
    assert by_steps.optim.lr == pytest.approx(whole.optim.lr, rel=0.15)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--depth=-1"], "--depth must be at least 0 and at most 256, not '-1'"),
        (["--depth=1000000000"], "--depth must be at least 0 and at most 256"),
        (["--depth=deep"], "--depth must be INTEGER, not 'deep'"),
        (["--depth=2", "--minutes=9"], "set either the budget, --minutes=60 or --flops=1e17"),
        (["--depth=2", "--init_from=gpt2"], "--depth=2 is for models trained from scratch"),
        (["--depth=2", "--n_head=7"], "is not a multiple of --n_head=7"),
    ],
)
def test_a_wrong_depth_is_refused(flags, said):
    with pytest.raises(UserError) as refused:
        rules.check(turned(*flags), 1)
    assert said in str(refused.value)


def test_a_text_of_ten_lines_is_refused(tmp_path):
    (tmp_path / "ten.txt").write_text("Ten lines are no text.\n" * 10)
    execute([sys.executable, ROOT / "prepare_data.py", tmp_path / "ten.txt", f"--out={tmp_path / 'ten'}", "--tokenizer=bytes"])
    command = [sys.executable, ROOT / "extras/ladder.py", "--depth=2", "--seq_len=16", f"--tokens={tmp_path / 'ten'}"]
    assert "prepare more text, lower --tokens_per_update, or set --steps" in execute(command, status=2).stderr
    assert " --steps=2 " in execute([*command, "--steps=2"]).stdout


def test_a_run_keeps_what_an_earlier_version_s_depth_has_set(tokens, tmp_path):
    flags = [f"--tokens={tokens}", f"--out_dir={tmp_path}", "--seq_len=16", "--eval_tokens=640", "--device=cpu", "--name=run"]
    ladder_py = [sys.executable, ROOT / "extras/ladder.py", *flags, "--depth=1", "--compile=off", "--steps=4"]
    (line,) = execute(ladder_py).stdout.splitlines()
    words = shlex.split(line)
    assert words[:2] == ["python", "train.py"] and "--n_embd=64" in words and "--depth" not in line
    assert (
        "no longer exists; `python extras/ladder.py --depth=6"
        in execute([sys.executable, ROOT / "train.py", "--depth=1"], status=2).stderr
    )
    execute([sys.executable, ROOT / "train.py", *words[2:]])
    # As the earlier version left it: with the depth, and with the numbers of an earlier formula.
    path, state = tmp_path / "run/config.toml", tmp_path / "run/checkpoints/latest/trainer_state.json"
    first = settings.read_preset(path)
    path.write_text(path.read_text().replace(f"lr = {first.optim.lr}", "lr = 0.001").replace("[run]\n", "[run]\ndepth = 1\n"))
    state.write_text(state.read_text().replace('"seed":', '"depth": 1, "seed":'))
    reseal(state.parent.resolve())
    assert (
        "continuing from"
        in execute([sys.executable, ROOT / "train.py", f"--out_dir={tmp_path}", "--name=run", "--steps=8"]).stdout
    )
    kept = settings.read_preset(path)
    assert kept.optim.lr == 0.001 and kept.train.tokens_per_update == first.train.tokens_per_update
    assert "depth" not in path.read_text()


def change_of_activations(width, optimizer, constant):
    """How far five updates move the residual stream of 4 layers (the coordinate check of muP): root mean square."""
    flags = [f"--n_embd={width}", f"--n_head={width // 32}", "--steps=256", "--tokens_per_update=2048", "--seq_len=32"]
    config = turned("--depth=4", f"--optimizer={optimizer}", "--vocab_size=384", *flags)
    module = GPT(settings.resolve_model(config.model, 384))
    module.load_state_dict(dict(initial_weights(module, seed=0)))
    settled = dataclasses.replace(config.optim, lr=constant or config.optim.lr, muon_dtype="float32")
    optimizers, seen = optim.build(dict(module.named_parameters()), settled), []
    module.norm.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].detach()))
    tokens = torch.randint(0, 300, (8, 33), generator=torch.Generator().manual_seed(1))
    for _ in range(6):
        module(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizers.step()
        module.zero_grad()
    return (seen[-1] - seen[0]).square().mean().sqrt().item()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_move_activations_alike_at_every_width(optimizer):
    by_dial, constant = ([change_of_activations(w, optimizer, rate) for w in (64, 256)] for rate in (0, 4e-3))
    assert by_dial[1] < 4 * by_dial[0]
    assert by_dial[1] / by_dial[0] < 0.7 * constant[1] / constant[0]


def test_eight_ranks_share_the_batch_if_it_has_eight_sequences():
    for tokens in np.geomspace(1e5, 1e11, 100):
        length = dial.length_of(tokens, 256, "muon")
        sequences = length["tokens_per_update"] / 256
        assert sequences in (1, 2, 4) or sequences % 8 == 0
        assert length["steps"] >= dial.FEWEST_STEPS


def test_a_larger_batch_than_the_dial_s_bears_no_larger_rate():
    given, larger = (turned("--depth=4", "--steps=2000", f"--tokens_per_update={batch}") for batch in (65536, 131072))
    own = dial.batch_of(2000 * 65536, "muon")
    assert own < 65536 and given.optim.lr < larger.optim.lr < 2**0.5 * given.optim.lr  # more tokens, not a larger batch


def test_a_mixture_reads_no_dataset_more_than_four_times(tokens, tmp_path):
    (tmp_path / "other").symlink_to(tokens)
    args = ["--depth=1", "--seq_len=16", f"--tokens={tokens}:0.75,{tmp_path / 'other'}:0.25"]
    train = settings.load(shlex.split(ladder.of_depth(ladder.parse(args), args))[2:], "test").train
    assert train.steps * train.tokens_per_update * 0.75 <= 4 * len(open_dataset(tokens).splits["train"])
