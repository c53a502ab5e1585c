"""Checks of the board's cameras, and of NVIDIA's daemon for CSI cameras."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.board.doctor.checks.gpu import join_groups
from edge_server.board.doctor.finding import fault, ok, warning

if TYPE_CHECKING:
    from edge_server.board.doctor.evidence import Evidence
    from edge_server.board.doctor.finding import Finding


def cameras(evidence: Evidence) -> Finding:
    """The daemon's user may open every connected camera."""
    board = evidence.board
    user = board.account.name
    if not board.cameras:
        return ok("no /dev/video*; recordings and rendered roads need none")
    refused = [camera for camera in board.cameras if not camera.usable]
    if refused:
        names = ", ".join(camera.path for camera in refused)
        remedy = join_groups(refused, user) or f"sudo chgrp video {refused[0].path}, in a udev rule"
        return fault(f"closed to {user}: {names}", remedy)
    return ok(", ".join(f"{each.path} ({each.label or 'unnamed'})" for each in board.cameras))


def argus(evidence: Evidence) -> Finding:
    """Argus listens, if a CSI camera needs it."""
    board = evidence.board
    if not any(camera.is_csi for camera in board.cameras):
        return ok("not needed: no CSI camera")
    if not board.argus:
        return warning(
            "a CSI camera is there, and Argus, which reads it, does not listen in /tmp",
            "sudo systemctl restart nvargus-daemon; in a container: -v /tmp:/tmp",
        )
    return ok("listens")
