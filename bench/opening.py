"""What does checking foreign files cost? `git worktree add ../before COMMIT; python bench/opening.py --base=../before`

Measures this checkout and another one in turns, in seconds of computing (user and system), which other load hardly disturbs:
`train.py --help`; a run of one step on a dataset of more than 1,000 shards; a token sampled from a checkpoint of GPT-2's
124 million parameters. Needs 3 GB of disk.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from measure import in_turns, ratio, spread
from settings import RunError, UserError

ONE_STEP = machine.TINY | dict(architecture="gpt2", steps=1, tokens_per_update=32, eval_every=0, eval_tokens=16, resume="off")


@dataclass(frozen=True)
class OpeningConfig:
    base: str
    """The other checkout."""
    rounds: int = 5


def computing(checkout: Path, command: list[str]) -> float:
    """Seconds of computing that `python COMMAND` takes. Raises RunError if it fails."""
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
        prepare = ["prepare_data.py", "--tokenizer=bytes", "--shard_tokens=20000", f"--out={folder}/tokens"]
        computing(machine.ROOT, prepare)
        step = ONE_STEP | dict(tokens=folder / "tokens", out_dir=folder)
        gpt2 = dict(
            n_layer=12, n_head=12, n_embd=768, vocab_size=50304, seq_len=1024, micro_batch_size=1, tokens_per_update=1024
        )
        machine.run(**step | gpt2 | dict(name="gpt2"))
        checkpoint = folder / "gpt2" / "checkpoints" / "latest"
        commands = {
            "--help": lambda name: ["train.py", "--help"],
            "a step, 1,000 shards": lambda name: machine.arguments(**step, name=f"{name}{os.urandom(4).hex()}"),
            "a token, 124 million parameters": lambda name: [
                "sample.py",
                str(checkpoint),
                "--max_new_tokens=1",
                "--device=cpu",
            ],
        }
        contenders = {
            f"{what}, {name}, s": lambda make=make, name=name: computing(checkouts[name], make(name))
            for what, make in commands.items()
            for name in checkouts
        }
        shards = len(list((folder / "tokens").glob("*.bin")))
        measured = in_turns(config.rounds, contenders)
    ratios = {what: ratio(measured[f"{what}, here, s"], measured[f"{what}, base, s"]) for what in commands}
    result = {
        "base": machine.output_of(["git", "-C", str(checkouts["base"]), "describe", "--always"]),
        "shards": shards,
        "here / base": ratios,
    }
    print(machine.write("opening", result | {name: spread(values) for name, values in measured.items()}))
    print("; ".join(f"{what}: here / base {value:.2f}" for what, value in ratios.items()))


if __name__ == "__main__":
    with settings.user_errors():
        main(settings.parse(OpeningConfig, sys.argv[1:], __doc__))
