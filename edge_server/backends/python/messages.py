"""Messages between the daemon and a model's process. Tensors stay in shared memory; a message names
their places."""

from __future__ import annotations

import socket
import threading
from enum import IntEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from edge_server import errors

# The largest integer type of a response's parameters; those of a request may have 64 bits without a
# sign, as msgpack's.
Int64 = Annotated[int, msgspec.Meta(le=(1 << 63) - 1)]
Value = bool | Int64 | float | str
RequestValue = bool | int | float | str

# The limit of one message from a model's process, which carries names, texts and places, never
# tensors. A decoded message takes many times its encoded size.
LONGEST_FROM_CHILD_BYTES = 1 << 20
# The maximum length of an error text, in characters.
LONGEST_TEXT = 8192
# The model waits while this many responses to one decoupled request are undelivered.
MOST_UNDELIVERED = 64

# The protocol's sequence flags.
SEQUENCE_START, SEQUENCE_END = 1, 2


class Code(IntEnum):
    """Error codes, with numbers as in Triton's C API."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


_ERRORS = {
    Code.UNKNOWN: errors.UnknownError,
    Code.INTERNAL: errors.InternalError,
    Code.NOT_FOUND: errors.NotFound,
    Code.INVALID_ARG: errors.InvalidRequest,
    Code.UNAVAILABLE: errors.Unavailable,
    Code.UNSUPPORTED: errors.Unsupported,
    Code.ALREADY_EXISTS: errors.AlreadyExists,
    Code.CANCELLED: errors.Cancelled,
}
_CODES = {error: code for code, error in _ERRORS.items()} | {
    # The nearest code that the protocol has.
    errors.DeadlineExceeded: Code.UNAVAILABLE,
}


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent as a msgpack array, the message's name first."""


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """Place of a tensor in the sender's arena; `datatype` is the protocol's name."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class ChildError(msgspec.Struct, frozen=True, array_like=True):
    """An error with one of the protocol's codes; see `Code`."""

    code: int
    text: str


class ChildResponse(msgspec.Struct, frozen=True, array_like=True):
    """One response of a model; a failed response has no outputs."""

    outputs: list[TensorPlace] = []
    failure: ChildError | None = None
    parameters: dict[str, Value] = {}


class ChildRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request as `model.py` receives or makes it.

    Attributes:
        number: identifies the request until its last response; for a call to another model, the
            call.
        flags: the protocol's sequence flags.
        timeout_us: how long the request may queue; 0 sets no limit.
        model_version: empty is the highest.
    """

    number: int
    id: str
    inputs: list[TensorPlace]
    outputs: list[str]
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    parameters: dict[str, RequestValue] = {}
    model_name: str = ""
    model_version: str = ""


class SandboxRules(msgspec.Struct, frozen=True, array_like=True):
    """The sandbox rules of a process; see `settings.Python`.

    Attributes:
        closed: whether the sandbox restricts anything.
        landlock: the Landlock version to use; 0 is none.
        seccomp: whether system calls are filtered.
    """

    closed: bool = False
    landlock: int = 0
    seccomp: bool = False
    unix_sockets: bool = True
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    private: tuple[str, ...] = ()


# In both directions.


class Responded(Message, frozen=True):
    """One response to request or call `number`; None ends it without a further response."""

    number: int
    response: ChildResponse | None
    final: bool

    @property
    def places(self) -> list[TensorPlace]:
        return [] if self.response is None else self.response.outputs


class Cancel(Message, frozen=True):
    """The responses to request or call `number` are no longer needed."""

    number: int


# From the daemon to the model's process.


class Start(Message, frozen=True):
    """The first message.

    Attributes:
        complete: only run `auto_complete_config`, on `arguments["model_config"]`, and exit.
        arguments: the arguments of `initialize`.
        directory: the version directory.
        filename: the model's Python file in that directory.
        working_directory: the working directory of the process.
        decoupled: the model may send any number of responses, at any time.
        rules: the sandbox rules of the process.
        runner: the module of edge_server with the model's class; empty where the class is in the
            model's own Python file.
    """

    complete: bool
    arguments: dict[str, str]
    directory: str
    filename: str
    working_directory: str
    decoupled: bool
    rules: SandboxRules = SandboxRules()
    runner: str = ""


class Execute(Message, frozen=True):
    batch: int
    requests: list[ChildRequest]


class Delivered(Message, frozen=True):
    """That many more responses to the decoupled request have been delivered."""

    number: int
    count: int


class CheckReady(Message, frozen=True):
    """Call `is_ready`."""


class QueryResult(Message, frozen=True):
    """The result of a query, or its failure."""

    number: int
    value: float = 0.0
    failure: str = ""


class Finish(Message, frozen=True):
    """Call `finalize` and exit."""


FromDaemon = Start | Execute | Cancel | Delivered | CheckReady | Responded | QueryResult | Finish

# From the model's process to the daemon.


class Started(Message, frozen=True):
    """`initialize` has returned or failed.

    Attributes:
        completed: the result of `auto_complete_config`; of a framework's model, the signature of
            its file, after `initialize` too.
        checks_ready: the model defines `is_ready`.
    """

    failure: str = ""
    checks_ready: bool = False
    completed: str = ""


class Executed(Message, frozen=True):
    """`execute` has returned `responses`; a failure goes to each request without a last one.

    Attributes:
        rescheduled: numbers of the requests that shall run again.
    """

    batch: int
    execute_ns: Annotated[int, msgspec.Meta(ge=0)]
    failure: str = ""
    responses: list[Responded] = []
    rescheduled: list[int] = []


class Ready(Message, frozen=True):
    """What `is_ready` returned."""

    ready: bool


class CallModel(Message, frozen=True):
    """Send a request to another model; `Responded` follows."""

    request: ChildRequest
    decoupled: bool


class IsModelReady(Message, frozen=True):
    """The result is 1 (ready) or 0."""

    model_name: str
    model_version: str


class LoadModel(Message, frozen=True):
    """The result follows when the load has succeeded or failed; see `ServerContext.load`.

    Attributes:
        config: empty means none.
        files: named as in `ServerContext.load`, each an array of UINT8.
    """

    model_name: str
    config: str
    files: list[TensorPlace]


class UnloadModel(Message, frozen=True):
    """The result follows at once."""

    model_name: str
    unload_dependents: bool


class MakeFamily(Message, frozen=True):
    """The result is 0."""

    name: str
    description: str
    kind: Literal["counter", "gauge", "histogram"]


class MakeMetric(Message, frozen=True):
    """The result is the metric's number."""

    family: MakeFamily
    labels: dict[str, str]
    buckets: list[float] = []


