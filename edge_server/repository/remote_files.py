"""Files on HTTPS servers, in S3 and in OCI registries; downloads that resume.

Credentials come from where the libraries look for them: `requests` reads ~/.netrc, proxies and
authorities from the environment; boto3 the environment and ~/.aws, AWS_ENDPOINT_URL for another
store included; oras ~/.docker/config.json. They are imported late: they are slow to import, and
may be missing.
"""

from __future__ import annotations

import base64
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Any

from edge_server.errors import ModelConfigError, NotFound, SettingsError, Unavailable
from edge_server.process.disk import file_sha256
from edge_server.process.threads import Backoff
from edge_server.repository.scan import MOST_BYTES
from edge_server.repository.transfer import writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

# The part of a piece that has come when the connection breaks is lost.
_PIECE_BYTES = 1 << 16
_LONGEST_NUMBER = 20
# Connect, and read: a server that sends nothing for that long counts as gone.
_TIMEOUT_S = (10.0, 60.0)
# Of a redirect, or of a registry's login.
_MOST_SMALL_BYTES = 1 << 20
_S3_NOT_FOUND = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}
_S3_REFUSED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_S3_CHANGED = {"412", "PreconditionFailed", "InvalidRange"}
# Downloads end after so many attempts in a row that brought nothing.
_MOST_ATTEMPTS = 5


class ConnectionCut(Exception):
    """The connection broke, or the server is busy: the next attempt may go on from there."""


@dataclass(frozen=True)
class Body:
    """The response to a request for a file, or for the rest of one.

    Attributes:
        offset: where the first byte of `pieces` belongs; 0 if the server begins anew.
        tag: names the content; a request for the rest is refused if the content is another now.
        size: of the whole file; None if the server does not say.
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
        size: in bytes; None if not known before.
        open: requests the bytes from an offset on, of the content with a tag. Raises
            ConnectionCut, and EdgeServerError where another attempt does not help.
    """

    path: str
    sha256: str
    size: int | None
    open: Callable[[int, str], Body]
    unpack: bool = False


class HttpsStore:
    """The files below `root`, as `https://HOST`."""

    def __init__(self, root: str, ca_file: str | None = None) -> None:
        self._root = root
        # Given with each request, it counts before REQUESTS_CA_BUNDLE.
        self._verify = ca_file or True
        self._session = _https_session()
        self.close = self._session.close

    def open(self, path: str, offset: int, tag: str) -> Body:
        headers = {"Range": f"bytes={offset}-", "If-Range": tag} if offset and tag else {}
        return self._body(f"{self._root}/{path}", offset, headers)

    def sha256(self, path: str) -> str:  # noqa: ARG002 - a server keeps none
        """Return the digest that the store itself keeps of a file; empty without."""
        return ""

    def _body(self, url: str, offset: int, headers: Mapping[str, str]) -> Body:
        """Return the body of the file at `url`, from `offset` if the server grants that."""
        with _requesting(url):
            # As it is stored: offsets count stored bytes.
            response = self._get(url, {"Accept-Encoding": "identity", **headers})
        status = response.status_code
        text = f"{status} {response.reason}"
        if status in (408, 425, 429) or status >= 500:
            response.close()
            raise ConnectionCut(f"the server responds {text}")
        if status in (401, 403):
            raise Unavailable(f"{url}: {text}; the server wants other credentials")
        if status in (404, 410):
            raise NotFound(f"{url}: {text}")
        # A weak tag may name other bytes; If-Range takes a strong one, or a time.
        tag = response.headers.get("ETag", "")
        if not tag or tag.startswith("W/"):
            tag = response.headers.get("Last-Modified", "")
        content_range = response.headers.get("Content-Range", "")
        if status == 416 and offset:
            response.close()
            if content_range != f"bytes */{offset}":
                return self._body(url, 0, {})
            # Nothing is left to send: the last pull ended between its last byte and the check.
            return Body(offset, tag, offset, iter(()))
        first = _number(content_range.removeprefix("bytes ").partition("-")[0])
        resumed = status == 206 and first == offset
        if status != 200 and not resumed:
            raise ModelConfigError(f"{url}: the server responds {text}")
        begin = offset if resumed else 0
        length = _number(response.headers.get("Content-Length", ""))
        return Body(begin, tag, None if length is None else begin + length, _http_pieces(response))

    def _get(self, url: str, headers: dict[str, str]) -> Any:
        return self._session.get(url, headers=headers, stream=True, verify=self._verify)


