"""Write docs/figures.md from the results of the benchmarks: python bench/figures.py --out=bench/results"""

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import machine  # puts the project's folder on the path
from lockstep.common.files import publish_text

# isort: split
import gpu

PAGE = machine.ROOT / "docs" / "figures.md"
# Where to find the measurements of scripts that no longer exist.
NOW = {"hard_kills": "drill.py kills", "resume": "drill.py resume", "tokens_per_second": "speed.py steps"}
NOW |= {"time_to_loss": "speed.py loss"}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
OURS = {"out", "runs", "jobs", "name", "save_every"}  # flags that change no figure
PREFACE = """# All figures, and where they come from

Each row gives a figure, the machine that it was measured on, and the command that measures it again. The code has changed
since, so run the command for an up-to-date figure; it writes to `runs/bench` unless you set `--out`. `python bench/figures.py
--out=bench/results` generates the page from the files in `bench/results/`, which also record the versions, the commit, the load
and every single measurement. [bench/LOG.md](../bench/LOG.md) describes what we tried, including what didn't help.

The machines have two or four cores of an Intel Xeon with a matrix unit (AMX), or of an AMD EPYC with bfloat16 instructions but
no matrix unit. *As AVX2* means an EPYC limited to AVX2 by `--processor=avx2`. *Under load* means that other programs were
running.
"""
SPEED = """
## Speed, compared with others

The rows where Lockstep is slower, with ratios below 1, come first. Contenders took turns, and each ratio is the median over the
rounds. The rows with tokens/s train a model with 6 layers, a width of 384 and a context of 256 tokens, on 8 sequences per
update. litgpt and nanochat train their own models with the same blocks. nanochat's model costs more, because it has value
embeddings and trains with Muon. The rows with a loss (per character of tiny Shakespeare) time the whole command, from start to
end. One result is only in [bench/LOG.md](../bench/LOG.md): with its matrix unit switched off by
`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`, a Xeon reached **0.79** of nanoGPT's tokens/s (bfloat16 against float32, 22 Nov 2026).

| ratio | what | machine | command | result |
|---|---|---|---|---|"""
HEAD = "| what | figure | machine | command | result |\n|---|---|---|---|---|"


def prepared(result: dict) -> list[tuple[float, str]]:
    """Text to shards, beside each contender."""
    rows, ours = [], result["ours, MB/s"]["median"]
    for key in result:
        if key.startswith("ours / ") and "processor" not in key:
            other = key.removeprefix("ours / ")
            words = f"{result['bytes'] / 1e6:.0f} MB of text to shards on disk: {ours:.0f} MB/s; {other}"
            words += " in memory, without writing" if other.startswith("tiktoken") else "'s process pool"
            rows.append((result[key], f"{words}: {result[f'{other}, MB/s']['median']:.0f}"))
    return rows


def trained(result: dict) -> list[tuple[float, str]]:
    """Tokens/s in training, beside each contender."""
    if "ratios" not in result:  # an older version of the script: the faster precision for ours, float32 for nanoGPT
        ours, mine = "ours, compile on, tokens/s", result["ours, compile on, tokens/s"]["median"]
        dtype = "float32" if result["machine"].get("instructions") == "avx2" else "bfloat16"
        rows = []
        for mode, words in (("on", "compiled"), ("off", "eager")):
            other = f"nanoGPT, compile {mode}, tokens/s"
            words = f"tokens/s: {mine:,.0f} in {dtype}, compiled; nanoGPT in float32, {words}: {result[other]['median']:,.0f}"
            rows.append((result[f"{ours} / {other}"], words))
        for products in (values["median"] for key, values in result.items() if key.startswith("the products")):
            words = f"tokens/s: {mine:,.0f} in {dtype}, compiled; only the matmuls with its weights: {products:,.0f}"
            rows.append((1 / result[f"a step / its products, {ours}"], words))
        return rows
    speeds, rows = {name: values["median"] for name, values in result["tokens/s"].items()}, []
    for key, value in result["ratios"].items():
        ours, other = key.split(" / ")
        rows.append((value, f"tokens/s: {speeds[ours]:,.0f} ({ours}); {speeds[other]:,.0f} ({other})"))
    return rows


