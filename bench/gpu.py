"""What is true on this GPU: questions about speed, memory and sameness, each answered in words and figures.

python bench/gpu.py --minutes=9

A question takes about a minute. When the minutes are over, the same command goes on: what bench/results/gpu.json has for the
same GPUs, torch and code is not measured again. gpu.md beside it is for reading. Needs no network; tyro and wandb may be
missing. --tiny=true goes through every question on a CPU with models of thirty thousand parameters and writes nothing to
bench/results: it tries out this script and measures nothing.

Exit status: 0 all is answered and as it should be, 1 something is not, 2 no GPU, 75 questions are left.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import gpu_probe
import machine
import settings
from common import errors
from common.errors import RunError, UserError
from common.files import publish_text

SHAPES = ("gpt2_124m", "qwen3_124m", "gpt2_355m", "llama_1.3b")
TOKENS_PER_UPDATE = 131072  # the presets' own would only repeat the same micro-batches
UPDATES, SECONDS = 14, 20.0  # of a run that is timed: so many updates, or those of so many seconds
LIMIT = 100.0  # seconds
ROWS = (2048, 4096, 8192, 16384, 32768)  # of logits at a time
SMALL = {
    "architecture": "qwen3",
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 256,
    "seq_len": 256,
    "tokens_per_update": 16384,
    "lr": 1e-3,
}
# What --tiny makes of every model.
TINY = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "seq_len": 32,
    "d_ff": 64,
    "tokens_per_update": 256,
    "compile": "off",
    "threads": 1,
}
EX_TEMPFAIL = 75


class OutOfTime(Exception):
    """The minutes do not suffice for another measurement."""


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
    tokens: Path
    device: str
    tiny: bool
    deadline: float
    ranks: int  # as many as there are GPUs
    limit: float  # seconds after which a run is given up
    save: Callable[[], None]  # publishes the record
    failures: dict[str, RunError] = field(default_factory=dict)  # not tried again before the next start

    def measure(self, name: str, run: Callable[[Path, float], object], runs: int = 1):
        """The measurement `name`, made by `run` in an empty folder within a limit of seconds unless the record has it.

        runs: how many runs of the trainer it takes. Raises OutOfTime if too few minutes are left, RunError if it fails.
        """
        if name in self.failures:
            raise self.failures[name]
        if name not in self.record["measurements"]:
            limit = runs * self.limit
            if time.monotonic() + limit > self.deadline:
                raise OutOfTime
            folder = self.folder / str(len(list(self.folder.iterdir())))
            folder.mkdir()
            try:
                self.record["measurements"][name] = run(folder, limit)
            except RunError as error:
                self.failures[name] = error
                raise
            self.save()
        return self.record["measurements"][name]

    def operation(self, name: str, function: Callable, *arguments):
        """The measurement `name`: a function of gpu_probe in a fork."""
        return self.measure(name, lambda folder, limit: gpu_probe.in_fork(function, *arguments, folder=folder, limit=limit))

    def config(self, preset: str, **changes) -> settings.Config:
        """A preset on this device and the made tokens."""
        flags = {"tokens": str(self.tokens), "device": self.device, "log_every": 1, "tokens_per_update": TOKENS_PER_UPDATE}
        flags |= {"schedule": "constant", "warmup_steps": 0, "resume": "auto"}
        preset = settings.read_preset(machine.ROOT / f"config/{preset}.toml")
        return settings.replace(preset, **(flags | (TINY if self.tiny else {}) | changes))

    def model(self, shape: str) -> settings.ModelConfig:
        """The resolved shape of a preset."""
        return settings.resolve_model(self.config(shape).model, 512 if self.tiny else 50257)

    def train(self, shape: str, ranks: int = 1, graph: str = "", updates: int = 0, **changes) -> dict:
        """Updates of a preset, timed. See `gpu_probe.training`."""
        config = self.config(shape, **changes)
        updates = updates or (6 if self.tiny else UPDATES)
        name = " ".join(filter(None, [shape, f"W={ranks}", graph, *(f"{key}={value}" for key, value in changes.items())]))

        def run(folder: Path, limit: float) -> dict:
            return gpu_probe.training(config, ranks, folder, limit, updates, SECONDS, self.shared(ranks), graph)

        return self.measure(f"training {name}", run)

    def digests(self, name: str, ranks: int, variables: dict | None = None, kill_after: int = 0, **changes) -> dict:
        """The sha256 of the files at the end of a small run. See `gpu_probe.digests`."""
        small = SMALL | {"threads": 1, "steps": 12, "save_every": 4, "optimizer": "adamw"} | (TINY if self.tiny else {})
        config = self.config("laptop", **(small | changes))
        variables = self.shared(ranks) | (variables or {})

        def run(folder: Path, limit: float) -> dict:
            return gpu_probe.digests(config, ranks, folder, self.limit, variables, kill_after)

        return self.measure(f"sha256 {name} W={ranks}", run, runs=2 if kill_after else 1)

    def shared(self, ranks: int) -> dict:
        """The environment variables of ranks: more ranks than GPUs share them, through gloo."""
        return {"LOCKSTEP_SHARE_GPU": "1"} if ranks > self.ranks else {}

    @property
    def worlds(self) -> list[int]:
        """The numbers of ranks to compare: up to that of the GPUs, and two in any case."""
        return [ranks for ranks in (1, 2, 4, 8) if ranks <= max(2, self.ranks)]


# ---------------------------------------------------------------------------------------------------------------------
# The questions. Each looks at measurements and says in words what follows.


def fastest_product(bench: Bench) -> Answer:
    """What the hardware reaches, against which everything else is held."""
    from tokens_per_second import matmul_peak

    measured = bench.operation("fastest matrix product", matmul_peak, "bfloat16", bench.device)
    datasheet = bench.record["facts"]["datasheet_flops"]
    share = f"{measured / datasheet:.0%} of the datasheet's {datasheet / 1e12:.0f}" if datasheet else "no datasheet is known"
    return Answer(f"{measured / 1e12:.4g} TFLOP/s in bfloat16: {share}.", {"flops": measured, "datasheet": datasheet})


def speed(bench: Bench, shape: str) -> Answer:
    """Tokens/s and MFU."""
    from hardware.footprint import flops_per_token

    run, peak = bench.train(shape), fastest_product(bench).figures
    rate = tokens_per_second(run)
    flops = rate * flops_per_token(bench.model(shape))
    figures = {"tokens/s": rate, "update ms": statistics.median(run["update_ms"])}
    figures |= {
        "MFU of the matmul": flops / peak["flops"],
        "MFU of the datasheet": peak["datasheet"] and flops / peak["datasheet"],
    }
    shares = f"{figures['MFU of the matmul']:.1%} of the fastest matrix product"
    if peak["datasheet"]:
        shares = f"{figures['MFU of the datasheet']:.1%} of the datasheet's peak, {shares}"
    return Answer(f"{rate:,.0f} tokens/s, micro-batches of {run['micro_batch_size']}, {run['dtype']}: {shares}.", figures)


def memory(bench: Bench, shape: str) -> Answer:
    """Peak memory against the estimate by which --micro_batch_size=auto chooses."""
    run = bench.train(shape)
    estimate, held = estimated_gb(bench, shape, run["micro_batch_size"]), run["memory_gb"]
    error = estimate / held - 1
    verdict = f"{held:.3g} GB were held and {estimate:.3g} GB estimated"
    if abs(error) <= 0.1:
        verdict += ": the estimate is right within 10 %."
    else:
        verdict += f": the estimate is {abs(error):.0%} too {'high' if error > 0 else 'low'}, mend it."
    return Answer(verdict, {"peak memory GB": held, "estimated GB": estimate})


def first_update(bench: Bench, shape: str) -> Answer:
    """Seconds until the first update, with cold and warm compiler caches. Importing torch is not in them."""

    def run(folder: Path, limit: float) -> list[float]:
        return gpu_probe.first_updates(bench.config(shape), folder, limit)

    cold, warm = bench.measure(f"first update {shape}", run, runs=2)
    verdict = f"The first update ends after {cold:.1f} s with cold caches, {warm:.1f} s with warm ones"
    return Answer(f"{verdict}{': too long, compile less' if cold > 60 else ''}.", {"cold s": cold, "warm s": warm})


def data_wait(bench: Bench) -> Answer:
    """Whether training ever waits for data."""
    shares = {}
    for shape in SHAPES:
        run = bench.train(shape)
        shares[shape] = (run["data_wait_ms"] or 0.0) / statistics.median(run["update_ms"])
    worst = max(shares, key=shares.get)
    verdict = f"At most {shares[worst]:.2%} of an update is waiting for data ({worst})"
    return Answer(f"{verdict}: {'nothing to mend' if shares[worst] < 0.01 else 'read further ahead'}.", shares)


def deterministic(bench: Bench, shape: str) -> Answer:
    """What kernels cost that give the same bits every time."""
    base = bench.train(shape)
    free = bench.train(shape, deterministic=False, micro_batch_size=base["micro_batch_size"])
    cost = 1 - tokens_per_second(base) / tokens_per_second(free)
    advice = "keep them on" if cost <= 0.05 else "find the operation that costs it"
    return Answer(f"Deterministic kernels {costs(cost, base, free)}: {advice}.", {"cost": cost})


def graph(bench: Bench, shape: str) -> Answer:
    """The compiled form that the trainer has against the other one."""
    import model

    other = "whole" if hasattr(model, "compile_blocks") else "blocks"
    names = {"whole": "one graph", "blocks": "a graph a block"}
    own = names[{"whole": "blocks", "blocks": "whole"}[other]]
    compiled = {"compile": "on"} if bench.device == "cuda" or shape == SHAPES[0] else {}  # tiny compiles one shape
    base = bench.train(shape, **compiled)
    changed = bench.train(shape, graph=other if compiled else "", micro_batch_size=base["micro_batch_size"], **compiled)
    gain = tokens_per_second(changed) / tokens_per_second(base) - 1
    advice = f"change to {names[other]}" if gain > 0.02 else f"stay with {own}"
    faster = f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'}"
    return Answer(f"{names[other].capitalize()} is {faster} than the trainer's {own}: {advice}.", {"gain": gain})


def exact_cost(bench: Bench, shape: str) -> Answer:
    """What --strategy=exact costs on one rank."""
    base = bench.train(shape)
    exact = bench.train(shape, strategy="exact", micro_batch_size=base["micro_batch_size"])
    cost = 1 - tokens_per_second(exact) / tokens_per_second(base)
    return Answer(
        f"--strategy=exact {costs(cost, base, exact)}, and {exact['memory_gb']:.3g} GB instead of {base['memory_gb']:.3g}.",
        {"cost": cost},
    )


def log_every(bench: Bench) -> Answer:
    """Whether a report of every step makes training wait."""
    often = bench.train(SHAPES[0])
    logged = often["logged_ms"] / statistics.median(often["update_ms"]) - 1
    seldom = bench.train(SHAPES[0], log_every=1000, micro_batch_size=often["micro_batch_size"])
    cost = 1 - tokens_per_second(often) / tokens_per_second(seldom)
    advice = "nothing waits" if cost <= 0.01 else "a report waits for the GPU"
    verdict = f"--log_every=1 {costs(cost, often, seldom)}: {advice}. metrics.jsonl's step_ms is {logged:+.1%} from the truth"
    figures = {"cost": cost, "step_ms off by": logged}
    return Answer(f"{verdict}{': mend the meter' if abs(logged) > 0.01 else ''}.", figures)


def attention(bench: Bench, shape: str) -> Answer:
    """Which attention kernel is fastest, and which of those that give the same bits."""
    sequences = max(1, (64 if bench.tiny else 32768) // bench.model(shape).seq_len)
    arguments = bench.model(shape), sequences, bench.device
    times = {
        name: bench.operation(f"attention {shape} {name}", gpu_probe.attention_kernels, *arguments, same, quick(bench))
        for name, same in (("deterministic", True), ("free", False))
    }
    own = times["deterministic"]["the trainer's"]
    best = {name: min((ms, kernel) for kernel, ms in kernels.items() if ms is not None) for name, kernels in times.items()}
    ms, kernel = best["deterministic"]
    if own <= 1.05 * ms:
        verdict = f"The trainer's kernel ({own:.3g} ms) is the fastest deterministic one"
    else:
        verdict = f"{kernel} takes {ms:.3g} ms, the trainer's kernel {own:.3g}: use {kernel}"
    return Answer(f"{verdict}; the fastest of all is {best['free'][1]} with {best['free'][0]:.3g} ms.", times)


def loss_rows(bench: Bench, shape: str) -> Answer:
    """How many rows of logits to compute at a time."""
    from hardware.footprint import rows_at_a_time

    model, tokens = bench.model(shape), 128 if bench.tiny else 32768
    own = min(tokens, rows_at_a_time(model.vocab_size, bench.device))
    counts = sorted({own, *((32, 128) if bench.tiny else ROWS)})
    times = {}
    for rows in counts:
        arguments = model, tokens, rows, bench.device, quick(bench)
        times[rows] = bench.operation(f"loss {shape} {rows} rows", gpu_probe.loss_in_parts, *arguments)
    best = min(times, key=lambda rows: times[rows]["ms"])
    loss = times[own]["ms"] / times[best]["ms"] - 1
    advice = "keep them" if loss <= 0.03 else f"{best} rows take {times[best]['ms']:.3g} ms: use them"
    return Answer(f"The trainer's {own} rows take {times[own]['ms']:.3g} ms: {advice}.", {str(k): v for k, v in times.items()})


def joined(bench: Bench, shape: str) -> Answer:
    """Whether products with the same input should be one product."""
    tokens = 128 if bench.tiny else 16384
    times = bench.operation(
        f"joined {shape}", gpu_probe.joined_products, bench.model(shape), tokens, bench.device, quick(bench)
    )
    said = []
    for name, (separate, together) in times.items():
        gain = 1 - together / separate
        advice = "join them" if gain > 0.05 else "keep them separate"
        said.append(f"{name} take {separate:.3g} ms apart and {together:.3g} ms joined: {advice}")
    return Answer(f"{'; '.join(said)}.", times)


def host_copies(bench: Bench) -> Answer:
    """How fast a checkpoint leaves the device."""
    size = 1 << (20 if bench.tiny else 31)
    seconds = bench.operation("copies to the host", gpu_probe.copies_to_the_host, size, bench.device)
    rates = {name: size / 1e9 / value for name, value in seconds.items()}
    (plain, slow), (staged, fast) = rates.items()
    advice = "keep the buffer" if fast > 1.05 * slow else "the buffer gains nothing: remove it"
    return Answer(f"{slow:.3g} GB/s {plain}, {fast:.3g} GB/s {staged}: {advice}.", rates)


def precision(bench: Bench) -> Answer:
    """Whether a small model learns the same in bfloat16 as in float32."""
    small = {key: value for key, value in SMALL.items() if not (bench.tiny and key in TINY)} | {"optimizer": "adamw"}
    updates = 20 if bench.tiny else 60
    full, half = (bench.train("laptop", updates=updates, dtype=dtype, **small)["losses"] for dtype in ("float32", "bfloat16"))
    difference, learned = max(abs(a - b) / a for a, b in zip(full, half, strict=False)), full[0] - full[-1]
    passed = difference < 0.02 and learned > 0.1
    words = "the same within 2 %" if passed else "NOT the same within 2 %" if learned > 0.1 else "NOTHING was learned"
    verdict = f"While the loss fell by {learned:.2f}, bfloat16 and float32 differed by at most {difference:.2%}: {words}."
    return Answer(verdict, {"difference": difference, "learned": learned}, passed)


def exact_worlds(bench: Bench) -> Answer:
    """Whether --strategy=exact gives the same bits on any number of ranks."""
    micro = 2 if bench.tiny else 8
    runs = {ranks: bench.digests("exact", ranks, strategy="exact", micro_batch_size=micro) for ranks in bench.worlds}
    digests = {str(ranks): run["sha256"] for ranks, run in runs.items()}
    passed = len({json.dumps(digest) for digest in digests.values()}) == 1
    numbers = ", ".join(digests)
    verdict = f"One sha256 on {numbers} ranks." if passed else f"BROKEN: different weights on {numbers} ranks."
    return Answer(verdict, digests, passed)


def resume(bench: Bench, ranks: int, variables: dict) -> Answer:
    """Whether a killed and resumed run ends with the same bits."""
    name = "".join(f" {key}={value}" for key, value in variables.items())
    micro = {"micro_batch_size": 1 if bench.tiny else 4}
    undisturbed = bench.digests(f"undisturbed{name}", ranks, variables, **micro)
    resumed = bench.digests(f"killed and resumed{name}", ranks, variables, kill_after=7, **micro)
    if resumed["updates"] >= undisturbed["updates"]:
        return Answer("The killed run began anew: it had no checkpoint.", {}, passed=False)
    passed = undisturbed["sha256"] == resumed["sha256"]
    verdict = "The resumed run is the same, bit for bit." if passed else "The resumed run is NOT the same."
    if not passed and variables:  # what the trainer switches off is known not to add in a fixed order
        return Answer(f"{verdict} The trainer is right to switch NVLS off.", {})
    return Answer(verdict, {"sha256": undisturbed["sha256"], "resumed": resumed["sha256"]}, passed)


def scaling(bench: Bench, shape: str) -> Answer:
    """Tokens/s on more GPUs, each with the same work."""
    micro, rates = bench.train(shape)["micro_batch_size"], {}
    for ranks in bench.worlds:
        tokens = ranks * (TINY["tokens_per_update"] if bench.tiny else TOKENS_PER_UPDATE)
        rates[ranks] = tokens_per_second(bench.train(shape, ranks, tokens_per_update=tokens, micro_batch_size=micro))
    most = max(rates)
    share = rates[most] / most / rates[1]
    advice = "the network does not matter" if share > 0.95 else "see how much of the all-reduce is hidden behind backward"
    return Answer(
        f"{rates[most]:,.0f} tokens/s on {most} ranks, {share:.0%} of {most} times one: {advice}.",
        {str(k): v for k, v in rates.items()},
    )


def questions(ranks: int, tiny: bool) -> Iterator[tuple[str, Callable[[Bench], Answer]]]:
    """All questions for a machine with so many GPUs, the most important first."""
    yield "How fast is the fastest matrix product?", fastest_product
    for shape in SHAPES:
        yield f"{shape}: how fast does it train?", lambda bench, shape=shape: speed(bench, shape)
        yield f"{shape}: how much memory does it take?", lambda bench, shape=shape: memory(bench, shape)
    yield "Does training wait for data?", data_wait
    yield "Is --strategy=exact one sha256 on any number of ranks?", exact_worlds
    yield f"Is a killed and resumed run the same on {ranks} rank(s)?", lambda bench: resume(bench, ranks, {})
    yield "Is bfloat16 as good as float32?", precision
    for shape in SHAPES:
        yield f"{shape}: which attention kernel?", lambda bench, shape=shape: attention(bench, shape)
    for title, ask in (
        ("what do deterministic kernels cost?", deterministic),
        ("one graph, or parts?", graph),
        ("what does --strategy=exact cost?", exact_cost),
        ("when does the first update end?", first_update),
    ):
        for shape in SHAPES:
            yield f"{shape}: {title}", lambda bench, shape=shape, ask=ask: ask(bench, shape)
    for shape in SHAPES[1:]:  # gpt2_124m's loss has the same sizes as qwen3_124m's
        yield f"{shape}: how many rows of logits at a time?", lambda bench, shape=shape: loss_rows(bench, shape)
    for shape in SHAPES:
        yield f"{shape}: should q, k, v and gate, up be joined?", lambda bench, shape=shape: joined(bench, shape)
    yield "How fast does a checkpoint leave the GPU?", host_copies
    yield "Does --log_every=1 make training wait?", log_every
    if ranks > 1 or tiny:
        nvls = {"NCCL_NVLS_ENABLE": "1"}
        yield "Is a killed and resumed run the same with NVLS?", lambda bench: resume(bench, max(ranks, 2), nvls)
        for shape in SHAPES:
            yield f"{shape}: how does it scale?", lambda bench, shape=shape: scaling(bench, shape)


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic on measurements


def quick(bench: Bench) -> float:
    """Seconds to spend on timing one operation."""
    return 0.02 if bench.tiny else 0.5


def tokens_per_second(run: dict) -> float:
    """Of a timed run, by its median update."""
    return 1000 * run["tokens_per_update"] / statistics.median(run["update_ms"])


def noise(run: dict) -> float:
    """Half the distance of the quartiles of a run's update times, as a share of the median."""
    times = run["update_ms"]
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return (high - low) / 2 / median


