"""What a GPU has to answer before a long run, in nine minutes: is a run the same there, how fast is it, and how much memory?

python bench/gpu.py --nanogpt=PATH

The questions come in order of importance, each with a time limit of its own, and each answer is written to gpu.json at once.
First come the ones about bits, all at the same time; then the ones about speed, one after the other.
When the minutes are over, repeat the command to continue: it does not repeat answers for the same GPU, torch and code. One GPU
cannot show what happens between GPUs: NCCL under ddp and fsdp, and exact's exchange of integers.

Needs no network. An image that has PyTorch, transformers and matplotlib may still lack tyro, wandb and msgspec. This script
does without the first two and what they need; msgspec has no dependencies, so carry its wheel:
`pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 msgspec`.
--tiny=true rehearses everything on a CPU with models of thirty thousand parameters; its figures mean nothing.

Exit status: 0 all questions passed, 1 some failed, 2 no GPU, 75 some are left.
"""

import argparse
import hashlib
import json
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import forks
import gpu_probe
import same
from lockstep import settings
from lockstep.common import errors
from lockstep.common.errors import EX_TEMPFAIL, RunError, UserError
from lockstep.common.files import publish_text
from lockstep.hardware import footprint

MINUTES = 9.0  # for all questions, whose time limits add up to this
LEAST = 0.4  # a question is asked if this share of its time is left
UPDATES = 22  # in a timed run
# A killed and resumed run must also be the same with these settings: name, number of processes, settings.
VARIANTS = {
    "plain": (1, dict(compile="off")),
    "compiled": (1, dict(compile="on")),
    "document": (1, dict(attend="document", compile="on")),
    "float16": (1, dict(dtype="float16", compile="off")),
    "muon": (1, dict(optimizer="muon", compile="on")),
    "recomputed": (1, dict(architecture="llama", activation_checkpointing=True, dropout=0.1, compile="on")),
    "ddp": (2, dict(compile="on")),
    "overlap": (2, dict(strategy="scratch_overlap", compile="off")),
}
TITLES = {
    "portable": "Does --numerics=portable give the GPU the bits that CPUs have?",
    "exact": "Does --strategy=exact give one sha256 on 1 and on 2 processes?",
    "exact_compiled": "The same compiled?",
    **{f"resume_{name}": f"Is a killed and resumed run the same? ({name})" for name in VARIANTS},
    "commands": "Do sample.py and evaluate.py run there?",
    "peak": "How fast is the fastest matmul?",
    "gpt2": "gpt2_124m as a user starts it: speed and memory",
    "gpt2_any_order": "gpt2_124m with deterministic = false",
    "llama": "llama_1.3b as a user starts it: speed and memory",
    "nanogpt": "nanoGPT on the same model, with its own settings",
}
SMALL = dict(architecture="qwen3", n_layer=4, n_head=4, n_embd=256, seq_len=256, tokens_per_update=16384, lr=1e-3)
SMALL |= dict(threads=1, optimizer="adamw", schedule="constant", warmup_steps=0, micro_batch_size=8, steps=12, save_every=4)
# Settings of every model under --tiny.
TINY = dict(compile="off", n_layer=2, n_head=2, n_embd=32, seq_len=32, d_ff=64, tokens_per_update=256)
TINY |= dict(micro_batch_size=2, threads=1)


class Impossible(Exception):
    """This machine cannot answer the question."""


@dataclass
class Bench:
    """What the questions know: the machine, and the answers so far."""

    answers: dict[str, dict]
    datasheet: float | None  # FLOP/s of the GPU
    folder: Path
    device: str
    tiny: bool
    deadline: float
    scale: float  # of the time limits
    nanogpt: str

    @property
    def bytes(self) -> Path:
        """The tokens of `make same`."""
        return self.folder / "bytes"

    def limit(self, seconds: float) -> float:
        """How long a question may take that needs `seconds` on an H100; 0 if too little time is left."""
        left, wanted = self.deadline - time.monotonic(), seconds * self.scale
        return min(left, wanted) if left > LEAST * wanted else 0.0

    def at(self, name: str) -> Path:
        """An empty folder for a run."""
        (path := self.folder / "work" / name).mkdir()
        return path

    def config(self, preset: str = "laptop", **changes) -> settings.Config:
        """A preset with this device, made-up tokens and a line for every update."""
        flags = {"tokens": str(self.folder / "tokens"), "device": self.device, "log_every": 1, "resume": "auto"} | changes
        if self.tiny:
            flags |= TINY
        return settings.replace(settings.read_preset(machine.ROOT / f"config/{preset}.toml"), **flags)

    def small(self, **changes) -> settings.Config:
        """A model of three million parameters, for questions about bits."""
        return self.config(**SMALL | dict(tokens=str(self.bytes)) | changes)


