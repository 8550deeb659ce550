"""Find a model: a folder, or an id of the hub. Nothing here imports torch or transformers."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

# For the hub's first answer. HF_HUB_ETAG_TIMEOUT, if set, is used instead.
HUB_TIMEOUT_S = 5.0
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"


class ModelNotFound(ValueError):
    """There is no model at the given place. The message names the place and the missing part."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"no model at {source!r}: {reason}")
        self.source = source
        self.reason = reason


def find_folder(source: str) -> Path | None:
    """Return the folder of a model; None if `source` can only be an id of the hub, NAME or OWNER/NAME.

    OWNER/NAME is a path if a folder OWNER is here. Raises ModelNotFound for a path without a model. Asks no network.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / _CONFIG).is_file():
            raise ModelNotFound(source, f"the folder has no {_CONFIG}")
        return path
    if path.exists():
        raise ModelNotFound(source, "it is a file; a model is a folder")
    if source.startswith((".", "~")) or not _HUB_ID.fullmatch(source):
        raise ModelNotFound(source, f"there is no such folder in {_first_missing(path).parent}")
    if "/" in source and path.parent.is_dir():
        raise ModelNotFound(
            source,
            f"there is no such folder in {path.parent.absolute()}. "
            f"If it is an id of the hub: run this where no folder is called {path.parent.name!r}",
        )
    return None


def _first_missing(path: Path) -> Path:
    """Return the first part of a path, absolute, that does not exist."""
    path = path.absolute()
    return next(part for part in (*reversed(path.parents), path) if not part.exists())


def check_hub(hub_id: str, *, revision: str | None = None) -> bool:
    """Ask the hub for a model; return if it has to come from the cache on this machine, without the network.

    Raises ModelNotFound if the hub has no such model, or does not answer within HUB_TIMEOUT_S and the model is not in
    the cache.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(hub_id, _CONFIG, revision=revision), str)
    except HFValidationError as error:
        raise ModelNotFound(hub_id, f"neither a folder nor an id of the hub: {_first_line(error)}") from error
    if constants.is_offline_mode():
        if not is_cached:
            raise ModelNotFound(
                hub_id, "there is no such folder, it is not in the cache of the hub, and HF_HUB_OFFLINE is set"
            )
        return True
    timeout_s = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or HUB_TIMEOUT_S)
    failure = _ask_hub(hub_id, revision, timeout_s)
    if failure is not None and not is_cached:
        raise ModelNotFound(hub_id, f"there is no such folder, and {constants.ENDPOINT} {failure}")
    return failure is not None


def _ask_hub(hub_id: str, revision: str | None, timeout_s: float) -> str | None:
    """Return the error of the hub or the id, None if the hub has the model. Takes timeout_s at most.

    Runs on a thread of its own, because nothing else bounds the time of name resolution and redirects together.
    """
    answers: SimpleQueue[str | None] = SimpleQueue()
    arguments = (hub_id, revision, timeout_s, answers)
    threading.Thread(target=_request_config, args=arguments, name="hub", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except Empty:
        return f"does not answer within {timeout_s:g} s"


def _request_config(hub_id: str, revision: str | None, timeout_s: float, answers: SimpleQueue[str | None]) -> None:
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(hub_id, _CONFIG, revision=revision), timeout=timeout_s)
    except errors.GatedRepoError:
        answers.put("gives this model only to users with access: set HF_TOKEN")
    except errors.RepositoryNotFoundError:
        answers.put("has no model of this id, or only for users with access: set HF_TOKEN")
    except errors.RevisionNotFoundError:
        answers.put(f"has no revision {revision!r} of this model")
    except errors.EntryNotFoundError:
        answers.put(f"has no {_CONFIG} of this model")
    except Exception as error:  # of the network and of the hub; their types are many
        answers.put(f"can't be asked: {_first_line(error)}")
    else:
        answers.put(None)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def find_tokenizer(source: str, *, revision: str | None = None) -> Path | None:
    """Return the tokenizer.json of a model that was found, None if it has none or it can't be fetched."""
    folder = Path(source)
    if folder.is_dir():
        path = folder / _TOKENIZER
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, _TOKENIZER, revision=revision))
    except Exception:  # of the network and of the hub; their types are many
        return None
