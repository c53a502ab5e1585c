"""Admission by expected wait: can a request that joins the queue now still meet its deadline?"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from edge_server.errors import DeadlineExceeded, Unavailable

if TYPE_CHECKING:
    from edge_server.requests import InferRequest

# A typical run is the median of so many: one run that hangs does not close the queue.
_RUNS = 15
# The share of the time left that the forecast may use up. In a simulated queue with runs that vary
# by a third, 3/4 came within 4 % of the best of 1/2 to 1, at any load and deadline; a share of 1
# left 40 % of the goodput at ten times the load, as the last request admitted is late.
_FORESEEN = 0.75


class ExpectedWait:
    """Refuses at once a request whose response would come too late.

    Without this check a first-come queue serves no request in time once the load exceeds the
    throughput: every request at its head has waited for its whole deadline, and the model works
    for callers who have gone.

    The forecast for a request is the rest of the current run, the runs of the requests before it,
    and its own. A request without a deadline, an urgent one, or one that finds an instance idle is
    never refused, so that quick runs correct what slow runs have taught.

    The class has no clock, and needs no lock.

    Args:
        instances: number of concurrent runs.
        together: maximum number of requests per run.
    """

    def __init__(self, instances: int, together: int = 1) -> None:
        self._instances = max(1, instances)
        self._together = max(1, together)
        self._runs_s: deque[float] = deque(maxlen=_RUNS)

    def ran(self, run_s: float) -> None:
        """Record the duration of a run."""
        self._runs_s.append(run_s)

    def check(self, request: InferRequest, *, ahead: int, running_s: float, now: float) -> None:
        """Return where `request` may join the queue, raise otherwise.

        Args:
            ahead: number of requests served before it.
            running_s: age of the oldest run; 0 where an instance is idle.
            now: `time.monotonic()`.

        Raises:
            DeadlineExceeded: the deadline has passed already.
            Unavailable: the response would come after the deadline.
        """
        if request.deadline is None:
            return
        left_s = request.deadline - now
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed before it was begun")
        runs_s = sorted(self._runs_s)
        if not runs_s or request.urgent or not (ahead or running_s):
            return
        run_s = runs_s[len(runs_s) // 2]
        rest_s = max(0.0, run_s - running_s) if running_s else 0.0
        runs = ahead // self._together / self._instances + 1
        if rest_s + runs * run_s > _FORESEEN * left_s:
            raise Unavailable(
                f"{request.log_prefix}Exceeds maximum queue size: behind {ahead} others it would "
                "not be answered before its deadline"
            )
