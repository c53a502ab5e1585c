"""What a provisioning file changes on the device, and what it leaves."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any

import pytest

from edge_server.cli import provision as provisioning
from edge_server.cli.provision import (
    Places,
    SignedText,
    apply,
    parse,
    refuse_unless_newer,
    refuse_unless_trusted,
)
from edge_server.errors import SettingsError
from edge_server.process.disk import atomic_write
from edge_server.settings import read_settings

KEY = (
    "ssh-ed25519 "
    + base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes(range(32))).decode()
)
SHIPPED = Path(__file__).parents[4] / "systemd/edge-server.toml"
WHOLE = f"""
[device]
id = "truck-17"
[mqtt]
host = "127.0.0.1"
username = "truck"
password = 'pa"ss\\word'
[ssh]
keys = ["{KEY}"]
[wifi]
ssid = "a;b"
password = 'back\\slash and space'
[cameras.front]
uri = "synthetic://road?seed=7&fps=10"
priority = 2
"""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "etc").mkdir()
    (tmp_path / "data/identity").mkdir(parents=True)
    (tmp_path / "etc/config.toml").write_bytes(SHIPPED.read_bytes())
    return Places(tmp_path / "etc/config.toml", tmp_path / "data", group=None)


def applied(text: str, places: Places) -> list[str]:
    return apply(parse(text.encode(), "file"), "digest", places)


def files(places: Places) -> dict[str, tuple[int, bytes]]:
    root = places.data.parent
    return {
        str(path.relative_to(root)): (path.stat().st_mode & 0o777, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_settings_can_be_read_by_the_daemon_from_the_moment_on_when_they_are_there(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    chmod = Path.chmod

    def look(path: Path, mode: int) -> None:
        modes.append((path.name, path.stat().st_mode & 0o777))
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", look)
    umask = os.umask(0o022)
    try:
        applied(WHOLE, places)
    finally:
        os.umask(umask)
    assert ("config.toml", 0o644) in modes
    assert ("provisioned.nmconnection", 0o600) in modes


def test_settings_are_valid_and_keep_what_the_file_does_not_name(places: Places) -> None:
    before = read_settings(places.config, {})
    applied(WHOLE, places)
    settings = read_settings(places.config, {})
    assert settings.device.id == "truck-17"
    assert settings.repository == before.repository
    assert settings.grpc == before.grpc
    assert settings.mqtt is not None
    assert Path(settings.mqtt.password_file or "").read_text() == 'pa"ss\\word'
    assert settings.cameras["front"].priority == 2
    made = files(places)
    assert made["etc/mqtt_password"][0] == 0o640
    assert made["data/network/provisioned.nmconnection"][0] == 0o600
    assert made["etc/config.toml.before"][1] == SHIPPED.read_bytes()
    assert made["data/ssh/edge"][1].decode() == f"{KEY}\n"
    assert made["data/identity/provisioned"][1] == b"digest\n"
    keyfile = made["data/network/provisioned.nmconnection"][1].decode()
    assert "ssid=97;59;98;\n" in keyfile
    assert "psk=back\\\\slash\\sand\\sspace\n" in keyfile


def test_applying_again_changes_nothing(places: Places) -> None:
    applied(WHOLE, places)
    once = files(places)
    applied(WHOLE, places)
    assert files(places) == once


def test_a_later_file_replaces_its_tables_alone(places: Places) -> None:
    applied(WHOLE, places)
    applied('[cameras.rear]\nuri = "synthetic://road?seed=8&fps=10"\n', places)
    settings = read_settings(places.config, {})
    assert sorted(settings.cameras) == ["front", "rear"]
    assert settings.device.id == "truck-17"
    assert settings.mqtt is not None


def test_keys_that_no_file_can_have_stay_beside_those_of_a_table(places: Places) -> None:
    places.config.write_text(
        '[device]\nclock = "synchronized"\n'
        '[mqtt]\nhost = "127.0.0.2"\nusername = "factory"\npayload = "protobuf"\n'
    )
    applied('[device]\nid = "truck-17"\n[mqtt]\nhost = "127.0.0.1"\n', places)
    settings = read_settings(places.config, {})
    assert (settings.device.id, settings.device.clock) == ("truck-17", "synchronized")
    assert settings.mqtt is not None
    assert (settings.mqtt.host, settings.mqtt.payload) == ("127.0.0.1", "protobuf")
    assert settings.mqtt.username is None


def test_settings_that_the_daemon_would_refuse_change_nothing(places: Places) -> None:
    before = files(places)
    for text, fault in (
        # A password in plain text over a network.
        (WHOLE.replace("127.0.0.1", "broker.example"), "plain text"),
        ('[mqtt]\nhost = "x"\nport = 0\n', "port must be 1 to 65535"),
    ):
        with pytest.raises(SettingsError, match=fault):
            applied(text, places)
        assert files(places) == before


def test_a_power_cut_at_any_write_leaves_settings_that_are_valid(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(WHOLE, places)
    complete = files(places)
    for survives in range(7):
        for path in (places.data, places.config.parent):
            for file in [each for each in path.rglob("*") if each.is_file()]:
                file.unlink()
        places.config.write_bytes(SHIPPED.read_bytes())
        left = [survives]

        def write(*arguments: Any, left: list[int] = left, **named: Any) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            atomic_write(*arguments, **named)

        monkeypatch.setattr(provisioning, "atomic_write", write)
        with pytest.raises(KeyboardInterrupt):
            applied(WHOLE, places)
        assert not places.record.exists()
        settings = read_settings(places.config, {})
        assert settings.mqtt is None or Path(settings.mqtt.password_file or "").exists()
        monkeypatch.setattr(provisioning, "atomic_write", atomic_write)
        applied(WHOLE, places)
        assert files(places) == complete


def test_what_a_dead_process_staged_is_removed(places: Places) -> None:
    left = places.config.parent / ".provision-left"
    left.mkdir()
    (left / "mqtt_password").write_text("secret")
    applied("[device]\nid = 'x'\n", places)
    assert not left.exists()


def trust(places: Places, **how: Any) -> None:
    signed = SignedText(b"[device]\nid = 'x'\n")
    defaults = {"key": None, "replace": False}
    refuse_unless_trusted(signed, "file", places, **{**defaults, **how})


def test_without_a_key_only_the_first_file_counts(places: Places) -> None:
    trust(places)
    places.record.write_text("of another file\n")
    with pytest.raises(SettingsError, match="provisioned already"):
        trust(places)
    trust(places, replace=True)


def test_with_a_key_no_file_counts_without_a_signature(places: Places) -> None:
    with pytest.raises(SettingsError, match="is not signed"):
        trust(places, key=Path("provision.pem"), replace=True)


def serial_file(serial: int, *devices: str, device: str = "truck-17") -> str:
    return f'[file]\nserial = {serial}\ndevices = {list(devices)}\n[device]\nid = "{device}"\n'


def newer(text: str, places: Places, *, replace: bool = False) -> None:
    signed = SignedText(text.encode())
    document = parse(signed.text, "file")
    refuse_unless_newer(document, signed.digest, "file", places, replace=replace)
    apply(document, signed.digest, places)


def test_a_file_counts_only_with_a_greater_serial_than_all_before(places: Places) -> None:
    newer(serial_file(5), places)
    for text, fault in (
        (serial_file(5, device="truck-18"), "serial 5 is not above 5"),
        (serial_file(4), "serial 4 is not above 5"),
        ('[device]\nid = "truck-18"\n', "[file] serial = 6 or above"),
    ):
        with pytest.raises(SettingsError, match=re.escape(fault)):
            newer(text, places)
    newer(serial_file(4), places, replace=True)
    with pytest.raises(SettingsError, match="not above 5"):
        newer(serial_file(5, device="truck-18"), places)
    newer(serial_file(6), places)


def test_a_file_is_for_the_devices_that_it_names(places: Places) -> None:
    (places.data / "identity/device-id").write_text("edge-1234abcd\n")
    with pytest.raises(SettingsError, match="is for truck-3; this device is edge-1234abcd"):
        newer(serial_file(1, "truck-3"), places)
    newer(serial_file(1, "edge-1234abcd"), places)


def test_a_power_cut_before_the_record_lets_the_same_file_complete(places: Places) -> None:
    (places.data / "identity/device-id").write_text("edge-1234abcd\n")
    text = serial_file(1, "edge-1234abcd")
    newer(text, places)
    places.record.unlink()
    newer(text, places)
    assert places.record.exists()
