"""The one deadline loop of the tests: a test waits for a condition, never for a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

TIMEOUT_S = 30.0


def wait_until(
    condition: Callable[[], T],
    timeout_s: float = TIMEOUT_S,
    *,
    otherwise: Callable[[], object] | str = "",
    every_s: float = 0.01,
) -> T:
    """Return what `condition` returns as soon as that is true.

    Args:
        condition: called again and again, `every_s` seconds apart, and so that it has a tenth of
            the time at most: a test that waits leaves the processor to others.
        timeout_s: how long; a busy machine needs many times what an idle one does.
        otherwise: what the failure says, or returns the text of (a log, what was heard so far).

    Raises:
        AssertionError: the condition did not become true in time.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        began_s = time.monotonic()
        result = condition()
        if result:
            return result
        now_s = time.monotonic()
        if now_s >= end_s:
            said = otherwise() if callable(otherwise) else otherwise
            raise AssertionError(f"not within {timeout_s:g} s: {said or condition}")
        time.sleep(max(every_s, min(9 * (now_s - began_s), 1.0)))
