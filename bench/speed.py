"""How fast is training, compared with nanoGPT and with the machine?

python bench/speed.py steps|loss [--flag=value ...]
"""

import contextlib
import functools
import io
import math
import os
import re
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import numpy as np

from common.errors import RunError, UserError
from forks import in_fresh_process
from hardware import host
from machine import in_turns, ratio, run_until, spread, timed

SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 384}
SEQ_LEN, BATCH, VOCABULARY = 256, 8, 65
TARGET_LOSS = 1.8857  # our run must reach this, in nats per character
README_RUN = shlex.split(
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)


@dataclass(frozen=True, kw_only=True)
class Comparison(machine.Out):
    nanogpt: str
    """A checkout of nanoGPT."""
    rounds: int = 3
    processor: machine.Processor = "native"
    """Limit the processor to the instructions of a lesser one."""


def copy_of_nanogpt(checkout: str, folder: Path, text: str) -> Path:
    """Copy a checkout to `folder` and let its data/shakespeare_char/prepare.py prepare `text` there."""
    if not (Path(checkout) / "data/shakespeare_char/prepare.py").exists():
        raise UserError(f"--nanogpt={checkout} is not a checkout of nanoGPT: git clone https://github.com/karpathy/nanoGPT")
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
    data = folder / "data/shakespeare_char"
    (data / "input.txt").write_text(text)
    timed(["prepare.py"], data)
    return folder


@dataclass(frozen=True)
class StepsConfig(Comparison):
    steps: int = 30
    """Steps of each run, the first eight of which do not count."""


def steps(config: StepsConfig) -> None:
    """How fast is a step, compared with nanoGPT and with the machine? python bench/speed.py steps --nanogpt=PATH

    Trains nanoGPT's 10.65 M model (6 layers, 6 heads, 384 wide, 256 context, vocabulary 65, batch 8) and our own of the same
    architecture, on the same tokens. They take turns, each with its own train.py, compiled and not. (nanoGPT's README turns
    compiling off on a CPU.) Reads the step times that the programs report. Also times the matrix products of such a step alone,
    to show how close our step comes to them. Ours uses the precision that --dtype=auto chooses. Writes tokens_per_second.json.
    """
    machine.act_as(config.processor)
    dtype = in_fresh_process(chosen_dtype)
    products = f"the products of a step alone, {dtype}, tokens/s"
    with machine.workspace() as folder:
        text = np.random.default_rng(0).integers(VOCABULARY, size=2_000_000, dtype=np.uint8) + ord("!")
        peer = copy_of_nanogpt(config.nanogpt, folder / "nanogpt", text.tobytes().decode("ascii"))

        def speed(milliseconds: list[float]) -> float:
            return 1000 * BATCH * SEQ_LEN / statistics.median(milliseconds[8:])

        def ours(mode: str) -> float:
            batch = dict(tokens_per_update=BATCH * SEQ_LEN, micro_batch_size=BATCH, seq_len=SEQ_LEN, vocab_size=128)
            flags = SHAPE | batch | dict(architecture="gpt2", optimizer="adamw", lr=1e-3, device="cpu", compile=mode)
            tokens = peer / "data/shakespeare_char"
            lines = run_until(config.steps, "config/laptop.toml", tokens=tokens, steps=10 * config.steps, **flags)
            return speed([line["step_ms"] for line in lines if "step_ms" in line])  # the first step has none

        def nanogpt(mode: str) -> float:
            flags = dict(SHAPE, compile=mode == "on", dropout=0.0, batch_size=BATCH, block_size=SEQ_LEN, device="cpu")
            return speed(nanogpt_steps(peer, config.steps, machine.arguments("", **flags)[1:]))

        contenders = {products: lambda: in_fresh_process(products_alone, dtype)}
        for mode in ("on", "off"):
            contenders[f"ours, compile {mode}, tokens/s"] = functools.partial(ours, mode)
            contenders[f"nanoGPT, compile {mode}, tokens/s"] = functools.partial(nanogpt, mode)
        measured = in_turns(config.rounds, contenders)
    best = "ours, compile on, tokens/s"
    ratios = {f"{best} / {name}": ratio(measured[best], measured[name]) for name in measured if name.startswith("nanoGPT")}
    ratios[f"a step / its products, {best}"] = ratio(measured[products], measured[best])
    result = {name: spread(values) for name, values in measured.items()} | ratios
    print(machine.write("tokens_per_second", result, config.out))
    print(*(f"{name}: {value:.3f}" for name, value in ratios.items()), sep="\n")


