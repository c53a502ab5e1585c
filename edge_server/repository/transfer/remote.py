"""A repository on another machine, reached with this user's ssh configuration."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import edge_server
from edge_server import errors
from edge_server.repository.transfer.local import LocalRepository
from edge_server.repository.transfer.remote_agent import BOOT, MODULES, REPLY, stock_from_json
from edge_server.repository.transfer.tar_stream import TarSink, receive
from edge_server.repository.transfer.verdict import from_json
from edge_server.repository.verdicts import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from edge_server.repository.transfer.incoming import Incoming, Outcome
    from edge_server.repository.transfer.inventory import FileContent, Inventory, Source
    from edge_server.repository.transfer.verdict import Wanted

_SSH_FAILED = 255
_NOT_FOUND = 127
_LONGEST_REPLY_BYTES = 64 << 20
_PATIENCE_S = 10.0
_REMOTE = re.compile(
    r"(?P<user>[^@/\s]+@)?(?P<host>\[[^\]\s]+\]|[^:/@\[\]\s]+):(?P<path>.*)", re.DOTALL
)


def repository_at(text: str, ssh: str) -> LocalRepository | RemoteRepository:
    """Return the repository that `text` names: a directory, or [USER@]HOST:DIRECTORY as for scp.

    Args:
        text: the name of the repository.
        ssh: the ssh command with its options.

    Raises:
        SettingsError: `text` names no repository.
    """
    match = _REMOTE.fullmatch(text)
    if match is None:
        return LocalRepository(Path(text))
    host = f"{match['user'] or ''}{match['host'].strip('[]')}"
    if host.startswith("-") or not match["path"]:
        raise errors.SettingsError(f"{text}: give it as DIRECTORY or [USER@]HOST:DIRECTORY")
    return RemoteRepository(host, match["path"], shlex.split(ssh))


class RemoteRepository:
    """A repository on a remote host, which needs only ssh and Python.

    The methods do the same as those of `LocalRepository` on that host; an interrupted transfer
    changes nothing.

    Args:
        host: the host, with the user if given.
        path: the directory of the repository on the host.
        ssh: the ssh command with its options, without the host.
    """

    def __init__(self, host: str, path: str, ssh: Sequence[str]) -> None:
        self._host = host
        self._path = path
        self._ssh = ssh

    def __str__(self) -> str:
        return f"{self._host}:{self._path}"

    def names(self) -> list[str]:
        """See `LocalRepository`.

        Raises:
            EdgeServerError: the error of the remote agent.
            Unavailable: the host cannot be reached.
        """
        with self._asking({"do": "names"}) as talk:
            return [str(name) for name in talk.reply()["names"]]

    def inventory(self, name: str) -> Inventory:
        """See `LocalRepository`. Raises: see `names`."""
        with self._asking({"do": "stock", "name": name}) as talk:
            return stock_from_json(talk.reply()["stock"])

    @contextmanager
    def receiving(self, name: str, all_but: str = "") -> Iterator[_Receiving]:
        """See `LocalRepository`. Raises: see `names`."""
        with self._asking({"do": "receive", "name": name, "all_but": all_but}) as talk:
            receiving = _Receiving(talk)
            try:
                yield receiving
            finally:
                receiving.close()

    def send(
        self, name: str, sink: Incoming, progress: Callable[[int], None] | None = None
    ) -> dict[str, FileContent]:
        """See `LocalRepository`. Raises: see `names`."""
        with self._asking({"do": "send", "name": name}) as talk:
            talk.reply()
            return receive(talk.output, sink, progress)

    def roll_back(self, name: str) -> int:
        """See `LocalRepository`. Raises: see `names`."""
        with self._asking({"do": "roll back", "name": name}) as talk:
            return int(talk.reply()["placed_ns"])

    def to_last_good(self, name: str, store: str = "") -> int:
        """See `LocalRepository`; `store` is a path on the host. Raises: see `names`."""
        with self._asking({"do": "to last good", "name": name, "store": store}) as talk:
            return int(talk.reply()["placed_ns"])

    def wait_for(self, wanted: Wanted) -> tuple[str, Verdict]:
        """See `LocalRepository`. Raises: see `names`."""
        with self._asking({"do": "wait", "wanted": wanted._asdict()}) as talk:
            return from_json(talk.reply())

    def models_told(self, store: str = "") -> dict[str, Verdict] | None:
        """See `LocalRepository`. Raises: see `names`."""
        with self._asking({"do": "told", "store": store}) as talk:
            told = talk.reply()["told"]
        return told and {name: Verdict(**each) for name, each in told.items()}

    @contextmanager
    def _asking(self, request: Mapping[str, Any]) -> Iterator[_Talk]:
        command = [*self._ssh, "--", self._host, shlex.join(["python3", "-I", "-S", "-c", BOOT])]
        try:
            process = subprocess.Popen(  # noqa: S603 - no shell here, and quoted for the one there
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise errors.Unavailable(
                f"{command[0]}: cannot be run: {error.strerror}; install OpenSSH's client"
            ) from error
        talk = _Talk(process, self._host)
        try:
            talk.say(json.dumps(_modules()).encode() + b"\n")
            talk.say(json.dumps({**request, "repository": self._path}).encode() + b"\n")
            yield talk
        finally:
            talk.end()


class _Talk:
    """A conversation with one remote agent, for the lifetime of its process."""

    def __init__(self, process: subprocess.Popen[bytes], host: str) -> None:
        self._process = process
        self._host = host
        # Both are pipes.
        self.input = cast("BinaryIO", process.stdin)
        self.output = cast("BinaryIO", process.stdout)

    def say(self, data: bytes) -> None:
        # If the agent has ended, `reply` raises the error with the cause.
        with suppress(BrokenPipeError):
            self.input.write(data)
            self.input.flush()

    def reply(self) -> dict[str, Any]:
        """Close the input and return the agent's reply.

        Raises:
            EdgeServerError: the remote agent reported an error, or sent no reply.
        """
        self._close_input()
        for line in iter(lambda: self.output.readline(_LONGEST_REPLY_BYTES), b""):
            if line.startswith(REPLY):
                fields = _parsed(line[len(REPLY) :])
                if "error" not in fields:
                    return fields
                kind = getattr(errors, fields["error"], errors.InternalError)
                raise kind(f"{self._host}: {fields['text']}")
        code = self._process.wait()
        if code == _SSH_FAILED:
            raise errors.Unavailable(f"{self._host}: ssh could not connect, or was not let in")
        if code == _NOT_FOUND:
            raise errors.Unavailable(
                f"{self._host}: has no python3, which takes the model there; install it, or push "
                "to a directory here and copy that"
            )
        raise errors.InternalError(f"{self._host}: the other side ended with {code}, without reply")

    def end(self) -> None:
        """Close the pipes; at the end of its input the agent discards an incomplete model."""
        self._close_input()
        self.output.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_input(self) -> None:
        with suppress(BrokenPipeError):
            self.input.close()


class _Receiving:
    """A model in transfer to the remote agent."""

    def __init__(self, talk: _Talk) -> None:
        self.placed_ns = 0
        self._talk = talk
        self._tar = TarSink(talk.input)

    def directory(self, path: str) -> None:
        with self._heard():
            self._tar.directory(path)

    def file(self, path: str, size: int, mtime_ns: int, source: Source) -> None:
        with self._heard():
            self._tar.file(path, size, mtime_ns, source)

    def place(self, expected: Mapping[str, FileContent]) -> Outcome:
        """See `Incoming`."""
        with self._heard():
            self._tar.end(expected)
        reply = self._talk.reply()
        self.placed_ns = int(reply["placed_ns"])
        outcome: Outcome = reply["outcome"]
        return outcome

    def close(self) -> None:
        """End the transfer; a model that was not placed is discarded."""
        self._tar.abandon()

    @contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._talk.reply()  # raises the agent's error
            raise


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise errors.InternalError("the other side answered with what is no reply")
    return fields


def _modules() -> list[tuple[str, str]]:
    root = Path(edge_server.__path__[0]).parent
    return [
        (name, (root / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        for name in MODULES
    ]
