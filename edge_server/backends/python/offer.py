"""What this machine's kernel offers to close off what models touch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edge_server.backends.python.child import landlock, seccomp
from edge_server.backends.python.messages import Rules

if TYPE_CHECKING:
    from edge_server.settings import Python


class Offer(NamedTuple):
    """`landlock` is its version, 0 is none."""

    landlock: int
    seccomp: bool

    def lacks(self) -> list[str]:
        """What stays open with it, a line for each."""
        lines = []
        if not self.landlock:
            lines.append(
                "no Landlock (Linux 5.13 with landlock in CONFIG_LSM): models can read and write "
                "every file that the daemon's user can, its secrets and copies of models too"
            )
        if not self.seccomp:
            lines.append(
                "no seccomp filters that ask (Linux 5.5 on x86-64 or aarch64): models can signal "
                "the daemon, and what they start can outlive them"
            )
        return lines


def offered() -> Offer:
    """By this kernel, now."""
    return Offer(landlock.version(), seccomp.is_offered())


def rules_of(settings: Python, offer: Offer) -> Rules:
    """What a process may touch, but for the directories that are its own."""
    if settings.sandbox == "off":
        return Rules()
    return Rules(
        True,
        offer.landlock,
        offer.seccomp,
        settings.unix_sockets is not False,
        settings.readable,
        settings.writable,
        settings.private,
    )
