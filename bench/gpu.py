"""What is true on this GPU: questions about speed, memory and sameness, each answered in words and figures.

python bench/gpu.py --minutes=9 --ask='exact|nanoGPT' --nanogpt=PATH

A question takes about a minute. When the minutes are over, the same command goes on: what gpu.json has for the same GPUs and
torch is not measured again, unless a file that it depends on has changed since. Needs no network; tyro and wandb may be
missing. --tiny=true goes through every question on a CPU with models of thirty thousand parameters and writes nothing to
bench/results: it tries out this script and measures nothing.

Exit status: 0 all is answered and as it should be, 1 something is not, 2 no GPU, 75 questions are left.
"""

import argparse
import hashlib
import importlib.util
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import machine  # puts the project's folder on the path

# isort: split
import gpu_probe
import settings
from common import errors
from common.errors import EX_TEMPFAIL, RunError, UserError
from common.files import publish_text
from hardware import footprint

SHAPES = ("gpt2_124m", "llama_1.3b")
TOKENS_PER_UPDATE = 131072  # the presets' own would only repeat the same micro-batches
UPDATES, SECONDS = 14, 20.0  # of a run that is timed: so many updates, or those of so many seconds
LIMIT, LIMIT_OF_A_BILLION = 90.0, 90.0  # seconds of a run, and those that a billion parameters add
LEAST_MINUTES = 4
SMALL = dict(architecture="qwen3", n_layer=4, n_head=4, n_embd=256, seq_len=256, tokens_per_update=16384, lr=1e-3)
SMALL |= dict(threads=1, optimizer="adamw")
# What --tiny makes of every model.
TINY = dict(n_layer=2, n_head=2, n_embd=32, seq_len=32, d_ff=64, tokens_per_update=256, compile="off", threads=1)
# What the speed of a model is tried with, beside the preset's own settings.
WAYS = ({}, {"deterministic": False}, {"activation_checkpointing": True})
TRAINER = ("train.py", "model.py", "kernels.py", "optim.py", "data.py", "hardware/device.py", "parallel", "config")


class OutOfTime(Exception):
    """The minutes do not suffice for another measurement."""


class Impossible(Exception):
    """This machine cannot answer the question."""


@dataclass
class Answer:
    verdict: str
    figures: dict = field(default_factory=dict)
    passed: bool = True  # False: a promise is broken, or the question could not be answered


