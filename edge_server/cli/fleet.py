"""`models publish` and `edge-server fleet`: what a fleet's vehicles should have, and what they
report."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Any

from edge_server.cli.model_push import pack
from edge_server.cli.run import broker_of
from edge_server.cli.tables import UNKNOWN, duration_text, table
from edge_server.cli.verbs import FAILED, OK
from edge_server.errors import SettingsError
from edge_server.mqtt.clients import read_retained
from edge_server.mqtt.payloads import PREFIX
from edge_server.repository.channel import ChannelPublisher
from edge_server.repository.manifest import SigningKey
from edge_server.settings import Mqtt, read_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

# Vehicles publish their health every 10 s.
_SILENT_S = 60.0
_HEAD = ("VEHICLE", "STATUS", "VERSION", "CHANNEL", "SERIAL", "MODEL", "SERVES", "SINCE", "STATE")
_BAD = ("refused", "rolled_back")


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
    rows = vehicles(
        read_retained(
            _broker(arguments),
            [f"{PREFIX}/+/{topic}" for topic in ("status", "health", "channels/+")],
            arguments.quiet_secs,
        ),
        time.time(),
    )
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(_lines(rows)))
    channels = (each for row in rows for each in row["channels"])
    bad = (each["state"] in _BAD or each["fault"].startswith("refused") for each in channels)
    return FAILED if any(bad) else OK


def _broker(arguments: argparse.Namespace) -> Mqtt:
    if (address := broker_of(arguments)) is not None:
        return Mqtt(**address)
    mqtt = read_settings(arguments.config, {}).mqtt if arguments.config else None
    if mqtt is None:
        raise SettingsError("no broker: give --mqtt HOST[:PORT], or --config with [mqtt]")
    return mqtt


def vehicles(retained: Mapping[str, bytes], now_s: float) -> list[dict[str, Any]]:
    """Return each vehicle with its channels, by what it has retained.

    `status` is `online`, `starting`, `offline`, or `silent` where it is not heard any more;
    `heard_s` is the age of its newest health, None without one.
    """
    found: dict[str, dict[str, Any]] = {}
    for topic, payload in sorted(retained.items()):
        device, *rest = topic.removeprefix(f"{PREFIX}/").split("/")
        said = _object(payload)
        new = {"vehicle": device, "status": "silent", "version": "", "heard_s": None}
        vehicle = found.setdefault(device, {**new, "channels": []})
        if rest == ["status"]:
            vehicle["status"] = str(said.get("state", "silent"))
            vehicle["version"] = str(said.get("version", ""))
        elif rest == ["health"]:
            vehicle["heard_s"] = _age_s(said.get("time"), now_s)
        elif said:
            vehicle["channels"].append(_known(said))
    for vehicle in found.values():
        heard_s = vehicle["heard_s"]
        if vehicle["status"] == "online" and (heard_s is None or heard_s > _SILENT_S):
            vehicle["status"] = "silent"
    return list(found.values())


def _known(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a channel that this version knows, of any vehicle's version."""
    texts = ("channel", "source", "state", "reason", "fault", "model", "content", "serves", "since")
    found: dict[str, Any] = {name: str(said.get(name, "")) for name in texts}
    numbers = {name: said.get(name) for name in ("serial", "share")}
    return found | {n: v if isinstance(v, int | float) else 0 for n, v in numbers.items()}


def _object(payload: bytes) -> dict[str, Any]:
    """Return the JSON object of a payload; an empty one where a client published something else."""
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _age_s(stamp: object, now_s: float) -> float | None:
    said = stamp.get("time") if isinstance(stamp, dict) else None
    try:
        moment = datetime.fromisoformat(str(said).replace("Z", "+00:00"))
        return max(0.0, now_s - moment.timestamp())
    except (ValueError, TypeError):
        return None


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["no vehicle has retained a state"]
    cells: list[tuple[str, ...]] = [_HEAD]
    notes = []
    for row in rows:
        name, status = row["vehicle"], row["status"]
        if status != "online" and row["heard_s"] is not None:
            status += f", {duration_text(row['heard_s'])}"
        for each in row["channels"] or [_known({})]:
            channel = each["channel"], str(each["serial"] or ""), each["model"]
            serves = each["serves"][:12], each["since"][:16]
            found = (name, status, row["version"], *channel, *serves, _word(each))
            cells.append(tuple(cell or UNKNOWN for cell in found))
            if text := "; ".join(filter(None, (each["reason"], each["fault"]))):
                notes.append(f"{name}: {each['channel']}: {text}")
    return table(cells, left=range(len(_HEAD))) + notes + _summary(rows)


def _word(channel: Mapping[str, Any]) -> str:
    """Return the state of the model, and a word for the fault of the channel itself."""
    fault = channel["fault"].partition(":")[0]
    return f"{channel['state']} (channel {fault})" if fault else channel["state"]


def _summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how many vehicles are in each state, in a line for each channel."""
    states: dict[str, Counter[str]] = {}
    for each in (each for row in rows for each in row["channels"]):
        states.setdefault(each["channel"], Counter())[_word(each)] += 1
    lines = {"vehicles": Counter(row["status"] for row in rows), **states}
    return [
        f"{name}: {', '.join(f'{count} {word}' for word, count in counts.most_common())}"
        for name, counts in lines.items()
    ]
