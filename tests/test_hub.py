"""Datasets made from a hub on loopback, through the command and the real client: the same bytes whatever goes wrong."""

import io
import json
import os
import random
import re
import subprocess
import sys
import threading
import time

import pyarrow
import pyarrow.parquet
import pytest

from conftest import ROOT, environment, execute
from hub_server import HubServer

TOKEN = "hf_TopSecretToken"
# prepare_data.py with short waits between the tries, ours and huggingface_hub's.
COMMAND = """import time, prepare_data
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.01))
prepare_data.main()"""


def parquet(texts, column="text"):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({column: texts}), buffer, row_group_size=100, compression="none")
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
def server():
    server = HubServer(token=TOKEN)
    server.sha = server.commit_files("owner/name", contents())
    yield server
    server.close()


@pytest.fixture(autouse=True)
def calm(server):
    yield
    server.misbehave = lambda number, method, path: None


def start(server, tmp_path, source, out, *flags, endpoint=None):
    command = [sys.executable, "-c", COMMAND, *source.split(), f"--out={tmp_path / out}", "--tokenizer=bytes", *flags]
    env = environment(HF_ENDPOINT=endpoint or server.url(), HF_TOKEN=TOKEN, HF_HOME=str(tmp_path / "home"))
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def prepare(*arguments, status=0, **more):
    process = start(*arguments, **more)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == status, out + errors
    assert "Traceback" not in errors and TOKEN not in out + errors
    return out, errors