# ---------------------------------------------------------------------------------------------------------------------
# The questions. Each returns its figures and `words`, the conclusion, and raises RunError if a promise is broken.


def portable(bench: Bench, limit: float) -> dict:
    """The run of `make same`, on this device: the same files as on every CPU?"""
    at, flags = bench.at("portable"), same.FLAGS | dict(device=bench.device, compile="off", tokens=str(bench.bytes))
    config = settings.replace(settings.read_preset(machine.ROOT / "config/laptop.toml"), **flags)
    expected = {Path(path).parent.name: digest for path, digest in same.expected().items() if "same-1" in path}
    _, statuses = gpu_probe.train(config, 1, at, limit)
    found = gpu_probe.sha256_of_each(at / "run")
    if not found:
        raise forks.failure(at / "forks", statuses, limit)
    if any(digest != expected[step] for step, digest in found.items()):
        raise RunError(f"different bits: {found}, and on CPUs {expected}")
    words = f"Yes: {len(found)} of {len(expected)} checkpoints were compared, the last at {max(found)}."
    return {"words": words, "sha256": found}


def exact(bench: Bench, limit: float, compile: str) -> dict:
    """Whether --strategy=exact gives the same bits on one process, and on two that share the GPU."""
    found, config = {}, bench.small(strategy="exact", compile=compile)
    for ranks in (1, 2):
        found[ranks] = gpu_probe.digests(config, ranks, bench.at(f"exact{ranks}{compile}"), limit / 2)["sha256"]
    if found[1] != found[2]:
        raise RunError(f"different weights on 1 and 2 processes: {found}")
    return {"words": "Yes, of weights and optimizer state.", "sha256": found[1]}


def resume(bench: Bench, limit: float, name: str) -> dict:
    """Whether a run that is killed and resumed ends with the bits of an undisturbed one."""
    ranks, changes = VARIANTS[name]
    config = bench.small(**changes)
    undisturbed = gpu_probe.digests(config, ranks, bench.at(f"undisturbed {name}"), limit / 2)
    killed = gpu_probe.digests(config, ranks, bench.at(f"killed {name}"), limit / 2, kill_after=7)
    if not killed["resumed"]:
        raise RunError("the killed run started over: it had no checkpoint")
    if undisturbed["sha256"] != killed["sha256"]:
        raise RunError(f"the resumed run is not the same: {undisturbed['sha256']} and {killed['sha256']}")
    return {"words": "Yes, bit for bit.", "sha256": killed["sha256"]}


def commands(bench: Bench, limit: float) -> dict:
    """Whether a run's samples, sample.py and evaluate.py work on this device."""
    at = bench.at("commands")
    gpu_probe.digests(bench.small(compile="off", sample_every=6), 1, at, limit / 2)
    printed = gpu_probe.commands(at / "run", bench.device, at, limit / 2)
    return {"words": f"Yes: {printed[-1]}", "printed": printed}


def peak(bench: Bench, limit: float) -> dict:
    """The speed that the hardware reaches, with which training is compared."""
    flops = forks.in_forks(gpu_probe.matmul_peak, bench.device, folder=bench.at("peak"), limit=limit)[0]
    share = f", {flops / bench.datasheet:.0%} of the datasheet's" if bench.datasheet else ""
    return {"words": f"{flops / 1e12:.4g} TFLOP/s in bfloat16{share}.", "flops": flops}


