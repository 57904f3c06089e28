"""Examine a trainer: does its run stay the same run whatever happens to it?

python bench/audit.py lockstep|exact|nanogpt|trainer|litgpt|... [--path=CHECKOUT] [--python=INTERPRETER]

The trainer's own command trains a tiny model on the CPU, for 32 updates of 12 sequences, with a checkpoint every 8. It runs
twice on one rank, then on two ranks and on three. It also resumes: after SIGKILL, after SIGTERM, after a kill while saving,
with a flipped bit in a checkpoint, and on two ranks. bench/probe records the sequences of each update and stops the run. The
trainer's files stay unchanged. Adds a row to audit.json, which bench/figures.py turns into docs/audit.md.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import audit_trainers
import machine  # puts the project's folder on the path
from audit_trainers import SAVE, STEPS, Trainer
from lockstep.common.errors import RunError, UserError
from lockstep.hardware.host import cpu_name

LIMIT = 400  # seconds for one attempt
FAILURE = re.compile(r"^(?:\[rank\d+\]: ?)?\s*((?:[\w.]*(?:Error|Exception)|error)\b.*)", re.MULTILINE)


@dataclass(frozen=True)
class AuditConfig(machine.Out):
    path: str = ""
    """The checkout of the trainer."""
    python: str = sys.executable
    """A Python interpreter with the trainer's dependencies."""
    only: str = ""
    """Ask only these questions, such as twice,killed."""


@dataclass
class Attempt:
    """What happened when a trainer was started once."""

    status: int
    error: str
    updates: list[list[str]]
    """For each update, the sorted hashes of its sequences on all ranks."""


