"""Files that a client sends with a load request, kept on disk while the model is loaded."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from edge_server.errors import InternalError, InvalidRequest
from edge_server.process.utf8 import is_utf8
from edge_server.repository.tree import DEEPEST, MOST_FILES

if TYPE_CHECKING:
    from collections.abc import Mapping


class StagedFiles:
    """A private model directory, removed by `remove` or when this object is not referenced."""

    def __init__(self, root: Path, name: str, files: Mapping[str, bytes]) -> None:
        """Write `files` (`<version>/<name>` → content) below `root`.

        Raises:
            InvalidRequest: a path leaves the model's directory, or two paths conflict.
            InternalError: the file system refuses a file.
            OSError: the file system refuses the directory.
        """
        if len(files) > MOST_FILES:
            raise InvalidRequest(
                f"{len(files)} file parameters; a model has at most {MOST_FILES} files"
            )
        paths = {key: _inside(key) for key in files}
        place = Path(tempfile.mkdtemp(dir=root))
        self.remove = weakref.finalize(self, shutil.rmtree, place, ignore_errors=True)
        self.directory = place / name
        try:
            self.directory.mkdir()
            for key, path in paths.items():
                _write(self.directory / path, key, files[key])
        except BaseException:
            self.remove()
            raise


def _write(target: Path, key: str, content: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise InvalidRequest(
            f"file parameter '{_wire(key)}' names a file where another one needs a directory"
        ) from error
    except OSError as error:
        raise InternalError(
            f"file parameter '{_wire(key)}' cannot be kept: {target}: {error.strerror}"
        ) from error


def _inside(key: str) -> PurePosixPath:
    if not is_utf8(key):
        raise InvalidRequest(f"Invalid file parameter {_wire(key)[:200]!a}: is not UTF-8 text")
    parts: list[str] = []
    for part in key.split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part not in {"", "."}:
            parts.append(part)
    if key.startswith("/") or not parts or parts[0] == ".." or "\0" in key:
        normalized = ("/" if key.startswith("/") else "") + "/".join(parts)
        raise InvalidRequest(
            f"Invalid file parameter '{_wire(key)}' with normalized path '{normalized}' must stay "
            "within model directory."
        )
    if len(parts) > DEEPEST:
        raise InvalidRequest(
            f"Invalid file parameter '{_wire(key)[:200]}': {len(parts)} directories deep; at most "
            f"{DEEPEST} are possible"
        )
    return PurePosixPath(*parts)


def _wire(key: str) -> str:
    """Return the parameter's name on the wire."""
    return f"file:{key}"