def speed(bench: Bench, limit: float, name: str, preset: str, **changes) -> dict:
    """Tokens/s, MFU and memory of a preset as a user starts it, with its banner and recompilations."""
    config = bench.config(preset, **changes)
    run = gpu_probe.training(config, bench.at(name), limit, 14 if bench.tiny else UPDATES)
    run["tokens_per_second"] = 1000 * run["tokens_per_update"] / statistics.median(run["update_ms"])
    shape = settings.resolve_model(bench.config(preset).model, 512 if bench.tiny else 50257)
    flops = run["tokens_per_second"] * footprint.flops_per_token(shape)
    shares = [f"{flops / bench.datasheet:.1%} of the datasheet's peak (MFU)"] if bench.datasheet else []
    if "flops" in bench.answers.get("peak", {}):
        shares.append(f"{flops / bench.answers['peak']['flops']:.1%} of the fastest matmul")
    words = [f"{run['tokens_per_second']:,.0f} tokens/s", *shares, f"micro-batches of {run['micro_batch_size']}"]
    words.append(f"{run['memory_gb']:.3g} GB, estimated {run['estimated_gb']:.3g}")
    words.append(f"first update after {run['first_update_s']:.0f} s, {errors.plural(run['recompilations'], 'recompilation')}")
    usual = bench.answers.get("gpt2", {}).get("tokens_per_second")
    if name != "gpt2" and preset == "gpt2_124m" and usual:
        words.append(f"{run['tokens_per_second'] / usual:.3f} times the usual speed")
    return {"words": "; ".join(words) + ".", **run}


def nanogpt(bench: Bench, limit: float) -> dict:
    """Tokens/s of nanoGPT's train.py for GPT-2 124M with its own batch (12 x 1024, 40 times), beside ours."""
    if bench.tiny or not bench.nanogpt:
        raise Impossible("it needs a GPU and a checkout of nanoGPT, --nanogpt=PATH")
    data, tokens = bench.at("nanogpt"), bench.folder / "tokens"
    for split in ("train", "val"):  # as nanoGPT reads them, without the header
        (data / f"{split}.bin").write_bytes((tokens / f"made_{split}_000000.bin").read_bytes()[1024:])
    flags = dict(batch_size=12, block_size=1024, gradient_accumulation_steps=40, dropout=0.0, compile=True)
    flags |= dict(dataset=data, out_dir=data, max_iters=30, log_interval=1, eval_iters=1, eval_interval=10**6)
    milliseconds = gpu_probe.nanogpt_steps(Path(bench.nanogpt), machine.arguments("", **flags)[1:], limit)
    theirs = 1000 * 12 * 1024 * 40 / statistics.median(milliseconds)
    ours = bench.answers.get("gpt2", {}).get("tokens_per_second")
    ratio = f"; Lockstep trains at {ours / theirs:.2f} times its speed" if ours else ""
    return {"words": f"{theirs:,.0f} tokens/s{ratio}.", "tokens_per_second": theirs, "update_ms": milliseconds}


# ---------------------------------------------------------------------------------------------------------------------


def about_bits(bench: Bench) -> dict[str, tuple[float, Callable[[float], dict]]]:
    """Seconds and question by name. They are asked at the same time, because they measure no speed."""
    return {
        "portable": (95, lambda limit: portable(bench, limit)),
        "exact": (95, lambda limit: exact(bench, limit, "off")),
        "exact_compiled": (95, lambda limit: exact(bench, limit, "on")),
        **{f"resume_{name}": (95, lambda limit, name=name: resume(bench, limit, name)) for name in VARIANTS},
        "commands": (95, lambda limit: commands(bench, limit)),
    }


def about_speed(bench: Bench) -> dict[str, tuple[float, Callable[[float], dict]]]:
    """Seconds and question by name, in order."""

    def speed_of(name: str, preset: str, **options):
        return lambda limit: speed(bench, limit, name, preset, **options)

    return {
        "peak": (15, lambda limit: peak(bench, limit)),
        "gpt2": (85, speed_of("gpt2", "gpt2_124m")),
        "gpt2_any_order": (65, speed_of("gpt2_any_order", "gpt2_124m", deterministic=False)),
        # The preset's batch would only repeat the same micro-batches four times.
        "llama": (120, speed_of("llama", "llama_1.3b", tokens_per_update=131072)),
        "nanogpt": (90, lambda limit: nanogpt(bench, limit)),
    }


def answered(ask: Callable[[float], dict], limit: float) -> dict:
    """The answer to a question, also if it fails, because one question must not stop the others."""
    began, passed = time.monotonic(), True
    try:
        answer = ask(limit)
    except Impossible as reason:
        answer = {"words": f"Impossible here: {reason}."}
    except Exception as error:
        if not isinstance(error, RunError):
            traceback.print_exc()
        answer, passed = {"words": f"FAILED: {error}"}, False
    return {"passed": passed, "seconds": round(time.monotonic() - began, 1), **answer}


