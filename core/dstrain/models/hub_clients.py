"""List and fetch files of published models with the clients of the two hubs.

Transfer, retries and access tokens are the clients'. Both are imported when a hub is
first asked, since they are slow to import.
"""

import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TextIO, TypeVar

from dstrain.console import redacted, shown
from dstrain.models.hub_record import RemoteFile

T = TypeVar("T")
TRIES = 3
Reason = Literal["absent", "denied", "transport", "wrong"]
"""Why a hub did not give a file: there is no such model or revision, access is not
allowed, the hub cannot be reached or broke off, or its answer makes no sense."""

BY_STATUS: Mapping[int, Reason] = MappingProxyType(
    {401: "denied", 403: "denied", 404: "absent"}
)


class Listing(NamedTuple):
    """The files of a model at a revision."""

    commit: str
    """'' if the hub does not tell it."""
    files: Mapping[str, RemoteFile]


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

    def list_files(self, model_id: str, revision: str) -> Listing:
        """List the files with their sha256, which `modelscope`'s own HubApi leaves
        out.
        """
        files = {}
        for file in self.api.list_repo_files(model_id, "model", revision=revision):
            if file.type != "tree":
                digest = f"sha256:{file.sha256}" if file.sha256 else ""
                files[file.path] = RemoteFile(int(file.size or 0), digest)
        return Listing("", files)

    def download(self, model_id: str, revision: str, name: str, folder: Path) -> None:
        """Fetch one file; what an earlier attempt left in the folder is continued."""
        from modelscope import model_file_download

        stream = sys.stderr if sys.stderr.isatty() else _WithoutBars(sys.stderr)
        with redirect_stderr(stream):
            model_file_download(
                model_id,
                name,
                revision=revision,
                local_dir=str(folder),
                endpoint=self.endpoint,
            )

    def reason(self, error: Exception) -> Reason:
        """Return why it raised an error."""
        from modelscope_hub import errors

        cause = error.__cause__
        if isinstance(cause, errors.APIError):  # model_file_download wraps them
            error = cause
        if isinstance(error, errors.APIError):
            return BY_STATUS.get(error.status_code or 0, "transport")
        if isinstance(error, errors.FileIntegrityError):
            return "wrong"
        # An answer that is not JSON is a ValueError, and so is requests' own error.
        if isinstance(error, ValueError) and not isinstance(error, OSError):
            return "wrong"
        return "transport"


class HuggingFace:
    """huggingface.co through `huggingface_hub`; methods raise whatever that does."""

    default_revision = "main"
    token = "HF_TOKEN"

    def __init__(self) -> None:
        from huggingface_hub import HfApi, constants

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip(
            "/"
        )
        self.api = HfApi(endpoint=self.endpoint)

    def list_files(self, model_id: str, revision: str) -> Listing:
        """List the files, large ones with their sha256, others with git's digest."""
        info = self._retry(
            lambda: self.api.model_info(
                model_id, revision=revision, files_metadata=True, timeout=30
            )
        )
        files = {}
        for file in info.siblings or ():
            digest = f"git:{file.blob_id}" if file.blob_id else ""
            if file.lfs:
                digest = f"sha256:{file.lfs.sha256}"
            files[file.rfilename] = RemoteFile(int(file.size or 0), digest)
        return Listing(info.sha or "", files)

    def download(self, model_id: str, revision: str, name: str, folder: Path) -> None:
        """Fetch one file; a later attempt starts it again."""
        self._retry(
            lambda: self.api.hf_hub_download(
                model_id, name, revision=revision, local_dir=folder
            )
        )

    def _retry(self, call: Callable[[], T]) -> T:
        """Call again after an error of the server, which the client itself does not
        do everywhere.
        """
        from huggingface_hub.errors import HfHubHTTPError

        for _ in range(TRIES - 1):
            try:
                return call()
            except HfHubHTTPError as error:
                if error.response.status_code < 500:
                    raise
                time.sleep(1)
        return call()

    def reason(self, error: Exception) -> Reason:
        """Return why it raised an error."""
        from huggingface_hub import errors

        # A file that is not here either: the cause tells why it could not be fetched.
        if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(
            error.__cause__, Exception
        ):
            error = error.__cause__
        if isinstance(error, errors.GatedRepoError):
            return "denied"
        # A model that does not exist is answered with 401, as a private one is.
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            return "absent"
        if isinstance(error, errors.HfHubHTTPError):
            return BY_STATUS.get(error.response.status_code, "transport")
        return "wrong" if isinstance(error, KeyError | ValueError) else "transport"


Client = ModelScope | HuggingFace
CLIENTS: Mapping[str, type[Client]] = MappingProxyType(
    {"modelscope": ModelScope, "huggingface": HuggingFace}
)


class _WithoutBars(io.TextIOBase):
    """A stream without progress bars, which `modelscope` draws in log files, too."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a text unless it is a bar."""
        return len(text) if text.startswith("\r") else self.stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self.stream.flush()


def first_line(text: str) -> str:
    """Return the first line of a client's message without secrets and without the
    queries of URLs, which may be signed.
    """
    line = (redacted(text).strip().splitlines() or [""])[0]
    if "Caused by" in line:
        cause = re.search(r"\[Errno -?\d+\] [^\"')]+", line)
        line = cause[0] if cause else line
    return re.sub(r"[\w+.-]+://[^\s'\"]+", lambda url: shown(url[0]), line)
