"""Draw what a run prints: python bench/console.py

Trains the laptop preset on two ranks, kills it after half of the steps, starts the same command again, and prints a sample. The
picture shows the terminal's output, wrapped at 72 columns, without most of the step lines. Writes console_light.svg and
console_dark.svg.
"""

import html
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import machine  # puts the project's folder on the path
from lockstep.common.errors import RunError
from lockstep.common.files import publish_text

PROMPT = "def __init__(self"
KILL_AT = 120  # of 220 steps
COLUMNS, CHARACTER, LINE = 72, 8.43, 19  # columns, and sizes of a 14-pixel monospaced font
COLORS = {
    "light": dict(background="#f6f8fa", text="#1f2328", command="#0550ae", result="#116329", quiet="#59636e"),
    "dark": dict(background="#161b22", text="#e6edf3", command="#79c0ff", result="#7ee787", quiet="#9198a1"),
}
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def main(config: machine.Options) -> None:
    """The command."""
    machine.prepare_tokens(config.tokens)
    with machine.workspace() as folder:
        flags, run = dict(tokens=config.tokens, out_dir=folder, name="laptop"), folder / "laptop"
        first, second = train(run, flags, KILL_AT), train(run, flags)
        sample = [sys.executable, *machine.arguments("sample.py", str(run), prompt=PROMPT, max_new_tokens=120)]
        written = machine.output(sample)
    torchrun = "$ torchrun --standalone --nproc_per_node=2 train.py"
    rows = [line for line in few_steps(second) if not line.startswith("  ")]  # without the banner, which is the same as before
    lines = [torchrun, *few_steps(first), "^ kill -9", torchrun, *rows]
    lines += [f'$ python sample.py runs/laptop --prompt="{PROMPT}"', *written.splitlines()[:8]]
    lines = [line.replace(f"{folder}/", "runs/").replace(str(config.tokens), "tokens/python") for line in lines]
    for theme, colors in COLORS.items():
        path = Path(config.out, f"console_{theme}.svg")
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_text(path, picture(lines, colors))
        print(path)


def train(run: Path, flags: dict, kill_at: int | None = None) -> list[str]:
    """The lines that a run on two ranks prints, to its end or until it is killed at step `kill_at`."""
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    environment = machine.environment(OMP_NUM_THREADS="1")
    process = subprocess.Popen(machine.command(2, **flags), cwd=machine.ROOT, env=environment, **streams)
    while kill_at and process.poll() is None:
        if machine.last_step(run) >= kill_at:
            machine.kill(process)
        time.sleep(0.1)
    output, _ = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        raise RunError(output[-2000:])
    return output.splitlines()


def few_steps(lines: list[str]) -> list[str]:
    """`lines` with only the first two and the last of the step lines."""
    steps = [line for line in lines if re.match(r"step +\d+/\d+  loss", line)]
    kept = {*steps[:2], *steps[-1:]}
    shown = [line for line in lines if line not in steps or line in kept]
    shown.insert(shown.index(steps[1]) + 1, "...")
    return shown


def picture(lines: list[str], colors: dict[str, str]) -> str:
    """An SVG of a terminal that shows `lines`."""
    rows = []
    for line in lines:
        kind = "command" if line[:1] in "$^" else "result" if re.search(r"validation loss|^done", line) else "text"
        kind = "quiet" if line == "..." else kind
        folded = textwrap.wrap(line, COLUMNS, subsequent_indent=" " * 10, drop_whitespace=False, replace_whitespace=False)
        rows += [(part.rstrip(), kind) for part in folded or [""]]
    width, height = COLUMNS * CHARACTER + 32, len(rows) * LINE + 32
    texts = "\n".join(
        f'<text x="16" y="{30 + number * LINE}" fill="{colors[kind]}" xml:space="preserve">{html.escape(row)}</text>'
        for number, (row, kind) in enumerate(rows)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="{FONT}" font-size="14">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{colors["background"]}"/>\n{texts}\n</svg>\n'
    )


if __name__ == "__main__":
    machine.command_line(__doc__, machine.Options, main)
