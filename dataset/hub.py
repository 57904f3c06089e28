"""Files of a dataset repository on the Hugging Face hub: listed at one commit, downloaded, and checked by their hash.

huggingface_hub finds the user's token (HF_TOKEN, or what `hf auth login` has saved) and opens the connections. The requests are
made here: what a server may send is limited, and the token goes to the endpoint's own origin alone.
"""

import contextlib
import functools
import hashlib
import itertools
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NotRequired, TypedDict
from urllib.parse import quote, urljoin

from msgspec import Meta

from common import files
from common.errors import FULL_DISK, UserError
from common.records import Count, Sha256

SCHEME = "hf://"
DEFAULT_ENDPOINT = "https://huggingface.co"
ADDRESS = re.compile(
    r"hf://datasets/(?P<repository>(?![.-])[\w.-]+/(?![.-])[\w.-]+)(?:@(?P<revision>[^/@]+))?(?:/(?P<path>.*?))?/*"
)
WAIT_SECONDS = (0.5, 1, 2, 4, 8, 15)  # between the tries of a request
LONGEST_WAIT = 300.0  # however long a server asks us to wait
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # the same request may succeed after these HTTP statuses
# Errors without an HTTP status that stay when the request is repeated.
PERMANENT = ("OfflineModeIsEnabled", "TooManyRedirects", "InvalidURL", "UnsupportedProtocol")
SILENT_SECONDS = 30  # how long a connection may bring nothing before it is closed
PAGES, PAGE_BYTES, PAGE_SECONDS = 1000, 1 << 24, 300  # of a listing; the hub puts 1,000 files on a page
LISTED_FILES = 1 << 20
PROGRESS_BYTES = 1 << 20  # a download that breaks after at least so many new bytes goes on at once
UNPRINTABLE = re.compile(r"[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # controls, and what turns text around

GitSha = Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")]
Commit = TypedDict("Commit", {"sha": GitSha})
LargeFile = TypedDict("LargeFile", {"oid": Sha256})


class Entry(TypedDict):
    """A file or a directory in a listing."""

    type: str
    path: str
    oid: GitSha
    size: Count
    lfs: NotRequired[LargeFile | None]


@dataclass(frozen=True)
class HubFile:
    """A file of a repository at one commit."""

    repository: str
    commit: str
    path: str  # in the repository
    size: int
    digest: str  # sha256, or git's sha1 for a small file that is not in large file storage
    directory: Path  # where it is downloaded to

    @property
    def local(self) -> Path:
        """Its path on this machine, once it is downloaded."""
        return self.directory / self.path


def parse_address(source: str) -> re.Match:
    """The repository, revision and path (folder, file, pattern or None) of an address, by these names. Raises UserError."""
    if match := ADDRESS.fullmatch(source):
        return match
    raise UserError(f"{source}: wanted hf://datasets/OWNER/NAME, also with @REVISION, and with /FOLDER or /PATTERN, after it")


def find_commit(source: str) -> str:
    """The sha of the commit that an address means at this moment. Raises UserError."""
    address = parse_address(source)
    revision = f"/revision/{quote(address['revision'], safe='')}" if address["revision"] else ""
    url = f"{endpoint()}/api/datasets/{address['repository']}{revision}"
    return retry(source, lambda: read_json(source, url, Commit)[0]["sha"])


def list_files(source: str, commit: str, suffixes: tuple[str, ...], downloads: Path) -> list[HubFile]:
    """The files at an address that end in one of `suffixes`, at a commit, in order. Raises UserError.

    In a pattern * and ? stand for characters other than /, and [...] for one of some. downloads: the folder for the files of
    all repositories.
    """
    address, found = parse_address(source), {}
    repository, named = address["repository"], PurePosixPath(address["path"] or ".")
    certain = PurePosixPath(*itertools.takewhile(lambda part: not set("*?[") & set(part), named.parts))
    folder = str(certain.parent if certain.name.endswith(suffixes) else certain)
    for entry in list_tree(source, repository, commit, "" if folder == "." else folder):
        path = PurePosixPath(entry["path"])
        beginning = PurePosixPath(*path.parts[: len(named.parts)])
        is_meant = beginning == named or (named.parts and beginning.match(str(named)))
        if is_meant and entry["type"] == "file" and entry["path"].endswith(suffixes):
            if UNPRINTABLE.search(entry["path"]):
                raise UserError(f"{source}: the repository lists {ascii(entry['path'])}, a name with control characters")
            if path.is_absolute() or ".." in path.parts:
                raise UserError(f"{source}: the repository lists {entry['path']}, which leads out of it")
            if path in found:
                raise UserError(f"{source}: the repository lists {path} twice")
            digest = lfs["oid"] if (lfs := entry.get("lfs")) else entry["oid"]
            found[path] = HubFile(repository, commit, entry["path"], entry["size"], digest, downloads / repository)
    return [found[path] for path in sorted(found)]


def list_tree(source: str, repository: str, commit: str, folder: str) -> Iterator[Entry]:
    """What a folder of a repository and the folders in it hold. Raises UserError, also for a listing without end."""
    url, listed = f"{endpoint()}/api/datasets/{repository}/tree/{commit}/{quote(folder, safe='')}".rstrip("/"), 0
    url += "?recursive=True"
    for _ in range(PAGES):
        page, url = retry(source, functools.partial(read_json, source, url, list[Entry]))
        yield from page
        listed += len(page)
        if not url:
            return
        if listed > LISTED_FILES:
            break
    raise UserError(f"{source}: the listing has more than {PAGES:,} pages or {LISTED_FILES:,} files; name a folder of it")


def read_json(source: str, url: str, kind: type) -> tuple[Any, str | None]:
    """The JSON at a URL as `kind`, and the URL of the page after it, if there is one. Raises UserError."""
    content, began = bytearray(), time.monotonic()
    with get(url) as response:
        for part in response.iter_raw():
            content += part
            if len(content) > PAGE_BYTES or time.monotonic() - began > PAGE_SECONDS:
                raise UserError(f"{source}: a listing has more than {PAGE_BYTES:,} bytes, or takes more than {PAGE_SECONDS} s")
    following = response.links.get("next", {}).get("url")
    return files.decode(bytes(content), kind, f"{source}: the hub's listing"), following and urljoin(url, following)


def download(file: HubFile) -> None:
    """Download a file if it is not there yet. Raises UserError."""
    if is_whole(file):
        return
    name, partial = f"{SCHEME}datasets/{file.repository}/{file.path}", files.hidden(file.local)
    file.local.unlink(missing_ok=True)
    file.local.parent.mkdir(parents=True, exist_ok=True)
    if file.size > (free := shutil.disk_usage(file.local.parent).free):
        raise UserError(f"{name} has {file.size / 1e9:,.1f} GB, and {file.local.parent} has room for {free / 1e9:,.1f} GB")

    def fetch():
        while not (partial.exists() and partial.stat().st_size == file.size):
            before = partial.stat().st_size if partial.exists() else 0
            try:
                receive(name, file, partial, before)
            except Exception:
                if partial.exists() and partial.stat().st_size >= before + PROGRESS_BYTES:
                    continue  # from where it broke
                raise
        os.replace(partial, file.local)
        if not is_whole(file):
            file.local.unlink()
            raise ValueError("its content does not have the hash that the repository lists")

    retry(name, fetch)


def receive(name: str, file: HubFile, partial: Path, have: int) -> None:
    """Append what is missing to `partial`, which has the first `have` bytes of a file. Raises UserError if more is sent."""
    url = f"{endpoint()}/datasets/{file.repository}/resolve/{file.commit}/{quote(file.path)}"
    with get(url, **{"Range": f"bytes={have}-"} if have else {}) as response, open(partial, "ab") as out:
        if response.status_code != 206:  # all of it, whatever was asked for
            out.truncate(have := 0)
        for part in response.iter_raw():
            have += len(part)
            if have > file.size:
                raise UserError(f"{name}: the server sends more than the {file.size:,} bytes that the repository lists")
            out.write(part)
    if have < file.size:
        raise ValueError(f"it ended after {have:,} of {file.size:,} bytes")


@contextlib.contextmanager
def get(url: str, **headers: str) -> Iterator:
    """The response of httpx to a request. Its content is neither read nor unpacked yet."""
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers() | {"Accept-Encoding": "identity"} | headers
    with session().stream("GET", url, headers=headers, follow_redirects=True, timeout=SILENT_SECONDS) as response:
        response.raise_for_status()
        yield response


def session():
    """huggingface_hub's httpx client, whose requests have the token only for the origin of the endpoint from now on."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    constants.HF_HUB_DISABLE_XET = True  # a second protocol, whose requests are not made here
    found = get_session()
    if keep_token not in found.event_hooks["request"]:
        found.event_hooks["request"].append(keep_token)
    return found


def keep_token(request) -> None:
    """Take the token out of a request of httpx to any other origin than the endpoint's."""
    asked, hub = request.url, type(request.url)(endpoint())  # URLs of httpx, which leave out a scheme's own port
    if (asked.scheme, asked.host, asked.port) != (hub.scheme, hub.host, hub.port):
        request.headers.pop("Authorization", None)


def in_background(function: Callable, *arguments) -> Future:
    """Call a function in a thread that does not keep the process from ending, as one of a ThreadPoolExecutor would."""
    future = Future()

    def run():
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def remove_unfinished(downloads: Path) -> None:
    """Remove the first halves of files."""
    for partial in downloads.rglob(".*.tmp"):
        partial.unlink()


def is_whole(file: HubFile) -> bool:
    """Whether the file is on this machine with the content that the repository lists."""
    if not file.local.is_file() or file.local.stat().st_size != file.size:
        return False
    if len(file.digest) == 64:
        return files.sha256(file.local) == file.digest
    return hashlib.sha1(b"blob %d\0" % file.size + file.local.read_bytes()).hexdigest() == file.digest  # git's way


def retry(name: str, request: Callable):
    """Return the result of `request`. Tries again after an error that may pass. Raises UserError, which begins with `name`."""
    for seconds in (*WAIT_SECONDS, None):
        try:
            return request()
        except UserError:
            raise
        except Exception as error:  # the classes for HTTP, sockets and time limits differ between versions of the client
            if isinstance(error, OSError) and (error.filename or error.errno in FULL_DISK):
                raise  # the error is of this machine's disk, not of the hub
            error = error.__cause__ or error  # the client puts "check your connection" in front of what happened
            response = getattr(error, "response", None)
            status = getattr(response, "status_code", None)
            reason = f"{name}: {explain(error, status)}"
            is_permanent = status not in TRANSIENT if status else type(error).__name__ in PERMANENT
            if is_permanent or seconds is None:
                raise UserError(reason) from None
            retry_after = response.headers.get("Retry-After", "") if status else ""
            seconds = min(max(seconds, int(retry_after) if retry_after.isdecimal() else 0), LONGEST_WAIT)
            print(f"{reason}; trying again in {seconds} s", file=sys.stderr, flush=True)
            time.sleep(seconds)


def explain(error: Exception, status: int | None) -> str:
    """The reason for an error in one line. It never quotes a URL that was asked for, which may hold a signature."""
    address, set_here = re.sub("[^/]*@", "", endpoint()), ""  # without a password
    if address != DEFAULT_ENDPOINT:
        set_here = f" (HF_ENDPOINT is {address}; unset, it is {DEFAULT_ENDPOINT})"
    if status in (401, 403):
        return "it does not exist, or you have no access; set HF_TOKEN to a token that may read it"
    if status == 404:
        return f"there is no such repository, revision or folder{set_here}"
    if status:
        return f"the server answered with HTTP status {status}"
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        return "HF_HUB_OFFLINE is set, and the local cache does not have it"
    first = error
    while first.__cause__ or first.__context__:
        first = first.__cause__ or first.__context__
    if isinstance(first, (socket.gaierror, ConnectionError, TimeoutError)):
        return f"the hub cannot be reached: {first.strerror or first}{set_here}"
    return (str(error).strip().partition("\n")[0] or type(error).__name__) + set_here


def endpoint() -> str:
    """The address of the hub, as huggingface_hub takes it from the environment."""
    return os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")
