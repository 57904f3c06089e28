"""Presets and flags: one parser, flags win, bad input is refused with what would work."""

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import settings
from settings import UserError

ROOT = Path(__file__).parent.parent


def load(*args):
    return settings.load(list(args), "test")


def test_flags_win_over_the_preset_and_the_preset_over_the_defaults(tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_text('[optim]\nlr = 0.5\nbeta2 = 0.9\n[model]\ntie_embeddings = false\narchitecture = "llama"\n')
    config = load(str(preset), "--lr=0.25")
    assert (config.optim.lr, config.optim.beta2, config.model.tie_embeddings) == (0.25, 0.9, False)
    assert config.run.name == "mine"
    assert config.optim.beta1 == settings.OptimConfig().beta1


@pytest.mark.parametrize(
    "args", [("--n_head=6",), ("--n-head=6",), ("--n_head", "6"), ("--n-head", "6"), ("--n_head=4", "--n_head=6")]
)
def test_every_way_to_write_a_flag(args):
    assert load("--n_embd=384", *args).model.n_head == 6


@pytest.mark.parametrize("word, value", [("true", True), ("false", False), ("True", True)])
def test_booleans(word, value):
    assert load(f"--tie_embeddings={word}").model.tie_embeddings is value


@pytest.mark.parametrize(
    "args, said",
    [
        (["--warmup_step=1"], "perhaps you meant --warmup_steps"),
        (["--learning_rate=1"], "perhaps you meant --lr"),
        (["--sed=1"], "perhaps you meant --seed"),
        (["--lr=fast"], "--lr"),
        (["--lr"], "--lr needs a value"),
        (["--strategy=magic"], "'ddp'"),
        (["--tie_embeddings=maybe"], "--tie_embeddings"),
        (["config/nothing.toml"], "config/laptop.toml"),
        (["--lr=1", "config/laptop.toml"], "before all flags"),
        (["--n_head=5"], "--n_embd=256 is not a multiple of --n_head=5; try 255 or 260"),
        (["--n_kv_head=3"], "--n_kv_head=3 does not divide"),
        (["--steps=0"], "--steps must be greater than 0"),
        (["--dropout=1"], "--dropout"),
        (["--tokens_per_update=1000"], "try 768 or 1024"),
        (["--micro_batch_size=5", "--tokens_per_update=8192"], "try 7680 or 8960"),
        (["--architecture=gpt2", "--n_kv_head=1"], "gpt2"),
        (["--name=a/b"], "--out_dir"),
    ],
)
def test_bad_input_is_refused_naming_flag_and_fix(args, said):
    with pytest.raises(UserError) as error:
        load(*args)
    assert said in str(error.value)


def test_all_faults_are_told_at_once():
    with pytest.raises(UserError) as error:
        load("--steps=0", "--lr=-1", "--beta1=2")
    assert all(flag in str(error.value) for flag in ("--steps", "--lr", "--beta1"))


def test_the_update_must_divide_among_the_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"3 rank\(s\)"):
        load("--tokens_per_update=8192")


@pytest.mark.parametrize(
    "text, said",
    [
        ("[optim]\nlrr = 1\n", "perhaps you meant --lr"),
        ("[optimizer]\nlr = 1\n", r"\[optimizer\] is not one of"),
        ("[model]\nlr = 1\n", r"key lr in \[model\]"),
        ("lr = 1\n", r"\[lr\] is not one of"),
        ("[optim\n", "mine.toml"),
    ],
)
def test_bad_presets_are_refused(tmp_path, text, said):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        load(str(tmp_path / "mine.toml"))


@given(name=st.text(min_size=1, max_size=20), lr=st.floats(1e-9, 1e3), steps=st.integers(50, 10**9), tied=st.booleans())
def test_config_toml_reads_back(name, lr, steps, tied):
    config = settings.replace(settings.Config(), name=name, lr=lr, steps=steps, tie_embeddings=tied)
    tables = tomllib.loads(settings.dumps(config))
    assert {key: value for table in tables.values() for key, value in table.items()} == settings.flat_values(config)


def test_config_toml_is_a_preset(tmp_path):
    config = load("--lr=0.125", "--tie_embeddings=false", "--name=again")
    (tmp_path / "config.toml").write_text(settings.dumps(config))
    assert load(str(tmp_path / "config.toml")) == config


def test_every_preset_is_valid():
    presets = sorted((ROOT / "config").glob("*.toml"))
    assert len(presets) >= 6
    for preset in presets:
        assert load(str(preset)).run.name == preset.stem


@pytest.mark.parametrize("preset", ["gpt2_124m", "gpt2_355m", "qwen3_124m", "llama_1.3b"])
def test_large_presets_run_on_one_to_eight_gpus(preset, monkeypatch):
    for size in (1, 2, 4, 8):
        monkeypatch.setenv("WORLD_SIZE", str(size))
        load(f"config/{preset}.toml")


def run(*args):
    return subprocess.run([sys.executable, "train.py", *args], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_lists_every_flag_and_bad_input_exits_2_without_importing_torch():
    shown = run("--help")
    assert shown.returncode == 0
    for name in settings.flat_fields(settings.Config):
        assert f"--{name}" in shown.stdout
    refused = run("--lrr=1")
    assert refused.returncode == 2 and refused.stderr.startswith("error: ") and "Traceback" not in refused.stderr
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", "train.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    imported = {line.rpartition("|")[2].strip() for line in loaded.stderr.splitlines()}
    assert "settings" in imported and not imported & {"torch", "numpy"}


def test_other_ranks_leave_the_master_time_to_tell_of_bad_input(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    began = time.monotonic()
    refused = run("--lrr=1")
    assert refused.returncode == 2 and "[rank 1]" in refused.stderr and time.monotonic() - began > 3
