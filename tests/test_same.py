"""`make same` gets the digits that the repository names, and a portable run is verified by another machine."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import machine
import machines
import same
from conftest import ROOT, Trainer, environment, execute, reseal, wait_for
from lockstep.common.files import sha256
from lockstep.dataset.mixture import open_mixture
from lockstep.settings import DataConfig

SAME = same.FLAGS | dict(warmup_steps="auto", micro_batch_size="auto")  # without what a Trainer sets
PORTABLE = dict(numerics="portable", strategy="exact", steps=12, tokens_per_update=96, save_every=3, keep_last=0, eval_every=0)

MEANING = """\
Before you do, run `make same` without your change. If it says `the same`, your change alters portable runs: undo that part.
Otherwise, this processor, with this torch, computes other bits than all we know: that is what to report."""


def compare(runs, wanted):
    """Compare files below `runs` with the `wanted` sha256 by path, and say what a difference means."""
    found = {path: sha256(runs.parent / path) for path in wanted}
    assert found == wanted, f"\n{same.where()}\n{same.verdict(found, wanted)}\n{MEANING}"


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """A Trainer on the tokens of `make same`."""
    folder = tmp_path_factory.mktemp("same")
    (folder / "same.txt").write_bytes(same.text().encode())
    command = machine.arguments("prepare_data.py", str(folder / "same.txt"), out=folder / "tokens", tokenizer="bytes")
    execute([sys.executable, *command])
    return Trainer(folder / "tokens", folder / "runs")


def test_the_text_and_its_tokens_are_the_expected_ones(sums):
    lines = same.text().splitlines()
    assert len(set(lines)) == len(lines) == 5005 and lines[:2] == ["two small cats sleep.", "seven brown owls dance."]
    assert sha256(sums.tokens / "train_000000.bin") == same.expected()["tokens/same/train_000000.bin"]


def test_this_machine_gets_the_expected_digits(sums):
    sums("same-2", ranks=2, **SAME)
    wanted = {path: digest for path, digest in same.expected().items() if path.startswith("runs/same-2/")}
    assert len(wanted) == 4
    compare(sums.runs, wanted)


@pytest.mark.parametrize("name, ranks, threads, env", [("sse", 1, 2, machines.SSE), ("avx2", 3, 1, machine.AVX2)])
def test_other_machines_get_the_digits_of_the_first_checkpoint(sums, name, ranks, threads, env):
    path, flags = "checkpoints/step-00000012", SAME | dict(threads=threads)
    # A fork would keep this process's instructions.
    process = subprocess.Popen(sums.command(name, ranks, **flags), cwd=ROOT, env=environment(**env), start_new_session=True)
    wait_for(lambda: (sums.runs / name / path).exists() or process.poll() is not None)
    machine.kill(process)
    compare(sums.runs, {f"runs/{name}/{path}/model.safetensors": same.expected()[f"runs/same-1/{path}/model.safetensors"]})


def test_the_last_lines_say_what_differs():
    wanted = same.expected()
    *_, last = wanted
    lines = f"this machine  {wanted[last]}\nexpected      {wanted[last]}\n"
    assert same.verdict(wanted, wanted) == f"{lines}the same"
    later = {path: "0" * 64 if path.startswith("runs/same-1/") else digest for path, digest in wanted.items()}
    told = same.verdict(later, wanted).splitlines()
    assert told[:2] == [f"this machine  {'0' * 64}", f"expected      {wanted[last]}"]
    assert "NOT THE SAME: runs/same-1/checkpoints/step-00000012/model.safetensors is the first of 4 files" in told[2]


def test_every_machine_of_the_record_has_the_expected_digits_and_its_row_in_the_page():
    rows = json.loads((ROOT / "bench/results/machines.json").read_text())["machines"]
    assert len(rows) >= 12 and machines.all_the_same(rows)
    assert machines.markdown(rows) in (ROOT / "docs/sameness.md").read_text()
    for file in ("model.safetensors", "optimizer.safetensors", "metrics"):
        other = json.loads(json.dumps(rows))
        other[-1]["found"]["qwen3"][file] = "0" * 64
        assert not machines.all_the_same(other)


def test_the_readme_shows_the_expected_digits():
    *_, digest = same.expected().values()
    assert digest in (ROOT / "README.md").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# A receipt


def verify(run, *flags, status=0, env=None):
    """What replay.py prints of a run, or, for bad input, its error."""
    done = execute([sys.executable, "replay.py", run, "--verify", *flags], status, env, fork=not env)
    return done.stderr if status == 2 else done.stdout


@pytest.fixture(scope="module")
def portable(shared):
    """A portable run on three ranks held to AVX2."""
    execute(shared.command("portable", 3, **PORTABLE), env=machine.AVX2, fork=False)
    return shared.runs / "portable"


@pytest.fixture
def forged(portable, tmp_path):
    """A copy of it to change."""
    return shutil.copytree(portable, tmp_path / "forged", symlinks=True)


def test_a_run_of_three_ranks_is_verified_by_one_held_to_sse(portable):
    out = verify(portable, "--from=0", env=machines.SSE)
    assert "warning" not in out and out.count("follows from") == 4
    assert "step-00000003 follows from the beginning" in out and "step-00000012 follows from step-00000009" in out


def test_a_segment_ends_at_any_step(portable):
    assert verify(portable, "--from=6", "--to=8") == "step 8 follows from step-00000006\n"
    assert verify(portable, "--from=3", "--to=6") == "step-00000006 follows from step-00000003\n"
    for wrong in (["--from=4"], ["--from=6", "--to=6"], ["--to=13"], ["--step=3"]):
        assert "checkpoints at steps 3, 6, 9, 12" in verify(portable, *wrong, status=2)
    assert "need --verify" in execute([sys.executable, "replay.py", portable, "--from=3"], status=2).stderr
    assert "--from must be INTEGER|auto" in verify(portable, "--from=x", status=2)


def test_one_flipped_bit_of_one_weight_is_found(forged):
    changed = forged / "checkpoints" / "step-00000009"
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 6] ^= 1
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    reseal(changed)
    out = verify(forged, "--from=6", status=1)
    assert "step-00000009 DOES NOT follow from step-00000006: model.safetensors would differ" in out
    assert "step-00000012 DOES NOT follow from step-00000009: model.safetensors" in out


def test_another_learning_rate_than_the_recorded_one_is_found(forged):
    path = forged / "checkpoints" / "step-00000012" / "trainer_state.json"
    path.write_text(re.sub(r'"lr": 0.01\b', '"lr": 0.010000001', path.read_text()))
    reseal(path.parent)
    assert "step-00000012 DOES NOT follow from step-00000009" in verify(forged, "--from=9", status=1)


def test_an_exchanged_document_is_found(forged, shared, tmp_path):
    tokens = shutil.copytree(shared.tokens, tmp_path / "tokens")
    shard = tokens / "train_000001.bin"
    content = np.fromfile(shard, "<u2")
    content[512:] = content[:511:-1]
    content.tofile(shard)
    record = (tokens / "dataset.json").read_text()
    (tokens / "dataset.json").write_text(record.replace(sha256(shared.tokens / shard.name), sha256(shard)))
    assert "its tokens or their shares differ" in verify(forged, f"--tokens={tokens}", status=2)
    path = forged / "checkpoints" / "step-00000012" / "trainer_state.json"
    before, after = (open_mixture(DataConfig(str(directory))).identity for directory in (shared.tokens, tokens))
    path.write_text(path.read_text().replace(before, after))
    reseal(path.parent)
    assert "step-00000006 DOES NOT follow from step-00000003" in verify(forged, f"--tokens={tokens}", "--to=6", status=1)


def test_a_loss_that_was_not_computed_is_found(forged):
    path = forged / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[7]["loss"] -= 2e-16 * lines[7]["loss"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = verify(forged, "--from=6", "--to=9", status=1)
    assert f"step-00000009 DOES NOT follow from step-00000006: step {lines[7]['step']} is the first that differs: loss" in out