class Examination:
    """One trainer, its runs in `work`, and the findings."""

    def __init__(self, trainer: Trainer, work: Path):
        self.trainer, self.work, self.number = trainer, work, 0
        self.chance, self.found, self.on_cpu = random.Random(0), {}, False
        self.weights = {}
        self.reference = self.on_ranks("once", 1)

    def start(self, case: str, ranks: int = 1, resume: bool = False, **probe) -> Attempt:
        """Start the trainer on the run of a case, and wait for it. probe: instructions for bench/probe."""
        self.number += 1
        notes, run = self.work / f"notes-{self.number}", self.work / case
        notes.mkdir(), run.mkdir(exist_ok=True)
        path = os.pathsep.join([str(machine.ROOT / "bench" / "probe"), *self.trainer.packages])
        variables = dict(PYTHONPATH=path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", AUDIT_NOTES=str(notes))
        probe |= {"on_cpu": self.trainer.on_cpu} if self.on_cpu else {}
        variables |= self.trainer.variables | {f"AUDIT_{key.upper()}": str(value) for key, value in probe.items()}
        command = [str(part) for part in self.trainer.command(run, ranks, resume)]
        streams, began = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"), time.monotonic()
        environment = machine.environment(**variables)
        process = subprocess.Popen(command, cwd=self.trainer.folder, env=environment, start_new_session=True, **streams)
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            machine.kill(process)
            output = process.communicate()[0] + f"\nError: still running after {LIMIT} s"
        finally:
            machine.kill(process)
        of_ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in notes.iterdir()]
        of_ranks = [[update[-len(updates[-1]) :] for update in updates] for updates in of_ranks]  # without warm-up updates
        updates = [sorted(sum(parts, [])) for parts in zip(*of_ranks, strict=False)]
        error = failure(output) if process.returncode else ""
        print(f"  {case:<10} {ranks} ranks, {time.monotonic() - began:3.0f} s, {len(updates)} updates  {error}", flush=True)
        return Attempt(process.returncode, error, updates)

    def compare(self, case: str, attempt: Attempt) -> dict:
        """How an attempt differs from the undisturbed run on one rank. It should have finished the run."""
        if attempt.error or not attempt.updates:
            return {"error": attempt.error or f"no update, status {attempt.status}"}
        began, wanted = len(self.reference.updates) - len(attempt.updates), self.reference.updates
        if began < 0:  # it saw more updates than the undisturbed run, so it began at the first one
            began, attempt.updates = 0, attempt.updates[: len(wanted)]
        same = sum(a == b for a, b in zip(attempt.updates, wanted[began:], strict=True))
        again = wanted.index(attempt.updates[0]) + 1 if began and attempt.updates[0] in wanted[:began] else None
        found = {"from": began, "same": same, "of": len(attempt.updates), "again": again}
        return found | {"difference": self.difference(case)}

    def difference(self, case: str) -> float | None:
        """The largest difference between the final weights and the undisturbed run's; 0 means the same bits."""
        self.weights = self.weights or self.trainer.final_weights(self.work / "once")
        ours, theirs = self.trainer.final_weights(self.work / case), self.weights
        if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
            return None
        if all(ours[name].equal(theirs[name]) for name in ours):
            return 0.0
        return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)

    def copy(self, source: str, case: str) -> None:
        """Copy the files of the run `source` to `case`."""
        shutil.copytree(self.work / source, self.work / case, symlinks=True)

    def twice(self) -> dict:
        """The same command twice."""
        return self.compare("twice", self.start("twice"))

    def killed(self) -> dict:
        """SIGKILL after a random update, then the trainer's own resume."""
        at = self.chance.randrange(2 * SAVE + 1, 3 * SAVE)
        self.start("stopped", stop=f"{signal.SIGKILL:d}:{at}")
        self.copy("stopped", "killed")
        return {"at": at} | self.compare("killed", self.start("killed", resume=True))

    def terminated(self) -> dict:
        """SIGTERM after a random update, then the trainer's own resume."""
        at = self.chance.randrange(2 * SAVE + 1, 3 * SAVE)
        status = self.start("terminated", stop=f"{signal.SIGTERM:d}:{at}").status
        return {"at": at, "status": status} | self.compare("terminated", self.start("terminated", resume=True))

    def saving(self) -> dict:
        """Killed in the middle of a checkpoint's largest file, then the trainer's own resume."""
        self.copy("stopped", "saving")
        size = max(path.stat().st_size for path in files(self.trainer.checkpoints(self.work / "saving")[-1]))
        cut = self.start("saving", resume=True, cut=size // 2)
        if cut.status == 0:
            return {"error": "it was not killed: no file grew to that size"}
        return self.compare("saving", self.start("saving", resume=True))

    def flipped(self) -> dict:
        """One bit in the middle of the newest checkpoint's weights flipped, then the trainer's own resume."""
        self.copy("stopped", "flipped")
        run = self.work / "flipped"
        flip(self.trainer.checkpoints(run)[-1], self.trainer.final_weights(run))
        return self.compare("flipped", self.start("flipped", resume=True))

    def moved(self) -> dict:
        """A run on one rank, killed, then continued on two."""
        self.copy("stopped", "moved")
        return self.compare("moved", self.on_ranks("moved", 2, resume=True))

    def two(self) -> dict:
        """Two ranks from the start."""
        return self.compare("two", self.on_ranks("two", 2))

    def three(self) -> dict:
        """Three ranks from the start."""
        return self.compare("three", self.on_ranks("three", 3))

    def on_ranks(self, case: str, ranks: int, **more) -> Attempt:
        """Start on several ranks. If the trainer insists on CUDA there, start again with CUDA mapped to the CPU."""
        attempt = self.start(case, ranks, **more)
        if attempt.error and not attempt.updates and self.trainer.on_cpu and not self.on_cpu:
            self.found["without"] = attempt.error
            self.on_cpu, always = True, self.trainer.always_on_cpu
            attempt, self.on_cpu = self.start(case, ranks, **more), always
        return attempt


QUESTIONS = ("killed", "twice", "terminated", "saving", "flipped", "two", "three", "moved")  # others reuse the run of `killed`


def files(path: Path) -> list[Path]:
    """A file, or the files below a folder."""
    return [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]


def flip(checkpoint: Path, weights: dict) -> None:
    """Flip one bit of one weight in a checkpoint: a high one of the mantissa, in the middle of the largest tensor."""
    weight = max(weights.values(), key=lambda tensor: tensor.numel())
    for path in files(checkpoint):
        content = bytearray(path.read_bytes())
        if (at := content.find(weight.numpy().tobytes())) >= 0:
            content[at + weight.numel() // 2 * 4 + 2] ^= 0x10
            path.write_bytes(content)
            return
    raise RunError(f"no file of {checkpoint.name} contains the weights verbatim")


def failure(output: str) -> str:
    """The line of an output that says why the command failed, without paths."""
    others = ("ChildFailedError", "Connection closed by peer")  # how the launcher and other ranks report one rank's failure
    lines = [line for line in FAILURE.findall(output) if not any(other in line for other in others)]
    lines = lines or re.findall(r".*\w.*", output)[-1:]
    return re.sub(r"(?<![\w.])/[^\s:,'\"]*/", "", (lines or ["no output"])[-1]).strip()[:200]


def audit(name: str, config: AuditConfig) -> None:
    """Examine one trainer, and add its row to audit.json."""
    kind = audit_trainers.TRAINERS[name]
    if kind.repository and not Path(config.path, kind.proof).exists():
        raise UserError(f"--path={config.path}: a checkout of {kind.repository} has {kind.proof}")
    with machine.workspace() as work:
        trainer = kind(Path(config.path or machine.ROOT).resolve(), config.python, work, text())
        exam = Examination(trainer, work)
        row = {"title": trainer.title, "commit": trainer.commit(), "versions": trainer.versions(), "found": exam.found}
        row |= {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name()}
        row["command"] = shown(trainer, False), shown(trainer, True)
        if exam.reference.error or len(exam.reference.updates) < STEPS:
            exam.found["error"] = exam.reference.error or f"{len(exam.reference.updates)} updates"
        else:
            for question in config.only.split(",") if config.only else QUESTIONS:
                exam.found[question] = getattr(exam, question)()
                print(f"{name}: {question}: {exam.found[question]}", flush=True)
    path = Path(config.out, "audit.json")
    rows = json.loads(path.read_text())["trainers"] if path.exists() else {}
    if config.only:  # keep what was found before
        if "error" in exam.found:
            raise RunError(f"{name} does not start: {exam.found['error']}")
        row["found"] = rows.get(name, {}).get("found", {}) | exam.found
    print(machine.write("audit", {"trainers": rows | {name: row}}, config.out))
    print(json.dumps(row, indent=2))


def text() -> str:
    """The text to train on: 2,000 paragraphs of made-up words, in which frequent words are short."""
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=2 + number // 60)) for number in range(500)]
    return "\n\n".join(" ".join(chance.choices(words, k=30, weights=range(500, 0, -1))) for _ in range(2000))


def shown(trainer: Trainer, resume: bool) -> str:
    """A trainer's command as a reader would type it, without this machine's paths."""
    parts = [str(part) for part in trainer.command(trainer.work / "RUN", 1, resume)]
    command = shlex.join(["PYTHON" if trainer.repository else "python", *parts[1:]])
    return command.replace(str(trainer.work), "WORK").replace(f"{trainer.path}/", "")


if __name__ == "__main__":
    cases = {name: (AuditConfig, lambda config, name=name: audit(name, config)) for name in audit_trainers.TRAINERS}
    machine.choose(__doc__, **cases)
