"""Upload results to the Hugging Face Hub, with its own client."""

import time
from pathlib import Path

from lockstep.common.errors import UserError, explain, say

STALE = ["*.safetensors", "*.safetensors.index.json"]  # files to remove from an earlier upload unless they are sent again
PAUSES = (1, 5, 25)  # seconds between attempts; the client also retries most requests itself


def push(directory: Path, to: str, private: bool) -> str:
    """Upload a model directory to OWNER/NAME[@BRANCH]. Returns its address on the Hub. Raises UserError.

    Retries after network and server errors. After an interruption, it sends only what is missing.
    """
    for pause in (*PAUSES, 0):
        try:
            return upload(directory, to, private)
        except Exception as error:
            problem = f"--push={to}: {explain(error)}"
            status = getattr(getattr(error, "response", None), "status_code", 0)
            if status in (401, 403, 404):
                raise UserError(f"{problem}; run `hf auth login` with a token that allows uploads") from None
            if isinstance(error, ValueError | TypeError | ImportError) or status == 400:  # retrying would not help
                raise UserError(problem) from None
            if not pause:
                raise UserError(f"{problem}; run the same command again to upload the rest") from None
            say(f"warning: {problem}; retrying in {pause} s")
            time.sleep(pause)


def upload(directory: Path, to: str, private: bool) -> str:
    """Upload without retries; see `push`. Raises whatever the client raises."""
    from huggingface_hub import HfApi  # reads HF_ENDPOINT, which may be invalid

    api, (repository, _, branch) = HfApi(), to.partition("@")
    url = api.create_repo(repository, private=private or None, exist_ok=True)
    if private and not api.repo_info(url.repo_id).private:
        raise ValueError(f"{url} already exists and is public; make it private there, or leave out --private")
    if branch:
        api.create_branch(url.repo_id, branch=branch, exist_ok=True)
    files = dict(folder_path=directory, ignore_patterns=[".*"], delete_patterns=STALE)
    api.upload_folder(repo_id=url.repo_id, revision=branch or None, **files)
    return f"{url}/tree/{branch}" if branch else str(url)
