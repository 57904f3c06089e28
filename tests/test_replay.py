"""replay.py and --skip_steps through the front door: was it the data or the machine, and how to leave the data out."""

import contextlib
import json
import re
import shutil
import sys
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import data
import machine
import replay as replay_py
import train as train_py
from conftest import content, execute, foreign_tokens, reseal
from lockstep import settings
from lockstep.checkpoints import checkpoint, resume
from lockstep.common import errors
from lockstep.common.errors import RunError, UserError
from lockstep.dataset.mixture import BLOCK
from lockstep.dataset.tokens import Stream
from lockstep.parallel import world
from replay import CHANGED

FLAGS = dict(keep_last=0, eval_every=0)


def replay(*arguments, status=0, ranks=1):
    """What replay.py prints, or, for bad input, its error."""
    done = execute([*machine.launcher(ranks), "replay.py", *arguments], status=status)
    return done.stderr if status == 2 else done.stdout


@pytest.fixture(scope="module")
def kept(shared):
    """A run that keeps all its checkpoints."""
    shared("kept", **FLAGS)
    return shared.runs / "kept"


def test_a_run_of_a_gpu_is_replayed_on_the_cpu_of_a_machine_without_one(monkeypatch):
    config = settings.replace(settings.Config(), device="cuda", numerics="native")
    for available, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert replay_py.anywhere(config).train.device == device


def test_a_step_is_recomputed_bit_for_bit_and_nothing_is_written(kept):
    before = content(kept)
    out = replay(kept, "--step=13")
    assert "replaying steps 11 to 13" in out and "bit for bit; no sequence stands out" in out
    shown = r"^ +([\d.]+)  sequence \d+: .*/train_00000\d.bin from token"
    losses = [float(x) for x in re.findall(shown, out, re.M)]
    assert len(losses) == 8 and losses == sorted(losses, reverse=True) and "... 16 more: --sequences=0" in out
    out = replay(kept, "--step=6", "--sequences=0")
    mean = sum(float(x) for x in re.findall(shown, out, re.M)) / 24  # the sequences are those of the step
    assert mean == pytest.approx(float(re.search(r"^step 6  loss ([\d.]+)", out, re.M)[1]), abs=2e-4)
    assert content(kept) == before


def test_a_document_of_noise_is_found_and_can_be_left_out(train, tmp_path):
    tokens = (np.arange(30000) * 7 % 60).astype("<u2")  # easy text ...
    noise = (36 * 24 + 5) * 16  # ... but for sequences 5 to 8 of step 37
    tokens[noise : noise + 4 * 16] = np.random.default_rng(0).integers(0, 60, 4 * 16)
    for split, part in (("train", tokens), ("val", tokens[:3000])):
        part.tofile(tmp_path / f"{split}.bin")
    flags = dict(FLAGS, tokens=tmp_path, vocab_size=64, order="sequential", steps=40, save_every=20)
    train("spike", **flags)
    out = replay(train.runs / "spike", "--step=37")
    assert "bit for bit; look at the data" in out and out.endswith("to leave out this batch: --skip_steps=37\n")
    assert "stands out" not in out
    worst = re.findall(rf"sequence (\d+): {tmp_path}/train.bin from token ([\d,]+)", out)[:4]
    assert sorted(worst) == [(str(5 + i), f"{noise + 16 * i:,}") for i in range(4)], out

    norms = [record["grad_norm"] for record in train.metrics("spike", "grad_norm")]
    assert norms[36] > 3 * norms[35]
    shutil.copytree(train.runs / "spike", train.runs / "without", symlinks=True)
    shutil.rmtree(train.runs / "without" / "checkpoints" / "step-00000040")
    late = train("without", status=2, **dict(flags, skip_steps="3,37"))
    assert (
        "--skip_steps=3,37 changes the data of one of the 20 finished steps; to leave that batch out, start a new run"
        in late.stderr
    )
    start = train.runs / "spike" / "checkpoints" / "step-00000020"
    other = train("other", **dict(flags, steps=21, skip_steps="3", resume=start)).stdout
    assert "warning: --skip_steps=3 changes the data of one of the 20 finished steps" in other
    train("without", **dict(flags, skip_steps="37"))
    norms = [record["grad_norm"] for record in train.metrics("without", "grad_norm")]
    assert norms[36] < 2 * norms[35]
    out = replay(train.runs / "without", "--step=38")
    assert "bit for bit" in out and out.endswith("to leave out this batch: --skip_steps=37,39\n")
    assert "bit for bit" in replay(train.runs / "without", "--step=15")


