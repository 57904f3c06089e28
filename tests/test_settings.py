"""Presets and flags: one parser, flags win, bad input is refused with what would work."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import data
import evaluate
import machine
import sample
import train as train_py
from conftest import ROOT, execute
from lockstep import settings
from lockstep.common import cli, errors
from lockstep.common.errors import UserError
from lockstep.dataset.mixture import open_mixture
from lockstep.hardware import footprint
from lockstep.numerics import optim
from lockstep.parallel.world import World
from lockstep.planning import plan, rules
from lockstep.strategies import ALONE, STRATEGIES
from model import initial_weights, on_meta


def load(*args):
    """The settings of a command line, once every rule has passed them."""
    return plan.read_command(list(args), "test")[0]


def test_flags_win_over_the_preset_and_the_preset_over_the_defaults(tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_text('[optim]\nlr = 0.5\nbeta2 = 0.9\n[model]\ntie_embeddings = false\narchitecture = "llama"\n')
    config = load(str(preset), "--lr=0.25")
    assert (config.optim.lr, config.optim.beta2, config.model.tie_embeddings) == (0.25, 0.9, False)
    assert config.run.name == "mine"
    assert config.optim.beta1 == settings.OptimConfig().beta1


def test_every_way_to_write_a_flag():
    for words in (["--n_head=6"], ["--n-head=6"], ["--n_head", "6"], ["--n-head", "6"]):
        assert load("--n_embd=384", *words).model.n_head == 6
    for words, value in ((["=true"], True), (["=False"], False), (["", "false"], False), ([""], True)):
        assert load(f"--tie_embeddings{words[0]}", *words[1:]).model.tie_embeddings is value


@pytest.mark.parametrize(
    "args, said",
    [
        (["--warmup_step=1"], "perhaps you meant --warmup_steps"),
        (["--max-iter=1"], "perhaps you meant --steps"),
        (["--lr=fast"], "--lr must be NUMBER, not 'fast'"),
        (["--micro_batch_size=all"], "--micro_batch_size must be INTEGER|auto, not 'all'"),
        (["--min_lr=-inf"], "--min_lr must be at least 0 and at most 1,000, or auto"),
        (["--tie_embeddings=maybe"], "--tie_embeddings must be true|false, not 'maybe'"),
        (["laptop"], "no preset laptop; perhaps you meant config/laptop.toml"),
        (["other"], "no preset other; available: config/gpt2_124m.toml, "),
        (["--epoch=3"], "unknown flag --epoch; set the length in updates: --steps = epochs x tokens of the dataset / "),
        (["--fp16"], "unknown flag --fp16; use --dtype=float16 ("),
        (["--skip-steps=2", "--skip_steps", "4"], "--skip_steps is set more than once; set it once, with commas between"),
        (["--lr=1", "--steps=9", "--lr=1"], "--lr is set more than once; set it once"),
        (["train.py"], "train.py is not a valid TOML preset"),
        (
            ["--n_embd=256", "--n_head=5"],
            "--n_embd=256 is not a multiple of --n_head=5 x 2 (rotary positions need an even head_dim); "
            "try --n_embd=250 or 260",
        ),
        (["--n_head=4", "--n_kv_head=3"], "--n_kv_head=3 does not divide"),
        (["--tokens_per_update=1000"], "try 768 or 1024"),
        (["--micro_batch_size=5", "--tokens_per_update=8192"], "try 7680 or 8960"),
        (["--momentum=0.9"], "--momentum is not a flag; set momentum in a preset file, such as a copy of config/laptop.toml"),
        (["--rope-scaling", "8,1,4,8192", "--lr=1"], "--rope_scaling is not a flag; set rope_scaling in a preset file"),
        (["--momentm=0.9"], "unknown flag --momentm; perhaps you meant momentum in a preset file"),
        (["--plan_mfu=0.5"], "--plan_mfu needs --plan"),
        (["--skip_steps=1-1000000000000"], "at most 1,000,000 in all"),
        (["--name=a/b"], "--out_dir"),
        (["--out_dir=s3://bucket/x"], "--out_dir=s3://bucket/x must be a local path; use --mirror=URL to copy"),
        (["--tokens=hf://datasets/a/b"], "must be a local path; python prepare_data.py URL --out="),
        (
            ["--phase=1:hf://datasets/a/b"],
            "--phase=1:hf://datasets/a/b must be a local path; python prepare_data.py URL",
        ),
        (["--start=x"], "unknown flag --start (--help lists all flags)"),
    ],
)
def test_bad_input_is_refused_naming_flag_and_fix(args, said):
    with pytest.raises(UserError) as error:
        load(*args)
    assert said in str(error.value)


def test_the_update_must_divide_among_the_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"3 ranks; try 7680 or 8448; or --strategy=exact"):
        load("--tokens_per_update=8192")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"x 2 ranks; try 2048 or 4096; or --strategy=exact"):
        load("--tokens_per_update=3072", "--micro_batch_size=4")


@pytest.mark.parametrize(
    "text, said",
    [
        ("[optim]\nlrr = 1\n", "perhaps you meant --lr"),
        ("[model]\nlr = 1\n[optim]\nlr = 2\n", "mine.toml: lr is set twice; keep one"),
        ('[optim]\nlr = "1"\n', r"mine.toml: lr must be NUMBER, not '1'"),
        ("[optim]\nlr = true\n", r"lr must be NUMBER, not True"),
        ('[train]\nmicro_batch_size = "4"\n', r"micro_batch_size must be INTEGER|auto"),
        ("[model]\ntie_embeddings = 1\n", r"tie_embeddings must be true|false, not 1"),
        ("architecture = 'gpt2'\nn_head = 2\nn_embd = 16\nhead_dim = 7\n", "head_dim = 7: for gpt2 it must be"),
        ("[optim\n", "mine.toml"),
        ('out_dir = "a\\u0000b"\n', "mine.toml: out_dir must not contain a NUL character"),
    ],
)
def test_bad_presets_are_refused(tmp_path, text, said):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        load(str(tmp_path / "mine.toml"))


def test_a_preset_of_a_windows_editor_is_read_and_one_of_another_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text("[train]\nsteps = 77\n", encoding="utf-8-sig")
    assert load(str(tmp_path / "mine.toml")).train.steps == 77
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        load("config/laptop.toml")
    assert str(error.value) == f"no preset config/laptop.toml; perhaps you meant {ROOT}/config/laptop.toml"


@pytest.mark.parametrize(
    "flag, others, why",
    [
        ("--cooldown_fraction=0.2", ["--schedule=cosine"], "without --schedule=wsd"),
        ("--min_lr=0.0", ["--schedule=constant"], "with --schedule=constant"),
        ("--schedule=cosine", ["--decay_steps=3"], "because --decay_steps=3 ends the run that many steps after"),
        ("--steps=9", ["--decay_steps=3"], "because --decay_steps=3 ends the run that many steps after"),
        ("--micro_batch_size=2", ["--numerics=portable"], "with --numerics=portable, whose micro-batches are single"),
        ("--wandb_project=mine", ["--wandb=off"], "without --wandb=online or --wandb=offline"),
    ],
)
def test_a_flag_without_effect_is_refused_and_a_preset_may_set_it(tmp_path, flag, others, why):
    with pytest.raises(UserError) as error:
        load("config/laptop.toml", flag, *others)
    assert str(error.value).startswith(f"{flag} has no effect {why}") and "leave it out" in str(error.value)
    name, _, value = flag[2:].partition("=")
    quoted = value.lower() if value[0].isdigit() and "," not in value or value == "False" else f'"{value}"'
    (tmp_path / "mine.toml").write_text(f"{name} = {quoted}\n")
    load(str(tmp_path / "mine.toml"), *others)


def test_every_conflict_is_told_at_once_and_a_flag_that_turns_something_off_is_none():
    with pytest.raises(UserError) as error:
        load(
            "--skip_steps=x",
            "--name=a/b",
            "--cooldown_fraction=0.5",
            "--schedule=cosine",
            "--n_head=5",
            "--plan_gpu=h100",
            "--min_lr=9",
        )
    for said in (
        "--plan_gpu needs",
        "--skip_steps=x must",
        "--name=a/b must",
        "--cooldown_fraction=0.5 has no",
        "--n_embd=192",
        "--min_lr",
    ):
        assert said in str(error.value)
    load("--tasks_every=0", "--wandb_project=", "--numerics=portable", "--micro_batch_size=1")
    assert rules.EFFECTS.keys() < cli.flat_fields(settings.Config).keys()


CHOICES = {
    name: get_args(item.type) for name, item in cli.flat_fields(settings.Config).items() if get_origin(item.type) is Literal
} | {"strategy": tuple(STRATEGIES)}


def assemble(config, tokens):
    """What a run is made of."""
    mixture = open_mixture(settings.replace(config.data, tokens=str(tokens)))
    model = settings.resolve_model(config.model, mixture.vocab_size)
    config = dataclasses.replace(config, model=model, optim=settings.resolve_schedule(config.optim, config.train.steps))
    module = on_meta(config.model, mixture.document_token(config.data.attend), config.numerics.numerics)
    train_py.build_engine(module, initial_weights(module, 1), config, World(0, 1, 1, torch.device("cpu")))
    optim.learning_rate(9, 10, config.optim), data.make_batches(config, mixture), footprint.of_rank(config, 1, "cpu")


SIZES = dict(n_layer=1, n_head=2, n_embd=16, seq_len=16, micro_batch_size=2, tokens_per_update=64)
RESOLVED = dict(architecture="gpt2", optimizer="muon", muon_dtype="float32", warmup_steps=0)
SMALL = settings.replace(settings.Config(), **machine.TINY | SIZES | RESOLVED)


@pytest.mark.parametrize("name", sorted(CHOICES.keys() - {"device", "compile", "shard_gradients", "wandb"}))
def test_a_value_that_only_settings_knows_fails_loudly(name, tokens):
    """As after the first step of an addition: no part of a run takes a new value for another one."""
    assemble(SMALL, tokens)
    with pytest.raises((KeyError, AssertionError), match="half-finished"):
        assemble(settings.replace(SMALL, **{name: "half-finished"}), tokens)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_record_of_a_strategy_has_a_class(strategy, tokens):
    assemble(settings.replace(SMALL, strategy=strategy), tokens)


def test_a_record_of_a_strategy_without_a_class_fails_loudly(monkeypatch, tokens):
    monkeypatch.setitem(STRATEGIES, "half-finished", ALONE)
    with pytest.raises((KeyError, AssertionError), match="half-finished"):
        assemble(settings.replace(SMALL, strategy="half-finished"), tokens)


@pytest.mark.parametrize("config", [plan.Command, sample.SampleConfig, evaluate.EvaluateConfig])
def test_every_number_has_a_range(config):
    for name, item in cli.flat_fields(config).items():
        if re.search("INTEGER|NUMBER", cli.syntax(item.type)):
            assert re.fullmatch(r"(greater than|at least) .* and (less than|at most) .*", cli.limits(item.type)), name


CONTRACT = """
name out_dir seed resume plan plan_world_size max_minutes tokens order skip_steps architecture vocab_size n_layer n_head
n_kv_head n_embd d_ff seq_len dropout tie_embeddings init_from optimizer lr min_lr warmup_steps schedule weight_decay
beta1 beta2 grad_clip steps tokens_per_update micro_batch_size device dtype compile threads strategy replicate
check_replicas_every eval_every eval_tokens save_every keep_last keep_best async_save log_every
wandb wandb_project
"""


def test_flags_that_scripts_rely_on_are_there():
    assert set(CONTRACT.split()) <= cli.flat_fields(plan.Command).keys()


@given(
    tokens=st.integers(1, 5000),
    seq_len=st.integers(1, 64),
    micro=st.just("auto") | st.integers(1, 8),
    ranks=st.integers(1, 9),
    shape=st.tuples(st.integers(1, 400), st.integers(1, 16), st.just("auto") | st.integers(1, 16)),
    architecture=st.sampled_from(["gpt2", "qwen3"]),
    strategy=st.sampled_from(["ddp", "exact", "fsdp"]),
)
def test_what_a_refusal_suggests_passes_every_check(tokens, seq_len, micro, ranks, shape, architecture, strategy):
    n_embd, n_head, n_kv_head = shape
    batch = {"tokens_per_update": tokens, "seq_len": seq_len, "micro_batch_size": micro, "strategy": strategy}
    sizes = {"n_embd": n_embd, "n_head": n_head, "n_kv_head": n_kv_head, "architecture": architecture}
    config = settings.replace(settings.Config(), **batch, **sizes)
    changes = {}
    try:
        rules.check(config, ranks)
    except UserError as error:
        for line in str(error).split("\n"):
            if suggested := re.search(r"--(\w+)=.*; try (?:--n_embd=|one of )?([\d, or]+)", line):
                changes[suggested[1]] = suggested[2]
            if smaller := re.search(r"or --micro_batch_size=(\d+)", line):
                changed = settings.replace(config, micro_batch_size=int(smaller[1]), n_embd=768, n_head=12, n_kv_head="auto")
                rules.check(changed, ranks)
            if "or --strategy=exact" in line:
                exact = settings.replace(config, strategy="exact", n_embd=768, n_head=12, n_kv_head="auto")
                rules.check(exact, ranks)
    for last in (0, -1):
        values = {"n_kv_head": "auto"} | {name: int(re.findall(r"\d+", text)[last]) for name, text in changes.items()}
        rules.check(settings.replace(config, **values), ranks)


@given(name=st.text(min_size=1, max_size=20), lr=st.floats(1e-300, 1e300), steps=st.integers(50, 10**9), tied=st.booleans())
def test_config_toml_reads_back(name, lr, steps, tied):
    config = settings.replace(settings.Config(), name=name, lr=lr, steps=steps, tie_embeddings=tied)
    tables = tomllib.loads(settings.dumps(config))
    assert {key: value for table in tables.values() for key, value in table.items()} == cli.flat_values(config)


def test_config_toml_is_a_preset(tmp_path):
    config = load("--lr=0.125", "--tie_embeddings=false", "--name=again")
    (tmp_path / "config.toml").write_text(settings.dumps(config))
    assert load(str(tmp_path / "config.toml"), "--name=again") == config


def run(*args, script="train.py", cwd=ROOT, status=2, **environment):
    """A command in a process of its own, to its end."""
    return execute([sys.executable, ROOT / script, *args], status, environment, cwd, fork=False)


def test_a_refused_command_says_what_would_work_on_any_terminal():
    refused = run("--steps=many", "--lr", "--wandb=on", "--seed=x\u00e9", PYTHONIOENCODING="ascii")
    assert refused.stdout == ""
    assert refused.stderr.splitlines() == [
        "error: --seed must be INTEGER, not 'x\\xe9'",
        "       --steps must be INTEGER, not 'many'",
        "       --lr must be NUMBER, not ''",
        "       --wandb must be off|offline|online, not 'on'",
    ]
    refused = run("--weight-decy=3", "--batch_size", "4", "x", "--max-iters=9", "--lr=1e", "--seed=1", "--seed=2")
    assert refused.stderr.splitlines() == [
        "error: --seed is set more than once; set it once",
        "       unknown flag --weight_decy; perhaps you meant --weight_decay",
        "       unknown flag --batch_size; perhaps you meant --micro_batch_size",
        "       unknown flag --max_iters; perhaps you meant --steps (--help lists all flags)",
        "       unexpected x: put a preset or a run before all flags, and write flags as --name=value",
        "       --lr must be NUMBER, not '1e'",
    ]
    escaped = run("--steps=\x1b[2J").stderr  # a control character does not reach the terminal
    assert "\x1b" not in escaped and "\\x1b" in escaped
    assert run("--name=1", "x", "--plan").stderr.startswith("error: unexpected x: put a preset or a run before all flags")


def test_help_shows_the_defaults_of_the_preset_and_every_flag(tmp_path):
    (tmp_path / "untied.toml").write_text("[model]\ntie_embeddings = false\n\n[train]\nsteps = 95367\n")
    for preset, steps, tied in [([], 220, "true"), ([tmp_path / "untied.toml"], 95367, "false")]:
        shown = run(*preset, "--help", status=0)
        assert shown.stderr == "" and re.match(r"usage: python \S*train\.py \[config/NAME\.toml\] ", shown.stdout)
        text = " ".join(shown.stdout.replace("\u2502", " ").replace("|", " ").split())
        assert f"(default: {steps})" in text.split("--steps INTEGER")[1][:100]
        assert f"(default: {tied})" in text.split("--tie_embeddings true false")[1][:100]
    assert "    python train.py config/gpt2_124m.toml --lr=3e-4  " in shown.stdout
    fields = cli.flat_fields(plan.Command)
    flags = {name for name, item in fields.items() if cli.is_flag(item)}
    assert flags == set(re.findall(r"^ *\u2502 --(\w+) ", shown.stdout, re.MULTILINE)) and len(flags) <= 65


@pytest.mark.parametrize("script", ["train.py", "sample.py"])
def test_help_is_shown_without_importing_torch(script):
    loaded = execute([sys.executable, "-X", "importtime", script, "--help"])
    imported = {line.rpartition("|")[2].strip() for line in loaded.stderr.splitlines()}
    assert "tyro.conf" in imported and not imported & {"torch", "numpy"}


def test_help_names_the_groups_of_flags():
    groups = re.findall(r"^╭─ (\w+) options", run("--help", status=0).stdout, re.MULTILINE)
    assert groups == [*(group.name for group in dataclasses.fields(settings.Config)), "plan"]


def test_version_is_the_newest_section_of_the_changelog():
    newest = re.search(r"^## (\S+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert run("--version", status=0).stdout == f"Lockstep {newest[1]}\n"
    assert f"date-released: {newest[2]}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("preset", sorted((ROOT / "config").glob("*.toml")), ids=lambda path: path.stem)
def test_every_preset_is_valid_and_says_how_to_prepare_its_dataset(preset, tmp_path, monkeypatch):
    """Where the tokens are missing, the error names a preset that says it, but not for other tokens."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8" if preset.stem[-1] in "mb" else "1")  # the large ones run on eight GPUs
    config = load(str(preset))
    command = re.search("^# The tokens: (.*)$", preset.read_text(), re.MULTILINE)[1]
    assert config.run.name == preset.stem
    assert command.startswith("python prepare_data.py ") and f"--out={config.data.tokens}" in command.split()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        open_mixture(config.data)
    named = re.search("does not exist; the first lines of (.*) say how to prepare it", str(error.value))[1]
    assert f"# The tokens: {command}\n" in Path(named).read_text()
    with pytest.raises(UserError) as error:
        open_mixture(settings.replace(config.data, tokens=str(tmp_path / "mine")))
    assert f"make it with: python prepare_data.py [SOURCE ...] --out={tmp_path}/mine" in str(error.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_not_the_users_input(capsys):
    with pytest.raises(SystemExit) as end, errors.user_errors(), open("/dev/full", "w") as file:
        file.write("x")
        file.flush()
    assert end.value.code == 1 and capsys.readouterr().err.startswith("error: the disk: No space left on device")


def test_a_message_names_its_rank(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "10")
    monkeypatch.setattr(errors.time, "sleep", lambda _: None)
    monkeypatch.setattr(errors.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit), errors.user_errors():
        raise UserError("no")
    assert capsys.readouterr().err == "error: no [rank 10]\n"


def short_run(tokens, folder, *flags):
    """The command line of a run of two steps, `folder`/run."""
    settings = machine.TINY_RUN | dict(steps=2, out_dir=folder, name="run", tokens=tokens)
    return [sys.executable, *machine.arguments(ROOT / "train.py", **settings), *flags]


@pytest.mark.parametrize("flags, status", [(["--help"], 1), (["--plan"], 1), ([], 0)])
def test_a_reader_that_ends_early_ends_a_command_quietly_but_no_run(tokens, tmp_path, flags, status):
    """As `| head` does. -u: as torchrun starts it, without a buffer."""
    command = short_run(tokens, tmp_path, *flags)
    command.insert(1, "-u")
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (process.communicate()[1], process.returncode) == ("", status)


def test_a_command_works_without_standard_streams(tokens, tmp_path):
    """As some daemons start it."""
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash"]
    execute([*closed, *short_run(tokens, tmp_path)])
    assert any("done: " in path.read_text() for path in tmp_path.rglob("train.log"))
    for command in ("sample.py", "prepare_data.py", "plot.py"):
        execute([*closed, sys.executable, command, "--help"])
    assert execute([*closed[:2], 'exec "$@" <&- >&-', "bash", sys.executable, "sample.py", "absent"], status=2).stderr


def test_a_library_that_exits_with_a_text_is_heard(tmp_path):
    (tmp_path / "boom.py").write_text("import sys\ndef main(_):\n    sys.exit('no driver')\n")
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, '.']"
    code = f"{path}\nfrom lockstep import command\ncommand.run('boom', lambda _: None)"
    assert execute([sys.executable, "-c", code], status=1).stderr == "no driver\n"


