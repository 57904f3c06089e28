"""Command lines: parse flags into a frozen dataclass.

tyro parses the flags and writes `--help`, and msgspec checks the values. This module reports each mistake in one line, which
says what would work.
"""

import dataclasses
import difflib
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from lockstep.common.errors import UserError, refuse
from lockstep.common.records import FileOnly

# Flags of nanoGPT, build-nanogpt and Hugging Face, and our names for them.
OTHER_NAMES = {
    **dict(learning_rate="lr", max_lr="lr", decay_lr="schedule", lr_scheduler_type="schedule", warmup_iters="warmup_steps"),
    **dict(max_iters="steps", max_steps="steps", lr_decay_iters="steps", max_grad_norm="grad_clip", dataset="tokens"),
    **dict(block_size="seq_len", max_seq_len="seq_len", context_length="seq_len", run_name="name", start="prompt"),
    **dict(batch_size="micro_batch_size", per_device_train_batch_size="micro_batch_size"),
    **dict(gradient_accumulation_steps="tokens_per_update", global_batch_size="tokens_per_update"),
    **dict(total_batch_size="tokens_per_update", eval_interval="eval_every", eval_steps="eval_every", eval_iters="eval_tokens"),
    **dict(log_interval="log_every", logging_steps="log_every", save_steps="save_every", always_save_checkpoint="save_every"),
    **dict(save_interval="save_every", save_total_limit="keep_last", resume_from_checkpoint="resume"),
    **dict(output_dir="out_dir", wandb_run_name="name", wandb_log="wandb", report_to="wandb", optim="optimizer"),
    **dict(adam_beta1="beta1", adam_beta2="beta2", torch_compile="compile", data_seed="seed", num_threads="threads"),
    **dict(gradient_checkpointing="activation_checkpointing", model_name_or_path="init_from", precision="dtype"),
    **dict(num_layers="n_layer", num_hidden_layers="n_layer", num_heads="n_head", num_attention_heads="n_head"),
    **dict(num_key_value_heads="n_kv_head", hidden_size="n_embd", intermediate_size="d_ff", wd="weight_decay"),
}
EPOCHS = "set the length in updates: --steps = epochs x tokens of the dataset / --tokens_per_update"
# Flags of others that have no counterpart, and what to do instead. A hint is shown if the command has the flags it names.
NO_FLAGS = {
    "eval_only": "use python evaluate.py runs/NAME",
    "bias": "gpt2 has biases; --architecture=llama and qwen3 do not",
    "backend": "the backend is automatic: nccl on GPUs, gloo on CPUs",
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs", "num_train_epochs"), EPOCHS),
    "dollars_per_gpu_hour": "multiply the GPU hours that --plan prints by your price",
    "push": "hf upload sends a directory to the Hugging Face Hub (docs/export.md)",
    "warmup_ratio": "use --warmup_steps, a number of updates",
    "fp16": "use --dtype=float16",
    "bf16": "use --dtype=bfloat16",
    **dict.fromkeys(("amp", "mixed_precision"), "use --dtype=bfloat16 or float16"),
    **dict.fromkeys(("nproc_per_node", "num_gpus", "gpus"), "torchrun starts one process per GPU (README.md)"),
}
SCALARS = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}  # types as `--help` and errors show them
LIMITS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}  # the limits of msgspec's Meta, in words


def flat_fields(cls) -> dict[str, dataclasses.Field]:
    """Return the fields of a config dataclass by flag name. Groups (nested dataclasses) are flattened."""
    flags = {}
    for item in dataclasses.fields(cls):
        flags |= flat_fields(item.type) if dataclasses.is_dataclass(item.type) else {item.name: item}
    return flags


def is_flag(item: dataclasses.Field) -> bool:
    """Return whether a setting may be given as a flag, not only in a preset file."""
    return FileOnly not in getattr(item.type, "__metadata__", ())


def flat_values(config) -> dict[str, Any]:
    """Return the settings of a config by flag name."""
    values = {}
    for name, value in vars(config).items():
        values |= flat_values(value) if dataclasses.is_dataclass(value) else {name: value}
    return values


def replace(config, **changes):
    """Return a copy of `config` with the `changes`, which are named like flags and may be in any group."""
    values = {
        name: replace(value, **changes) if dataclasses.is_dataclass(value) else changes.get(name, value)
        for name, value in vars(config).items()
    }
    return type(config)(**values)


