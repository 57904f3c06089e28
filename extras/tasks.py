"""Score a model in memory on tasks such as hellaswag, with EleutherAI's lm-eval. All ranks share the work.

Only the master runs lm-eval, which turns tasks into requests and answers into scores. Each rank computes a share of the
answers; the batches are the same on any number of ranks. The scores equal those from HFLM, lm-eval's class for Hugging Face
models.
"""

import contextlib
import difflib
import io
import math
import os
import random
import sys
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from lockstep.checkpoints.checkpoint import while_others_wait
from lockstep.common.errors import PIP, RunError, UserError, explain
from lockstep.parallel.world import World
from model import GPT, generate

MOST_TOKENS = 8192  # tokens per batch: with a vocabulary of 50,000, the logits take 1.6 GB in float32
REHEARSED = 4  # documents of each task on which lm-eval is tried out before training
Row = tuple[tuple[int, ...], list[tuple]]  # the tokens of a forward pass, and the requests that its output answers
Scores = dict[str, dict[str, float]]  # scores by task and metric, such as acc_norm


class Tasks:
    """Tasks loaded by lm-eval, and a model's answers to their requests. `load` creates one on every rank.

    On the master, this is also an lm-eval TemplateLM, whose `loglikelihood` calls `tok_encode` and `_loglikelihood_tokens`.
    """

    eot_token_id = 0  # abstract in TemplateLM

    def __init__(self, tokenizer: Path, first: int, seq_len: int, world: World):
        """first: the token that starts and ends a text."""
        super().__init__()
        self.tokenizer, self.eot_token_id, self.max_length = Tokenizer.from_file(str(tokenizer)), first, seq_len
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.world, self.model, self.computing = world, None, False
        self.loaded: dict[int, dict] = {}  # on the master: the tasks as lm-eval loads them, by their limits in documents

    def rehearse(self, limits: dict[int, list[str]]) -> None:
        """Load tasks on the master, and try them in lm-eval without a model. limits: see `read_limits`. Raises UserError."""
        from lm_eval.tasks import TaskManager

        names = [name for group in limits.values() for name in group]
        with as_alone():
            manager = TaskManager(include_defaults=not all(Path(name).is_file() for name in names))
            try:
                for limit, group in limits.items():
                    self.loaded[limit] = manager.load(group)
                    self.evaluate(self.loaded[limit], REHEARSED)
            except Exception as error:  # an unknown name, no network, a broken file, a missing package
                unknown = [name for name in names if name not in manager.all_tasks and not Path(name).is_file()]
                near = [task for name in unknown for task in difflib.get_close_matches(name, manager.all_tasks)]
                hint = f"; perhaps you meant {' or '.join(near)}" if near else ""
                said = explain(error)
                if isinstance(error, ConnectionError) or "is not cached in" in said:  # the cause names no cache, only None
                    cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
                    said = f"{str(error).splitlines()[0]}, and {cache} lacks its data"
                    hint = "; run this once with a network and without HF_HUB_OFFLINE, or copy HF_HOME from where it ran"
                    hint += "; a task with a file of its own needs neither (docs/tasks.md)"
                raise UserError(f"--tasks={','.join(names)}: {said}{hint}") from error

    @torch.no_grad()
    def measure(self, model: GPT) -> Scores:
        """Return the scores of `model`, which is in evaluation mode. All ranks must call this; only the master gets scores.

        Raises RunError, on the master alone, if lm-eval fails.
        """
        self.model, document_token, model.document_token = model, model.document_token, None  # each text is one document
        try:
            while not self.loaded and self.compute() is not None:
                pass
            scores = {}
            for limit, loaded in self.loaded.items():
                scores |= self.evaluate(loaded, limit)
            return scores
        except Exception as error:
            if self.computing:
                raise
            raise RunError(f"lm-eval failed: {explain(error)}") from error
        finally:
            model.document_token = document_token
            if self.loaded and not self.computing:
                self.compute()  # release the other ranks

    def report(self, run) -> None:
        """Score the model of a `train.Run`, on all ranks, and report the scores. If lm-eval fails, the run continues."""
        began, run.scored_at = time.monotonic(), run.state.step
        try:
            with run.engine.inference():
                scores = self.measure(run.engine.module)
            run.progress.scored(run.state, scores, time.monotonic() - began)
        except RunError as error:
            run.log.warn(f"step {run.state.step}: no scores on tasks: {error}")

    def evaluate(self, loaded: dict, limit: int) -> Scores:
        """Return lm-eval's scores on the first `limit` documents of each task (0: on all).

        If a group has scores, its subtasks are left out.
        """
        from lm_eval import defaults, evaluator

        for task in loaded["tasks"].values():
            task.set_config("num_fewshot", task.get_config("num_fewshot") or 0)
            task.set_fewshot_seed(defaults.DEFAULT_OTHER_SEED)
        with as_alone():
            found = evaluator.evaluate(self, loaded, limit=limit or None, bootstrap_iters=0, log_samples=False)
        results, groups, scores = found["results"] | found.get("groups", {}), found["group_subtasks"], {}
        for task, values in results.items():  # scores, such as acc,none, but also an alias and document counts
            numbers = {key: value for key, value in values.items() if "," in key and isinstance(value, int | float)}
            scores[task] = {metric.removesuffix(",none"): float(value) for metric, value in numbers.items()}
        parts = {part for group, parts in groups.items() if scores.get(group) for part in parts}
        return {task: values for task, values in scores.items() if values and task not in parts}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Return the tokens of a text. As in HFLM, special tokens spelled out in the text are recognized."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.id_to_token(self.eot_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens).ids

    def _loglikelihood_tokens(self, requests: list, **_) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, and whether greedy decoding would produce it."""
        rows = {}  # continuations that differ only in their last token share a row
        for i, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise ValueError(f"a continuation of {len(continuation)} tokens exceeds the context of {self.max_length}")
            rows.setdefault(tuple((context + continuation)[-self.max_length - 1 : -1]), []).append((i, continuation))
        answers = self.compute("score", pack(rows.items()))
        return [answers[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """Return the log-probability of each text, computed in windows as long as the context."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, sums = [], [0.0] * len(requests)
        for text, request in enumerate(requests):
            parts = get_rolling_token_windows(self.tok_encode(*request.args), self.eot_token_id, self.max_length, 1)
            windows += [(text, *make_disjoint_window(part)) for part in parts]
        for (text, *_), (value, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            sums[text] += value
        return sums

    def generate_until(self, requests: list) -> list[str]:
        """Return the text that greedy decoding produces after each context, up to one of the request's stop sequences."""
        from lm_eval.models.utils import normalize_gen_kwargs

        rows = []
        for i, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1])
            most, stops = options["max_gen_toks"], [stop for stop in options["until"] if stop]
            if options["do_sample"] or most >= self.max_length:
                asked = f"do_sample {str(options['do_sample']).lower()} and max_gen_toks {most}"
                raise ValueError(f"a task sets {asked}; answers must be greedy and shorter than the context, {self.max_length}")
            context = self.tok_encode(request.args[0])[most - self.max_length :] or [self.eot_token_id]
            rows.append((tuple(context), [(i, most, stops)]))
        answers = self.compute("write", pack(rows, self.max_length))
        return [answers[i] for i in range(len(requests))]

    def compute(self, how: str = "", batches: list[list[Row]] = ()) -> dict | None:
        """Return the answers to the master's requests, by number, or None at the end. All ranks must call this until then.

        Ranks with a smaller share run as many forward passes as the others, because a sharded model communicates in each.
        """
        if self.model is None:  # called by `rehearse`
            return defaultdict(lambda: "" if how == "write" else (0.0, False))
        self.computing = True
        how, batches = self.world.broadcast((how, batches))
        mine, found = self.world.share(len(batches)), {}
        for turn in range(math.ceil(len(batches) / self.world.size)):
            answers = getattr(self, how)(batches[mine[turn] if turn < len(mine) else 0])
            found |= answers if turn < len(mine) else {}
        found = {i: answer for part in self.world.all_gather(found) for i, answer in part.items()}
        self.computing = False
        return found if how else None

    def score(self, batch: list[Row]) -> dict[int, tuple[float, bool]]:
        """Return the log-probability of each (request, continuation), and whether all its tokens are the most likely."""
        length, found = len(batch[0][0]), {}
        inputs = torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens, _ in batch])  # no token sees the padding
        for row, (tokens, wanted) in zip(self.model(inputs.to(self.world.device)), batch, strict=True):  # logits [T, V]
            for i, continuation in wanted:
                chances = row[len(tokens) - len(continuation) : len(tokens)].float().log_softmax(-1)
                targets = torch.tensor(continuation, device=chances.device)
                likeliest = bool((chances.argmax(-1) == targets).all())
                found[i] = float(chances.gather(1, targets[:, None]).sum()), likeliest
        return found

    def write(self, batch: list[Row]) -> dict[int, str]:
        """Decode greedily for each (request, most tokens, stop sequences), and return the texts. Rows have equal lengths."""
        new, found = [[] for _ in batch], {}
        for drawn in generate(self.model, torch.tensor([tokens for tokens, _ in batch]), self.max_length, temperature=0):
            for token, tokens, (_, [(i, most, stops)]) in zip(drawn.tolist(), new, batch, strict=True):
                if i in found:
                    continue
                tokens.append(token)
                text = self.tokenizer.decode(tokens)  # without special tokens
                ends = [text.find(stop) for stop in stops if stop in text]
                if ends or token == self.eot_token_id or len(tokens) == most:
                    found[i] = text[: min(ends, default=None)]
            if not self.world.sum_over_ranks(torch.tensor(len(batch) - len(found))):  # all ranks are done
                break
        return found


