"""Writes a support bundle: every part redacted, cut to its bound, and accounted for."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_server.board.board import Identity
from edge_server.board.doctor.examination import read_configuration
from edge_server.cli.bundle_parts import MOST_BYTES, Missing, Part, Redaction, parts
from edge_server.errors import EdgeServerError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from edge_server.board.doctor.hardware import Configuration

# Where systemd's LoadCredential= puts files; only root and the daemon may read them.
_CREDENTIALS = Path("/run/credentials/edge-server.service")
_LOGS = ("journal.txt", "kernel.txt", "log.txt")
_CUT = "\n[cut here]\n"


@dataclass
class Bundle:
    """The files of a bundle, in memory; `missing` has the reason why a part is not there, `cut` the
    names of those that are cut to their bound."""

    files: dict[str, bytes] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        """Add a part, cut to `MOST_BYTES`: a log keeps its end, any other part its begin."""
        data = text.encode(errors="replace")
        if len(data) > MOST_BYTES:
            self.cut.append(name)
            room, mark = MOST_BYTES - len(_CUT), _CUT.encode()
            data = mark + data[-room:] if name in _LOGS else data[:room] + mark
        self.files[name] = data

    def manifest(self) -> bytes:
        sizes = {name: len(data) for name, data in self.files.items()}
        about = {
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "files": sizes,
            "missing": self.missing,
            "cut": self.cut,
        }
        return json.dumps(about, indent=1).encode()


def gather(configuration: Configuration, redaction: Redaction, found: Iterable[Part]) -> Bundle:
    """Return the bundle of all parts; one that fails costs itself, and the manifest says why.

    The redaction knows all secrets before the first part is made.
    """
    bundle = Bundle()
    if configuration.settings is not None:
        bundle.add("settings.json", redaction.settings(configuration.settings))
    else:
        bundle.missing["settings.json"] = redaction.text(configuration.error)
    for name, make in found:
        try:
            bundle.add(name, redaction.text(make()))
        except Missing as error:
            bundle.missing[name] = redaction.text(str(error))
        except Exception as error:  # noqa: BLE001 - what fails on a sick machine is the bundle's topic
            bundle.missing[name] = redaction.text(f"{type(error).__name__}: {error}")
    return bundle


def write(bundle: Bundle, path: Path) -> int:
    """Write the archive, readable by this user alone; return its size in bytes.

    Raises:
        EdgeServerError: the file cannot be written; nothing of it is left.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in {"manifest.json": bundle.manifest(), **bundle.files}.items():
            entry = tarfile.TarInfo(f"edge-server-support/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Not followed, and not what somebody else has made there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
            file.write(packed.getvalue())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise EdgeServerError(
            f"{path}: cannot be written: {error.strerror}; give another place with -o FILE"
        ) from error
    return len(packed.getvalue())


def names_of(device: str) -> tuple[str, ...]:
    """Return the names of the device and of this host, and the client id at the broker, which has
    the device's within it."""
    return device, socket.gethostname(), Identity.of_this_host(device, "").client_id


def make_bundle(arguments: argparse.Namespace) -> int:
    """Make the bundle that the command line describes; return the exit code."""
    configuration = read_configuration(arguments.config, Path("/"))
    settings = configuration.settings
    device = settings.device.id if settings is not None else ""
    redaction = Redaction(names_of(device) if arguments.anonymous else ())
    if settings is not None:
        redaction.add_settings(settings)
    _add_credentials(redaction)
    bundle = gather(configuration, redaction, _announced(parts(configuration)))
    name = "device" if arguments.anonymous else device or "device"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = arguments.output or Path(f"edge-server-support-{name}-{stamp}.tar.gz")
    size = write(bundle, path)
    for part, reason in bundle.missing.items():
        print(f"without {part}: {reason.partition(chr(10))[0]}")
    print(f"{path}: {size / 1024:.0f} KiB, {len(bundle.files)} parts; read it before you send it")
    return 0


def _announced(found: Iterable[Part]) -> Iterable[Part]:
    for name, make in found:
        if sys.stderr.isatty():
            print(f"{name} …", file=sys.stderr, flush=True)
        yield name, make


def _add_credentials(redaction: Redaction) -> None:
    directories: list[Any] = [_CREDENTIALS]
    if own := os.environ.get("CREDENTIALS_DIRECTORY"):
        directories.append(Path(own))
    for directory in directories:
        with suppress(OSError):
            for path in directory.iterdir():
                redaction.add_file(path)
