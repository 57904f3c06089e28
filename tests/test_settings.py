"""Presets and flags: one parser, flags win, bad input is refused with what would work."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import data
import evaluate
import machine
import sample
import settings
from common import cli, errors
from common.errors import UserError
from conftest import ROOT, ending_what_is_left, execute, wait_for
from planning import rules


def load(*args):
    """The settings of a command line, once every rule has passed them."""
    command = settings.load_command(list(args), "test")
    rules.check_command(command)
    return command.config


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
        (["--max-iter=1"], "perhaps you meant --steps"),
        (["--blocksize", "1"], "perhaps you meant --seq_len"),
        (["--lr=fast"], "--lr must be NUMBER, not 'fast'"),
        (["--micro_batch_size=all"], "--micro_batch_size must be INTEGER|auto, not 'all'"),
        (["--min_lr=-inf"], "--min_lr must be at least -1,000 and at most 1,000"),
        (["--lr=1" + "0" * 400], "--lr must be NUMBER, not '1000"),
        (["--tie_embeddings=maybe"], "--tie_embeddings must be true|false, not 'maybe'"),
        (["config"], "no preset config; there are config/gpt2_124m.toml, "),
        (["laptop"], "no preset laptop; there are config/gpt2_124m.toml, "),
        (["train.py"], "train.py is not a preset in TOML"),
        (
            ["--n_embd=256", "--n_head=5"],
            "--n_embd=256 is not a multiple of --n_head=5 x 2 (rotary positions need heads of an even width); "
            "try --n_embd=250 or 260",
        ),
        (["--n_head=4", "--n_kv_head=3"], "--n_kv_head=3 does not divide"),
        (["--tokens_per_update=1000"], "try 768 or 1024"),
        (["--micro_batch_size=5", "--tokens_per_update=8192"], "try 7680 or 8960"),
        (["--architecture=gpt2", "--n_kv_head=1"], "gpt2"),
        (["--strategy=exact", "--dtype=float16"], "bfloat16"),
        (["--architecture=gpt2", "--head_dim=7"], "--head_dim=7 is not for gpt2"),
        (["--head_dim=7"], "--head_dim=7 must be even"),
        (["--rope_scaling=8,1,4"], "--rope_scaling=8,1,4 must be four numbers"),
        (["--rope_scaling=8,4,1,8192"], "such as Llama 3.1's 8,1,4,8192"),
        (["--rope_scaling=llama3"], "such as Llama 3.1's 8,1,4,8192"),
        (["--plan_mfu=0.5"], "--plan_mfu needs --plan"),
        (["--skip_steps=1-1000000000000"], "at most 1,000,000 in all"),
        (["--name=a/b"], "--out_dir"),
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
    with pytest.raises(UserError, match=r"try 2048 or 4096$"):  # exact would not take it
        load("--tokens_per_update=3072", "--micro_batch_size=4", "--grad_compression=bf16")


@pytest.mark.parametrize(
    "text, said",
    [
        ("[optim]\nlrr = 1\n", "perhaps you meant --lr"),
        ("lrr = 1\n", "unknown key lrr; perhaps you meant --lr"),
        ("[model]\nlr = 1\n[optim]\nlr = 2\n", "mine.toml: lr is given twice; keep one"),
        ('[optim]\nlr = "1"\n', r"mine.toml: lr must be NUMBER, not '1'"),
        ("[optim]\nlr = true\n", r"lr must be NUMBER, not True"),
        ("[train]\nsteps = 10.0\n", r"steps must be INTEGER, not 10.0"),
        ('[train]\nmicro_batch_size = "4"\n', r"micro_batch_size must be INTEGER|auto"),
        ("[model]\ntie_embeddings = 1\n", r"tie_embeddings must be true|false, not 1"),
        ("[data]\ntokens = 1\n", r"tokens must be TEXT, not 1"),
        ("[optim\n", "mine.toml"),
    ],
)
def test_bad_presets_are_refused(tmp_path, text, said):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        load(str(tmp_path / "mine.toml"))


def test_all_mistakes_of_a_preset_are_told_at_once(tmp_path):
    (tmp_path / "mine.toml").write_text('[optim]\nlrr = 1\nbeta1 = "x"\n[modl]\nx = 1\n[train]\nsteps = 0.5\n')
    with pytest.raises(UserError) as error:
        load(str(tmp_path / "mine.toml"))
    assert all(word in str(error.value) for word in ("key lrr;", "beta1 must", "key x", "steps must"))


def test_whole_numbers_serve_as_floats_and_words_beside_numbers(tmp_path):
    (tmp_path / "mine.toml").write_text("[optim]\nlr = 1\n[train]\nmicro_batch_size = 4\n")
    config = load(str(tmp_path / "mine.toml"))
    assert type(config.optim.lr) is float and config.train.micro_batch_size == 4
    assert load("--lr=1", "--micro_batch_size=auto").train.micro_batch_size == "auto"
    assert type(load("--lr=1").optim.lr) is float


@pytest.mark.parametrize("config", [settings.Command, sample.SampleConfig, evaluate.EvaluateConfig])
def test_every_number_has_a_range(config):
    for name, item in cli.flat_fields(config).items():
        if re.search("INTEGER|NUMBER", cli.syntax(item.type)):
            assert re.fullmatch(r"(greater than|at least) .* and (less than|at most) .*", cli.limits(item.type)), name


CONTRACT = """
name out_dir seed resume plan plan_world_size max_minutes tokens order skip_steps architecture vocab_size n_layer n_head
n_kv_head n_embd d_ff seq_len dropout tie_embeddings init_from optimizer lr min_lr warmup_steps schedule weight_decay
beta1 beta2 grad_clip steps tokens_per_update micro_batch_size device dtype compile threads strategy replicate
grad_compression check_replicas_every eval_every eval_tokens save_every keep_last keep_best async_save log_every
wandb wandb_project
"""


def test_flags_that_scripts_rely_on_are_there():
    assert set(CONTRACT.split()) <= cli.flat_fields(settings.Command).keys()


@given(
    tokens=st.integers(1, 5000),
    seq_len=st.integers(1, 64),
    micro=st.just("auto") | st.integers(1, 8),
    ranks=st.integers(1, 9),
    shape=st.tuples(st.integers(1, 400), st.integers(1, 16), st.integers(0, 16)),
    architecture=st.sampled_from(["gpt2", "qwen3"]),
    strategy=st.sampled_from(["ddp", "exact", "fsdp"]),
)
def test_what_a_refusal_suggests_passes_every_check(tokens, seq_len, micro, ranks, shape, architecture, strategy):
    n_embd, n_head, n_kv_head = shape
    batch = {"tokens_per_update": tokens, "seq_len": seq_len, "micro_batch_size": micro, "strategy": strategy}
    sizes = {"n_embd": n_embd, "n_head": n_head, "n_kv_head": n_kv_head, "architecture": architecture}
    config = settings.replace(settings.Config(), **batch, **sizes)
    changes = {"n_kv_head": "0"}
    try:
        rules.check(config, ranks)
    except UserError as error:
        for line in str(error).split("\n"):
            if suggested := re.search(r"--(\w+)=.*; try (?:--n_embd=|one of )?([\d, or]+)", line):
                changes[suggested[1]] = suggested[2]
            if "or --micro_batch_size=auto" in line:
                rules.check(settings.replace(config, micro_batch_size="auto", n_embd=768, n_head=12, n_kv_head=0), ranks)
            if "or --strategy=exact" in line:
                exact = settings.replace(config, strategy="exact", n_embd=768, n_head=12, n_kv_head=0)
                rules.check(exact, ranks)
    for last in (0, -1):
        values = {name: int(re.findall(r"\d+", text)[last]) for name, text in changes.items()}
        if "n_kv_head" in changes and architecture == "gpt2":
            values["n_kv_head"] = 0
        rules.check(settings.replace(config, **values), ranks)


def test_exact_needs_a_micro_batch_for_each_rank(monkeypatch):
    batch = ["--seq_len=256", "--micro_batch_size=4"]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert load("--strategy=exact", "--tokens_per_update=8192", *batch).micro_batches == 8
    with pytest.raises(UserError, match="is less than --seq_len=256 x --micro_batch_size=4 x 7 ranks; try 7168"):
        load("--strategy=exact", "--tokens_per_update=4096", *batch)


@given(name=st.text(min_size=1, max_size=20), lr=st.floats(1e-300, 1e300), steps=st.integers(50, 10**9), tied=st.booleans())
def test_config_toml_reads_back(name, lr, steps, tied):
    config = settings.replace(settings.Config(), name=name, lr=lr, steps=steps, tie_embeddings=tied)
    tables = tomllib.loads(settings.dumps(config))
    assert {key: value for table in tables.values() for key, value in table.items()} == cli.flat_values(config)


def test_config_toml_is_a_preset(tmp_path):
    config = load("--lr=0.125", "--tie_embeddings=false", "--name=again")
    (tmp_path / "config.toml").write_text(settings.dumps(config) + 'wandb_tags = "of an older version"\n')
    assert load(str(tmp_path / "config.toml")) == config


@pytest.mark.parametrize("preset", ["gpt2_124m", "gpt2_355m", "qwen3_124m", "llama_1.3b"])
def test_large_presets_run_on_one_to_eight_gpus(preset, monkeypatch):
    for size in (1, 2, 4, 8):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(size))
        load(f"config/{preset}.toml")


def run(*args, script="train.py", cwd=ROOT, status=2, **environment):
    """A command in a process of its own, to its end."""
    return execute([sys.executable, ROOT / script, *args], status, environment, cwd, fork=False)


ASCII = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "utf-8"}, ASCII], ids=["utf-8", "ascii"])
def test_a_refused_command_tells_all_mistakes_on_any_terminal(environment):
    refused = run("--lrr=1", "--sed", "2", "--weight-decy=3", "--steps=many", "--lr", "--wandb=on", "x", **environment)
    assert refused.stdout == ""
    assert refused.stderr.splitlines() == [
        "error: --lr needs a value, as in --lr=NUMBER",
        "       unknown flag --lrr; perhaps you meant --lr (--help lists all flags)",
        "       unknown flag --sed; perhaps you meant --seed (--help lists all flags)",
        "       unknown flag --weight-decy; perhaps you meant --weight_decay (--help lists all flags)",
        "       unexpected x: a preset or a run stands before all flags, and a flag is --name=value",
        "       --steps must be INTEGER, not 'many'",
        "       --wandb must be off|offline|online, not 'on'",
    ]
    refused = run("--seed=x\u00e9", **environment)
    assert refused.stderr.startswith("error: --seed must be INTEGER, not 'x")


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "utf-8"}, ASCII], ids=["utf-8", "ascii"])
def test_help_shows_the_defaults_of_the_preset(environment, tmp_path):
    (tmp_path / "untied.toml").write_text("[model]\ntie_embeddings = false\n\n[train]\nsteps = 95367\n")
    for preset, steps, tied in [([], 220, "true"), ([tmp_path / "untied.toml"], 95367, "false")]:
        shown = run(*preset, "--help", status=0, **environment)
        assert shown.stderr == ""
        text = " ".join(shown.stdout.replace("\u2502", " ").replace("|", " ").split())
        assert f"(default: {steps})" in text.split("--steps INTEGER")[1][:100]
        assert f"(default: {tied})" in text.split("--tie_embeddings true false")[1][:100]


@pytest.mark.parametrize("script", ["sample.py", "plot.py"])
def test_a_command_without_a_run_says_which_runs_there_are(tmp_path, script):
    nothing = run(script=script, cwd=tmp_path)
    for name in ("mine", "laptop", "refused"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("mine", "laptop"):
        (tmp_path / "runs" / name / "metrics.jsonl").touch()
    found = run(script=script, cwd=tmp_path)
    assert "none yet; python train.py makes one" in nothing.stderr
    assert re.fullmatch(
        rf"error: name (a|at least one) run: python {script} runs/NAME; there are runs/laptop, runs/mine\n", found.stderr
    )


@pytest.mark.parametrize("preset", sorted((ROOT / "config").glob("*.toml")), ids=lambda path: path.stem)
def test_every_preset_is_valid_and_knows_the_command_that_makes_its_dataset(preset, tmp_path):
    """The command is printed where the tokens are missing, but not for other tokens than the preset's."""
    config = load(str(preset))
    command = config.data.prepare_command
    assert config.run.name == preset.stem
    assert command.startswith("python prepare_data.py ") and f"--out={config.data.tokens}" in command.split()
    with pytest.raises(UserError) as error:
        data.open_mixture(str(tmp_path / "mine"), 0, command)
    assert f"make it with: python prepare_data.py [SOURCE ...] --out={tmp_path}/mine" in str(error.value)


