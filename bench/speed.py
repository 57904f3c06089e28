"""How fast is training, compared with nanoGPT and with the machine?

python bench/speed.py steps|loss|loader [--flag=value ...]
"""

import contextlib
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
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import numpy as np

import settings
from common.errors import RunError, UserError
from machine import in_fresh_process, in_turns, ratio, run_until, spread, timed
from settings import ModelConfig

SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 384}
SEQ_LEN, BATCH, VOCABULARY = 256, 8, 65
README_RUN = shlex.split(
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)


@dataclass(frozen=True)
class Comparison:
    nanogpt: str
    """A checkout of nanoGPT."""
    rounds: int = 3
    processor: machine.Processor = "native"
    """Hold the processor to the instructions of a lesser one."""
    out: str = str(machine.RESULTS)
    """Directory of the results."""


def copy_of_nanogpt(checkout: str, folder: Path, text: str) -> Path:
    """Copy a checkout to `folder` and let its data/shakespeare_char/prepare.py prepare `text` there."""
    if not (Path(checkout) / "data/shakespeare_char/prepare.py").exists():
        raise UserError(f"--nanogpt={checkout} is no checkout of nanoGPT: git clone https://github.com/karpathy/nanoGPT")
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
    data = folder / "data/shakespeare_char"
    (data / "input.txt").write_text(text)
    timed(["prepare.py"], data)
    return folder


def nanogpt_train(checkout: Path, *flags: str) -> dict:
    """Run nanoGPT's train.py in this process. Returns its global variables and functions."""
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    sys.argv = ["train.py", *flags]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return runpy.run_path("train.py", run_name="__main__")


# ---------------------------------------------------------------------------------------------------------------------
# Steps


@dataclass(frozen=True)
class StepsConfig(Comparison):
    steps: int = 30
    """Steps of each run."""
    warmup_steps: int = 8
    """Steps of each run that are not counted."""
    compile: bool = True
    """Also measure both programs compiled. (nanoGPT's README turns compiling off on a CPU.)"""


def steps(config: StepsConfig) -> None:
    """How fast is a step, compared with nanoGPT and with the machine? python bench/speed.py steps --nanogpt=PATH

    Trains nanoGPT's 10.65 M model (6 layers, 6 heads, 384 wide, 256 context, vocabulary 65, batch 8) and ours of the same
    architecture on the same tokens, in turns, each by its own train.py. Reads the milliseconds of a step that the programs
    report, without the first steps. Also measures the matrix products of such a step alone, to tell how near our step comes to
    them, and the fastest product, to tell which share of it our model FLOPs reach. All of ours is in the precision that
    --dtype=auto chooses. Writes tokens_per_second.json.
    """
    machine.act_as(config.processor)
    dtype, flops = in_fresh_process(chosen_dtype), in_fresh_process(flops_of_a_token)
    matmul, products = f"{dtype} matmul, FLOP/s", f"the products of a step alone, {dtype}, tokens/s"
    with tempfile.TemporaryDirectory() as folder:
        peer = copy_of_nanogpt(config.nanogpt, Path(folder) / "nanogpt", random_text(2_000_000))

        def speed(measure: Callable, *arguments) -> float:
            milliseconds = measure(*arguments)[config.warmup_steps :]
            return 1000 * BATCH * SEQ_LEN / statistics.median(milliseconds)

        def nanogpt(mode: str) -> list[float]:
            flags = [f"--{name}={value}" for name, value in SHAPE.items()] + [f"--compile={mode == 'on'}", "--dropout=0.0"]
            return nanogpt_steps(
                peer, config.steps, [*flags, f"--batch_size={BATCH}", f"--block_size={SEQ_LEN}", "--device=cpu"]
            )

        contenders = {
            matmul: lambda: in_fresh_process(matmul_peak, dtype, "cpu"),
            products: lambda: in_fresh_process(products_alone, dtype),
        }
        modes, tokens = ("on", "off") if config.compile else ("off",), peer / "data/shakespeare_char"
        for mode in modes:
            contenders[f"ours, compile {mode}, tokens/s"] = lambda mode=mode: speed(our_steps, tokens, config.steps, mode)
            contenders[f"nanoGPT, compile {mode}, tokens/s"] = lambda mode=mode: speed(nanogpt, mode)
        measured = in_turns(config.rounds, contenders)
    best = f"ours, compile {modes[0]}, tokens/s"
    ratios = {f"{best} / {name}": ratio(measured[best], measured[name]) for name in measured if name.startswith("nanoGPT")}
    ratios[f"a step / its products, {best}"] = ratio(measured[products], measured[best])
    for name in (name for name in measured if name.startswith("ours")):
        ratios[f"{name}, share of the matmul peak"] = flops * ratio(measured[name], measured[matmul])
    result = {name: spread(values) for name, values in measured.items()} | ratios | {"flops_per_token": flops}
    print(
        machine.write("tokens_per_second", result, Path(config.out)),
        *(f"{name}: {value:.3f}" for name, value in ratios.items()),
        sep="\n",
    )