@dataclass
class Bench:
    """What the questions measure with. What was measured before is taken from the record."""

    record: dict
    folder: Path
    device: str
    tiny: bool
    deadline: float
    ranks: int  # as many as there are GPUs
    nanogpt: str
    save: Callable[[], None]  # publishes the record
    failures: dict[str, RunError] = field(default_factory=dict)  # not tried again before the next start

    def measure(self, name: str, run: Callable[[Path], object], files: tuple[str, ...], limit: float):
        """The measurement `name`, made by `run` in an empty folder within `limit` seconds unless the record has it.

        files: on which it depends. Raises OutOfTime if too few minutes are left, RunError if it fails.
        """
        if name in self.failures:
            raise self.failures[name]
        known, code = self.record["measurements"].get(name), code_digest(files)
        if known is None or known["code"] != code:
            if time.monotonic() + limit > self.deadline:
                raise OutOfTime
            folder = self.folder / str(len(list(self.folder.iterdir())))
            folder.mkdir()
            try:
                known = self.record["measurements"][name] = {"code": code, "value": run(folder)}
            except RunError as error:
                self.failures[name] = error
                raise
            self.save()
        return known["value"]

    def operation(self, name: str, function: Callable, *arguments):
        """The measurement `name`: a function in a fork."""
        run = lambda folder: machine.in_forks(function, *arguments, folder=folder, limit=LIMIT)[0]  # noqa: E731
        return self.measure(name, run, ("kernels.py",), LIMIT)

    def config(self, preset: str, **changes) -> settings.Config:
        """A preset on this device and the made tokens."""
        flags = {"tokens": str(self.folder.parent / "tokens"), "device": self.device, "log_every": 1, "resume": "auto"}
        flags |= {"tokens_per_update": TOKENS_PER_UPDATE, "schedule": "constant", "warmup_steps": 0}
        preset = settings.read_preset(machine.ROOT / f"config/{preset}.toml")
        return settings.replace(preset, **(flags | (TINY if self.tiny else {}) | changes))

    def model(self, shape: str) -> settings.ModelConfig:
        """The resolved shape of a preset."""
        return settings.resolve_model(self.config(shape).model, 512 if self.tiny else 50257)

    def limit(self, shape: str) -> float:
        """Seconds after which a run is given up: a large model takes longer to make and to compile, and a CPU to compile."""
        billions = sum(footprint.parameters(self.model(shape)).values()) / 1e9
        return (3 if self.tiny else 1) * (LIMIT + LIMIT_OF_A_BILLION * billions)

    def train(self, shape: str, ranks: int = 1, updates: int = 0, turn: int = 0, apart: bool = False, **changes) -> dict:
        """Updates of a preset, timed. See `gpu_probe.training`. turn: measures the same again. apart: no joined products."""
        config, limit = self.config(shape, **changes), self.limit(shape)
        updates = updates or (6 if self.tiny else UPDATES)
        words = [shape, f"W={ranks}", *(f"{key}={value}" for key, value in changes.items()), f"turn {turn}" if turn else ""]
        words += ["apart"] * apart
        variables = self.shared(ranks) | ({gpu_probe.APART: "1"} if apart else {})

        def run(folder: Path) -> dict:
            return gpu_probe.training(config, ranks, folder, limit, updates, SECONDS, variables)

        return self.measure(f"training {' '.join(filter(None, words))}", run, TRAINER, limit)

    def digests(self, name: str, ranks: int, kill_after: int = 0, **changes) -> dict:
        """The sha256 of the files at the end of a small run. See `gpu_probe.digests`."""
        config = self.config("laptop", **(SMALL | {"steps": 12, "save_every": 4} | (TINY if self.tiny else {}) | changes))
        limit = self.limit(SHAPES[0])

        def run(folder: Path) -> dict:
            return gpu_probe.digests(config, ranks, folder, limit, self.shared(ranks), kill_after)

        return self.measure(f"sha256 {name} W={ranks}", run, (*TRAINER, "checkpoints"), (2 if kill_after else 1) * limit)

    def shared(self, ranks: int) -> dict:
        """The environment variables of ranks: more ranks than GPUs share them, through gloo."""
        return {"LOCKSTEP_SHARE_GPU": "1"} if ranks > self.ranks else {}

    def needs_gpu(self) -> None:
        """Raise Impossible on a CPU."""
        if self.device != "cuda":
            raise Impossible("it needs a GPU")


# ---------------------------------------------------------------------------------------------------------------------
# The questions. Each looks at measurements and says in words what follows.


def fastest_product(bench: Bench) -> Answer:
    """What the hardware reaches, against which everything else is held."""
    from speed import matmul_peak

    measured = bench.operation("fastest matrix product", matmul_peak, "bfloat16", bench.device)
    datasheet = bench.record["facts"]["datasheet_flops"]
    share = f"{measured / datasheet:.0%} of the datasheet's {datasheet / 1e12:.0f}" if datasheet else "no datasheet is known"
    return Answer(f"{measured / 1e12:.4g} TFLOP/s in bfloat16: {share}.", {"flops": measured, "datasheet": datasheet})


