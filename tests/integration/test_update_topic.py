"""The fleet sees version, slot and result of an update, whenever its broker is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.mosquitto import Subscriber

from edge_server.board.update import RecordFile, UpdateRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest
    from support.daemon_process import Process
    from support.mosquitto import Mosquitto

TOPIC = "edge/v1/tested/update"


def test_a_broker_that_was_away_during_the_update_gets_its_result(
    start: Callable[..., Process],
    stopped_mosquitto: Mosquitto,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker, state = stopped_mosquitto, tmp_path / "state"
    (state / "models").mkdir(parents=True)
    record = RecordFile(state)
    pending = UpdateRecord("pending", "B", "A", "A", "1.0", engine="rauc", changed_s=1_790_000_000)
    record.write(pending)
    monkeypatch.setenv("STATE_DIRECTORY", str(state))
    config = tmp_path / "config.toml"
    config.write_text(
        f'[device]\nid = "tested"\n[repository]\npaths = ["{state}/models"]\n'
        f'[mqtt]\nhost = "{broker.host}"\nport = {broker.port}\n'
    )
    start("--config", str(config))
    # Nobody hears the trial: the commit comes while the broker is away.
    record.write(UpdateRecord("committed", "B", "A", "B", "2.0", "kept", engine="rauc"))
    broker.start()
    subscriber = Subscriber(broker.port, TOPIC)
    found = subscriber.wait(TOPIC, lambda m: m["state"] == "committed")
    assert (found["slot"], found["target"], found["result"]) == ("B", "B", "kept")

    # A later one is published at once, and stays for those who come after it.
    record.write(UpdateRecord("rolled_back", "A", "B", "B", "2.0", "A did not start"))
    subscriber.wait(TOPIC, lambda m: m["state"] == "rolled_back")
    late = Subscriber(broker.port, TOPIC)
    assert late.wait(TOPIC)["result"] == "A did not start"
    late.close()
    subscriber.close()