def reached(result: dict) -> list[tuple[float, str]]:
    """Seconds to a loss, beside nanoGPT."""
    seconds, losses = result["seconds"], result.get("losses") or {k: v["loss"] for k, v in result["at_the_end"].items()}
    rows = []
    for name in seconds:
        if name != "nanoGPT, s":
            recipe, loss = name.removesuffix(", s"), losses[name.removesuffix(", s")]
            words = "a recipe tuned for this loss" if recipe == "ours" else recipe
            words = f"{words}: {seconds[name]['median']:.1f} s to {loss:.2f}; nanoGPT's README run for a CPU in float32: "
            words += f"{seconds['nanoGPT, s']['median']:.1f} s to {losses['nanoGPT']:.2f}"
            faster = result["times_faster"]
            rows.append((faster[recipe] if isinstance(faster, dict) else faster, words))
    return rows


def exact_cost(result: dict) -> str:
    cells = []
    for ranks in (1, 2):
        exact, ddp = (result["update_ms_each"][f"{name} on {ranks}"] for name in ("exact", "ddp"))
        times = f"{statistics.median(exact):.0f} against {statistics.median(ddp):.0f} ms"
        cells.append(f"**{machine.ratio(exact, ddp):.2f}** times `ddp` on {ranks} rank{'s' * (ranks > 1)} ({times})")
    return "; ".join(cells)


def synced(result: dict) -> str:
    rows = {(row["strategy"], row["ranks"]): row["update_ms"] for row in result["rows"]}
    cells = [f"`{name}` {rows[name, 2] / rows['ddp', 2]:.2f}" for name in ("fsdp", "scratch_overlap")]
    return f"relative to `ddp` ({rows['ddp', 2]:.0f} ms): " + ", ".join(cells)


def kills(result: dict) -> str:
    same = "one sha256" if all(result["same"].values()) else "DIFFERENT"
    return f"{len(result['unusable']) or 'no'} unusable states, {same}"


def same_run(result: dict) -> str:
    found = {}
    for row in result["runs"]:
        found.setdefault(row["strategy"], set()).add(row["model.safetensors"])
    return "; ".join(f"{len(values)} sha256 under `{name}`" for name, values in sorted(found.items()))


def factors(result: dict) -> str:
    return "the best rate moves by a factor of " + ", ".join(
        f"{found['dial']:.2f} ({OPTIMIZERS[name]})" for name, found in result["factors"].items()
    )


def own_length(result: dict) -> str:
    rows = [(row["best_rate"] / row["dial"], OPTIMIZERS[row["optimizer"]], row["depth"]) for row in result["curves"]]
    found = [f"{ratio:.2f} ({optimizer}, depth {depth})" for ratio, optimizer, depth in rows]
    return "the best rate, divided by the dial's: " + ", ".join(found)


def batches(result: dict) -> str:
    rows = {}
    for row in result["curves"]:
        rows.setdefault(row["optimizer"], []).append((row["dial_loss"], row["batch"]))
    best = []
    for name, found in rows.items():
        tried = ", ".join(f"{batch:,}" for batch in sorted(batch for _, batch in found))
        best.append(f"{min(found)[1]:,} tokens with {OPTIMIZERS[name]} (of {tried})")
    return "at the dial's rate, the loss is lowest with a batch of " + " and of ".join(best)


def within_documents(result: dict) -> str:
    found = {name: values for name, values in result["differences"].items() if "packed" not in name}  # in an older result
    return "; ".join(f"{v['mean']:+.3f} ± {v['standard error']:.3f} ({name.split(',')[0]})" for name, v in found.items())


def phases(result: dict) -> str:
    losses = {row["run"]: row["code"] for row in result["runs"] if "cosine" in row["run"] or row["run"].startswith("decay-")}
    return "validation loss " + ", ".join(f"{value:.3f} ({name.replace('-', ', ')} steps)" for name, value in losses.items())


def document_time(result: dict) -> str:
    found = result["milliseconds of an update"]
    return ", ".join(f"{of['document / window']:.2f} times as long at {length}" for length, of in found.items())


def stalls(result: dict) -> str:
    waited = [statistics.median(result[mode]["waited_s"]) for mode in ("async", "sync")]
    return f"{waited[0]:.2f} s in the background, {waited[1]:.2f} s otherwise"


