"""The table of the configuration file that says what Python models may touch."""

from __future__ import annotations

from typing import Literal

from edge_server.settings.section import Section


class Python(Section, frozen=True):
    """`[python]`: what the processes of Python models may touch beside their own directory.

    Attributes:
        sandbox: `auto` closes off what the kernel can close off, and the log tells of the rest;
            `require` refuses Python models where something stays open; `off` closes nothing off.
        readable: more files and directories that they may read.
        writable: likewise read and write. Each process has a temporary directory of its own.
        private: files and directories that stay closed although something above them is open; the
            daemon's own secrets and state always do.
        unix_sockets: whether they may connect to Unix sockets. Where nothing is said, unless the
            daemon serves gRPC on one: they run as the daemon's user, to whom it is open.
    """

    sandbox: Literal["auto", "require", "off"] = "auto"
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    unix_sockets: bool | None = None
