"""A real MQTT broker on loopback, and a subscriber of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from support.free_ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PATIENCE_S = 30.0


class Mosquitto:
    """A real broker on a free loopback port, which can be treated badly.

    Args:
        folder: for its configuration, its own.
        lines: of mosquitto.conf, beside the listener; the default lets everyone in.
    """

    def __init__(self, folder: Path, *lines: str) -> None:
        self.host = "127.0.0.1"
        (self.port,) = free_ports(1)
        self._conf = folder / "mosquitto.conf"
        # It keeps root when started as root, or it could not read files under a private folder.
        self._conf.write_text(
            "\n".join(
                [
                    "user root",
                    *([] if "persistence true" in lines else ["persistence false"]),
                    "connection_messages false",
                    f"listener {self.port} {self.host}",
                    *(lines or ["allow_anonymous true"]),
                    "",
                ]
            )
        )
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Returns when it listens."""
        self._process = process = subprocess.Popen(
            [mosquitto_binary(), "-c", str(self._conf)], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if line.rstrip().endswith("running"):
                # It logs every save, and would wait for ever for a reader of a full pipe.
                self._reader = threading.Thread(target=process.stderr.read, daemon=True)
                self._reader.start()
                return
        self.kill()
        raise AssertionError(f"mosquitto did not start:\n{said}")

    def kill(self) -> None:
        """kill -9, frozen or not; returns when it is gone. A second call does nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._reader is not None:
                self._reader.join()
            assert self._process.stderr is not None
            self._process.stderr.close()
            self._process = self._reader = None

    def reload(self) -> None:
        """Have it read its files of users again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def mosquitto_binary() -> str:
    # Debian puts it where only root looks.
    return shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or ""


class Subscriber:
    """Hears topics on a real broker.

    Attributes:
        messages: of each topic, in order.
        in_order: topic and message, of all topics.
        arrived_ns: CLOCK_MONOTONIC of the arrival of each message of `in_order`.
    """

    def __init__(self, port: int, *topics: str) -> None:
        self.messages: dict[str, list[dict]] = {}
        self.in_order: list[tuple[str, dict]] = []
        self.arrived_ns: list[int] = []
        self._heard = threading.Condition()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        subscribed = threading.Event()
        self._client.on_connect = lambda c, *_: [c.subscribe(topic, 1) for topic in topics]
        self._client.on_subscribe = lambda *_: subscribed.set()
        self._client.on_message = self._receive
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        assert subscribed.wait(PATIENCE_S)

    def _receive(self, client: object, userdata: object, message: mqtt.MQTTMessage) -> None:
        arrived_ns = time.monotonic_ns()
        # A retained message that is cleared is empty.
        said = json.loads(message.payload or b"{}")
        with self._heard:
            self.messages.setdefault(message.topic, []).append(said)
            self.in_order.append((message.topic, said))
            self.arrived_ns.append(arrived_ns)
            self._heard.notify_all()

    def wait(
        self, topic: str, fits: Callable[[dict], bool] = lambda _: True, since: int = 0
    ) -> dict:
        """Wait for a message that fits, of those on the topic from number `since` on."""
        with self._heard:
            found = self._heard.wait_for(
                lambda: [m for m in self.messages.get(topic, [])[since:] if fits(m)], PATIENCE_S
            )
        last = [{**m, "lanes": ...} for m in self.messages.get(topic, [])[-2:]]
        assert found, f"nothing fitting on {topic}, last {last}; heard: {self.messages.keys()}"
        return found[0]

    def wait_for_last(self, topic: str, fits: Callable[[dict], bool]) -> None:
        """Wait until the newest message is one that fits."""
        with self._heard:
            found = self._heard.wait_for(lambda: fits(self.messages[topic][-1]), PATIENCE_S)
        assert found, f"{topic}: {self.messages[topic][-3:]}"

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()
