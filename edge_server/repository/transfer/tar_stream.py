"""A model as a tar stream, with a list of its contents at the end.

The remote agent runs this module, too, so it uses only the standard library (see
`remote_agent.py`).
"""

from __future__ import annotations

import io
import json
import stat
import tarfile
from typing import TYPE_CHECKING, BinaryIO, cast

from edge_server.errors import ModelConfigError
from edge_server.repository.transfer.inventory import CHUNK_BYTES, FileContent, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.repository.transfer.incoming import Incoming

# No model has a file of this name; a stream without this file was cut off.
_CONTENTS = ".contents.json"
_MOST_CONTENTS_BYTES = 16 << 20
_BROKEN = "the connection broke, or the other side ended early; try again"


class TarSink:
    """Writes a model to a stream that cannot seek."""

    def __init__(self, stream: BinaryIO) -> None:
        self._outlet = _Outlet(stream)
        self._tar = tarfile.open(  # noqa: SIM115 - ended by `end` or `abandon`
            fileobj=cast("BinaryIO", self._outlet),
            mode="w|",
            format=tarfile.GNU_FORMAT,
            bufsize=CHUNK_BYTES,
        )

    def directory(self, path: str) -> None:
        entry = tarfile.TarInfo(path)
        entry.type = tarfile.DIRTYPE
        entry.mode = 0o755
        self._tar.addfile(entry)

    def file(self, path: str, size: int, mtime_ns: int, source: Source) -> None:
        """Write a file of `size` bytes to the stream.

        Raises:
            OSError: `source` ends early, or the reader of the stream is gone.
        """
        entry = tarfile.TarInfo(path)
        entry.size = size
        entry.mode = 0o755 if source.executable else 0o644
        entry.mtime = mtime_ns // 10**9
        self._tar.addfile(entry, source)  # type: ignore[arg-type]

    def end(self, contents: Mapping[str, FileContent]) -> None:
        """Write the list of contents, without which the receiver discards the model."""
        data = json.dumps(contents).encode()
        self.file(_CONTENTS, len(data), 0, Source(io.BytesIO(data).read))
        self._tar.close()

    def abandon(self) -> None:
        """Close the tar without writing anything more, not even buffered data."""
        self._outlet.is_open = False
        self._tar.close()


class _Outlet:
    """The output of tarfile, which drops all data once `is_open` is False."""

    def __init__(self, stream: BinaryIO) -> None:
        self.is_open = True
        self._stream = stream

    def write(self, data: bytes) -> int:
        return self._stream.write(data) if self.is_open else len(data)


def receive(
    stream: BinaryIO, incoming: Incoming, progress: Callable[[int], None] | None = None
) -> dict[str, FileContent]:
    """Read the stream of a `TarSink` into `incoming`; return the list of contents at its end.

    Raises:
        ModelConfigError: the stream is cut off, is invalid, or holds an entry that no model may
            have.
        InternalError: the file system refuses a file.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK_BYTES) as tar:
            for entry in tar:
                data = tar.extractfile(entry) if entry.isreg() else None
                if data is not None and entry.name == _CONTENTS:
                    return _parse(data.read(_MOST_CONTENTS_BYTES))
                if data is not None:
                    runs = bool(entry.mode & stat.S_IXUSR)
                    source = Source(data.read, progress, executable=runs)
                    incoming.file(entry.name, entry.size, int(entry.mtime) * 10**9, source)
                elif entry.isdir():
                    incoming.directory(entry.name)
                else:
                    raise ModelConfigError(f"{entry.name!r} is neither a file nor a directory")
    except (tarfile.TarError, EOFError) as error:
        raise ModelConfigError(f"{_BROKEN} ({error})") from error
    raise ModelConfigError(_BROKEN)


def _parse(data: bytes) -> dict[str, FileContent]:
    try:
        return {
            path: FileContent(str(sha), int(size)) for path, (sha, size) in json.loads(data).items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelConfigError(_BROKEN) from error