def load(names: str, tokenizer: Path | None, first: int | None, seq_len: int, world: World) -> Tasks:
    """Load and try tasks. All ranks must call this. Raises UserError.

    names: see `read_limits`. first: the token that starts and ends a text.
    """
    if tokenizer is None or first is None:
        raise UserError("--tasks needs a tokenizer.json with an end-of-text token, next to the tokens or the model")
    kind = Tasks
    if world.is_master:
        if find_spec("lm_eval") is None:
            raise UserError(f"--tasks needs lm_eval, which is not installed; try: {PIP} 'lm_eval>=0.4.12'")
        from lm_eval.api.model import TemplateLM

        kind = type("Tasks", (Tasks, TemplateLM), {})
    tasks = kind(tokenizer, first, seq_len, world)
    while_others_wait(world, lambda: tasks.rehearse(read_limits(names)))
    return tasks


def read_limits(names: str) -> dict[int, list[str]]:
    """Return tasks by the number of documents to use (0: all), from a list such as hellaswag:200,arc_easy,mine.yaml:50."""
    limits = defaultdict(list)
    for name in names.split(","):
        task, _, limit = name.rpartition(":")
        if task and limit.isdecimal() and not Path(name).exists():
            limits[int(limit)].append(task)
        else:
            limits[0].append(name)
    return limits