def speed_of(bench: Bench, shape: str) -> Answer:
    """Tokens/s and MFU, with the settings that are fastest."""
    runs = {}
    for way in WAYS:
        try:
            runs[" ".join(f"--{key}={str(value).lower()}" for key, value in way.items()) or "as it is"] = bench.train(
                shape, **way
            )
        except RunError:  # out of memory; with the settings of the preset itself it is a failure
            if not way:
                raise
    rates = {way: tokens_per_second(run) for way, run in runs.items()}
    best, peak = max(rates, key=rates.get), fastest_product(bench).figures
    flops = rates[best] * footprint.flops_per_token(bench.model(shape))
    figures = {"tokens/s": rates, "MFU of the matmul": flops / peak["flops"]}
    figures["MFU of the datasheet"] = peak["datasheet"] and flops / peak["datasheet"]
    shares = f"{figures['MFU of the matmul']:.1%} of the fastest matrix product"
    if peak["datasheet"]:
        shares = f"{figures['MFU of the datasheet']:.1%} of the datasheet's peak, {shares}"
    others = ", ".join(f"{way} {rate:,.0f}" for way, rate in rates.items())
    size, wait = runs[best]["micro_batch_size"], runs[best]["data_wait_ms"]
    more = (
        f"micro-batches of {size}, {wait:.2g} ms of waiting for data, first update after {runs[best]['first_update_s']:.0f} s"
    )
    return Answer(f"{rates[best]:,.0f} tokens/s, {best}, {more}: {shares}. ({others})", figures)


def exact_worlds(bench: Bench) -> Answer:
    """Whether --strategy=exact gives the same bits on any number of ranks."""
    micro = 2 if bench.tiny else 8
    runs = {ranks: bench.digests("exact", ranks, strategy="exact", micro_batch_size=micro) for ranks in (1, 2, 3, 4)}
    digests = {str(ranks): run["sha256"] for ranks, run in runs.items()}
    passed = len({json.dumps(digest) for digest in digests.values()}) == 1
    numbers = ", ".join(digests)
    verdict = f"One sha256 on {numbers} ranks." if passed else f"BROKEN: different weights on {numbers} ranks."
    return Answer(verdict, digests, passed)


def resume(bench: Bench) -> Answer:
    """Whether a killed and resumed run ends with the same bits."""
    micro = {"micro_batch_size": 1 if bench.tiny else 4}
    undisturbed = bench.digests("undisturbed", bench.ranks, **micro)
    resumed = bench.digests("killed and resumed", bench.ranks, kill_after=7, **micro)
    if not resumed["resumed"]:
        return Answer("The killed run began anew: it had no checkpoint.", {}, passed=False)
    passed = undisturbed["sha256"] == resumed["sha256"]
    verdict = "The resumed run is the same, bit for bit." if passed else "The resumed run is NOT the same."
    return Answer(verdict, {"sha256": undisturbed["sha256"], "resumed": resumed["sha256"]}, passed)


def against_nanogpt(bench: Bench) -> Answer:
    """Tokens/s of GPT-2's 124 million parameters beside nanoGPT's train.py, in turns, with the same batch."""
    from speed import nanogpt_steps

    if not bench.nanogpt:
        raise Impossible("it needs a checkout of nanoGPT, --nanogpt=PATH")
    bench.needs_gpu()
    model, size = bench.model("gpt2_124m"), bench.train("gpt2_124m")["micro_batch_size"]
    steps = TOKENS_PER_UPDATE // (size * model.seq_len)
    flags = [f"--{key}={getattr(model, key)}" for key in ("n_layer", "n_head", "n_embd")] + [f"--batch_size={size}"]
    flags += [f"--block_size={model.seq_len}", f"--gradient_accumulation_steps={steps}", "--device=cuda", "--compile=True"]
    flags += [f"--dataset={bench.folder.parent / 'words'}", "--dropout=0.0", f"--out_dir={bench.folder.parent / 'nanogpt'}"]
    limit, rates = bench.limit("gpt2_124m"), {"ours": [], "nanoGPT": []}
    for turn in (1, 2, 3):
        ours = bench.train("gpt2_124m", turn=turn, micro_batch_size=size)
        run = lambda _: nanogpt_steps(Path(bench.nanogpt), UPDATES, flags)  # noqa: E731
        theirs = bench.measure(f"nanoGPT, turn {turn}", run, (), limit)
        rates["ours"].append(tokens_per_second(ours))
        rates["nanoGPT"].append(1000 * TOKENS_PER_UPDATE / statistics.median(theirs[gpu_probe.FIRST_UPDATES :]))
    times = machine.ratio(rates["ours"], rates["nanoGPT"])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    words = f"{medians['ours']:,.0f} tokens/s, nanoGPT {medians['nanoGPT']:,.0f}, micro-batches of {size}: {times:.2f} times."
    return Answer(words, {"tokens/s": rates, "ratio": times})


