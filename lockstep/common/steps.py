"""Which batches to leave out, and when a run switches to another mixture: parse the flags, and the recorded identity."""

import re
from contextlib import suppress
from itertools import pairwise

from lockstep.common.errors import UserError

MOST_SKIPPED = 10**6  # maximum number of batches in --skip_steps


def read_skipped(text: str) -> tuple[int, ...]:
    """Return the batches that --skip_steps leaves out, counted from 0, in ascending order. Raises UserError."""
    parts = [part.partition("-") for part in text.replace(" ", "").split(",") if part]
    with suppress(ValueError, OverflowError):
        ranges = [range(int(first) - 1, int(last if dash else first)) for first, dash, last in parts]
        if all(0 <= batches.start < batches.stop for batches in ranges) and sum(map(len, ranges)) <= MOST_SKIPPED:
            return tuple(sorted({batch for batches in ranges for batch in batches}))
    allowed = f"steps (from 1) and ranges, such as 812-815,990, at most {MOST_SKIPPED:,} in all"
    raise UserError(f"--skip_steps={text} must be {allowed}")


def read_phases(text: str) -> list[tuple[int, str]]:
    """Return the phases in --phase: the number of steps before each, and its mixture, as in --tokens. Raises UserError."""
    parts = [re.fullmatch(r"([0-9]{1,12}):(.+)", part.strip()) for part in re.split(r",(?=\s*[0-9]+:)", text) if part]
    phases = [(int(part[1]), part[2]) for part in parts if part]
    steps = [0, *(step for step, _ in phases)]
    if all(parts) and all(step < later for step, later in pairwise(steps)):
        return phases
    wanted = "a step and the mixture after it, such as 8000:tokens/web:0.5,tokens/math:0.5, or several with increasing steps"
    raise UserError(f"--phase={text} must be {wanted}")


def mixtures_seen(identity: str, steps: int) -> list[str]:
    """Return the parts of a mixture's identity that affect the first `steps` steps: --tokens, and any phase begun by then.

    identity: see `lockstep.dataset.mixture`.
    """
    tokens, *phases = identity.split()
    return [tokens, *(phase for phase in phases if step_of_phase(phase) < steps)]


def step_of_phase(identity: str) -> int:
    """Return the first step of a phase, from its part of a mixture's identity."""
    return int(identity.partition(":")[0])
