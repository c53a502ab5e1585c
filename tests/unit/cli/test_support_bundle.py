"""A support bundle has no secret in any form, and a part that fails costs only itself."""

from __future__ import annotations

import base64
import io
import json
import re
import tarfile
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.board.board import Identity
from edge_server.board.doctor.hardware import Configuration
from edge_server.cli.support_bundle import (
    MOST_BYTES,
    Bundle,
    Missing,
    Redaction,
    _end_of,
    _tail,
    gather,
    names_of,
    write,
)
from edge_server.errors import EdgeServerError
from edge_server.process import text as masking
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from edge_server.settings import Settings

KEY = (
    "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg\n"
    "VcB/UNPxalR9zDYAjQIfjojUDiQuGnSJrFEEzZPT/92hRANC\n-----END PRIVATE KEY-----\n"
)
SECRETS = {
    "camera": "t0p&s/cret+cam",
    "credentials": "Wagenheber 77%",
    "broker": "fünf-Räder-am-Wagen",
    "user": "truck-user-17",
    "header": "x-Y-z-0815-header",
    "key_line": "VcB/UNPxalR9zDYAjQIfjojUDiQuGnSJrFEEzZPT/92hRANC",
}


@pytest.fixture(autouse=True)
def no_secret_is_kept() -> Iterator[None]:
    """The table of secrets is the process's."""
    before = masking._patterns
    yield
    masking._patterns = before


def settings_of(folder: Path) -> Settings:
    (folder / "key").write_text(KEY)
    (folder / "password").write_text(SECRETS["broker"] + "\n")
    (folder / "login").write_text(f"viewer:{SECRETS['credentials']}\n")
    return read_settings(
        None,
        {
            "device": {"id": "truck-17"},
            "mqtt": {
                "host": "127.0.0.1",
                "username": SECRETS["user"],
                "password_file": str(folder / "password"),
                "ca_file": str(folder / "ca"),
                "cert_file": str(folder / "crt"),
                "key_file": str(folder / "key"),
            },
            "grpc": {
                "restricted": [
                    {"protocols": ["inference"], "header": "x", "value": SECRETS["header"]}
                ]
            },
            "cameras": {
                "front": {"uri": f"rtsp://viewer:{quote(SECRETS['camera'], safe='')}@10.0.0.5/s"},
                "rear": {"uri": "rtsp://10.0.0.6/s", "credentials_file": str(folder / "login")},
            },
        },
    )


def forms(secret: str) -> dict[str, str]:
    """What a text may have instead of a secret."""
    data = secret.encode()
    found = {
        "plain": secret,
        "percent": quote(secret, safe=""),
        "plus": quote_plus(secret),
        "json": json.dumps(secret),
        "json, ascii": json.dumps(secret, ensure_ascii=False),
        "hex": data.hex(),
        "login": base64.b64encode(b"viewer:" + data).decode(),
    }
    for pad in range(4):
        inside = b"x" * pad + data + b"y" * (3 - pad)
        found[f"base64 at {pad}"] = base64.b64encode(inside).decode()
        found[f"urlsafe at {pad}"] = base64.urlsafe_b64encode(inside).decode()
    return found