def change(bench: Bench, shape: str, words: str, **changes) -> Answer:
    """What other settings cost or gain on one rank, with the same micro-batches."""
    if changes.get("fp8") and not (bench.device == "cuda" and importlib.util.find_spec("torchao")):
        raise Impossible("it needs a GPU and torchao")
    base = bench.train(shape)
    changed = bench.train(shape, micro_batch_size=base["micro_batch_size"], **changes)
    cost = 1 - tokens_per_second(changed) / tokens_per_second(base)
    least = max(0.002, noise(base), noise(changed))
    said = f"{words} costs {cost:.1%}" if cost > 0 else f"{words} gains {-cost:.1%}"
    if abs(cost) <= least:
        said = f"{words} costs nothing that can be measured (less than {least:.1%})"
    memory = f", and {changed['memory_gb']:.3g} GB instead of {base['memory_gb']:.3g}"
    return Answer(f"{said}{memory}.", {"cost": cost})


def learns_alike(bench: Bench, first: dict, second: dict, most: float) -> Answer:
    """Whether a small model learns the same with other settings."""
    if "cuda" in second.values():
        bench.needs_gpu()
    small = {key: value for key, value in SMALL.items() if not (bench.tiny and key in TINY)} | {"micro_batch_size": 2}
    updates = 20 if bench.tiny else 60
    losses = [bench.train("laptop", updates=updates, **small | changes)["losses"] for changes in (first, second)]
    difference = max(abs(a - b) / a for a, b in zip(*losses, strict=False))
    learned = losses[0][0] - losses[0][-1]
    passed = difference < most and learned > 0.1
    words = f"the same within {most:.1%}" if passed else f"NOT the same within {most:.1%}"
    names = " and ".join(",".join(map(str, changes.values())) for changes in (first, second))
    verdict = f"While the loss fell by {learned:.2f}, {names} differed by at most {difference:.3%}: {words}."
    return Answer(verdict, {"difference": difference, "learned": learned}, passed)


