"""Questions about a GPU's speed, memory and reproducibility, each answered in words and figures.

python bench/gpu.py --minutes=9 --ask='exact|nanoGPT' --nanogpt=PATH

A question takes about a minute. When the minutes are over, repeat the command to continue. It does not repeat measurements that
gpu.json has for the same GPUs, torch and code. Needs no network; tyro and wandb may be missing. --tiny=true rehearses all
questions on a CPU, with models of thirty thousand parameters. Its figures mean nothing, and it writes them only with --out.

Exit status: 0 all questions passed, 1 some failed, 2 no GPU, 75 some are left.
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import forks
import gpu_probe
import settings
from common import errors
from common.errors import EX_TEMPFAIL, RunError, UserError
from common.files import publish_text
from hardware import footprint

TOKENS_PER_UPDATE = 131072  # the presets' larger batches would only repeat the same micro-batches
UPDATES = 14  # updates in a timed run
SECONDS = {"gpt2_124m": 100.0, "llama_1.3b": 210.0, "laptop": 90.0}  # that a run takes; a large model takes longer to compile
OPERATION = 90.0  # seconds for a single operation
COLD = 300.0  # extra seconds for the first run of a kind, while the compiler's cache is cold
SMALL = dict(architecture="qwen3", n_layer=4, n_head=4, n_embd=256, seq_len=256, tokens_per_update=16384, lr=1e-3)
SMALL |= dict(threads=1, optimizer="adamw", micro_batch_size=2)
# Settings of every model under --tiny.
TINY = dict(n_layer=2, n_head=2, n_embd=32, seq_len=32, d_ff=64, tokens_per_update=256, compile="off", threads=1)
# Settings to try for speed: the preset's, and these changes to it.
WAYS = ({}, {"deterministic": False}, {"activation_checkpointing": True})


class OutOfTime(Exception):
    """Too few minutes are left for another measurement."""


class Impossible(Exception):
    """This machine cannot answer the question."""


@dataclass
class Bench:
    """How the questions measure. Earlier measurements are taken from the record."""

    record: dict
    folder: Path
    device: str
    tiny: bool
    deadline: float
    nanogpt: str
    save: Callable[[], None]  # publishes the record
    failures: dict[str, RunError] = field(default_factory=dict)  # not tried again before the next start

    def measure(self, name: str, run: Callable[[Path, float], object], seconds: float):
        """The measurement `name`, from the record, or else made by `run` in an empty folder within a number of seconds.

        seconds: how long it takes with a warm compiler cache. If time is left, it may take COLD more. Raises OutOfTime if fewer
        than `seconds` are left, and RunError if it fails.
        """
        if name in self.failures:
            raise self.failures[name]
        known = self.record["measurements"]
        if name not in known:
            if (left := self.deadline - time.monotonic()) < seconds:
                raise OutOfTime
            try:
                known[name] = run(Path(tempfile.mkdtemp(dir=self.folder)), min(left, seconds + COLD))
            except RunError as error:
                self.failures[name] = error
                raise
            self.save()
        return known[name]

    def config(self, preset: str, **changes) -> settings.Config:
        """A preset with this device and made-up tokens."""
        flags = {"tokens": str(self.folder.parent / "tokens"), "device": self.device, "log_every": 1, "resume": "auto"}
        flags |= {"tokens_per_update": TOKENS_PER_UPDATE, "schedule": "constant", "warmup_steps": 0}
        flags |= (SMALL if preset == "laptop" else {}) | (TINY if self.tiny else {}) | changes
        return settings.replace(settings.read_preset(machine.ROOT / f"config/{preset}.toml"), **flags)

    def model(self, shape: str) -> settings.ModelConfig:
        """The resolved shape of a preset."""
        return settings.resolve_model(self.config(shape).model, 512 if self.tiny else 50257)

    def peak(self) -> float:
        """FLOP/s of the fastest matmul."""
        run = lambda at, limit: forks.in_forks(gpu_probe.matmul_peak, self.device, folder=at, limit=limit)[0]  # noqa: E731
        return self.measure("matrix product", run, OPERATION)

    def seconds(self, shape: str) -> float:
        """How long a run takes. A CPU takes longer."""
        return (3 if self.tiny else 1) * SECONDS[shape]

    def train(self, shape: str, updates: int = UPDATES, turn: int = 1, ranks: int = 1, plain: str = "", **changes) -> dict:
        """Time updates of a preset. See `gpu_probe.training`. turn: a different number repeats the measurement."""
        config, updates = self.config(shape, **changes), 6 if self.tiny else updates
        kind = [f"{key}={value}" for key, value in changes.items()] + [f"W={ranks}"] * (ranks > 1) + [plain] * bool(plain)
        run = lambda at, limit: gpu_probe.training(config, at, limit, updates, ranks, plain)  # noqa: E731
        return self.measure(" ".join(["training", shape, *kind, f"turn {turn}"]), run, self.seconds(shape))

    def digests(self, name: str, ranks: int = 1, kill_after: int = 0, **changes) -> dict:
        """The sha256 of the files at the end of a small run. See `gpu_probe.digests`."""
        config, runs = self.config("laptop", steps=12, save_every=4, **changes), 2 if kill_after else 1
        run = lambda at, limit: gpu_probe.digests(config, ranks, at, limit / runs, kill_after)  # noqa: E731
        return self.measure(f"sha256 {name} W={ranks}", run, runs * self.seconds("laptop"))


# ---------------------------------------------------------------------------------------------------------------------
# The questions. Each says in words what follows from its measurements, and raises RunError if a promise is broken.


def fastest_product(bench: Bench) -> str:
    """The speed that the hardware reaches, with which everything else is compared."""
    peak, datasheet = bench.peak(), bench.record["datasheet_flops"]
    share = f"{peak / datasheet:.0%} of the datasheet's {datasheet / 1e12:.0f}" if datasheet else "no datasheet is known"
    return f"{peak / 1e12:.4g} TFLOP/s in bfloat16: {share}."


def speed_of(bench: Bench, shape: str) -> str:
    """Tokens/s and MFU, with the fastest settings."""
    runs = {}
    for way in WAYS:
        name = " ".join(f"--{key}={str(value).lower()}" for key, value in way.items()) or "as it is"
        try:
            runs[name] = bench.train(shape, **way)
        except RunError as error:  # out of memory
            print(f"{shape}, {name}: {error}", flush=True)
    rates = {name: tokens_per_second(run) for name, run in runs.items()}
    best, datasheet = max(rates, key=rates.get), bench.record["datasheet_flops"]
    run, flops = runs[best], rates[best] * footprint.flops_per_token(bench.model(shape))
    shares = f"{flops / bench.peak():.1%} of the fastest matmul"
    shares += f", {flops / datasheet:.1%} of the datasheet's peak" if datasheet else ""
    others = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    more = f"micro-batches of {run['micro_batch_size']}, first update after {run['first_update_s']:.0f} s"
    return f"{rates[best]:,.0f} tokens/s, {best}, {more}: {shares}. ({others})"


def exact_worlds(bench: Bench) -> str:
    """Whether --strategy=exact gives the same bits on any number of ranks."""
    runs = {str(ranks): bench.digests("exact", ranks, strategy="exact")["sha256"] for ranks in (1, 2, 3, 4)}
    if len({json.dumps(digest) for digest in runs.values()}) > 1:
        raise RunError(f"different weights on {', '.join(runs)} ranks: {runs}")
    return f"One sha256 on {', '.join(runs)} ranks."


def portable(bench: Bench) -> str:
    """Whether --numerics=portable gives a GPU the bits of a CPU."""
    flags = dict(numerics="portable", strategy="exact", compile="off", tokens_per_update=2048)  # a CPU also computes them
    runs = {place: bench.digests(f"portable, {place}", device=place, **flags)["sha256"] for place in ("cpu", bench.device)}
    if runs["cpu"] != runs[bench.device]:
        raise RunError(f"different bits: {runs}")
    return f"One sha256 of weights and of optimizer state on {' and '.join(runs)}."


def resume(bench: Bench) -> str:
    """Whether a killed and resumed run ends with the same bits."""
    undisturbed, resumed = bench.digests("undisturbed"), bench.digests("killed and resumed", kill_after=7)
    if not resumed["resumed"]:
        raise RunError("the killed run started over: it had no checkpoint")
    if undisturbed["sha256"] != resumed["sha256"]:
        raise RunError("the resumed run is not the same")
    return "The resumed run is the same, bit for bit."


def against_nanogpt(bench: Bench) -> str:
    """Tokens/s of GPT-2's 124 million parameters beside nanoGPT's train.py, in turns, with the same batch."""
    if bench.device == "cpu" or not bench.nanogpt:
        raise Impossible("it needs a GPU and a checkout of nanoGPT, --nanogpt=PATH")
    data, shape = bench.folder.parent / "words", "gpt2_124m"
    data.mkdir(exist_ok=True)
    for split in ("train", "val"):  # as nanoGPT reads them, without the header
        (data / f"{split}.bin").write_bytes((data.parent / f"tokens/made_{split}_000000.bin").read_bytes()[1024:])
    model, size = bench.model(shape), bench.train(shape)["micro_batch_size"]
    flags = dict(n_layer=model.n_layer, n_head=model.n_head, n_embd=model.n_embd, batch_size=size, block_size=model.seq_len)
    flags |= dict(gradient_accumulation_steps=TOKENS_PER_UPDATE // (size * model.seq_len), device="cuda", compile=True)
    flags |= dict(dropout=0.0, dataset=data, out_dir=data)
    ours, theirs = [], []
    for turn in (1, 2, 3):
        ours.append(tokens_per_second(bench.train(shape, turn=turn, micro_batch_size=size)))
        run = lambda *_: nanogpt_steps(Path(bench.nanogpt), machine.arguments("", **flags)[1:])  # noqa: E731
        steps = bench.measure(f"nanoGPT, turn {turn}", run, bench.seconds(shape))
        theirs.append(1000 * TOKENS_PER_UPDATE / statistics.median(steps[gpu_probe.UNTIMED :]))
    medians = f"{statistics.median(ours):,.0f} tokens/s, nanoGPT {statistics.median(theirs):,.0f}"
    return f"{medians}, micro-batches of {size}: {machine.ratio(ours, theirs):.2f} times."


def nanogpt_steps(checkout: Path, flags: list[str]) -> list[float]:
    """Milliseconds of each update of nanoGPT's train.py, without the first, which includes an evaluation."""
    fixed = [f"--max_iters={UPDATES}", "--log_interval=1", "--eval_iters=1", "--eval_interval=1000000"]
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *fixed, *flags]
    done = subprocess.run(command, cwd=checkout, env=machine.all_cores(), capture_output=True, text=True)
    milliseconds = [float(text) for text in re.findall(r"^iter \d+: .* time ([\d.]+)ms", done.stdout, re.MULTILINE)]
    if done.returncode or len(milliseconds) <= UPDATES:
        raise RunError(f"nanoGPT's train.py ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return milliseconds[1:]


def change(bench: Bench, shape: str, **changes) -> str:
    """The cost or gain of other settings on one rank, with the same micro-batches."""
    if changes.get("fp8") and not (bench.device == "cuda" and importlib.util.find_spec("torchao")):
        raise Impossible("it needs a GPU and torchao")
    base = bench.train(shape)
    changed = bench.train(shape, micro_batch_size=base["micro_batch_size"], **changes)
    times = tokens_per_second(base) / tokens_per_second(changed)
    memory = f"{changed['memory_gb']:.3g} GB instead of {base['memory_gb']:.3g}"
    return f"An update takes {times:.3f} times as long, and {memory}."


def overlapped(bench: Bench, shape: str) -> str:
    """The gain from sending Muon's matrices of one shape while computing the next shape."""
    ranks = 2 if bench.tiny else len(bench.record["gpus"])
    if ranks < 2:
        raise Impossible("it needs two GPUs")
    flags, turns = dict(optimizer="muon", ranks=ranks), (1,) if bench.tiny else (1, 2, 3)
    ours = [tokens_per_second(bench.train(shape, turn=turn, **flags)) for turn in turns]
    theirs = [tokens_per_second(bench.train(shape, turn=turn, plain="waiting", **flags)) for turn in turns]
    return f"{machine.ratio(ours, theirs):.3f} times the tokens/s of ranks that wait for each exchange, on {ranks} ranks."


def learns_as_on_a_cpu(bench: Bench) -> str:
    """Whether a small model learns the same in float32 on this device and on a CPU."""
    flags = dict(updates=60, dtype="float32", compile="off")
    losses = [bench.train("laptop", **flags, device=device)["losses"] for device in ("cpu", bench.device)]
    difference = max(abs(a - b) / a for a, b in zip(*losses, strict=False))
    learned = losses[0][0] - losses[0][-1]
    words = f"while the loss fell by {learned:.2f}, the two differed by at most {difference:.3%}"
    if difference > 0.005 or learned < 0.1:
        raise RunError(words)
    return f"Yes: {words}."


def memory(bench: Bench, shape: str) -> str:
    """Peak memory (on a CPU, of the whole process) compared with the estimate that --micro_batch_size=auto uses."""
    run = bench.train(shape)
    estimate, held = run["estimated_gb"], run["memory_gb"]
    return f"The peak was {held:.3g} GB, and the estimate {estimate:.3g} GB, {estimate / held - 1:+.1%}."


def questions() -> Iterator[tuple[str, Callable[[Bench], str]]]:
    """All questions, the most important first."""

    def of_each(title: str, ask: Callable, **changes):
        for shape in ("gpt2_124m", "llama_1.3b"):
            yield f"{shape}: {title}", functools.partial(ask, shape=shape, **changes)

    yield "How fast is the fastest matmul?", fastest_product
    yield from of_each("how fast does it train at its best settings?", speed_of)
    yield "Does --strategy=exact give one sha256 on 1 to 4 processes?", exact_worlds
    yield "Does --numerics=portable give one sha256 here and on a CPU?", portable
    yield "Is a killed and resumed run the same?", resume
    yield "gpt2_124m: how fast is it beside nanoGPT?", against_nanogpt
    yield from of_each("what does --strategy=exact cost?", change, strategy="exact")
    yield from of_each("what does --compile=off cost?", change, compile="off")
    yield "Does a small model learn in float32 as on a CPU?", learns_as_on_a_cpu
    yield from of_each("what does --fp8=true gain?", change, fp8=True)
    yield from of_each("what does overlapping Muon's exchanges with its matmuls gain?", overlapped)
    yield from of_each("does it take the estimated memory?", memory)


def tokens_per_second(run: dict) -> float:
    """The speed of a timed run, from its median update."""
    return 1000 * run["tokens_per_update"] / statistics.median(run["update_ms"])


def main(args: list[str]) -> int:
    """The command."""
    options = parse(args)
    tiny = options.tiny == "true"
    for name in gpu_probe.import_trainer():
        print(f"{name} is not installed; continuing without it", flush=True)
    with machine.workspace() as folder:
        work = folder / "work"
        work.mkdir()
        facts = forks.in_forks(gpu_probe.facts, folder=folder, limit=OPERATION)[0]
        if not facts["gpus"] and not tiny:
            raise UserError("no CUDA device: these questions need a GPU and a torch for it; --tiny=true tries them on a CPU")
        out = Path(options.out or (work if tiny else machine.RESULTS), "gpu.json")
        records = json.loads(out.read_text()) if out.is_file() else {}
        key = f"{'a CPU' if tiny else ' and '.join(facts['gpus'])}, torch {facts['torch']}, code {code_digest()}"
        record = records.setdefault(key, {"measurements": {}, "answers": {}})
        record |= facts | machine.describe()
        machine.make_tokens(folder / "tokens", *((400_000, 512) if tiny else (20_000_000, 50257)))

        def save() -> None:
            out.parent.mkdir(parents=True, exist_ok=True)
            publish_text(out, json.dumps(records, indent=1) + "\n")

        device, deadline = "cpu" if tiny else "cuda", time.monotonic() + 60 * options.minutes
        bench = Bench(record, work, device, tiny, deadline, options.nanogpt, save)
        listed = {title: ask for title, ask in questions() if re.search(options.ask, title)}
        left = ask_all(bench, listed)
    print(f"{len(listed) - left} of {len(listed)} questions are answered{'' if tiny else f', in {out}'}")
    if left:
        print("repeat the command to continue")
        return EX_TEMPFAIL
    return 0 if all(record["answers"][title]["passed"] for title in listed) else 1


def parse(args: list[str]) -> argparse.Namespace:
    """Parse the flags, with argparse because tyro may be missing."""
    style = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser = argparse.ArgumentParser(description=__doc__, **style)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no measurement that may take longer than this")
    parser.add_argument("--ask", default="", metavar="REGEX", help="only the questions whose title matches")
    parser.add_argument("--tiny", choices=("true", "false"), default="false", help="try all questions on a CPU")
    parser.add_argument("--nanogpt", default="", metavar="PATH", help="a checkout of nanoGPT, to compare with")
    parser.add_argument("--out", default="", help="directory of gpu.json (runs/bench)")
    return parser.parse_args(args)


def ask_all(bench: Bench, listed: dict[str, Callable[[Bench], str]]) -> int:
    """Ask all questions; recorded measurements cost no time. Returns how many are left because time ran out."""
    left = 0
    for title, ask in listed.items():
        passed = True
        try:
            verdict = ask(bench)
        except OutOfTime:
            left += 1
            continue
        except Impossible as reason:
            verdict = f"Impossible here: {reason}."
        except Exception as error:  # one question must not stop the others
            if not isinstance(error, RunError):
                traceback.print_exc()
            verdict, passed = f"FAILED: {error}", False
        bench.record["answers"][title] = {"verdict": verdict, "passed": passed}
        bench.save()
        print(f"{title}\n    {verdict}", flush=True)
    return left


def code_digest() -> str:
    """Eight digits that change with the trainer's code."""
    folders = ("checkpoints", "common", "dataset", "hardware", "parallel", "planning", "reports")
    files = [*machine.ROOT.glob("*.py"), *machine.ROOT.glob("config/*.toml")]
    files += [path for folder in folders for path in (machine.ROOT / folder).glob("*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:8]


if __name__ == "__main__":
    with errors.user_errors():
        sys.exit(main(sys.argv[1:]))