def larger_batch(result: dict) -> str:
    one, two = (row["update_ms"] for row in result["rows"])
    return f"{one / two:.2f} times the tokens/s"


def portable(result: dict) -> str:
    found = [
        f"**{result[name]['ratio']:.2f}** times ({words})" for name, words in (("laptop", "laptop preset"), ("10.65 M",) * 2)
    ]
    return ", ".join(found)


def mutated(result: dict) -> str:
    found = {name: places for name, places in result["differs"].items() if name != "none"}
    return f"{sum(map(bool, found.values()))} of {len(found)} replacements change the bits somewhere"


def learned(result: dict) -> str:
    each = {name: [row[-1] for row in result["losses"] if row[0].startswith(name)] for name in ("portable", "native")}
    return "; ".join(f"{name} {', '.join(f'{loss:.4f}' for loss in losses)}" for name, losses in each.items())


def known(result: dict) -> str:
    minutes, losses = zip(*((row["minutes to 1.4697"], row["least loss"]) for row in result["rows"]), strict=True)
    return f"{', '.join(f'{m:.0f}' for m in minutes)} minutes; lowest loss {', '.join(f'{loss:.3f}' for loss in losses)}"


SAME = [
    ("same_run", "200 steps on 1 to 4 ranks, and killed six times", same_run),
    ("machines", "`make same` with other instruction sets, threads, ranks and versions, after kills, and on 64-bit Arm in qemu",
     lambda r: f"{len({str(row['found']['llama']) for row in r['machines']})} sha256 in {len(r['machines'])} configurations"),
    ("portable_speed", "CPU time of an update in portable numerics, relative to native float32 (eager, one thread)", portable),
    ("portable_loss", "validation loss of the laptop preset after 110 steps, float32, eager, three seeds", learned),
    ("portable_mutations", "methods of portable numerics, each replaced in turn by torch's own", mutated),
    ("resume", "cases run twice and resumed, on 3 to 8 ranks",
     lambda r: f"{len(r['cases'])} cases, {sum(len({str(s) for s in c['sha256']}) == 1 for c in r['cases'])} with one sha256"),
    ("audit", "Lockstep and other trainers: repeated, killed, on more ranks, from damaged checkpoints",
     lambda r: f"[audit.md](audit.md), {len(r['trainers'])} rows"),
    ("hard_kills", "200 kills at random instants", kills),
    ("hard_kills_ddp_3", "125 kills of `ddp` on three ranks", kills),
    ("hard_kills_fsdp_3", "125 kills of `fsdp` on three ranks", kills),
    ("hard_kills_exact_6", "125 kills of `exact` on up to six ranks", kills),
    ("hard_kills_fsdp_sharded_3", "300 kills of `fsdp`, 28 files in each checkpoint", kills),
    ("hard_kills_ddp_2_mirror", "20 kills with `--mirror` to an S3 server on loopback; half of them also lose the disk", kills),
    ("power_cut", "simulated power cuts and disk failures",
     lambda r: f"{r['total']['crash cases']:,} power cuts, {r['total']['faults']:,} failures; "
     f"{r['total']['broken'] or 'nothing'} lost"),
]  # fmt: skip
STRATEGIES = [
    ("exact_cost", "time of an update under `exact` (compiled, a Qwen3 of 4.3 M parameters)", exact_cost),
    ("grad_sync", "time of an update on two ranks, eager (all strategies: [ddp.md](ddp.md))", synced),
    ("grad_sync_larger_batch", "`ddp` on two ranks (two cores) against one, 16 micro-batches per update", larger_batch),
]
OTHERS = [
    ("known_loss", "time to nanoGPT's 1.4697 on tiny Shakespeare with `config/shakespeare_10m.toml`: bfloat16, compiled, "
     "three seeds", known),
    ("memory", "memory of a rank, predicted and measured",
     lambda r: f"off by at most {r['largest_error']:.1%} in {len(r['settings'])} settings"),
    ("fake_gpu", "memory of a rank on a GPU, predicted and counted with fake CUDA tensors (eager, 1 to 512 ranks)",
     lambda r: f"off by at most {r['largest_error']:.1%} in {len(r['settings'])} settings"),
    ("dial", "best learning rate relative to the rate of `--depth` (the dial), over a factor of 4 in width and depth", factors),
    ("dial_text", "the same on another text", factors),
    ("dial_length", "the same at the dial's own length, batch and weight decay, one seed", own_length),
    ("dial_tokens", "best batch for a fixed number of tokens, one seed (`--depth=4` picks 2,048 with AdamW, 5,120 with Muon)",
     batches),
    ("phases", "one trunk with three decays ([phases.md](phases.md)), beside a cosine run of each length, one seed", phases),
    ("documents_loss", "attention within documents: change in validation loss, three seeds", within_documents),
    ("documents_time", "the same: time of an update by context length", document_time),
    ("save_stall", "how long training waits for a save of 0.74 GB", stalls),
    ("scale", "data of 8 to 16,384 ranks, simulated", lambda r: "[scale.md](scale.md)"),
]  # fmt: skip
SECTIONS = {"Strategies, compared with torch's DDP": STRATEGIES, "The run is the same run": SAME}
SECTIONS |= {"Memory, losses and learning rates": OTHERS}


