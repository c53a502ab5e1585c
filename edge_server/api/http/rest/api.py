"""RestApi: what the REST paths work on, what bounds them, and what each of them gets and returns.

Imports nothing of HTTP, which loads when the first client connects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from edge_server.api.admission import Admission
from edge_server.api.calls import CallThreads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.api.access import AccessRules
    from edge_server.api.http.call import HttpCall
    from edge_server.api.parameters import HeaderForwarding
    from edge_server.api.triton_calls import TritonCalls

LOADS_AT_ONCE = 4
STOPPING = "HTTP server is shutting down and has stopped accepting new requests."

JSON = (("content-type", "application/json"),)


def gate_and_threads(inferences: int) -> tuple[Admission, CallThreads]:
    """Return what admits so many inferences at once, and the threads that answer all requests: each
    inference holds one while it waits for an instance, and each load."""
    threads = CallThreads(inferences + LOADS_AT_ONCE + 4, "http")
    return Admission(inferences, stopping=STOPPING), threads


@dataclass(frozen=True)
class RestApi:
    """The parts of the daemon that requests over HTTP use.

    Attributes:
        calls: what the daemon offers to clients, over gRPC too.
        gate: admits inferences; closed when the daemon stops.
        longest_bytes: of a request, also once it is decompressed.
    """

    calls: TritonCalls
    rules: AccessRules
    gate: Admission
    threads: CallThreads
    forwarding: HeaderForwarding
    longest_bytes: int


@dataclass(frozen=True)
class RestCall:
    """A request to one of the paths.

    Attributes:
        path: the parameters in its path: `model`, `version`, `region`, `repository`, `action`.
        headers: by their names in lower case.
        body: valid until the answer is sent.
        connection: its times, and the request's `Cancellation`.
    """

    method: str
    path: Mapping[str, str]
    headers: Mapping[str, str]
    body: memoryview
    connection: HttpCall

    @property
    def model(self) -> str:
        return self.path.get("model", "")

    @property
    def version(self) -> str:
        return self.path.get("version", "")

    @property
    def repository(self) -> str:
        return self.path.get("repository", "")

    @property
    def region(self) -> str:
        return self.path.get("region", "")


class Answer(NamedTuple):
    """A response; its parts are sent one after the other and copied nowhere."""

    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    parts: Sequence[bytes | memoryview] = ()


def as_json(value: Any) -> Answer:
    return Answer(200, JSON, (msgspec.json.encode(value),))


NOTHING = Answer()
