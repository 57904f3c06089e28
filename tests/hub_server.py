"""A server on loopback that speaks the hub's protocol as huggingface_hub uses it, and can misbehave on request.

It has two ports, as the hub has two hosts: one for the interface and one that serves the content of large files.
"""

import functools
import hashlib
import json
import threading
from base64 import b64decode
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3  # files on a page of a listing


@functools.cache
def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class HubServer:
    """Repositories by name: the content of each file at each commit, the last of which is main.

    misbehave: what to do instead of answering a request, by its number, method and path: "drop" the connection, "truncate"
    the content, "corrupt" it, answer with an HTTP status (an int), or None to answer it.
    """

    def __init__(self, token: str = ""):
        self.token = token
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.branches: dict[str, dict[str, str]] = {}  # the last commit of each branch but main, by repository
        self.aside: set[str] = set()  # the commits of those branches
        self.private: dict[str, bool] = {}  # of the repositories that clients have made
        self.large: dict[str, bytes] = {}  # files that were sent in front of their commit, by sha256
        self.takes_large_files = False  # by git-lfs's protocol, without which they come with their commit
        self.misbehave: Callable[[int, str, str], str | int | None] = lambda number, method, path: None
        self.requests: list[tuple[str, str]] = []
        self.authorizations: dict[str, set] = {"hub": set(), "content": set()}
        self.lock = threading.Lock()
        self.servers = {}
        for name in ("hub", "content"):
            handler = type("Handler", (Handler,), {"hub": self, "host": name})
            self.servers[name] = Server(("127.0.0.1", 0), handler)
            threading.Thread(target=self.servers[name].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def url(self, name: str = "hub") -> str:
        return f"http://127.0.0.1:{self.servers[name].server_port}"

    def commit_files(self, repository: str, contents: dict[str, bytes]) -> str:
        """Add a commit with these files. Returns its sha."""
        commits = self.repositories.setdefault(repository, {})
        sha = hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()
        commits[sha] = contents
        return sha

    def head(self, repository: str, branch: str = "main") -> dict[str, bytes]:
        """The files of a branch."""
        commits = self.repositories[repository]
        of_main = [commit for commit in commits if commit not in self.aside]
        return commits[of_main[-1] if branch == "main" else self.branches[repository][branch]]

    def close(self):
        for server in self.servers.values():
            server.shutdown()
            server.server_close()


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A killed client is not an error."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    host: str

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def fails(self, path: str) -> bool:
        """Note a request. Returns whether it is not to be answered as it should."""
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            number = len(self.hub.requests) - 1
            self.hub.authorizations[self.host].add(self.headers.get("Authorization"))
        self.fault = self.hub.misbehave(number, self.command, path)
        if self.fault == "drop":
            self.close_connection = True
        elif isinstance(self.fault, int):
            self.answer(b"", self.fault, {"Retry-After": "1"} if self.fault == 429 else {})
        return self.fault == "drop" or isinstance(self.fault, int)

    def do_GET(self):
        url = urlsplit(self.path)
        path = unquote(url.path)
        if self.fails(path):
            return
        if self.host == "content":
            sha256 = path.removeprefix("/")
            found = [c for r in self.hub.repositories.values() for s in r.values() for c in s.values()]
            return self.send(next(c for c in found if sha256_of(c) == sha256))
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self.answer(b'{"error": "Invalid username or password."}', 401)
        words = path.strip("/").split("/")
        if words[0] == "api" and words[1] in ("datasets", "models"):
            self.interface("/".join(words[2:4]), words[4:], parse_qs(url.query))
        elif words[0] == "datasets" and words[3] == "resolve":
            self.resolve("/".join(words[1:3]), words[4], "/".join(words[5:]))
        else:
            self.answer(b"", 404)

    def do_POST(self):
        """What an upload asks for: a repository, a branch, how to send each file, and the commit that carries them."""
        content, words = self.rfile.read(int(self.headers["Content-Length"])), unquote(self.path).strip("/").split("/")
        if self.fails("/".join(["", *words])):
            return
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self.answer(b'{"error": "Invalid username or password."}', 401)
        asked, repository = json.loads(content.splitlines()[0] if content else b"{}"), "/".join(words[2:4])
        if words[-1] == "validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if words[-1] == "create":
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            url = f"{self.hub.url()}/{'datasets/' * (asked.get('type') == 'dataset')}{name}"
            if name in self.hub.private:
                return self.json({"url": url}, status=409)
            self.hub.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.hub.commit_files(name, {})  # as the hub begins a repository
            return self.json({"url": url})
        if words[-1] == "batch":  # of large files, those that are here need not be sent
            missing = [file for file in asked["objects"] if file["oid"] not in self.hub.large]
            where = {file["oid"]: {"href": f"{self.hub.url('content')}/{file['oid']}"} for file in missing}
            found = [
                file | ({"actions": {"upload": where[file["oid"]]}} if file in missing else {}) for file in asked["objects"]
            ]
            return self.json({"transfer": "basic", "objects": found})
        if words[4] == "branch":
            branches = self.hub.branches.setdefault(repository, {})
            if words[5] in branches:
                return self.json({}, status=409)
            branches[words[5]] = self.commit_of(repository, "main")
            return self.json({}, status=201)
        if words[4] == "preupload":
            files = [{"path": file["path"], "shouldIgnore": False, "uploadMode": "regular"} for file in asked["files"]]
            large = {"uploadMode": "lfs"} if self.hub.takes_large_files else {}
            return self.json(
                {"files": [file | (large if file["path"].endswith((".safetensors", ".bin")) else {}) for file in files]}
            )
        self.commit(repository, words[5], [json.loads(line) for line in content.splitlines()])

    def do_PUT(self):
        """The content of a large file."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.fails(self.path):
            assert sha256_of(content) == self.path.removeprefix("/")
            self.hub.large[sha256_of(content)] = content
            self.answer(b"", 200)

    def commit(self, repository: str, branch: str, lines: list[dict]):
        """Add what a commit carries to what the branch has."""
        found = dict(self.hub.repositories[repository].get(self.commit_of(repository, branch), {}))
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del found[value["path"]]
            else:
                sent = line["key"] == "file"
                found[value["path"]] = b64decode(value["content"]) if sent else self.hub.large[value["oid"]]
        sha = self.hub.commit_files(repository, found)
        if branch != "main":
            self.hub.branches[repository][branch] = sha
            self.hub.aside.add(sha)
        self.json({"commitUrl": f"{self.hub.url()}/{repository}/commit/{sha}", "commitOid": sha})

    def commit_of(self, repository: str, revision: str) -> str | None:
        commits = self.hub.repositories.get(repository, {})
        revision = self.hub.branches.get(repository, {}).get(revision, revision)
        of_main = [commit for commit in commits if commit not in self.hub.aside]
        return revision if revision in commits else of_main[-1] if of_main and revision == "main" else None

    def interface(self, repository: str, words: list[str], query: dict):
        """/api/KIND/REPOSITORY[/revision/REVISION] and .../tree/REVISION[/FOLDER]."""
        if repository in self.hub.private and not words:
            return self.json({"id": repository, "private": self.hub.private[repository], "siblings": []})
        commit = self.commit_of(repository, words[1] if words else "main")
        if commit is None:
            error = "RevisionNotFound" if repository in self.hub.repositories else "RepoNotFound"
            return self.answer(b"{}", 404, {"X-Error-Code": error})
        if words[:1] != ["tree"]:
            return self.json({"id": repository, "sha": commit, "siblings": []})
        folder, contents = "/".join(words[2:]), self.hub.repositories[repository][commit]
        recursive, prefix = query.get("recursive", ["false"])[0].lower() == "true", f"{folder}/" if folder else ""
        inside = {p: c for p, c in contents.items() if p.startswith(prefix)}
        if folder and not inside:
            return self.answer(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
        folders = {str(parent) for p in inside for parent in PurePosixPath(p).parents if str(parent).startswith(prefix or "d")}
        found = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in sorted(folders - {folder})]
        found += [self.entry(p, c) for p, c in inside.items()]
        if not recursive:
            found = [entry for entry in found if "/" not in entry["path"].removeprefix(prefix)]
        page = int(query.get("cursor", ["0"])[0])
        following = f"{self.hub.url()}{urlsplit(self.path).path}?recursive={recursive}&cursor={page + PAGE}"
        link = {"Link": f'<{following}>; rel="next"'} if len(found) > page + PAGE else {}
        self.json(found[page : page + PAGE], link)

    def entry(self, path: str, content: bytes) -> dict:
        entry = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
        if not path.endswith(".jsonl"):
            entry["lfs"] = {"oid": sha256_of(content), "size": len(content), "pointerSize": 134}
        return entry

    def resolve(self, repository: str, revision: str, path: str):
        """/datasets/REPOSITORY/resolve/REVISION/PATH: a small file, or a redirection to a large one."""
        commit = self.commit_of(repository, revision)
        content = self.hub.repositories.get(repository, {}).get(commit, {}).get(path)
        if content is None:
            return self.answer(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit or ""})
        headers = {"X-Repo-Commit": commit}
        if path.endswith(".jsonl"):
            return self.send(content, headers | {"ETag": f'"{git_sha1(content)}"'})
        sha256 = sha256_of(content)
        headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
        self.answer(b"", 302, headers | {"Location": f"{self.hub.url('content')}/{sha256}?Signature=geheim"})

    def send(self, content: bytes, headers: dict | None = None):
        """The content of a file, or of the range that is asked for."""
        headers, status = headers or {}, 200
        if self.fault == "corrupt":
            content = bytes(len(content))
        size = len(content)
        if asked := self.headers.get("Range"):
            start, end = map(int, asked.removeprefix("bytes=").split("-"))
            content, status = content[start : end + 1], 206
            headers = headers | {"Content-Range": f"bytes {start}-{min(end, size - 1)}/{size}"}
        self.answer(content, status, headers | {"Accept-Ranges": "bytes"})

    def json(self, value, headers: dict | None = None, status: int = 200):
        self.answer(json.dumps(value).encode(), status, {"Content-Type": "application/json"} | (headers or {}))

    def answer(self, content: bytes, status: int, headers: dict | None = None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            if self.command == "GET" and self.fault == "truncate":
                content = content[: len(content) // 2]
                self.close_connection = True
            self.wfile.write(content)
