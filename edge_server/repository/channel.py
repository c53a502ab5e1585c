"""Channels: a tag of an OCI registry says which model a fleet's vehicles have, and which of them.

The tag is a model's artifact, which any registry keeps, copies and serves. Its annotations have the
index, a line of JSON, and the signature of that line; the index names the model's archive by its
digest. One request reads both.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from edge_server.errors import ModelConfigError, NotFound, SettingsError
from edge_server.process.disk import file_sha256
from edge_server.repository.manifest import SIGNATURE_BYTES
from edge_server.repository.remote import open_origin
from edge_server.repository.remote_files import oci_client
from edge_server.repository.scan import is_model_name
from edge_server.repository.transfer import write_archive

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edge_server.repository.manifest import PublicKeys, SigningKey
    from edge_server.repository.remote import Origin
    from edge_server.repository.transfer import Entry

_INDEX = "edge-server.channel"
_SIGNATURE = "edge-server.channel.signature"
# What a vehicle knows of itself.
CONDITIONS = ("parked_s", "max_celsius")
_PUBLISH = "publish it again with `edge-server models publish`"

_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Time = Annotated[datetime, msgspec.Meta(tz=True)]


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the index of a channel says.

    Attributes:
        channel: the path and the tag in the registry, so that no other channel's index fits.
        serial: greater than that of every index before.
        archive: the SHA-256 of the model's archive.
        content: the digest of the model, as `models list` has it.
        share: of the vehicles, in percent.
        not_before, not_after: when a vehicle may take it; None is always.
        conditions: of `CONDITIONS`; all must hold when a vehicle takes it.
    """

    channel: str
    serial: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    model: str
    archive: _Digest
    content: _Digest
    share: Annotated[float, msgspec.Meta(ge=0, le=100)]
    not_before: _Time | None = None
    not_after: _Time | None = None
    conditions: dict[str, float] = {}
    format: Literal[1] = 1

    @staticmethod
    def parse(index: str) -> Release:
        """Raises: ModelConfigError: it is none, or has a condition that no device can know."""
        try:
            release = msgspec.json.decode(index, type=Release)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ModelConfigError(f"its index cannot be read: {error}") from error
        if not is_model_name(release.model):
            raise ModelConfigError(f"its index names '{release.model[:200]}', which is no model")
        if unknown := sorted(release.conditions.keys() - set(CONDITIONS)):
            raise ModelConfigError(
                f"its condition '{unknown[0][:64]}' is nothing that this device can know; it knows "
                f"{', '.join(CONDITIONS)}"
            )
        return release


class _Serial(msgspec.Struct):
    serial: int


class Surroundings(NamedTuple):
    """What a vehicle knows of itself; None is not known.

    Attributes:
        now: None while the clock cannot be believed.
        parked_s: for how long its speed has been 0; None while the speed is not known.
        celsius: the hottest zone of the board.
    """

    now: datetime | None = None
    parked_s: float | None = None
    celsius: float | None = None


class Decision(NamedTuple):
    """Whether a vehicle takes a release: `due`, or why not: `not_in_share`, `waiting`, `ended`."""

    state: str
    reason: str = ""


