"""Which checkpoint is meant, whoever asks; and runs that were copied or damaged."""

import errno
import os
import re
import shutil
import sys

import pytest

from conftest import ROOT, damage, execute
from lockstep.checkpoints import huggingface, lookup, retention
from lockstep.common import files
from model import on_meta
from power_cut import Miniature


def test_a_run_copied_by_something_that_follows_links_continues_and_gets_its_links_back(train):
    train("whole", steps=10, schedule="constant")
    train("first", steps=5, schedule="constant")
    shutil.copytree(train.runs / "first", train.runs / "copied")  # follows links, as scp -r and buckets do
    checkpoints = train.runs / "copied" / "checkpoints"
    assert (checkpoints / "latest").is_dir() and not (checkpoints / "latest").is_symlink()
    train("copied", steps=10, schedule="constant")
    assert train.files("copied") == train.files("whole")
    assert os.readlink(checkpoints / "latest") == "step-00000010" and (checkpoints / "best").is_symlink()
    assert not list(checkpoints.glob(".*"))
    assert len({path.stat().st_mode for path in (checkpoints / "latest").iterdir()}) == 1  # who may read one may read all


def test_a_disk_without_symbolic_links_is_refused_before_the_first_step(train):
    refuse = f"os.symlink = lambda *args, **more: (_ for _ in ()).throw(OSError({errno.EPERM}, 'no links here'))"
    refused = train.changed(refuse, "nolinks", status=2)
    assert "cannot save checkpoints here: [Errno 1] no links here" in refused.stderr and "step " not in refused.stdout


def test_everybody_takes_the_newest_intact_checkpoint_with_the_same_warning(train):
    train("damaged", steps=10)
    damage(train.latest("damaged") / "model.safetensors")
    run, older = train.runs / "damaged", train.runs / "damaged" / "checkpoints" / "step-00000005"
    commands = [
        [sys.executable, "sample.py", run, "--max_new_tokens=2"],
        [sys.executable, "evaluate.py", run, "--eval_tokens=64"],
        train.command("tuned", init_from=run, steps=1, optimizer="adamw"),
        train.command("branch", resume=run, steps=6),
    ]
    outputs = [execute(command).stdout for command in commands]
    for output in outputs:
        assert re.search(r"skipped .*step-00000010: model.safetensors does not match its sha256", output), output
    assert str(older) in outputs[1] and f"weights of {older}" in outputs[2] and f"starting from {older}" in outputs[3]

    named = execute([sys.executable, "evaluate.py", train.latest("damaged")], status=2)
    assert named.stderr.startswith("error: ") and "is damaged: model.safetensors does not match" in named.stderr
    renamed = older.with_name("step-00000099")
    shutil.copytree(older, renamed)
    assert f"skipped {renamed}: trainer_state.json is of step 5" in execute(commands[0]).stdout
    shutil.rmtree(renamed)
    shutil.rmtree(older)
    assert "neither a run with an intact checkpoint nor a checkpoint" in execute(commands[0], status=2).stderr


def test_a_checkpoint_that_somebody_reads_stays_although_its_run_goes_on(tmp_path, monkeypatch):
    checkpoints = tmp_path / "run" / "checkpoints"
    run = Miniature(checkpoints, keep_last=1, keep_best=0)
    for step in range(1, 4):
        run.save(step)
    read, _ = lookup.find(str(tmp_path / "run"))
    for step in range(4, 8):
        run.save(step)
    kept = ["step-00000003", "step-00000007"]
    assert read.name == kept[0] and [path.name for path in retention.published(checkpoints)] == kept

    def read_model(directory, build, original=huggingface.read_model):  # on a disk without locks, the run removes what is read
        monkeypatch.undo()
        shutil.rmtree(directory)
        run.save(8)
        return original(directory, build)

    monkeypatch.setattr(huggingface, "read_model", read_model)
    assert lookup.load_model(str(tmp_path / "run"), on_meta)[0].name == "step-00000008"


@pytest.mark.parametrize(
    "command, way",
    [
        ("evaluate.py {url}", "for a model on the Hub, use OWNER/NAME"),
        ("sample.py {url}", "--mirror=URL continues a run from a store"),
        ("replay.py {url} --step=1", "--mirror=URL continues a run from a store"),
        ("export.py {url} --out=copy", "for a model on the Hub, use OWNER/NAME"),
        ("train.py --tokens={tokens} --resume={url}", "--mirror=URL continues a run from a store"),
        ("train.py --tokens={tokens} --init_from={url}", "for a model on the Hub, use OWNER/NAME"),
        ("evaluate.py {run} --tokens={url}", "python prepare_data.py URL --out=tokens/NAME"),
        ("prepare_data.py --check={url}", "copy the dataset here first"),
    ],
)
def test_a_url_is_refused_where_a_run_a_model_or_tokens_are_read(shared, tmp_path, command, way):
    url, run = "s3://bucket/x", shared.runs / "plain"
    script, *words = command.format(url=url, run=run, tokens=shared.tokens).split()
    said = execute([sys.executable, ROOT / script, *words], status=2, cwd=tmp_path).stderr
    assert f"{url} must be a local path; " in said and way in said
    assert not list(tmp_path.iterdir())


def test_what_is_published_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "file"
    files.publish_text(target, "old")
    with pytest.raises(RuntimeError), files.publish(target) as file:
        file.write(b"half")
        raise RuntimeError
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["file"]

    directory = tmp_path / "directory"
    for content in ("old", "new"):
        with files.publish_directory(directory) as temporary:
            (temporary / "a").write_text(content)
            assert not directory.exists() or (directory / "a").read_text() == "old"
    with pytest.raises(RuntimeError), files.publish_directory(directory) as temporary:
        (temporary / "a").write_text("half")
        raise RuntimeError
    assert (directory / "a").read_text() == "new" and sorted(os.listdir(tmp_path)) == ["directory", "file"]


def test_a_disk_that_cannot_flush_directories_is_used_and_one_that_cannot_flush_files_is_not(train):
    """CIFS and WSL's DrvFs flush no directory."""
    change = """
import stat
def fsync(file, original=os.fsync):
    if stat.S_ISDIR(os.fstat(file).st_mode) == {directories}:
        raise OSError({number}, "Invalid argument")
    original(file)
os.fsync = fsync
"""
    for number in (errno.EINVAL, errno.ENOTSUP):
        train.changed(change.format(directories=True, number=number), f"run{number}", steps=2)
    train.changed(change.format(directories=True, number=errno.EIO), "broken", steps=2, status=1)
    train.changed(change.format(directories=False, number=errno.EINVAL), "broken", steps=2, status=1)
