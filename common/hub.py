"""Uploads to the Hugging Face hub, by its own client."""

import time
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError, explain, say

PAUSES = (1, 5, 25)  # seconds between attempts; the client itself repeats most requests, too


@dataclass(frozen=True)
class HubConfig:
    """Where to upload what a command has made, and what its card says."""

    push: str = ""
    """Repository of the Hugging Face hub to upload it to, OWNER/NAME[@BRANCH]. Both are made if need be."""
    private: bool = False
    """Make the repository of --push private if it is new, and refuse one that is public."""
    license: str = ""
    """Its license, as the hub calls it, such as apache-2.0."""
    language: str = ""
    """Languages of its text, such as en or en,de."""

    @property
    def card(self) -> dict:
        """What the metadata of a card on the hub takes from here."""
        return {"license": self.license or None, "language": self.language.split(",") if self.language else None}


def push(directory: Path, options: HubConfig, kind: str, stale: list[str]) -> str:
    """Upload a directory. Returns its address on the hub. Raises UserError.

    kind: model or dataset. stale: patterns of an earlier upload's files, which are removed there unless they are sent again.
    What the network or the server fails at is tried again; an upload that was interrupted sends only what is missing.
    """
    for pause in (*PAUSES, 0):
        try:
            return upload(directory, options, kind, stale)
        except Exception as error:
            problem = f"--push={options.push}: {explain(error)}"
            status = getattr(getattr(error, "response", None), "status_code", 0)
            if status in (401, 403, 404):
                raise UserError(f"{problem}; `hf auth login` gives this machine a token for uploads") from None
            if isinstance(error, ValueError | TypeError | ImportError) or status == 400:  # which stay
                raise UserError(problem) from None
            if not pause:
                raise UserError(f"{problem}; the same command sends what is missing") from None
            say(f"warning: {problem}; trying again in {pause} s")
            time.sleep(pause)


def upload(directory: Path, options: HubConfig, kind: str, stale: list[str]) -> str:
    """One attempt. Raises what the client does."""
    from huggingface_hub import HfApi  # reads HF_ENDPOINT, which may be no address

    api, (repository, _, branch) = HfApi(), options.push.partition("@")
    url = api.create_repo(repository, repo_type=kind, private=options.private or None, exist_ok=True)
    of = dict(repo_id=url.repo_id, repo_type=kind)
    if options.private and not api.repo_info(**of).private:
        raise ValueError(f"{url} is there already, and public; make it private there, or leave --private out")
    if branch:
        api.create_branch(**of, branch=branch, exist_ok=True)
    api.upload_folder(**of, folder_path=directory, revision=branch or None, ignore_patterns=[".*"], delete_patterns=stale)
    return f"{url}/tree/{branch}" if branch else str(url)
