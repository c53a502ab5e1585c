"""Files of an HTTPS server. Credentials come from ~/.netrc, proxies and authorities from the
environment, as `requests` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
import urllib3

from edge_server.errors import ModelConfigError, NotFound, Unavailable
from edge_server.repository.remote.origin import Body, ConnectionCut

if TYPE_CHECKING:
    from collections.abc import Iterator

# What of a piece has come when the connection breaks is lost.
PIECE_BYTES = 1 << 16
_LONGEST_NUMBER = 20
# Connect, and read: a server that sends nothing for that long counts as gone.
TIMEOUT_S = (10.0, 60.0)
NOT_ENCRYPTED = "redirects to an address that is not https://; ask its maker for one that is"


class HttpsStore:
    """The files below `https://HOST/`."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._session = requests.Session()
        only_encrypted(self._session)
        self.close = self._session.close

    def open(self, path: str, offset: int, tag: str) -> Body:
        url = f"{self._root}/{path}"
        # As it is stored: offsets count stored bytes.
        headers = {"Accept-Encoding": "identity", **range_headers(offset, tag)}
        try:
            response = self._session.get(url, headers=headers, stream=True, timeout=TIMEOUT_S)
        except requests.exceptions.SSLError as error:
            raise Unavailable(f"{url}: its certificate is not trusted: {error}") from error
        except requests.exceptions.InvalidSchema as error:
            raise Unavailable(f"{url}: {NOT_ENCRYPTED}") from error
        except requests.RequestException as error:
            raise ConnectionCut(f"cannot be reached: {error}") from error
        if response.status_code == 416 and offset and not _ends_at(response, offset):
            response.close()
            return self.open(path, 0, "")
        return body_of(response, url, offset)

    def sha256(self, path: str) -> str:  # noqa: ARG002 - a server keeps none
        return ""


def open_store(url: str) -> HttpsStore:
    """Return the store of `url`; nothing is requested yet."""
    return HttpsStore(f"https://{urlsplit(url).netloc}")


def only_encrypted(session: requests.Session) -> None:
    """Have `session` refuse any address but https://, also one that a server leads to: the request
    itself could carry credentials."""
    del session.adapters["http://"]


def range_headers(offset: int, tag: str) -> dict[str, str]:
    """Return the headers of a request for the rest of the content with `tag`."""
    if not offset or not tag:
        return {}
    return {"Range": f"bytes={offset}-", "If-Range": tag}


def body_of(response: Any, url: str, offset: int) -> Body:
    """Return the body of a response, from `offset` if the server has granted that.

    Raises:
        ConnectionCut: the server is busy.
        NotFound, Unavailable, ModelConfigError: another attempt does not help.
    """
    status = response.status_code
    if status in (408, 425, 429) or status >= 500:
        response.close()
        raise ConnectionCut(f"the server responds {status} {response.reason}")
    if status in (401, 403):
        raise Unavailable(f"{url}: {status} {response.reason}; the server wants other credentials")
    if status in (404, 410):
        raise NotFound(f"{url}: {status} {response.reason}")
    tag = _tag(response)
    if status == 416 and _ends_at(response, offset):
        # Nothing is left to send: the last pull ended between its last byte and the check.
        response.close()
        return Body(offset, tag, offset, iter(()))
    resumed = status == 206 and _first_byte(response) == offset
    if status != 200 and not resumed:
        raise ModelConfigError(f"{url}: the server responds {status} {response.reason}")
    length = response.headers.get("Content-Length", "")
    begin = offset if resumed else 0
    size = begin + int(length) if length.isdecimal() and len(length) < _LONGEST_NUMBER else None
    return Body(begin, tag, size, _pieces(response))


def _tag(response: Any) -> str:
    # A weak tag may name other bytes; If-Range takes a strong one, or a time.
    tag = response.headers.get("ETag", "")
    if not tag or tag.startswith("W/"):
        tag = response.headers.get("Last-Modified", "")
    return str(tag)


def _ends_at(response: Any, offset: int) -> bool:
    return bool(offset and response.headers.get("Content-Range") == f"bytes */{offset}")


def _first_byte(response: Any) -> int:
    first = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdecimal() and len(first) < _LONGEST_NUMBER else -1


def _pieces(response: Any) -> Iterator[bytes]:
    # As it is stored, also where the server calls that an encoding, as some do of .tar.gz.
    try:
        with response:
            yield from response.raw.stream(PIECE_BYTES, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ConnectionCut(f"the connection broke: {error}") from error
