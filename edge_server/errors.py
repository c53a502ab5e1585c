"""Every error that edge_server raises on purpose.

    EdgeServerError
    ├── SettingsError        the daemon's own configuration is wrong (file, key, remedy)
    ├── ModelConfigError     a model's config.pbtxt or files are wrong (file, field, remedy)
    │   └── ModelLoadError    it did not load this time, and its files need not be wrong
    ├── InvalidRequest       the caller sent something that can never work
    ├── NotFound             no model, version, or region of that name
    ├── Unavailable          exists, but cannot answer now (loading, stopping, queue full)
    ├── Unsupported          a valid wish that this server does not fulfil
    ├── AlreadyExists        a region of that name is registered already
    ├── DeadlineExceeded     too late
    ├── Cancelled            the caller no longer wants the answer
    ├── InternalError        a model or a backend failed while it ran
    ├── AlreadyRunning       another daemon has what this one would take
    ├── SourceError          a camera or a file gives no frames
    │   └── SourceUriError   its URI is wrong, and so it never will
    ├── StageStuck           a part of the daemon never returned; only a restart helps
    └── DeviceLost           a GPU answers nothing but errors; only a restart helps

An error names its cause, never its report: status codes are chosen in `api.grpc`, exit codes in
`cli`.
"""

from __future__ import annotations


class EdgeServerError(Exception):
    """Root of the tree; `str(error)` is the whole message for a person."""


class SettingsError(EdgeServerError):
    """The daemon's configuration is wrong; the text names file, key and remedy."""


class ModelConfigError(EdgeServerError):
    """A model's configuration or files are wrong; the text names file, field and remedy."""


class ModelLoadError(ModelConfigError):
    """A model or a repository could not be loaded this time; the next try may succeed.

    Nothing in its files is known to be wrong: a repository is not mounted yet, a disk did not
    answer, a Python model's `initialize` raised.
    """


class InvalidRequest(EdgeServerError):
    """The request can never succeed as it was sent."""


class NotFound(EdgeServerError):
    """No model, version or region of that name."""


class Unavailable(EdgeServerError):
    """The thing exists but cannot answer now."""


class Unsupported(EdgeServerError):
    """The request is valid, this server does not offer what it asks for."""


class DeadlineExceeded(EdgeServerError):
    """The answer would have come too late."""


class AlreadyExists(EdgeServerError):
    """There is one of that name already."""


class Cancelled(EdgeServerError):
    """The caller took its request back; nobody reads the answer."""


class InternalError(EdgeServerError):
    """A model or a backend failed while it ran."""


class AlreadyRunning(EdgeServerError):
    """Another daemon of this kind holds what this one would take; that one goes on."""


class SourceError(EdgeServerError):
    """A camera, a video or an image folder gives no frames."""


class SourceUriError(SourceError):
    """What names a camera is wrong in itself; no other time or machine would make it right."""


class StageStuck(EdgeServerError):
    """A part of the daemon did not return in its time; only a restart of the process helps."""


class DeviceLost(EdgeServerError):
    """A GPU answers every call with the same error; only a restart of the process helps."""


def may_pass(error: BaseException) -> bool:
    """Whether what raised `error` may succeed when it is tried again, and nothing was changed."""
    stays = (SettingsError, ModelConfigError, InvalidRequest, Unsupported, SourceUriError)
    return isinstance(error, ModelLoadError) or not isinstance(error, stays)
