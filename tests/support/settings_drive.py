"""A daemon with a broker, whose settings a test rewrites while it runs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from support.mosquitto import Subscriber

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.daemon_process import Process
    from support.mosquitto import Mosquitto

MODELS = Path(__file__).parents[2] / "models"
CAMERA = '[cameras.{name}]\nuri = "synthetic://road?seed={seed}&fps=5&width=320&height=180"\n'
TOPIC = "edge/v1/tested/cameras"


def camera(name: str, seed: int = 1, more: str = "") -> str:
    return CAMERA.format(name=name, seed=seed) + more


class Drive:
    """A daemon with a broker, whose settings the test rewrites."""

    def __init__(
        self,
        folder: Path,
        start: Callable[..., Process],
        broker: Mosquitto,
        *cameras: str,
        flags: tuple[str, ...] = (),
    ) -> None:
        self.config = folder / "config.toml"
        self.broker = f"127.0.0.1:{broker.port}"
        self.base = f'[device]\nid = "tested"\n[repository]\npaths = ["{MODELS}"]\n'
        self.mqtt = f'[mqtt]\nhost = "127.0.0.1"\nport = {broker.port}\n'
        self.subscriber = Subscriber(broker.port, "edge/v1/tested/#")
        self.write(*cameras)
        self.process = start("--config", str(self.config), *flags)

    def write(self, *cameras: str, more: str = "") -> None:
        self.config.write_text("".join((self.base, self.mqtt, *cameras, more)))

    def hang_up(self) -> None:
        self.process.popen.send_signal(signal.SIGHUP)

    def reload(self, *cameras: str, more: str = "") -> str:
        """Rewrite the cameras and reload; the first that the log says of it."""
        self.write(*cameras, more=more)
        return self.reload_file()

    def reload_file(self) -> str:
        """Reload the file as it is; the first that the log says of it."""
        before = len(self.log)
        self.hang_up()
        self.process.wait_for("RELOADING=1\nMONOTONIC_USEC=")
        self.process.wait_for("READY=1")
        # The log is written on a thread of its own.
        self.wait_for_log("settings: ", before)
        return self.log[before:]

    @property
    def log(self) -> str:
        return self.process.log.read_text()

    def wait_for_log(self, text: str, since: int = 0) -> None:
        """Wait until the log has `text`, after its first `since` characters."""
        self.process.wait_for_log(text, since=since)

    def wait_for_lanes(self, name: str) -> dict:
        """New ones, of which the first may be of before."""
        heard = self.subscriber.messages.get(f"{TOPIC}/{name}/lanes", [])
        after = heard[-1]["seq"] + 1 if heard else -1
        return self.subscriber.wait(f"{TOPIC}/{name}/lanes", lambda m: m["seq"] > after)