def test_missing_tokens_are_refused_with_the_command_that_makes_them(tmp_path):
    refused = run(ROOT / "config/gpt2_124m.toml", "--device=cpu", cwd=tmp_path)
    command = load("config/gpt2_124m.toml").data.prepare_command
    assert refused.stderr == f"error: --tokens=tokens/fineweb10B does not exist; make it with: {command}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_not_the_users_input(capsys):
    with pytest.raises(SystemExit) as end, errors.user_errors(), open("/dev/full", "w") as file:
        file.write("x")
        file.flush()
    assert end.value.code == 1 and capsys.readouterr().err.startswith("error: the disk: No space left on device")


def test_help_lists_every_flag_without_importing_torch():
    shown = run("--help", status=0)
    assert re.match(r"usage: python \S*train\.py \[config/NAME\.toml\] ", shown.stdout)
    first_lines = shown.stdout.partition("options")[0]
    assert "    python train.py config/gpt2_124m.toml --lr=3e-4  " in first_lines and "top to bottom" not in first_lines
    for name in cli.flat_fields(settings.Config):
        assert f"--{name}" in shown.stdout
    loaded = execute([sys.executable, "-X", "importtime", "train.py", "--help"])
    imported = {line.rpartition("|")[2].strip() for line in loaded.stderr.splitlines()}
    assert "settings" in imported and not imported & {"torch", "numpy"}