def nanogpt_steps(checkout: Path, steps: int, flags: list[str]) -> list[float]:
    """Milliseconds of each step of nanoGPT's train.py, without the first, which includes an evaluation."""
    fixed = [f"--max_iters={steps}", "--log_interval=1", "--eval_iters=1", "--eval_interval=1000000"]
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *fixed, *flags]
    done = subprocess.run(command, cwd=checkout, env=machine.all_cores(), capture_output=True, text=True)
    milliseconds = [float(text) for text in re.findall(r"^iter \d+: .* time ([\d.]+)ms", done.stdout, re.MULTILINE)]
    if done.returncode or len(milliseconds) <= steps:
        raise RunError(f"nanoGPT's train.py ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return milliseconds[1:]


def chosen_dtype() -> str:
    """What --dtype=auto chooses here."""
    import torch

    from hardware import device

    return device.choose_dtype("auto", torch.device("cpu"))


def products_alone(dtype: str) -> float:
    """Tokens/s of a step's products with the weights alone: outputs, gradients of inputs and of weights."""
    host.prepare_torch()
    import torch

    width, rows, seconds = SHAPE["n_embd"], BATCH * SEQ_LEN, []
    shapes = [*[(width, width)] * 4, (width, 4 * width), (4 * width, width)] * SHAPE["n_layer"] + [(width, 128)]
    tensors = [[torch.randn(a, b).to(getattr(torch, dtype)) for a, b in ((rows, i), (o, i), (rows, o))] for i, o in shapes]
    for _ in range(12):
        began = time.perf_counter()
        for x, weight, grad in tensors:
            x @ weight.T, grad @ weight, grad.T @ x
        seconds.append(time.perf_counter() - began)
    return rows / statistics.median(seconds[2:])


@dataclass(frozen=True)
class LossConfig(Comparison):
    text: str = "input.txt"
    """tiny Shakespeare's input.txt, or another ASCII text."""


def loss(config: LossConfig) -> None:
    """How fast does training reach a loss? python bench/speed.py loss --nanogpt=PATH --text=input.txt

    Times nanoGPT's README run for a CPU and our config/shakespeare_char.toml in turns, on the same text, from start to end of
    the command. Then compares their losses, in nats per character, on the whole validation split (the last tenth of the text).
    Writes time_to_loss.json.
    """
    machine.act_as(config.processor)
    with machine.workspace() as folder:
        peer = copy_of_nanogpt(config.nanogpt, folder / "nanogpt", Path(config.text).read_text())
        tokens, runs = folder / "tokens", iter(range(10**6))
        timed(["prepare_data.py", Path(config.text).resolve(), f"--out={tokens}", "--tokenizer=bytes"])

        def ours() -> float:
            flags = [f"--tokens={tokens}", f"--out_dir={folder}", f"--name=run{next(runs)}"]
            return timed(["train.py", "config/shakespeare_char.toml", *flags])

        seconds = in_turns(config.rounds, {"ours, s": ours, "nanoGPT, s": lambda: timed(["train.py", *README_RUN], peer)})
        own = machine.metrics(folder / "run0")[-1]["val_bpb"] * math.log(2)  # a character is a byte here
        losses = {"ours": own, "nanoGPT": in_fresh_process(nanogpt_loss, peer)}
    faster = ratio(seconds["nanoGPT, s"], seconds["ours, s"])
    result = {"seconds": {name: spread(values) for name, values in seconds.items()}, "losses": losses, "times_faster": faster}
    print(machine.write("time_to_loss", result | {"target_loss": TARGET_LOSS}, config.out))
    print(f"losses {losses}, the target is {TARGET_LOSS}; {faster:.2f} times faster than nanoGPT")


def nanogpt_loss(checkout: Path) -> float:
    """The loss of nanoGPT's checkpoint over all windows of 64 characters of val.bin. nanoGPT itself loads it."""
    import torch

    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    sys.argv = ["train.py", *README_RUN, "--init_from=resume", "--eval_only=True", "--eval_iters=1"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        nanogpt = runpy.run_path("train.py", run_name="__main__")
    model, val = nanogpt["raw_model"].eval(), np.fromfile("data/shakespeare_char/val.bin", dtype=np.uint16)
    starts = np.arange(0, len(val) - 64, 64)
    windows = torch.from_numpy(val[starts[:, None] + np.arange(65)].astype(np.int64))
    with torch.no_grad():
        total = sum(model(part[:, :-1], part[:, 1:].contiguous())[1].item() * len(part) for part in windows.split(64))
    return total / len(windows)


if __name__ == "__main__":
    machine.choose(__doc__, steps=(StepsConfig, steps), loss=(LossConfig, loss))