def costs(cost: float, *runs: dict) -> str:
    """A difference in speed in words, or that it is below what these runs can tell."""
    least = max(0.002, *map(noise, runs))
    if abs(cost) <= least:
        return f"cost nothing that can be measured (less than {least:.1%})"
    return f"cost {cost:.1%}" if cost > 0 else f"cost nothing, {-cost:.1%} were gained"


def estimated_gb(bench: Bench, shape: str, micro_batch_size: int) -> float:
    """Memory of a rank as `choices.fit_micro_batch` counts it: weights, gradients and AdamW's state, activations, logits."""
    from hardware.footprint import flops_per_token, rows_at_a_time

    model = bench.model(shape)
    state = 16 * flops_per_token(model) / 6
    activations = micro_batch_size * 2 * model.seq_len * model.n_layer * (14 * model.n_embd + 3 * model.d_ff)
    return (state + activations + 10 * model.vocab_size * rows_at_a_time(model.vocab_size, bench.device)) / 1e9


# ---------------------------------------------------------------------------------------------------------------------
# Asking, and keeping the answers


def main(args: list[str]) -> int:
    """The command."""
    options = parse(args)
    limit = 3 * LIMIT if options.tiny else LIMIT  # a CPU compiles slowly
    if options.minutes * 60 < 2 * limit:
        raise UserError(f"--minutes={options.minutes:g} must be at least {2 * limit / 60:.2g}, which one measurement may take")
    missing = gpu_probe.import_trainer()
    for name in missing:
        print(f"{name} is not installed: going on without it", flush=True)
    with machine.workspace() as folder:
        device = "cpu" if options.tiny else "cuda"
        facts = gpu_probe.in_fork(gpu_probe.facts, device, folder=folder, limit=LIMIT)
        if not facts["gpus"] and not options.tiny:
            raise UserError(
                "no CUDA device: these questions need a GPU and a torch built for it; --tiny=true tries them on a CPU"
            )
        out = Path(options.out) if options.out else folder / "results" if options.tiny else machine.RESULTS
        out.mkdir(exist_ok=True)
        records = json.loads((out / "gpu.json").read_text()) if (out / "gpu.json").exists() else {}
        key = f"{len(facts['gpus'])} x {(facts['gpus'] or ['CPU'])[0]}, torch {facts['torch']}, code {code_digest()}"
        record = records.setdefault(key, {"facts": facts, "measurements": {}, "answers": {}} | machine.describe())
        record["missing"] = missing
        tokens, work = folder / "tokens", folder / "work"
        work.mkdir()
        make_tokens(tokens, 400_000 if options.tiny else 20_000_000, 512 if options.tiny else 50257)
        ranks = max(1, len(facts["gpus"]))

        def save() -> None:
            publish_text(out / "gpu.json", json.dumps(records, indent=1) + "\n")
            publish_text(out / "gpu.md", markdown(key, record))

        deadline = time.monotonic() + 60 * options.minutes
        bench = Bench(record, work, tokens, device, options.tiny, deadline, ranks, limit, save)
        listed = dict(questions(ranks, options.tiny))
        left = ask_all(bench, listed)
        print(f"{len(listed) - left} of {len(listed)} questions are answered{'' if options.tiny else f', in {out}'}")
    if left:
        print("the same command goes on")
        return EX_TEMPFAIL
    return 0 if all(answer["passed"] for answer in record["answers"].values()) else 1


