"""Datasets made from a hub and from S3 on loopback, through the command and the real clients: the same bytes after any kill."""

import io
import json
import random
import re
import subprocess
import sys
import time

import pyarrow
import pyarrow.parquet
import pytest

from conftest import PATIENCE, ROOT, environment, execute
from hub_server import HubServer

TOKEN = "hf_TopSecretToken"
HUB, S3 = "hf://datasets/owner/name/data", "s3://bucket/name/data"
# prepare_data.py with short waits between the tries of the clients.
COMMAND = """import time, prepare_data; from lockstep import command
from lockstep.common import cli
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.01))
command.run("prepare_data", lambda args: cli.parse(prepare_data.PrepareConfig, args, ""))"""


def parquet(texts):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), buffer, row_group_size=100, compression="none")
    return buffer.getvalue()


def contents(files=6, documents=150, seed=0):
    """Parquet files in two folders, of about 1.2 MB each, and what else a repository has."""
    words, chance = ["the", "same", "run", "is", "whatever", "happens", "to", "it", "naïve", "🙂"], random.Random(seed)
    made = {
        f"data/part{i % 2}/{i:03d}.parquet": parquet([" ".join(chance.choices(words, k=1500)) for _ in range(documents)])
        for i in range(files)
    }
    return made | {"README.md": b"Documentation is not text to train on.", "data/small.jsonl": b'{"text": "one"}\n' * 3}


@pytest.fixture(scope="module")
def hub():
    server = HubServer(token=TOKEN)
    server.sha = server.commit_files("owner/name", contents())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url())
        patch.setenv("HF_TOKEN", TOKEN)
        yield server
    server.close()


@pytest.fixture
def misbehave(hub):
    """Let one request in five for a listing or for content fail in any of several ways."""
    chance, faults = random.Random(1), ["drop", "truncate", 429, 500, 503]
    asked_once = re.compile(r"/api/datasets/[^/]+/[^/]+(/revision/.*)?")  # huggingface_hub does not ask it again
    hub.misbehave = lambda number, method, path: (
        chance.choice(faults) if chance.random() < 0.2 and not asked_once.fullmatch(path) else None
    )
    yield
    hub.misbehave = lambda number, method, path: None


