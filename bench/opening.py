"""What does checking foreign files cost? `git worktree add ../before COMMIT; python bench/opening.py --base=../before`

Measures this checkout and another one in turns, in seconds of computing (user and system), which other load hardly disturbs:
`train.py --help`; opening a dataset of more than 1,000 shards; a run of one step on it; a token sampled from a checkpoint of
GPT-2's 124 million parameters. Needs 3 GB of disk.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
from common import cli, errors
from common.errors import RunError, UserError
from measure import in_turns, ratio, spread

ONE_STEP = machine.TINY | dict(architecture="gpt2", steps=1, tokens_per_update=32, eval_every=0, eval_tokens=16)
GPT2 = dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50304)
OPEN_20_TIMES = """
import sys
sys.path.insert(0, "")
try:
    from dataset.tokens import open_dataset
except ImportError:  # where it was once
    from data import open_dataset
for _ in range(20):
    open_dataset(sys.argv[1])
"""


@dataclass(frozen=True)
class OpeningConfig:
    base: str
    """The other checkout."""
    rounds: int = 5


def computing(checkout: Path, command: list[str], run: Path) -> float:
    """Seconds of computing that `python COMMAND` takes in a checkout where no run is. Raises RunError if it fails."""
    shutil.rmtree(run, ignore_errors=True)
    one_thread = machine.environment(OMP_NUM_THREADS="1")
    with open(os.devnull, "w") as silent:
        process = subprocess.Popen([sys.executable, *command], cwd=checkout, env=one_thread, stdout=silent, stderr=silent)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RunError(f"{' '.join(command)} in {checkout} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main(config: OpeningConfig) -> None:
    """Measure, print, write bench/results/opening.json."""
    checkouts = {"base": Path(config.base).resolve(), "here": machine.ROOT}
    if not (checkouts["base"] / "train.py").exists():
        raise UserError(f"--base={config.base} has no train.py")
    with machine.workspace() as folder:
        prepare = ["prepare_data.py", "--tokenizer=bytes", "--shard_tokens=12000", f"--out={folder}/tokens"]
        computing(machine.ROOT, prepare, folder / "run")
        step = ONE_STEP | dict(tokens=folder / "tokens", out_dir=folder, name="run")
        machine.run(**step | GPT2 | dict(name="gpt2"))
        sample = machine.arguments("sample.py", folder / "gpt2", max_new_tokens=1, device="cpu")
        commands = {
            "--help": ["train.py", "--help"],
            "1,000 shards opened 20 times": ["-c", OPEN_20_TIMES, str(folder / "tokens")],
            "a step on 1,000 shards": machine.arguments(**step),
            "a token of 124 million parameters": sample,
        }
        contenders = {
            f"{what}, {name}, s": lambda command=command, name=name: computing(checkouts[name], command, folder / "run")
            for what, command in commands.items()
            for name in checkouts
        }
        shards = len(list((folder / "tokens").glob("*.bin")))
        measured = in_turns(config.rounds, contenders)
    ratios = {what: ratio(measured[f"{what}, here, s"], measured[f"{what}, base, s"]) for what in commands}
    base = machine.output_of(["git", "-C", str(checkouts["base"]), "describe", "--always"])
    result = {"base": base, "shards": shards, "here / base": ratios}
    print(machine.write("opening", result | {name: spread(values) for name, values in measured.items()}))
    print("; ".join(f"{what}: here / base {value:.2f}" for what, value in ratios.items()))


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(OpeningConfig, sys.argv[1:], __doc__))
