"""`pb_utils.load_model` and related functions: query, load and unload other models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edge_server.backends.python.arena import ArenaFull
from edge_server.backends.python.child.errors import TritonModelException
from edge_server.backends.python.child.given import text
from edge_server.backends.python.child.link import daemon
from edge_server.backends.python.messages import AskModelReady, LoadModel, UnloadModel
from edge_server.backends.python.packing import pack_for_daemon, take_back
from edge_server.tensors import DataType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.backends.python.messages import Message
    from edge_server.backends.python.packing import Content


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether that model, or its highest version, is ready.

    Raises:
        TritonModelException: the version is no number.
    """
    name, version = text(model_name, "model_name"), text(model_version, "model_version")
    return bool(_ask("is_model_ready", lambda call: AskModelReady(call, name, version)))


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model; return when the load is complete.

    The duration counts towards the time limit of `initialize` or `execute`.

    Args:
        config: a ModelConfig in protobuf's JSON form, instead of the one on disk.
        files: `file:<version>/<name>` → content, instead of the model's directory; with `config`.

    Raises:
        TritonModelException: the load failed, or the caller is `auto_complete_config` or
            `finalize`.
    """
    name, override = text(model_name, "model_name"), text(config, "config")
    link = daemon()
    contents = _contents(name, files)
    try:
        places = pack_for_daemon(contents, link.outbox)
    except ArenaFull as error:
        raise TritonModelException(
            f"the files for model '{name}': {error}; parameter 'shared_memory_limit_mib' allows "
            "more"
        ) from None
    try:
        _ask("load_model", lambda call: LoadModel(call, name, override, places))
    except TritonModelException:
        raise
    except BaseException:
        take_back(places, link.outbox)
        raise


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Stop new requests to a model; return at once, requests in flight finish.

    Raises:
        TritonModelException: the server does not allow unloading, or the caller is
            `auto_complete_config` or `finalize`.
    """
    name, dependents = text(model_name, "model_name"), bool(unload_dependents)
    _ask("unload_model", lambda call: UnloadModel(call, name, dependents))


def _ask(what: str, message: Callable[[int], Message]) -> float:
    link = daemon()
    if not link.may_load:
        raise TritonModelException(
            f"{what} works in 'initialize' and 'execute', not in 'auto_complete_config' and "
            "'finalize'"
        )
    returned = link.ask(message)
    if returned.failure:
        raise TritonModelException(returned.failure)
    return returned.value


def _contents(model_name: str, files: Any) -> list[Content]:
    if files is None:
        return []
    if not isinstance(files, dict):
        # Triton's text.
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and "
            "file contents"
        )
    contents: list[Content] = []
    for key, content in files.items():
        path = text(key, "a key of files")
        if not isinstance(content, bytes):
            raise TypeError(f"files['{path}'] must be bytes, found type '{type(content)}'")
        contents.append((path, DataType.UINT8, np.frombuffer(content, np.uint8)))
    return contents
