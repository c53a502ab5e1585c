from __future__ import annotations

import logging
import os
import socket
import uuid
from typing import TYPE_CHECKING

import pytest
from support.waiting import TIMEOUT_S

from edge_server.process import sd_notify
from edge_server.process.sd_notify import notify, watchdog_period_s

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Listener:
    """The socket on which systemd listens."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.settimeout(TIMEOUT_S)

    def received(self) -> str:
        return self._socket.recv(4096).decode()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Listener]:
    name = f"@edge-server-{uuid.uuid4()}" if request.param == "abstract" else f"{tmp_path}/notify"
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    listener = Listener(name.replace("@", "\0"))
    yield listener
    listener.close()


def test_what_is_sent_together_arrives_as_one_message(systemd: Listener) -> None:
    notify("READY=1", "STATUS=4 models")
    assert systemd.received() == "READY=1\nSTATUS=4 models"


def test_text_is_utf_8(systemd: Listener) -> None:
    notify("STATUS=camera näher")
    assert systemd.received() == "STATUS=camera näher"


def test_without_systemd_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    assert not caplog.records


def test_a_systemd_that_does_not_listen_costs_a_warning(
    systemd: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    systemd.close()
    notify("WATCHDOG=1", "STATUS=4 models")
    ((_, level, text),) = caplog.record_tuples
    assert level == logging.WARNING
    assert text.startswith("systemd: cannot be notified of WATCHDOG=1: ")


def test_a_manager_that_does_not_listen_is_not_waited_for(
    systemd: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sd_notify, "NOTIFY_TIMEOUT_S", 0.01)
    for _ in range(1000):  # more than any socket queues
        notify("WATCHDOG=1")
        if caplog.record_tuples:
            break
    assert "timed out" in caplog.text


def test_the_watchdog_s_period_is_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2500000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_period_s() == 2.5


@pytest.mark.parametrize("period", [None, "", "0", "-1", "soon"])
def test_without_a_period_nothing_is_watched(
    period: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    if period is not None:
        monkeypatch.setenv("WATCHDOG_USEC", period)
    assert watchdog_period_s() is None


def test_a_watchdog_for_another_process_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2500000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getppid()))
    assert watchdog_period_s() is None


def test_a_name_that_is_not_utf_8_is_sent_escaped(systemd: Listener) -> None:
    notify("STATUS=" + os.fsdecode(b"m\xff"))
    assert systemd.received() == "STATUS=m\\xff"