def pack(rows, width: int = 0) -> list[list[Row]]:
    """Pack rows, longest first, into batches of at most MOST_TOKENS. width: count rows as this long, and do not mix lengths."""
    batches, longest = [[]], math.inf
    for row in sorted(rows, key=lambda row: -len(row[0])):
        full = (len(batches[-1]) + 1) * (width or longest) > MOST_TOKENS
        if full or width and len(row[0]) < longest:
            batches.append([])
            longest = len(row[0])
        batches[-1].append(row)
    return batches[1:]


@contextlib.contextmanager
def as_alone():
    """Run lm-eval as if it were alone in the process, and undo its changes afterwards.

    The global random generators get the seeds that lm-eval's own command sets, and its progress bars and warnings are hidden.
    `import evaluate` finds the package that some tasks use, not our evaluate.py.
    """
    states, path, ours = (random.getstate(), np.random.get_state()), sys.path[:], sys.modules.pop("evaluate", None)
    sys.path[:] = [place for place in path if Path(place).resolve() != Path(__file__).resolve().parent.parent]
    random.seed(0)
    np.random.seed(1234)
    try:
        with torch.random.fork_rng(devices=()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        sys.path[:] = path
        sys.modules.pop("evaluate", None)
        if ours:
            sys.modules["evaluate"] = ours
