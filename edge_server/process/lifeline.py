"""End a process with the one that started it, however that one ends."""

from __future__ import annotations

import fcntl
import os
import select
import signal


def end_with_parent(lifeline: int) -> None:
    """Let the kernel kill this process's group when the last writing end of a pipe closes.

    The kill works whatever code runs here, even where no Python thread gets the GIL.

    Args:
        lifeline: reading end of the pipe, whose writing end only the parent has.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):
        # The parent has ended before.
        os._exit(1)
