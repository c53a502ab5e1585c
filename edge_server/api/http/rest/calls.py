"""What the function of a path gets, and what it returns; both know no event loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edge_server.api.http.call import HttpCall

JSON = (("content-type", "application/json"),)


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


class Answer(NamedTuple):
    """A response; its parts are sent one after the other and copied nowhere."""

    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    parts: Sequence[bytes | memoryview] = ()


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(status, JSON, (msgspec.json.encode(value),))


NOTHING = Answer()