class OciRepository(HttpsStore):
    """One repository of an OCI registry; ValueError where `reference` is none.

    oras parses the reference and logs in. Its own `pull` neither checks the digests of blobs nor
    resumes, so the blobs are fetched like any other file here."""

    def __init__(self, reference: str, ca_file: str | None = None) -> None:
        import oras.auth  # noqa: PLC0415 - see above
        import oras.container  # noqa: PLC0415 - see above

        self._container = oras.container.Container(reference)
        self.name = str(self._container.repository).rpartition("/")[2]
        self.digest = str(self._container.digest or "")
        super().__init__("", ca_file)
        # A registry that sets a cookie expects the further requests of a browser.
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self._auth = oras.auth.get_auth_backend("token", self._session, tls_verify=self._verify)
        self._auth.load_configs(self._container)

    def manifest(self, media_types: str) -> Body:
        return self._body(f"https://{self._container.manifest_url()}", 0, {"Accept": media_types})

    def blob(self, digest: str, offset: int, tag: str) -> Body:
        del tag  # the digest names the content
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        body = self._body(f"https://{self._container.get_blob_url(digest)}", offset, headers)
        return replace(body, tag=digest)

    def _get(self, url: str, headers: dict[str, str]) -> Any:
        response = super()._get(url, {**headers, **self._auth.get_auth_header()})
        if response.status_code not in (401, 403):
            return response
        headers, is_changed = self._login(url, response, headers)
        if not is_changed:
            raise Unavailable(
                f"{url}: Cannot respond to request for authentication.; `docker login` stores "
                "credentials"
            )
        response = super()._get(url, headers)
        if response.status_code in (401, 403):  # the token may have expired
            headers, _ = self._login(url, response, headers, refresh=True)
            response = super()._get(url, headers)
        return response

    def _login(self, url: str, response: Any, headers: dict[str, str], **how: bool) -> Any:
        import requests  # noqa: PLC0415 - see above

        try:
            return self._auth.authenticate_request(response, headers, **how)
        except requests.RequestException:
            raise
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            # oras takes both as they come.
            raise Unavailable(
                f"{url}: neither asks for a login nor gives a token as registries do: {error}"
            ) from error


@contextmanager
def oci_client(source: str) -> Iterator[Any]:
    """Yield oras' client, which sends artifacts; Unavailable where the registry refuses them."""
    import oras.client  # noqa: PLC0415 - see above
    import requests  # noqa: PLC0415 - see above

    client = oras.client.OrasClient()
    try:
        yield client
    except (ValueError, requests.RequestException) as error:
        raise Unavailable(f"{source}: does not accept it: {error}") from error
    finally:
        client.session.close()


class S3Store:
    """The objects of one bucket. Raises: SettingsError: the configuration of AWS is wrong."""

    def __init__(self, bucket: str) -> None:
        import boto3  # noqa: PLC0415 - see above
        import botocore.config  # noqa: PLC0415 - see above
        import botocore.exceptions  # noqa: PLC0415 - see above

        self._bucket = bucket
        self._exceptions: Any = botocore.exceptions
        connect_s, read_s = _TIMEOUT_S
        # `download` retries itself, from where the last attempt ended.
        config = botocore.config.Config(
            retries={"total_max_attempts": 2}, connect_timeout=connect_s, read_timeout=read_s
        )
        try:
            self._client = boto3.client("s3", config=config)
        except botocore.exceptions.BotoCoreError as error:
            raise SettingsError(f"s3://{bucket}: {error}; see ~/.aws/config") from error
        self.close = self._client.close

    def open(self, path: str, offset: int, tag: str) -> Body:
        resumes = offset > 0 and bool(tag)
        how = {"Range": f"bytes={offset}-", "IfMatch": tag} if resumes else {}
        found = self._request(self._client.get_object, path, **how)
        if found is None:  # another object by now: from its beginning
            return self.open(path, 0, "")
        begin = offset if resumes else 0
        size = begin + int(found["ContentLength"])
        return Body(begin, found.get("ETag", ""), size, self._pieces(found["Body"]))

    def sha256(self, path: str) -> str:
        """Return the digest that the uploader has had S3 keep; none of an upload in parts."""
        found = self._request(self._client.head_object, path, ChecksumMode="ENABLED") or {}
        text = found.get("ChecksumSHA256", "")
        is_whole = found.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and "-" not in text
        return base64.b64decode(text).hex() if text and is_whole else ""

    def _request(self, call: Any, path: str, **how: Any) -> dict[str, Any] | None:
        """Return the response for the object at `path`; None if it is not the one of `how`."""
        where = f"s3://{self._bucket}/{path}"
        try:
            found: dict[str, Any] = call(Bucket=self._bucket, Key=path, **how)
        except self._exceptions.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in _S3_CHANGED and how:
                return None
            if code in _S3_NOT_FOUND:
                raise NotFound(f"{where}: {code}") from error
            if code in _S3_REFUSED:
                raise Unavailable(f"{where}: {error}; see ~/.aws/credentials") from error
            raise ConnectionCut(str(error)) from error
        except self._exceptions.NoCredentialsError as error:
            raise Unavailable(
                f"{where}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write "
                "~/.aws/credentials"
            ) from error
        except self._exceptions.BotoCoreError as error:
            raise ConnectionCut(f"cannot be reached: {error}") from error
        return found

    def _pieces(self, stream: Any) -> Iterator[bytes]:
        import urllib3  # noqa: PLC0415 - see above

        # botocore lets errors of urllib3 through for some ends of a connection.
        broken = (self._exceptions.BotoCoreError, urllib3.exceptions.HTTPError, OSError)
        try:
            yield from stream.iter_chunks(_PIECE_BYTES)
        except broken as error:
            raise ConnectionCut(f"the connection broke: {error}") from error


