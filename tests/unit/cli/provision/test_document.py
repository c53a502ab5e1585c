"""Provisioning files of people who know what they do, and of those who try what they can."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.cli.provision import (
    LONGEST_BYTES,
    Document,
    SignedText,
    parse,
    read_file,
)
from edge_server.errors import SettingsError

BLOB = base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes(range(32))).decode()
KEY = f"ssh-ed25519 {BLOB} me@desk"


def of(text: str) -> Document:
    return parse(text.encode(), "edge-server.toml")


def test_every_table() -> None:
    document = of(
        f"""
        [device]
        id = "truck-17"
        [mqtt]
        host = "broker.example"
        port = 8883
        username = "truck"
        password = "secret"
        [ssh]
        keys = ["{KEY}"]
        [wifi]
        ssid = "depot"
        password = "long enough"
        [cameras.front]
        uri = "csi://0"
        """
    )
    assert document.device is not None
    assert document.device.id == "truck-17"
    assert document.ssh is not None
    assert document.ssh.keys == (KEY,)
    assert document.cameras["front"].uri == "csi://0"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[device]\nid = '../../etc'", "device.id"),
        ("[device]\nid = '$(reboot)'", "device.id"),
        ('[device]\nid = "a\\nb"', "device.id"),
        ("[device]\nid = 17", "device.id: expected a text in quotes; got 17"),
        ("[device]\nname = 'x'", "unknown field `name`"),
        ("[devise]\nid = 'x'", "unknown field `devise`"),
        ("device = 'x'", "device: expected a table"),
        ("[mqtt]\nhost = 'a b'", "mqtt.host"),
        ("[mqtt]\nhost = '-oProxyCommand=x'", "mqtt.host"),
        ('[mqtt]\nhost = "x\\n[cameras]"', "mqtt.host"),
        ("[mqtt]\nhost = 'x'\nport = 99999", "mqtt.port"),
        ("[mqtt]\nhost = 'x'\npassword = 'x'", "password needs a username"),
        ("[mqtt]\nhost = 'x'\nusername = 'x'\npassword = \"a\\nb\"", "mqtt.password"),
        ("[mqtt]\nhost = 'x'\nca = '/etc/shadow'", "ca: holds no certificate in PEM form"),
        ("[mqtt]\nhost = 'x'\nca = '-----BEGIN PRIVATE KEY-----'", "ca: holds a private key"),
        ("[mqtt]\nhost = 'x'\ncertificate = 'x'", "certificate needs ca"),
        ("[mqtt]\nhost = 'x'\nca_file = '/etc/passwd'", "unknown field `ca_file`"),
        ("[ssh]\nkeys = 'x'", "ssh.keys"),
        ("[ssh]\nkeys = ['x']", "ssh.keys: give lines of a .pub file"),
        (f"[ssh]\nkeys = ['command=\"sh\" {KEY}']", "ssh.keys: give lines of a .pub file"),
        (f'[ssh]\nkeys = ["{KEY}\\nssh-rsa x"]', "one line"),
        (f"[ssh]\nkeys = ['ssh-rsa {BLOB}']", "ssh.keys: give lines of a .pub file"),
        ("[wifi]\nssid = ''", "wifi.ssid"),
        (f"[wifi]\nssid = '{'x' * 33}'", "ssid: has more than 32 bytes"),
        (f"[wifi]\nssid = '{'é' * 17}'", "ssid: has more than 32 bytes"),
        ("[wifi]\nssid = 'x'\npassword = 'short'", "wifi.password"),
        ("[wifi]\nssid = 'x'\npassword = \"long enough\\n[vpn]\"", "wifi.password"),
        ("[cameras.'../x']\nuri = 'csi://0'", "cameras"),
        ("[cameras.front]\nuri = 'csi://0'\ncredentials_file = '/etc/shadow'", "names no files"),
        ("[cameras.front]\nuri = 3", "cameras"),
        ("[repository]\npaths = ['/tmp']", "unknown field `repository`"),
        ("x = " + "9" * 5000, "not TOML"),
        ("x = " + "[" * 3000, "not TOML"),
        ("[device\nid", "not TOML"),
        ("#!/bin/sh\nreboot", "not TOML"),
    ],
)
def test_what_could_mean_more_than_itself_is_refused(text: str, fault: str) -> None:
    with pytest.raises(SettingsError) as raised:
        of(text)
    assert str(raised.value).startswith("edge-server.toml: ")
    assert fault in str(raised.value)


def test_no_error_shows_a_secret() -> None:
    for text in (
        "[mqtt]\nhost = 'x'\nusername = 'x'\npassword = \"hunter2\\n\"",
        "[mqtt]\nhost = 'x'\nusername = 'x'\npassword = ['hunter2']",
        "[wifi]\nssid = 'x'\npassword = 'hunter2'",
    ):
        with pytest.raises(SettingsError) as raised:
            of(text)
        assert "hunter2" not in str(raised.value)


@given(st.binary(max_size=400))
def test_any_bytes_give_a_document_or_an_error_of_ours(data: bytes) -> None:
    assert_ours(SignedText(data).text)


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8) | st.integers(), max_size=3))
def test_any_table_gives_an_error_of_ours(table: dict[str, object]) -> None:
    import json

    inside = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in table.items())
    for name in ("device", "mqtt", "ssh", "wifi", "cameras.x"):
        assert_ours(f"[{name}]\nx = {{ {inside} }}".encode(errors="replace"))


def assert_ours(data: bytes) -> None:
    try:
        parse(data, "stick")
    except SettingsError as refused:
        error = refused
    else:
        return
    assert str(error).startswith("stick: ")


def test_a_file_is_a_regular_one_of_bounded_length(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(b"#" * (LONGEST_BYTES + 1))
    with pytest.raises(SettingsError, match="longer than 64 KiB"):
        read_file(large)
    link = tmp_path / "link"
    link.symlink_to("/etc/passwd")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, fault in (
        (link, "cannot be read"),
        (pipe, "no regular file"),
        (tmp_path, "cannot be read: Is a directory"),
        (Path("/dev/zero"), "no regular file"),
        (tmp_path / "missing", "No such file"),
    ):
        with pytest.raises(SettingsError, match=fault):
            read_file(path)


def test_the_signature_is_the_last_line_and_covers_what_comes_before() -> None:
    signature = bytes(range(64))
    line = b"# signature: " + base64.b64encode(signature) + b"\n"
    text = b"[device]\nid = 'x'\n"
    signed = SignedText(text + line)
    assert (signed.text, signed.signature) == (text, signature)
    assert signed.digest == SignedText(text).digest
    # Not the last line: a part of the text, which then has no signature.
    for data in (text + line + b"x = 1\n", text + line[:-5], text):
        assert SignedText(data).signature is None
        assert SignedText(data).text == data


@pytest.mark.parametrize(
    "text", ['wifi = "hunter22"', '[mqtt]\nhost = "h"\nusername = ["hunter22"]']
)
def test_what_stands_where_a_secret_belongs_is_not_quoted(text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(text.encode(), "file")
    assert "hunter22" not in str(caught.value)
