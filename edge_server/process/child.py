"""Run a function in a new process, which may crash, hang, or be killed at any moment.

The process ends with its parent, however the parent ends. Used by plan builds, by reading of
untrusted plans, by doctor's probes, and for what runs in a framework's own Python.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

import edge_server
from edge_server import errors
from edge_server.process.in_child import LENGTH_BYTES
from edge_server.process.threads import require_wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


LONGEST_BYTES = 1 << 28
# How much one read takes.
CHUNK_BYTES = 1 << 16


M = TypeVar("M")


class ChannelClosed(Exception):
    """The peer is gone, or does not read."""


class NotUnderstood(ChannelClosed):
    """The peer sent bytes that are no valid message."""


class MessageTooLong(ValueError):
    """The message was not sent; the channel is still usable."""


class Channel(Generic[M]):
    """Sends from any thread; one thread receives messages of type `M`.

    Args:
        connection: owned by the caller, who closes it.
        kind: the type of received messages.
        codec: `msgspec.msgpack` or `msgspec.json`.
        timeout_s: how long `send` waits for the peer to read, and `receive` for the peer to send;
            None is for ever.
        longest_sent_bytes, longest_received_bytes: size limits of one message.
    """

    def __init__(
        self,
        connection: socket.socket,
        kind: Any,
        *,
        codec: Any = msgspec.msgpack,
        timeout_s: float | None = 5.0,
        longest_sent_bytes: int = LONGEST_BYTES,
        longest_received_bytes: int = LONGEST_BYTES,
    ) -> None:
        connection.settimeout(timeout_s)
        self._connection = connection
        self._longest_sent_bytes = longest_sent_bytes
        self._longest_received_bytes = longest_received_bytes
        self._encoder = codec.Encoder()
        self._decoder = codec.Decoder(kind)
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            ChannelClosed: the peer is gone, or did not read in time.
            MessageTooLong: it was not sent.
        """
        body = self._encoder.encode(message)
        if len(body) > self._longest_sent_bytes:
            raise MessageTooLong(
                f"names, texts and parameters of {len(body)} bytes at once; at most "
                f"{self._longest_sent_bytes} are taken"
            )
        length = len(body).to_bytes(LENGTH_BYTES, "little")
        try:
            with self._sending:
                self._connection.sendall(length + body, socket.MSG_NOSIGNAL)
        except TimeoutError:
            raise ChannelClosed("the peer does not read") from None
        except OSError as error:
            raise ChannelClosed(f"the peer is gone: {error}") from error

    def receive(self) -> list[M]:
        """Wait for data; return the messages that the data completes, in order."""
        try:
            chunk = self._connection.recv(CHUNK_BYTES)
        except TimeoutError:
            return []
        except OSError as error:
            raise ChannelClosed(f"the peer is gone: {error}") from error
        if not chunk:
            raise ChannelClosed("the peer is gone")
        self._received += chunk
        messages = []
        begin = 0
        while (body := begin + LENGTH_BYTES) <= len(self._received):
            length = int.from_bytes(self._received[begin:body], "little")
            if length > self._longest_received_bytes:
                raise NotUnderstood(
                    f"a message of {length} bytes; at most {self._longest_received_bytes} are taken"
                )
            if len(self._received) < body + length:
                break
            messages.append(self._decode(memoryview(self._received)[body : body + length]))
            begin = body + length
        del self._received[:begin]
        return messages

    def _decode(self, body: memoryview) -> M:
        try:
            return self._decoder.decode(body)  # type: ignore[no-any-return]  # of `kind`
        except msgspec.DecodeError as error:
            raise NotUnderstood(f"not a message: {error}") from error
        finally:
            body.release()


# systemd's notifications come from the daemon, not from its children.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
_OF_OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_POLL_S = 0.5
# By then a killed process has ended, or hangs in the kernel, where no signal ends it.
KILLED_S = 2.0
# A busy board takes seconds to start a Python.
_SEND_TIMEOUT_S = 60.0
_LAST_OUTPUT_BYTES = 4096
_STOPPED = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
_MAIN = """
from edge_server.process.in_child import child_main
child_main({connection}, {lifeline})
"""
# The process imports from the same paths as its parent, however that was started; `-c` would search
# the working directory first.
_OUR_PATHS = """\
import sys
sys.path[:] = filter(None, dict.fromkeys([*{path!r}, *sys.path]))
"""
# Another Python gets the package edge_server, and nothing else of the directory that it is in,
# which may be the daemon's site-packages.
_OUR_PACKAGE = """\
import sys
if sys.version_info < (3, 10):
    sys.exit("it is Python %d.%d, and 3.10 is the oldest that works" % sys.version_info[:2])
import importlib.util
sys.path[:] = filter(None, sys.path)
spec = importlib.util.spec_from_file_location(
    "edge_server", {package!r} + "/__init__.py", submodule_search_locations=[{package!r}]
)
sys.modules["edge_server"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["edge_server"])
"""


class ChildFailed(Exception):
    """The process gave no result; the text continues `the process …`."""