@pytest.fixture
def mine(tmp_path):
    """The flags of a run that has a checkpoint. It was started with `config/gpt2_124m.toml --lr=0.01 --steps=30`."""
    flags = ["--name=mine", f"--out_dir={tmp_path}"]
    asked = load("config/gpt2_124m.toml", "--lr=0.01", "--steps=30", *flags)
    resolved = settings.replace(asked, device="cpu", dtype="float32", threads=4, micro_batch_size=2, n_kv_head=12)
    (tmp_path / "mine/checkpoints/step-00000010").mkdir(parents=True)
    (tmp_path / "mine/config.toml").write_text(settings.dumps(resolved, asked))
    return flags


def test_a_run_that_continues_keeps_what_it_was_asked_for_and_flags_win(mine, tmp_path):
    asked = load(*mine)
    assert (asked.optim.lr, asked.train.steps, asked.model.n_layer, asked.data.tokens) == (0.01, 30, 12, "tokens/fineweb10B")
    # What was left open is open again: another machine may need another value.
    assert (asked.train.device, asked.train.micro_batch_size, asked.model.n_kv_head) == ("auto", "auto", "auto")
    assert load("config/laptop.toml", *mine) == asked
    assert load(*mine, "--lr=0.02", "--steps", "40") == settings.replace(asked, lr=0.02, steps=40)
    assert load(str(tmp_path / "mine/config.toml"), "--name=new").train.device == "cpu"  # a new run repeats it
    (tmp_path / "mine/checkpoints/step-00000010").rmdir()
    elsewhere = load("--name=mine", f"--out_dir={tmp_path}/elsewhere")
    assert load(*mine) == settings.replace(elsewhere, out_dir=str(tmp_path))  # nothing to continue


