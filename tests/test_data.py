"""The tokens of a step: a pure function of (seed, step), the same for every number of ranks, across shard boundaries."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from settings import UserError
from world import World


def world(rank, size):
    return World(rank, size, rank, size, torch.device("cpu"))


def stream_of(sizes):
    """Shards in memory whose tokens tell their own position."""
    tokens = np.arange(sum(sizes), dtype=np.uint32)
    shards = np.split(tokens, np.cumsum(sizes)[:-1])
    return data.Stream([data.Path(f"shard {i}") for i in range(len(sizes))], shards, vocab_size=1 << 31)


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


def test_permutation_of_an_enormous_epoch_is_as_quick_as_a_small_one():
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
    batches = data.Batches(stream, seq_len, micro_batches * micro_batch_size, micro_batch_size, seed, shuffled)
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
            data.Batches(stream, seq_len, 1, 1, 0)
        return
    batches = data.Batches(stream, seq_len, 1, 1, seed=5)
    windows = [int(batches.windows(q, 1)[0]) for q in range(n * epochs)]
    for epoch in range(epochs):
        assert sorted(windows[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_shares_are_contiguous_and_as_equal_as_can_be():
    for count in (1, 5, 12, 64):
        for size in range(1, 8):
            shares = [list(world(rank, size).share(count)) for rank in range(size)]
            assert sum(shares, []) == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def make(directory, vocab_size=300, train=(500, 300), val=(200,)):
    """A dataset directory of our own kind."""
    rng, rows = np.random.default_rng(0), []
    for split, sizes in (("train", train), ("val", val)):
        for i, size in enumerate(sizes):
            file = f"{split}_{i:06d}.bin"
            digest = data.write_shard(directory / file, rng.integers(0, vocab_size, size), vocab_size)
            rows.append(dict(file=file, split=split, tokens=size, bytes_of_text=3 * size, documents=1, sha256=digest))
    metadata = dict(format="lockstep-tokens", version=1, vocab_size=vocab_size, eot_token=0, dtype="uint16", shards=rows)
    (directory / "dataset.json").write_text(json.dumps(metadata))
    return directory


@pytest.mark.parametrize("vocab_size", [300, 65_536, 65_537, 200_000])
def test_own_dataset_is_read_back(tmp_path, vocab_size):
    dataset = data.open_dataset(make(tmp_path, vocab_size))
    wanted = np.random.default_rng(0).integers(0, vocab_size, 500)
    assert np.array_equal(dataset.splits["train"].shards[0], wanted)
    header = np.fromfile(tmp_path / "train_000000.bin", dtype="<i4", count=3).tolist()
    assert header == ([20240520, 1, 500] if vocab_size <= 65_536 else [20240801, 7, 500])
    assert dataset.bits_per_byte(np.log(2)) == pytest.approx(1 / 3)


def test_identity_is_of_the_tokens_not_of_the_place(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    a, b = (data.open_dataset(make(tmp_path / name)).identity for name in "ab")
    assert a == b
    assert data.open_dataset(make(tmp_path / "b", train=(501, 300))).identity != a


def test_foreign_directories_are_read_without_conversion(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 50257, 3000).astype(np.uint16)
    llmc, nano, build = (tmp_path / name for name in ("llmc", "nanogpt", "build"))
    for directory in (llmc, nano, build):
        directory.mkdir()
    for split, part in (("train", tokens[:2000]), ("val", tokens[2000:])):
        data.write_shard(llmc / f"fineweb_{split}_000001.bin", part, 50257)
        part.tofile(nano / f"{split}.bin")
        np.save(build / f"edufineweb_{split}_000001.npy", part)
    for directory in (llmc, nano, build):
        dataset = data.open_dataset(directory)
        assert np.array_equal(dataset.splits["train"].shards[0], tokens[:2000])
        assert np.array_equal(dataset.splits["val"].shards[0], tokens[2000:])
        assert dataset.vocab_size == 50257 and dataset.bits_per_byte(1.0) is None


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda d: (d / "train_000001.bin").unlink(), "train_000001.bin"),
        (lambda d: (d / "train_000000.bin").write_bytes((d / "train_000000.bin").read_bytes()[:-2]), "promises"),
        (lambda d: data.write_shard(d / "train_000000.bin", np.full(500, 300), 300), "outside the vocabulary"),
        (lambda d: data.write_shard(d / "val_000000.bin", np.zeros(7), 300), "dataset.json says 200"),
        (lambda d: (d / "dataset.json").write_text("{"), "dataset.json"),
        (lambda d: (d / "dataset.json").write_text('{"version": 2}'), "version 2"),
    ],
)
def test_damaged_datasets_are_refused(tmp_path, damage, message):
    damage(make(tmp_path))
    with pytest.raises(UserError, match=message):
        data.open_dataset(tmp_path)


def test_missing_dataset_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(UserError, match="prepare_data.py"):
        data.open_dataset(tmp_path / "nothing")
    with pytest.raises(UserError, match="neither dataset.json"):
        data.open_dataset(tmp_path)


def test_a_bad_token_deep_in_a_large_shard_is_caught_when_it_is_read():
    stream = stream_of([400])
    stream = replace(stream, vocab_size=399)
    with pytest.raises(UserError, match="token 399"):
        data.Batches(stream, 400 - 1, 1, 1, 0).batch(0, 0)


def test_prefetcher_hands_out_the_same_batches_in_order_and_passes_errors_on():
    batches = data.Batches(stream_of([50, 70]), 7, 6, 2, seed=3)
    schedule = [(step, micro) for step in range(5) for micro in range(3)]
    prefetcher = data.Prefetcher(batches, schedule, torch.device("cpu"))
    for step, micro in schedule:
        inputs, targets = prefetcher.next()
        tokens = torch.from_numpy(batches.batch(step, micro))
        assert torch.equal(inputs, tokens[:, :-1]) and torch.equal(targets, tokens[:, 1:])
    prefetcher.close()
    broken = data.Prefetcher(replace(batches, stream=replace(batches.stream, vocab_size=3)), schedule, torch.device("cpu"))
    with pytest.raises(UserError, match="outside the vocabulary"):
        broken.next()
    broken.close()
