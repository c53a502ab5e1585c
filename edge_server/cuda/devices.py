"""The GPUs of this machine."""

from __future__ import annotations


class Devices:
    """None, until they can be driven.

    Attributes:
        count: how many there are, numbered from 0.
        reason: why there is none.
    """

    count = 0
    reason = "this version of edge-server drives no GPU"
