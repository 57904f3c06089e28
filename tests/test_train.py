"""Pretraining through the front door: real processes, real torchrun, real wandb, real transformers."""

import json
import re
import shutil
import struct
import sys
import tomllib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import machine
import wandb_server
from conftest import ROOT, before_update, execute, largest_difference
from evaluate import describe
from lockstep import settings
from lockstep.checkpoints import lookup, retention
from model import on_meta


def test_a_run_learns_and_leaves_the_promised_directory(shared):
    run = shared.runs / "plain"
    losses = [record["loss"] for record in shared.metrics("plain", "loss")]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    assert losses[0] == pytest.approx(torch.tensor(384.0).log().item(), abs=0.2)  # a uniform guess of 257 bytes, padded to 384
    evaluations = shared.metrics("plain", "val_loss")
    assert [record["step"] for record in evaluations] == [5, 10, 15, 20]
    assert all(record["val_bpb"] == pytest.approx(record["val_loss"] / 0.6931, rel=0.02) for record in evaluations)
    first, second = map(json.loads, (run / "metrics.jsonl").read_text().splitlines()[:2])
    assert "tokens_per_second" not in first  # the first update is not typical
    told = "step tokens loss lr grad_norm tokens_per_second mfu data_wait_ms memory_gb"
    assert set(told.split()) <= second.keys() and 0 < second["mfu"] <= 1
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "train.log").read_text().count("step     20/20") == 2  # the update and the evaluation
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert {"latest", "best", "step-00000020", "step-00000015"} <= names and len(names) <= 5
    files = {path.name for path in shared.latest("plain").iterdir()}
    model = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files == model | {"optimizer.safetensors", "trainer_state.json", "manifest.json"}
    state = shared.state("plain")
    assert state["step"] == 20 and state["tokens"] == 20 * 384 and state["settings"]["n_embd"] == 32
    assert state["best_val_loss"] == min(record["val_loss"] for record in evaluations[:-1])  # saved before the last


def test_mfu_is_of_the_datasheets_peak_also_where_it_is_exceeded(train):
    train.changed("from lockstep.hardware import device; device.known_peak_flops = lambda *_: 1e6", "fast", steps=3)
    assert machine.metrics(train.runs / "fast")[1]["mfu"] > 1


