"""List and download files of published models with the clients of the two hubs.

Transfer, retries and access tokens are the clients'. Both are imported when a hub is
first asked, since they are slow to import.
"""

import io
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from dstrain.config.options import Hub
from dstrain.console import redacted, shown
from dstrain.errors import UsageError, nearest
from dstrain.models.hub.record import RemoteFile

MODEL_BASE_VARIABLES = ("DSTRAIN_MODEL_BASE_PATH", "DIFFSYNTH_MODEL_BASE_PATH")
DATASET_BASE_VARIABLE = "DSTRAIN_DATASET_BASE_PATH"
HUB_VARIABLES = ("DSTRAIN_DOWNLOAD_SOURCE", "DIFFSYNTH_DOWNLOAD_SOURCE")
OFFLINE_VARIABLES = ("DSTRAIN_SKIP_DOWNLOAD", "DIFFSYNTH_SKIP_DOWNLOAD")


def model_base() -> Path:
    """Return the folder of published models, by default ./models."""
    for name in MODEL_BASE_VARIABLES:
        if os.environ.get(name):
            return Path(os.environ[name])
    return Path("models")


def dataset_base() -> Path:
    """Return the folder of published datasets, by default ./data."""
    return Path(os.environ.get(DATASET_BASE_VARIABLE) or "data")


def hub_of_environment() -> Hub | None:
    """Return the hub that an environment variable names, None if none does; raises
    UsageError for one that there is not.
    """
    hubs: dict[str, Hub] = {hub: hub for hub in get_args(Hub)}
    for name in HUB_VARIABLES:
        value = os.environ.get(name, "").strip().lower()
        if value in hubs:
            return hubs[value]
        if value:
            what = f"is {value!r}; expected one of {', '.join(hubs)}"
            raise UsageError(f"variable {name}", what + nearest(value, hubs))
    return None


def chosen_hub(hub: Hub | None) -> Hub:
    """Return the hub to download from: that of --hub, else of a variable, else the default."""
    return hub or hub_of_environment() or "modelscope"


def offline() -> str:
    """Return the environment variable that forbids every request, or ''."""
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "on"):
            return name
    return ""


Kind = Literal["model", "dataset"]
Listing = tuple[str, dict[str, RemoteFile]]
"""The commit, '' if the hub does not tell it, and the files of a model."""


class ModelScope:
    """modelscope.cn through `modelscope`; methods raise whatever that does."""

    default_revision = "master"
    token = "MODELSCOPE_API_TOKEN"
    """The environment variable for an access token."""

    def __init__(self) -> None:
        from modelscope_hub import HubApi
        from modelscope_hub.config import HubConfig

        logging.getLogger("modelscope_hub").setLevel(logging.ERROR)
        config = HubConfig()
        self.endpoint = config.endpoint or ""
        self.api = HubApi(config)

    def list_files(self, model_id: str, revision: str, kind: Kind) -> Listing:
        """List the files with their sha256; `modelscope`'s own HubApi has none."""
        files = {}
        for file in self.api.list_repo_files(model_id, kind, revision=revision):
            if file.type != "tree":
                digest = f"sha256:{file.sha256}" if file.sha256 else ""
                files[file.path] = RemoteFile(file.size or 0, digest)
        return "", files

    def download(
        self, model_id: str, revision: str, name: str, folder: Path, kind: Kind
    ) -> None:
        """Download one file; what an earlier attempt left in the folder is continued."""
        from modelscope import dataset_file_download, model_file_download

        download = model_file_download if kind == "model" else dataset_file_download
        # It draws progress bars in log files, too.
        bars = sys.stderr if sys.stderr.isatty() else io.StringIO()
        with redirect_stderr(bars):
            download(
                model_id,
                name,
                revision=revision,
                local_dir=str(folder),
                endpoint=self.endpoint,
            )


class HuggingFace:
    """huggingface.co through `huggingface_hub`; methods raise whatever that does."""

    default_revision = "main"
    token = "HF_TOKEN"

    def __init__(self) -> None:
        from huggingface_hub import HfApi

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        self.api = HfApi()
        self.endpoint = self.api.endpoint

    def list_files(self, model_id: str, revision: str, kind: Kind) -> Listing:
        """List the files, large ones with their sha256."""
        is_model = kind == "model"
        ask = self.api.model_info if is_model else self.api.dataset_info
        info = ask(model_id, revision=revision, files_metadata=True, timeout=30)
        files = {}
        for file in info.siblings or ():
            digest = f"sha256:{file.lfs.sha256}" if file.lfs else ""
            files[file.rfilename] = RemoteFile(file.size or 0, digest)
        return info.sha or "", files

    def download(
        self, model_id: str, revision: str, name: str, folder: Path, kind: Kind
    ) -> None:
        """Download one file; a later attempt starts it again."""
        self.api.hf_hub_download(
            model_id, name, repo_type=kind, revision=revision, local_dir=folder
        )


CLIENTS: Mapping[str, type[ModelScope | HuggingFace]] = MappingProxyType(
    {"modelscope": ModelScope, "huggingface": HuggingFace}
)


def is_absent(error: BaseException | None) -> bool:
    """Return whether a client's error says that there is no such model or revision."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    # Answered with 401, as a private model is.
    if isinstance(error, RepositoryNotFoundError):
        return not isinstance(error, GatedRepoError)
    return _status(error) == 404


def is_refused(error: BaseException) -> bool:
    """Return whether a client's error says that this user may not have a model."""
    return _status(error) in (401, 403)


def _status(error: BaseException | None) -> int | None:
    """Return the status of the hub's answer that an error is about, None for others."""
    answer = getattr(error, "response", error)
    status: int | None = getattr(answer, "status_code", None)
    return status


def first_line(text: str) -> str:
    """Return the first line of a client's message without secrets and without the
    queries of URLs, which may be signed.
    """
    line = redacted(text).strip().partition("\n")[0]
    return re.sub(r"[\w+.-]+://[^\s'\"]+", lambda url: shown(url[0]), line)
