"""Every error that edge_server itself raises.

    EdgeServerError
    ├── SettingsError        the daemon's own configuration is wrong (file, key, remedy)
    ├── ModelConfigError     a model's config.pbtxt or files are wrong (file, field, remedy)
    │   └── ModelLoadError    the load failed this time, and the files need not be wrong
    ├── InvalidRequest       the caller sent a request that can never succeed
    ├── NotFound             no model, version, or region of that name
    ├── Unavailable          exists, but cannot respond now (loading, stopping, queue full)
    ├── Unsupported          a valid request for a feature that this server does not offer
    ├── AlreadyExists        a region of that name is registered already
    ├── OutOfRange           a place that a record has not reached
    ├── Unauthenticated      the call needs a token, and has no valid one
    ├── PermissionDenied     the call's token does not allow it
    ├── LimitReached         as many of the caller's kind as are allowed are there already
    ├── DeadlineExceeded     too late
    ├── Cancelled            the caller cancelled the request
    ├── InternalError        a model or a backend failed while it ran
    │   └── UnknownError       a model says that it does not know why
    ├── AlreadyRunning       another daemon holds a resource that this daemon needs
    ├── SourceError          a camera or a file gives no frames
    │   └── SourceUriError   its URI is wrong, so the camera can never open
    ├── StageStuck           a part of the daemon never returned; only a restart helps
    └── DeviceLost           every call to a GPU fails; only a restart helps

An error names its cause, never its report: status codes are chosen in `api`, exit codes in
`cli`.
"""

from __future__ import annotations

from typing import NamedTuple


class EdgeServerError(Exception):
    """Root of the tree; `str(error)` is the whole message for the operator."""


class SettingsError(EdgeServerError):
    """The daemon's configuration is wrong; the text names file, key and remedy."""


class ModelConfigError(EdgeServerError):
    """A model's configuration or files are wrong; the text names file, field and remedy."""


class ModelLoadError(ModelConfigError):
    """The load of a model or a repository failed; the next attempt may succeed.

    The files are not known to be wrong: a repository is not mounted yet, a disk did not respond,
    a Python model's `initialize` raised.
    """


class InvalidRequest(EdgeServerError):
    """The request can never succeed as it was sent."""


class NotFound(EdgeServerError):
    """No model, version or region of that name."""


class Unavailable(EdgeServerError):
    """The model or region exists but cannot respond now."""


class Unsupported(EdgeServerError):
    """The request is valid, but this server does not offer the requested feature."""


class DeadlineExceeded(EdgeServerError):
    """The response would have come after the deadline."""


class AlreadyExists(EdgeServerError):
    """An object of that name exists already."""


class OutOfRange(EdgeServerError):
    """The caller wants to go on from a place that the record has not reached."""


class Unauthenticated(EdgeServerError):
    """The call needs a token, and has none that is valid."""


class PermissionDenied(EdgeServerError):
    """The token of the call does not allow it."""


class LimitReached(EdgeServerError):
    """As many streams as are allowed are open already."""


class Cancelled(EdgeServerError):
    """The caller cancelled its request and reads no response."""


class InternalError(EdgeServerError):
    """A model or a backend failed while it ran."""


class UnknownError(InternalError):
    """A model failed with Triton's code UNKNOWN."""


class AlreadyRunning(EdgeServerError):
    """Another daemon of this kind holds a resource that this one needs; the other goes on."""


class SourceError(EdgeServerError):
    """A camera, a video or an image folder gives no frames.

    Attributes:
        reason: one word for a program: `unavailable`, `unauthorized`, `not_found`, `no_decoder`,
            `lost`, `stalled`, `corrupt`, `changed`, `stuck`, `out_of_service`.
    """

    def __init__(self, *texts: object, reason: str = "lost") -> None:
        super().__init__(*texts)
        self.reason = reason


class Reason(NamedTuple):
    """Why something is not as it should be.

    Attributes:
        code: a word for programs, one of `ReasonCode` in lanes.proto, in lower case.
        text: for people; empty where the word says it all.
    """

    code: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.text}" if self.text else self.code


class SourceUriError(SourceError):
    """The URI of a camera is wrong in itself, at any time and on any machine."""


class StageStuck(EdgeServerError):
    """A part of the daemon exceeded its time limit; only a restart of the process helps."""


class DeviceLost(EdgeServerError):
    """Every call to a GPU returns the same error; only a restart of the process helps."""


def may_pass(error: BaseException) -> bool:
    """Whether the operation that raised `error` may succeed on a retry without any change."""
    stays = (SettingsError, ModelConfigError, InvalidRequest, Unsupported, SourceUriError)
    return isinstance(error, ModelLoadError) or not isinstance(error, stays)


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of `error` and of its causes, once they are reported.

    Their frames hold the request with its tensors and regions. A frame that also holds the error
    makes a cycle, which only the next full garbage collection would free.
    """
    each: BaseException | None = error
    seen: set[int] = set()  # an error may be the cause of its own cause
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
