"""Models of the Hugging Face Hub: download into the Hub's cache, at a revision that is recorded.

Only settings, tokenizer files and safetensors weights are downloaded, never pickles or code. Importing this module
imports neither torch nor huggingface_hub.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.checkpoint.formats.huggingface.settings import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, read_model_text
from megatron.core.console import Log
from megatron.core.errors import CheckpointError
from megatron.core.safe_io import parse_json
from megatron.core.tokenizers import MODEL_FOLDER_FILES

_SMALL_FILES = [CONFIG_FILE, INDEX_FILE, *MODEL_FOLDER_FILES]
_TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
_NAME = re.compile(r"(?P<name>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class HubModel:
    """Model on the Hub: ``org/name``, and a branch, tag or commit; None is the main branch."""

    name: str
    revision: str | None = None


def find_hub_model(text: str) -> HubModel | None:
    """Return the model that ``org/name`` or ``org/name@revision`` names; None for other texts and local folders."""
    found = _NAME.fullmatch(text)
    return None if found is None or Path(text).is_dir() else HubModel(found["name"], found["revision"])


def hub_origin(folder: Path) -> dict[str, str] | None:
    """Return name and commit of a model whose folder is in the Hub's cache; None for other folders."""
    snapshots, repository = folder.parent, folder.parent.parent.name
    if snapshots.name != "snapshots" or not repository.startswith("models--"):
        return None
    return {"name": repository.removeprefix("models--").replace("--", "/", 1), "revision": folder.name}


def fetch_model(model: HubModel, log: Log) -> Path:
    """Return the folder of a model in the Hub's cache; download what the cache lacks.

    A model whose weights and tokenizer are in the cache is used without a request, also if its branch has moved since.

    Raises:
        CheckpointError: huggingface_hub is not installed, or the model is not available or has no safetensors weights.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{model.name} is not a folder here, and downloading it from the Hub needs the package huggingface_hub, "
            "which is not installed; run pip install huggingface_hub"
        ) from error
    config = huggingface_hub.try_to_load_from_cache(model.name, CONFIG_FILE, revision=model.revision)
    if isinstance(config, str) and _is_complete(Path(config).parent):
        folder = Path(config).parent
        log(f"{model.name}: revision {folder.name}, from the cache")
        return folder
    log(f"{model.name}: downloading it from {huggingface_hub.constants.ENDPOINT}")
    folder = _download(model)
    log(f"{model.name}: revision {folder.name}")
    return folder


def _download(model: HubModel) -> Path:
    """Download the small files of a revision, and then the weights of the same commit that its index names."""
    import huggingface_hub
    from huggingface_hub import errors

    named = model.name if model.revision is None else f"{model.name}@{model.revision}"
    endpoint = huggingface_hub.constants.ENDPOINT
    try:
        folder = Path(
            huggingface_hub.snapshot_download(model.name, revision=model.revision, allow_patterns=_SMALL_FILES)
        )
        weights = _weight_names(folder)
        huggingface_hub.snapshot_download(model.name, revision=folder.name, allow_patterns=weights)
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{model.name} is gated: accept its conditions at {endpoint}/{model.name}, and set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model.name} is neither a folder here nor a model at {endpoint}; check the name, or set HF_TOKEN for a "
            "private model"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{model.name} has no revision {model.revision}; name a branch, tag or commit") from error
    except CheckpointError:
        raise
    except Exception as error:  # the HTTP library, and with it the class, depends on the version
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{named} is not a folder here, and cannot be downloaded from {endpoint} ({type(error).__name__}: "
            f"{reason}); check the connection, or name a folder"
        ) from error
    if missing := [name for name in weights if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{named} has no {missing[0]} at {endpoint}: only safetensors weights can be read; use another revision, "
            "or convert the model with transformers"
        )
    return folder


def _weight_names(folder: Path) -> list[str]:
    """Return the names of the weight files that a folder needs.

    Raises:
        CheckpointError: the index is damaged.
    """
    if not (folder / INDEX_FILE).is_file():
        return [SINGLE_FILE]
    try:
        names = set(parse_json(read_model_text(folder, INDEX_FILE))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX_FILE} is not an index of weights: {error!r}") from error
    if wrong := [name for name in names if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name))]:
        raise CheckpointError(f"{folder / INDEX_FILE} names {wrong[0]!r}, which is no safetensors file of the folder")
    return sorted(names)


def _is_complete(folder: Path) -> bool:
    """Return whether a folder of the cache has weights and a tokenizer; other programs may have fetched one of them."""
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
    return has_tokenizer and all((folder / name).is_file() for name in _weight_names(folder))


class Store(Protocol):
    """Required methods of the ranks' store, which torch's stores provide."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Return a value."""

    def add(self, key: str, number: int) -> int:
        """Add to a counter and return it."""

    def check(self, keys: list[str]) -> bool:
        """Return whether the keys have values."""


_FAILURE, _READY = "failure", "ready"


def fetch_on_every_node(
    model: HubModel,
    fetch: Callable[[HubModel], Path],
    store: Store,
    *,
    rank: int,
    local_rank: int,
    world_size: int,
) -> Path:
    """Return the model's folder on this node, the same revision on every rank.

    Rank 0 fetches the model first, then the first rank of every other node the commit that rank 0 used. Every rank
    waits until all have it, without the time limit of collectives.

    Raises:
        CheckpointError: a node cannot fetch it.
    """
    first_here = rank - local_rank
    if rank == 0:
        _publish(model, fetch, store, rank)
    elif rank == first_here:
        commit = _published(store, 0)["revision"]
        _publish(dataclasses.replace(model, revision=commit), fetch, store, rank)
    folder = Path(_published(store, first_here)["folder"])
    store.add(_READY, 1)
    while store.add(_READY, 0) < world_size:
        _raise_failure(store)
        time.sleep(_LOOK_EVERY_S)
    return folder


def _publish(model: HubModel, fetch: Callable[[HubModel], Path], store: Store, rank: int) -> None:
    try:
        folder = fetch(model)
    except CheckpointError as error:
        store.set(_FAILURE, str(error))
        store.set(str(rank), json.dumps(None))
    else:
        store.set(str(rank), json.dumps({"folder": str(folder), "revision": folder.name}))


def _published(store: Store, rank: int) -> Mapping[str, Any]:
    while not store.check([str(rank)]):
        _raise_failure(store)
        time.sleep(_LOOK_EVERY_S)
    _raise_failure(store)
    values: Mapping[str, Any] = json.loads(store.get(str(rank)))
    return values


def _raise_failure(store: Store) -> None:
    if store.check([_FAILURE]):
        raise CheckpointError(store.get(_FAILURE).decode())