def ask_together(listed: dict[str, tuple[float, Callable[[float], dict]]], bench: Bench, keep: Callable) -> None:
    """Ask questions at the same time, each in a fork of its own, and `keep(name, answer)` at once."""
    asked = {}
    for name, (seconds, ask) in listed.items():
        if not (limit := bench.limit(seconds)):
            continue
        if pid := os.fork():
            asked[pid] = name
        else:
            forks.exit_with(lambda: publish_text(bench.folder / name, json.dumps(answered(ask, limit))))  # noqa: B023
    while asked:
        name = asked.pop(os.wait()[0])
        keep(name, json.loads((bench.folder / name).read_text()))


def main(args: list[str]) -> int:
    """The command."""
    options = parse(args)
    began, tiny = time.monotonic(), options.tiny == "true"
    for name in gpu_probe.import_trainer():
        print(f"{name} is not installed; continuing without it", flush=True)
    with machine.workspace() as folder:
        (folder / "work").mkdir()
        facts = forks.in_forks(gpu_probe.facts, folder=folder, limit=90)[0]
        if not facts["gpus"] and not tiny:
            raise UserError("no CUDA device: these questions need a GPU and a torch for it; --tiny=true tries them on a CPU")
        out = Path(options.out or (folder if tiny else machine.RESULTS), "gpu.json")
        records = json.loads(out.read_text()) if out.is_file() else {}
        key = f"{'a CPU' if tiny else ' and '.join(facts['gpus'])}, torch {facts['torch']}, code {code_digest()}"
        record = records.setdefault(key, {"answers": {}})
        record |= facts | machine.describe() | {"date": time.strftime("%Y-%m-%d")}
        machine.make_tokens(folder / "tokens", *((400_000, 512) if tiny else (20_000_000, 50257)))
        (folder / "same.txt").write_text(same.text())
        forks.in_forks(gpu_probe.prepare_bytes, str(folder / "same.txt"), str(folder / "bytes"), folder=folder, limit=90)
        print(f"{key}; started in {time.monotonic() - began:.0f} s", flush=True)

        def keep(name: str, answer: dict) -> None:
            record["answers"][name] = answer
            out.parent.mkdir(parents=True, exist_ok=True)
            publish_text(out, json.dumps(records, indent=1) + "\n")
            print(f"{TITLES[name]}  ({answer['seconds']} s)\n    {answer['words']}", flush=True)

        scale, deadline = max(1.0, options.minutes / MINUTES), time.monotonic() + 60 * options.minutes
        device, peak = "cpu" if tiny else "cuda", facts["datasheet_flops"]
        bench = Bench(record["answers"], peak, folder, device, tiny, deadline, scale, options.nanogpt)
        wanted = [name for name in TITLES if re.search(options.ask, name)]
        new = [name for name in wanted if name not in record["answers"]]
        ask_together({name: question for name, question in about_bits(bench).items() if name in new}, bench, keep)
        for name, (seconds, ask) in about_speed(bench).items():
            if name in new and (limit := bench.limit(seconds)):
                keep(name, answered(ask, limit))
    left = [name for name in wanted if name not in record["answers"]]
    print(f"{len(wanted) - len(left)} of {len(wanted)} questions are answered{'' if tiny else f', in {out}'}")
    print("One GPU cannot show NCCL between GPUs: ddp, fsdp, and exact's exchange of integers.")
    if left:
        print("repeat the command to continue")
        return EX_TEMPFAIL
    return 0 if all(record["answers"][name]["passed"] for name in wanted) else 1


def parse(args: list[str]) -> argparse.Namespace:
    """Parse the flags, with argparse because tyro may be missing."""
    style = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser = argparse.ArgumentParser(description=__doc__, **style)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all questions; with more, each may take longer")
    parser.add_argument("--ask", default="", metavar="REGEX", help=f"only the questions that match: {', '.join(TITLES)}")
    parser.add_argument("--tiny", choices=("true", "false"), default="false", help="try all questions on a CPU")
    parser.add_argument("--nanogpt", default="", metavar="PATH", help="a checkout of nanoGPT, to compare with")
    parser.add_argument("--out", default="", help="directory of gpu.json (runs/bench)")
    return parser.parse_args(args)


def code_digest() -> str:
    """Eight digits that change with the trainer's code."""
    patterns = ("*.py", "config/*.toml", "lockstep/**/*.py", "extras/*.py")
    files = [path for pattern in patterns for path in machine.ROOT.glob(pattern)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:8]


if __name__ == "__main__":
    with errors.user_errors():
        sys.exit(main(sys.argv[1:]))
