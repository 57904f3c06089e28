"""Read and write Hugging Face model directories: convert our names, shapes and settings to theirs and back, bit for bit.

transformers and llama.cpp's converter can read the output of `write_model` (versions and limits: docs/export.md). `read_model`
reads what transformers writes.
"""

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

from lockstep.architectures import ARCHITECTURES, OWN, Architecture, model_type
from lockstep.checkpoints import tensor_files
from lockstep.checkpoints.tensor_files import LazyTensor
from lockstep.common import cli, files
from lockstep.common.errors import UserError, refuse
from lockstep.dataset.tokenizer import end_of_text, token_ids
from lockstep.settings import ModelConfig, resolve_model

# transformers' names for our activations, the first one by default. Any other has the same name there.
ACTIVATIONS = {"gelu": ("gelu_new", "gelu_pytorch_tanh", "gelu"), "silu": ("silu", "swish")}
# Their keys for the numbers in our setting `rope_scaling`, in order.
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# The nested parts of config.json: rotary positions, as transformers 5 or 4 names them, and the type of each layer.
Nested = TypedDict(
    "Nested", {"rope_parameters": dict | None, "rope_scaling": dict | None, "layer_types": list[str] | None}, total=False
)
FLOATS = ("F64", "F32", "F16", "BF16")  # allowed dtypes of weights, as safetensors names them


def config_json(config: ModelConfig, eot_token: int | None, dtype: torch.dtype = torch.float32) -> dict:
    """Return the contents of config.json for weights of `dtype`, with the keys of both transformers 4 and 5."""
    record, form = config.record, config.form
    contents = {
        "architectures": [form.model_class],
        "model_type": model_type(config.architecture, form),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), eot_token),
        "initializer_range": 0.02,
        **dict.fromkeys(("torch_dtype", "dtype"), str(dtype).removeprefix("torch.")),
        "use_cache": True,
    } | {theirs: getattr(config, ours) for ours, theirs in form.keys.items()}
    if record.positions == "rotary":
        rope, factors = {"rope_type": "default"}, config.rope_factors
        if factors:
            rope = {"rope_type": "llama3"} | dict(zip(LLAMA3_ROPE, (*factors[:3], int(factors[3])), strict=True))
        contents |= {"rope_parameters": rope | {"rope_theta": config.rope_theta}, **({"rope_scaling": rope} if factors else {})}
    exact_gelu = record.activation == "gelu" and config.gelu == "erf"
    contents[form.activation] = "gelu" if exact_gelu else activation_names(record)[0]
    return contents | form.fixed | {theirs: getattr(config, ours) for theirs, ours in form.copies.items()}


def activation_names(record: Architecture) -> tuple[str, ...]:
    """Return transformers' names for the activation of a model. The first one is what we write."""
    return ACTIVATIONS.get(record.activation, (record.activation,))


def read_config(directory: Path) -> ModelConfig:
    """Return the model that config.json in `directory` describes. See `parse_config`."""
    path = directory / "config.json"
    return parse_config(files.read_json(path), path)