@pytest.fixture(scope="module")
def s3():
    """A server that speaks S3's protocol, with the same files in a bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = dict(AWS_ENDPOINT_URL=f"http://{host}:{port}", AWS_ACCESS_KEY_ID="me", AWS_SECRET_ACCESS_KEY="mine")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import boto3

        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        for name, content in contents().items():
            client.put_object(Bucket="bucket", Key=f"name/{name}", Body=content)
        yield
    server.stop()


def start(tmp_path, source, *flags, out="out", **env):
    command = [sys.executable, "-c", COMMAND, *source.split(), f"--out={tmp_path / out}", "--tokenizer=bytes", *flags]
    env = environment(HF_HOME=str(tmp_path / "home"), **env)
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def prepare(*arguments, status=0, **more):
    process = start(*arguments, **more)
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, out + errors
    assert "Traceback" not in errors and TOKEN not in out + errors
    return out, errors


def content(directory):
    """The bytes of a finished dataset, but for what it says of its source, and that."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert not any(TOKEN.encode() in data for data in files.values())
    metadata = json.loads(files.pop("dataset.json"))
    source = metadata.pop("source")
    return files | {"dataset.json": metadata}, source


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The dataset made of the same files on disk."""
    folder = tmp_path_factory.mktemp("whole")
    for name, data in contents().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    prepare(folder, str(folder / "data"), "--shard_tokens=500000")
    return content(folder / "out")[0]


def kill_and_continue(tmp_path, source, flags=("--shard_tokens=500000",)):
    """Kill the command after 2, 4 and 6 shards, then let it finish. Returns what it said at last."""
    for shards in (2, 4, 6):
        process = start(tmp_path, source, *flags)
        while len(list((tmp_path / "out").glob("*.bin"))) < shards:
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        process.kill()
        process.communicate()
        assert not (tmp_path / "out" / "dataset.json").exists()
    return prepare(tmp_path, source, *flags)[0]


def test_the_hub_killed_three_times_with_one_request_in_five_failing(hub, misbehave, tmp_path, whole):
    before, newer = len(hub.requests), []

    def move_on(number, method, path, fault=hub.misbehave):
        if not newer and (tmp_path / "out" / "progress.json").exists():
            newer.append(hub.commit_files("owner/name", contents(seed=1)))  # main moves on
        return fault(number, method, path)

    hub.misbehave = move_on
    try:
        said = kill_and_continue(tmp_path, HUB)
    finally:
        hub.repositories["owner/name"].pop(newer[0])
    made, source = content(tmp_path / "out")
    assert "continuing after" in said and made == whole and len(made) > 12
    size = sum(len(data) for name, data in contents().items() if name != "README.md")
    assert source == [{"path": HUB, "revision": hub.sha, "files": 7, "bytes": size}]
    asked = {path.split("/resolve/")[1].partition("/")[0] for _, path in hub.requests[before:] if "/resolve/" in path}
    assert asked == {hub.sha}
    assert f"Bearer {TOKEN}" in hub.authorizations["hub"] and hub.authorizations["content"] == {
        None
    }  # the token goes to the hub alone


def test_s3_killed_three_times(s3, tmp_path, whole):
    said = kill_and_continue(tmp_path, S3)
    made, source = content(tmp_path / "out")
    assert "continuing after" in said and made == whole
    assert source == [{"path": S3, "files": 7, "bytes": sum(len(d) for n, d in contents().items() if n != "README.md")}]


def test_a_server_that_drops_every_request_is_said_in_one_line_and_finished_shards_stay(hub, tmp_path, whole):
    hub.misbehave = lambda number, method, path: "drop" if list((tmp_path / "out").glob("train_000003.bin")) else None
    try:
        _, errors = prepare(tmp_path, HUB, "--shard_tokens=500000", status=2)
        last = errors.splitlines()[-1]  # the client has said each try
        assert re.fullmatch(rf"error: hf://datasets/owner/name@{hub.sha}/data/part\d/\d+.parquet: .+", last)
    finally:
        hub.misbehave = lambda number, method, path: None
    assert "continuing after 4 finished shards" in prepare(tmp_path, HUB, "--shard_tokens=500000")[0]
    assert content(tmp_path / "out")[0] == whole


@pytest.mark.parametrize(
    ("source", "env", "message"),
    [
        (HUB, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "Connection refused"),
        (HUB, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        (HUB, {"HF_TOKEN": "hf_another"}, "401 Unauthorized"),
        ("hf://datasets/owner/other", {}, "repository not found"),
        ("hf://datasets/owner/name@v9", {}, "revision not found"),
        ("hf://datasets/owner/name/nowhere", {}, "no such file or folder"),
        ("hf://datasets/owner/name/data/part0/x*", {}, "no text files there; expected .jsonl .parquet"),
        ("hf://datasets/owner/docs", {}, "expected .jsonl .parquet"),
        ("hf://owner/name", {}, "expected hf://datasets/OWNER/NAME"),
        ("s3://bucket/nowhere", {}, "no such file or folder"),
        ("s3://elsewhere/x", {}, "The specified bucket does not exist"),
        ("gs://bucket/x", {}, "Please install gcsfs to access Google Storage"),
        ("ftps://host/x.txt", {}, "Protocol not known: ftps"),
        ("https://127.0.0.1:9/a.jsonl", {}, "Connect call failed"),
    ],
)
def test_a_source_that_is_not_there_is_said_in_one_line(hub, s3, tmp_path, source, env, message):
    hub.commit_files("owner/docs", {"README.md": b"only this"})
    _, errors = prepare(tmp_path, source, status=2, **env)
    assert errors.startswith(f"error: {source}: ") and message in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_finished_dataset_needs_no_network(hub, tmp_path):
    prepare(tmp_path, HUB, "--max_tokens=200K")
    out, _ = prepare(tmp_path, HUB, "--max_tokens=200K", HF_ENDPOINT="http://127.0.0.1:9")
    assert "already holds this dataset" in out
    assert json.loads((tmp_path / "out" / "dataset.json").read_text(encoding="utf-8"))["options"] == {"max_tokens": 200_000}


@pytest.mark.parametrize(
    "pattern, files",
    [
        ("/data/train-*", ["train-0.jsonl", "train-1.jsonl"]),
        ("/data/*-[01].jsonl", ["test-0.jsonl", "train-0.jsonl", "train-1.jsonl"]),
        ("/d*a", ["train-0.jsonl", "train-1.jsonl"]),
        ("/*.md", ["README.md"]),
        ("/data/train-0.jsonl", ["train-0.jsonl"]),
        ("/data/t[e]st*", ["test-0.jsonl"]),
        ("", ["data/train-0.jsonl", "data/train-1.jsonl", "zoo/deep/more.jsonl"]),
    ],
)
def test_a_pattern_takes_some_of_the_files_and_a_folder_is_taken_without_those_for_tests(hub, tmp_path, pattern, files):
    lines = {name: json.dumps({"text": f"{name} {'x' * 200}"}).encode() + b"\n" for name in ("test-0", "train-0", "train-1")}
    split = {f"data/{name}.jsonl": line for name, line in lines.items()}
    hub.commit_files(
        "owner/split",
        split | {"zoo/deep/more.jsonl": lines["train-0"], ".cache/a.jsonl": b"{}", "README.md": b"documentation" * 9},
    )
    out, _ = prepare(tmp_path, f"hf://datasets/owner/split{pattern}")
    assert f": {len(files)} file{'s' * (len(files) > 1)}, 0.0 MB ({' to '.join(dict.fromkeys([files[0], files[-1]]))})\n" in out
    assert ("1 of these files look like validation or test data" in out) == ("test-0" in files[0] and len(files) > 1)
    skipped = "skipped 1 file of other types, 1 file of validation or test data, 1 file with hidden names; to take any"
    assert (skipped in out) == (pattern == "") and ("1 file of validation" in out) == (pattern in ("", "/d*a"))


def test_two_commits_and_overlapping_sources_are_read_once_each(hub, tmp_path):
    lines = [f"version {number} {'x' * 200}" for number in (1, 2)]
    first, second = (hub.commit_files("owner/two", {"data/a.jsonl": f'{{"text": "{line}"}}\n'.encode()}) for line in lines)
    sources = [f"hf://datasets/owner/two@{first}", f"hf://datasets/owner/two@{second}", f"hf://datasets/owner/two@{second}/d*"]
    prepare(tmp_path, " ".join(sources), "--val_fraction=0.3")
    made, _ = content(tmp_path / "out")
    text = b"".join(made[name][1024::2] for name in ("train_000000.bin", "val_000000.bin")).replace(b"\0", b"")
    assert sorted(re.findall(rb"version .", text)) == [b"version 1", b"version 2"]


def test_a_model_that_cannot_be_had_is_said_in_plain_words(tmp_path):
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    refused = execute([sys.executable, ROOT / "sample.py", "nobody/nothing"], 2, env=nowhere).stderr
    assert "nobody/nothing is not a local directory and could not be fetched from the Hub: " in refused
    assert "Traceback" not in refused and len(refused.splitlines()) == 1
