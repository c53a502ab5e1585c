"""What a daemon and a model's process say to each other. Tensors stay in shared memory."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

# The protocol has no larger integers; msgpack has.
Int64 = Annotated[int, msgspec.Meta(le=(1 << 63) - 1)]
Value = bool | Int64 | float | str

# What a model's process may say at once: names, texts and places, never tensors. Decoded it takes
# many times as much.
LONGEST_FROM_CHILD_BYTES = 1 << 20


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sent as a msgpack array, its name first."""


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the sender's arena; `datatype` is the protocol's name."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class ChildError(msgspec.Struct, frozen=True, array_like=True):
    """An error in the protocol's codes; see `codes`."""

    code: int
    text: str


class ChildResponse(msgspec.Struct, frozen=True, array_like=True):
    """One answer of a model; a failure has no outputs."""

    outputs: list[TensorPlace] = []
    failure: ChildError | None = None
    parameters: dict[str, Value] = {}


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A request as `model.py` sees it.

    Attributes:
        number: names it until its last answer; of a call to another model, the call.
        flags: the protocol's sequence flags.
        timeout_us: how long it may queue; 0 says nothing.
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
    """What a process may touch; see `settings.Python`.

    Attributes:
        closed: whether anything is closed off.
        landlock: the version to use; 0 is none.
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


# From the daemon.


class Start(Message, frozen=True):
    """The first message.

    Attributes:
        complete: only run `auto_complete_config`, on `arguments["model_config"]`, and end.
        arguments: what `initialize` is given.
        directory: the version directory.
        filename: of the model's Python file there.
        working_directory: where the model shall run.
        decoupled: it may answer any number of times, whenever it likes.
        rules: what it may touch.
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
    """Nobody waits for that request any more."""

    number: int


class Taken(Message, frozen=True):
    """So many more answers to that request of a decoupled model have been taken."""

    number: int
    count: int


class AskReady(Message, frozen=True):
    """Call `is_ready`."""


class CallAnswered(Message, frozen=True):
    """One answer of another model; None is nothing but the end."""

    call: int
    answer: ChildResponse | None
    final: bool


class CallReturned(Message, frozen=True):
    """The value that a call gave, or its failure."""

    call: int
    value: float = 0.0
    failure: str = ""


class Finish(Message, frozen=True):
    """Call `finalize` and end."""


FromDaemon = Start | Execute | Cancel | Taken | AskReady | CallAnswered | CallReturned | Finish

# From the model's process.


class Started(Message, frozen=True):
    """`initialize` returned, or did not; `completed` is what `auto_complete_config` made.

    Attributes:
        asks_ready: the model has an `is_ready`.
    """

    failure: str = ""
    asks_ready: bool = False
    completed: str = ""


class Answered(Message, frozen=True):
    """One answer to request `number`; None is nothing but the end."""

    number: int
    answer: ChildResponse | None
    final: bool


class Executed(Message, frozen=True):
    """`execute` returned `answers`; with a failure, who has no last answer gets that."""

    batch: int
    execute_ns: Annotated[int, msgspec.Meta(ge=0)]
    failure: str = ""
    answers: list[Answered] = []


class ReadyIs(Message, frozen=True):
    ready: bool


class CallModel(Message, frozen=True):
    """Ask another model; `CallAnswered` follows."""

    request: Asked
    decoupled: bool


class CancelCall(Message, frozen=True):
    call: int


class AskModelReady(Message, frozen=True):
    """`CallReturned` follows: 1 or 0."""

    call: int
    model_name: str
    model_version: str


class LoadModel(Message, frozen=True):
    """`CallReturned` follows once it is loaded, or is not; see `ServerContext.load`.

    Attributes:
        config: empty is none.
        files: named as they are there, each an array of UINT8.
    """

    call: int
    model_name: str
    config: str
    files: list[TensorPlace]


class UnloadModel(Message, frozen=True):
    """`CallReturned` follows, at once."""

    call: int
    model_name: str
    unload_dependents: bool


class MakeMetric(Message, frozen=True):
    """`CallReturned` follows: the metric's number."""

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
    """`level` is that of `logging`."""

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
