"""`models publish` and `edge-server fleet`: what a fleet's vehicles should have, and what they
report."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime  # noqa: TC003 - msgspec reads the annotation
from typing import TYPE_CHECKING, TypeVar

import msgspec

from edge_server.cli.model_push import pack
from edge_server.cli.run import broker_of
from edge_server.cli.tables import UNKNOWN, duration_text, table
from edge_server.cli.verbs import FAILED, OK
from edge_server.errors import SettingsError
from edge_server.mqtt.clients import read_retained
from edge_server.mqtt.payloads import PREFIX
from edge_server.process.text import shown
from edge_server.repository.channel import ChannelPublisher, ChannelReport
from edge_server.repository.manifest import SigningKey
from edge_server.settings import Mqtt, read_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

T = TypeVar("T")

# Vehicles publish their health every 10 s.
_SILENT_S = 60.0
_HEAD = ("VEHICLE", "STATUS", "VERSION", "CHANNEL", "SERIAL", "MODEL", "SERVES", "SINCE", "STATE")


class _Status(msgspec.Struct):
    state: str = "silent"
    version: str = ""


class _Stamp(msgspec.Struct):
    time: datetime


class _Health(msgspec.Struct):
    time: _Stamp | None = None


class VehicleRow(msgspec.Struct):
    """What a vehicle has retained.

    Attributes:
        status: `online`, `starting`, `offline`, or `silent` where it is not heard any more.
        heard_s: the age of its newest health; None without one.
    """

    vehicle: str
    status: str = "silent"
    version: str = ""
    heard_s: float | None = None
    channels: list[ChannelReport] = []


def publish(arguments: argparse.Namespace) -> int:
    source, key = arguments.channel, SigningKey(arguments.sign)
    conditions = {"parked_s": arguments.parked, "max_celsius": arguments.max_celsius}
    times = {"not_before": arguments.not_before, "not_after": arguments.not_after}
    conditions = {name: value for name, value in conditions.items() if value is not None}
    fields = {name: value for name, value in times.items() if value is not None}
    fields |= {"share": arguments.share, **({"conditions": conditions} if conditions else {})}
    publisher = ChannelPublisher(source, key)
    if arguments.dir is None:
        release = publisher.change(**fields)
    else:
        allowed = arguments.allow_interface_change
        package = pack(arguments.dir, key=key, allow_interface_change=allowed)
        about = {"model": package.tree.name, "content": package.content.digest}
        release = publisher.publish(package.entries(), **about, **fields)
    print(
        f"{release.channel}: serial {release.serial}: {release.model}, {release.content[:12]}, for "
        f"{release.share:g} % of the vehicles"
    )
    return OK


def status(arguments: argparse.Namespace) -> int:
    filters = [f"{PREFIX}/+/{topic}" for topic in ("status", "health", "channels/+")]
    retained = read_retained(_broker(arguments), filters, arguments.quiet_secs)
    rows = vehicles(retained, time.time())
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    else:
        print("\n".join(lines(rows)))
    troubles = {each.trouble for row in rows for each in row.channels}
    return FAILED if troubles & {"refused", "rolled_back"} else OK


def _broker(arguments: argparse.Namespace) -> Mqtt:
    if (address := broker_of(arguments)) is not None:
        return Mqtt(**address)
    mqtt = read_settings(arguments.config, {}).mqtt if arguments.config else None
    if mqtt is None:
        raise SettingsError("no broker: give --mqtt HOST[:PORT], or --config with [mqtt]")
    return mqtt


def vehicles(retained: Mapping[str, bytes], now_s: float) -> list[VehicleRow]:
    """Return each vehicle with its channels, by what it has retained."""
    found: dict[str, VehicleRow] = {}
    for topic, payload in sorted(retained.items()):
        device, what, *_ = topic.removeprefix(f"{PREFIX}/").split("/")
        vehicle = found.setdefault(device, VehicleRow(device))
        if what == "status":
            said = _read(payload, _Status)
            vehicle.status, vehicle.version = said.state, said.version
        elif what == "health" and (stamp := _read(payload, _Health).time) is not None:
            vehicle.heard_s = max(0.0, now_s - stamp.time.timestamp())
        elif what == "channels":
            vehicle.channels.append(_read(payload, ChannelReport))
    for each in found.values():
        if each.status == "online" and (each.heard_s is None or each.heard_s > _SILENT_S):
            each.status = "silent"
    return list(found.values())


def _read(payload: bytes, kind: type[T]) -> T:
    """Return the message; an empty one where a client has published something else."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except (ValueError, RecursionError):
        return kind()


def _words(channel: ChannelReport) -> str:
    """Return the state of the model, and a word for the fault of the channel itself."""
    is_well = channel.trouble in ("", channel.state)
    return channel.state if is_well else f"{channel.state} (channel {channel.trouble})"


def lines(rows: Sequence[VehicleRow]) -> list[str]:
    """Return the table, then the reasons, then how many vehicles are in each state."""
    cells: list[tuple[str, ...]] = [_HEAD]
    notes: list[str] = []
    counts = {"vehicles": Counter(row.status for row in rows)}
    for row in rows:
        silent = row.status != "online" and row.heard_s is not None
        status = f"{row.status}, {duration_text(row.heard_s or 0)}" if silent else row.status
        for each in row.channels or [ChannelReport(state="")]:
            model = each.channel, str(each.serial or ""), each.model, each.serves[:12]
            since = f"{each.since:%Y-%m-%dT%H:%M}" if each.since else ""
            found = (row.vehicle, status, row.version, *model, since, _words(each))
            cells.append(tuple(cell or UNKNOWN for cell in found))
            if text := "; ".join(filter(None, (each.reason, each.fault))):
                notes.append(f"{row.vehicle}: {each.channel}: {text}")
        for each in row.channels:
            counts.setdefault(each.channel, Counter())[_words(each)] += 1
    for name, of in counts.items():
        notes.append(f"{name}: {', '.join(f'{n} {word}' for word, n in of.most_common())}")
    return [*table(cells, left=range(len(_HEAD))), *map(shown, notes)]