def attention(bench: Bench, shape: str) -> Answer:
    """Which attention kernel is fastest, and which of those that give the same bits: cuDNN's, FlashAttention 2 or 3?"""
    model = bench.model(shape)
    arguments = model, max(1, (64 if bench.tiny else 32768) // model.seq_len), bench.device
    times = {
        name: bench.operation(
            f"attention {shape} {name}", gpu_probe.attention_kernels, *arguments, same, 0.02 if bench.tiny else 0.5
        )
        for name, same in (("deterministic", True), ("free", False))
    }
    own = times["deterministic"]["the trainer's"]
    best = {name: min((ms, kernel) for kernel, ms in kernels.items() if ms is not None) for name, kernels in times.items()}
    ms, kernel = best["deterministic"]
    if own <= 1.05 * ms:
        verdict = f"The trainer's kernel ({own:.3g} ms) is the fastest deterministic one"
    else:
        verdict = f"{kernel} takes {ms:.3g} ms, the trainer's kernel {own:.3g}: use {kernel}"
    absent = ", ".join(name for name, ms in times["free"].items() if ms is None)
    fastest = f"the fastest of all is {best['free'][1]} with {best['free'][0]:.3g} ms"
    return Answer(f"{verdict}; {fastest}{f'; not offered here: {absent}' if absent else ''}.", times)


def profile(bench: Bench, shape: str) -> Answer:
    """What takes the time of an update."""
    limit, config = bench.limit(shape), bench.config(shape)
    found = bench.measure(f"profile {shape}", lambda folder: gpu_probe.profile(config, folder, limit), TRAINER, limit)
    rows = [[name, f"{ms:.2f}", f"{ms / found['ms']:.1%}", count] for name, ms, count in found["rows"]]
    return Answer(f"{found['ms']:.1f} ms in all.\n{machine.table(['operation', 'ms', 'share', 'calls'], rows)}", found)


def memory(bench: Bench, shape: str) -> Answer:
    """Peak memory against the estimate by which --micro_batch_size=auto chooses."""
    bench.needs_gpu()  # a CPU's is that of the whole process
    run = bench.train(shape)
    estimate, held = run["estimated_gb"], run["memory_gb"]
    error = estimate / held - 1
    right = "right within 10 %" if abs(error) <= 0.1 else f"{abs(error):.0%} too {'high' if error > 0 else 'low'}, mend it"
    words = f"{held:.3g} GB were held and {estimate:.3g} GB estimated: the estimate is {right}."
    return Answer(words, {"peak memory GB": held, "estimated GB": estimate})


def questions() -> Iterator[tuple[str, Callable[[Bench], Answer]]]:
    """All questions, the most important first."""

    def of_each(title: str, ask: Callable, *arguments, **changes):
        for shape in SHAPES:
            yield f"{shape}: {title}", lambda bench, shape=shape: ask(bench, shape, *arguments, **changes)

    halves = [{"dtype": dtype} for dtype in ("float32", "bfloat16")]
    devices = [{"dtype": "float32", "compile": "off", "device": name} for name in ("cpu", "cuda")]
    yield "How fast is the fastest matrix product?", fastest_product
    yield from of_each("how fast does it train at its best settings?", speed_of)
    yield "Is --strategy=exact one sha256 on 1 to 4 processes?", exact_worlds
    yield "Is a killed and resumed run the same?", resume
    yield "gpt2_124m: how fast is it beside nanoGPT?", against_nanogpt
    yield from of_each("what does --strategy=exact cost?", change, "--strategy=exact", strategy="exact")
    yield from of_each("what does compiling gain?", change, "--compile=off", compile="off")
    yield "Does a small model learn in float32 as on a CPU?", lambda bench: learns_alike(bench, *devices, most=0.005)
    yield "Is bfloat16 as good as float32?", lambda bench: learns_alike(bench, *halves, most=0.02)
    yield from of_each("what does --fp8=true gain?", change, "--fp8=true", fp8=True)
    yield from of_each("which attention kernel?", attention)
    yield from of_each("what do joined products gain?", change, "computing q, k, v and gate, up apart", apart=True)
    yield from of_each("what takes the time of an update?", profile)
    yield from of_each("is the memory that which was estimated?", memory)


def tokens_per_second(run: dict) -> float:
    """Of a timed run, by its median update."""
    return 1000 * run["tokens_per_update"] / statistics.median(run["update_ms"])


def noise(run: dict) -> float:
    """Half the distance of the quartiles of a run's update times, as a share of the median."""
    times = run["update_ms"]
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return (high - low) / 2 / median


# ---------------------------------------------------------------------------------------------------------------------
# Asking, and keeping the answers


def main(args: list[str]) -> int:
    """The command."""
    options = parse(args)
    for name in gpu_probe.import_trainer():
        print(f"{name} is not installed: going on without it", flush=True)
    with machine.workspace() as folder:
        work, device = folder / "work", "cpu" if options.tiny else "cuda"
        work.mkdir()
        facts = machine.in_forks(gpu_probe.facts, device, folder=folder, limit=LIMIT)[0]
        if not facts["gpus"] and not options.tiny:
            raise UserError("no CUDA device: these questions need a GPU and its torch; --tiny=true tries them on a CPU")
        out = Path(options.out) if options.out else folder / "results" if options.tiny else machine.RESULTS
        out.mkdir(parents=True, exist_ok=True)
        known = next((path for path in (out / "gpu.json", Path(options.record)) if path.is_file()), None)
        records = json.loads(known.read_text()) if known else {}
        key = f"{len(facts['gpus'])} x {(facts['gpus'] or ['CPU'])[0]}, torch {facts['torch']}"
        record = records.setdefault(key, {"measurements": {}, "answers": {}})
        record |= {"facts": facts} | machine.describe()
        machine.make_tokens(folder / "tokens", 400_000 if options.tiny else 20_000_000, 512 if options.tiny else 50257)
        (folder / "words").mkdir()
        for split in ("train", "val"):  # as nanoGPT reads them, without the header
            content = (folder / f"tokens/made_{split}_000000.bin").read_bytes()
            (folder / f"words/{split}.bin").write_bytes(content[1024:])

        def save() -> None:
            publish_text(out / "gpu.json", json.dumps(records, indent=1) + "\n")

        deadline = time.monotonic() + 60 * options.minutes
        ranks = max(1, len(facts["gpus"]))
        bench = Bench(record, work, device, options.tiny, deadline, ranks, options.nanogpt, save)
        listed = {title: ask for title, ask in questions() if re.search(options.ask, title)}
        left = ask_all(bench, listed)
    print(f"{len(listed) - left} of {len(listed)} questions are answered{'' if options.tiny else f', in {out}'}")
    if left:
        print("the same command goes on")
        return EX_TEMPFAIL
    return 0 if all(record["answers"][title]["passed"] for title in listed) else 1


def parse(args: list[str]) -> argparse.Namespace:
    """The flags. By argparse, because tyro may be missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="start no measurement that may take longer than this")
    parser.add_argument("--ask", default="", metavar="REGEX", help="only the questions whose title has this in it")
    parser.add_argument("--tiny", choices=("true", "false"), default="false", help="try all questions on a CPU")
    parser.add_argument("--nanogpt", default="", metavar="PATH", help="a checkout of nanoGPT, to compare with")
    parser.add_argument("--record", default=str(machine.RESULTS / "gpu.json"), help="what was measured before")
    parser.add_argument("--out", default="", help="directory of gpu.json and gpu.md (bench/results)")
    options = parser.parse_args(args)
    options.tiny = options.tiny == "true"
    if options.minutes < LEAST_MINUTES:
        raise UserError(f"--minutes={options.minutes:g} must be at least {LEAST_MINUTES}, which one measurement may take")
    return options


def ask_all(bench: Bench, listed: dict[str, Callable[[Bench], Answer]]) -> int:
    """Ask all of them. What is known costs no time. Returns how many questions are left for want of time."""
    left = 0
    for title, ask in listed.items():
        try:
            answer = ask(bench)
        except OutOfTime:
            left += 1
            continue
        except Impossible as reason:
            answer = Answer(f"Impossible here: {reason}.")
        except Exception as error:  # one question must not take the others with it
            if not isinstance(error, RunError):
                traceback.print_exc()
            answer = Answer(f"Could not be measured: {error}", passed=False)
        bench.record["answers"][title] = vars(answer)
        bench.save()
        print(f"{title}\n    {answer.verdict}", flush=True)
    return left


def code_digest(files: tuple[str, ...]) -> str:
    """Eight digits that change with these files and the files in these folders."""
    digest = hashlib.sha256()
    for path in (machine.ROOT / name for name in files):
        for file in sorted(path.glob("*.[pt]*")) if path.is_dir() else [path]:
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:8]


if __name__ == "__main__":
    with errors.user_errors():
        sys.exit(main(sys.argv[1:]))