def parse(cls, args: list[str], description: str, default=None, first: str = ""):
    """Parse command-line `args` into the frozen dataclass `cls`. Flags may be written `--a_b` or `--a-b`, `--a=v` or `--a v`.

    default: an instance of `cls` with the values of omitted flags. `--help` and `--version` print and exit with status 0.
    first: an argument before the flags that is not in `cls`, but that `--help` should show.
    Raises UserError for an unknown flag, with the nearest known one, and for a wrong value, with what is allowed.
    """
    import tyro

    refuse(f"{word!a} is not UTF-8; rename it, if it is a file or folder" for word in args if not is_utf8(word))
    flags = flat_fields(cls)
    if "--version" in args:
        print(f"Lockstep {version()}")
        raise SystemExit(0)
    config, unknown = tyro.cli(
        cls,
        args=flags_last([word for word in args if word != "--debug"]),  # `user_errors` reads it
        prog=f"python {shlex.quote(os.path.relpath(sys.argv[0]))} {first}".rstrip(),
        default=default or tyro.MISSING_NONPROP,
        description=f"{description}\n\nAll commands accept --version, and --debug, which prints the traceback of an error.",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
        registry=values_as_text(),
        return_unknown_args=True,
        use_underscores=True,
    )
    given = flat_values(config)
    values, wrong = read_values(cls, given, strict=False)
    mistakes = {name.rstrip("_"): mistake for name, mistake in wrong.items()}  # --from is from_ in Python
    wrong_words = [*repeated(args, flags), *unexpected(unknown, flags)]
    refuse([*wrong_words, *(f"--{name} {mistake}" for name, mistake in mistakes.items())])
    for name, item in flags.items():
        if item.default is dataclasses.MISSING and given[name] == "":  # the argument without --
            runs = f", such as runs/NAME{similar_runs('runs')}" if name == "run" else "; --help describes it"
            raise UserError(f"name a {name}{runs}")
    return replace(config, **values)


def flag_names(args: list[str]) -> list[str]:
    """Return the names of the flags in `args`, in order, with underscores."""
    return [word[2:].partition("=")[0].replace("-", "_") for word in args if word.startswith("--")]


def repeated(args: list[str], flags: dict[str, dataclasses.Field]) -> Iterator[str]:
    """Yield a message for each flag that `args` set more than once: only the last value would count."""
    counts = Counter(flag_names(args))
    for name, item in flags.items():
        if counts[name.rstrip("_")] > 1:
            how = ", with commas between the items of a list" if item.type is str else ""
            yield f"--{name.rstrip('_')} is set more than once; set it once{how}"


def unexpected(words: list[str], fields: dict[str, dataclasses.Field]) -> Iterator[str]:
    """Yield a message for each of the `words` of a command line that is not an argument of it. fields: its settings."""
    names, others, open_flag = {}, [], False  # open_flag: in --a v, whether the flag waits for its value
    for word in words:
        if word.startswith("--"):
            names |= dict.fromkeys(flag_names([word]))
            open_flag = "=" not in word
        elif open_flag:
            open_flag = False
        else:
            others.append(word)
    unknown = [name for name in names if name not in fields]
    for name in names:
        if name in fields:  # tyro leaves it over, because it is FileOnly
            yield f"--{name} is not a flag; set {name} in a preset file, such as a copy of config/laptop.toml"
        else:
            listed = " (--help lists all flags)" if name == unknown[-1] else ""
            yield f"unknown flag --{name}{suggestion(name, fields)}{listed}"
    for word in others:
        yield f"unexpected {word}: put a preset or a run before all flags, and write flags as --name=value"


def as_written(item: dataclasses.Field, value) -> str:
    """Return a setting as a command line has it, such as --lr=0.1, or, if only files may have it, as a file does."""
    if not is_flag(item):
        return f"{item.name} = {json.dumps(value, ensure_ascii=False)}"
    return f"--{item.name}={str(value).lower() if isinstance(value, bool) else value}"


def version() -> str:
    """Return Lockstep's version, from the only file that states it."""
    return re.search(r"^version: (.+)$", (Path(__file__).parent.parent.parent / "CITATION.cff").read_text(), re.MULTILINE)[1]


def flags_last(args: list[str]) -> list[str]:
    """Move flags and their values to the end. Otherwise tyro would read other arguments as more values of a flag."""
    others, flags = [], []
    for word in args:
        of_flag = flags and flags[-1].startswith("--") and "=" not in flags[-1]  # the value in --a v
        (flags if word.startswith("--") or of_flag else others).append(word)
    return others + flags