def random_text(characters: int) -> str:
    """Random text of VOCABULARY different characters."""
    ids = np.random.default_rng(0).integers(VOCABULARY, size=characters, dtype=np.uint8) + ord("!")
    return ids.tobytes().decode("ascii")


def our_steps(tokens: Path, steps: int, mode: str) -> list[float]:
    """Milliseconds of each step of our train.py."""
    batch = {"tokens_per_update": BATCH * SEQ_LEN, "micro_batch_size": BATCH, "seq_len": SEQ_LEN, "vocab_size": 128}
    flags = {"architecture": "gpt2", "optimizer": "adamw", "lr": 1e-3, "device": "cpu", "compile": mode}
    lines = run_until(steps, "config/laptop.toml", tokens=tokens, steps=10 * steps, **SHAPE, **batch, **flags)
    return [line["step_ms"] for line in lines if "step_ms" in line]  # the first step has none


def nanogpt_steps(checkout: Path, steps: int, flags: list[str]) -> list[float]:
    """Milliseconds of each step of nanoGPT's train.py, without the first, which includes an evaluation."""
    fixed = [f"--max_iters={steps}", "--log_interval=1", "--eval_iters=1", "--eval_interval=1000000"]
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *fixed, *flags]
    done = subprocess.run(command, cwd=checkout, env=machine.all_cores(), capture_output=True, text=True)
    milliseconds = [float(text) for text in re.findall(r"^iter \d+: .* time ([\d.]+)ms", done.stdout, re.MULTILINE)]
    if done.returncode or len(milliseconds) <= steps:
        raise RunError(f"nanoGPT's train.py ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return milliseconds[1:]


def matmul_peak(dtype: str, device: str) -> float:
    """FLOP/s of products of two square matrices of the best size, sustained for a second, because training must sustain it."""
    import torch

    best = 0.0
    for size in (1024, 2048, 4096) if device == "cpu" else (4096, 8192, 16384):
        a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
        a @ b
        products, began = 0, time.perf_counter()
        while (seconds := time.perf_counter() - began) < 1 or not products:
            a @ b
            if device != "cpu":
                torch.cuda.synchronize()
            products += 1
        best = max(best, products * 2 * size**3 / seconds)
    return best


def chosen_dtype() -> str:
    """What --dtype=auto is here."""
    import torch

    from hardware import device

    return device.choose_dtype("auto", torch.device("cpu"))


def products_alone(dtype: str) -> float:
    """Tokens/s of the products of a step with the weights and nothing else: outputs, gradients of inputs and of weights."""
    import torch

    width, rows = SHAPE["n_embd"], BATCH * SEQ_LEN
    shapes = [*[(width, width)] * 4, (width, 4 * width), (4 * width, width)] * SHAPE["n_layer"] + [(width, 128)]
    kind, seconds = getattr(torch, dtype), []
    tensors = [[torch.randn(a, b).to(kind) for a, b in ((rows, i), (o, i), (rows, o))] for i, o in shapes]
    for _ in range(12):
        began = time.perf_counter()
        for x, weight, grad in tensors:
            x @ weight.T, grad @ weight, grad.T @ x
        seconds.append(time.perf_counter() - began)
    return rows / statistics.median(seconds[2:])


def flops_of_a_token() -> int:
    """FLOPs of our model for one token, forward and backward."""
    from hardware.footprint import flops_per_token

    return flops_per_token(settings.resolve_model(ModelConfig("gpt2", **SHAPE, seq_len=SEQ_LEN), VOCABULARY))


# ---------------------------------------------------------------------------------------------------------------------
# The time to a loss


@dataclass(frozen=True)
class LossConfig(Comparison):
    text: str = "input.txt"
    """tiny Shakespeare's input.txt, or another ASCII text."""
    target_loss: float = 1.8857
    """The loss that our run must reach, in nats a character."""


def loss(config: LossConfig) -> None:
    """How fast does training reach a loss? python bench/speed.py loss --nanogpt=PATH --text=input.txt

    Times nanoGPT's README run for a CPU and our config/shakespeare_char.toml in turns, on the same text, from the command to
    the end. Then compares their losses in nats a character on the whole validation split, which is the last tenth of the text.
    Writes time_to_loss.json.
    """
    machine.act_as(config.processor)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        peer = copy_of_nanogpt(config.nanogpt, folder / "nanogpt", Path(config.text).read_text())
        tokens, runs = folder / "tokens", iter(range(10**6))
        timed(["prepare_data.py", Path(config.text).resolve(), f"--out={tokens}", "--tokenizer=bytes"], machine.ROOT)

        def ours() -> float:
            flags = [f"--tokens={tokens}", f"--out_dir={folder}", f"--name=run{next(runs)}"]
            return timed(["train.py", "config/shakespeare_char.toml", *flags], machine.ROOT)

        seconds = in_turns(config.rounds, {"ours, s": ours, "nanoGPT, s": lambda: timed(["train.py", *README_RUN], peer)})
        results = {"ours": our_result(folder / "run0"), "nanoGPT": in_fresh_process(nanogpt_result, peer)}
    faster, reached = ratio(seconds["nanoGPT, s"], seconds["ours, s"]), results["ours"]["loss"] <= config.target_loss
    result = {"seconds": {name: spread(values) for name, values in seconds.items()}, "at_the_end": results}
    result |= {"target_loss": config.target_loss, "reached": reached, "times_faster": faster}
    print(machine.write("time_to_loss", result, Path(config.out)))
    for name, row in results.items():
        print(f"{name}: loss {row['loss']:.4f} a character, {row['parameters']:,} parameters")
    print(f"target {config.target_loss} {'reached' if reached else 'MISSED'}, {faster:.2f} times faster than nanoGPT")


def our_result(run: Path) -> dict:
    """The last validation loss of our run and its number of weights. A character is a byte here."""
    from safetensors import safe_open

    with safe_open(run / "checkpoints/latest/model.safetensors", "pt") as weights:
        parameters = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return {"loss": machine.metrics(run)[-1]["val_bpb"] * math.log(2), "parameters": parameters}


def nanogpt_result(checkout: Path) -> dict:
    """The loss of nanoGPT's checkpoint over all windows of 64 characters of val.bin. nanoGPT itself loads it."""
    import torch

    nanogpt = nanogpt_train(checkout, *README_RUN, "--init_from=resume", "--eval_only=True", "--eval_iters=1")
    model, val = nanogpt["raw_model"].eval(), np.fromfile("data/shakespeare_char/val.bin", dtype=np.uint16)
    starts = np.arange(0, len(val) - 64, 64)
    windows = torch.from_numpy(val[starts[:, None] + np.arange(65)].astype(np.int64))
    with torch.no_grad():
        total = sum(model(part[:, :-1], part[:, 1:].contiguous())[1].item() * len(part) for part in windows.split(64))
    return {"loss": total / len(windows), "parameters": sum(p.numel() for p in model.parameters())}


# ---------------------------------------------------------------------------------------------------------------------
# The loader


@dataclass(frozen=True)
class LoaderConfig(Comparison):
    nanogpt: str = ""
    """A checkout of nanoGPT (empty: leave nanoGPT out)."""
    seconds: float = 2.0
    """Duration of each measurement."""
    batch_size: int = 12
    seq_len: int = 1024


def loader(config: LoaderConfig) -> None:
    """How fast is the data loader, compared with nanoGPT's? python bench/speed.py loader --nanogpt=PATH

    Tokens/s of `data.Batches.batch`, of the `Prefetcher` and of nanoGPT's get_batch on the same tokens, in turns. Writes
    loader.json. bench/scale.py has the time to open 15 trillion tokens and to read a batch of them.
    """
    machine.act_as(config.processor)
    with tempfile.TemporaryDirectory() as folder:
        tokens, direct = Path(folder) / "tokens", "ours, Batches.batch, tokens/s"
        tokens.mkdir()
        ids = np.random.default_rng(0).integers(50257, size=10_000_000, dtype=np.uint16)
        for split, part in (("train", ids), ("val", ids[:100_000])):  # both loaders read nanoGPT's files
            part.tofile(tokens / f"{split}.bin")
        contenders = {
            direct: lambda: in_fresh_process(our_speed, tokens, config, False),
            "ours, Prefetcher, tokens/s": lambda: in_fresh_process(our_speed, tokens, config, True),
        }
        if config.nanogpt:
            peer = copy_of_nanogpt(config.nanogpt, Path(folder) / "nanogpt", "text")
            contenders["nanoGPT, get_batch, tokens/s"] = lambda: in_fresh_process(nanogpt_speed, peer, tokens, config)
        measured = in_turns(config.rounds, contenders)
    result = {name: spread(values) for name, values in measured.items()}
    if config.nanogpt:
        result["times nanoGPT"] = ratio(measured[direct], measured["nanoGPT, get_batch, tokens/s"])
        print(f"Batches.batch / nanoGPT's get_batch: {result['times nanoGPT']:.2f}")
    print(machine.write("loader", result, Path(config.out)))


def calls_per_second(call: Callable[[], object], seconds: float) -> float:
    """How often a second `call` can be made. A tenth of the time goes to warming up first."""
    for share in (0.1, 1.0):
        calls, began = 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < share * seconds:
            call()
            calls += 1
    return calls / passed


def our_speed(directory: Path, config: LoaderConfig, prefetch: bool) -> float:
    """Tokens/s of our loader with 40 micro-batches an update, called directly or through the prefetching thread."""
    import torch

    import data

    mixture, size = data.open_mixture(str(directory)), config.batch_size
    batches = data.Batches(mixture.streams("train"), mixture.shares, config.seq_len, 40 * size, size, seed=1)
    upcoming = ((step, micro_batch) for step in range(10**9) for micro_batch in range(40))
    prefetcher = data.Prefetcher(batches, upcoming, torch.device("cpu")) if prefetch else None
    call = prefetcher.next if prefetch else lambda: torch.from_numpy(batches.batch(*next(upcoming)))
    speed = calls_per_second(call, config.seconds) * config.batch_size * config.seq_len
    if prefetch:
        prefetcher.close()
    return speed


def nanogpt_speed(checkout: Path, directory: Path, config: LoaderConfig) -> float:
    """Tokens/s of the get_batch that nanoGPT's train.py defines."""
    flags = ["--n_layer=1", "--n_head=1", "--n_embd=8", f"--block_size={config.seq_len}", "--batch_size=1", "--device=cpu"]
    flags += [f"--dataset={directory}", f"--out_dir={directory}/out", "--compile=False", "--eval_only=True", "--eval_iters=1"]
    get_batch = nanogpt_train(checkout, *flags)["get_batch"]
    get_batch.__globals__["batch_size"] = config.batch_size  # set late: the script has evaluated its model with batches of 1
    return calls_per_second(lambda: get_batch("train"), config.seconds) * config.batch_size * config.seq_len


if __name__ == "__main__":
    machine.choose(__doc__, steps=(StepsConfig, steps), loss=(LossConfig, loss), loader=(LoaderConfig, loader))
