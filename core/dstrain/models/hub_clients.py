"""The two hubs through their own clients: what a model consists of at a revision, and
one file of it. Imports no torch.

Listing, transfer, resuming and the user's access token are the clients'; both are
imported when a hub is first asked.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from dstrain.console import redacted, shown

Kind = Literal["absent", "denied", "transport", "wrong"]
TRIES = 3
"""How often Hugging Face is asked for the same thing: its client does not ask again
after an error of the server.
"""


class HubFault(Exception):
    """A hub did not give what it was asked for.

    kind: there is no such model or revision (absent), access is not allowed (denied),
    the hub could not be reached or broke off (transport), or what it gave is not what
    it lists (wrong).
    """

    def __init__(self, kind: Kind, reason: object) -> None:
        self.kind = kind
        self.reason = plain(str(reason))
        super().__init__(self.reason)


class Listed(NamedTuple):
    """A file as a hub lists it: its size in bytes, and its digest, as "sha256:..." or
    "git:..." (of a blob) or ''.
    """

    size: int
    digest: str


@dataclass(frozen=True)
class Listing:
    """The files of a model at a revision, by path; the commit is '' if the hub does not
    tell it.
    """

    commit: str
    files: Mapping[str, Listed]


class Client(Protocol):
    """A hub as the rest of dstrain sees it; each method raises HubFault, or OSError
    where this machine is at fault.
    """

    place: str
    default_revision: str
    token: str

    def listing(self, model_id: str, revision: str) -> Listing:
        """List the files of a model at a revision."""

    def download(
        self, model_id: str, revision: str, path: str, listed: Listed, folder: Path
    ) -> None:
        """Fetch one file to `folder / path`, going on where an earlier attempt in the
        same folder was cut.
        """


class ModelScope:
    """modelscope.cn through `modelscope_hub`, which compares size and sha256 itself and
    resumes.
    """

    default_revision = "master"
    token = "MODELSCOPE_API_TOKEN"

    def __init__(self) -> None:
        from modelscope_hub import HubApi, _download
        from modelscope_hub.config import HubConfig
        from tqdm import tqdm

        # Bars for a terminal alone: the client has no switch, and its module of that
        # name is what makes them.
        _download.tqdm = partial(tqdm, disable=None)  # type: ignore[attr-defined]  # a name that it imports itself
        logging.getLogger("modelscope_hub").setLevel(logging.ERROR)
        config = HubConfig()
        self.api = HubApi(config)
        self.place = plain(config.endpoint or "")

    def listing(self, model_id: str, revision: str) -> Listing:
        """List the files; the hub does not tell the commit of a branch."""
        with _modelscope_faults():
            files = self.api.list_repo_files(model_id, "model", revision=revision)
            digests = {
                file.path: f"sha256:{file.sha256}" if file.sha256 else ""
                for file in files
            }
            return Listing(
                "",
                {
                    f.path: Listed(int(f.size or 0), digests[f.path])
                    for f in files
                    if f.type != "tree"
                },
            )

    def download(
        self, model_id: str, revision: str, path: str, listed: Listed, folder: Path
    ) -> None:
        """Fetch one file."""
        sha256 = listed.digest.removeprefix("sha256:") or None
        given: dict[str, Any] = {
            "local_dir": folder,
            "expected_sha256": sha256,
            "file_size": listed.size,
        }
        with _modelscope_faults():
            self.api.download_file(model_id, "model", path, revision=revision, **given)


class HuggingFace:
    """huggingface.co through `huggingface_hub`.

    Its `hf_hub_download` begins a file again after a cut, so the client's transfer
    below that is used, which resumes.
    """

    default_revision = "main"
    token = "HF_TOKEN"

    def __init__(self) -> None:
        from huggingface_hub import HfApi, constants

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip(
            "/"
        )
        self.api = HfApi(endpoint=self.endpoint)
        self.place = plain(self.endpoint)

    def listing(self, model_id: str, revision: str) -> Listing:
        """List the files, large ones with their sha256, others with the digest of git."""
        info = _again(
            lambda: self.api.model_info(
                model_id, revision=revision, files_metadata=True, timeout=30
            )
        )
        files = {}
        for file in info.siblings or ():
            digest = (
                f"sha256:{file.lfs.sha256}"
                if file.lfs
                else f"git:{file.blob_id}"
                if file.blob_id
                else ""
            )
            files[file.rfilename] = Listed(int(file.size or 0), digest)
        return Listing(info.sha or "", files)

    def download(
        self, model_id: str, revision: str, path: str, listed: Listed, folder: Path
    ) -> None:
        """Fetch one file, under another name until it has its full size."""
        from huggingface_hub import get_token, hf_hub_url
        from huggingface_hub.file_download import http_get

        url = hf_hub_url(model_id, path, revision=revision, endpoint=self.endpoint)
        final = folder / path
        partial = final.with_name(f"{final.name}.incomplete")
        headers = {"authorization": f"Bearer {token}"} if (token := get_token()) else {}
        final.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists() and partial.stat().st_size > listed.size:
            partial.unlink()

        def transfer() -> None:
            with partial.open("ab") as file:
                about: dict[str, Any] = {
                    "expected_size": listed.size,
                    "displayed_filename": path,
                }
                http_get(url, file, resume_size=file.tell(), headers=headers, **about)

        _again(transfer)
        partial.replace(final)


CLIENTS: Mapping[str, Callable[[], Client]] = MappingProxyType(
    {"modelscope": ModelScope, "huggingface": HuggingFace}
)


def plain(text: str) -> str:
    """The first line of a text without what may be secret, and without the query of a
    URL, which may be signed.
    """
    line = (redacted(text).strip().splitlines() or [""])[0]
    cause = (
        re.search(r"\[Errno -?\d+\] [^\"')]+", line) if "Caused by" in line else None
    )
    line = cause[0] if cause is not None else line
    return re.sub(r"[\w+.-]+://[^\s'\"]+", lambda url: shown(url[0]), line)


@contextmanager
def _modelscope_faults() -> Iterator[None]:
    from modelscope_hub import errors

    try:
        yield
    except errors.NotExistError as error:
        raise HubFault("absent", error.message) from error
    except (errors.AuthenticationError, errors.PermissionDeniedError) as error:
        raise HubFault("denied", error.message) from error
    except errors.FileIntegrityError as error:
        raise HubFault("wrong", error.message) from error
    except errors.HubError as error:
        raise HubFault("transport", error.message) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise HubFault("transport", error) from error  # of requests
    except ValueError as error:  # an answer that is no JSON
        raise HubFault("wrong", error) from error


@contextmanager
def _huggingface_faults() -> Iterator[None]:
    from huggingface_hub import errors

    http_error = errors.HTTPError  # type: ignore[attr-defined]  # of whichever library the client uses
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubFault("denied", error) from error
    except (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.RemoteEntryNotFoundError,
    ) as error:
        raise HubFault("absent", error) from error
    except errors.HfHubHTTPError as error:
        kinds: Mapping[int, Kind] = {401: "denied", 403: "denied", 404: "absent"}
        raise HubFault(
            kinds.get(error.response.status_code, "transport"), error
        ) from error
    except errors.HFValidationError as error:
        raise HubFault("absent", error) from error
    except (http_error, errors.OfflineModeIsEnabled) as error:
        raise HubFault("transport", error) from error
    except RecursionError as error:  # the client's attempts are nested, and each that got some bytes allows five more
        raise HubFault("transport", "the connection ended too often") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise HubFault(
            "transport", error
        ) from error  # the client's own check of the size
    except (
        KeyError,
        ValueError,
    ) as error:  # an answer that is no JSON, or not of a model
        raise HubFault("wrong", error) from error


def _again(ask: Callable[[], Any]) -> Any:
    """Ask Hugging Face, and once more after an error of the server, at most TRIES
    times; raises the last HubFault.
    """
    from huggingface_hub.errors import HfHubHTTPError

    for left in reversed(range(TRIES)):
        try:
            with _huggingface_faults():
                return ask()
        except HubFault as fault:
            if not (
                left
                and fault.kind == "transport"
                and isinstance(fault.__cause__, HfHubHTTPError)
            ):
                raise
            time.sleep(1)
    raise AssertionError("the last try returned or raised")