def leaks(text: str, secret: str) -> bool:
    """Whether the secret can be read out of `text`, decoding what looks like base64."""
    plain = secret.encode()
    tries = [text.encode(), json.dumps(text).encode()]
    for token in re.findall(r"[A-Za-z0-9+/_-]{8,}", text):
        for start in range(4):
            piece = token[start:].replace("-", "+").replace("_", "/")
            tries.append(base64.b64decode(piece[: len(piece) // 4 * 4], validate=False))
    return any(plain in each for each in tries) or quote(secret, safe="") in text


def test_no_form_of_a_secret_of_the_settings_stays(tmp_path: Path) -> None:
    redaction = Redaction()
    settings = settings_of(tmp_path)
    redaction.add_settings(settings)
    for name, secret in SECRETS.items():
        for form, written in forms(secret).items():
            text = redaction.text(f"a line with {written} in it\n")
            assert not leaks(text, secret), (name, form, text)
            assert text.startswith("a line with ")
    shown = redaction.settings(settings)
    for name, secret in SECRETS.items():
        assert not leaks(shown, secret), name
    assert '"10.0.0.5' in shown or "10.0.0.5" in shown
    assert json.loads(shown)["mqtt"]["password_file"] == str(tmp_path / "password")


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=6, max_size=30))
def test_any_secret_is_replaced_in_every_form(secret: str) -> None:
    secret = secret.strip()
    if len(secret) < 6:
        return
    before = masking._patterns
    try:
        redaction = Redaction()
        redaction.add(secret)
        for form, written in forms(secret).items():
            if form == "login" and len(secret.encode()) < 8:
                continue  # a part of base64 that is too short to be found safely
            assert secret not in redaction.text(written), form
            if form.startswith(("base64", "urlsafe")) and len(secret.encode()) >= 8:
                assert not leaks(redaction.text(written), secret), form
    finally:
        masking._patterns = before


@pytest.mark.parametrize(
    "text",
    [
        "password = hunter2hunter2",
        'passwd: "hunter2hunter2"',
        "API_KEY=hunter2hunter2",
        '{"token": "hunter2hunter2"}',
        '{\\"password\\": \\"hunter2hunter2\\"}',
        '{"password": "a\\"hunter2hunter2"}',
        "mosquitto_sub --password hunter2hunter2",
        "Authorization: Bearer hunter2hunter2",
        "authorization: Basic hunter2hunter2",
        "rtsp://admin:hunter2hunter2@10.0.0.1/stream",
        "mqtt://u:hunter2hunter2@broker",
        "Environment=MQTT_PASSWORD=hunter2hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2hunter2\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\\nhunter2hunter2",
    ],
)
def test_an_unknown_secret_is_found_by_its_place(text: str) -> None:
    assert "hunter2" not in Redaction().text(text)


def test_the_end_of_a_key_without_its_begin_is_hidden() -> None:
    end = KEY.partition("MIGHAg")[2]
    assert Redaction().text(f"{end}camera front: up\n") == "*** private key\ncamera front: up\n"


def test_the_end_of_a_log_begins_with_a_whole_line(tmp_path: Path) -> None:
    line = "password=hunter2\n"
    (tmp_path / "log").write_text(line * (MOST_BYTES // len(line) + 2))
    tail = _tail(tmp_path / "log")
    assert set(tail.splitlines()) == {line.strip()}
    assert len(tail) > MOST_BYTES - len(line)


def test_names_of_files_and_settings_stay() -> None:
    text = '"password_file": "/etc/edge_server/mqtt_password", "key": "/etc/edge_server/grpc.key"'
    assert Redaction().text(text) == text


def test_names_of_the_device_are_replaced_where_they_are_whole_words() -> None:
    redaction = Redaction(("truck-17", "truck"))
    text = "edge/v1/truck-17/status on truck, trucks stay, truck-170 too"
    assert redaction.text(text) == "edge/v1/device/status on device, trucks stay, truck-170 too"


def test_the_client_id_has_the_name_of_the_device_and_is_replaced() -> None:
    client_id = Identity.of_this_host("truck-17", "").client_id
    assert Redaction(names_of("truck-17")).text(f"id '{client_id}'") == "id 'device'"


def test_a_part_that_fails_is_missing_with_its_reason_and_without_secrets(tmp_path: Path) -> None:
    redaction = Redaction()
    settings = settings_of(tmp_path)
    redaction.add_settings(settings)

    def absent() -> str:
        raise Missing(f"refused {SECRETS['broker']}")

    def broken() -> str:
        raise ValueError(SECRETS["camera"])

    found = [("a.txt", absent), ("b.txt", broken), ("c.txt", lambda: SECRETS["header"])]
    bundle = gather(Configuration(None, settings), redaction, found)
    assert set(bundle.files) == {"settings.json", "c.txt"}
    assert bundle.missing == {"a.txt": "refused ***", "b.txt": "ValueError: ***"}
    assert bundle.files["c.txt"] == b"***"


def test_settings_that_cannot_be_read_are_missing_with_the_reason() -> None:
    bundle = gather(Configuration(None, None, "config.toml: not TOML"), Redaction(), [])
    assert bundle.missing == {"settings.json": "config.toml: not TOML"}


def test_each_part_is_bounded_and_a_log_keeps_its_end() -> None:
    bundle = Bundle()
    bundle.add("journal.txt", "old\n" * MOST_BYTES + "newest")
    bundle.add("doctor.json", "first" + "x" * 2 * MOST_BYTES)
    assert all(len(data) <= MOST_BYTES for data in bundle.files.values())
    assert bundle.files["journal.txt"].endswith(b"newest")
    assert bundle.files["doctor.json"].startswith(b"first")
    assert bundle.cut == ["journal.txt", "doctor.json"]
    assert json.loads(bundle.manifest())["cut"] == bundle.cut


def test_the_archive_is_readable_by_its_owner_alone_and_replaces_no_link(tmp_path: Path) -> None:
    bundle = Bundle()
    bundle.add("a.txt", "content")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "bundle.tar.gz"
    path.symlink_to(victim)
    assert write(bundle, path) == path.stat().st_size
    assert victim.read_text() == "precious"
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
        names = archive.getnames()
    assert names == ["edge-server-support/manifest.json", "edge-server-support/a.txt"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(EdgeServerError, match="nowhere/x: cannot be written: No such file"):
        write(Bundle(), tmp_path / "nowhere/x")


@pytest.mark.parametrize("lines", [0, 1, 1000, 200_000])
def test_the_end_of_a_long_output_begins_with_a_whole_line(lines: int) -> None:
    found = _end_of(b"".join(b"line %09d\n" % number for number in range(lines))).splitlines()
    assert len(found) == min(lines, MOST_BYTES // 15)
    assert found[-1:] == ([b"line %09d" % (lines - 1)] if lines else [])
    assert all(len(line) == 14 for line in found[:1])
