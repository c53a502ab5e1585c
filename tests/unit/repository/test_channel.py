"""What a vehicle makes of a channel's index: a pure function of index, device and surroundings."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import msgspec
import pytest

from edge_server.errors import InternalError, ModelConfigError, Unavailable
from edge_server.repository import channel
from edge_server.repository.channel import (
    ChannelFollower,
    Release,
    Surroundings,
    decide,
    index_of,
    position,
    require_newer,
)
from edge_server.repository.manifest import PublicKeys, SigningKey, make_keys
from edge_server.repository.remote import Origin
from edge_server.repository.store import ModelStore
from edge_server.repository.store_state import ChannelMark, StoreState
from edge_server.repository.verdicts import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOURCE = "oci://registry.example/fleet/lanes:stable"
DEVICES = [f"truck-{number}" for number in range(300)]
NOW = datetime(2026, 12, 1, 3, tzinfo=timezone.utc)
KNOWN = Surroundings(NOW, 120.0, 50.0)


@pytest.fixture
def release() -> Release:
    return Release("fleet/lanes:stable", 7, "net", "a" * 64, "b" * 64, 100.0)


def changed(release: Release, **fields: object) -> Release:
    return msgspec.structs.replace(release, **fields)


def taking(release: Release) -> set[str]:
    return {device for device in DEVICES if decide(release, device, KNOWN).state == "due"}


def encoded(release: Release) -> str:
    return msgspec.json.encode(release).decode()


def test_a_share_of_300_vehicles_grows_and_never_loses_one(release: Release) -> None:
    shares = [taking(changed(release, share=share)) for share in (0, 1, 10, 50, 100)]
    assert shares[0] == set()
    assert shares[-1] == set(DEVICES)
    for smaller, larger in itertools.pairwise(shares):
        assert smaller < larger
    # 300 vehicles, 10 % of them: 30, and a standard deviation of 5.
    assert 15 <= len(shares[2]) <= 45
    assert decide(changed(release, share=1), DEVICES[0], KNOWN).state == "not_in_share"


def test_another_model_begins_with_other_vehicles(release: Release) -> None:
    one = taking(changed(release, share=10))
    other = taking(changed(release, share=10, content="c" * 64))
    assert len(one & other) < len(one) / 2
    # Another number, serial or archive of the same model does not.
    assert one == taking(changed(release, share=10, serial=8, archive="d" * 64))
    assert all(0 <= position("b" * 64, device) < 100 for device in DEVICES)


@pytest.mark.parametrize(
    ("fields", "surroundings", "state", "says"),
    [
        ({}, Surroundings(), "due", ""),
        ({"not_before": NOW}, KNOWN, "due", ""),
        ({"not_before": NOW + timedelta(seconds=1)}, KNOWN, "waiting", "for 2026-12-01T03:00:01"),
        ({"not_after": NOW}, KNOWN, "ended", "2026-12-01"),
        ({"not_after": NOW + timedelta(days=1)}, KNOWN, "due", ""),
        ({"not_after": NOW}, Surroundings(), "waiting", "the clock cannot be believed"),
        ({"conditions": {"parked_s": 120}}, KNOWN, "due", ""),
        ({"conditions": {"parked_s": 121}}, KNOWN, "waiting", "parked for 120 of 121 s"),
        ({"conditions": {"parked_s": 0}}, Surroundings(NOW), "waiting", "speed is not known"),
        ({"conditions": {"max_celsius": 50}}, KNOWN, "due", ""),
        ({"conditions": {"max_celsius": 49}}, KNOWN, "waiting", "the board has 50 °C"),
        ({"conditions": {"max_celsius": 90}}, Surroundings(NOW), "waiting", "temperature is not"),
        ({"conditions": {"parked_s": 300, "max_celsius": 1}}, KNOWN, "waiting", "; the board"),
    ],
)
def test_times_and_conditions_are_waited_for(
    release: Release, fields: dict[str, object], surroundings: Surroundings, state: str, says: str
) -> None:
    decision = decide(changed(release, **fields), "truck-1", surroundings)
    assert decision.state == state
    assert says in decision.reason


def test_a_condition_that_no_device_can_know_is_refused_by_its_name(release: Release) -> None:
    with pytest.raises(ModelConfigError, match="'wifi' is nothing that this device can know"):
        Release.parse(encoded(changed(release, conditions={"wifi": 1, "parked_s": 1})))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"serial": 6}, "serial 6 is older than 7"),
        ({"share": 50.0}, "another index has the serial 7"),
        ({"channel": "fleet/lanes:beta", "serial": 9}, "is that of fleet/lanes:beta"),
    ],
)
def test_only_a_newer_index_of_this_channel_counts(
    release: Release, fields: dict[str, object], says: str
) -> None:
    known = encoded(release)
    assert require_newer(SOURCE, known, "") == require_newer(SOURCE, known, known) == release
    assert require_newer(SOURCE, encoded(changed(release, serial=8)), known).serial == 8
    with pytest.raises(ModelConfigError, match=says):
        require_newer(SOURCE, encoded(changed(release, **fields)), known)


def test_the_serial_of_a_later_versions_index_still_counts(release: Release) -> None:
    later = '{"serial":8,"format":2,"more":[1]}'
    with pytest.raises(ModelConfigError, match="serial 7 is older than 8"):
        require_newer(SOURCE, encoded(release), later)


@pytest.mark.parametrize(
    "index",
    ["", "{", "[" * 100_000, '{"serial": 1}', '{"format": 2}'],
    ids=["empty", "cut", "deep", "incomplete", "of_a_later_format"],
)
def test_an_index_that_is_none_is_refused(index: str) -> None:
    with pytest.raises(ModelConfigError, match="its index cannot be read"):
        require_newer(SOURCE, index, "")


def test_a_name_that_leads_out_of_the_repository_is_no_model(release: Release) -> None:
    with pytest.raises(ModelConfigError, match="which is no model"):
        Release.parse(encoded(changed(release, model="../net")))


@pytest.fixture
def sign(tmp_path: Path) -> Callable[[str], SigningKey]:
    def make(name: str) -> SigningKey:
        make_keys(tmp_path / name)
        return SigningKey(tmp_path / name)

    return make


def test_an_index_that_was_changed_or_signed_by_another_key_is_refused(
    release: Release, sign: Callable[[str], SigningKey], tmp_path: Path
) -> None:
    import base64

    key, other = sign("fleet.key"), sign("other.key")
    keys, index = PublicKeys([tmp_path / "fleet.key.pub"]), encoded(release)

    def annotated(index: str, signature: bytes) -> Origin:
        text = base64.b64encode(signature).decode()
        found = {"edge-server.channel": index, "edge-server.channel.signature": text}
        return Origin("lanes", (), lambda: None, found)

    good = key.sign(index.encode())
    assert index_of(annotated(index, good), SOURCE, keys) == index
    for wrong in (
        annotated(index.replace('"share":100.0', '"share":99.00'), good),
        annotated(index, other.sign(index.encode())),
        annotated(index, good[:-1]),
    ):
        with pytest.raises(ModelConfigError, match=r"is not signed by .*fleet.key.pub"):
            index_of(wrong, SOURCE, keys)
    with pytest.raises(ModelConfigError, match="is no channel"):
        index_of(Origin("lanes", (), lambda: None), SOURCE, keys)


class NoMarks:
    def channel(self, _name: str) -> ChannelMark:
        return ChannelMark()

    def mark_channel(self, name: str, mark: ChannelMark) -> None:
        raise AssertionError((name, mark))


@pytest.fixture
def follower(sign: Callable[[str], SigningKey], tmp_path: Path) -> ChannelFollower:
    sign("fleet.key")
    return ChannelFollower(
        *("lanes", SOURCE, [tmp_path / "fleet.key.pub"], "truck-7"),
        interval_s=300.0,
        ca_file=None,
        repositories=[tmp_path],
        cache=tmp_path / "cache",
        marks=NoMarks(),
        surroundings=Surroundings,
        verdict=lambda _: Verdict(),
        on_news=lambda *_: None,
    )


def test_a_registrys_words_are_short_in_a_report(
    follower: ChannelFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Unavailable("418 " + "R" * 60_000)

    monkeypatch.setattr(channel, "open_origin", refuse)
    follower.step(float("inf"))
    assert follower.report.fault.startswith("unreachable: 418 RRR")
    assert len(follower.report.fault) < 1100


def test_a_registry_that_drips_is_reported_while_it_does(
    follower: ChannelFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower.worker.start()
    assert follower.report.fault == ""
    monkeypatch.setattr(channel, "_SILENT_S", 0.0)
    assert follower.report.fault.startswith("unreachable: oci://")
    follower.worker.stop()
    assert follower.report.fault == ""


def test_what_is_known_of_a_channel_outlives_other_repositories() -> None:
    mark = ChannelMark("{}", "b" * 64, 5)
    state = StoreState(channels={"lanes": mark}, repositories=("a",)).followed(("b",))
    assert state.channels == {"lanes": mark}
    assert state.followed(("a",)).channels == {"lanes": mark}


def test_the_serial_outlives_the_process_and_a_damaged_file(tmp_path: Path) -> None:
    place = tmp_path / "store"
    first, second = ChannelMark('{"serial":7}', "b" * 64, 5), ChannelMark('{"serial":8}')
    store = ModelStore(place)
    assert store.channel("lanes") == ChannelMark()
    store.mark_channel("lanes", first)
    store.mark_channel("lanes", second)
    store.close()
    reopened = ModelStore(place)
    assert reopened.channel("lanes") == second
    reopened.close()
    # A torn write leaves the state before it, of which an older serial may be a part.
    (place / "state.json").write_bytes(b"torn")
    reopened = ModelStore(place)
    assert reopened.channel("lanes") in (first, second)
    reopened.close()


def test_a_serial_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    store.close()
    with pytest.raises(InternalError, match="it is closed"):
        store.mark_channel("lanes", ChannelMark("{}"))
