"""The `[python]` table of the configuration file: the paths and sockets open to Python models."""

from __future__ import annotations

from typing import Literal

from edge_server.settings.section import Section


class Python(Section, frozen=True):
    """`[python]`: what the processes of Python models may access beside their own directory.

    Attributes:
        sandbox: `auto` closes off everything that the kernel can close off and logs the rest;
            `require` refuses Python models where something stays open; `off` closes nothing off.
        readable: more files and directories that the models may read.
        writable: likewise read and write. Each process has a temporary directory of its own.
        private: files and directories that stay closed although a parent directory is open; the
            daemon's own secrets and state always stay closed.
        unix_sockets: whether the models may connect to Unix sockets. By default they may unless
            the daemon serves gRPC on one: they run as the daemon's user, to whom it is open.
    """

    sandbox: Literal["auto", "require", "off"] = "auto"
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    unix_sockets: bool | None = None
