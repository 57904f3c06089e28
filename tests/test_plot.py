"""Curves of runs: what is read from metrics.jsonl, and the command."""

import csv
import itertools
import json
import math
import os
import sys
import warnings
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from conftest import execute
from lockstep.common.errors import UserError
from lockstep.reports import compare, curves


def write_run(path: Path, steps: int = 60, tokens_per_step: int = 1024, tail: str = "", validation: bool = True) -> Path:
    path.mkdir(parents=True)
    with open(path / "metrics.jsonl", "w") as file:
        for step in range(10, steps + 1, 10):
            line = {"step": step, "tokens": step * tokens_per_step, "loss": 1 + 9 / step, "lr": 1e-3, "grad_norm": 5 / step}
            print(json.dumps(line | {"tokens_per_second": 1e4, "mfu": None}), file=file)
            if step % 20 == 0 and validation:
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
        curves.draw(compare.group(list(runs)), tmp_path / "unused.png", **more)
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
    panels = {"loss (dots: validation, on other documents)", "learning rate", "gradient norm", "tokens per second"}
    assert {"small, validation 1.500", "large, validation 1.500", "step"} | panels <= words(figure_of(*runs))
    assert "small, validation 1.500" in words(figure_of(runs[0]))


NAMES = ["lr $\\x_$", "a$b$c", "_mine", "50%_{x}^", "two\nlines", "n" * 255]


def test_the_mean_since_the_last_line_is_drawn(tmp_path):
    run = write_run(tmp_path / "run", tail=json.dumps({"step": 70, "tokens": 70, "loss": 9.0, "mean_loss": 2.0}) + "\n")
    assert curves.read(run).points("loss")[1][-1] == 2.0


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
        curves.draw(compare.group([*runs, scored]), tmp_path / f"curves.{suffix}")
    assert "a$b$c, validation" in (tmp_path / "curves.svg").read_text()


def test_a_character_is_taken_from_an_installed_font_or_escaped(tmp_path, figure_of):
    run = write_run(tmp_path / "\U0010fffdé")  # a character that no font has
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # glyphs that are missing
        curves.draw([curves.single(run)], tmp_path / "curves.png")
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
                curves.draw([curves.single(run)], tmp_path / f"curves.{suffix}")
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
    for runs, x in ([short, long], "step"), ([short, long, half], "tokens"):
        assert compare.choose_x(compare.group(runs)) == x
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
        curves.draw(compare.group([torn, whole]), tmp_path / "curves.png")


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path):
    out = tmp_path / "curves.png"
    run = write_run(tmp_path / "run")
    curves.draw([curves.single(run)], out)
    before = out.read_bytes()
    execute([sys.executable, "plot.py", run, tmp_path / "missing", f"--out={out}"], status=2)
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
    heading, *rows = table_of(runs)
    assert heading[:4] == ["run", "--tokens", "steps", "tokens"] and len(rows) == 3
    assert sorted(row[1] for row in rows) == sorted([str(tokens), str(tmp_path / "other"), "-"])
    (runs[2] / "config.toml").write_text("x = \n")
    with pytest.raises(UserError, match="is not a valid TOML preset"):
        compare.group(runs)


def table_of(runs):
    return [line.split() for line in compare.written(compare.table(compare.group(runs)), "text").splitlines()]


def test_runs_are_told_apart_by_the_settings_that_were_chosen_differently(train, tmp_path):
    for name, flags in (("a", dict(lr=1e-2)), ("b", dict(lr=1e-3, log_every=2)), ("c", dict(lr=1e-3, n_embd=16))):
        train(name, steps=5, **flags)
    runs = [train.runs / name for name in "abc"]
    out = execute([sys.executable, "plot.py", *runs, f"--out={tmp_path}/a.png"]).stdout.splitlines()
    assert out[0].split() == ["run", "n_embd", "lr", "steps", "tokens", "time", "val_loss", "lowest", "val_bpb"]
    last = [train.metrics(name, "val_loss")[-1]["val_loss"] for name in "abc"]
    order = sorted(range(3), key=last.__getitem__)
    assert [line.split()[0] for line in out[1:4]] == [str(runs[i]) for i in order]
    assert [float(line.split()[-3]) for line in out[1:4]] == [round(last[i], 4) for i in order]


def seeds(folder: Path, losses: dict[str, list[list[float]]]) -> list[Path]:
    """Runs of several seeds for each --lr, with these validation losses at steps 20, 40, ..."""
    runs = []
    for lr, of_seeds in losses.items():
        for seed, values in enumerate(of_seeds):
            tail = [json.dumps({"step": 20 * i, "val_loss": value}) for i, value in enumerate(values, 1)]
            runs.append(write_run(folder / f"{lr}-{seed}", 20 * len(values), tail="\n".join(tail) + "\n", validation=False))
            (runs[-1] / "config.toml").write_text(f'[run]\nseed = {seed}\nname = "{lr}"\n[optim]\nlr = {lr}\n')
    return runs


# 0.01: the mean is 2.0, the standard deviation 0.1, and 4.303 x 0.1 / sqrt(3) is 0.2484. 0.002: the loss rises.
LOSSES = {"0.01": [[3.0, 1.9], [3.0, 2.0], [3.0, 2.1, 1.0]], "0.002": [[1.5, 2.5], [1.5, 2.5]], "0.1": [[1.0, 9.0]]}


