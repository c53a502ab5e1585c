"""Objects of S3 and of stores that speak its protocol. Credentials, region and endpoint come from
the environment and ~/.aws, as boto3 reads them (AWS_ENDPOINT_URL names another store)."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions

from edge_server.errors import NotFound, SettingsError, Unavailable
from edge_server.repository.remote.origin import Body, ConnectionCut

if TYPE_CHECKING:
    from collections.abc import Iterator

# What of a piece has come when the connection breaks is lost.
_PIECE_BYTES = 1 << 16
_NOT_FOUND = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}
_REFUSED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_CHANGED = {"412", "PreconditionFailed", "InvalidRange"}


class S3Store:
    """The objects of one bucket."""

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket
        # The download has retries of its own, which go on where the last one ended.
        config = botocore.config.Config(
            retries={"total_max_attempts": 2}, connect_timeout=10, read_timeout=60
        )
        try:
            self._client = boto3.client("s3", config=config)
        except botocore.exceptions.BotoCoreError as error:
            raise SettingsError(f"s3://{bucket}: {error}; see ~/.aws/config") from error
        self.close = self._client.close

    def open(self, path: str, offset: int, tag: str) -> Body:
        resumes = offset > 0 and bool(tag)
        how = {"Range": f"bytes={offset}-", "IfMatch": tag} if resumes else {}
        try:
            found = self._request(self._client.get_object, Bucket=self._bucket, Key=path, **how)
        except _Changed:
            # Another object by now: from its beginning.
            return self.open(path, 0, "")
        begin = offset if resumes else 0
        size = begin + int(found["ContentLength"])
        return Body(begin, found.get("ETag", ""), size, _pieces(found["Body"]))

    def sha256(self, path: str) -> str:
        """The digest that the uploader has had S3 keep; none of an upload in parts."""
        found = self._request(
            self._client.head_object, Bucket=self._bucket, Key=path, ChecksumMode="ENABLED"
        )
        text = found.get("ChecksumSHA256", "")
        is_whole = found.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT" and "-" not in text
        return base64.b64decode(text).hex() if text and is_whole else ""

    def _request(self, call: Any, **how: Any) -> dict[str, Any]:
        where = f"s3://{how['Bucket']}/{how['Key']}"
        try:
            found: dict[str, Any] = call(**how)
        except botocore.exceptions.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in _CHANGED:
                raise _Changed from error
            if code in _NOT_FOUND:
                raise NotFound(f"{where}: {code}") from error
            if code in _REFUSED:
                raise Unavailable(f"{where}: {error}; see ~/.aws/credentials") from error
            raise ConnectionCut(str(error)) from error
        except botocore.exceptions.NoCredentialsError as error:
            raise Unavailable(
                f"{where}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write "
                "~/.aws/credentials"
            ) from error
        except botocore.exceptions.BotoCoreError as error:
            raise ConnectionCut(f"cannot be reached: {error}") from error
        return found


class _Changed(Exception):
    pass


def open_store(url: str) -> S3Store:
    """Return the bucket of `url`; nothing is requested yet. Raises: SettingsError."""
    return S3Store(urlsplit(url).netloc)


def _pieces(stream: Any) -> Iterator[bytes]:
    try:
        yield from stream.iter_chunks(_PIECE_BYTES)
    except (botocore.exceptions.BotoCoreError, OSError) as error:
        raise ConnectionCut(f"the connection broke: {error}") from error
    except Exception as error:
        # urllib3's, which botocore lets through for some ends of a connection.
        if type(error).__module__.startswith("urllib3"):
            raise ConnectionCut(f"the connection broke: {error}") from error
        raise