def test_a_step_that_the_optimizer_spoiled_is_not_blamed_on_the_data(train):
    train("wild", steps=10, optimizer="adamw", lr=30, warmup_steps=0, schedule="constant", grad_clip=0, **FLAGS)
    records = train.metrics("wild", "loss")
    step = next(record["step"] for record, after in pairwise(records) if after["loss"] > 2 * record["loss"])
    out = replay(train.runs / "wild", f"--step={step}")
    found = re.search(r"bit for bit; no sequence stands out \(worst ([\d.]+), median ([\d.]+)\), so look at the optimizer", out)
    assert found and "look at the data" not in out and float(found[1]) < 1.5 * float(found[2])
    before, after = map(float, re.search(r"the step took their mean loss from ([\d.]+) to ([\d.]+)$", out, re.M).groups())
    assert before == pytest.approx(records[step - 1]["loss"], rel=1e-3) and after > 2 * before


def test_the_verdict_is_for_the_data_only_where_a_sequence_stands_out():
    ordinary = [3.0, 3.2, 2.7, 3.9, 3.4, 2.4, 3.1, 2.9]
    nan = float("nan")
    for losses in (ordinary, [8.31, 8.32, 8.30, 8.31, 8.40], [2.0], [nan] * 4, [9.0, 9.5]):
        assert "no sequence stands out" in replay_py.verdict(losses, losses)
    for losses in ([*ordinary, 9.0], [0.2, 0.21, 0.19, 4.0, 5.0, 0.2, 0.2], [*ordinary, nan], [2.0, 2.0, 2.0, 3.0]):
        assert replay_py.verdict(losses, losses).startswith("look at the data")