def test_the_document_explains_every_file_and_every_field(shared):
    parts = (ROOT / "docs/metrics.md").read_text().split("\n## ")
    files, fields, checkpoint = (
        {name.rstrip("/") for row in re.findall(r"^\|([^|]*`[^|]*)\|", part, re.M) for name in re.findall(r"`([^`]+)`", row)}
        for part in (parts[0], parts[1], next(part for part in parts if part.startswith("A checkpoint")))
    )
    run = shared.runs / "plain"
    sometimes = {"prediction.json", "tensorboard", "wandb", "trace-00000100.json.gz"}
    there = {path.name for path in run.iterdir()} - {"checkpoints"}
    assert {name for name in files if "/" not in name} - {"best"} == there | sometimes
    told = set().union(*map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    told = {"epochs/NAME" if name.startswith("epochs/") else name for name in told}
    assert fields | {"time"} == told | {"skipped", "val_loss/NAME", "val_bpb/NAME"}
    assert {path.name for path in shared.latest("plain").iterdir()} <= checkpoint


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])  # a qwen3 is opened in test_export.py
def test_a_checkpoint_is_a_hugging_face_model(train, architecture):
    flags = dict(architecture=architecture, steps=3, n_kv_head="auto" if architecture == "gpt2" else 1)
    train("hf", **flags)
    latest = train.latest("hf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(latest), AutoTokenizer.from_pretrained(latest)
    assert model.config.model_type == architecture
    inputs = tokenizer("def main", return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 8
    assert tokenizer.decode(inputs["input_ids"][0]) == "def main"
    assert "is complete at step 3" in train("hf", **flags).stdout


# AdamW's first steps are lr times the sign of the gradient, whatever its size, so where a gradient cancels to nearly nothing
# its rounding decides: what two float32 sums in another order may differ by in the weights is a small part of lr.
GENTLE = dict(lr=1e-4, warmup_steps=0)


def test_one_big_batch_and_three_ranks_equal_one_process(train):
    train("gentle", **GENTLE)
    train("big", micro_batch_size=24, **GENTLE)
    done = train("ranks", ranks=3, **GENTLE)
    for name in ("big", "ranks"):
        assert largest_difference(train.weights(name), train.weights("gentle")) < GENTLE["lr"] / 2
    for record, wanted in zip(train.metrics("ranks"), train.metrics("gentle"), strict=True):
        assert record == pytest.approx(wanted, abs=1e-4)
    assert len(re.findall(r"^step     20/20  loss", done.stdout, re.M)) == 1  # only the master tells


def test_mean_loss_is_that_of_the_steps_since_the_last_line(train):
    train("each", steps=8)
    losses = [record["loss"] for record in train.metrics("each", "loss")]
    train("fourth", steps=8, log_every=4, save_every=6)
    train("branch", steps=8, log_every=4, resume=train.runs / "fourth" / "checkpoints" / "step-00000006")
    means = [sum(losses[:1]), sum(losses[1:4]) / 3, sum(losses[4:]) / 4]
    for run, wanted in (("fourth", means), ("branch", means[2:])):
        assert [record["mean_loss"] for record in train.metrics(run, "loss")] == pytest.approx(wanted, rel=1e-12)


def test_only_rank_0_writes_and_starts_wandb_which_keeps_its_run_id(train):
    env = dict(WANDB_RUN_GROUP="sweep", WANDB_TAGS="small,tiny", WANDB_PROJECT="other-team", WANDB_MODE="disabled")  # flags win
    flags = dict(ranks=2, wandb="offline", wandb_project="test", env=env)
    train("logged", steps=10, **flags)
    folders = sorted((train.runs / "logged" / "wandb").glob("offline-run-*"))
    assert len(folders) == 1
    train("logged", steps=12, lr=5e-3, **flags)
    first, second = sorted((train.runs / "logged" / "wandb").glob("offline-run-*"), key=lambda folder: folder != folders[0])
    run_id = train.state("logged")["wandb_run_id"]
    steps = [record["step"] for record in train.metrics("logged", "loss")]
    assert steps == list(range(1, 13))

    for folder, lr, last in ((first, 1e-2, 10), (second, 5e-3, 12)):
        (path,) = folder.glob("*.wandb")
        assert steps_in(path) == steps[:last]  # the newest folder has everything
        content = path.read_bytes()  # protocol buffers, in which texts are as they are
        for told in (run_id, "test", "logged", "sweep", "small", "tiny", "val/bpb", "speed/mfu", f"{lr}"):
            assert told.encode() in content
        assert b"other-team" not in content


def steps_in(path):
    """The steps of the updates in a .wandb file. It has LevelDB's log format: blocks of 32 KiB, and parts with headers."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record, steps = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        size, kind = struct.unpack("<HB", content[at + 4 : at + 7])  # after a checksum
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if -at % 32768 < 7:  # the block has no room for another header
            at += -at % 32768
        if kind in (1, 4):  # a whole record, or the last part of one
            row = {"/".join(item.nested_key): item.value_json for item in Record.FromString(record).history.item}
            steps += [int(row["step"])] if "train/loss" in row else []
            record = b""
    return steps


def test_wandb_s_variables_win_over_our_defaults(train, tmp_path):
    env = dict(WANDB_PROJECT="team", WANDB_NAME="nice", WANDB_DIR=str(tmp_path), WANDB_RUN_ID="mine", WANDB_RESUME="never")
    train("named", steps=1, wandb="offline", env=env)
    assert not (train.runs / "named" / "wandb").exists() and train.state("named")["wandb_run_id"] == "mine"
    (file,) = tmp_path.glob("wandb/offline-run-*-mine/*.wandb")
    content = file.read_bytes()
    assert b"team" in content and b"nice" in content
    train("plain", steps=1, wandb="offline", env=dict(WANDB_PROJECT="", WANDB_NAME=""))
    (file,) = (train.runs / "plain" / "wandb").glob("offline-run-*/*.wandb")
    assert b"\x08lockstep" in file.read_bytes()  # the project: its length, then its name


def test_compile_without_a_compiler_falls_back_with_one_warning(train):
    done = train("fallback", compile="on", steps=5, env={"PATH": "", "CXX": "no-such-compiler"})
    assert (done.stdout + done.stderr).count("torch.compile does not work here") == 1
    assert tomllib.loads((train.runs / "fallback" / "config.toml").read_text())["train"]["compile"] == "off"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_stays_near_float32(train, shared, dtype):
    train("mixed", dtype=dtype)
    first, wanted = shared.metrics("plain")[0], shared.metrics("plain")[-1]["val_loss"]
    assert train.metrics("mixed")[0]["grad_norm"] == pytest.approx(first["grad_norm"], rel=0.05)
    assert train.metrics("mixed")[-1]["val_loss"] == pytest.approx(wanted, abs=0.05)
    assert {t.dtype for t in train.weights("mixed").values()} == {torch.float32}


def test_settings_that_decide_what_the_weights_mean_may_not_change(train):
    train("fixed", steps=5)
    refused = train("fixed", steps=10, status=2, n_layer=3, seq_len=32, seed=7)
    assert refused.stderr.startswith("error: ") and "Traceback" not in refused.stderr
    for line in ("--n_layer=3, but the checkpoint used 2", "--seq_len=32", "--seed=7", f"leave {train.runs}/fixed as it is"):
        assert line in refused.stderr
    taken = train("fixed", steps=10, lr=0.005, micro_batch_size=8, save_every=3, dropout=0.1)
    for line in (
        "changed: dropout 0.0 -> 0.1",
        "changed: lr 0.01 -> 0.005",
        "changed: micro_batch_size 4 -> 8",
        "changed: steps 5 -> 10",
    ):
        assert line in taken.stdout
    assert train.state("fixed")["step"] == 10


def test_resume_off_and_resume_from_another_run(train):
    train("first", steps=5)
    assert "--name" in train("first", steps=5, resume="off", status=2).stderr
    train("branch", steps=10, resume=train.runs / "first")
    bare = train.runs / "bare"
    shutil.copytree(train.latest("first").resolve(), bare)
    train("branch2", steps=10, resume=bare)
    assert train.files("branch") == train.files("branch2")
    share = f"{train.tokens}:0.5"
    mixed = train("mixed", steps=7, resume=train.runs / "first", tokens=f"{share},{share}").stdout
    assert f"changed: tokens {train.tokens} -> {share},{share}" in mixed
    assert "at step 7; " in mixed.splitlines()[-2]  # its own lowest validation loss, not that of step 5
    few = train("few", steps=5, resume=train.runs / "first", status=2).stderr
    assert "--steps must be at least 6" in few and "--init_from=PATH, or leave out --resume" in few
    again = train("branch", steps=12, resume=train.runs / "first")
    assert f"--resume={train.runs / 'first'} is ignored: this run already has checkpoints" in again.stdout
    assert "neither a run" in train("nowhere", resume=train.runs / "nothing", status=2).stderr


def by_name(train, name, *flags):
    """`python train.py --name=NAME` for a run of `train`, as a user continues it."""
    return execute([sys.executable, "train.py", f"--out_dir={train.runs}", f"--name={name}", *flags]).stdout


def test_a_name_is_enough_to_continue_a_run_with_its_own_settings(train):
    train("whole", steps=10, schedule="constant", lr=5e-3)
    train("mine", steps=5, schedule="constant", lr=5e-3)
    said = by_name(train, "mine", "--steps=10")
    assert re.findall("^changed: .*", said, re.M) == ["changed: steps 5 -> 10"]
    train.assert_same("mine", "whole")
    train("branch", steps=12, resume=train.runs / "mine")
    assert "is not read" not in by_name(train, "branch", "--steps=13")
    state = train.state("branch")
    assert state["step"] == 13 and state["settings"]["resume"].endswith("mine/checkpoints/step-00000010")


SCALED = dict(rope_scaling="2.0,1,4,16")


def test_a_longer_context_begins_from_the_weights_of_a_shorter_one(train):
    train("short", steps=2)
    longer = dict(init_from=train.runs / "short", seq_len=32, steps=2, optimizer="adamw")
    tokens = torch.arange(64).view(2, 32)
    refused = train("longer", status=2, **longer).stderr
    extend = 'to extend it, set rope_scaling = "2,1,4,16" in a preset file, or a rope_theta above 10000; '
    assert f"has a context of 16; {extend}" in refused
    for name, rope_type, stretch in (("theta", "default", dict(rope_theta=4e4)), ("scaled", "llama3", SCALED)):
        train(name, **longer, **stretch)
        theirs = AutoModelForCausalLM.from_pretrained(train.latest(name))
        assert theirs.config.max_position_embeddings == 32 and theirs.config.rope_parameters["rope_type"] == rope_type
        with torch.no_grad():
            ours = lookup.load_model(str(train.runs / name), on_meta)[1](tokens)
            torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert "continuing from" in train("scaled", **longer | dict(steps=3), **SCALED).stdout
    train("gpt2", steps=1, architecture="gpt2", optimizer="adamw")
    refused = train("longer", status=2, **longer | dict(init_from=train.runs / "gpt2"), **SCALED).stderr
    assert "has a context of 16 learned positions, and no weights for more; " in refused


FULL_DISK = "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free=9)"
TOO_LONG = dict(seq_len=16384, tokens_per_update=98304)


@pytest.mark.parametrize(
    "said, flags, change",
    [
        ("validation tokens, less than one window of --seq_len=16384", TOO_LONG, ""),
        (
            "needs tensorboard, which",
            dict(tensorboard=True),
            "from lockstep.planning import startup; startup.find_spec = lambda _: None",
        ),
        ("MB, but the disk has only 0 MB left", {}, FULL_DISK),
    ],
    ids=["evaluation", "package", "saving"],
)
def test_a_command_that_cannot_end_well_is_refused_and_leaves_nothing(train, said, flags, change):
    refused = train.changed(change, "refused", status=2, micro_batch_size=1, **flags)
    assert refused.stderr.startswith("error: ") and said in refused.stderr and "step      1/" not in refused.stdout
    assert not train.runs.exists()


def test_what_is_done_stays_on_record_and_on_the_disk(train):
    train("done", steps=5, save_every=1, keep_last=0)
    run = train.runs / "done"

    def kept():
        return [(run / name).read_bytes() for name in ("config.toml", "metrics.jsonl")], sorted((run / "checkpoints").iterdir())

    before = kept()
    assert "--steps=3, but 5 steps are done" in train("done", steps=3, status=2).stderr
    again = train("done", steps=5, keep_last=1, lr=0.5).stdout
    assert "is complete at step 5" in again and "changed" not in again and "loaded" not in again
    assert kept() == before and len(before[1]) == 7
    assert "is complete at step 5" in train.changed(FULL_DISK, "done", steps=5).stdout  # it needs no room for a checkpoint


def test_config_toml_has_a_number_for_every_choice_and_a_longer_run_has_no_second_warmup(train):
    def resolved(name):
        groups = tomllib.loads((train.runs / "long" / "config.toml").read_text())
        return next(group[name] for group in groups.values() if name in group)

    flags = dict(warmup_steps="auto", min_lr="auto", threads="auto", strategy="exact", schedule="cosine")
    train("long", steps=5, **flags)
    assert (resolved("warmup_steps"), resolved("min_lr"), resolved("threads")) == (1, 1e-3, 1)
    done = train("long", steps=500, max_minutes=1e-4, status=75, **flags)
    assert resolved("steps") == 500 and resolved("warmup_steps") == 1 and "changed: warmup" not in done.stdout
    assert train.metrics("long", "lr")[5]["lr"] == pytest.approx(1e-2, rel=1e-3)


def test_wandb_online_without_an_account_is_refused(train):
    env = {"WANDB_API_KEY": "", "NETRC": "/nowhere", "HOME": "/nowhere", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    refused = train("online", steps=2, wandb="online", status=2, env=env | {"WANDB_MODE": "offline"}).stderr
    assert "error: --wandb=online: " in refused and "--wandb=offline needs no account" in refused
    assert "forbids" not in refused
    assert not (train.runs / "online").exists()


def test_wandb_online_shows_no_step_twice_after_a_way_back(train):
    flags = dict(wandb="online", save_every=3, eval_every=4, schedule="constant")
    with wandb_server.serving() as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "k" * 40}
        train("back", steps=8, env=env, **flags)
        shutil.rmtree(retention.step_directory(train.runs / "back/checkpoints", 8))  # as if a kill had come before this save
        said = train("back", steps=12, env=env, **flags).stdout
    assert "step-00000006" in said and "wandb already has the steps from 7 to 8" in said
    assert [row["step"] for row in server.rows if "train/loss" in row] == list(range(1, 13))
    assert {row["step"] for row in server.rows if "val/loss" in row} == {4, 8, 12}


def test_the_console_says_what_runs_and_what_to_type_next(train):
    told = train("told", steps=2, ranks=2, micro_batch_size=4).stdout
    head = told.splitlines()
    assert head[0] == f"{train.runs}/told, from the beginning"
    assert [line.split()[0] for line in head[1:8]] == ["model", "tokens", "batch", "ranks", "device", "memory", "peak"]
    assert all(line[:2] == "  " and line[9] == " " and line[10] != " " for line in head[1:8])
    assert "384 tokens = 6 micro-batches of 4 x 16, 3 on each of 2 ranks; 2 steps" in told
    assert "2 ranks, ddp, 1 thread each" in told and "TFLOP/s over all ranks, measured here" in told
    assert re.search(rf"this took [^;]+; next: python sample.py {train.runs}/told$", told, re.M)
    assert not re.search(r"\(s\)|\b1 \w+s\b", told)


def test_a_run_says_where_its_weights_came_from(train, shared):
    first = retention.step_directory(shared.runs / "plain" / "checkpoints", 20)
    more = train("more", steps=21, resume=shared.runs / "plain")
    assert f"loaded the weights and optimizer state of {first}" in more.stdout
    tuned = train("tuned", steps=1, init_from=train.runs / "more", optimizer="adamw")
    assert f"loaded the weights of {train.runs}/more" in tuned.stdout
    train("more", steps=22)  # it goes on
    train("tuned", steps=2, init_from=train.runs / "more", optimizer="adamw")  # continues
    other = train("tuned", steps=3, init_from=shared.runs / "plain", optimizer="adamw", status=2).stderr
    assert f"--init_from={shared.runs}/plain, but the checkpoint used {train.runs}/more" in other
    for steps in (4, 5):  # a new run from a checkpoint of a tuned one, and the same command again
        train("third", steps=steps, resume=train.runs / "tuned", optimizer="adamw")
    wrong = train("fourth", steps=4, resume=train.runs / "tuned", init_from=shared.runs / "plain", optimizer="adamw", status=2)
    assert "but the checkpoint used" in wrong.stderr
    one, two = (train.state(name)["settings"] for name in ("more", "tuned"))
    assert one["resume"] == str(first) and two["init_from"] == f"{train.runs}/more/checkpoints/step-00000021"


def test_ctrl_c_is_answered_before_the_first_step_and_during_an_update(train):
    early = train.changed("train.startup.choices.resolve = lambda *_: os.kill(os.getpid(), 2)", "early", status=130)
    assert early.stderr == "interrupted\n" and not (train.runs / "early").exists()
    empty = train.runs / "empty"
    empty.mkdir(parents=True)
    (empty / "metrics.jsonl").touch()
    assert "has no checkpoint yet" in execute([sys.executable, "sample.py", empty], status=2).stderr
    stopped = train.changed(before_update(0, "os.kill(os.getpid(), 2)"), "during", status=75, save_every=0)
    assert "stopping after this update or the next; press Ctrl-C again to end at once" in stopped.stderr
    assert "(SIGINT), saved; run the same command to continue" in stopped.stdout


@pytest.mark.parametrize("step", [10, 20])
def test_a_stop_leaves_a_due_evaluation_to_the_run_that_continues(train, shared, step):
    train.changed(before_update(step - 2, "os.kill(os.getpid(), 15)"), "asked", status=75)
    assert train.state("asked")["step"] == step
    assert train.metrics("asked", "val_loss") == shared.metrics("plain", "val_loss")[: step // 5 - 1]
    train("asked")
    train.assert_same("asked", "plain", of=shared)


def test_init_from_a_hugging_face_directory(train, shared, tmp_path):
    start, other_tokens = shared.latest("plain").resolve(), tmp_path / "other"
    source = [ROOT / "train.py", f"--out={other_tokens}", "--tokenizer=train:257", "--val_fraction=0.1"]
    execute([sys.executable, "prepare_data.py", *source])
    done = train("tuned", init_from=start, steps=2, n_layer=7, warmup_steps=0, lr=1e-6, optimizer="adamw")
    assert f"of {start}; its shape overrides settings and flags\n" in done.stdout and "2 layers" in done.stdout
    assert train.metrics("tuned")[0]["loss"] < shared.metrics("plain")[0]["loss"] - 1
    done = train("tuned", init_from=start, steps=3, n_layer=7, warmup_steps=0, lr=1e-6, optimizer="adamw")
    assert "continuing from" in done.stdout and "2 layers" in done.stdout
    other = train("other", init_from=start, tokens=other_tokens, status=2).stderr
    assert "not made with the tokenizer of" in other and f"--tokenizer={start}/tokenizer.json" in other
    assert "not made with the tokenizer of" in train("branch", resume=start, tokens=other_tokens, status=2).stderr
    evaluated = execute([sys.executable, "evaluate.py", shared.runs / "plain", f"--tokens={other_tokens}"], status=2)
    assert "not made with the tokenizer of" in evaluated.stderr


def test_foreign_tokens_train_without_conversion(train, tmp_path, rng):
    tokens = (rng.integers(0, 3, 4000).cumsum() % 60).astype("uint16")
    for split, part in (("train", tokens[:3000]), ("val", tokens[3000:])):
        part.tofile(tmp_path / f"{split}.bin")
    done = train("foreign", tokens=tmp_path, steps=10, vocab_size=64)
    assert "bits per byte" not in done.stdout and "validation loss" in done.stdout
    assert "the run reads them 1.28 times" in done.stdout
    assert "outside the vocabulary" in train("bad", tokens=tmp_path, vocab_size=32, status=2).stderr
    for flags in (dict(init_from=train.runs / "foreign"), dict(resume=train.runs / "foreign")):
        refused = train("other", steps=12, **flags, status=2).stderr  # on bytes
        assert "step-00000010 has 64 tokens, but" in refused and "prepare the text again" in refused
    assert "is a file; pass a directory of tokens" in train("bad", tokens=tmp_path / "train.bin", status=2).stderr


def test_a_run_that_goes_on_keeps_what_it_chose(train):
    flags = dict(micro_batch_size="auto", compile="auto")
    train("run", threads=1, steps=3, **flags)
    change = "from lockstep.hardware import device, footprint\ndevice.compiling_pays = lambda *_: True\n"
    change += "footprint.rows_at_a_time = lambda *_: 1 << 40"
    said = train.changed(change, "run", threads=2, steps=5, **flags).stdout
    assert "changed: threads 1 -> 2" in said and "not compiled" in said
    kept = settings.read_preset(train.runs / "run/config.toml").train
    assert (kept.compile, kept.micro_batch_size) == ("off", 24)


def test_a_run_keeps_its_threads_where_the_machine_has_them(train):
    """OMP_NUM_THREADS counts without torchrun, and a run that continues elsewhere keeps its own number."""
    cores = "from lockstep.hardware import host\nhost.cores = lambda: {}\n"
    flags = dict(threads="auto", eval_every=0, save_every=0)
    train.changed(cores.format(4), "run", steps=2, env={"OMP_NUM_THREADS": "2"}, **flags)
    said = train.changed(cores.format(4), "run", steps=3, env={"OMP_NUM_THREADS": "1"}, **flags).stdout
    assert "note: the run keeps 2 threads per rank; --threads=1 gives different bits" in said and "changed: threads" not in said
    said = train.changed(cores.format(1), "run", steps=4, env={"OMP_NUM_THREADS": "1"}, **flags).stdout
    assert "changed: threads 2 -> 1" in said


def test_a_run_killed_before_its_first_checkpoint_keeps_what_it_chose(train):
    """Unless it is started with other flags: then it is another run."""
    flags = dict(micro_batch_size="auto", steps=3, eval_every=0, save_every=0)
    small = "from lockstep.hardware import footprint\nfootprint.largest_micro_batch = lambda *_: 3\n"
    train.changed(small + before_update(1, "os._exit(7)"), "run", status=7, **flags)
    assert not list((train.runs / "run").glob("checkpoints/step-*"))
    train("run", **flags)
    assert settings.read_preset(train.runs / "run/config.toml").train.micro_batch_size == 3
    train.changed(small + before_update(1, "os._exit(7)"), "other", status=7, **flags)
    train("other", **flags | dict(lr=5e-3))
    assert settings.read_preset(train.runs / "other/config.toml").train.micro_batch_size > 3


def test_a_schedule_that_cannot_work_as_meant_is_told_in_one_line(train):
    flags = dict(eval_every=0, save_every=0, schedule="cosine")
    assert "warning: --warmup_steps=9 takes up all of the 4 steps" in train("warm", steps=4, warmup_steps=9, **flags).stdout
    assert "warning" not in train("run", steps=6, **flags).stdout
    jump = r"warning: the learning rate jumps from \S+ to \S+ at step 7: the steps so far followed the schedule of a run of 6 "
    assert re.search(jump, train("run", steps=12, **flags).stdout)


# A disk that is full until the files of a run have been written to so many times.
FULL = """
import io
from lockstep.reports import log
class Disk(io.FileIO):
    writes = 0
    def write(self, content):
        Disk.writes += 1
        if {calls} < 0 or Disk.writes < {calls}:
            raise OSError(28, "No space left on device")
        return super().write(content)
log.open_to_append = lambda path: io.BufferedWriter(Disk(path, "a"), 1 << 20)
"""


def test_lines_that_a_full_disk_does_not_take_wait_and_the_run_goes_on(train):
    train("plain", steps=2)
    train.changed(FULL.format(calls=3), "later", steps=2)
    assert train.metrics("later") == train.metrics("plain") and len(train.metrics("later")) == 3
    done = train.changed(FULL.format(calls=-1), "never", steps=2)
    assert "metrics.jsonl failed: [Errno 28] No space" in done.stdout and train.metrics("never") == []
    assert train.files("never") == train.files("plain")


BROKEN = """
from lockstep.reports import curves, log
def fail(*args):
    raise OSError(28, "No space left on device")
def start(self, *args):
    self.trackers["wandb"] = fail, fail
    return "x"
log.Log.start_trackers, curves.draw = start, fail
"""


def test_what_only_reports_does_not_end_a_run(train):
    train("plain", steps=2)
    said = train.changed(BROKEN, "broken", steps=2).stdout
    for what in ("wandb", "drawing curves.png"):
        assert said.count(f"warning: {what} failed: [Errno 28] No space left on device; the run continues without it") == 1
    assert train.files("broken") == train.files("plain")
    bare = "import importlib; from lockstep.reports import curves; importlib.reload(curves)  # forks don't draw (see warm.py)\n"
    without = train.changed(f"{bare}sys.modules['matplotlib.figure'] = None", "bare", steps=2).stdout
    assert "warning: drawing curves.png failed: " in without and "matplotlib" in without
    assert train.files("bare") == train.files("plain") and not (train.runs / "bare" / "curves.png").exists()


def test_evaluate_agrees_with_the_run(shared):
    done = execute([sys.executable, "evaluate.py", shared.runs / "plain", "--eval_tokens=640", "--dtype=float32"])
    assert re.search(r": 640 of [\d,]{5,} validation tokens", done.stdout)
    loss = float(re.search(r"loss\s+([\d.]+)", done.stdout)[1])
    assert loss == pytest.approx(shared.metrics("plain")[-1]["val_loss"], abs=1e-3)
    assert {"perplexity", "bits per byte"} <= set(re.findall(r"perplexity|bits per byte", done.stdout))
    assert describe(800.0, None) == "loss 800.0000  perplexity inf"


def test_tensorboard_shows_no_step_of_a_killed_and_resumed_run_twice(train):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = dict(tensorboard=True, steps=12, save_every=3)
    train.changed(before_update(8, "os.kill(os.getpid(), 9)"), "board", status=-9, **flags)
    train("board", **flags)
    board = EventAccumulator(str(train.runs / "board/tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name, tag in {"loss": "train/loss", "val_loss": "val/loss", "lr": "train/lr"}.items():
        wanted = [(record["step"], pytest.approx(record[name])) for record in train.metrics("board", name)]
        assert [(event.step, event.value) for event in board.Scalars(tag)] == wanted
    tags = board.Tags()["scalars"]
    assert {tag.partition("/")[0] for tag in tags} == {"train", "val", "speed"} and "speed/step_ms" in tags
    for name in tags:
        steps = [event.step for event in board.Scalars(name)]
        assert steps == sorted(set(steps))


def test_a_loss_that_leaves_its_history_is_told_once_and_at_the_end(train, shared):
    rose = r"^warning: step \d+: the loss rose from [\d.]+ to [\d.]+; if it stays high"
    wild = dict(optimizer="adamw", lr=3.0, grad_clip=0, eval_every=0)
    said = train("wild", **wild).stdout
    assert len(re.findall(rose, said, re.M)) == 1 and "are far above the lowest, " in said.splitlines()[-2]
    assert "the loss rose" not in shared.log("plain") and "far above" not in shared.log("plain")
    train("calm", steps=5, eval_every=2, optimizer="adamw")
    lowest = train.metrics("calm", "val_loss")[-1]["val_loss"]
    spoilt = "from lockstep.parallel import wrap\nload = wrap.load_weights\n"
    spoilt += "wrap.load_weights = lambda module, weights, device: (\n"
    spoilt += "    load(module, weights, device), [parameter.data.mul_(30) for parameter in module.parameters()])\n"
    said = train.changed(spoilt, "calm", steps=6, optimizer="adamw", lr=1e-9, warmup_steps=0).stdout
    assert re.search(r"the loss rose from ([\d.]+) to", said)[1] == f"{lowest:.4g}"  # of the start before