class ReadMetric(Message, frozen=True):
    """The result is the metric's value."""

    metric: int


Question = IsModelReady | LoadModel | UnloadModel | MakeFamily | MakeMetric | ReadMetric


class Query(Message, frozen=True):
    """`QueryResult` follows."""

    number: int
    what: Question


class ChangeMetric(Message, frozen=True):
    metric: int
    action: Literal["increment", "set", "observe"]
    value: float


class LogLine(Message, frozen=True):
    """One log record; `level` is a level of `logging`."""

    level: int
    text: str


FromChild = (
    Started | Responded | Executed | Ready | CallModel | Cancel | Query | ChangeMetric | LogLine
)


def error_of(failure: ChildError) -> errors.EdgeServerError:
    """Return a model's error as ours; a number that is no code becomes the model's own failure."""
    code = Code(failure.code) if failure.code in set(Code) else Code.INTERNAL
    return _ERRORS[code](shortened(failure.text))


def code_of(error: errors.EdgeServerError) -> Code:
    return _CODES.get(type(error), Code.INTERNAL)


def internal_error(text: str) -> ChildResponse:
    """Return a failed response with the code INTERNAL."""
    return ChildResponse(failure=ChildError(Code.INTERNAL, text))


def shortened(text: str) -> str:
    """Return `text`, cut to the limit: a model's text goes into logs, topics and headers."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} … ({len(text) - LONGEST_TEXT} characters more)"


_LENGTH_BYTES = 4
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
        kind: the type of received messages, a union of tagged structs.
        timeout_s: how long `send` waits for the peer to read, and `receive` for the peer to send.
        longest_sent_bytes, longest_received_bytes: size limits of one message.
    """

    def __init__(
        self,
        connection: socket.socket,
        kind: Any,
        *,
        timeout_s: float = 5.0,
        longest_sent_bytes: int = LONGEST_BYTES,
        longest_received_bytes: int = LONGEST_BYTES,
    ) -> None:
        connection.settimeout(timeout_s)
        self._connection = connection
        self._longest_sent_bytes = longest_sent_bytes
        self._longest_received_bytes = longest_received_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message.

        Raises:
            ChannelClosed: the peer is gone, or did not read the message in time.
            MessageTooLong: the message exceeds the limit and was not sent.
        """
        body = self._encoder.encode(message)
        if len(body) > self._longest_sent_bytes:
            raise MessageTooLong(
                f"names, texts and parameters of {len(body)} bytes at once; at most "
                f"{self._longest_sent_bytes} are taken"
            )
        length = len(body).to_bytes(_LENGTH_BYTES, "little")
        try:
            with self._sending:
                self._connection.sendall(length + body, socket.MSG_NOSIGNAL)
        except TimeoutError:
            raise ChannelClosed("the peer does not read") from None
        except OSError as error:
            raise ChannelClosed(f"the peer is gone: {error}") from error

    def receive(self) -> list[M]:
        """Wait for data; return the messages that the data completes, in order.

        Raises:
            ChannelClosed: the peer is gone.
            NotUnderstood: the data is no valid message.
        """
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
        while (body := begin + _LENGTH_BYTES) <= len(self._received):
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
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise NotUnderstood(f"not a message: {error}") from error
        finally:
            body.release()