def test_skipped_batches_are_left_out_and_nothing_else():
    class Tokens(np.ndarray):
        path = Path("tokens")

    stream = Stream([np.arange(4000, dtype="<u2").view(Tokens)], 4000)
    plain = data.Batches([stream], ((0, (BLOCK,)),), 16, 4, 2, seed=1)
    config = settings.replace(settings.Config(), skip_steps="3-4, 7,1")
    assert config.skipped_batches == (0, 2, 3, 6)
    skipping = data.Batches([stream], ((0, (BLOCK,)),), 16, 4, 2, seed=1, skipped=config.skipped_batches)
    assert [skipping.first_sequence(step) // 4 for step in range(5)] == [1, 4, 5, 7, 8]
    assert (skipping.batch(1, 1) == plain.batch(4, 1)).all()
    assert resume.seen_by(2, (0, 2, 3, 6)) == [0, 2, 3] and resume.seen_by(2, (2,)) == []


@pytest.mark.parametrize("wrong", ["x", "5-", "-5", "0", "3--4", "7-5", "1-2-3"])
def test_skip_steps_that_are_none_are_refused(wrong):
    with pytest.raises(UserError, match=f"--skip_steps={wrong} must be steps"):
        settings.load([f"--skip_steps={wrong}"], "")


def test_a_changed_record_and_a_changed_checkpoint_are_told_apart(kept, tmp_path):
    records = tmp_path / "records"
    shutil.copytree(kept, records, symlinks=True)
    lines = [json.loads(line) for line in (records / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] == 12 and "loss" in line:
            line["loss"] += 1e-9
    (records / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = replay(records, "--step=15", status=1)
    assert "step 12 is the first that differs" in out

    weights = tmp_path / "weights"
    shutil.copytree(kept, weights, symlinks=True)
    changed = weights / "checkpoints" / "step-00000010"
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-2
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    reseal(changed)
    out = replay(weights, "--step=15", status=1)
    assert "step 11 is the first that differs" in out
    out = replay(weights, "--verify", status=1)
    assert "step-00000010 DOES NOT follow from step-00000005: model.safetensors" in out
    assert "step-00000015 DOES NOT follow from step-00000010" in out
    assert "step-00000020 follows from step-00000015" in out
    refused = replay(kept / "checkpoints" / "latest", "--verify", status=2)
    assert "latest has no checkpoints/; name a run directory, such as runs/laptop" in refused


def test_one_model_is_freed_before_the_next_is_made(kept, monkeypatch):
    made = []

    def build(*args, original=train_py.build):
        assert not any(engine() for engine in made)
        run = original(*args)
        made.append(weakref.ref(run.engine))
        return run

    monkeypatch.setattr(train_py, "build", build)
    replay_py.main(replay_py.ReplayConfig(str(kept), verify=True))  # its bits may be others in this process
    assert len(made) > 1


def test_a_rank_that_is_gone_ends_the_replay(kept, monkeypatch):
    def lose(*args):
        raise RuntimeError("[gloo] Connection closed by peer")

    monkeypatch.setattr(replay_py, "join", lambda config: world.World(0, 2, 2, torch.device("cpu")))
    monkeypatch.setattr(world, "Watch", lambda *_: contextlib.nullcontext())  # there are no connections to watch
    monkeypatch.setattr(replay_py, "open_before", lose)
    with pytest.raises(
        RunError, match="^rank 0 lost the other ranks: .gloo. Connection closed by peer; run the same command again"
    ):
        replay_py.main(replay_py.ReplayConfig(str(kept), step=3))


@pytest.mark.slow
def test_three_ranks_under_exact_are_replayed_by_one_process_and_others_by_their_own_number(train):
    train("exact", ranks=3, strategy="exact", **FLAGS)
    assert "bit for bit" in replay(train.runs / "exact", "--step=14")
    assert "follows from" in replay(train.runs / "exact", "--verify")
    train("three", ranks=3, **FLAGS)
    assert "--nproc_per_node=3 replay.py" in replay(train.runs / "three", "--step=14", status=2)
    assert "bit for bit; no sequence stands out" in replay(train.runs / "three", "--step=14", ranks=3)


def test_a_run_that_began_from_another_is_replayed_and_repeated_from_that_very_checkpoint(train):
    train("first", steps=4, eval_every=0)
    train("second", steps=8, eval_every=0, save_every=0, resume=train.runs / "first")
    train("first", steps=6, eval_every=0, save_every=2, keep_last=0)  # it goes on
    out = replay(train.runs / "second", "--step=7")
    assert "replaying steps 5 to 7" in out and "bit for bit" in out
    again = [train.runs / "second" / "config.toml", "--name=again", f"--out_dir={train.runs}"]
    execute([sys.executable, "train.py", *again])
    assert train.files("again") == train.files("second")
    train("tuned", steps=3, eval_every=0, save_every=0, init_from=train.latest("second").resolve())
    assert "bit for bit" in replay(train.runs / "tuned", "--step=3")
    shutil.rmtree(train.runs / "first" / "checkpoints" / "step-00000004")
    gone = replay(train.runs / "second", "--step=7", status=2)
    assert "step-00000004 is neither a run with an intact checkpoint nor a checkpoint" in gone


def test_a_new_run_with_another_batch_begins_with_the_sequence_that_its_checkpoint_reached(train):
    flags = dict(schedule="constant", save_every=3, **FLAGS)
    train("trunk", steps=6, **flags)
    start = dict(resume=train.runs / "trunk/checkpoints/step-00000003", tokens_per_update=192, **flags)
    train("half", steps=4, **start)
    train("half", steps=7, **start)
    train("straight", steps=7, **start)
    assert train.files("half") == train.files("straight")
    assert train.metrics("half", "loss") == train.metrics("straight", "loss")
    assert train.state("half")["batch_sizes"] == [[0, 0, 24], [3, 72, 12]] and train.state("trunk")["batch_sizes"] == []
    rows = [row for run in ("trunk", "half") for row in train.metrics(run, "loss")]
    epochs = [next(value for name, value in row.items() if name.startswith("epochs")) for row in rows]
    assert [row["tokens"] / rows[0]["tokens"] for row in rows] == pytest.approx(
        [epoch / epochs[0] for epoch in epochs], rel=1e-4
    )

    def windows(run, step):
        return re.findall(r"from token [\d,]+", replay(train.runs / run, f"--step={step}", "--sequences=0"))

    assert sorted(windows("half", 4) + windows("half", 5)) == sorted(windows("trunk", 4))
    assert "step-00000007 follows from step-00000006" in replay(train.runs / "half", "--verify")


def test_a_record_that_lacks_settings_has_their_defaults(train):
    train("older", **FLAGS)
    latest = train.latest("older").resolve()
    record = train.state("older")
    for name in ("keep_last", "keep_best", "resume", "init_from", "strategy"):
        del record["settings"][name]
        record["history"][0]["settings"].pop(name, None)
    (latest / "trainer_state.json").write_text(json.dumps(record))
    reseal(latest)
    assert "is complete" in train("older", **FLAGS).stdout
    assert "bit for bit" in replay(train.runs / "older", "--step=20")


def test_a_run_whose_settings_changed_is_replayed_with_those_of_each_step(train):
    flags = dict(save_every=4, log_every=1, keep_best=0)
    for steps in (8, 12, 20):
        train("changed", eval_every=0, **flags, steps=steps, keep_last=0)
    train("changed", eval_every=0, **flags, steps=22, keep_last=2, lr=1e-3)
    run = train.runs / "changed"  # of its checkpoints the last two are left
    out = replay(run, "--step=22")
    assert "replaying steps 21 to 22" in out and "2 recorded steps: loss and gradient norm match the records bit for bit" in out
    assert "changed at step 12, and no intact checkpoint remains between that step and step 14" in replay(
        run, "--step=14", status=2
    )
    assert "step-00000022 follows from step-00000020" in replay(run, "--verify")

    train("kept", steps=8, eval_every=0, **flags)
    train("kept", steps=12, eval_every=0, **flags | dict(keep_last=0, log_every=2))  # an extension, and what changes no bit
    train("kept", steps=12, eval_every=0, **flags)
    kept = train.runs / "kept"
    assert "bit for bit" in replay(kept, "--step=7") and "1 recorded step: loss" in replay(kept, "--step=10")
    assert "step 9  loss" in (out := replay(kept, "--step=9")) and "(not logged, so not compared; see --log_every)" in out
    shutil.rmtree(kept / "checkpoints" / "step-00000008")
    lost = f"step-00000012 cannot be checked: {CHANGED} at step 8, and no intact checkpoint remains between that step and "
    assert lost in replay(kept, "--verify")
    train("kept", ranks=2, steps=14, eval_every=0, **flags | dict(keep_last=0))
    out = replay(kept, "--verify")
    assert "step-00000014 cannot be checked: step 14 was computed on 2 ranks" in out
    assert f"use torchrun --standalone --nproc_per_node=2 replay.py {kept} --verify\n" in out


def test_an_exact_run_that_changed_its_ranks_is_replayed_from_its_beginning(train):
    flags = dict(strategy="exact", eval_every=0, save_every=2, keep_last=1, steps=12)
    train.kill("moved", 5, ranks=2, **flags)
    train("moved", ranks=3, **flags)
    assert len(checkpoint.load_state(train.latest("moved")).history) == 2
    out = replay(train.runs / "moved", "--step=11")  # the last checkpoint is that of step 12
    assert "replaying steps 1 to 11" in out and "bit for bit" in out


def test_each_step_is_replayed_with_the_threads_of_its_time(train, monkeypatch):
    flags = FLAGS | dict(steps=4, save_every=2, log_every=1, n_embd=96, d_ff=384, seq_len=128, tokens_per_update=512)
    train("threads", **flags | dict(threads=2, micro_batch_size=4))
    train("threads", **flags | dict(threads=1, micro_batch_size=4, steps=8))
    seen = []

    def update(run, *args, original=train_py.update):
        seen.append((run.state.step, torch.get_num_threads()))
        return original(run, *args)

    before = torch.get_num_threads()
    monkeypatch.setattr(train_py, "update", update)
    try:
        replay_py.main(replay_py.ReplayConfig(str(train.runs / "threads"), verify=True))
    finally:
        torch.set_num_threads(before)
    assert dict(seen) == {2: 2, 3: 2, 4: 1, 5: 1, 6: 1, 7: 1}
    assert "step-00000004 follows from step-00000002" in replay(train.runs / "threads", "--verify")


def test_tokens_with_a_tokenizer_of_another_kind_are_replayed_as_numbers(train, tmp_path, rng):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(500)}, unk_token="0"))
    words.add_special_tokens(["<|endoftext|>"])
    folder = foreign_tokens(tmp_path / "llm.c", "llm.c", rng.integers(0, 500, 4000))
    words.save(str(folder / "tokenizer.json"))
    flags = dict(tokens=folder, vocab_size=512, steps=4, eval_tokens=320)
    refused = train("sampled", **flags, sample_every=2, status=2).stderr
    assert "error: --sample_every: " in refused and "is not a byte-level BPE" in refused
    train("words", **flags)
    out = replay(train.runs / "words", "--step=3")
    assert "bit for bit" in out and re.search(r"^ +\d+ \d+ \d+", out, re.M)


def test_text_is_shown_as_it_is():
    text = "Glória, größer 東京\u3000👩\u200d👧\n\tx \x1b[2J\u202e"
    assert errors.one_line(text) == "Glória, größer 東京\u3000👩\u200d👧\\n\\tx \\x1b[2J\\u202e"
    assert errors.printable(text) == text.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