def parse_config(config: dict, path: Path) -> ModelConfig:
    """Return the model that the contents of a config.json describe. Its dropout is 0, because training sets its own.

    Raises a UserError that names the `path` and the key if the model needs arithmetic that we do not support.
    """
    described = [(name, form) for name, record in ARCHITECTURES.items() for form in (record.form, OWN)]
    named = [(name, form) for name, form in described if model_type(name, form) == config.get("model_type")]
    if not named:
        known = ", ".join(dict.fromkeys(model_type(name, record.form) for name, record in ARCHITECTURES.items()))
        raise UserError(f"{path}: model_type {config.get('model_type')!r} is not one of {known}")
    nested = files.decode(config, Nested, str(path))
    if sliding := set(nested.get("layer_types") or ()) - {"full_attention"}:
        raise UserError(f"{path}: layer_types includes {', '.join(sorted(sliding))}; only full_attention is supported")
    first, form = named[0]
    keys, defaults = form.keys, form.defaults
    found = defaults | config | (nested.get("rope_parameters") or nested.get("rope_scaling") or {})
    # Architectures that differ only in their activation share a model_type.
    function = found[form.activation]
    architecture = next((name for name, _ in named if function in activation_names(ARCHITECTURES[name])), first)
    record = ARCHITECTURES[architecture]
    supported = {key: (value,) for key, value in form.only.items()} | {form.activation: activation_names(record)}
    for key, accepted in supported.items():
        if found.get(key, accepted[0]) not in accepted:
            raise UserError(f"{path}: {key} = {found[key]!r} is not supported; only {accepted[0]!r} is")
    given = {ours: found.get(theirs) for ours, theirs in keys.items()}
    unset = {ours: "auto" for ours, value in given.items() if value is None and keys[ours] in defaults}
    values, wrong = cli.read_values(ModelConfig, given | unset, strict=True)
    refuse(f"{path}: {keys[ours]} {mistake}" for ours, mistake in wrong.items())
    if record.activation == "gelu":
        values["gelu"] = "erf" if function == "gelu" else "tanh"
    if record.positions == "rotary":
        rope_type = found.get("rope_type", found.get("type", "default"))
        if rope_type == "llama3":
            factors = {"original_max_position_embeddings": values["seq_len"]} | found
            values["rope_scaling"] = rope_text(map(factors.get, LLAMA3_ROPE))
        elif rope_type != "default":
            raise UserError(f"{path}: rope_scaling of type {rope_type!r} is not supported; only 'default' and 'llama3' are")
    model = resolve_model(ModelConfig(architecture, **values, own_code=form is not record.form), 0)
    _ = model.rope_factors  # may raise UserError
    return model


def rope_text(factors: Iterable[float | None]) -> str:
    """Return Llama 3's factors as a checkpoint records `rope_scaling`: 8,1,4,8192, not 8.0,1.0,4.0,8192.0."""
    return ",".join(str(factor).removesuffix(".0") for factor in factors)


def shape_of(directory: Path, model: ModelConfig) -> ModelConfig:
    """Return `model` with the shape of the one in `directory`, but the context length of `model`. Raises UserError.

    The context may be shorter than in `directory`. It may be longer if `model` stretches the rotary positions, with Llama 3's
    factors or a larger base.
    """
    found, rope = read_config(directory), {}
    if found.seq_len < model.seq_len:
        longest = f"--seq_len={model.seq_len}: {directory} has a context of {found.seq_len}"
        if found.record.positions == "learned":
            raise UserError(f"{longest} learned positions, and no weights for more; use --seq_len={found.seq_len} or less")
        if model.rope_factors:
            rope["rope_scaling"] = rope_text(model.rope_factors)
        if model.rope_theta > found.rope_theta:
            rope["rope_theta"] = model.rope_theta
        if not rope:
            factor = math.ceil(model.seq_len / found.seq_len)
            stretch = (
                f'rope_scaling = "{factor},1,4,{found.seq_len}" in a preset file, or a rope_theta above {found.rope_theta:g}'
            )
            raise UserError(f"{longest}; to extend it, set {stretch}; otherwise use --seq_len={found.seq_len} or less")
    return dataclasses.replace(found, seq_len=model.seq_len, dropout=model.dropout, init_from=model.init_from, **rope)


def tensor_names(ours: Iterable[str], config: ModelConfig) -> dict[str, str]:
    """Return Hugging Face's name for each of our parameters `ours`. GPT-2's c_attn combines our attn.q, attn.k and attn.v."""
    theirs, names = config.form.names, {}
    if not theirs:
        return {name: name for name in ours}
    for name in ours:
        module, _, leaf = name.rpartition(".")  # such as blocks.0.attn.q and weight
        root, *inside = module.split(".", 2)
        names[name] = ".".join((theirs[root], *inside[:1], *(theirs[part] for part in inside[1:]), leaf))
    return names


def is_transposed(theirs: str, ndim: int) -> bool:
    """Return whether Hugging Face's tensor `theirs` is a Conv1D matrix of GPT-2, which is the transpose of ours."""
    return ndim == 2 and theirs.removesuffix(".weight").endswith(("c_attn", "c_proj", "c_fc"))


def layout(shapes: dict[str, tuple[int, ...]], config: ModelConfig, limit: float, bytes_each: int = 4) -> tensor_files.Layout:
    """Divide our parameters of these `shapes` among files of at most `limit` bytes."""
    sizes = Counter()
    for name, theirs in tensor_names(shapes, config).items():
        sizes[theirs] += bytes_each * math.prod(shapes[name])
    return tensor_files.lay_out("model", sizes, limit)


