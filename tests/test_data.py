"""The tokens of a step: a pure function of (seed, step), the same for every number of ranks, across shard boundaries."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
import evaluate
from conftest import PATIENCE, foreign_tokens, wait_for
from lockstep.common.errors import RunError, UserError
from lockstep.common.steps import mixtures_seen
from lockstep.dataset.mixture import BLOCK, open_mixture, round_shares
from lockstep.dataset.tokens import Stream, open_dataset, open_shard, write_shard
from lockstep.parallel.world import World
from lockstep.settings import DataConfig

ONE = ((0, (BLOCK,)),)  # one phase, of one dataset
# Digests of the order in which mixtures take sequences, as it was when shares had 24 bits.
WHOLE = {
    (4096,): "86dc42eb04570308",
    (3072, 1024): "2371fcade47caffa",
    (1366, 1365, 1365): "0fa28d45840725da",
    (4095, 1): "bdd407f3cdfa4f7d",
}


def world(rank, size):
    return World(rank, size, size, torch.device("cpu"))


class Memory(np.ndarray):
    """A shard in memory."""

    path = Path("tokens/shard")


def stream_of(sizes):
    """Shards in memory whose tokens tell their own position."""
    tokens = np.arange(sum(sizes), dtype=np.uint32).view(Memory)
    return Stream(np.split(tokens, np.cumsum(sizes)[:-1]), vocab_size=1 << 31)


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 50))
def test_permutation_is_a_bijection(n, seed, epoch):
    assert np.array_equal(np.sort(data.permute(np.arange(n), n, seed, epoch)), np.arange(n))


def test_permutation_depends_on_seed_and_epoch_and_scatters():
    n = 100_000
    orders = [data.permute(np.arange(n), n, seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    for i, a in enumerate(orders):
        assert abs(np.corrcoef(a, np.arange(n))[0, 1]) < 0.02
        assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.02
        for b in orders[:i]:
            assert (a == b).mean() < 0.001


def test_permutation_of_an_enormous_epoch_has_each_place_once():
    index = np.arange(1 << 40, (1 << 40) + 64)
    out = data.permute(index, (1 << 41) + 12345, 7, 3)
    assert len(set(out.tolist())) == 64 and out.min() >= 0 and out.max() < (1 << 41) + 12345


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 40),
    seq_len=st.integers(1, 20),
    micro_batch_size=st.integers(1, 3),
    micro_batches=st.sampled_from([12, 24]),
    seed=st.integers(0, 1000),
    shuffled=st.booleans(),
    first_step=st.integers(0, 40),
)
def test_tokens_of_a_step_do_not_depend_on_the_number_of_ranks(
    sizes, seq_len, micro_batch_size, micro_batches, seed, shuffled, first_step
):
    stream = stream_of(sizes)
    batches = data.Batches([stream], ONE, seq_len, micro_batches * micro_batch_size, micro_batch_size, seed, shuffled)
    n = stream.num_windows(seq_len)
    for step in range(first_step, first_step + 2):
        seen = {}
        for size in (1, 2, 3, 4, 5):  # 5 divides neither: ranks then take unequal shares
            parts = [
                torch.from_numpy(batches.batch(step, m)) for rank in range(size) for m in world(rank, size).share(micro_batches)
            ]
            seen[size] = torch.cat(parts)
        assert all(torch.equal(seen[1], other) for other in seen.values())
        # Every row is a whole window of the stream, whatever shards it crosses.
        assert torch.equal(seen[1], seen[1][:, :1] + torch.arange(seq_len + 1))
        assert (seen[1][:, 0] % seq_len == 0).all() and (seen[1][:, 0] // seq_len < n).all()


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5), seq_len=st.integers(1, 9), epochs=st.integers(1, 3))
def test_every_window_is_seen_once_an_epoch(sizes, seq_len, epochs):
    stream = stream_of(sizes)
    n = stream.num_windows(seq_len)
    if n == 0:
        with pytest.raises(UserError):
            data.Batches([stream], ONE, seq_len, 1, 1, 0)
        return
    batches = data.Batches([stream], ONE, seq_len, 1, 1, seed=5)
    windows = [int(batches.sequences(q, 1)[1][0]) for q in range(n * epochs)]
    for epoch in range(epochs):
        assert sorted(windows[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_shares_are_contiguous_and_as_equal_as_can_be():
    for count in (1, 5, 12, 64):
        for size in range(1, 8):
            shares = [list(world(rank, size).share(count)) for rank in range(size)]
            assert sum(shares, []) == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def opened(tokens, phase=""):
    return open_mixture(DataConfig(tokens, phase=phase))


def make(directory, vocab_size=300, train=(500, 300), val=(200,)):
    """A dataset directory of our own kind."""
    directory.mkdir(exist_ok=True)
    rng, rows = np.random.default_rng(0), []
    for split, sizes in (("train", train), ("val", val)):
        for i, size in enumerate(sizes):
            file = f"{split}_{i:06d}.bin"
            digest = write_shard(directory / file, rng.integers(0, vocab_size, size), vocab_size)
            rows.append(dict(file=file, split=split, tokens=size, bytes_of_text=3 * size, documents=1, sha256=digest))
    metadata = dict(version=1, vocab_size=vocab_size, eot_token=0, dtype="uint16", shards=rows, source=[], val_fraction=0.1)
    metadata["tokenizer"] = dict(name="bytes", sha256="0" * 64)
    (directory / "dataset.json").write_text(json.dumps(metadata))
    return directory


@pytest.mark.parametrize(
    "tokens, windows", [(0, range(20)), (32, [0, 5, 10, 15]), (17, [0, 6, 13]), (8, [0]), (999, range(20))]
)
def test_an_evaluation_reads_windows_spread_evenly_over_the_split(tokens, windows):
    stream, seen = Stream([np.arange(161, dtype="<u2").view(Memory)], 161), []

    def model(inputs, targets):
        assert torch.equal(targets, inputs + 1)
        seen.extend((inputs[:, 0] // 8).tolist())
        return inputs[:, 0].double().mean()

    loss = evaluate.evaluate(model, stream, 8, 3, tokens, world(0, 1), contextlib.nullcontext)
    assert seen == list(windows) and loss == pytest.approx(8 * np.mean(windows))  # also if the last batch is smaller


@pytest.mark.parametrize("vocab_size", [300, 65_536, 65_537, 200_000])
def test_own_dataset_is_read_back(tmp_path, vocab_size):
    dataset = open_dataset(make(tmp_path, vocab_size))
    wanted = np.random.default_rng(0).integers(0, vocab_size, 500)
    assert np.array_equal(dataset.splits["train"].shards[0][:], wanted)
    header = np.fromfile(tmp_path / "train_000000.bin", dtype="<i4", count=3).tolist()
    assert header == ([20240520, 1, 500] if vocab_size <= 65_536 else [20240801, 7, 500])
    assert dataset.bits_per_byte(np.log(2)) == pytest.approx(1 / 3)


def test_identity_is_of_the_tokens_not_of_the_place(tmp_path):
    a, b = (open_dataset(make(tmp_path / name)).identity for name in "ab")
    assert a == b
    assert open_dataset(make(tmp_path / "b", train=(501, 300))).identity != a


@pytest.mark.parametrize("kind", ["llm.c", "nanoGPT", "build-nanogpt"])
def test_foreign_directories_are_read_without_conversion(tmp_path, kind):
    tokens = np.random.default_rng(1).integers(0, 50257, 3000).astype(np.uint16)
    dataset = open_dataset(foreign_tokens(tmp_path / "other", kind, tokens))
    assert np.array_equal(dataset.splits["train"].shards[0][:], tokens[:2000])
    assert np.array_equal(dataset.splits["val"].shards[0][:], tokens[2000:])
    assert dataset.vocab_size == 50257 and dataset.bits_per_byte(1.0) is None


def test_foreign_tokens_are_known_by_samples_of_their_content(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 50257, 3000).astype(np.uint16)
    folder = foreign_tokens(tmp_path / "other", "nanoGPT", tokens)
    before, identities = open_dataset(folder), set()
    sizes = [("train.bin", 4000), ("val.bin", 2000)]
    assert before.earlier_identity == hashlib.sha256(json.dumps(sizes).encode()).hexdigest()
    for place in (0, 1999, 1234, 2500):
        tokens[place] ^= 1
        shutil.rmtree(folder)
        changed = open_dataset(foreign_tokens(folder, "nanoGPT", tokens))
        assert changed.earlier_identity == before.earlier_identity
        identities.add(changed.identity)
    assert len(identities | {before.identity}) == 5
    mixture, old = opened(str(folder), f"7:{folder}"), changed.earlier_identity
    later = hashlib.sha256(json.dumps([[0, old, 4096 * 4096]]).encode()).hexdigest()
    assert mixture.translate(f"{old} 7:{later}") == mixture.identity and mixture.translate(old) == changed.identity
    assert mixture.translate(f"another 7:{later}").split()[0] == "another" and mixture.translate("") == ""


def test_llm_c_names_of_a_single_shard_are_read(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 50257, 3000).astype(np.uint16)
    for split, part in (("train", tokens[:2000]), ("val", tokens[2000:])):
        write_shard(tmp_path / f"tiny_shakespeare_{split}.bin", part, 50257)
    dataset = open_dataset(tmp_path)
    assert np.array_equal(dataset.splits["train"].shards[0][:], tokens[:2000]) and len(dataset.splits["val"]) == 1000
    for split in ("train", "val"):  # files that were found before this name was accepted still win
        np.zeros(9, np.uint16).tofile(tmp_path / f"{split}.bin")
    assert len(open_dataset(tmp_path).splits["train"]) == 9


def repeat_shard(directory, **changes):
    """List the first shard again."""
    metadata = json.loads((directory / "dataset.json").read_text())
    metadata["shards"].append(metadata["shards"][0] | changes)
    (directory / "dataset.json").write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda d: repeat_shard(d), "dataset.json lists train_000000.bin more than once, so its text would count twice"),
        (lambda d: repeat_shard(d, split="val"), "dataset.json lists train_000000.bin more than once"),
        (lambda d: write_shard(d / "train_000000.bin", np.full(500, 300), 300), "outside the vocabulary"),
        (lambda d: write_shard(d / "val_000000.bin", np.zeros(7), 300), "dataset.json says 200"),
    ],
)
def test_damaged_datasets_are_refused(tmp_path, damage, message):
    damage(make(tmp_path))
    with pytest.raises(UserError, match=message):
        open_dataset(tmp_path)


def test_missing_dataset_names_the_command_that_makes_it(tmp_path):
    (tmp_path / "a.txt").touch()
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "a.txt"):
        with pytest.raises(UserError, match="prepare_data.py"):
            open_dataset(path)


def test_a_bad_token_deep_in_a_large_shard_is_caught_when_it_is_read():
    stream = stream_of([400])
    stream = replace(stream, vocab_size=399)
    with pytest.raises(UserError, match="token 399"):
        data.Batches([stream], ONE, 400 - 1, 1, 1, 0).batch(0, 0)


def test_prefetcher_hands_out_the_same_batches_in_order_and_passes_errors_on():
    batches = data.Batches([stream_of([50, 70])], ONE, 7, 6, 2, seed=3)
    schedule = [(step, micro) for step in range(5) for micro in range(3)]
    prefetcher = data.Prefetcher(batches, schedule, torch.device("cpu"))
    for step, micro in schedule:
        number, inputs, targets = prefetcher.next()
        tokens = torch.from_numpy(batches.batch(step, micro))
        assert number == micro and torch.equal(inputs, tokens[:, :-1]) and torch.equal(targets, tokens[:, 1:])
    prefetcher.close()
    broken = data.Prefetcher(
        replace(batches, streams=[replace(batches.streams[0], vocab_size=3)]), schedule, torch.device("cpu")
    )
    with pytest.raises(UserError, match="outside the vocabulary"):
        broken.next()
    broken.close()


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures


def weights(*values):
    return round_shares([Fraction(value) for value in values])


mixtures = st.lists(st.integers(1, 100), min_size=1, max_size=9).map(lambda values: weights(*values))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((1,), (4096,)),
        (("0.75", "0.25"), (3072, 1024)),
        (("0.8", "0.2"), (3277, 819)),
        ((8, 2), (3277, 819)),
        ((1, 1, 1), (1366, 1365, 1365)),
        ((1, 99_999), (0, 4096)),
    ],
)
def test_weights_become_shares_of_4096(given, wanted):
    assert weights(*given) == wanted


@settings(deadline=None, max_examples=30)
@given(shares=mixtures, seed=st.integers(0, 100), block=st.integers(0, 300_000))
def test_every_block_has_the_share_of_each_dataset_in_another_order(shares, seed, block):
    mixed, other = (data.mixed_block(number, shares, seed) for number in (block, block + 1))
    assert np.bincount(mixed, minlength=len(shares)).tolist() == list(shares)
    assert not np.array_equal(mixed, other) or max(shares) > BLOCK * 0.999


def test_the_order_of_the_datasets_is_shuffled_and_depends_on_the_seed():
    shares = weights("0.7", "0.3")
    orders = [data.mixed_block(block, shares, seed) for block, seed in ((0, 1), (1, 1), (0, 2))]
    for i, order in enumerate(orders):
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.06
        for other in orders[:i]:
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.06


@settings(deadline=None, max_examples=30)
@given(
    shares=mixtures,
    seq_len=st.integers(1, 9),
    seed=st.integers(0, 1000),
    shuffled=st.booleans(),
    first_step=st.integers(0, 2000),
)
def test_a_mixture_reads_each_dataset_as_if_alone_on_any_number_of_ranks(shares, seq_len, seed, shuffled, first_step):
    streams = [stream_of([50 + 20 * i, 30]) for i in range(len(shares))]
    batches = data.Batches(streams, ((0, shares),), seq_len, 24, 2, seed, shuffled)
    alone = [data.Batches([stream], ONE, seq_len, 24, 2, seed, shuffled) for stream in streams]
    sizes = [stream.num_windows(seq_len) for stream in streams]
    read = [round(epochs * size) for epochs, size in zip(batches.epochs(first_step), sizes, strict=True)]
    assert sum(read) == first_step * 24
    for step in range(first_step, first_step + 3):
        datasets, windows = batches.sequences(step * 24, 24)
        expected = np.empty((24, seq_len + 1), np.int64)
        for row, (dataset, window) in enumerate(zip(datasets, windows, strict=True)):
            assert alone[dataset].sequences(read[dataset], 1)[1][0] == window  # the next one of this dataset
            read[dataset] += 1
            expected[row] = window * seq_len + np.arange(seq_len + 1)  # tokens tell their position
        for size in (1, 2, 3, 5):
            parts = [batches.batch(step, m) for rank in range(size) for m in world(rank, size).share(12)]
            assert np.array_equal(np.concatenate(parts), expected)
    assert batches.epochs(first_step + 3) == [count / size for count, size in zip(read, sizes, strict=True)]


@settings(deadline=None, max_examples=20)
@given(
    mixtures=st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 9), min_size=1), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 100), min_size=4, max_size=4),
    per_update=st.integers(1, 40),
    skipped=st.sets(st.integers(0, 400), max_size=40),
    seed=st.integers(0, 100),
)
def test_each_dataset_goes_on_with_its_next_sequence_through_phases_and_skips(mixtures, lengths, per_update, skipped, seed):
    starts, streams = np.cumsum([0, *lengths]).tolist(), [stream_of([90 + 40 * i]) for i in range(4)]
    shares = [dict(zip(mixture, weights(*mixture.values()), strict=True)) for mixture in mixtures]
    phases = tuple((start, tuple(own.get(i, 0) for i in range(4))) for start, own in zip(starts, shares, strict=False))
    batches = data.Batches(streams, phases, 4, per_update, 1, seed, skipped=tuple(sorted(skipped)))
    alone = [data.Batches([stream], ONE, 4, 1, 1, seed) for stream in streams]
    read, left, batch = [0] * 4, sorted(skipped), 0
    for step in range(starts[len(mixtures)]):
        phase = max(i for i, (start, _) in enumerate(phases) if start <= step)
        while batch in left:  # its sequences count as read
            for dataset in batches.sequences(batch * per_update, per_update)[0]:
                read[dataset] += 1
            batch += 1
        if step in starts:
            read_before = batches.read(batch * per_update).tolist()
            assert read == read_before
        datasets, windows = batches.sequences(batches.first_sequence(step), per_update)
        assert {int(dataset) for dataset in datasets} <= mixtures[phase].keys()
        for dataset, window in zip(datasets, windows, strict=True):
            assert alone[dataset].sequences(read[dataset], 1)[1][0] == window
            read[dataset] += 1
        batch += 1
    assert np.array_equal(batches.read(batch * per_update), read)


def test_a_batch_of_another_size_begins_where_the_last_one_ended():
    """Also a third one, after skipped batches, and through a phase that began with batches of the first size."""
    streams = [stream_of([5000]), stream_of([3000])]
    phases = ((0, weights(1, 1)), (4, weights(3, 1)))

    def of(step, size, sizes, skipped):
        batches = data.Batches(streams, phases, 4, size, 1, 1, skipped=skipped, sizes=sizes)
        return batches, [window for part in batches.sequences(batches.first_sequence(step), size) for window in part.tolist()]

    for skipped in ((), (3, 12)):
        one, _ = of(0, 8, (), skipped)
        larger = [(0, 0, 8), (10, reached := one.reached(10), 16)]
        assert reached == 8 * (10 + (3 in skipped))
        two, found = of(10, 16, larger, skipped)
        assert found[:8] + found[16:24] == of(10, 8, (), skipped)[1]  # the datasets and windows of its first half
        assert two.first_sequence(12) - two.first_sequence(10) == 16 * (2 + (12 in skipped))
        assert [two.first_sequence(step) for step in range(10)] == [one.first_sequence(step) for step in range(10)]
        three, _ = of(14, 4, [*larger, (14, two.reached(14), 4)], skipped)
        assert three.first_sequence(14) == two.reached(14) and three.starts == one.starts
        assert three.epochs(10) == one.epochs(10)


def test_a_batch_that_a_phase_begins_with_can_be_left_out():
    streams, phases = [stream_of([5000]), stream_of([7000])], ((0, weights(1, 0)), (3, weights(1, 1)))
    plain, skipping = (data.Batches(streams, phases, 4, 8, 1, 1, skipped=skipped) for skipped in ((), (3,)))
    for step in range(8):
        assert np.array_equal(skipping.batch(step, 0), plain.batch(step + (step >= 3), 0))
    assert np.array_equal(plain.batch(2, 5), data.Batches(streams, phases[:1], 4, 8, 1, 1).batch(2, 5))


def test_mixtures_of_whole_shares_keep_the_order_of_earlier_versions():
    for shares, wanted in WHOLE.items():
        streams = [stream_of([50_000 + 7 * i, 3000]) for i in range(len(shares))]
        batches = data.Batches(streams, ((0, shares),), 64, 48, 4, seed=1337)
        order = [np.stack(batches.sequences(first, 100)).tobytes() for first in (0, 4090, 10**7)]
        assert hashlib.sha256(b"".join(order)).hexdigest()[:16] == wanted


def test_datasets_of_equal_length_have_their_own_orders_but_in_runs_of_earlier_versions():
    streams, phases = [stream_of([5000])] * 3, ((0, weights(1, 1, 1)),)
    shared, own = (data.Batches(streams, phases, 4, 8, 1, seed=1, own_orders=own) for own in (False, True))
    n = streams[0].num_windows(4)
    for epoch in (0, 1):
        before, after = ([batches.windows(i, epoch * n, n) for i in range(3)] for batches in (shared, own))
        assert all(np.array_equal(before[0], other) for other in (before[1], before[2], after[0]))
        for i in range(3):
            assert sorted(after[i].tolist()) == list(range(n))
            assert all((after[i] == after[j]).mean() < 0.01 for j in range(i))
    assert np.array_equal(shared.sequences(0, 999)[0], own.sequences(0, 999)[0])  # which dataset comes next
    alone = [data.Batches(streams[:1], ONE, 4, 8, 1, seed=1, own_orders=own) for own in (False, True)]
    assert np.array_equal(*(batches.windows(0, 0, 2 * n) for batches in alone))


def test_any_sequence_of_an_enormous_run_is_reached_at_once():
    batches = data.Batches([stream_of([5000])] * 3, ((0, weights(5, 3, 1)),), 4, 1, 1, seed=1)
    began = time.perf_counter()
    datasets, windows = batches.sequences(10**15 - 50, 100)
    assert time.perf_counter() - began < 30 and set(datasets) == {0, 1, 2} and len(set(windows)) > 50
    assert sum(batches.epochs(10**15)) == pytest.approx(10**15 / 1249)


def test_a_mixture_is_opened_by_directories_and_weights(tmp_path):
    make(tmp_path / "web", train=(500, 300))
    make(tmp_path / "code", train=(400,))
    mixture = opened(f"{tmp_path}/web:0.8,{tmp_path}/code:0.2")
    assert mixture.names == ["web", "code"] and [len(stream) for stream in mixture.streams("train")] == [800, 400]
    assert mixture.shares == weights(8, 2) and mixture.vocab_size == 300
    assert str(mixture) == f"{tmp_path}/web:0.800049,{tmp_path}/code:0.199951"
    assert mixture.remarks == [f"the weights of mixtures are rounded to 1/4,096: {mixture}"]
    exact = opened(f"{tmp_path}/web:3,{tmp_path}/code:1")
    assert exact.remarks == [] and exact.shares == (3072, 1024)
    in_24_bits = [[dataset.identity, share << 12] for dataset, share in zip(exact.datasets, exact.shares, strict=True)]
    assert exact.identity == hashlib.sha256(json.dumps(in_24_bits).encode()).hexdigest()  # as runs of earlier versions have it
    one = opened(str(tmp_path / "web"))
    assert one.phases == ONE and one.identity == open_dataset(tmp_path / "web").identity and one.names == ["web"]
    assert opened(f"{tmp_path}/web:3").identity == one.identity
    others = [f"{tmp_path}/web:0.7,{tmp_path}/code:0.3", f"{tmp_path}/code:0.8,{tmp_path}/web:0.2"]
    assert len({mixture.identity, one.identity, *(opened(other).identity for other in others)}) == 4
    assert opened(str(make(tmp_path / "a:1,b"))).names == ["a:1,b"]


def test_phases_share_their_datasets_and_only_those_of_tokens_count_in_the_validation_loss(tmp_path):
    for name in ("web", "code", "math"):
        make(tmp_path / name, train=(400 + len(name),), val=(200,))
    before = opened(f"{tmp_path}/web:3,{tmp_path}/code:1")
    mixture = opened(
        before.describe(before.shares), f"8:{tmp_path}/math:1,{tmp_path}/../{tmp_path.name}/web:1,90:{tmp_path}/code"
    )
    assert mixture.names == ["web", "code", "math"]
    assert mixture.phases == ((0, (3072, 1024, 0)), (8, (2048, 0, 2048)), (90, (0, 4096, 0)))
    seen = [mixtures_seen(mixture.identity, steps) for steps in (8, 9, 90, 91)]
    assert [len(parts) for parts in seen] == [1, 2, 2, 3] and seen[0] == [before.identity]
    record = mixture.validation([2.0, 4.0, 9.0])
    assert {key: record[key] for key in before.validation([2.0, 4.0])} == before.validation([2.0, 4.0])
    assert record["val_loss/math"] == 9.0 and mixture.once.keys() == {"web", "code"}
    with pytest.raises(UserError, match="--phase=8:.*: each dataset of a mixture needs a weight"):
        opened(str(tmp_path / "web"), f"8:{tmp_path}/web:1,{tmp_path}/math")
    make(tmp_path / "other", 301)
    with pytest.raises(UserError, match="--phase=8:.*/other: .*/web and .*/other were made with different tokenizers"):
        opened(str(tmp_path / "web"), f"8:{tmp_path}/other")


@pytest.mark.parametrize("phase", ["8", "web:1", "0:web", "9:web,8:code", "8:web,8:code", "8:", "-8:web", "1.5:web"])
def test_a_phase_without_a_step_or_a_mixture_is_refused(phase):
    with pytest.raises(UserError, match=f"--phase={phase} must be a step and the mixture after it"):
        opened("tokens", phase)


def test_validation_losses_are_recorded_for_the_mixture_and_each_dataset(tmp_path):
    make(tmp_path / "web", val=(200,))
    make(tmp_path / "code", val=(500,))
    mixture = opened(f"{tmp_path}/web:3,{tmp_path}/code:1")
    record = mixture.validation([2.0, 4.0])
    bits = 2.5 / np.log(2) / 3  # three bytes a token in both
    assert list(record) == ["val_loss", "val_bpb", "val_loss/web", "val_bpb/web", "val_loss/code", "val_bpb/code"]
    assert record["val_loss"] == 2.5 and record["val_bpb"] == pytest.approx(bits)
    assert record["val_loss/code"] == 4.0 and record["val_bpb/code"] == pytest.approx(bits * 4 / 2.5)
    one = opened(f"{tmp_path}/code")
    assert one.validation([1.2345]) == {"val_loss": 1.2345, "val_bpb": one.datasets[0].bits_per_byte(1.2345)}


@pytest.mark.parametrize(
    "tokens", ["a:1,b", "a,b", "a:1,b:0", "a:1,b:-2", "a:1,b:x", "a:1,b:nan", "a:1,b:1e999,", ":1,b:1", "a:1,"]
)
def test_a_mixture_without_weights_is_refused(tokens):
    with pytest.raises(UserError, match="each dataset of a mixture needs a weight greater than 0"):
        opened(tokens)


def test_datasets_that_do_not_go_together_are_refused(tmp_path):
    for name, vocab_size in (("a", 300), ("b", 301), ("c", 300)):
        make(tmp_path / name, vocab_size)
        (tmp_path / name / "tokenizer.json").write_text("one" if name == "a" else "another")
    for other in "bc":
        with pytest.raises(UserError, match=rf"/a and {tmp_path}/{other} were made with different tokenizers"):
            opened(f"{tmp_path}/a:1,{tmp_path}/{other}:1")
    with pytest.raises(UserError, match="a weight is too small"):
        opened(f"{tmp_path}/a:1,{tmp_path}/a:0.0001")
    with pytest.raises(UserError, match="nothing does not exist; make it with: python prepare_data.py"):
        opened(f"{tmp_path}/a:1,{tmp_path}/nothing:1")
    make(tmp_path / "short", train=(5,))
    mixture = opened(f"{tmp_path}/b:1,{tmp_path}/b:1")
    assert mixture.names == [f"{tmp_path}/b"] * 2
    with pytest.raises(UserError, match=rf"{tmp_path}/short has 5 train tokens, less than one window of --seq_len=8"):
        data.Batches(opened(str(tmp_path / "short")).streams("train"), ONE, 8, 1, 1, 0)


def test_a_shard_that_is_truncated_under_a_run_is_named_and_the_run_goes_on_when_it_is_whole_again(train, tokens, tmp_path):
    train.tokens = shutil.copytree(tokens, tmp_path / "tokens")
    flags = dict(seq_len=64, tokens_per_update=512, steps=10**6, schedule="constant", save_every=5, eval_every=0, keep_last=2)
    process = train.start("run", 2, **flags)
    checkpoints = train.runs / "run" / "checkpoints"
    wait_for(lambda: checkpoints.is_symlink() or (checkpoints / "latest").exists() or process.poll() is not None)
    contents = {path: path.read_bytes() for path in train.tokens.glob("train_*.bin")}
    for path in contents:
        os.truncate(path, 2048)
    said = "".join(process.communicate(timeout=PATIENCE))
    assert process.returncode == 1 and "SIGBUS" not in said and "Traceback" not in said.partition("error: ")[0], said
    assert re.search(r"error: \S+/train_\d+.bin was truncated to 2048 bytes since it was opened; restore the file", said), said
    reached = int((checkpoints / "latest").resolve().name[5:])
    for path, content in contents.items():
        path.write_bytes(content)
    done = train("run", **flags | dict(steps=reached + 5))
    assert f"step {reached}" in done.stdout


def test_a_shard_on_a_bad_disk_is_named(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.bin", np.arange(100), 257)
    shard = open_shard(tmp_path / "a.bin")
    monkeypatch.setattr("os.pread", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(RunError, match=r"a\.bin: Input/output error at byte 1044; restore the file"):
        shard[10:20]


def test_shards_of_different_integers_are_one_stream(tmp_path):
    wide = np.array([70_000, 1, 2, 3], np.uint32)
    np.save(tmp_path / "a_train_0.npy", np.arange(4, dtype=np.uint16))
    np.save(tmp_path / "a_train_1.npy", wide)
    np.save(tmp_path / "a_val_0.npy", wide)
    stream = open_dataset(tmp_path, 100_000).splits["train"]
    assert stream.read_window(0, 6).tolist() == [0, 1, 2, 3, 70_000, 1, 2]
