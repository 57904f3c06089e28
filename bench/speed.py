"""How fast is training, compared with other trainers and with the machine?

python bench/speed.py steps|c|portable [--flag=value ...]
"""

import functools
import itertools
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
from audit import text
from audit_trainers import HuggingFace, Job, LitGPT, NanoGPT, Trainer
from forks import in_fresh_process
from lockstep.common.errors import RunError, UserError
from lockstep.hardware import host
from machine import in_turns, ratio, spread, step_ms

SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 384}
SEQ_LEN, BATCH = 256, 8
STEPS = 30  # updates per run; the first ten do not count

# Of `portable`: nanoGPT's model, and what every run has.
GPT2 = dict(architecture="gpt2", n_layer=6, n_head=6, n_embd=384, seq_len=256, vocab_size=128, optimizer="adamw", lr=1e-3)
ONE_THREAD = dict(
    preset="config/laptop.toml", dtype="float32", compile="off", threads=1, device="cpu", eval_every=0, save_every=0
)


@dataclass(frozen=True)
class StepsConfig(machine.Out):
    nanogpt: str = ""
    """A checkout of nanoGPT."""
    litgpt: str = ""
    """A checkout of litgpt."""
    litgpt_python: str = sys.executable
    """A Python interpreter with litgpt's dependencies."""
    dtypes: str = "float32,bfloat16"
    rounds: int = 5
    processor: machine.Processor = "native"
    """Limit the processor to the instructions of an older one."""


def steps(config: StepsConfig) -> None:
    """How fast is an update, compared with other trainers and with the machine? python bench/speed.py steps --nanogpt=PATH ...

    Each contender trains with its own command, in turns. Models have 6 layers, 6 heads, a width of 384 and a context of 256. An
    update has 8 sequences, with AdamW and without dropout, and uses one thread per core. Ours, nanoGPT and the Trainer train a
    GPT-2 with 256 tokens. litgpt's model has rotary positions and an untied output layer. All have the same 10.6 million
    weights in their blocks. Each program prints the time of its updates. nanoGPT does not support bfloat16 on a CPU. Also
    measures an update's matmuls alone. Writes tokens_per_second.json.
    """
    machine.act_as(config.processor)
    os.environ["OMP_NUM_THREADS"] = str(host.cores())
    peers = {"nanoGPT": (NanoGPT, config.nanogpt, sys.executable), "litgpt": (LitGPT, config.litgpt, config.litgpt_python)}
    peers = {name: peer for name, peer in peers.items() if peer[1]}
    peers["transformers' Trainer"] = (HuggingFace, str(machine.ROOT), sys.executable)
    for kind, path, _ in peers.values():
        if not Path(path, kind.proof).exists():
            raise UserError(f"{path} is not a checkout of {kind.repository}")
    with machine.workspace() as folder:
        contenders, places, versions = {}, iter(range(10**6)), {}
        machine.make_tokens(folder / "tokens", 400_000, 256)
        for dtype, mode in itertools.product(config.dtypes.split(","), ("on", "off")):
            words = f"{dtype}, {'compiled' if mode == 'on' else 'eager'}"
            contenders[f"ours, {words}"] = functools.partial(our_speed, folder / "tokens", dtype, mode)
            for name, (kind, path, python) in peers.items():
                if (name, dtype) != ("nanoGPT", "bfloat16"):
                    job = Job(**SHAPE, length=SEQ_LEN, micro=BATCH, batch=BATCH, steps=STEPS, save=10**6, dropout=0.0)
                    job, work = replace(job, dtype=dtype, compile=mode == "on"), folder / f"peer{next(places)}"
                    work.mkdir()
                    peer = kind(Path(path).resolve(), python, work, text(), job)
                    contenders[f"{name}, {words}"] = functools.partial(peer_speed, peer)
                    versions[name] = {"commit": peer.commit()} | peer.versions() if kind.repository else peer.versions()
        for dtype in config.dtypes.split(","):
            matmuls = functools.partial(in_fresh_process, products_alone, dtype)
            contenders[f"only the matmuls with its weights, {dtype}"] = matmuls
        measured = in_turns(config.rounds, contenders)
    ratios = {}
    for name in measured:
        _, dtype, *mode = name.split(", ")
        ours = f"ours, {dtype}, {(mode or ['compiled'])[0]}"
        if not name.startswith("ours") and ours in measured:
            ratios[f"{ours} / {name}"] = ratio(measured[ours], measured[name])
    ratios = dict(sorted(ratios.items(), key=lambda pair: pair[1]))  # the comparisons that we lose come first
    result = {"tokens/s": {name: spread(values) for name, values in measured.items()}, "ratios": ratios, "others": versions}
    print(machine.write("tokens_per_second", result, config.out))
    print(*(f"{value:.2f}  {name}" for name, value in ratios.items()), sep="\n")