def parse(args: list[str]) -> argparse.Namespace:
    """The flags. By argparse, because tyro may be missing."""

    def truth(text: str) -> bool:
        return {"true": True, "false": False}[text.lower()]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="start no measurement that may take longer than this")
    parser.add_argument("--tiny", type=truth, default=False, metavar="true|false", help="try all questions on a CPU")
    parser.add_argument("--out", default="", help="directory of gpu.json and gpu.md (bench/results)")
    options = parser.parse_args(args)
    return options


def ask_all(bench: Bench, listed: dict[str, Callable[[Bench], Answer]]) -> int:
    """Ask what has no answer, then again what failed. Returns how many questions are left for want of time."""
    answers = bench.record["answers"]
    open_questions = [title for title in listed if title not in answers]
    failed = [title for title in listed if title in answers and answers[title].get("failed")]
    for number, title in enumerate(waiting := open_questions + failed):
        began = time.monotonic()
        try:
            answer = vars(listed[title](bench))
        except OutOfTime:
            return len(waiting) - number
        except Exception as error:  # one question must not take the others with it
            if not isinstance(error, RunError):
                traceback.print_exc()
            answer = vars(Answer(f"Could not be measured: {error}", {}, passed=False)) | {"failed": True}
        answers[title] = answer | {"seconds": round(time.monotonic() - began, 1)}
        bench.save()
        print(f"{title}\n    {answer['verdict']}", flush=True)
    return 0