def to_hf(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Convert some or all of our parameters to Hugging Face's. Pass a block's q, k and v together. Some results are views."""
    tensors = {}
    for name, theirs in tensor_names(state, config).items():
        value = state[name]
        if "c_attn" in theirs:
            module, _, leaf = name.rpartition(".")  # the leaf is weight or bias
            if not module.endswith(".q"):
                continue
            value = torch.cat([state[f"{module[:-1]}{x}.{leaf}"] for x in "qkv"])
        tensors[theirs] = value.t() if is_transposed(theirs, value.ndim) else value
    return tensors


def open_model(
    directory: Path, build: Callable[[ModelConfig], nn.Module], seq_len: int | None = None
) -> tuple[ModelConfig, dict[str, LazyTensor]]:
    """Open a Hugging Face model. Returns its config, and its parameters under our names, read row by row. Raises UserError.

    This is the inverse of `to_hf`. Names may lack the leading `transformer.`, as in GPT-2's own files. Buffers and a tied head
    are ignored. build: makes our model of a config, on the meta device. seq_len: shorten the context to this (learned positions
    lose their last rows).
    """
    config = read_config(directory)
    model = build(config)
    if config.own_code and not arithmetic_differs(config, type(model)):
        trained = f"{directory} was trained with another model.py or record than this one, which computes what"
        raise UserError(f"{trained} {config.record.form.model_class} does; use the code that trained it")
    found = match(config, shapes_of(model), tensor_files.open_tensors(directory, "model"), directory)
    if seq_len and seq_len < config.seq_len:
        config = dataclasses.replace(config, seq_len=seq_len)
        if positions := found.get("positions.weight"):
            found["positions.weight"] = dataclasses.replace(positions, shape=(seq_len, config.n_embd))
    return config, found


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def match(
    config: ModelConfig, shapes: dict[str, tuple[int, ...]], tensors: dict[str, LazyTensor], directory: Path
) -> dict[str, LazyTensor]:
    """Return the parameters of a model, under our names, among the tensors of `directory`, under theirs. Raises UserError.

    shapes: of the parameters.
    """
    names = tensor_names(shapes, config)
    root = names["embed.weight"].partition(".")[0] + "."
    if not any(name.startswith(root) for name in tensors):
        tensors = {name if name.startswith("lm_head.") else root + name: value for name, value in tensors.items()}
    unused = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", *(["lm_head.weight"] if config.tie_embeddings else []))
    missing = sorted(set(names.values()) - tensors.keys())
    unknown = sorted(name for name in tensors.keys() - set(names.values()) if not name.endswith(unused))
    if missing or unknown:
        problem = f"{', '.join(missing[:3])} missing" if missing else f"{', '.join(unknown[:3])} unknown"
        raise UserError(f"{directory}: the weights do not match config.json: {problem}")
    return {name: rows_of(tensors[theirs], name, shapes[name]) for name, theirs in names.items()}


def trial(architecture: str) -> tuple[ModelConfig, Callable[[str, tuple[int, ...]], Tensor], Tensor]:
    """Return a small model for `arithmetic_differs`: its config, a function for the weights by name and shape, and its tokens.

    Its 1,024 tokens and four layers also expose most changes that spare short contexts or single layers.
    """
    heads = {} if architecture == "gpt2" else {"n_kv_head": 2}
    shape = ModelConfig(architecture, n_layer=4, n_head=4, n_embd=32, d_ff=48, seq_len=1024, vocab_size=32, **heads)

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        waves = torch.sin(len(name) + 1.7 * torch.arange(math.prod(shape), dtype=torch.float64)).float().view(shape)
        return 0.3 * waves + (1.0 if len(shape) == 1 and name.endswith("weight") else 0.0)

    return resolve_model(shape, 0), weight, (torch.arange(1024) ** 2 % 31)[None]


@torch.no_grad()
def arithmetic_differs(config: ModelConfig, kind: type[nn.Module]) -> bool:
    """Return whether models of the class `kind` compute something else than transformers' class of this architecture does.

    Nothing can be compared if the record names another activation, or no class of transformers.
    """
    record, form = config.record, config.record.form
    if not form.logits or activation_names(record)[0] != form.defaults[form.activation]:
        return False
    shape, weight, tokens = trial(config.architecture)
    with torch.device("meta"):
        model = kind(shape).eval()
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        parameter.copy_(weight(name, tuple(parameter.shape)))
    found = model(tokens)[0, -1, : len(form.logits)]
    return (found - torch.tensor(form.logits)).abs().max().item() > 1e-3


def check_description(config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise UserError unless we could open a checkpoint of this model: its config.json and tensor names must describe it.

    config: resolved. shapes: of the model's parameters.
    """
    path, way_out = Path("config.json"), "describe it in lockstep/architectures.py before you train it"
    ignored = {"dropout", "init_from"}
    if config.record.positions != "rotary":
        ignored |= {"rope_theta", "rope_scaling"}
    if config.record.activation != "gelu":
        ignored.add("gelu")
    try:
        described = parse_config(config_json(config, None), path)
        for name, given in vars(config).items():
            read, same = getattr(described, name), given == getattr(described, name)
            if name == "rope_scaling":  # 8 or 8.0
                same = config.rope_factors == described.rope_factors
            if not same and name not in ignored:
                raise UserError(f"{name} = {given} would be read back from config.json as {read}")
        written = {}  # as `to_hf` would convert them
        for name, theirs in tensor_names(shapes, config).items():
            shape, fused = shapes[name], "c_attn" in theirs
            if theirs in written and not fused:
                raise UserError(f"{name} and another parameter are both called {theirs}")
            shape = (3 * shape[0], *shape[1:]) if fused else shape
            written[theirs] = LazyTensor(path, theirs, "F32", shape[::-1] if is_transposed(theirs, len(shape)) else shape)
        match(described, shapes, written, path)
    except (UserError, KeyError) as error:
        reason = error if isinstance(error, UserError) else f"there is no Hugging Face name for {error}"
        raise UserError(f"no checkpoint of this model could be opened: {reason}; {way_out}") from None


def rows_of(stored: LazyTensor, name: str, shape: tuple[int, ...]) -> LazyTensor:
    """Return our parameter `name` of `shape` as rows of Hugging Face's tensor `stored`. Raises UserError if they do not fit."""
    fused, transposed = "c_attn" in stored.name, is_transposed(stored.name, len(stored.shape))
    if stored.dtype not in FLOATS:
        raise UserError(f"{stored.path}: {stored.name} is {stored.dtype}; weights must be one of {', '.join(FLOATS)}")
    if stored.shape[:: -1 if transposed else 1] != (shape[0] * (3 if fused else 1), *shape[1:]):
        needed = f"config.json gives {name} the shape {list(shape)}"
        raise UserError(f"{stored.path}: {stored.name} has the wrong shape, {list(stored.shape)}; {needed}")
    first = "qkv".index(name.rpartition(".")[0][-1]) * shape[0] if fused else 0
    return dataclasses.replace(stored, shape=shape, transposed=transposed, first=first)


def read_model(directory: Path, build: Callable[[ModelConfig], nn.Module]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read all parameters of a Hugging Face model, in float32. See `open_model`."""
    config, found = open_model(directory, build)
    return config, {name: stored[:].float().contiguous() for name, stored in found.items()}


def write_model(
    directory: Path,
    state: dict[str, Tensor],
    config: ModelConfig,
    tokenizer: Path | None,
    eot_token: int | None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: float = math.inf,
    **generation,
) -> None:
    """Write a Hugging Face model to `directory`, in files of up to `max_shard_size` bytes. See `write_description`."""
    divided = layout({name: tuple(value.shape) for name, value in state.items()}, config, max_shard_size, dtype.itemsize)
    tensors = to_hf(state, config)
    for file, names in divided.items():
        tensor_files.write(directory / file, {name: tensors[name] for name in names}, dtype)
    tensor_files.write_index(directory, "model", divided)
    write_description(directory, config, tokenizer, eot_token, dtype, **generation)


def write_description(
    directory: Path,
    config: ModelConfig,
    tokenizer: Path | None,
    eot_token: int | None,
    dtype: torch.dtype = torch.float32,
    bos_token: int | None = None,
    vocab_size: int | None = None,
) -> None:
    """Write every file of a Hugging Face model except its weights.

    tokenizer: a tokenizer.json, or None. eot_token: the end-of-text token, or None. dtype: the precision of the weights.
    bos_token: the token that begins a text (None: end-of-text). vocab_size: how many tokens the data has, if fewer than the
    model; the others are never to be generated.
    """
    bos_token = eot_token if bos_token is None else bos_token
    special = {"bos_token_id": bos_token} | dict.fromkeys(("eos_token_id", "pad_token_id"), eot_token)
    tensor_files.write_json(directory / "config.json", config_json(config, eot_token, dtype) | {"bos_token_id": bos_token})
    if vocab_size and vocab_size < config.vocab_size:
        special["suppress_tokens"] = list(range(vocab_size, config.vocab_size))
    tensor_files.write_json(directory / "generation_config.json", special)
    if tokenizer is None:
        return
    special = ("bos_token", "eos_token", "unk_token", "pad_token")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.seq_len,
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 would add token_type_ids
        **(dict.fromkeys(special, token_text(tokenizer, eot_token)) if eot_token is not None else {}),
        **({"bos_token": token_text(tokenizer, bos_token)} if bos_token is not None else {}),
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    tensor_files.write_json(directory / "tokenizer_config.json", settings)


def token_text(tokenizer: Path, token: int) -> str:
    """Return the text of a token in a tokenizer.json. Raises UserError."""
    text = next((text for text, i in token_ids(tokenizer).items() if i == token), None)
    if text is None:
        raise UserError(f"{tokenizer} has no token {token}, which the dataset uses as end-of-text; prepare the text again")
    return text


def known_tokens(directory: Path, vocab_size: int) -> int:
    """Return how many of a model's `vocab_size` tokens were in its training data, as far as `write_description` recorded it."""
    path = directory / "generation_config.json"
    suppressed = files.read_json(path).get("suppress_tokens") if path.exists() else None
    first = suppressed[0] if isinstance(suppressed, list) and suppressed else None
    return first if isinstance(first, int) and suppressed == list(range(first, vocab_size)) else vocab_size


def bos_token(directory: Path, tokenizer: Path | None) -> int | None:
    """Return the bos_token of a model directory, as an id of `tokenizer`. None: unknown, or not in that tokenizer."""
    settings = directory / "tokenizer_config.json"
    token = files.read_json(settings).get("bos_token") if settings.exists() and tokenizer else None
    text = token.get("content") if isinstance(token, dict) else token
    return token_ids(tokenizer).get(text) if isinstance(text, str) else None


def first_token(directory: Path) -> tuple[Path | None, int | None]:
    """Return the tokenizer.json of a model directory, and the token that starts a text: bos_token, eos_token or end-of-text."""
    path, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not path.exists():
        return None, None
    named, ids = files.read_json(settings) if settings.exists() else {}, token_ids(path)
    texts = [token.get("content") if isinstance(token, dict) else token for token in map(named.get, ("bos_token", "eos_token"))]
    return path, next((ids[text] for text in texts if text in ids), end_of_text(ids))


def check_tokenizer(directory: Path, tokenizer: Path | None, eot_token: int | None = None) -> list[str]:
    """Raise UserError unless a model's tokenizer and a dataset's tokenizer agree on every token id of the dataset.

    Returns a warning if either of them has no tokenizer, or a note if the model begins texts with another token than the
    dataset's documents begin with, `eot_token`.
    """
    path = directory / "tokenizer.json"
    if not tokenizer or not path.exists():
        unknown = "cannot check that the weights and the tokens use the same tokenizer"
        return [f"warning: {directory if tokenizer else 'the dataset'} has no tokenizer.json; {unknown}"]
    theirs = token_ids(path)
    for token, i in sorted(token_ids(tokenizer).items(), key=lambda item: item[1]):
        if theirs.get(token) != i:
            differ = f"{token!r} is token {i} in {tokenizer}, but {theirs.get(token, 'no token')} in the model's"
            made = f"the tokens were not made with the tokenizer of {directory}"
            raise UserError(f"{made}: {differ}; prepare the text again with {shlex.quote(f'--tokenizer={path}')}")
    first = bos_token(directory, tokenizer)
    if None in (first, eot_token) or first == eot_token:
        return []
    theirs, ours = token_text(tokenizer, first), token_text(tokenizer, eot_token)
    return [f"{directory} begins texts with {theirs}, but the documents of this dataset begin with {ours}"]
