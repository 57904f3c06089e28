"""How long does a command take to answer? `python bench/startup.py`

Measures `train.py --help`, and `train.py config/laptop.toml --compile=off` from the command to the end of its first step.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
from common import cli, errors
from common.errors import UserError
from measure import in_turns, run_until, spread, timed


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
    print("; ".join(f"{name} {machine.median_and_range(row['all'])}" for name, row in result.items()))


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(StartupConfig, sys.argv[1:], __doc__))