def our_speed(tokens: Path, dtype: str, mode: str) -> float:
    """Our tokens/s."""
    flags = SHAPE | dict(architecture="gpt2", optimizer="adamw", lr=1e-3, vocab_size=256, seq_len=SEQ_LEN, dropout=0.0)
    flags |= dict(tokens_per_update=BATCH * SEQ_LEN, micro_batch_size=BATCH, device="cpu", dtype=dtype, compile=mode)
    return tokens_per_second(step_ms("config/laptop.toml", tokens=tokens, steps=STEPS, **flags))


def peer_speed(peer: Trainer) -> float:
    """Another trainer's tokens/s. Raises RunError with its last output if it fails."""
    run = peer.work / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    packages = os.pathsep.join(peer.packages)
    variables = peer.variables | ({"PYTHONPATH": packages} if packages else {})
    environment = machine.environment(**variables, CUDA_VISIBLE_DEVICES="")
    command = [str(part) for part in peer.command(run, 1, False)]
    done = subprocess.run(command, cwd=peer.folder, env=environment, capture_output=True, text=True)
    milliseconds = [float(text) for text in re.findall(peer.step_ms, done.stdout, re.MULTILINE)]
    if done.returncode or len(milliseconds) < peer.job.steps - 1:
        raise RunError(f"{peer.title} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return tokens_per_second(milliseconds)


def tokens_per_second(milliseconds: list[float]) -> float:
    """The speed of the updates after the first ten."""
    return 1000 * BATCH * SEQ_LEN / statistics.median(milliseconds[10:])


def products_alone(dtype: str) -> float:
    """Tokens/s of a step's matmuls with the weights alone: outputs, gradients of inputs and gradients of weights."""
    host.prepare_torch()
    import torch

    from lockstep.numerics import native

    width, rows, seconds = SHAPE["n_embd"], BATCH * SEQ_LEN, []
    shapes = [*[(width, width)] * 4, (width, 4 * width), (4 * width, width)] * SHAPE["n_layer"] + [(width, 256)]
    tensors = [[torch.randn(a, b).to(getattr(torch, dtype)) for a, b in ((rows, i), (o, i), (rows, o))] for i, o in shapes]
    for _ in range(12):
        began = time.perf_counter()
        for x, weight, grad in tensors:
            native.linear(x, weight), native.linear(grad, weight.T), native.sum_of_rows(grad, x)
        seconds.append(time.perf_counter() - began)
    return rows / statistics.median(seconds[2:])


@dataclass(frozen=True)
class CConfig(machine.Out):
    llmc: str = "llm.c"
    """A checkout of llm.c."""
    rounds: int = 5


def c(config: CConfig) -> None:
    """How fast is an update of GPT-2 124M, compared with llm.c's train_gpt2.c? python bench/speed.py c --llmc=PATH

    An update has 4 sequences, as in train_gpt2.c, of its 64 tokens and of 256. llm.c is built with its flags (-Ofast
    -march=native -fopenmp) and starts from random weights. It prints the time of each update. In turns, with one thread per
    core. Writes llmc.json.
    """
    source = Path(config.llmc, "train_gpt2.c")
    if not source.exists():
        raise UserError(f"--llmc={config.llmc} is not a checkout of karpathy/llm.c")
    os.environ["OMP_NUM_THREADS"] = str(host.cores())
    times = {}
    with machine.workspace() as folder:
        machine.make_tokens(folder / "tokens", 400_000, 50257)
        for length in (64, 256):
            build_llmc(source, folder / f"llmc{length}", folder / "tokens", length)
            shape = dict(n_layer=12, n_head=12, n_embd=768, seq_len=length, micro_batch_size=4, tokens_per_update=4 * length)
            shape |= dict(architecture="gpt2", optimizer="adamw", lr=1e-4, vocab_size=50304, tokens=folder / "tokens")
            contenders = {"llm.c": functools.partial(llmc_ms, folder / f"llmc{length}")}
            for dtype, mode in itertools.product(("float32", "bfloat16"), ("off", "on")):
                flags = shape | dict(dtype=dtype, compile=mode, steps=8, device="cpu")
                name = f"ours, {dtype}, {'compiled' if mode == 'on' else 'eager'}"
                contenders[name] = functools.partial(median_ms, flags)
            times[f"4 x {length}"] = in_turns(config.rounds, contenders)
    found = {size: {name: spread(values) for name, values in measured.items()} for size, measured in times.items()}
    ratios = {size: {name: ratio(measured["llm.c"], measured[name]) for name in measured} for size, measured in times.items()}
    compiler = machine.output_of("cc", "--version").split("\n")[0]
    commit = machine.output_of("git", "-C", config.llmc, "rev-parse", "HEAD")
    result = {"update_ms": found, "times as fast as llm.c": ratios, "llm.c": {"commit": commit, "compiler": compiler}}
    print(machine.write("llmc", result, config.out), ratios, sep="\n")


def build_llmc(source: Path, work: Path, tokens: Path, length: int) -> None:
    """Build train_gpt2.c for sequences of `length` tokens, and write random weights and tokens where it looks for them."""
    import numpy as np

    code, data = source.read_text(), work / "dev" / "data" / "tinyshakespeare"
    if code.count("int T = 64;") != 1:
        raise UserError(f"{source} sets its sequence length in another way than commit f1e2ace")
    data.mkdir(parents=True)
    for split in ("train", "val"):
        (data / f"tiny_shakespeare_{split}.bin").symlink_to(tokens / f"made_{split}_000000.bin")
    (work / "train_gpt2.c").write_text(code.replace("int T = 64;", f"int T = {length};"))
    flags = ["-Ofast", "-march=native", "-fopenmp", "-DOMP", f"-I{source.resolve().parent}"]
    subprocess.run(["cc", *flags, "train_gpt2.c", "-lm", "-o", "train_gpt2"], cwd=work, check=True, stderr=subprocess.DEVNULL)
    layers, width, vocab = 12, 768, 50304
    count = (vocab + 1024) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    header = np.zeros(256, np.int32)
    header[:8] = 20240326, 3, 1024, 50257, layers, 12, width, vocab
    with (work / "gpt2_124M.bin").open("wb") as file:
        header.tofile(file)
        (0.02 * np.random.default_rng(0).standard_normal(count, np.float32)).tofile(file)


def llmc_ms(work: Path) -> float:
    """The median time of llm.c's updates 2 to 5. It is stopped then, because it would evaluate and sample."""
    found = []
    with subprocess.Popen(["./train_gpt2"], cwd=work, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            found += map(float, re.findall(r"took ([\d.]+) ms", line))
            if len(found) == 5:
                process.kill()
    if len(found) < 5:
        raise RunError(f"{work / 'train_gpt2'} ended with {process.returncode}")
    return statistics.median(found[1:])


def median_ms(flags: dict) -> float:
    """The median time of our updates, without the first three."""
    return statistics.median(step_ms("config/laptop.toml", **flags)[2:])


@dataclass(frozen=True)
class PortableConfig(machine.Options):
    rounds: int = 5


def portable(config: PortableConfig) -> None:
    """What does --numerics=portable cost? python bench/speed.py portable

    Compares the CPU time of an update with native float32, on one rank and one thread, in turns. Uses the laptop preset, and
    nanoGPT's 10.65 M model with 16 sequences per update. CPU time counts only our process, but other programs still slow it
    down by sharing memory and caches. Writes portable_speed.json.
    """
    machine.prepare_tokens(config.tokens)
    result = {}
    with machine.workspace() as folder:
        machine.make_tokens(folder / "bytes", 2_000_000, 65)
        gpt2 = GPT2 | dict(tokens=folder / "bytes", tokens_per_update=4096)
        for name, flags in {"laptop": dict(tokens=config.tokens), "10.65 M": gpt2}.items():
            flags |= ONE_THREAD | dict(out_dir=folder, preset="config/laptop.toml")
            contenders = {kind: functools.partial(cpu_seconds, flags | dict(numerics=kind)) for kind in ("native", "portable")}
            seconds = in_turns(config.rounds, contenders)
            costs = ratio(seconds["portable"], seconds["native"])
            result[name] = {kind: spread(values) for kind, values in seconds.items()} | {"ratio": costs}
            print(f"{name}: portable takes {costs:.2f} times native's CPU time")
    print(machine.write("portable_speed", result, config.out))


def cpu_seconds(flags: dict, updates: int = 4) -> float:
    """The CPU time of an update: what a run of some more updates takes beyond a run of one."""
    used = [resource.getrusage(resource.RUSAGE_CHILDREN)]
    for steps in (1, 1 + updates):
        machine.run(**flags, steps=steps, resume="off", name=f"{Path(flags['tokens']).name}-{flags['numerics']}-{steps}")
        used.append(resource.getrusage(resource.RUSAGE_CHILDREN))
    before, one, more = (usage.ru_utime + usage.ru_stime for usage in used)
    return (more - one - (one - before)) / updates


if __name__ == "__main__":
    machine.choose(__doc__, steps=(StepsConfig, steps), c=(CConfig, c), portable=(PortableConfig, portable))
