"""Write docs/figures.md and docs/audit.md from the results of the benchmarks: python bench/figures.py"""

import json
import textwrap

import machine  # puts the project's folder on the path
from lockstep.common.files import publish_text

# isort: split
import audit_trainers
import gpu

PAGE, AUDIT = machine.ROOT / "docs" / "figures.md", machine.ROOT / "docs" / "audit.md"
RESULTS = machine.ROOT / "bench" / "results"
HEAD = "| what | figure | machine | command | result |\n|---|---|---|---|---|"
STEPS = "speed.py steps --nanogpt=PATH --litgpt=PATH --litgpt_python=PATH --rounds=5"
SPEED = {  # the command for each result
    "tokens_per_second_epyc": f"{STEPS} --dtypes=float32",
    "tokens_per_second_epyc_bfloat16": STEPS,
    "tokens_per_second_avx2": f"{STEPS} --dtypes=float32 --processor=avx2",
}


def different(values) -> int:
    return len({str(value) for value in values})


def kills(result: dict) -> str:
    same = "one sha256" if all(result["same"].values()) else "DIFFERENT"
    return f"{len(result['unusable']) or 'no'} unusable states, {same}"


def same_run(result: dict) -> str:
    runs = [(row["strategy"], row["model.safetensors"]) for row in result["runs"]]
    found = {name: different(weights for strategy, weights in runs if strategy == name) for name in ("ddp", "exact")}
    return "; ".join(f"{count} sha256 under `{name}`" for name, count in found.items())


def times(result: dict, name: str, other: str) -> str:
    return f"**{machine.ratio(result['update_ms_each'][name], result['update_ms_each'][other]):.2f}** times"


def hidden(result: dict) -> str:
    ms = {(row["way"], row["bucket_mb"]): row["exposed_ms"] for row in result["rows"][:12]}  # two ranks at 2 Gbit/s
    ours, ddp = (min(value for (name, _), value in ms.items() if name == way) for way in ("overlap", "ddp"))
    return f"{ms['one bucket', 25]:.0f} ms in one bucket, at least {ours:.0f} in several (`ddp`: {ddp:.0f})"


