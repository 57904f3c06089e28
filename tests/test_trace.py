"""--profile: a trace that Perfetto opens, without a changed bit."""

import gzip
import json


def test_the_master_traces_some_updates(train):
    train("plain", ranks=2, steps=6)
    train("traced", ranks=2, steps=6, profile="3:2")
    assert [path.name for path in (train.runs / "traced").glob("trace*")] == ["trace-00000003.json.gz"]
    with gzip.open(train.runs / "traced" / "trace-00000003.json.gz") as file:
        events = json.load(file)["traceEvents"]
    spans = {name: [event for event in events if event["ph"] == "X" and name in event["name"]] for name in ("adamw", "update ")}
    assert {event["name"] for event in spans["update "]} == {"update 3", "update 4"}
    assert len(spans["adamw"]) >= 2
    for step in spans["adamw"]:  # the last thing that an update does
        assert sum(0 < step["ts"] - update["ts"] < update["dur"] for update in spans["update "]) == 1
    log = train.log("traced")
    assert "trace-00000003.json.gz: 2 updates in " in log
    assert train.files("traced") == train.files("plain") and train.metrics("traced") == train.metrics("plain")


def test_a_run_that_ends_sooner_has_the_updates_until_then(train):
    train("run", steps=3, profile="3:9")
    assert "trace-00000003.json.gz: 1 update in " in train.log("run")


def test_what_is_not_a_step_and_a_count_is_refused(train):
    for wrong in ("3", "3:0", "0:3", "a:b"):
        assert f"--profile={wrong} must be STEP:COUNT, such as 100:3" in train("run", status=2, profile=wrong).stderr
