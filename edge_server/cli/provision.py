"""`edge-server provision`: its flags, and which provisioning files are accepted."""

from __future__ import annotations

import grp
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli.running_daemon import INSTALLED
from edge_server.cli.verbs import OK
from edge_server.errors import SettingsError, Unavailable

if TYPE_CHECKING:
    import argparse

    from edge_server.cli.provisioning import Document, Places, SignedText

KEY = Path("/usr/lib/edge-server-image/provision.pem")
DATA = Path("/data")
_GROUP = "edge-server"
_OPENSSL_S = 10

_ABOUT = """\
Changes this device as a provisioning file says: its id, broker, ssh keys, Wi-Fi and cameras. The
settings that come of it are checked before anything is changed.

A file counts once: where it was applied before, nothing happens. Without a key in the image the
first file is accepted from anybody who can plug in a stick, and no other; --replace is for who is
logged in. With a key only what it signed counts, and after the first file only one whose serial in
[file] is greater than all before.
"""
_CODES = (
    "exit codes: 0 applied, now or before, 69 the device's files cannot be written, 78 refused: "
    "the text says why"
)


def add_provision(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `provision`."""
    parser.description, parser.epilog = _ABOUT, _CODES
    parser.add_argument("file", type=Path, metavar="FILE", help="the provisioning file")
    for flag, default, text in (
        ("--config", INSTALLED, "the daemon's settings, which are changed"),
        ("--data", DATA, "the data partition"),
        ("--key", KEY, "PEM; the Ed25519 key that must have signed the file, where this exists"),
    ):
        parser.add_argument(flag, type=Path, default=default, metavar="PATH", help=text)
    parser.add_argument(
        "--replace", action="store_true", help="also where the device is provisioned already"
    )
    parser.set_defaults(verb=_provision)


def _provision(arguments: argparse.Namespace) -> int:
    from edge_server.cli.provisioning import Places, SignedText, apply, parse, read_file

    places = Places(arguments.config, arguments.data, _group())
    source = str(arguments.file)
    signed = SignedText(read_file(arguments.file))
    if recorded(places) == signed.digest:
        print(f"{source}: applied before; nothing changed")
        return OK
    refuse_unless_trusted(
        signed,
        source,
        places,
        key=arguments.key if arguments.key.exists() else None,
        replace=arguments.replace,
    )
    document = parse(signed.text, source)
    refuse_unless_newer(document, signed.digest, source, places, replace=arguments.replace)
    try:
        lines = apply(document, signed.digest, places)
    except OSError as error:
        where = error.filename or f"{places.config.parent} or {places.data}"
        raise Unavailable(
            f"{where}: cannot be written: {error.strerror}; {source} is not applied whole: apply "
            "it again as root, where there is room"
        ) from error
    for line in lines:
        print(f"{source}: {line}")
    return OK


def recorded(places: Places) -> str:
    """Return the digest of the file that was applied last; empty if none was."""
    try:
        return places.record.read_text("ascii").strip()
    except FileNotFoundError:
        return ""


def refuse_unless_trusted(
    signed: SignedText,
    source: str,
    places: Places,
    *,
    key: Path | None,
    replace: bool,
) -> None:
    """Return if the file may change this device.

    Args:
        key: the public key in the image, if it has one.
        replace: who is logged in wants it to follow another file.

    Raises:
        SettingsError: it may not; the text says why.
    """
    if key is not None:
        if signed.signature is None:
            raise SettingsError(
                f"{source}: is not signed, and this image has a key ({key}); docs/flash.md shows "
                "how to sign it"
            )
        if not _is_signed(signed.text, signed.signature, key):
            raise SettingsError(
                f"{source}: the signature is not that of {key}: another key signed it, or the file "
                "was changed since"
            )
    elif recorded(places) and not replace:
        raise SettingsError(
            f"{source}: this device is provisioned already, with another file; who is logged in "
            f"may replace it: sudo edge-server provision --replace {source}"
        )


def refuse_unless_newer(
    document: Document, digest: str, source: str, places: Places, *, replace: bool
) -> None:
    """Return if a trusted file is for this device, and no older than what the device has.

    Raises:
        SettingsError: it is not; the text says why.
    """
    from edge_server.cli.provisioning import begun

    greatest, last = begun(places)
    if digest == last:
        # A power cut interrupted it, perhaps after the change of the device's id.
        return
    file = document.file
    if file is not None and file.devices and (own := _device_id(places)) not in file.devices:
        raise SettingsError(
            f"{source}: is for {', '.join(file.devices)[:200]}; this device is {own or 'unnamed'}"
        )
    if replace or not (greatest or recorded(places)):
        return
    if file is None:
        raise SettingsError(
            f"{source}: this device is provisioned already, and a file without a serial may be an "
            f"old one; sign it with [file] serial = {greatest + 1} or above"
        )
    if file.serial <= greatest:
        raise SettingsError(
            f"{source}: serial {file.serial} is not above {greatest}, which was here; who is "
            f"logged in may go back: sudo edge-server provision --replace {source}"
        )


def _device_id(places: Places) -> str:
    try:
        return (places.data / "identity/device-id").read_text("utf-8").strip()
    except FileNotFoundError:
        return ""


def _is_signed(text: bytes, signature: bytes, key: Path) -> bool:
    """Ask openssl, which every image has; the package that could do it here is not part of ours."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"text": text, "signature": signature}
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        command = ("openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(key), "-rawin")
        try:
            done = subprocess.run(  # noqa: S603 - fixed words, and paths of our own
                [*command, "-in", f"{folder}/text", "-sigfile", f"{folder}/signature"],
                capture_output=True,
                timeout=_OPENSSL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SettingsError(f"openssl cannot check the signature: {error}") from error
    return done.returncode == 0


def _group() -> str | None:
    """Return the daemon's group; None where the package did not make it."""
    try:
        return grp.getgrnam(_GROUP).gr_name
    except KeyError:
        return None