def content(directory):
    """The bytes of a finished dataset."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert "dataset.json" in files and not any(TOKEN.encode() in data for data in files.values())
    return files


SOURCE = "hf://datasets/owner/name/data"


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """The dataset made without any trouble."""
    folder = tmp_path_factory.mktemp("whole")
    prepare(server, folder, SOURCE, "out", "--shard_tokens=500000")
    return content(folder / "out")


def test_a_source_on_the_hub_is_its_files_at_one_commit(server, tmp_path, whole):
    for name, data in contents().items():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    prepare(server, tmp_path, str(tmp_path / "copy" / "data"), "local", "--shard_tokens=500000")
    local = content(tmp_path / "local")
    ours, theirs = (json.loads(files.pop("dataset.json")) for files in (whole.copy(), local))
    assert {name: data for name, data in whole.items() if name != "dataset.json"} == local
    size = sum(len(data) for name, data in contents().items() if name != "README.md")
    assert ours.pop("source") == [{"path": SOURCE, "revision": server.sha, "files": 7, "bytes": size}]
    theirs.pop("source")
    assert ours == theirs and len(local) > 12


def test_the_token_goes_to_the_hub_alone(server, whole):
    assert server.authorizations["hub"] >= {f"Bearer {TOKEN}"}
    assert server.authorizations["content"] == {None}


def test_at_most_two_files_are_on_the_disk_and_none_afterwards(server, tmp_path, whole):
    most = 0

    def watch(number, method, path):
        nonlocal most
        most = max(most, len(list((tmp_path / "out" / "downloads").rglob("*.parquet"))))

    server.misbehave = watch
    prepare(server, tmp_path, SOURCE, "out", "--shard_tokens=500000")
    assert 1 <= most <= 2 and content(tmp_path / "out") == whole


def test_killed_three_times_on_a_server_that_fails_one_request_in_five(server, tmp_path, whole):
    chance, faults = random.Random(1), ["drop", "truncate", "corrupt", 429, 500, 503]
    server.misbehave = lambda number, method, path: chance.choice(faults) if chance.random() < 0.2 else None
    newer = None
    try:
        for shards in (2, 5, 9):
            process = start(server, tmp_path, SOURCE, "out", "--shard_tokens=500000")
            while len(list((tmp_path / "out").glob("*.bin"))) < shards:
                assert process.poll() is None, process.communicate()
                time.sleep(0.005)
            process.kill()
            process.communicate()
            position = json.loads((tmp_path / "out" / "progress.json").read_text())["position"]
            before = len(server.requests)
            newer = newer or server.commit_files("owner/name", contents(seed=1))  # main moves on
        out, _ = prepare(server, tmp_path, SOURCE, "out", "--shard_tokens=500000")
    finally:
        server.repositories["owner/name"].pop(newer)
    assert "going on after" in out and content(tmp_path / "out") == whole
    in_order, first = sorted(name for name in contents() if name != "README.md"), position[0]
    asked = {path.partition(f"/resolve/{server.sha}/")[2] for _, path in server.requests[before:]} - {""}
    assert first >= 3 and asked == set(in_order[first:])  # files that were done are not downloaded again


def test_killed_in_the_first_download(server, tmp_path, whole):
    killed = threading.Event()
    server.misbehave = lambda number, method, path: killed.wait(60) and "drop" if method == "GET" and len(path) == 65 else None
    process = start(server, tmp_path, SOURCE, "out", "--shard_tokens=500000")
    while not list((tmp_path / "out" / "downloads").rglob("*.incomplete")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.kill()
    process.communicate()
    killed.set()
    server.misbehave = lambda number, method, path: None
    prepare(server, tmp_path, SOURCE, "out", "--shard_tokens=500000")
    assert content(tmp_path / "out") == whole


def test_three_machines_on_a_server_that_fails_make_the_same(server, tmp_path, whole):
    chance, faults = random.Random(3), ["drop", "truncate", "corrupt", 500]
    server.misbehave = lambda number, method, path: chance.choice(faults) if chance.random() < 0.2 else None
    machines = [start(server, tmp_path, SOURCE, "out", "--shard_tokens=500000", f"--part={n}/3") for n in (1, 2, 3)]
    for machine in machines:
        out, errors = machine.communicate(timeout=120)
        assert machine.returncode == 0, out + errors
    prepare(server, tmp_path, SOURCE, "out", "--join", endpoint="http://127.0.0.1:9")
    assert content(tmp_path / "out") == whole


def test_a_download_that_breaks_is_made_whole(server, tmp_path, whole):
    broken = []

    def truncate_once(number, method, path):
        if method == "GET" and len(path) == 65 and path not in broken and len(broken) < 2:
            broken.append(path)
            return "truncate"

    server.misbehave = truncate_once
    prepare(server, tmp_path, SOURCE, "out", "--shard_tokens=500000")
    assert len(broken) == 2 and content(tmp_path / "out") == whole


def test_a_server_that_refuses_every_request_once_is_asked_again(server, tmp_path):
    refused = []

    def refuse(number, method, path):
        request = (method, "content" if len(path) == 65 else path.split("/")[1])
        if request not in refused and "agent" not in path:
            refused.append(request)
            return 429

    server.misbehave = refuse
    _, errors = prepare(server, tmp_path, SOURCE, "out")
    assert f"{SOURCE}: the server answered with HTTP status 429; trying again in 1 s" in errors


def test_a_file_that_never_has_its_hash_is_refused(server, tmp_path):
    server.misbehave = lambda number, method, path: "corrupt" if path.count("/") == 1 else None
    _, errors = prepare(server, tmp_path, SOURCE, "out", status=2)
    last = errors.splitlines()[-1]
    assert last.startswith("error: hf://datasets/owner/name/data/part0/000.parquet: its content does not have the hash")
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_a_server_that_drops_every_request_is_said_in_one_line(server, tmp_path):
    server.misbehave = lambda number, method, path: "drop"
    _, errors = prepare(server, tmp_path, SOURCE, "out", status=2)
    *tries, last = errors.splitlines()
    assert len(tries) == 4 and all("; trying again in " in line for line in tries)
    assert last.startswith(f"error: {SOURCE}: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://127.0.0.1:9", "the hub cannot be reached: Connection refused"),
        ("https://me:secret@nowhere.invalid", "the hub cannot be reached: "),
        ("huggingface.co", "missing an 'http://' or 'https://' protocol."),
    ],
)
def test_an_endpoint_that_is_no_hub_is_said_in_one_line(tmp_path, endpoint, said):
    _, errors = prepare(None, tmp_path, SOURCE, "out", status=2, endpoint=endpoint)
    *_, last = errors.splitlines()
    assert last.startswith(f"error: {SOURCE}: ") and said in last
    assert "secret" not in errors and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        ("hf://datasets/owner/other", [], "hf://datasets/owner/other: there is no such repository, revision or folder"),
        ("hf://datasets/owner/name@v9", [], "hf://datasets/owner/name@v9: there is no such repository, revision or folder"),
        ("hf://datasets/owner/name/nowhere", [], "nowhere: there is no such repository, revision or folder"),
        ("hf://owner/name", [], "hf://owner/name: wanted hf://datasets/OWNER/NAME"),
        ("hf://datasets/owner/docs", [], "hf://datasets/owner/docs: no file of that name or pattern ends in .parquet .jsonl"),
        ("hf://datasets/owner/name/data/part0/x*", [], "part0/x*: no file of that name or pattern ends in"),
        (SOURCE, ["--column=body"], 'part0/000.parquet: wanted a column "body" of strings; its columns are text'),
    ],
)
def test_a_source_that_is_not_there_is_refused_at_once(server, tmp_path, source, flags, message):
    server.commit_files("owner/docs", {"README.md": b"only this"})
    _, errors = prepare(server, tmp_path, source, "out", *flags, status=2)
    assert errors.startswith("error: ") and message in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_without_access_the_error_names_the_token(server, tmp_path):
    server.token, before = "another", server.token
    try:
        _, errors = prepare(server, tmp_path, SOURCE, "out", status=2)
    finally:
        server.token = before
    assert errors.startswith(f"error: {SOURCE}: it does not exist, or you have no access; set HF_TOKEN")


def test_a_finished_dataset_needs_no_network(server, tmp_path):
    prepare(server, tmp_path, SOURCE, "out", "--max_tokens=200K")
    out, _ = prepare(server, tmp_path, SOURCE, "out", "--max_tokens=200K", endpoint="http://127.0.0.1:9")
    assert "already holds this dataset" in out
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["options"] == {"max_tokens": 200_000}
    assert os.listdir(tmp_path / "out").count("downloads") == 0


def test_a_single_file_and_a_revision_can_be_named(server, tmp_path):
    old = server.sha
    newer = server.commit_files("owner/name", contents(seed=2))
    try:
        prepare(server, tmp_path, f"hf://datasets/owner/name@{old}/data/part1/001.parquet", "old")
        prepare(server, tmp_path, "hf://datasets/owner/name/data/part1/001.parquet", "new")
    finally:
        server.repositories["owner/name"].pop(newer)
    sources = [json.loads((tmp_path / name / "dataset.json").read_text())["source"][0] for name in ("old", "new")]
    assert [(s["revision"], s["files"]) for s in sources] == [(old, 1), (newer, 1)]
    assert content(tmp_path / "old") != content(tmp_path / "new")


@pytest.mark.parametrize(
    "pattern, files",
    [
        ("/data/train-*", ["train-0", "train-1"]),
        ("/data/*-[01].jsonl", ["test-0", "train-0", "train-1"]),
        ("/d*a", ["test-0", "train-0", "train-1"]),
        ("/data/train-?.jsonl", ["train-0", "train-1"]),
        ("", ["test-0", "train-0", "train-1", "more"]),
    ],
)
def test_a_pattern_takes_some_of_the_files_and_what_is_for_tests_is_named(server, tmp_path, pattern, files):
    lines = {name: json.dumps({"text": f"{name} {'x' * 200}"}).encode() + b"\n" for name in ("test-0", "train-0", "train-1")}
    split = {f"data/{name}.jsonl": line for name, line in lines.items()}
    server.commit_files("owner/split", split | {"zoo/deep/more.jsonl": lines["train-0"], "README.md": b"documentation"})
    out, _ = prepare(server, tmp_path, f"hf://datasets/owner/split{pattern}", "out")
    assert f": {len(files)} files, 0.0 MB: data/{files[0]}.jsonl to " in out
    assert ("1 of these files seem to be for validation or tests, such as data/test-0.jsonl" in out) == ("test-0" in files)
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["source"][0]["files"] == len(files)


def test_a_disk_that_cannot_be_written_is_not_blamed_on_the_hub(server, tmp_path):
    (tmp_path / "file").write_text("no directory")
    began = time.monotonic()
    _, errors = prepare(server, tmp_path, SOURCE, "file/out", status=2)
    assert "file/out" in errors and "Not a directory" in errors and "trying again" not in errors
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "offline, said",
    [
        ({}, "the hub cannot be reached: "),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and the local cache does not have it"),
    ],
)
def test_a_model_that_cannot_be_had_is_said_in_plain_words(tmp_path, offline, said):
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    refused = execute([sys.executable, ROOT / "sample.py", "nobody/nothing"], 2, env=nowhere | offline).stderr
    assert f"nobody/nothing is no directory here, and the Hugging Face hub does not give it: {said}" in refused


def test_two_commits_and_overlapping_patterns_of_a_repository_are_read_once_each(server, tmp_path):
    lines = [f"version {number} {'x' * 200}" for number in (1, 2)]
    first, second = (server.commit_files("owner/two", {"data/a.jsonl": f'{{"text": "{line}"}}\n'.encode()}) for line in lines)
    sources = [f"hf://datasets/owner/two@{first}", f"hf://datasets/owner/two@{second}", f"hf://datasets/owner/two@{second}/d*"]
    prepare(server, tmp_path, " ".join(sources), "out", "--val_fraction=0.3")
    made = content(tmp_path / "out")
    text = b"".join(made[name][1024::2] for name in ("train_000000.bin", "val_000000.bin")).replace(b"\0", b"")
    assert sorted(re.findall(rb"version .", text)) == [b"version 1", b"version 2"]


def test_a_path_that_leads_out_of_the_repository_is_refused(server, tmp_path):
    server.commit_files("owner/evil", {"../a.jsonl": b'{"text": "one"}'})
    _, errors = prepare(server, tmp_path, "hf://datasets/owner/evil", "out", status=2)
    assert errors == "error: hf://datasets/owner/evil: the repository lists ../a.jsonl, which leads out of it\n"