def conditions(result: dict) -> str:
    """Return which machine measured a result, and when."""
    host = result["machine"]
    cpu = "Xeon (AMX)" if "Xeon" in host["cpu"] else host["cpu"].removeprefix("AMD ")
    cpu = "EPYC as AVX2" if host.get("instructions") == "avx2" else cpu
    others = result["load before"][0] if "load before" in result else result["load"][0] - host["cores"]
    load = ", under load" if others > 1 else ""
    return f"{host['cores']} cores of {cpu}{load}, torch {result['versions']['torch'].partition('+')[0]}, {result['date']}"


def command(result: dict) -> str:
    """Return the command that repeats a result with the current scripts."""
    script, *arguments = result["command"]
    name = Path(script).stem
    shown = []
    for argument in arguments:
        flag, given, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and (flag not in OURS or (name, flag) == ("grad_sync", "name")):
            shown.append(
                f"--{flag}={'PATH' if re.search('[./]|nanogpt|litgpt|nanochat|python', value, re.I) else value}"
                if given
                else argument
            )
        elif not argument.startswith("--") and name not in NOW and name not in ("memory", "audit"):
            shown.append(argument)
    if name == "audit":
        shown = ["nanogpt", "--path=PATH"]
    script = NOW.get(name, f"{name}.py")
    if not (machine.ROOT / "bench" / script.split()[0]).exists():
        return "a script that no longer exists"
    return f"`{' '.join([f'python bench/{script}', *shown])}`"


def page(folder: Path) -> str:
    """The whole page."""

    def read(name: str) -> dict:
        return json.loads((folder / f"{name}.json").read_text())

    def ending(name: str) -> str:
        return f"{conditions(read(name))} | {command(read(name))} | {name}.json |"

    compared: list[tuple[float, str, str]] = []
    kinds: dict[str, Callable] = {"prepare": prepared, "tokens_per_second": trained, "time_to_loss": reached}
    for kind, rows in kinds.items():
        for path in sorted(folder.glob(f"{kind}*.json")):
            compared += [(ratio, words, path.stem) for ratio, words in rows(read(path.stem))]
    lines = [PREFACE + SPEED]
    lines += [f"| **{ratio:.2f}** | {words} | {ending(name)}" for ratio, words, name in sorted(compared)]
    for title, rows in SECTIONS.items():
        lines += [f"\n## {title}\n", HEAD]
        lines += [f"| {what} | {figure(read(name))} | {ending(name)}" for name, what, figure in rows]
    return "\n".join([*lines, *gpu_questions(folder)]) + "\n"


def gpu_questions(folder: Path) -> list[str]:
    """The section on one GPU: each question with its answer."""
    ((where, record),) = json.loads((folder / "gpu.json").read_text()).items()
    lines = ["\n## On one GPU\n", f"`python bench/gpu.py --nanogpt=PATH` on an {where}, {record['date']} (gpu.json).\n"]
    lines += ["| question | answer |", "|---|---|"]
    return lines + [f"| {gpu.TITLES[name]} | {record['answers'][name]['words']} |" for name in gpu.TITLES]


def main(config: machine.Out) -> int:
    """The command."""
    publish_text(PAGE, page(Path(config.out)))
    return 0


if __name__ == "__main__":
    machine.command_line(__doc__, machine.Out, main)
