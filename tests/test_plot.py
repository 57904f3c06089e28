"""Curves of runs: what is read from metrics.jsonl, and the command."""

import contextlib
import csv
import json
import os
import sys
from pathlib import Path

import pytest
from matplotlib.text import Text

from common.errors import UserError
from conftest import execute
from reports import compare, curves


def write_run(path: Path, steps: int = 60, tokens_per_step: int = 1024, tail: str = "") -> Path:
    path.mkdir(parents=True)
    with open(path / "metrics.jsonl", "w") as file:
        for step in range(10, steps + 1, 10):
            line = {"step": step, "tokens": step * tokens_per_step, "loss": 1 + 9 / step, "lr": 1e-3, "grad_norm": 5 / step}
            print(json.dumps(line | {"tokens_per_second": 1e4, "mfu": None}), file=file)
            if step % 20 == 0:
                print(json.dumps({"step": step, "val_loss": 1.5, "val_bpb": 0.7}), file=file)
        file.write(tail)
    return path


def words(figure) -> set[str]:
    return {text.get_text() for text in figure.findobj(Text)}


@pytest.fixture
def figure_of(monkeypatch, tmp_path):
    """draw(), but the figure comes back before it is saved."""

    def figure(*runs: Path, **more):
        kept = []
        monkeypatch.setattr(curves, "save", lambda figure, out: kept.append(figure))
        curves.draw(list(runs), tmp_path / "unused.png", **more)
        monkeypatch.undo()
        return kept[0]

    return figure


def test_the_command_draws_several_runs(tmp_path):
    runs = [write_run(tmp_path / name) for name in ("small", "large")]
    for x, suffix, magic in [("auto", "png", b"\x89PNG"), ("tokens", "svg", b"<?xml"), ("time", "pdf", b"%PDF")]:
        out = tmp_path / suffix / f"curves.{suffix}"
        execute([sys.executable, "plot.py", *runs, f"--out={out}", f"--x={x}"])
        assert out.read_bytes().startswith(magic)
        assert os.listdir(out.parent) == [out.name]


def test_a_picture_names_runs_panels_and_the_last_validation_loss(tmp_path, figure_of):
    runs = [write_run(tmp_path / name) for name in ("small", "large")]
    panels = {"loss", "learning rate", "gradient norm", "tokens per second"}
    assert {"small, validation 1.500", "large, validation 1.500", "step"} | panels <= words(figure_of(*runs))
    assert "small, validation 1.500" in words(figure_of(runs[0]))


def test_runs_of_different_batches_are_drawn_over_tokens(tmp_path, figure_of):
    short, long = write_run(tmp_path / "short"), write_run(tmp_path / "long", steps=100)
    half = write_run(tmp_path / "half", tokens_per_step=512)
    for run, tokens in ((short, 1024), (long, 1024), (half, 512)):
        (run / "config.toml").write_text(f"[train]\ntokens_per_update = {tokens}\n")
    assert compare.choose_x([short, long]) == "step" and compare.choose_x([short, long, half]) == "tokens"
    over_tokens = figure_of(short, long, half, x="tokens")
    assert over_tokens.axes[2].get_xlabel() == "tokens"
    assert max(max(line.get_xdata()) for line in over_tokens.axes[0].lines) == 100 * 1024
    assert curves.read(half).points("val_loss", "tokens") == ([20 * 512, 40 * 512, 60 * 512], [1.5, 1.5, 1.5])


def test_time_is_that_of_the_updates(tmp_path, figure_of):
    run = write_run(tmp_path / "run")  # 10 steps of 1,024 tokens at 10,000 tokens a second take 1.024 s
    assert curves.read(run).points("loss", "time")[0] == pytest.approx([1.024 * i for i in range(6)])
    assert curves.read(run).points("val_loss", "time")[0] == pytest.approx([1.024, 3 * 1.024, 5 * 1.024])
    half_as_fast = {"step": 70, "tokens": 70 * 1024, "loss": 1.0, "tokens_per_second": 5e3}
    slow = write_run(tmp_path / "slow", tail=json.dumps(half_as_fast) + "\n")
    assert curves.read(slow).points("loss", "time")[0][-1] == pytest.approx(7 * 1.024)
    first = {"step": 1, "tokens": 1024, "loss": 9.0}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(first) + "\n" + (run / "metrics.jsonl").read_text())
    assert curves.read(run).points("loss", "time")[0][:2] == pytest.approx([0, 0.9 * 1.024])
    assert figure_of(run, slow, x="time").axes[2].get_xlabel() == "time of the updates"


