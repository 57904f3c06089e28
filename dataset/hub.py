"""Files of a dataset repository on the Hugging Face hub: listed at one commit, downloaded, and checked by their hash.

huggingface_hub makes the requests: it finds the user's token, follows redirections, and repeats what fails.
"""

import hashlib
import itertools
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common import files
from common.errors import FULL_DISK, UserError, complain

SCHEME = "hf://"
ADDRESS = re.compile(
    r"hf://datasets/(?P<repository>(?![.-])[\w.-]+/(?![.-])[\w.-]+)(?:@(?P<revision>[^/@]+))?(?:/(?P<path>.*?))?/*"
)
WAIT_SECONDS = (1, 2, 4, 8)  # between our tries, for what huggingface_hub does not try again by itself


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
    from huggingface_hub import HfApi

    address = parse_address(source)
    return retry(source, lambda: HfApi().dataset_info(address["repository"], revision=address["revision"]).sha)


def list_files(source: str, commit: str, suffixes: tuple[str, ...], downloads: Path) -> list[HubFile]:
    """The files at an address that end in one of `suffixes`, at a commit, in order. Raises UserError.

    In a pattern * and ? stand for characters other than /, and [...] for one of some. downloads: the folder for the files of
    all commits.
    """
    from huggingface_hub import HfApi, RepoFile

    address, found = parse_address(source), []
    repository, named = address["repository"], PurePosixPath(address["path"] or ".")
    literal = PurePosixPath(*itertools.takewhile(lambda part: not set("*?[") & set(part), named.parts))
    folder = str(literal.parent if literal.name.endswith(suffixes) else literal)
    options = {"path_in_repo": None if folder == "." else folder, "recursive": True, "revision": commit, "repo_type": "dataset"}
    for entry in retry(source, lambda: list(HfApi().list_repo_tree(repository, **options))):
        path = PurePosixPath(entry.path)
        beginning = PurePosixPath(*path.parts[: len(named.parts)])
        is_meant = beginning == named or (named.parts and beginning.match(str(named)))
        if is_meant and isinstance(entry, RepoFile) and entry.path.endswith(suffixes):
            if path.is_absolute() or ".." in path.parts:
                raise UserError(f"{source}: the repository lists {entry.path}, which leads out of it")
            digest = entry.lfs.sha256 if entry.lfs else entry.blob_id
            found.append(HubFile(repository, commit, entry.path, entry.size, digest, downloads / commit))
    return sorted(found, key=lambda file: PurePosixPath(file.path))


def download(file: HubFile) -> None:
    """Download a file if it is not there yet. Raises UserError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    if is_whole(file):
        return
    name = f"{SCHEME}datasets/{file.repository}/{file.path}"
    disable_progress_bars()

    def fetch():
        file.local.unlink(missing_ok=True)
        hf_hub_download(file.repository, file.path, repo_type="dataset", revision=file.commit, local_dir=file.directory)
        if not is_whole(file):
            file.local.unlink()
            raise OSError("its content does not have the hash that the repository lists")

    retry(name, fetch)


def remove_unfinished(downloads: Path) -> None:
    """Remove what huggingface_hub keeps beside the files of each commit: unfinished files, and notes on finished ones."""
    for notes in downloads.glob("*/.cache"):
        shutil.rmtree(notes)


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
        except Exception as error:  # the classes for HTTP, sockets and time limits differ between versions of the client
            if isinstance(error, OSError) and (error.filename or error.errno in FULL_DISK):
                raise  # the error is of this machine's disk, not of the hub
            error = error.__cause__ or error  # the client puts "check your connection" in front of what happened
            status = getattr(getattr(error, "response", None), "status_code", None)
            reason = f"{name}: {explain(error, status)}"
            if seconds is None or status in (401, 403, 404) or is_offline():
                raise UserError(reason) from None
            complain(f"{reason}; trying again in {seconds} s")
            time.sleep(seconds)


def explain(error: Exception, status: int | None) -> str:
    """The reason for an error in one line. It never quotes a URL that was asked for, which may hold a signature."""
    if status in (401, 403):
        return "it does not exist, or you have no access; set HF_TOKEN to a token that may read it"
    if status == 404:
        return "there is no such repository, revision or folder"
    if status:
        return f"the server answered with HTTP status {status}"
    if is_offline():
        return "HF_HUB_OFFLINE is set, and the local cache does not have it"
    first = error
    while first.__cause__ or first.__context__:
        first = first.__cause__ or first.__context__
    if isinstance(first, (socket.gaierror, ConnectionError, TimeoutError)):
        return f"the hub cannot be reached: {first.strerror or first}"
    return str(error).strip().partition("\n")[0] or type(error).__name__


def is_offline() -> bool:
    """Whether the user forbids huggingface_hub the network."""
    return os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
