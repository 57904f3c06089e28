"""The datasets of a run, and the share of each. A single dataset is a mixture of one.

A phase changes the shares from a given step on. `Mixture.identity` says which tokens a step sees, so that a run that continues
finds out if its data has changed.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from lockstep.common.errors import UserError
from lockstep.common.records import Auto
from lockstep.common.steps import read_phases
from lockstep.dataset.tokens import Dataset, Stream, digest, open_dataset
from lockstep.settings import Config, DataConfig

BLOCK = 4096  # sequences per block of a mixture; the shares are whole numbers that add up to this
Phases = tuple[tuple[int, tuple[int, ...]], ...]  # for each phase: its first step, and the share of each dataset


@dataclass(frozen=True)
class Mixture:
    """The datasets of a run, all with the same tokenizer, and their shares. A single dataset is a mixture of one."""

    datasets: tuple[Dataset, ...]
    phases: Phases  # the first is --tokens, from step 0; datasets that only later phases use have a share of 0 there
    rounded: bool = False  # whether the shares differ from the requested weights

    def __str__(self) -> str:
        return self.describe(self.shares)

    def describe(self, shares: tuple[int, ...]) -> str:
        """Return the mixture in the syntax of --tokens."""
        parts = [(str(d.directory), share) for d, share in zip(self.datasets, shares, strict=True) if share]
        return ",".join(f"{name}:{share / BLOCK:g}" for name, share in parts) if len(parts) > 1 else parts[0][0]

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares in the first phase, --tokens."""
        return self.phases[0][1]

    @property
    def evaluated(self) -> int:
        """The number of datasets that share --eval_tokens: the ones in --tokens."""
        return sum(share > 0 for share in self.shares)

    @property
    def vocab_size(self) -> int:
        """The size of the tokenizer's vocabulary."""
        return self.datasets[0].vocab_size

    @property
    def eot_token(self) -> int | None:
        """The end-of-text token, or None if no dataset states it."""
        return next((dataset.eot_token for dataset in self.datasets if dataset.eot_token is not None), None)

    def document_token(self, attend: str) -> int | None:
        """Return the token that starts a document, for attention within documents. Raises UserError if it is unknown.

        Some files put this token at the end of documents instead. It is then predicted from the document that it ends, and the
        tokens after it don't see that document.
        """
        match attend:
            case "window":
                return None
            case "document":
                for dataset in self.datasets:
                    if dataset.eot_token is None:
                        unknown = f"--attend=document: {dataset.directory} does not say which token separates documents"
                        raise UserError(f"{unknown}; put its tokenizer.json there, or use --attend=window")
                return self.eot_token
            case other:
                raise AssertionError(f"--attend={other} is not implemented")

    @property
    def tokenizer(self) -> Path | None:
        """The first tokenizer.json among the datasets, or None."""
        return next((dataset.tokenizer for dataset in self.datasets if dataset.tokenizer), None)

    @property
    def remarks(self) -> list[str]:
        """Notes for the user: assumptions about the files, and rounded weights."""
        found = [dataset.remark for dataset in self.datasets if dataset.remark]
        if self.rounded:
            mixtures = "; ".join(self.describe(shares) for _, shares in self.phases)
            found.append(f"the weights of mixtures are rounded to 1/{BLOCK:,}: {mixtures}")
        return found

    @property
    def identity(self) -> str:
        """The sha256 of the contents and shares of --tokens, followed by ` STEP:SHA256` for each later phase."""
        return self._identity([dataset.identity for dataset in self.datasets])

    def translate(self, recorded: str) -> str:
        """Return an identity that a run recorded in today's form. Parts of it that are not of this mixture stay as they are."""
        earlier = self._identity([dataset.earlier_identity or dataset.identity for dataset in self.datasets])
        today = dict(zip(earlier.split(), self.identity.split(), strict=True))
        return " ".join(today.get(part, part) for part in recorded.split())

    def _identity(self, identities: list[str]) -> str:
        words = []
        for step, shares in self.phases:
            # Shares are hashed in units of 1/2^24, because the identity was recorded so when shares could be that fine.
            parts = [(i, identities[i], share * 4096) for i, share in enumerate(shares) if share]
            if step:
                words.append(f"{step}:{digest(parts)}")
            elif len(parts) == 1:
                words.append(parts[0][1])
            else:
                words.append(digest([part[1:] for part in parts]))
        return " ".join(words)

    @property
    def names(self) -> list[str]:
        """A name for each dataset: its directory's name, or the path if two directories share a name."""
        names = [dataset.directory.resolve().name for dataset in self.datasets]
        return names if len(set(names)) == len(names) else [str(dataset.directory) for dataset in self.datasets]

    def by_name(self, values: Iterable[float]) -> dict[str, float]:
        """Return a value for each dataset by its name."""
        return dict(zip(self.names, values, strict=True))

    @property
    def once(self) -> dict[str, float]:
        """After how many tokens of the run each dataset has been read once, by name. Ignores later phases."""
        parts = zip(self.names, self.streams("train"), self.shares, strict=True)
        return {name: len(stream) * BLOCK / share for name, stream, share in parts if share}

    def streams(self, split: str) -> list[Stream]:
        """Return the split of each dataset."""
        return [dataset.splits[split] for dataset in self.datasets]

    def validation(self, losses: list[float]) -> dict[str, float | None]:
        """Return the metrics record for the datasets' validation `losses`: the mean and, with several datasets, each one.

        The mean is always weighted by the shares of --tokens, so that it stays comparable across phases. Bits per byte is None
        if a dataset's size in bytes is unknown.
        """
        parts = [part for part in zip(self.shares, losses, self.datasets, strict=True) if part[0]]
        mean = sum(share / BLOCK * loss for share, loss, _ in parts)
        sizes = [share / BLOCK * dataset.bytes_per_token for share, _, dataset in parts]
        record = {"val_loss": mean, "val_bpb": mean / math.log(2) / sum(sizes) if all(sizes) else None}
        for name, dataset, loss in zip(self.names, self.datasets, losses, strict=True):
            if len(self.datasets) > 1:
                record |= {f"val_loss/{name}": loss, f"val_bpb/{name}": dataset.bits_per_byte(loss)}
        return record