class ChildStopped(ChildFailed):
    """A signal ended the process that asks it to end: its service stops, or a person wants it."""


class ChildTimeout(ChildFailed):
    """The process was killed at its time limit."""


class ChildOptions(msgspec.Struct, frozen=True):
    """How the process runs.

    Attributes:
        background: at the lowest priority, and killed first when memory runs out.
        memory_bytes: limit of its own memory, RLIMIT_DATA; 0 is unlimited. No limit counts the
            allocations of a GPU's driver.
        account: user and groups that the function runs as, where this process is root's; the first
            group is the primary one.
    """

    background: bool = False
    memory_bytes: int = 0
    account: tuple[int, tuple[int, ...]] | None = None


def run_in_child(
    function: str,
    *arguments: object,
    timeout_s: float = math.inf,
    on_event: Callable[[Any], None] | None = None,
    watch: Callable[[], None] | None = None,
    on_output: Callable[[bytes], None] | None = None,
    options: ChildOptions | None = None,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Return the result of `function` in plain JSON types; the process has then ended, with all its
    children.

    Args:
        function: as `package.module:name`.
        arguments: what msgspec encodes; the function gets plain JSON types.
        on_event: called on this thread with each event; the function then gets another first
            argument, which sends one, on any thread.
        watch: called about twice a second; what it raises ends the process and is raised here.
        on_output: called on this thread with what the process prints, before the call ends.
        python: the interpreter; another than this one imports nothing that this one has but
            edge_server, so that `function` does without msgspec where that Python may lack it.
        env: variables beside those that the process inherits.

    Raises:
        EdgeServerError: raised by `function`.
        ChildTimeout: no result within `timeout_s`.
        ChildStopped: the process was asked to end.
        ChildFailed: the process crashed, or `function` raised anything else.
        GivenUp: see `require_wanted`.
    """
    call = {
        "function": function,
        "arguments": json.dumps(arguments, default=msgspec.to_builtins),
        "with_events": on_event is not None,
        "options": options or ChildOptions(),
    }
    ends_at = time.monotonic() + timeout_s

    def command(connection: int, lifeline: int) -> list[str]:
        main = _MAIN.format(connection=connection, lifeline=lifeline)
        if python != sys.executable:
            return [python, "-c", another_python(main)]
        return [python, "-c", _OUR_PATHS.format(path=_import_paths()) + main]

    environ = {**environ_for(python), **(env or {})}
    # Kind and value of each event, or of the last words, `result` and `error`.
    started: Child[tuple[str, str]] = Child(
        command,
        environ,
        tuple[str, str],
        codec=msgspec.json,
        timeout_s=_SEND_TIMEOUT_S,
        on_output=on_output,
    )
    with started as child:
        # A process that has ended before is seen where its lines are read.
        with suppress(ChannelClosed):
            child.channel.send(call)
        while True:
            try:
                lines = child.receive(min(_POLL_S, timeout_s))
            except NotUnderstood as error:
                raise ChildFailed(f"sent something unreadable: {error}") from None
            except ChannelClosed:
                raise _ending(child) from None
            for kind, text in lines:
                value = json.loads(text)
                if kind == "result":
                    return value
                if kind == "error":
                    raise _ours(*value)
                if on_event is not None:
                    on_event(value)
            require_wanted()
            if watch is not None:
                watch()
            if time.monotonic() >= ends_at:
                raise ChildTimeout(f"gave no result within {timeout_s:g} s")


def _ending(child: Child[Any]) -> ChildFailed:
    code = child.end(KILLED_S) if child.wait(KILLED_S) else None
    if code == -signal.SIGKILL:
        return ChildFailed("was killed: most likely for want of memory")
    if code in _STOPPED:
        return ChildStopped(f"was ended by {signal_name(code)}")
    if code is not None and code < 0:
        how = f"died of {signal_name(code)}"
    else:
        how = f"ended with code {code} and no result"
    words = child.last_output.decode(errors="replace").strip().splitlines()
    return ChildFailed(f"{how}: {words[-1]}" if words else how)


def _ours(kind: str, text: str) -> Exception:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, errors.EdgeServerError):
        return found(text)
    return ChildFailed(text)


def environ_for(python: str) -> dict[str, str]:
    another = python not in ("", sys.executable)
    dropped = _NOT_INHERITED + another * _OF_OUR_PYTHON
    return {name: value for name, value in os.environ.items() if name not in dropped}


def another_python(main: str) -> str:
    """Return a program for another Python, which imports edge_server and then runs `main`."""
    return _OUR_PACKAGE.format(package=str(Path(edge_server.__file__).parent)) + main


def examined(
    python: str, modules: Sequence[str], timeout_s: float = math.inf
) -> tuple[str, list[str]]:
    """Return the version of `python`, like 3.11, and which of the modules it cannot import; raise
    OSError or ChildFailed where it is no Python that starts."""
    function = "edge_server.process.in_child:examined"
    version, absent = run_in_child(function, list(modules), python=python, timeout_s=timeout_s)
    return version, absent


def _import_paths() -> list[str]:
    """Return this process's import paths, without folders of packages: while another thread imports
    OpenCV, the first path is its own folder, whose `typing` would hide Python's."""
    return [path for path in sys.path if not Path(path, "__init__.py").is_file()]


class Child(Generic[M]):
    """A process in its own session, which ends with all its children when this process ends.

    It inherits its end of a connection, a lifeline, and a pipe for its standard output and error.

    Args:
        command: returns the command line, from the descriptors of its connection and its lifeline.
        received: the type of its messages; see `Channel`, as for the arguments behind it.
        on_output: called with what the process prints, inside `receive` and `end`.
        inherited: further descriptors.

    Attributes:
        channel: to the process, whose end counts, not that of the channel: a forked process may
            hold it open.
        watched: see `watch`; one for the connection replaces the reading of messages.
        last_output: the end of what the process has printed.
    """

    def __init__(
        self,
        command: Callable[[int, int], list[str]],
        env: Mapping[str, str],
        received: Any,
        *,
        codec: Any = msgspec.msgpack,
        timeout_s: float = 5.0,
        longest_received_bytes: int = LONGEST_BYTES,
        on_output: Callable[[bytes], None] | None = None,
        inherited: Sequence[int] = (),
        cwd: Path | None = None,
    ) -> None:
        self._killing = threading.Lock()
        self._closed = False
        self._on_output = on_output
        self.last_output = b""
        self._poll = select.poll()
        self.watched: dict[int, Callable[[], object]] = {}
        with ExitStack() as ours, ExitStack() as theirs:
            self.connection, connection = socket.socketpair()
            ours.callback(self.connection.close)
            theirs.callback(connection.close)
            # The kernel kills the process when the parent's end of the lifeline closes.
            lifeline, _ = _pipe(theirs, ours)
            self._output, output = _pipe(ours, theirs)
            os.set_blocking(self._output, False)
            fds = (connection.fileno(), lifeline)
            self._popen = subprocess.Popen(  # noqa: S603 - our own modules
                command(*fds),
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(*fds, *inherited),
                start_new_session=True,
            )
            ours.callback(self.end, KILLED_S)
            self.pid = self._popen.pid
            self._ended = os.pidfd_open(self.pid)
            ours.callback(os.close, self._ended)
            self.channel: Channel[M] = Channel(
                self.connection,
                received,
                codec=codec,
                timeout_s=timeout_s,
                longest_received_bytes=longest_received_bytes,
            )
            for fd in (self.connection.fileno(), self._ended):
                self._poll.register(fd, select.POLLIN)
            self.watch(self._output, self._read_output)
            self._stack = ours.pop_all()

    def __enter__(self) -> Child[M]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, descriptor: int, readable: Callable[[], object]) -> None:
        """Call `readable` inside `receive` where the descriptor can be read."""
        self._poll.register(descriptor, select.POLLIN)
        self.watched[descriptor] = readable

    def receive(self, timeout_s: float = math.inf) -> list[M]:
        """Return the next messages of the process; empty after `timeout_s`.

        With a timeout of 0, the messages that have arrived, as many as one read takes.

        Raises:
            ChannelClosed: the process has ended.
            NotUnderstood: a message is malformed.
        """
        until = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            ready = {fd for fd, _ in self._poll.poll(None if left_s == math.inf else 1e3 * left_s)}
            for fd in ready & self.watched.keys():
                ready.discard(fd)
                self.watched[fd]()
            if self.connection.fileno() in ready:
                return self.channel.receive()
            if self._ended in ready:
                raise ChannelClosed("the process has ended")
            if not left_s:
                return []

    def wait(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        return bool(poll.poll(1e3 * timeout_s))

    def kill(self) -> None:
        """Kill the process and all its children; a second call does nothing."""
        with self._killing:
            self._kill_group()

    def end(self, within_s: float | None = None) -> int | None:
        """Kill the process and all its children; return its exit code, None where it hangs in the
        kernel for `within_s`."""
        with self._killing:
            # Before the process is reaped: then its group's number may be another's.
            self._kill_group()
            self._closed = True
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(within_s)
        while self._read_output():
            pass
        return self._popen.returncode

    def close(self) -> None:
        """End the process where it still runs, and close what was opened for it."""
        self._stack.close()

    def _kill_group(self) -> None:
        if not self._closed:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _read_output(self) -> bool:
        try:
            data = os.read(self._output, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            with suppress(KeyError):
                self._poll.unregister(self._output)
        elif self._on_output is not None:
            self._on_output(data)
        self.last_output = (self.last_output + data)[-_LAST_OUTPUT_BYTES:]
        return bool(data)


def private_bytes(pid: int) -> int:
    """Return the memory that the process shares with no other; 0 where it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def signal_name(code: int) -> str:
    names = {each.value: each.name for each in signal.Signals}
    return names.get(-code, f"signal {-code}")


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    reader.callback(os.close, reading)
    writer.callback(os.close, writing)
    return reading, writing