def position(content: str, device: str) -> float:
    """Return where a vehicle stands among all, from 0 to below 100; another order for each content.
    A vehicle that is in a share of some percent is in each larger one."""
    digest = hashlib.sha256(f"{content} {device}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48 * 100


def decide(release: Release, device: str, of: Surroundings) -> Decision:
    """Return whether `device` takes `release` now. Nothing else decides about that."""
    if position(release.content, device) >= release.share:
        return Decision("not_in_share", f"{release.share:g} % of the vehicles take it")
    if (release.not_before or release.not_after) and of.now is None:
        return Decision("waiting", "the release has times, and the clock cannot be believed")
    if release.not_after and of.now and of.now >= release.not_after:
        return Decision("ended", f"not taken before {release.not_after.isoformat()}")
    waits = []
    if release.not_before and of.now and of.now < release.not_before:
        waits.append(f"for {release.not_before.isoformat()}")
    if (least_s := release.conditions.get("parked_s")) is not None:
        if of.parked_s is None:
            waits.append("parked: the vehicle's speed is not known (docs/lanes.md)")
        elif of.parked_s < least_s:
            waits.append(f"parked for {of.parked_s:.0f} of {least_s:g} s")
    if (most := release.conditions.get("max_celsius")) is not None:
        if of.celsius is None:
            waits.append("the board's temperature is not known")
        elif of.celsius > most:
            waits.append(f"the board has {of.celsius:.0f} °C, more than {most:g}")
    return Decision("waiting", "; ".join(waits)) if waits else Decision("due")


def channel_of(source: str) -> str:
    """Return the path and the tag of `source`: mirrors of a registry have the same."""
    return urlsplit(source).path.lstrip("/")


def index_of(origin: Origin, source: str, keys: PublicKeys) -> str:
    """Return the index of the channel, after its signature was checked.

    Raises: ModelConfigError: there is none, another key signed it, or it was changed since.
    """
    index, signature = (origin.annotations.get(name, "") for name in (_INDEX, _SIGNATURE))
    if not index or not signature:
        raise ModelConfigError(f"{source}: is no channel: it has no signed index; {_PUBLISH}")
    try:
        raw = base64.b64decode(signature, validate=True)
    except ValueError:
        raw = b""
    if len(raw) != SIGNATURE_BYTES or not keys.have_signed(index.encode(), raw):
        raise ModelConfigError(
            f"{source}: its index is not signed by {keys}: another key signed it, or it was "
            "changed since"
        )
    return index


def serial_of(index: str) -> int:
    """Return the serial of an index that was accepted, also of a later version's; 0 without one."""
    return msgspec.json.decode(index, type=_Serial).serial if index else 0


def require_newer(source: str, index: str, known: str) -> Release:
    """Return the release of `index`, which may follow the index `known`, or be it.

    Raises: ModelConfigError: it is older, of another channel, or another one of the same serial.
    """
    release = Release.parse(index)
    if release.channel != channel_of(source):
        raise ModelConfigError(f"{source}: its index is that of {release.channel[:200]}")
    before = serial_of(known)
    if release.serial < before:
        raise ModelConfigError(
            f"{source}: its serial {release.serial} is older than {before}, which this device has "
            f"seen; {_PUBLISH}"
        )
    if release.serial == before and index != known:
        raise ModelConfigError(
            f"{source}: another index has the serial {before} by now; {_PUBLISH}"
        )
    return release


class ChannelPublisher:
    """Writes the index of one channel, as whoever holds the key.

    Args: source: `oci://REGISTRY/REPOSITORY:TAG`.

    Raises: EdgeServerError: the registry cannot be reached, or a library is missing.
    """

    def __init__(self, source: str, key: SigningKey) -> None:
        self._source, self._key = source, key
        self.before: Release | None = None
        self._is_ours = False
        try:
            origin = open_origin(source)
        except NotFound:
            return
        with closing(origin):
            index, signature = (origin.annotations.get(name, "") for name in (_INDEX, _SIGNATURE))
        if index:
            self.before = Release.parse(index)
            self._is_ours = signature == _text(key.sign(index.encode()))

    def publish(self, entries: Iterable[Entry], **fields: Any) -> Release:
        """Send a model, and publish it; `fields` are those of `Release` beside its archive."""
        with TemporaryDirectory() as folder:
            # Its name has no colon, behind which oras looks for a media type.
            archive, about = Path(folder) / "model.tar", Path(folder) / "annotations.json"
            with archive.open("wb") as file:
                write_archive(file, entries)
            release = self._release(archive=file_sha256(archive), **fields)
            annotations = self._annotations(release)
            unpack = {"io.deis.oras.content.unpack": "true"}
            about.write_text(json.dumps({"$manifest": annotations, str(archive): unpack}))
            with oci_client(self._source) as client:
                client.push(
                    target=self._source.removeprefix("oci://"),
                    files=[f"{archive}:application/vnd.oci.image.layer.v1.tar"],
                    annotation_file=str(about),
                    disable_path_validation=True,
                    quiet=True,
                )
        return release

    def change(self, **fields: Any) -> Release:
        """Publish the present model again, with other `fields`; its archive is not sent.

        Raises: SettingsError: there is no index that this key has signed.
        """
        if self.before is None or not self._is_ours:
            raise SettingsError(
                f"{self._source}: has no index that this key has signed; give the model's DIR"
            )
        release = self._release(**{**msgspec.structs.asdict(self.before), **fields})
        with oci_client(self._source) as client:
            container = client.get_container(self._source.removeprefix("oci://"))
            manifest = client.get_manifest(container)
            manifest["annotations"] = self._annotations(release)
            response = client.upload_manifest(manifest, container)
            if response.status_code >= 300:
                raise ValueError(f"{response.status_code} {response.reason}")
        return release

    def _release(self, **fields: Any) -> Release:
        # Seconds, so that serials go on where a registry has lost its tag.
        serial = max(self.before.serial + 1 if self.before else 1, int(time.time()))
        fields |= {"channel": channel_of(self._source), "serial": serial}
        return msgspec.convert(fields, Release)

    def _annotations(self, release: Release) -> dict[str, str]:
        index = msgspec.json.encode(release, order="sorted")
        return {_INDEX: index.decode(), _SIGNATURE: _text(self._key.sign(index))}


def _text(signature: bytes) -> str:
    return base64.b64encode(signature).decode()
