"""`edge-server models pull URL`: fetches a model, checks it, and places it as a push does."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_server.cli.models.push import pack
from edge_server.errors import InternalError, ModelConfigError
from edge_server.process.disk import cache_directory
from edge_server.repository.manifest import ABOUT_CONTENT, NAME
from edge_server.repository.remote import archive_entries, open_origin
from edge_server.repository.remote_files import download
from edge_server.repository.scan import NAME_RULE, is_model_name
from edge_server.repository.transfer import Entry, receive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from edge_server.repository.remote import Origin
    from edge_server.repository.remote_files import RemoteFile
    from edge_server.repository.transfer import Delivery


def pull_url(
    url: str,
    directory: Path,
    progress: Callable[[int], None],
    *,
    name: str,
    sha256: str,
) -> Delivery:
    """Place the model at `url` in the repository `directory`, under its name.

    What is fetched lies below the user's cache directory until the model is in place, so that
    another pull goes on where this one ends. The repository never holds half of a model.

    Args:
        url: see `open_origin`.
        directory: of the repository; made if it is missing.
        progress: called with numbers of bytes.
        name: the model's name here; by default the origin's.
        sha256: of the archive or the manifest.

    Raises:
        ModelConfigError: the content is not as its digest says, or no model that loads.
        EdgeServerError: the origin cannot be reached, or `directory` refuses the model.
    """
    with closing(open_origin(url, sha256)) as origin:
        return _pull(origin, url, directory, progress, name=name, sha256=sha256)


def _pull(
    origin: Origin,
    url: str,
    directory: Path,
    progress: Callable[[int], None],
    *,
    name: str,
    sha256: str,
) -> Delivery:
    model = name or origin.name
    if not is_model_name(model):
        raise ModelConfigError(f"{url}: '{model[:200]}' is no model's name: {NAME_RULE}; --name N")
    cache = _cache(url, sha256)
    fetched = cache / "fetched"
    try:
        fetched.mkdir(parents=True, exist_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InternalError(f"{error.filename}: cannot be made: {error.strerror}") from error
    # One file each, by number: a path of the origin's means nothing here yet.
    paths = {file: fetched / f"{i}-{file.sha256}" for i, file in enumerate(origin.files)}
    for file, path in paths.items():
        download(file, path, progress)
    unpacked = cache / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir()
    # A manifest names its model; under another name a new one is made.
    receive(unpacked, _entries(origin, paths, keep_manifest=model == origin.name), model)
    package = pack(unpacked / model)
    done = receive(directory, package.entries())
    shutil.rmtree(cache, ignore_errors=True)
    return replace(done, note=package.note) if package.note else done


def _entries(
    origin: Origin, paths: dict[RemoteFile, Path], *, keep_manifest: bool
) -> Iterator[Entry]:
    for file in sorted(origin.files, key=lambda each: each.path != NAME):
        if file.unpack:
            for entry in archive_entries(paths[file]):
                if keep_manifest or entry.path not in ABOUT_CONTENT:
                    yield entry
        elif keep_manifest or file.path not in ABOUT_CONTENT:
            status = paths[file].stat()
            with paths[file].open("rb") as data:
                yield Entry(file.path, data.read, status.st_size, status.st_mtime_ns)


def _cache(url: str, sha256: str) -> Path:
    """Return the directory of this pull, below the user's cache directory."""
    digest = hashlib.sha256(f"{url}\n{sha256}".encode()).hexdigest()[:16]
    return cache_directory() / "pull" / digest
