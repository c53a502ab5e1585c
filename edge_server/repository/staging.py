"""Files that a client sent along with a model: kept on disk, privately, while it is loaded."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from edge_server.errors import InternalError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping


class Staging:
    """Where such files are: one private directory, made when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._root: Path | None = None

    def stage(self, name: str, files: Mapping[str, bytes]) -> StagedFiles:
        """Keep `files` as the directory of model `name`; the caller holds them.

        Raises: InvalidRequest, InternalError: see `StagedFiles`.
        """
        with self._lock:
            if self._root is None:
                # mkdtemp lets only its owner in.
                self._root = Path(tempfile.mkdtemp(prefix="edge-server-"))
        return StagedFiles(self._root, name, files)

    def close(self) -> None:
        """Remove all that is left, in use or not."""
        with self._lock:
            root, self._root = self._root, None
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)


class StagedFiles:
    """A model directory of its own, removed when the last of its holders lets go.

    Whoever makes it holds it.
    """

    def __init__(self, root: Path, name: str, files: Mapping[str, bytes]) -> None:
        """Write `files` (`<version>/<name>` → content) below `root`.

        Raises:
            InvalidRequest: a path leaves the model's directory, or they do not fit together.
            InternalError: the file system does not take them.
        """
        paths = {key: _inside(key) for key in files}
        self._root = Path(tempfile.mkdtemp(dir=root))
        self._lock = threading.Lock()
        self._holders = 1
        self.directory = self._root / name
        try:
            self.directory.mkdir()
            for key, path in paths.items():
                _write(self.directory / path, key, files[key])
        except BaseException:
            self.let_go()
            raise

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def let_go(self) -> None:
        """To be called once for each hold."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        shutil.rmtree(self._root, ignore_errors=True)


def _write(target: Path, key: str, content: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise InvalidRequest(
            f"file parameter '{_told(key)}' names a file where another one needs a directory"
        ) from error
    except OSError as error:
        raise InternalError(
            f"file parameter '{_told(key)}' cannot be kept: {target}: {error.strerror}"
        ) from error


def _inside(key: str) -> PurePosixPath:
    parts: list[str] = []
    for part in key.split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part not in {"", "."}:
            parts.append(part)
    if key.startswith("/") or not parts or parts[0] == ".." or "\0" in key:
        normalized = ("/" if key.startswith("/") else "") + "/".join(parts)
        raise InvalidRequest(
            f"Invalid file parameter '{_told(key)}' with normalized path '{normalized}' must stay "
            "within model directory."
        )
    return PurePosixPath(*parts)


def _told(key: str) -> str:
    """The parameter's name on the wire."""
    return f"file:{key}"
