"""Messages between the daemon and a model's process. Tensors stay in shared memory; a message names
their places."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal

import msgspec

from edge_server import errors
from edge_server.process.text import shortened as cut

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
    code: int
    text: str


class ChildResponse(msgspec.Struct, frozen=True, array_like=True):
    """One response of a model; a failed response has no outputs."""

    outputs: list[TensorPlace] = []
    failure: ChildError | None = None
    parameters: dict[str, Value] = {}


class ChildRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request as `model.py` receives or makes it. `number` identifies it until its last response,
    or a call to another model; a `timeout_us` of 0 sets no limit, an empty version is the
    highest."""

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
        runner: the module of edge_server with the model's class; empty of a model's own Python
            file.
        source: the directory of the file, where that is not the model's; see `python_backend`.
        working_directory: empty is the model's temporary directory.
        environment: that the model may read; `packages` of it are imported before others."""

    complete: bool
    arguments: dict[str, str]
    directory: str
    filename: str
    working_directory: str
    decoupled: bool
    rules: SandboxRules = SandboxRules()
    runner: str = ""
    source: str = ""
    environment: str = ""
    packages: str = ""


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
    number: int
    value: float = 0.0
    failure: str = ""


class Finish(Message, frozen=True):
    """Call `finalize` and exit."""


FromDaemon = Start | Execute | Cancel | Delivered | CheckReady | Responded | QueryResult | Finish

# From the model's process to the daemon.


class Started(Message, frozen=True):
    """`initialize` has returned or failed. `completed` is the result of `auto_complete_config`; of
    a framework's model, the signature of its file, after `initialize` too."""

    failure: str = ""
    checks_ready: bool = False
    completed: str = ""


class Executed(Message, frozen=True):
    batch: int
    execute_ns: Annotated[int, msgspec.Meta(ge=0)]
    failure: str = ""
    responses: list[Responded] = []
    rescheduled: list[int] = []


class Ready(Message, frozen=True):
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
    """The result follows when the load has ended; see `ServerContext.load`. Files are UINT8."""

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
    return ChildResponse(failure=ChildError(Code.INTERNAL, text))


def shortened(text: str) -> str:
    """Return `text`, cut to the limit: a model's text goes into logs, topics and headers."""
    return cut(text, LONGEST_TEXT, counted=True)
