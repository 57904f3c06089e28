"""Is a run on this machine the same as on every other? `make same`, or `python bench/same.py`: a minute on two cores.

Writes a text, prepares its tokens, and trains a small Llama with --numerics=portable, on two ranks and then on one. The sha256
of the weights must be the expected one, whatever the processor, the number of threads and the versions. bench/same.sha256 also
lists the files made before, so the first difference is reported. After this command, `sha256sum --check bench/same.sha256`
checks the same files. Exit status: 0 if they are the same, else 1.
"""

import platform
import shutil
import subprocess
import sys

import machine  # puts the project's folder on the path

# isort: split
from lockstep.common import errors
from lockstep.common.errors import RunError
from lockstep.common.files import sha256
from lockstep.hardware.host import cpu_name

EXPECTED = machine.ROOT / "bench" / "same.sha256"
TEXT, TOKENS = "runs/same.txt", "tokens/same"
WORDS = [
    ["two", "three", "four", "five", "six", "seven", "eight"],
    ["small", "old", "brown", "hungry", "quiet"],
    ["cats", "geese", "foxes", "horses", "rabbits", "owls", "sheep", "mice", "bears", "ducks", "goats"],
    ["sleep", "sing", "dance", "wait", "hide", "talk", "eat", "run", "play", "rest", "dream", "swim", "laugh"],
]
# Every part of a large Llama, plus dropout. 1, 2, 3 or 4 ranks can share the 24 sequences of an update equally.
FLAGS = dict(numerics="portable", strategy="exact", device="cpu")
FLAGS |= dict(architecture="llama", n_layer=2, n_head=4, n_kv_head=2, n_embd=64, seq_len=64, dropout=0.1)
FLAGS |= dict(steps=48, tokens_per_update=1536, optimizer="adamw", lr=8e-3, schedule="cosine", grad_clip=1.0)
FLAGS |= dict(eval_every=24, eval_tokens=8192, save_every=12, keep_last=0, log_every=4)


def main() -> int:
    """The command."""
    (machine.ROOT / "runs").mkdir(exist_ok=True)
    (machine.ROOT / TEXT).write_bytes(text().encode())
    start(TOKENS, machine.arguments("prepare_data.py", TEXT, out=TOKENS, tokenizer="bytes"))
    for ranks in (2, 1):
        start(f"runs/same-{ranks}", machine.command(ranks, name=f"same-{ranks}", tokens=TOKENS, **FLAGS)[1:])
    wanted = expected()
    found = {path: sha256(machine.ROOT / path) for path in wanted}
    print(f"\n{where()}\n{verdict(found, wanted)}")
    return int(found != wanted)


def text() -> str:
    """5,005 different sentences of number, adjective, animal and verb: the list lengths 7, 5, 11 and 13 share no divisor."""
    order = (n * 1237 % 5005 for n in range(5005))
    return "".join(" ".join(words[n % len(words)] for words in WORDS) + ".\n" for n in order)


def start(makes: str, command: list[str]) -> None:
    """Run `python COMMAND` to make a directory, after removing the old one. Raises RunError if it fails."""
    shutil.rmtree(machine.ROOT / makes, ignore_errors=True)
    variables = machine.environment(OMP_NUM_THREADS="1")  # torchrun would set it with a warning; a run sets its own threads
    if status := subprocess.run([sys.executable, *command], cwd=machine.ROOT, env=variables).returncode:
        raise RunError(f"{makes} was not made: status {status}")


def expected() -> dict[str, str]:
    """The expected sha256 of each file by path, in the order the files are made."""
    return {path: digest for digest, path in (line.split() for line in EXPECTED.read_text().splitlines())}


def where() -> str:
    """The processor, the instruction set that torch uses, and the versions of Python, torch and numpy."""
    import numpy
    import torch

    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}"
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}; {versions}"


def verdict(found: dict[str, str], wanted: dict[str, str]) -> str:
    """The last lines: the sha256 of this machine's weights, the expected one, and whether they are equal."""
    *_, last = wanted
    lines = f"this machine  {found[last]}\nexpected      {wanted[last]}\n"
    if different := [path for path in wanted if found[path] != wanted[path]]:
        first = f"{different[0]} is the first of {len(different)} files that differ."
        return f"{lines}NOT THE SAME: {first} Please open an issue in the repository with these lines."
    return f"{lines}the same"


if __name__ == "__main__":
    with errors.user_errors():
        sys.exit(main())