# Result, what it measures, the command, and its figure.
SECTIONS = {
    "Strategies, compared with torch's DDP": [
        ("exact_cost", "time of an update under `exact` (compiled, a Qwen3 of 4.3 M parameters)",
         "grad_sync.py cost --strategies=ddp,exact --ranks=1,2 --rounds=5 --compile=on --name=exact_cost",
         lambda r: "; ".join(f"{times(r, f'exact on {n}', f'ddp on {n}')} `ddp` on {n} of 2 cores" for n in (1, 2))),
        ("overlap", "time that communication adds to an update on two ranks at 2 Gbit/s ([ddp.md](ddp.md#what-overlap-needs))",
         "grad_sync.py overlap", hidden),
        ("scaling", "speed of several processes on two cores, compared with one, `ddp`",
         "grad_sync.py cost --strategies=ddp --rounds=3 --steps=8 --name=scaling",
         lambda r: "; ".join(f"{times(r, 'ddp on 1', f'ddp on {n}')} on {n}" for n in (2, 4))),
    ],
    "The run is the same run": [
        ("same_run", "200 steps on 1 to 4 ranks, and killed six times", "same_run.py", same_run),
        ("machines", "`make same` with other instruction sets, threads, ranks and versions, after kills, and on 64-bit Arm in "
         "qemu", "machines.py --python=PATH",
         lambda r: f"{different(m['found']['llama'] for m in r['machines'])} sha256 in {len(r['machines'])} configurations"),
        ("portable_speed", "CPU time of an update in portable numerics, relative to native float32 (eager, one thread)",
         "speed.py portable --rounds=3",
         lambda r: f"**{r['laptop']['ratio']:.2f}** times (laptop preset), **{r['10.65 M']['ratio']:.2f}** times (10.65 M)"),
        ("resume", "cases run twice and resumed, on 3 to 8 ranks", "drill.py resume",
         lambda r: f"{len(r['cases'])} cases, {sum(different(c['sha256']) == 1 for c in r['cases'])} with one sha256"),
        ("audit", "Lockstep and other trainers: repeated, killed, on more ranks, from damaged checkpoints",
         "audit.py nanogpt --path=PATH", lambda r: f"[audit.md](audit.md), {len(r['trainers'])} rows"),
        ("hard_kills", "200 kills at random instants", "drill.py kills --kills=200", kills),
        ("hard_kills_ddp_3", "125 kills of `ddp` on three ranks", "drill.py kills --kills=125 --ranks=3", kills),
        ("hard_kills_fsdp_3", "125 kills of `fsdp` on three ranks",
         "drill.py kills --kills=125 --strategy=fsdp --ranks=3", kills),
        ("hard_kills_exact_6", "125 kills of `exact` on up to six ranks",
         "drill.py kills --kills=125 --strategy=exact --ranks=6", kills),
        ("hard_kills_fsdp_sharded_3", "300 kills of `fsdp`, 28 files in each checkpoint",
         "drill.py kills --kills=300 --strategy=fsdp --ranks=3 --max_shard_bytes=20000", kills),
        ("hard_kills_ddp_2_mirror", "20 kills with `--mirror` to an S3 server on loopback; half of them also lose the disk",
         "drill.py kills --kills=20 --ranks=2 --mirror=URL", kills),
    ],
    "Memory and loss": [
        ("fake_gpu", "memory of a rank on a GPU, predicted and counted with fake CUDA tensors (eager, 1 to 512 ranks)",
         "fake_gpu.py", lambda r: f"off by at most {r['largest_error']:.1%} in {len(r['settings'])} settings"),
        ("pretrained", "loss of a small Llama and GPT-2 that continue on another text, with our flags and by transformers",
         "pretrained.py --text=PATH",
         lambda r: f"[export.md](export.md#continue-pretraining-a-hugging-face-model), {len(r['rows'])} rows"),
    ],
}  # fmt: skip


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def ending(name: str, result: dict, command: str) -> str:
    """The cells of a row that say which machine measured a result, when, and with which command."""
    host = result["machine"]
    cpu = "Xeon (AMX)" if "Xeon" in host["cpu"] else host["cpu"].removeprefix("AMD ")
    cpu = "EPYC as AVX2" if host.get("instructions") == "avx2" else cpu
    others = result["load before"][0] if "load before" in result else result["load"][0] - host["cores"]
    load = ", under load" if others > 1 else ""
    torch = result["versions"]["torch"].partition("+")[0]
    where = f"{host['cores']} cores of {cpu}{load}, torch {torch}, {result['date']}"
    return f"{where} | `python bench/{command}` | {name}.json |"


def speed_rows(name: str, result: dict, command: str) -> list[tuple[float, str]]:
    """The rows of tokens/s beside each contender, with their ratios."""
    speeds, rows = result["tokens/s"], []
    for key, ratio in result["ratios"].items():
        shown = "; ".join(f"{speeds[each]['median']:,.0f} ({each})" for each in key.split(" / "))
        rows.append((ratio, f"| **{ratio:.2f}** | tokens/s: {shown} | {ending(name, result, command)}"))
    return rows


def page() -> str:
    """The whole page."""
    compared = [row for name, command in SPEED.items() for row in speed_rows(name, read(name), command)]
    lines = ["| ratio | what | machine | command | result |", "|---|---|---|---|---|", *(line for _, line in sorted(compared))]
    for title, rows in SECTIONS.items():
        lines += [f"\n## {title}\n", HEAD]
        for name, what, command, figure in rows:
            result = read(name)
            lines.append(f"| {what} | {figure(result)} | {ending(name, result, command)}")
    return machine.renewed(PAGE, "\n".join([*lines, *gpu_questions()]) + "\n")


def gpu_questions() -> list[str]:
    """The section on one GPU: each question with its answer."""
    ((where, record),) = read("gpu").items()
    lines = ["\n## On one GPU\n", f"`python bench/gpu.py --nanogpt=PATH` on an {where}, {record['date']} (gpu.json).\n"]
    lines += ["| question | answer |", "|---|---|"]
    return lines + [f"| {gpu.TITLES[name]} | {record['answers'][name]['words']} |" for name in gpu.TITLES]