def download(
    file: RemoteFile,
    target: Path,
    progress: Callable[[int], object],
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Return once `target` holds the content of `file`, checked against its digest; it is complete
    if it exists. What has come lies in `.part` beside it, across attempts and processes.

    Raises:
        ModelConfigError: the content has another digest, or is larger than it may be; nothing of
            it is kept.
        Unavailable: the connection breaks again and again; what has come is kept.
    """
    if target.exists():
        return
    part, tag_file = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.tag")
    backoff = Backoff(0.5, 8.0)
    left = _MOST_ATTEMPTS
    while True:
        before = _size_bytes(part)
        try:
            _fetch(file, part, tag_file, progress)
            break
        except ConnectionCut as error:
            now = _size_bytes(part)
            left = _MOST_ATTEMPTS if now > before else left - 1
            if now > before:
                backoff.reset()
            if not left:
                raise Unavailable(
                    f"{file.path}: {error}; {now} bytes are kept, the next pull goes on there"
                ) from error
            sleep(backoff.next_s())
    found = file_sha256(part)
    if found != file.sha256:
        part.unlink()
        raise ModelConfigError(
            f"{file.path}: has sha256 {found}, not {file.sha256}; nothing of it was taken"
        )
    with writing(part):
        part.rename(target)
        tag_file.unlink(missing_ok=True)


def _fetch(file: RemoteFile, part: Path, tag_file: Path, progress: Callable[[int], object]) -> None:
    most = MOST_BYTES if file.size is None else file.size
    offset = _size_bytes(part)
    if file.size is not None and offset == file.size:
        return
    tag = tag_file.read_text() if offset and tag_file.exists() else ""
    body = file.open(offset if tag else 0, tag)
    size = body.size
    if size is not None and size > most:
        raise ModelConfigError(f"{file.path}: has {size} bytes, more than {most}")
    with writing(part):
        if shutil.disk_usage(part.parent).free < (size or 0) - body.offset:
            raise Unavailable(
                f"{part.parent}: no space for {size} bytes; free some, or set XDG_CACHE_HOME to a "
                "directory on another disk"
            )
        tag_file.write_text(body.tag)
        with part.open("r+b" if body.offset else "wb") as out:
            out.seek(body.offset)
            out.truncate()
            at = body.offset
            for piece in body.pieces:
                at += len(piece)
                if at > most:
                    out.truncate(0)
                    raise ModelConfigError(f"{file.path}: more than {most} bytes came")
                out.write(piece)
                progress(len(piece))
    if size is not None and at < size:
        raise ConnectionCut(f"the connection ended at byte {at} of {size}")


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _https_session() -> Any:
    """Return a session that requests https:// only, redirects included, and never waits forever."""
    import requests  # noqa: PLC0415 - see above

    class WithTimeout(requests.adapters.HTTPAdapter):  # type: ignore[misc]  # requests is untyped
        def send(self, request: Any, **how: Any) -> Any:
            return super().send(request, **{**how, "timeout": how.get("timeout") or _TIMEOUT_S})

    def bound(response: Any, *, stream: bool = False, **_: Any) -> None:
        if response.is_redirect or not stream:
            response.raw = _Small(response.raw)

    session = requests.Session()
    session.mount("https://", WithTimeout())
    session.headers["Accept-Encoding"] = "identity"
    session.hooks["response"].append(bound)
    # A request to another address could carry credentials.
    del session.adapters["http://"]
    return session


class _Small:
    """The body of a response that `requests` reads whole; a longer one raises ConnectionError."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def stream(self, amt: int, **_: Any) -> Iterator[bytes]:
        import requests  # noqa: PLC0415 - see above

        left = _MOST_SMALL_BYTES
        for piece in self._raw.stream(amt, decode_content=False):
            left -= len(piece)
            if left < 0:
                raise requests.ConnectionError(
                    f"a redirect or a login of more than {_MOST_SMALL_BYTES >> 20} MiB"
                )
            yield piece

    def read(self, *_: Any, **__: Any) -> bytes:
        """Return nothing: what follows a broken piece is left."""
        return b""


@contextmanager
def _requesting(url: str) -> Iterator[None]:
    import requests  # noqa: PLC0415 - see above

    try:
        yield
    except requests.exceptions.SSLError as error:
        raise Unavailable(f"{url}: its certificate is not trusted: {error}") from error
    except requests.exceptions.InvalidSchema as error:
        raise Unavailable(
            f"{url}: redirects to an address that is not https://; ask its maker for one that is"
        ) from error
    except requests.RequestException as error:
        raise ConnectionCut(f"cannot be reached: {error}") from error


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < _LONGEST_NUMBER else None


def _http_pieces(response: Any) -> Iterator[bytes]:
    import urllib3  # noqa: PLC0415 - see above

    # As it is stored, also where the server calls that an encoding, as some do of .tar.gz.
    try:
        with response:
            yield from response.raw.stream(_PIECE_BYTES, decode_content=False)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ConnectionCut(f"the connection broke: {error}") from error
