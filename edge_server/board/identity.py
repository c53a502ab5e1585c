"""Identity: the names of this device in everything that leaves it."""

from __future__ import annotations

import hashlib
import hmac
import platform
import uuid
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """The names under which one daemon publishes.

    Attributes:
        device: its name, the level of its topics.
        boot_id: changes with every boot; monotonic times compare only within one.
        client_id: the same after every restart, different on every machine. A broker would
            disconnect two machines with one client id in turn for ever, and a device name is
            easily cloned with an image.
    """

    device: str
    version: str
    boot_id: str
    client_id: str

    @classmethod
    def of_this_host(cls, device: str, version: str, root: Path = Path("/")) -> Identity:
        """Return the identity of the machine whose files are under `root`."""
        machine = _first_line(root / "etc/machine-id") or platform.node()
        # machine-id(5) asks applications to publish a keyed hash instead of the id itself.
        digest = hmac.new(machine.encode(), b"edge_server mqtt", hashlib.sha256).hexdigest()
        boot = boot_id(root) or str(uuid.uuid4())
        return cls(device, version, boot, f"edge-{device}-{digest[:12]}")


def boot_id(root: Path = Path("/")) -> str:
    """Return what tells one start of the kernel from another; empty where it does not say."""
    return _first_line(root / "proc/sys/kernel/random/boot_id")


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
