"""Checkpoints in several files, which several ranks write: the same files whoever writes them, whole or not there."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from conftest import damage
from lockstep.checkpoints import retention, tensor_files

# A limit that divides the tiny model's tensors among many files.
SPLIT = """
from lockstep.checkpoints import checkpoint
checkpoint.SHARD_BYTES = 20000
"""
FSDP = dict(optimizer="adamw", strategy="fsdp", ranks=3, eval_every=0)
# Instead of training, save again what a checkpoint holds. Every rank writes how many bytes of tensors it has copied for that.
SAVED_AGAIN = """
from lockstep.checkpoints import checkpoint
take = checkpoint.take_snapshot
def taken(*args):
    snapshot = take(*args)
    tensors = [tensor for file in snapshot.files.values() for tensor in file.values()]
    with open("{folder}/" + os.environ.get("RANK", "0"), "w") as file:
        file.write(str(sum(tensor.nbytes for tensor in tensors)))
    return snapshot
checkpoint.take_snapshot = taken
def save_again(run):
    run.checkpoints.saved_at = -1
    run.checkpoints.save(run.state, now=True)
    run.checkpoints.finish(run.state, final=True)
    return 0
train.train = save_again
"""


def tensors_of(directory, stem):
    """All tensors called `stem`, read without our reader."""
    return {name: value for path in directory.glob(f"{stem}*.safetensors") for name, value in load_file(path).items()}


def assert_equal_tensors(a, b):
    """The same names and bits."""
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_tensors_are_divided_among_files_by_their_names_and_sizes_alone():
    sizes = {"c": 4, "a": 4, "b": 3, "large": 9, "d": 1}
    layout = tensor_files.lay_out("model", sizes, 8)
    assert {file: list(names) for file, names in layout.items()} == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c", "d"],
        "model-00003-of-00003.safetensors": ["large"],
    }
    assert tensor_files.lay_out("model", dict(reversed(sizes.items())), 8) == layout
    assert tensor_files.lay_out("optimizer", sizes, 21) == {"optimizer.safetensors": sizes}
    assert tensor_files.lay_out("optimizer", {}, 21) == {"optimizer.safetensors": {}}


@pytest.mark.parametrize("architecture, optimizer", [("gpt2", "adamw"), ("qwen3", "muon")])
def test_the_same_tensors_are_the_same_files_whoever_writes_them(train, tmp_path, architecture, optimizer):
    flags = dict(architecture=architecture, optimizer=optimizer, steps=2, micro_batch_size=2)
    train("one", **flags)
    single, one = train.latest("one"), {"resume": train.runs / "one"}
    flags["steps"] = 3  # a new run that trains nothing is refused
    whole = {stem: tensors_of(single, stem) for stem in ("model", "optimizer")}
    bytes_of_all = sum(tensor.nbytes for tensors in whole.values() for tensor in tensors.values())
    files, indices = [], []
    for i, (ranks, more) in enumerate(
        [
            (1, dict(strategy="ddp")),
            (3, dict(strategy="fsdp")),
            (4, dict(strategy="fsdp", replicate=2)),
        ]
    ):
        name, folder = f"split{i}", tmp_path / str(i)
        folder.mkdir()
        train.changed(SPLIT + SAVED_AGAIN.format(folder=folder), name, ranks, **flags, **more, **one)
        files.append(train.files(name))
        indices.append([json.loads(path.read_text()) for path in sorted(train.latest(name).glob("*.index.json"))])
        held = [int((folder / str(rank)).read_text()) for rank in range(ranks)]
        writers = ranks // more.get("replicate", 1) if more["strategy"] == "fsdp" else 1
        largest = max(path.stat().st_size for path in train.latest(name).glob("*.safetensors"))
        assert sum(held) == bytes_of_all and not any(held[writers:])
        assert max(held) <= bytes_of_all / writers + largest
    assert files == [files[0]] * 3 and indices == [indices[0]] * 3 and len(files[0]) > 10
    train.changed(SAVED_AGAIN.format(folder=folder), "whole", 3, strategy="fsdp", **flags, **one)
    assert train.files("whole") == train.files("one")
    for stem, index in zip(("model", "optimizer"), indices[0], strict=True):
        assert_equal_tensors(tensors_of(train.latest("split0"), stem), whole[stem])
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole[stem].values())
        for name, file in index["weight_map"].items():
            assert name in load_file(train.latest("split0") / file)


def test_a_checkpoint_with_a_damaged_or_missing_file_is_passed_over(train):
    train.changed(SPLIT, "damaged", **dict(FSDP, steps=4, save_every=1, keep_last=0))
    first, second, third, fourth = retention.published(train.runs / "damaged" / "checkpoints")
    damage(sorted(fourth.glob("optimizer-*.safetensors"))[3])
    sorted(third.glob("model-*.safetensors"))[2].unlink()
    (second / "optimizer.safetensors.index.json").unlink()
    intact, passed = retention.newest(first.parent)
    assert intact == first
    assert "optimizer-00004-of-" in passed[0] and "does not match its sha256" in passed[0]
    assert "model-00003-of-" in passed[1] and "is missing" in passed[1]
    assert "optimizer.safetensors.index.json is missing" in passed[2]


# In the save of step 10, rank 1 ends the whole run before its third file.
KILLED = """
import signal
from lockstep.checkpoints import checkpoint, tensor_files
calls = []
def save_file(*args, original=tensor_files.save_file):
    calls.append(0)
    if os.environ["RANK"] == "1" and ".step-00000010.tmp" in str(args[1]) and len(calls) % {files} == 2:
        os.killpg(0, signal.SIGKILL)
    original(*args)
