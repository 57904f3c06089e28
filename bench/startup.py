"""How long a command takes to answer: `python bench/startup.py`.

`train.py --help`, and `train.py config/laptop.toml --compile=off` from the command to its first finished step.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from settings import RunError, UserError
from time_to_loss import environment, in_turns, spread, timed


@dataclass(frozen=True)
class StartupConfig:
    rounds: int = 5
    tokens: str = "tokens/python"
    """Dataset directory."""


def main(config: StartupConfig) -> None:
    """Measure both, in turns."""
    tokens = Path(config.tokens).resolve()
    if not tokens.exists():
        raise UserError(f"--tokens={config.tokens} does not exist; make it with: python prepare_data.py")

    def first_step() -> float:
        return run_until(1, "config/laptop.toml", tokens=tokens, compile="off")[0]

    contenders = {"--help, s": lambda: timed(["train.py", "--help"], machine.ROOT), "first step, s": first_step}
    result = {name: spread(values) for name, values in in_turns(config.rounds, contenders).items()}
    print(machine.write("startup", result))
    said = (f"{name} {row['median']:.2f} ({row['min']:.2f} to {row['max']:.2f})" for name, row in result.items())
    print("; ".join(said))


def run_until(step: int, preset: str, **flags) -> tuple[float, list[dict]]:
    """Train until the line of `step` is in metrics.jsonl, then kill the run, which thus saves and evaluates nothing.

    Returns the seconds from the command on and the lines. Raises RunError if the run ends before.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = {"out_dir": folder, "name": "run", "log_every": 1, "eval_every": 0, "save_every": 0} | flags
        command = [sys.executable, "train.py", preset, *(f"--{name}={value}" for name, value in flags.items())]
        metrics, output = Path(folder) / "run/metrics.jsonl", Path(folder) / "output"
        began = time.perf_counter()
        with open(output, "w") as file:
            process = subprocess.Popen(command, cwd=machine.ROOT, stdout=file, stderr=file, env=environment())
        try:
            while True:
                ended = process.poll() is not None
                lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
                if len(lines) >= step:
                    return time.perf_counter() - began, [json.loads(line) for line in lines[:step]]
                if ended:
                    raise RunError(f"train.py {preset} ended before step {step}:\n{output.read_text()[-2000:]}")
                time.sleep(0.005 if step == 1 else 0.25)  # looking disturbs what is measured
        finally:
            machine.kill(process)


if __name__ == "__main__":
    with settings.user_errors():
        main(settings.parse(StartupConfig, sys.argv[1:], __doc__))
