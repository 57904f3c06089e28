"""What bit-identical training costs: the time of a step under --strategy=exact against ddp.

python bench/exact_cost.py

Trains the laptop preset for a few steps with one strategy and then with the other, several times, on one process and on two.
Both cut the update into the same micro-batches and use one thread a rank. About eight minutes on two cores.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
from common import cli, errors

STRATEGIES = ("ddp", "exact")


@dataclass(frozen=True)
class ExactCostConfig:
    preset: str = "config/laptop.toml"
    pairs: int = 3
    """How often each strategy is measured on each number of ranks, in turns."""
    steps: int = 15
    skip: int = 3
    """How many of the first steps are not counted."""
    max_ranks: int = 2
    micro_batch_size: int = 4
    """In sequences. auto would choose 4, too, for the laptop preset under exact."""
    compile: str = "on"
    """As auto chooses for the whole laptop preset. For these few steps it would choose off."""
    tokens: str = "tokens/python"
    """Dataset; the embedded corpus is prepared if it is not there."""


def step_ms(config: ExactCostConfig, strategy: str, ranks: int, runs: Path, name: str) -> float:
    """The median time of a step of one run, in milliseconds."""
    machine.run(
        ranks,
        preset=config.preset,
        strategy=strategy,
        steps=config.steps,
        warmup_steps=0,
        micro_batch_size=config.micro_batch_size,
        compile=config.compile,
        threads=1,
        eval_every=0,
        eval_tokens=1024,
        save_every=0,
        log_every=1,
        tokens=config.tokens,
        out_dir=runs,
        name=name,
    )
    lines = [line for line in machine.metrics(runs / name) if "step_ms" in line]
    return statistics.median(line["step_ms"] for line in lines if line["step"] > config.skip)


def report(result: dict[str, dict[str, list[float]]]) -> None:
    """Print the times and the ratio of each pair of neighbouring runs."""
    rows = []
    for ranks, times in result.items():
        for strategy, values in times.items():
            rows.append([f"W={ranks} {strategy}", machine.median_and_range(values, 1), len(values)])
    print(machine.table(["", "ms a step", "runs"], rows))
    for ranks, times in result.items():
        ratios = [exact / ddp for ddp, exact in zip(*(times[strategy] for strategy in STRATEGIES), strict=True)]
        print(f"W={ranks}: exact / ddp = {machine.median_and_range(ratios, 3)}")


def main(config: ExactCostConfig) -> int:
    """The command."""
    from tqdm import tqdm

    if config.skip >= config.steps:
        raise errors.UserError(f"--skip={config.skip} leaves none of --steps={config.steps} to measure")
    machine.prepare_tokens(config.tokens)
    worlds = range(1, config.max_ranks + 1)
    result = {str(ranks): {strategy: [] for strategy in STRATEGIES} for ranks in worlds}
    turns = [(ranks, pair, strategy) for ranks in worlds for pair in range(config.pairs) for strategy in STRATEGIES]
    with machine.workspace() as runs:
        for ranks, pair, strategy in (bar := tqdm(turns, unit="run", dynamic_ncols=True)):
            bar.set_description(f"W={ranks} {strategy}")
            result[str(ranks)][strategy].append(step_ms(config, strategy, ranks, runs, f"{strategy}-{ranks}-{pair}"))
    print(machine.write("exact_cost", {"settings": vars(config), "step_ms": result}))
    report(result)
    return 0


if __name__ == "__main__":
    with errors.user_errors():
        sys.exit(main(cli.parse(ExactCostConfig, sys.argv[1:], __doc__)))