def test_a_run_without_tokens_or_speed_is_told_what_works(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for record, missing in [({"step": 1, "loss": 2.0}, "tokens"), ({"step": 1, "tokens": 9, "loss": 2.0}, "tokens_per_second")]:
        (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        result = execute([sys.executable, "plot.py", run, "--x=time", f"--out={tmp_path}/curves.png"], status=2)
        assert f"run has not logged {missing} yet; --x=step works" in result.stderr


def test_restarts_are_marked(train, figure_of):
    train("run", steps=10)
    train("run", steps=20)
    with open(train.runs / "run" / "train.log", "a") as log:
        print("continuing from runs/run/checkpoints/step-00000020", file=log)  # started once more when it was complete
    assert curves.read(train.runs / "run").restarts == [10]
    figure = figure_of(train.runs / "run")
    assert "continued" in words(figure) and "skipped" not in words(figure)
    marks = [line for axis in figure.axes for line in axis.lines if line.get_marker() == "^"]
    assert [list(line.get_xdata()) for line in marks] == [[10]] * 4


def test_skipped_updates_are_marked(tmp_path, figure_of):
    lost = [{"step": step, "loss": 1.0, "skipped": skipped} for step, skipped in ((70, 2), (80, 2), (90, 3))]
    run = write_run(tmp_path / "run", tail="".join(json.dumps(record) + "\n" for record in lost))
    assert curves.read(run).skipped() == [70, 90]
    assert "skipped" in words(figure_of(run)) and "continued" not in words(figure_of(run))


def test_a_gradient_norm_over_decades_is_drawn_on_a_log_axis(tmp_path, figure_of):
    assert figure_of(write_run(tmp_path / "calm")).axes[2].get_yscale() == "linear"
    spike = json.dumps({"step": 70, "loss": 1.0, "grad_norm": 90.0}) + "\n"
    assert figure_of(write_run(tmp_path / "wild", tail=spike)).axes[2].get_yscale() == "log"


@pytest.mark.parametrize("tail", ['{"step": 70, "lo', '{"step"', "7", '{"step": 70, "loss": 1.0'])
def test_a_torn_last_line_is_ignored(tmp_path, tail):
    whole, torn = write_run(tmp_path / "whole"), write_run(tmp_path / "torn", tail=tail)
    assert curves.read(torn).training == curves.read(whole).training
    assert curves.read(torn).validation == curves.read(whole).validation
    curves.draw([torn], tmp_path / "curves.png")


def test_values_that_are_not_numbers_are_left_out(tmp_path):
    run = write_run(tmp_path / "run", tail='{"step": 70, "loss": NaN, "lr": null}\n{"step": 80, "loss": Infinity}\n')
    assert curves.read(run).points("loss")[0] == [10, 20, 30, 40, 50, 60]
    curves.draw([run], tmp_path / "curves.png")


@pytest.mark.parametrize("line", [{"step": 10, "loss": 2.0}, {"step": 10, "val_loss": 2.0}])
def test_a_run_of_one_line_is_drawn(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    curves.draw([tmp_path], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path):
    out = tmp_path / "curves.png"
    curves.draw([write_run(tmp_path / "run")], out)
    before = out.read_bytes()
    with pytest.raises(UserError):
        curves.draw([tmp_path / "run", tmp_path / "missing"], out)
    assert out.read_bytes() == before and not list(tmp_path.glob(".curves*"))


def test_smoothing_neither_lags_nor_follows_a_spike():
    falling = [float(100 - i) for i in range(100)]
    assert curves.smooth(falling) == falling
    spiked = [1.0] * 100
    spiked[50] = 1000.0
    assert curves.smooth(spiked) == [1.0] * 100
    assert curves.smooth([]) == [] and curves.smooth([3.0]) == [3.0]


@pytest.mark.parametrize("text", ["[train]\nwhen = 2026-01-01\n", "x = " + "[" * 5000, "x = \n"])
def test_a_config_that_is_none_of_ours_is_no_traceback(tmp_path, text):
    runs = [write_run(tmp_path / name) for name in "ab"]
    (runs[0] / "config.toml").write_text(text)
    (runs[1] / "config.toml").write_text("[train]\nlr = 0.1\n")
    with contextlib.suppress(UserError):
        assert "2026-01-01" in compare.table(runs)[1]


def test_datasets_and_missing_settings_are_told_in_the_table_and_the_csv(train, tokens, tmp_path):
    (tmp_path / "other").symlink_to(tokens)
    for name, flags in (("a", {}), ("b", dict(tokens=tmp_path / "other")), ("c", {})):
        train(name, steps=2, **flags)
    runs = [train.runs / name for name in "abc"]
    (runs[2] / "config.toml").unlink()
    heading, *rows = compare.table(runs)
    assert heading.split()[:4] == ["run", "--tokens", "steps", "tokens"] and len(rows) == 3
    assert any(row.split()[1] == str(tmp_path / "other") for row in rows) and any(row.split()[1] == "-" for row in rows)
    lines = compare.as_csv(runs).splitlines()
    logged = json.loads((runs[0] / "metrics.jsonl").read_text().splitlines()[0])
    assert lines[0].split(",")[:2] == ["run", "--tokens"] and set(logged) <= set(lines[0].split(","))


def test_runs_are_told_apart_by_the_settings_that_were_chosen_differently(train, tmp_path):
    for name, flags in (("a", dict(lr=1e-2)), ("b", dict(lr=1e-3, log_every=2)), ("c", dict(lr=1e-3, n_embd=16))):
        train(name, steps=5, **flags)
    runs = [train.runs / name for name in "abc"]
    assert compare.labels(runs) == ["n_embd=32 lr=0.01", "n_embd=32 lr=0.001", "n_embd=16 lr=0.001"]
    assert compare.labels([runs[0], runs[0]]) == [str(runs[0])] * 2 and compare.labels(runs[:1]) == ["a"]
    out = execute([sys.executable, "plot.py", *runs, f"--out={tmp_path}/a.png", f"--csv={tmp_path}/a.csv"]).stdout.splitlines()
    assert out[0].split() == ["run", "n_embd", "lr", "steps", "tokens", "time", "val_loss", "val_bpb"]
    lowest = [min(record["val_loss"] for record in train.metrics(name, "val_loss")) for name in "abc"]
    order = sorted(range(3), key=lowest.__getitem__)
    assert [line.split()[0] for line in out[1:4]] == [str(runs[i]) for i in order]
    assert [float(line.split()[-2]) for line in out[1:4]] == [round(lowest[i], 4) for i in order]
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    losses = [row["loss"] for row in rows if row["run"] == str(runs[0]) and row["loss"]]
    assert losses == [str(record["loss"]) for record in train.metrics("a", "loss")]