def test_runs_that_differ_only_in_seed_are_one_row(tmp_path):
    runs = seeds(tmp_path, LOSSES)
    command = [sys.executable, "plot.py", *runs, f"--out={tmp_path}/curves.png"]
    heading, *rows = [line.split() for line in execute(command).stdout.splitlines()[:-1]]
    assert heading == ["run", "lr", "seeds", "steps", "tokens", "time", "val_loss", "±", "lowest", "val_bpb"]
    of = [dict(zip(heading, [*row[:5], f"{row[5]} {row[6]}", *row[7:]], strict=True)) for row in rows]
    assert [row["run"] for row in of] == [f"{tmp_path}/0.01-*", f"{tmp_path}/0.002-*", f"{tmp_path}/0.1-0"]
    assert [row["seeds"] for row in of] == ["3", "2", "1"] and [row["steps"] for row in of] == ["40", "40", "40"]
    assert [row["val_loss"] for row in of] == ["2.0000", "2.5000", "9.0000"]
    assert [row["±"] for row in of] == ["0.2484", "0.0000", "-"]
    assert [row["lowest"] for row in of] == ["1.6333", "1.5000", "1.0000"]
    markdown = execute([*command, "--table=md"]).stdout.splitlines()
    assert markdown[1] == "|" + " --- |" * 10 and markdown[2].startswith(f"| {tmp_path}/0.01-* | 0.01 | 3 | 40 |")
    values = list(csv.DictReader(execute([*command, "--table=csv"]).stdout.splitlines()))
    assert [row["tokens"] for row in values] == ["40960"] * 3 and float(values[0]["±"]) == pytest.approx(0.2484, abs=1e-4)
    assert values[2]["±"] == values[2]["val_bpb"] == ""


def test_runs_that_differ_only_in_seed_are_one_curve_with_a_band(tmp_path, figure_of):
    figure = figure_of(*seeds(tmp_path, LOSSES))
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    names = ["lr=0.002, 2 seeds", "lr=0.01, 3 seeds", "0.1-0"]
    losses = ["2.500 ± 0.000", "2.000 ± 0.248", "9.000"]
    assert shown == [f"{name}, validation {loss}" for name, loss in zip(names, losses, strict=True)]
    assert len(figure.axes[0].findobj(FillBetweenPolyCollection)) == 2
    ends = [text for text in figure.axes[0].texts if text.get_text() in names]
    assert len(ends) == 3 and {text.get_color() for text in ends} == set(curves.COLORS[:3])
    bottom, top = figure.axes[0].get_ylim()
    heights = sorted(text.xy[1] for text in ends)
    assert min(b - a for a, b in itertools.pairwise(heights)) > 0.08 * (top - bottom)


def test_a_repetition_and_a_run_without_settings_are_not_further_seeds(tmp_path):
    runs = seeds(tmp_path / "a", {"0.01": [[2.0], [3.0]]}) + seeds(tmp_path / "b", {"0.01": [[2.0], [3.0]]})
    groups = compare.group([*runs, write_run(tmp_path / "bare"), write_run(tmp_path / "other")])
    assert [[run.name for run in group.runs] for group in groups] == [["0.01-0", "0.01-1"]] * 2 + [["bare"], ["other"]]


def test_a_run_that_ends_with_no_number_comes_last(tmp_path):
    runs = seeds(tmp_path, {"0.01": [[1.0, math.nan]], "0.02": [[2.0, 1.9]]})
    assert [row[-3] for row in table_of(runs)] == ["val_loss", "1.9000", "nan"]


def test_twenty_groups_have_twenty_looks(tmp_path, figure_of):
    rates = [write_run(tmp_path / f"rate{i}") for i in range(20)]
    for i, run in enumerate(rates):
        (run / "config.toml").write_text(f"[optim]\nlr = {(20 - i) / 1000}\n")
    for theme in ("light", "dark"):
        figure = figure_of(*rates, theme=theme)
        lines = figure.legends[0].get_lines()
        brightness = [sum(to_rgb(line.get_color())) for line in lines]
        assert brightness == sorted(brightness) and len(set(brightness)) == 20
        assert figure.legends[0].get_texts()[0].get_text() == "rate19, validation 1.500"  # the lowest rate
    for i, run in enumerate(rates):
        (run / "config.toml").write_text(f"[optim]\nlr = {(20 - i) / 1000}\nbeta1 = 0.{i + 1}\n")
    lines = figure_of(*rates).legends[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 20


def test_a_dark_picture_has_light_words(tmp_path, figure_of):
    run = write_run(tmp_path / "run")
    for theme, background in ("light", "white"), ("dark", "#0d1117"):
        figure = figure_of(run, theme=theme)
        assert to_rgb(figure.get_facecolor()) == to_rgb(background)
        words = [*figure.legends[0].get_texts(), figure.axes[0].title, *figure.axes[2].get_xticklabels()]
        assert all((to_rgb(text.get_color())[0] > 0.5) == (theme == "dark") for text in words)
    out = tmp_path / "dark.svg"
    execute([sys.executable, "plot.py", run, "--theme=dark", f"--out={out}"])
    assert "#0d1117" in out.read_text()
