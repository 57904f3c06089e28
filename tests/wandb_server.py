"""A stand-in for wandb's server: what its client needs to send a run, and to resume it."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NOBODY = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
PROJECT = {"id": "2", "name": "project", "entity": {"id": "1", "name": "me"}}


class Server(ThreadingHTTPServer):
    """Keeps the `rows` of the run, in the order they came, and its `summary`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.rows, self.summary, self.config = [], "{}", "{}"
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, query, variables):
        """Answer a GraphQL query."""
        if "RunResumeStatus" in query:
            counts = dict(historyLineCount=len(self.rows), eventsLineCount=0, logLineCount=0, eventsTail="[]", tags=[])
            counts |= dict(historyTail=json.dumps([json.dumps(row) for row in self.rows[-1:]]), wandbConfig='{"t": 1}')
            run = {"id": "3", "name": "run", "displayName": "run", "summaryMetrics": self.summary, "config": self.config}
            return {"model": PROJECT | {"bucket": run | counts if self.rows else None}}
        if "UpsertBucket" in query:
            self.config = variables.get("config") or self.config
            run = {"id": "3", "name": variables.get("name"), "displayName": "run", "project": PROJECT, "config": self.config}
            return {"upsertBucket": {"bucket": run | {"historyLineCount": len(self.rows)}, "inserted": not self.rows}}
        return {"viewer": NOBODY, "createRunFiles": {"runID": "3", "uploadHeaders": [], "files": []}}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        content, answer = self.rfile.read(int(self.headers["Content-Length"])), {}
        if self.path == "/graphql":
            request = json.loads(content)
            answer = {"data": self.server.answer(request["query"], request.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            files = json.loads(content).get("files") or {}
            self.server.rows += map(json.loads, files.get("wandb-history.jsonl", {}).get("content", []))
            self.server.summary = files.get("wandb-summary.json", {}).get("content", [self.server.summary])[-1]
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving():
    """A `Server` that answers in a thread."""
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