def code_digest() -> str:
    """Eight digits that change with the trainer's modules and presets."""
    digest = hashlib.sha256()
    root = machine.ROOT
    folders = sorted({path.parent for path in root.glob("*/__init__.py")})
    for path in sorted([*root.glob("*.py"), *root.glob("config/*.toml"), *(p for f in folders for p in f.glob("*.py"))]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def make_tokens(directory: Path, count: int, vocab_size: int) -> None:
    """Shards in llm.c's naming of ids that fall off as 1 / rank, as words do: there is something to learn, but not much."""
    import numpy as np

    from dataset.tokens import write_shard

    directory.mkdir()
    ids = np.exp(np.random.default_rng(0).random(count) * np.log(vocab_size)).astype(np.uint16) - 1
    write_shard(directory / "made_train_000000.bin", ids, vocab_size)
    write_shard(directory / "made_val_000000.bin", ids[:100_000], vocab_size)


def markdown(key: str, record: dict) -> str:
    """The answers as a page: a table of the shapes, then every question with its verdict."""
    columns = {
        "tokens/s": "{:,.0f}",
        "update ms": "{:.1f}",
        "MFU of the datasheet": "{:.1%}",
        "MFU of the matmul": "{:.1%}",
        "peak memory GB": "{:.1f}",
        "estimated GB": "{:.1f}",
        "cold s": "{:.1f}",
        "warm s": "{:.1f}",
    }
    lines = [f"# {key}", "", f"| shape | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for shape in SHAPES:
        figures = {}
        for title, answer in record["answers"].items():
            figures |= answer["figures"] if title.startswith(f"{shape}: ") else {}
        cells = [form.format(figures[name]) if figures.get(name) is not None else "" for name, form in columns.items()]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    lines += ["", "| question | answer |", "| --- | --- |"]
    lines += [f"| {title} | {answer['verdict'].replace('|', '/')} |" for title, answer in record["answers"].items()]
    facts = record["facts"]
    lines += ["", ", ".join(f"{name} {value}" for name, value in facts.items() if value), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    with errors.user_errors():
        sys.exit(main(sys.argv[1:]))