tensor_files.save_file = save_file
"""


def test_a_kill_between_two_files_leaves_the_checkpoint_before(train):
    flags = dict(FSDP, steps=10)
    train.changed(SPLIT, "whole", **flags)
    files = len([name for i, name in enumerate(sorted(train.files("whole"))) if i % 3 == 1])
    checkpoints = train.runs / "killed" / "checkpoints"
    train.changed(SPLIT + KILLED.format(files=files), "killed", status=-signal.SIGKILL, **flags)
    left = checkpoints / ".step-00000010.tmp"
    assert left.exists() and not (left / "manifest.json").exists()
    assert retention.newest(checkpoints) == (checkpoints / "step-00000005", [])
    train.changed(SPLIT, "killed", **flags)
    train.assert_same("killed", "whole")
    assert not list(checkpoints.glob(".*"))


# Rank 2 has no room for its files in the save of step 10, and room again afterwards.
NO_ROOM = """
import resource
from lockstep.checkpoints.checkpoint import Checkpoints
def write(self, state, *args, original=Checkpoints.write):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if os.environ["RANK"] == "2":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10000 if state.step in {steps} else unlimited, unlimited))
    original(self, state, *args)
Checkpoints.write = write
"""


@pytest.mark.slow
def test_a_rank_that_cannot_write_is_a_warning_and_the_run_goes_on(train):
    flags = dict(FSDP, steps=15, keep_last=0)
    train.changed(SPLIT, "whole", **flags)
    done = train.changed(SPLIT + NO_ROOM.format(steps="[10]"), "full", **flags)
    assert done.stdout.count("could not be written") == 1 and "the checkpoint at step 10 could not be written" in done.stdout
    assert "File too large" in done.stdout and "(rank 2)" in done.stdout and "training continues" in done.stdout
    checkpoints = train.runs / "full" / "checkpoints"
    names = [path.name for path in retention.published(checkpoints)]
    assert names == ["step-00000005", "step-00000015"] and not list(checkpoints.glob(".*"))
    assert train.files("full") == train.files("whole")
    last = train.changed(SPLIT + NO_ROOM.format(steps="[10]"), "last", status=1, **flags | dict(steps=10))
    assert last.stderr.startswith("error: the checkpoint at step 10 could not be written") and "(rank 2)" in last.stderr
    assert retention.newest(train.runs / "last" / "checkpoints")[0].name == "step-00000005"
    assert os.readlink(train.latest("last")) == "step-00000005"
