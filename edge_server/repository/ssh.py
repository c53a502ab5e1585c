"""A repository on another machine, whose own edge-server is run there over ssh."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from edge_server import errors
from edge_server.repository.transfer import (
    BROKEN,
    BrokenArchive,
    read_archive,
    write_archive,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from typing import BinaryIO

    from edge_server.repository.transfer import Entry

_SSH_FAILED = 255
_NOT_FOUND = 127
# The class that makes this process end with the code that the one there has ended with.
_ERRORS = {69: errors.Unavailable, 75: errors.AlreadyRunning, 78: errors.ModelConfigError}
_END_S = 10.0
# Precedes the output there, because a login shell may print a greeting before it.
_MARK = b"edge-server-output\n"
_LONGEST_LINE_BYTES = 1 << 20
_LONGEST_OUTPUT_BYTES = 64 << 20
_REMOTE = re.compile(
    r"(?P<user>[^@/\s]+@)?(?P<host>\[[^\]\s]+\]|[^:/@\[\]\s]+):(?P<path>.*)", re.DOTALL
)


def repository_at(text: str, ssh: str) -> Path | RemoteRepository:
    match = _REMOTE.fullmatch(text)
    if match is None:
        return Path(text).expanduser()
    host = f"{match['user'] or ''}{match['host'].strip('[]')}"
    if host.startswith("-") or not match["path"]:
        raise errors.SettingsError(f"{text}: give it as DIRECTORY or [USER@]HOST:DIRECTORY")
    return RemoteRepository(host, match["path"], shlex.split(ssh))


class RemoteRepository:
    def __init__(self, host: str, path: str, ssh: Sequence[str]) -> None:
        self._host = host
        self._ssh = ssh
        self._path = path

    def __str__(self) -> str:
        return f"{self._host}:{self._path}"

    @property
    def directory(self) -> str:
        """The path for the command line there: neither an option nor a host."""
        return self._path if self._path.startswith(("/", "~")) else f"./{self._path}"

    def run(self, *verb: str, entries: Iterator[Entry] | None = None) -> None:
        """Run `edge-server models` with `verb` there; what it prints is printed here.

        Args: entries: a model to send to its standard input, as an archive.

        Raises:
            EdgeServerError: the verb failed there, with its text.
            Unavailable: the host cannot be reached, or has no edge-server.
            ModelConfigError: `entries` cannot be read; the process there discards what came.
        """
        pipe = subprocess.DEVNULL if entries is None else subprocess.PIPE
        with self._running(verb, stdin=pipe) as process:
            if entries is not None:
                write_archive(cast("BinaryIO", process.stdin), entries)

    def output(self, *verb: str) -> bytes:
        """Return what `edge-server models` with `verb` prints there. Raises: see `run`."""
        with self._running(verb, stdout=subprocess.PIPE) as process:
            return _after_greeting(process).read(_LONGEST_OUTPUT_BYTES)

    def entries(self, name: str, progress: Callable[[int], None] | None = None) -> Generator[Entry]:
        """Return the entries of model `name`; they end only if the process there succeeded."""
        verb = ("pull", name, "--from", self.directory, "--to", "-")
        with self._running(verb, stdout=subprocess.PIPE) as process:
            output = _after_greeting(process)
            yield from read_archive(output, progress)
            while output.read(_LONGEST_LINE_BYTES):
                pass  # what follows the archive, so that the process there can end

    @contextmanager
    def _running(
        self,
        verb: Sequence[str],
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        there = shlex.join(["edge-server", "models", *verb])
        if stdout is not None:
            there = f"echo {_MARK.decode().strip()}; {there}"
        command = [*self._ssh, "--", self._host, there]
        with tempfile.TemporaryFile() as stderr:
            try:
                process = subprocess.Popen(  # noqa: S603 - no shell here, and quoted for the one there
                    command, stdin=stdin, stdout=stdout, stderr=stderr
                )
            except OSError as error:
                raise errors.Unavailable(
                    f"{command[0]}: cannot be run: {error.strerror}; install OpenSSH's client"
                ) from error
            broken: Exception | None = None
            try:
                try:
                    yield process
                except (BrokenPipeError, BrokenArchive) as error:
                    broken = error  # the process there has a better text
                _close(process)
                process.wait()
            except BaseException:
                # At the end of its input the process there discards an incomplete model.
                _close(process)
                _end(process)
                raise
            self._check(process.returncode, stderr)
            if broken is not None:
                raise errors.InternalError(f"{self._host}: {BROKEN}") from broken

    def _check(self, code: int, stderr: IO[bytes]) -> None:
        stderr.seek(0)
        text = stderr.read(_LONGEST_LINE_BYTES).decode(errors="backslashreplace").strip()
        if code in (0, _SSH_FAILED) and text:
            print(text, file=sys.stderr)
        if code == _SSH_FAILED:
            raise errors.Unavailable(f"{self._host}: ssh could not connect, or was refused")
        if code == _NOT_FOUND:
            raise errors.Unavailable(
                f"{self._host}: has no edge-server in its PATH, which takes the model there; "
                "install it, or push to a directory here and copy that"
            )
        if code:
            lines = text.splitlines() or [f"edge-server there ended with {code}, without a reason"]
            raise _ERRORS.get(code, errors.InternalError)(
                "\n".join(f"{self._host}: {line.removeprefix('edge-server: ')}" for line in lines)
            )


def _after_greeting(process: subprocess.Popen[bytes]) -> BinaryIO:
    output = cast("BinaryIO", process.stdout)
    for line in iter(lambda: output.readline(_LONGEST_LINE_BYTES), b""):
        if line.endswith(_MARK):
            return output
    raise BrokenArchive(BROKEN)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
