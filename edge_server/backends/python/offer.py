"""The sandbox features that this machine's kernel offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from edge_server.backends.python.child import landlock, seccomp
from edge_server.backends.python.messages import Rules

if TYPE_CHECKING:
    from edge_server.settings import Python


class Offer(NamedTuple):
    """`landlock` is the kernel's Landlock version, 0 is none."""

    landlock: int
    seccomp: bool

    def lacks(self) -> list[str]:
        """Return the restrictions that the kernel cannot enforce, a line for each."""
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
    """Probe this kernel now."""
    return Offer(landlock.version(), seccomp.is_offered())


def rules_of(settings: Python, offer: Offer) -> Rules:
    """Return the sandbox rules of a process, without the process's own directories."""
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
