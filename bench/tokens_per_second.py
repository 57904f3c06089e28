"""How fast is training, compared with nanoGPT and with the machine? `python bench/tokens_per_second.py --nanogpt=PATH`

Trains nanoGPT's 10.65 M model (6 layers, 6 heads, 384 wide, 256 context, vocabulary 65, batch 8) and ours of the same
architecture on the same tokens, in turns, each by its own train.py. Reads the milliseconds of a step that the programs report,
without the first steps. Also measures the matrix products of such a step alone, to tell how near our step comes to them, and
the fastest product, to tell which share of it our model FLOPs reach. All of ours is in the precision that --dtype=auto chooses.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import machine
import settings
from common import cli, errors
from common.errors import RunError
from measure import copy_of_nanogpt, environment, in_fresh_process, in_turns, ratio, run_until, spread
from settings import ModelConfig

SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 384}
SEQ_LEN, BATCH, VOCABULARY = 256, 8, 65


@dataclass(frozen=True)
class TokensPerSecondConfig:
    nanogpt: str
    """A checkout of nanoGPT."""
    rounds: int = 3
    steps: int = 30
    """Steps of each run."""
    warmup_steps: int = 8
    """Steps of each run that are not counted."""
    processor: machine.Processor = "native"
    """Hold the processor to the instructions of a lesser one."""
    compile: bool = True
    """Also measure both programs compiled. (nanoGPT's README turns compiling off on a CPU.)"""


def main(config: TokensPerSecondConfig) -> None:
    """Measure all in turns. Print and write tokens/s, the shares of the peak and the ratios."""
    machine.act_as(config.processor)
    dtype = in_fresh_process(chosen_dtype)
    matmul, products = f"{dtype} matmul, FLOP/s", f"the products of a step alone, {dtype}, tokens/s"
    with tempfile.TemporaryDirectory() as folder:
        peer = copy_of_nanogpt(config.nanogpt, Path(folder) / "nanogpt", random_text(2_000_000))

        def speed(milliseconds: list[float]) -> float:
            return 1000 * BATCH * SEQ_LEN / statistics.median(milliseconds[config.warmup_steps :])

        def ours(mode: str) -> float:
            return speed(our_steps(peer / "data/shakespeare_char", config.steps, mode))

        def nanogpt(mode: str) -> float:
            return speed(nanogpt_steps(peer, config.steps, mode))

        contenders = {
            matmul: lambda: in_fresh_process(matmul_peak, dtype, "cpu"),
            products: lambda: in_fresh_process(products_alone, dtype),
        }
        for mode in ("on", "off") if config.compile else ("off",):
            contenders[f"ours, compile {mode}, tokens/s"] = lambda mode=mode: ours(mode)
            contenders[f"nanoGPT, compile {mode}, tokens/s"] = lambda mode=mode: nanogpt(mode)
        measured = in_turns(config.rounds, contenders)

    flops = in_fresh_process(flops_of_a_token)
    peaks = measured[matmul]
    best = f"ours, compile {'on' if config.compile else 'off'}, tokens/s"
    ratios = {f"{best} / {name}": ratio(measured[best], measured[name]) for name in contenders if name.startswith("nanoGPT")}
    shares = {
        f"{name}, share of the matmul peak": flops * ratio(measured[name], peaks)
        for name in contenders
        if name.startswith("ours")
    }
    times = {f"a step / its products, {best}": ratio(measured[products], measured[best])}
    result = {name: spread(values) for name, values in measured.items()} | shares | ratios | times | {"flops_per_token": flops}
    print(machine.write("tokens_per_second", result))
    for name, value in shares.items():
        print(f"{name}: {value:.1%}")
    for name, value in (ratios | times).items():
        print(f"{name}: {value:.2f}")


def random_text(characters: int) -> str:
    """Random text of VOCABULARY different characters."""
    import numpy as np

    ids = np.random.default_rng(0).integers(VOCABULARY, size=characters, dtype=np.uint8) + ord("!")
    return ids.tobytes().decode("ascii")


def our_steps(tokens: Path, steps: int, mode: str) -> list[float]:
    """Milliseconds of each step of our train.py."""
    batch = {"tokens_per_update": BATCH * SEQ_LEN, "micro_batch_size": BATCH, "seq_len": SEQ_LEN, "vocab_size": 128}
    flags = {"architecture": "gpt2", "optimizer": "adamw", "lr": 1e-3, "device": "cpu", "compile": mode}
    lines = run_until(steps, "config/laptop.toml", tokens=tokens, steps=10 * steps, **SHAPE, **batch, **flags)[1]
    return [line["step_ms"] for line in lines if "step_ms" in line]  # the first step has none


def nanogpt_steps(checkout: Path, steps: int, mode: str) -> list[float]:
    """Milliseconds of each step of nanoGPT's train.py, without the first, which includes an evaluation."""
    shape = [f"--{name}={value}" for name, value in SHAPE.items()]
    batch = [f"--batch_size={BATCH}", f"--block_size={SEQ_LEN}", f"--max_iters={steps}", "--log_interval=1", "--dropout=0.0"]
    flags = ["--device=cpu", f"--compile={mode == 'on'}", "--eval_iters=1", "--eval_interval=1000000"]
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *shape, *batch, *flags]
    done = subprocess.run(command, cwd=checkout, env=environment(), capture_output=True, text=True)
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


if __name__ == "__main__":
    with errors.user_errors():
        main(cli.parse(TokensPerSecondConfig, sys.argv[1:], __doc__))