def test_other_ranks_leave_the_master_time_to_tell_of_bad_input():
    began = time.monotonic()
    refused = run("--lrr=1", RANK="1")
    assert "[rank 1]" in refused.stderr and time.monotonic() - began > 3


CLOSED_PIPE = """
import os, sys
from common import errors
with errors.user_errors():
    print("first", flush=True)
    os.read(0, 1)  # the reader has ended by now
    {}
"""


@pytest.mark.parametrize(
    "rest, status",
    [("raise SystemExit(75)", 75), ("print('more'); raise SystemExit(75)", 75), ("print('more', flush=True)", 1)],
)
def test_an_exit_status_does_not_become_0_because_nobody_reads(rest, status):
    command, env = [sys.executable, "-c", CLOSED_PIPE.format(rest)], os.environ | {"PYTHONUNBUFFERED": ""}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **streams)
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    _, errors = process.communicate("x")
    assert (process.returncode, errors) == (status, "")


def short_run(tokens, folder, *flags):
    """The command line of a run of two steps, `folder`/run."""
    settings = machine.TINY_RUN | dict(steps=2, out_dir=folder, name="run", tokens=tokens)
    return [sys.executable, *machine.arguments(ROOT / "train.py", **settings), *flags]


@pytest.mark.parametrize("flags", [["--help"], ["--plan"], []])
def test_a_reader_that_ends_early_ends_nothing_else(tokens, tmp_path, flags):
    command = short_run(tokens, tmp_path, *flags)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 0
    assert flags or "done: 2 steps" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize("console", [">&- 2>&- <&-", ">/dev/full"])
