"""Artifacts of OCI registries, as `oras push` and container builds make them.

oras logs in and speaks the protocol; its own `pull` neither checks the digests of blobs nor
resumes, so the blobs are fetched like any other file here. Credentials come from
~/.docker/config.json.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import oras.container
import oras.provider
import requests

from edge_server.errors import ModelConfigError, SettingsError, Unavailable
from edge_server.repository.remote.https import (
    NOT_ENCRYPTED,
    TIMEOUT_S,
    body_of,
    only_encrypted,
    range_headers,
)
from edge_server.repository.remote.origin import Body, ConnectionCut, Origin, RemoteFile, small_file

if TYPE_CHECKING:
    from collections.abc import Mapping

_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_TITLE = "org.opencontainers.image.title"
_UNPACK = "io.deis.oras.content.unpack"

# oras repeats whatever has failed for two minutes, in silence; `download` has its own attempts.
_request_once = oras.provider.Registry.do_request.__wrapped__


class _WithTimeout(requests.adapters.HTTPAdapter):  # type: ignore[misc]  # requests is untyped
    """oras waits for ever."""

    def send(self, request: Any, **how: Any) -> Any:
        return super().send(request, **{**how, "timeout": how.get("timeout") or TIMEOUT_S})


class _Registry:
    """One repository of a registry."""

    def __init__(self, reference: str) -> None:
        self._container = oras.container.Container(reference)
        self._registry = oras.provider.Registry(self._container.registry)
        self._registry.session.mount("https://", _WithTimeout())
        only_encrypted(self._registry.session)
        self._registry.auth.load_configs(self._container)
        self.close = self._registry.session.close

    @property
    def name(self) -> str:
        return str(self._container.repository).rpartition("/")[2]

    @property
    def digest(self) -> str:
        return str(self._container.digest or "")

    def manifest(self, offset: int, tag: str) -> Body:
        headers = {"Accept": ", ".join(_MANIFESTS), **range_headers(offset, tag)}
        return self._get(self._container.manifest_url(), headers, offset)

    def blob(self, digest: str, offset: int, tag: str) -> Body:
        # A blob's digest names its content; no other tag is needed.
        del tag
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        body = self._get(self._container.get_blob_url(digest), headers, offset)
        return Body(body.offset, digest, body.size, body.pieces)

    def _get(self, path: str, headers: dict[str, str], offset: int) -> Body:
        url = f"https://{path}"
        try:
            response = _request_once(
                self._registry,
                url,
                headers={"Accept-Encoding": "identity", **headers},
                stream=True,
            )
        except requests.exceptions.SSLError as error:
            raise Unavailable(f"{url}: its certificate is not trusted: {error}") from error
        except requests.exceptions.InvalidSchema as error:
            raise Unavailable(f"{url}: {NOT_ENCRYPTED}") from error
        except requests.RequestException as error:
            raise ConnectionCut(f"cannot be reached: {error}") from error
        except ValueError as error:
            raise Unavailable(f"{url}: {error}; `docker login` stores credentials") from error
        return body_of(response, url, offset)


def open_origin(url: str, sha256: str) -> Origin:
    """Return the layers of the artifact at `url`. Raises: see `origin.open_origin`."""
    reference = url.removeprefix("oci://")
    try:
        registry = _Registry(reference)
    except ValueError as error:
        raise SettingsError(f"{url}: {error}; give it as oci://REGISTRY/REPOSITORY:TAG") from error
    try:
        return _artifact(registry, url, sha256)
    except BaseException:
        registry.close()
        raise


def _artifact(registry: _Registry, url: str, sha256: str) -> Origin:
    data = small_file(registry.manifest, url)
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    for wanted in (registry.digest, f"sha256:{sha256}" if sha256 else ""):
        if wanted and wanted != found:
            raise ModelConfigError(f"{url}: its manifest has {found}, not {wanted}")
    try:
        manifest = json.loads(data)
        layers = [_layer(registry, layer, url) for layer in manifest["layers"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelConfigError(
            f"{url}: is no image manifest ({error}); of an index of several platforms, give the "
            "digest of one"
        ) from error
    return Origin(registry.name, tuple(layers), registry.close)


def _layer(registry: _Registry, layer: Mapping[str, Any], url: str) -> RemoteFile:
    algorithm, _, digest = str(layer["digest"]).partition(":")
    if algorithm != "sha256" or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ModelConfigError(f"{url}: a layer has digest {layer['digest']}; only sha256 is known")
    annotations = layer.get("annotations") or {}
    title = str(annotations.get(_TITLE, ""))
    # A single file has the media type of a tar, too; a directory's is compressed.
    unpack = (
        annotations.get(_UNPACK) == "true"
        or not title
        or str(layer.get("mediaType", "")).endswith("gzip")
    )
    fetch = partial(registry.blob, f"sha256:{digest}")
    return RemoteFile(title or f"{digest[:12]}.tar", digest, int(layer["size"]), fetch, unpack)