QUESTIONS = {
    "twice": "the same command twice",
    "killed": "killed with SIGKILL, then resumed",
    "terminated": "stopped with SIGTERM, then resumed",
    "saving": "killed while saving, then resumed",
    "flipped": "resumed after one bit in the newest checkpoint was flipped",
    "two": "on 2 ranks",
    "three": "on 3 ranks",
    "moved": "killed with SIGKILL on 1 rank, then resumed on 2",
}
RANKS = ("two", "three", "moved")


def audit_page(rows: dict) -> str:
    """Return docs/audit.md with a new table and commands of each trainer."""
    rows = {name: rows[name] for name in audit_trainers.TRAINERS if name in rows}
    lines = ["| " + " | ".join(["", *QUESTIONS.values()]) + " |", "|---" * (len(QUESTIONS) + 1) + "|"]
    lines += [f"| **{row['title']}** | " + " | ".join(cells(row["found"])) + " |" for row in rows.values()]
    for name, row in rows.items():
        kind = audit_trainers.TRAINERS[name]
        flags = " --path=PATH --python=PYTHON" if kind.repository else " --python=PYTHON" if kind.interpreter else ""
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        lines += [f"\n## {row['title']}\n", f"We ran `python bench/audit.py {name}{flags}` on {row['date']} ({row['cpu']}),"]
        lines += [f"at commit {row['commit']}, with {versions}." if kind.repository else f"with {versions}."]
        if "without" in row["found"]:
            where = "a CPU" if kind.always_on_cpu else "a CPU with several ranks"
            lines += ["", f"It does not start on {where}: `{row['found']['without']}`. {kind.on_cpu_note}"]
        lines += ["", "```sh", *dict.fromkeys(row["command"]), "```"]
    return machine.renewed(AUDIT, "\n".join(lines) + "\n")


def cells(found: dict) -> list[str]:
    """Return the cells of a trainer's row."""
    if "error" in found:
        return [outcome(found)] + ["-"] * (len(QUESTIONS) - 1)
    shown = {question: outcome(answer) for question, answer in found.items() if isinstance(answer, dict)}
    if isinstance(found.get("terminated"), dict):
        saved = found["terminated"].get("from", 0) >= found["terminated"]["at"]
        shown["terminated"] = f"{'saves' if saved else 'saves nothing'}, and {shown['terminated']}"
    if isinstance(found.get("flipped"), dict):
        detected = "error" in found["flipped"] or found["flipped"]["from"] < found["killed"]["from"]
        shown["flipped"] = f"{'detects it' if detected else 'does not detect it'}, and {shown['flipped']}"
    if "error" in found.get("two", {}):  # then nothing was tested on several ranks
        shown |= {question: shown[question].replace("fails", "does not start here") for question in found if question in RANKS}
    return [shown.get(question, "not tested") for question in QUESTIONS]


def outcome(found: dict) -> str:
    """Return the outcome of a run in words: where it began, its tokens and its weights."""
    if "error" in found:
        if found["error"].startswith("no update"):
            return f"fails: it makes {found['error'].replace(', ', ' and ends with ')}"
        return f"fails: `{textwrap.shorten(found['error'], 90, placeholder=' ...').replace('|', ' ')}`"
    other, difference = found["of"] - found["same"], found["difference"]
    tokens = f"different tokens in {other} of {found['of']} updates" if other else "the same tokens"
    tokens += f" (the first sees the tokens of update {found['again']})" if found["again"] else ""
    weights = f"weights that differ by {difference:.0e}" if difference else "the same bits"
    weights = "weights of different shapes" if difference is None else weights
    return f"resumes after update {found['from']} with {tokens} and {weights}" if found["from"] else f"{tokens} and {weights}"


if __name__ == "__main__":
    publish_text(PAGE, page())
    publish_text(AUDIT, audit_page(read("audit")["trainers"]))
