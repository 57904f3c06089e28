"""Is this checkout faster than another one? `git worktree add ../before COMMIT; python bench/against.py --base=../before`

Measures both in turns on the laptop preset: seconds from the command to the end of the first step with no compiled code on
disk (cold) and with all of it (warm), and the tokens per second of the steps that follow.
"""

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
from common import cli, errors
from common.errors import UserError
from measure import in_turns, ratio, run_until, spread

PRESET = str(machine.ROOT / "config/laptop.toml")  # of this checkout, for both


@dataclass(frozen=True)
class AgainstConfig:
    base: str
    """The other checkout."""
    rounds: int = 3
    steps: int = 30
    """Steps of each warm run."""
    warmup_steps: int = 5
    """Steps of each warm run whose speed does not count."""
    tokens: str = "tokens/python"
    """Dataset directory."""
    dtype: str = "auto"


def main(config: AgainstConfig) -> None:
    """Measure both in turns. Print and write seconds, tokens per second and the ratios."""
    tokens, base = Path(config.tokens).resolve(), Path(config.base).resolve()
    for path, what in [(tokens / "dataset.json", f"--tokens={tokens}: no dataset"), (base / "train.py", f"--base={base}: no")]:
        if not path.exists():
            raise UserError(f"{what}: {path} is missing")
    checkouts, speeds = {"base": base, "here": machine.ROOT}, {"base": [], "here": []}
    flags = {"tokens": tokens, "compile": "on", "dtype": config.dtype}
    with tempfile.TemporaryDirectory() as folder:

        def cold(name: str) -> float:
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                return run_until(1, PRESET, checkouts[name], {"TORCHINDUCTOR_CACHE_DIR": cache}, **flags)[0]

        def warm(name: str) -> float:
            cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{name}"}
            if not speeds[name]:  # the first run fills the cache
                run_until(1, PRESET, checkouts[name], cache, **flags)
            seconds = run_until(1, PRESET, checkouts[name], cache, **flags)[0]
            lines = run_until(config.steps, PRESET, checkouts[name], cache, **flags)[1]
            steps = [line["tokens_per_second"] for line in lines[config.warmup_steps :] if "tokens_per_second" in line]
            speeds[name].append(statistics.median(steps))
            return seconds

        contenders = {
            f"{what.__name__} first step, {name}, s": lambda what=what, name=name: what(name)
            for what in (cold, warm)
            for name in checkouts
        }
        seconds = in_turns(config.rounds, contenders)
    measured = seconds | {f"tokens per second, {name}": values for name, values in speeds.items()}
    ratios = {
        f"{what}, here / base": ratio(measured[f"{what}, here{unit}"], measured[f"{what}, base{unit}"])
        for what, unit in [("cold first step", ", s"), ("warm first step", ", s"), ("tokens per second", "")]
    }
    result = {name: spread(values) for name, values in measured.items()} | ratios
    print(machine.write("against", {"base": machine.output_of(["git", "-C", str(base), "describe", "--always"])} | result))
    for name, values in measured.items():
        print(f"{name}: {machine.median_and_range(values)}")
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(AgainstConfig, sys.argv[1:], __doc__))
