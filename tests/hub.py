"""Stands for the Hub in this process: what transformers' own push hands to huggingface_hub's client lies in `files`."""

from pathlib import Path

import transformers
from huggingface_hub import HfApi, RepoUrl


class Hub:
    """Put there by the fixture `hub` of tests/test_hub.py.

    Attributes:
        files: by repository, the content of each file by its path.
        private: repositories that were made private.
        is_broken: whether a commit fails.
    """

    def __init__(self, monkeypatch):
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.is_broken = False
        places = (HfApi, transformers.utils.hub, transformers.modeling_utils, transformers.configuration_utils)
        for name in ("create_repo", "create_commit"):
            method = getattr(self, name)
            for place in places:  # modules of former versions hold the client's methods by name
                monkeypatch.setattr(place, name, staticmethod(method) if place is HfApi else method, raising=False)

    def create_repo(self, repo_id: str, private: bool | None = None, **_) -> RepoUrl:
        """Make a repository of the user `me`, if it is not there."""
        repo_id = repo_id if "/" in repo_id else f"me/{repo_id}"
        self.files.setdefault(repo_id, {})
        self.private |= {repo_id} if private else set()
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self, repo_id: str, operations: list, **_) -> str:
        """Take all files of a commit, or none."""
        if self.is_broken:
            raise OSError("the server broke down")
        for operation in operations:
            source = operation.path_or_fileobj
            self.files[repo_id][operation.path_in_repo] = (
                source if isinstance(source, bytes) else Path(source).read_bytes()
            )
        return "committed"