def values_as_text():
    """Return rules that make tyro keep each value as text, because `read_values` gives better error messages."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    rules = ConstructorRegistry()

    @rules.primitive_rule
    def rule(info):
        if info.type in SCALARS or get_origin(info.type) in (Literal, Union):
            return PrimitiveConstructorSpec(
                nargs=(0, 1),  # 0 for a flag without a value, such as --plan
                metavar=syntax(info.type),
                instance_from_str=" ".join,
                is_instance=lambda value: True,
                str_from_instance=lambda value: [str(value).lower() if isinstance(value, bool) else str(value)],
            )

    return rules


def syntax(kind) -> str:
    """Return the allowed values of type `kind`, as text, without limits."""
    if kind in SCALARS or isinstance(kind, str):
        return SCALARS.get(kind, kind)
    kinds = get_args(kind)
    return syntax(kinds[0]) if get_origin(kind) is Annotated else "|".join(filter(None, map(syntax, kinds)))


def limits(kind) -> str:
    """Return the limits of a number of type `kind`, as text."""
    if isinstance(kind, Meta):
        return " and ".join(f"{word} {getattr(kind, key):,}" for key, word in LIMITS.items() if getattr(kind, key) is not None)
    return "".join(map(limits, get_args(kind)))


def read_values(cls, values: dict[str, Any], strict: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Convert `values` to settings of the config dataclass `cls`. Returns the settings and the mistakes, by flag name.

    strict: if False, also accept numbers and booleans as text.
    """
    kinds, found, wrong = flat_fields(cls), {}, {}
    for name, value in values.items():
        kind = kinds[name].type
        if kind is bool and value == "" and not strict:  # a flag without a value
            value = "true"
        try:
            found[name] = msgspec.convert(value, kind, strict=strict)
            if "\0" in str(value):  # the system accepts it in no path
                wrong[name] = f"must not contain a NUL character, as in {value!r}"
        except (msgspec.ValidationError, OverflowError) as error:
            outside = str(error).startswith("Expected") and ("<" in str(error) or ">" in str(error))
            allowed = limits(kind) + ", or auto" * syntax(kind).endswith("|auto") if outside else syntax(kind)
            wrong[name] = f"must be {allowed}, not {value!r}"
    return found, wrong


def read_quantity(text: str, units: dict[str, int]) -> int:
    """Parse a number followed by one of `units`, such as 1.5GB. Returns 0 if `text` is anything else."""
    match = re.fullmatch(rf"(\d{{1,20}}(?:\.\d{{1,20}})?)({'|'.join(units)})", text.upper())
    return round(float(match[1]) * units[match[2]]) if match else 0


def is_utf8(text: str) -> bool:
    """Return whether `text`, an argument or a file name, was valid UTF-8. Python keeps other bytes as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def require_local(flag: str, path: str, instead: str) -> None:
    """Raise UserError if `path` is a URL or begins with `~`. flag: its flag, or "". instead: what to use for a URL."""
    named = f"{f'--{flag}=' if flag else ''}{path}"
    if "://" in path:
        raise UserError(f"{named} must be a local path; {instead}")
    if path == "~" or path.startswith("~/"):
        raise UserError(f"{named}: the shell does not replace ~ there; write $HOME{path[1:]}")


def new_directory(out: str) -> Path:
    """Return the directory to create, from --out. Raises UserError if the flag is missing or the name is taken."""
    require_local("out", out, "`python export.py RUN --push=OWNER/NAME` uploads a model to the Hugging Face Hub")
    if not out:
        raise UserError("--out=DIR is missing; it names the directory to create")
    if Path(out).exists():
        raise UserError(f"--out={out} already exists and will not be overwritten; choose another directory")
    return Path(out)


def suggestion(name: str, known: dict[str, dataclasses.Field]) -> str:
    """Suggest a replacement for the flag `name`, or the nearest of `known`, as in `; perhaps you meant --lr`. May be empty."""
    names = OTHER_NAMES | {ours: ours for ours in known}
    near = difflib.get_close_matches(name.lower(), [*names, *NO_FLAGS], n=1)
    hint = NO_FLAGS.get(near[0], f"perhaps you meant --{names.get(near[0])}") if near else ""
    mentioned = set(re.findall(r"--(\w+)", hint))
    if not hint or not mentioned.issubset(known):
        return ""
    for ours in mentioned:
        if not is_flag(known[ours]):
            hint = hint.replace(f"--{ours}", f"{ours} in a preset file")
    return f"; {hint}"


def similar_runs(name: str) -> str:
    """Suggest runs in the directory `name`, or similarly named ones beside it or in runs/: `; perhaps you meant runs/mine`."""
    path = Path(name)
    runs = {found.parent for folder in (path, path.parent, Path("runs")) for found in folder.glob("*/checkpoints")}
    near = [str(run) for run in sorted(runs - {path}) if run.parent == path or difflib.get_close_matches(path.name, [run.name])]
    return f"; perhaps you meant {' or '.join(near[:4])}" if near else ""
