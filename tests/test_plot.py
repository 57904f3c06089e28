"""Curves of runs: what is read from metrics.jsonl, and the command."""

import json
import os
import sys
import warnings
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.text import Text

from conftest import execute
from lockstep.common.errors import UserError
from lockstep.reports import compare, curves


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
    panels = {"loss (dots: validation)", "learning rate", "gradient norm", "tokens per second"}
    assert {"small, validation 1.500", "large, validation 1.500", "step"} | panels <= words(figure_of(*runs))
    assert "small, validation 1.500" in words(figure_of(runs[0]))


NAMES = ["lr $\\x_$", "a$b$c", "_mine", "50%_{x}^", "two\nlines", "n" * 255]


def test_names_are_drawn_as_they_are(tmp_path, figure_of):
    runs = [write_run(tmp_path / name) for name in NAMES]
    figure = figure_of(*runs)
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == [f"{name}, validation 1.500".replace("\n", "\\n") for name in NAMES]
    assert not any(text.get_parse_math() for text in figure.legends[0].get_texts())
    scores = {f"tasks/{name}/acc": 0.5 for name in NAMES[:4]}
    scored = write_run(tmp_path / "scored", tail=json.dumps({"step": 30} | scores) + "\n")
    legend = figure_of(scored).axes[4].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [f"{name} acc" for name in NAMES[:4]]
    for suffix in ("png", "svg", "pdf"):
        curves.draw([*runs, scored], tmp_path / f"curves.{suffix}")
    assert "a$b$c, validation" in (tmp_path / "curves.svg").read_text()


def test_a_character_is_taken_from_an_installed_font_or_escaped(tmp_path, figure_of):
    run = write_run(tmp_path / "\U0010fffdé")  # a character that no font has
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # glyphs that are missing
        curves.draw([run], tmp_path / "curves.png")
    assert r"\U0010fffdé, validation 1.500" in words(figure_of(run))
    square = TTGlyphPen(None)
    for draw, *point in [("moveTo", (0, 0)), ("lineTo", (0, 500)), ("lineTo", (500, 0)), ("closePath",)]:
        getattr(square, draw)(*point)
    made = FontBuilder(1000)
    made.setupGlyphOrder([".notdef", "square"])
    made.setupCharacterMap({0x10FFFD: "square"})
    made.setupGlyf({name: square.glyph() for name in (".notdef", "square")})
    made.setupHorizontalMetrics({name: (500, 0) for name in (".notdef", "square")})
    made.setupHorizontalHeader(ascent=800, descent=-200)
    made.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    made.setupOS2()
    made.setupPost()
    made.save(tmp_path / "squares.ttf")
    font_manager.fontManager.addfont(tmp_path / "squares.ttf")
    try:
        (text,) = figure_of(run).legends[0].get_texts()
        assert text.get_text() == "\U0010fffdé, validation 1.500" and "Squares" in text.get_fontfamily()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for suffix in ("png", "svg", "pdf"):
                curves.draw([run], tmp_path / f"curves.{suffix}")
    finally:
        font_manager.fontManager.ttflist.pop()


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "nonsense"])
def test_a_picture_is_drawn_whatever_the_backend_of_a_notebook(tmp_path, backend):
    out = tmp_path / "curves.png"
    execute([sys.executable, "plot.py", write_run(tmp_path / "run"), f"--out={out}"], env={"MPLBACKEND": backend}, fork=False)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_scores_on_tasks_have_a_panel(tmp_path, figure_of):
    scores = [{"step": step, "tasks/a/acc": 0.2, "tasks/a/acc_norm": step / 60, "tasks/b/perplexity": 9.5} for step in (30, 60)]
    run = write_run(tmp_path / "run", tail="".join(json.dumps(record) + "\n" for record in scores))
    figure = figure_of(run, write_run(tmp_path / "other"))
    assert {"scores on tasks", "a acc_norm"} <= words(figure) and not {"a acc", "b perplexity"} & words(figure)
    assert [list(line.get_ydata()) for line in figure.axes[4].lines] == [[0.5, 1.0], [], []]
    assert "scores on tasks" not in words(figure_of(tmp_path / "other"))


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
    assert figure_of(run, slow, x="time").axes[2].get_xlabel() == "training time"


def test_a_run_without_tokens_or_speed_is_told_what_works(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for record, missing in [({"step": 1, "loss": 2.0}, "tokens"), ({"step": 1, "tokens": 9, "loss": 2.0}, "tokens_per_second")]:
        (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        result = execute([sys.executable, "plot.py", run, "--x=time", f"--out={tmp_path}/curves.png"], status=2)
        assert f"run has not logged {missing} yet; use --x=step" in result.stderr


def test_a_gradient_norm_over_decades_has_a_log_axis(tmp_path, figure_of):
    run = write_run(tmp_path / "run")
    spike = write_run(tmp_path / "wild", tail=json.dumps({"step": 70, "loss": 1.0, "grad_norm": 90.0}) + "\n")
    assert [figure_of(path).axes[2].get_yscale() for path in (run, spike)] == ["linear", "log"]


def test_a_torn_last_line_and_values_that_are_not_numbers_are_left_out(tmp_path):
    whole = write_run(tmp_path / "whole")
    torn = write_run(
        tmp_path / "torn", tail='{"step": 70, "loss": NaN, "lr": null}\n{"step": 80, "loss": Infinity}\n{"step": 90, "lo'
    )
    assert curves.read(torn).points("loss") == curves.read(whole).points("loss")
    assert curves.read(torn).validation == curves.read(whole).validation
    for line in ({"step": 10, "loss": 2.0}, {"step": 10, "val_loss": 2.0}):  # a run of one line
        (whole / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        curves.draw([torn, whole], tmp_path / "curves.png")


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


def test_the_table_has_datasets_and_lacks_what_is_not_known(train, tokens, tmp_path):
    (tmp_path / "other").symlink_to(tokens)
    for name, flags in (("a", {}), ("b", dict(tokens=tmp_path / "other")), ("c", {})):
        train(name, steps=2, **flags)
    runs = [train.runs / name for name in "abc"]
    (runs[2] / "config.toml").unlink()
    heading, *rows = compare.table(runs)
    assert heading.split()[:4] == ["run", "--tokens", "steps", "tokens"] and len(rows) == 3
    assert any(row.split()[1] == str(tmp_path / "other") for row in rows) and any(row.split()[1] == "-" for row in rows)
    (runs[2] / "config.toml").write_text("x = \n")
    with pytest.raises(UserError, match="is not a valid TOML preset"):
        compare.table(runs)


def test_runs_are_told_apart_by_the_settings_that_were_chosen_differently(train, tmp_path):
    for name, flags in (("a", dict(lr=1e-2)), ("b", dict(lr=1e-3, log_every=2)), ("c", dict(lr=1e-3, n_embd=16))):
        train(name, steps=5, **flags)
    runs = [train.runs / name for name in "abc"]
    out = execute([sys.executable, "plot.py", *runs, f"--out={tmp_path}/a.png"]).stdout.splitlines()
    assert out[0].split() == ["run", "n_embd", "lr", "steps", "tokens", "time", "val_loss", "val_bpb"]
    lowest = [min(record["val_loss"] for record in train.metrics(name, "val_loss")) for name in "abc"]
    order = sorted(range(3), key=lowest.__getitem__)
    assert [line.split()[0] for line in out[1:4]] == [str(runs[i]) for i in order]
    assert [float(line.split()[-2]) for line in out[1:4]] == [round(lowest[i], 4) for i in order]
