"""What is behind a URL: the files of a model, or archives that hold them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from edge_server.board.installation import remedy
from edge_server.errors import ModelConfigError, NotFound, SettingsError, Unavailable
from edge_server.repository.manifest import (
    ABOUT_CONTENT,
    MOST_BYTES,
    NAME,
    SIGNATURE_NAME,
    Manifest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".zip")
_MODULES = {"https": "https", "s3": "s3", "oci": "oci"}


class ConnectionCut(Exception):
    """The connection broke, or the server is busy: the next attempt may go on from there."""


@dataclass(frozen=True)
class Body:
    """The response to a request for a file, or for the rest of one.

    Attributes:
        offset: where the first byte of `pieces` belongs; 0 if the server begins anew.
        tag: names the content; a request for the rest is refused if the content is another now.
        size: of the whole file in bytes; None if the server does not say.
        pieces: the bytes. Raises ConnectionCut.
    """

    offset: int
    tag: str
    size: int | None
    pieces: Iterator[bytes]


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be fetched.

    Attributes:
        path: in the model; of an archive its own name.
        sha256: of its content, in hexadecimal.
        size: in bytes; None if not known before.
        open: requests the bytes from an offset on, of the content with a tag. Raises
            ConnectionCut, and EdgeServerError where another attempt does not help.
        unpack: it is an archive.
    """

    path: str
    sha256: str
    size: int | None
    open: Callable[[int, str], Body]
    unpack: bool = False


@dataclass(frozen=True)
class Origin:
    """A model elsewhere.

    Attributes:
        name: the model, as the origin calls it.
        files: all of it.
        close: closes the connections.
    """

    name: str
    files: tuple[RemoteFile, ...]
    close: Callable[[], object]


class Store(Protocol):
    """A place that has files by name."""

    def close(self) -> object: ...

    def open(self, path: str, offset: int, tag: str) -> Body: ...

    def sha256(self, path: str) -> str:
        """Return the digest that the store itself keeps of a file; empty without."""


def is_remote(text: str) -> bool:
    """Return whether `text` is a URL, and no model's name."""
    return "://" in text


def open_origin(url: str, sha256: str) -> Origin:
    """Return what is behind `url`.

    Args:
        url: `s3://BUCKET/KEY`, `https://HOST/PATH` or `oci://REGISTRY/REPOSITORY[:TAG|@DIGEST]`.
            One that ends with `/` is a directory with a manifest, any other of the first two an
            archive.
        sha256: of the archive or of the manifest, in hexadecimal; empty without.

    Raises:
        SettingsError: the URL is wrong, or nothing says what the digest of the content is.
        ModelConfigError: the manifest is not as its digest says, or is none.
        Unavailable: the place cannot be reached, or its library is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme not in _MODULES or not parts.netloc:
        raise SettingsError(
            f"{url}: give it as s3://BUCKET/KEY, https://HOST/PATH or oci://REGISTRY/REPOSITORY:TAG"
        )
    if parts.username or parts.password:
        raise SettingsError(
            f"{parts.scheme}://…@{parts.hostname}: no password in a URL, which others can read; "
            "the store's own files have it (~/.netrc, ~/.aws/credentials, ~/.docker/config.json)"
        )
    try:
        module = import_module(f"edge_server.repository.remote.{_MODULES[parts.scheme]}")
    except ImportError as error:
        raise Unavailable(
            f"{url}: {error.name} is not installed; {remedy(error.name or '')}"
        ) from error
    if parts.scheme == "oci":
        origin: Origin = module.open_origin(url, sha256)
        return origin
    store: Store = module.open_store(url)
    path = parts.path.lstrip("/")
    try:
        return (_directory if path.endswith("/") else _archive)(store, path, url, sha256)
    except BaseException:
        store.close()
        raise


def _archive(store: Store, path: str, url: str, sha256: str) -> Origin:
    file = path.rpartition("/")[2]
    suffix = next((s for s in sorted(ARCHIVES, key=len)[::-1] if file.endswith(s)), None)
    if suffix is None:
        raise SettingsError(
            f"{url}: neither an archive ({', '.join(ARCHIVES)}) nor a directory, which ends with /"
        )
    digest = sha256 or store.sha256(path)
    if not digest:
        raise SettingsError(
            f"{url}: nothing says what its content should be; give --sha256 with the digest that "
            "its maker publishes"
        )
    name = file.removesuffix(suffix)
    one = RemoteFile(file, digest, None, partial(store.open, path), unpack=True)
    return Origin(name, (one,), store.close)


def _directory(store: Store, path: str, url: str, sha256: str) -> Origin:
    data = small_file(partial(store.open, path + NAME), f"{url}{NAME}")
    if sha256 and (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise ModelConfigError(f"{url}{NAME}: has sha256 {found}, not {sha256}; nothing was taken")
    manifest = Manifest.parse(data)

    def remote(name: str) -> RemoteFile:
        file = manifest.files[name]
        return RemoteFile(name, file.sha256, file.size, partial(store.open, path + name))

    files = [remote(name) for name in sorted(manifest.files) if name not in ABOUT_CONTENT]
    digest = hashlib.sha256(data).hexdigest()
    about = RemoteFile(NAME, digest, len(data), partial(store.open, path + NAME))
    return Origin(manifest.model, (about, *_signature(store, path, url), *files), store.close)


def _signature(store: Store, path: str, url: str) -> list[RemoteFile]:
    """Return the signature of the manifest, if there is one; a daemon that wants it checks it."""
    file = path + SIGNATURE_NAME
    try:
        data = small_file(partial(store.open, file), f"{url}{SIGNATURE_NAME}")
    except NotFound:
        return []
    digest = hashlib.sha256(data).hexdigest()
    fetch = partial(store.open, file)
    return [RemoteFile(SIGNATURE_NAME, digest, len(data), fetch)]


def small_file(fetch: Callable[[int, str], Body], what: str) -> bytes:
    """Return the whole file that `fetch` opens, at most as long as a manifest may be.

    Raises:
        ModelConfigError: it is longer.
        Unavailable: the connection broke.
    """
    data = bytearray()
    try:
        for piece in fetch(0, "").pieces:
            data += piece
            if len(data) > MOST_BYTES:
                raise ModelConfigError(
                    f"{what}: more than {MOST_BYTES >> 20} MiB; is it a manifest?"
                )
    except ConnectionCut as error:
        raise Unavailable(f"{what}: {error}; try again") from error
    return bytes(data)