def parse_mixture(tokens: str, flag: str) -> list[tuple[str, Fraction]]:
    """Return the directory and weight of each dataset in `tokens/web:0.8,tokens/code:0.2`. Raises UserError, naming `flag`."""
    parts = [re.fullmatch(r"\s*(.+):(\d{0,20}\.?\d{1,20})\s*", part) for part in tokens.split(",")]
    if os.path.exists(tokens) or parts == [None]:  # a single directory, even if its name looks like a mixture
        return [(tokens, Fraction(1))]
    if not all(part and Fraction(part[2]) for part in parts):
        wanted = "each dataset of a mixture needs a weight greater than 0, as in tokens/web:0.8,tokens/code:0.2"
        raise UserError(f"{flag}: {wanted}")
    return [(part[1], Fraction(part[2])) for part in parts]


def parse_mixtures(config: DataConfig) -> list[tuple[int, str, list[tuple[str, Fraction]]]]:
    """Return --tokens and each phase: its first step, its flag, and its directories with their weights. Raises UserError."""
    tokens = f"--tokens={config.tokens}"
    found = [(0, tokens, parse_mixture(config.tokens, tokens))]
    for step, text in read_phases(config.phase):
        flag = f"--phase={step}:{text}"
        found.append((step, flag, parse_mixture(text, flag)))
    return found


def directories(config: DataConfig) -> list[str]:
    """Return the directories named by --tokens and --phase, without duplicates. Raises UserError."""
    return list(dict.fromkeys(directory for _, _, parts in parse_mixtures(config) for directory, _ in parts))


def open_mixture(config: DataConfig, vocab_size: int | Auto = "auto") -> Mixture:
    """Open the datasets that --tokens and --phase name; see `open_dataset`. Raises UserError if their tokenizers differ."""
    opened = open_all(directories(config), 0 if vocab_size == "auto" else vocab_size)
    datasets, phases, rounded = [], [], False  # phases: the first step of each, and the shares by index in `datasets`
    for step, flag, parts in parse_mixtures(config):
        weights, shares = [weight for _, weight in parts], {}
        for (directory, weight), share in zip(parts, round_shares(weights), strict=True):
            if not share:
                raise UserError(f"{flag}: a weight is too small; every dataset needs at least 1 of {BLOCK:,} sequences")
            if share * sum(weights) != weight * BLOCK:
                rounded = True
            dataset = opened[directory]
            known = [i for i, d in enumerate(datasets) if i not in shares and d.directory.samefile(dataset.directory)]
            if known:  # a dataset from an earlier phase keeps its index
                shares[known[0]] = share
            else:
                shares[len(datasets)] = share
                datasets.append(dataset)
            for other in datasets:
                if other is not dataset:
                    check_tokenizers(other, dataset, flag)
        phases.append((step, shares))
    every = range(len(datasets))
    return Mixture(tuple(datasets), tuple((step, tuple(shares.get(i, 0) for i in every)) for step, shares in phases), rounded)


def open_all(paths: list[str], vocab_size: int) -> dict[str, Dataset]:
    """Open each dataset directory once. vocab_size: the model's, which may be padded (0: unknown)."""
    opened = {path: open_dataset(path, vocab_size) for path in paths}
    stated = [dataset.vocab_size for path, dataset in opened.items() if is_own(path)]
    for path, dataset in opened.items():
        if stated and dataset.vocab_size == vocab_size and not is_own(path):
            largest = max(stream.largest for stream in dataset.splits.values())
            if largest < stated[0] < vocab_size:  # its tokens have the same vocabulary as the datasets that state theirs
                opened[path] = open_dataset(path, stated[0])
    return opened


def open_if_there(config: Config) -> tuple[Mixture | None, int]:
    """Return the datasets of a run, or None if one is missing, and the size of the vocabulary (if unknown, GPT-2's)."""
    vocab_size = config.model.vocab_size
    if all(Path(directory).is_dir() for directory in directories(config.data)):
        mixture = open_mixture(config.data, vocab_size)
        return mixture, mixture.vocab_size
    return None, 50257 if vocab_size == "auto" else vocab_size


def is_own(directory: str) -> bool:
    """Return whether a dataset states its vocabulary, as those made by prepare_data.py do."""
    return Path(directory, "dataset.json").exists()


def check_tokenizers(first: Dataset, other: Dataset, flag: str) -> None:
    """Raise UserError if two datasets were clearly made with different tokenizers."""
    hashes = {d.tokenizer_sha256 for d in (first, other)} - {None}
    ends = {d.eot_token for d in (first, other)} - {None}
    if other.vocab_size != first.vocab_size or len(ends) > 1 or len(hashes) > 1:
        raise UserError(f"{flag}: {first.directory} and {other.directory} were made with different tokenizers")


def round_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Scale weights to whole numbers that add up to BLOCK: round all down, then up the ones with the largest remainders."""
    exact = [weight * BLOCK / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    for i in sorted(range(len(shares)), key=lambda i: shares[i] - exact[i])[: BLOCK - sum(shares)]:
        shares[i] += 1
    return tuple(shares)