def test_a_run_goes_on_without_a_console(tokens, tmp_path, console):
    done = shell(tmp_path, f"{shlex.join(short_run(tokens, tmp_path))} {console}")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "done: 2 steps" in (tmp_path / "run" / "train.log").read_text()


def test_what_a_full_console_has_not_taken_is_not_taken_for_done(tmp_path):
    done = shell(tmp_path, f"{shlex.join([sys.executable, '-c', CONSOLE])} >/dev/full")
    assert (done.returncode, done.stderr) == (1, "warning: the console takes nothing any more: No space left on device\n")
    assert shell(tmp_path, f"{sys.executable} {ROOT / 'train.py'} --steps=x 2>&-").returncode == 2


CONSOLE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from common import errors\nwith errors.user_errors(): print('text')"


def shell(folder, line):
    """Run a line of a shell in `folder`."""
    return subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, timeout=100)


def test_commands_work_under_python_s_own_options(tmp_path):
    for script in ("train", "sample", "evaluate", "replay", "export", "plot", "prepare_data"):
        done = shell(tmp_path, f"{sys.executable} -OO -I {ROOT / script}.py nothing --seed=x --step=x --out=x")
        assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_working_directory_that_is_gone_is_an_error(tmp_path):
    for script in ("train", "plot"):
        done = shell(tmp_path, f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} {ROOT / script}.py x")
        assert (done.returncode, done.stderr) == (2, "error: the working directory was removed; go to one that is there\n")


# A module that swallows what is raised while it is imported, as some do.
SWALLOWING = """
import time
print("now", flush=True)
for _ in range(600):
    try:
        time.sleep(0.1)
    except BaseException:
        pass
"""


def test_ctrl_c_is_not_swallowed_by_an_import_and_shows_no_traceback(tmp_path):
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from common import errors\n"
    code += "with errors.user_errors():\n    import swallowing"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)  # half of what the import takes
    assert (process.returncode, errors) == (130, "interrupted\n")


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"a\\u001b[2J": "x"}\n')
    line = f"{sys.executable} {ROOT / 'prepare_data.py'} text.jsonl --tokenizer=bytes --column=$(printf 'b\\033]0;x\\007')"
    done = shell(tmp_path, line)
    assert done.returncode == 2 and "\\x1b" in done.stderr and "\x1b" not in done.stderr + done.stdout


def test_what_a_failing_test_leaves_is_ended():
    with pytest.raises(AssertionError), ending_what_is_left():
        process = subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        child = int(process.stdout.readline())
        raise AssertionError
    assert process.returncode == -signal.SIGKILL
    stat = Path(f"/proc/{child}/stat")
    wait_for(lambda: not stat.exists() or stat.read_text().split()[2] == "Z")  # which it is until somebody has asked after it


@pytest.mark.parametrize("script", ["train.py", "plot.py"])
def test_windows_itself_is_refused(script):
    start = f"import runpy, sys; sys.platform = 'win32'; sys.path[:0] = ['.']; runpy.run_path('{script}', run_name='__main__')"
    assert re.fullmatch("error: .*use WSL.*\n", execute([sys.executable, "-c", start], status=2).stderr)