def test_a_preset_that_a_run_does_not_follow_is_named(mine, tmp_path, capsys):
    load(*mine), load("config/gpt2_124m.toml", "--lr=0.01", "--steps=30", *mine), load(str(tmp_path / "mine/config.toml"))
    assert capsys.readouterr().out == ""
    load("config/gpt2_124m.toml", "--steps=40", *mine)
    kept = "note: mine keeps its own lr, whatever config/gpt2_124m.toml has; flags or its config.toml change them\n"
    assert capsys.readouterr().out == kept


def test_a_record_with_an_unknown_setting_is_refused(tmp_path):
    (tmp_path / "config.toml").write_text("[parallel]\nstrategyy = 1\n")
    with pytest.raises(UserError, match="config.toml: unknown key strategyy; perhaps you meant --strategy"):
        settings.read_preset(tmp_path / "config.toml")
    with pytest.raises(UserError, match="here: unknown key strategyy"):
        settings.from_record({"strategyy": 1}, "here")


def test_a_retired_setting_may_keep_its_last_default_in_a_file(tmp_path):
    preset = tmp_path / "mine.toml"
    for name, (last, instead) in settings.RETIRED.items():
        preset.write_text(f"{name} = {json.dumps(last)}\n")
        assert load(str(preset)) == load(str(preset), "--resume=auto")
        preset.write_text(f"{name} = {json.dumps('other' if isinstance(last, str) else last + 1)}\n")
        with pytest.raises(UserError) as refused:
            load(str(preset))
        assert str(refused.value).startswith(f"{preset}: {name} = ") and instead in str(refused.value)
        with pytest.raises(UserError, match=f"--{name} no longer exists; "):
            load(f"--{name}={last}")


def test_exact_on_more_ranks_than_micro_batches_suggests_smaller_ones():
    config = settings.replace(settings.Config(), strategy="exact", tokens_per_update=524288, seq_len=1024, micro_batch_size=64)
    with pytest.raises(UserError, match="64 x 16 ranks; try 1048576; or --micro_batch_size=32"):
        rules.check(config, 16)


def test_a_learning_rate_for_training_from_scratch_is_named_when_a_model_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('init_from = "models/start"\nlr = 1e-3\ntokens = "tokens/new"')
    start, preset = "--init_from=models/start", str(ROOT / "config/gpt2_124m.toml")
    cases = ([start], "0.007", "; --optimizer=adamw --lr=0.0001"), ([preset, start], "0.0006", "; --lr=0.0001")
    for words, rate, way_out in cases:
        load(*words)
        said = capsys.readouterr().out
        assert f" trains from scratch at --lr={rate}, at which models/start may forget" in said and said.count("\n") == 1
        assert said.startswith("warning: ") and said.endswith(f"{way_out} is gentler (docs/export.md)\n")
    for words in ([], [start, "--lr=7e-3"], ["mine.toml"], [preset, start, "--lr=1e-5"]):
        load(*words)
        assert "from scratch" not in capsys.readouterr().out
