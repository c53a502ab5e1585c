"""Messages between the daemon and a model's process. Tensors stay in shared memory."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

# The protocol's largest integer type; msgpack has larger ones.
Int64 = Annotated[int, msgspec.Meta(le=(1 << 63) - 1)]
Value = bool | Int64 | float | str

# The limit of one message from a model's process, which carries names, texts and places, never
# tensors. A decoded message takes many times its encoded size.
LONGEST_FROM_CHILD_BYTES = 1 << 20


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
    """An error with one of the protocol's codes; see `codes`."""

    code: int
    text: str


class ChildResponse(msgspec.Struct, frozen=True, array_like=True):
    """One response of a model; a failed response has no outputs."""

    outputs: list[TensorPlace] = []
    failure: ChildError | None = None
    parameters: dict[str, Value] = {}


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A request as `model.py` receives it.

    Attributes:
        number: identifies the request until its last response; for a call to another model, the
            call.
        flags: the protocol's sequence flags.
        timeout_us: how long the request may queue; 0 sets no limit.
    """

    number: int
    id: str
    inputs: list[TensorPlace]
    outputs: list[str]
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    parameters: dict[str, Value] = {}
    model_name: str = ""
    model_version: str = ""


class Rules(msgspec.Struct, frozen=True, array_like=True):
    """The sandbox rules of a process; see `settings.Python`.

    Attributes:
        closed: whether the sandbox restricts anything.
        landlock: the Landlock version to use; 0 is none.
        seccomp: whether system calls are filtered.
        scratch: the process's own temporary directory.
    """

    closed: bool = False
    landlock: int = 0
    seccomp: bool = False
    unix_sockets: bool = True
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    scratch: str = ""


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
    """

    complete: bool
    arguments: dict[str, str]
    directory: str
    filename: str
    working_directory: str
    decoupled: bool
    rules: Rules = Rules()


class Execute(Message, frozen=True):
    batch: int
    requests: list[Asked]


class Cancel(Message, frozen=True):
    """The request's client is gone, so its responses are no longer needed."""

    number: int


class Taken(Message, frozen=True):
    """That many more responses to the decoupled request have been delivered."""

    number: int
    count: int


class AskReady(Message, frozen=True):
    """Call `is_ready`."""


class CallAnswered(Message, frozen=True):
    """One response of another model; None ends the call without a further response."""

    call: int
    answer: ChildResponse | None
    final: bool


class CallReturned(Message, frozen=True):
    """The return value of a call, or its failure."""

    call: int
    value: float = 0.0
    failure: str = ""


class Finish(Message, frozen=True):
    """Call `finalize` and exit."""


FromDaemon = Start | Execute | Cancel | Taken | AskReady | CallAnswered | CallReturned | Finish

# From the model's process to the daemon.


class Started(Message, frozen=True):
    """`initialize` has returned or failed; `completed` is the result of `auto_complete_config`.

    Attributes:
        asks_ready: the model defines `is_ready`.
    """

    failure: str = ""
    asks_ready: bool = False
    completed: str = ""


class Answered(Message, frozen=True):
    """One response to request `number`; None ends the request without a further response."""

    number: int
    answer: ChildResponse | None
    final: bool


class Executed(Message, frozen=True):
    """`execute` has returned `answers`; a failure goes to each request without a last response."""

    batch: int
    execute_ns: Annotated[int, msgspec.Meta(ge=0)]
    failure: str = ""
    answers: list[Answered] = []


class ReadyIs(Message, frozen=True):
    ready: bool


class CallModel(Message, frozen=True):
    """Send a request to another model; `CallAnswered` follows."""

    request: Asked
    decoupled: bool


class CancelCall(Message, frozen=True):
    call: int


class AskModelReady(Message, frozen=True):
    """`CallReturned` follows with 1 (ready) or 0."""

    call: int
    model_name: str
    model_version: str


class LoadModel(Message, frozen=True):
    """`CallReturned` follows when the load has succeeded or failed; see `ServerContext.load`.

    Attributes:
        config: empty means none.
        files: named as in `ServerContext.load`, each an array of UINT8.
    """

    call: int
    model_name: str
    config: str
    files: list[TensorPlace]


class UnloadModel(Message, frozen=True):
    """`CallReturned` follows at once."""

    call: int
    model_name: str
    unload_dependents: bool


class MakeMetric(Message, frozen=True):
    """`CallReturned` follows with the metric's number."""

    call: int
    name: str
    description: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: dict[str, str]
    buckets: list[float] | None


class ChangeMetric(Message, frozen=True):
    metric: int
    action: Literal["increment", "set", "observe"]
    value: float


class AskMetric(Message, frozen=True):
    """`CallReturned` follows."""

    call: int
    metric: int


class LogLine(Message, frozen=True):
    """One log record; `level` is a level of `logging`."""

    level: int
    text: str


FromChild = (
    Started
    | Answered
    | Executed
    | ReadyIs
    | CallModel
    | CancelCall
    | AskModelReady
    | LoadModel
    | UnloadModel
    | MakeMetric
    | ChangeMetric
    | AskMetric
    | LogLine
)
