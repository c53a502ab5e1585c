"""The first start of a daemon that follows repositories, before anything has served."""

from __future__ import annotations

import os
import resource
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from support.counted_backend import Gate
from support.waiting import wait_until
from unit.lifecycle.board import CONFIG, TIMEOUT_S

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.poll import PollControl
from edge_server.lifecycle.records import AcceptedCopies, Deployments
from edge_server.process.threads import GivenUp
from edge_server.repository.store import ModelStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.counted_backend import CountedBackend
    from support.model_folders import WriteModel


@pytest.fixture
def control(repository: Path, tmp_path: Path, counted: CountedBackend) -> Iterator[PollControl]:
    deployments = Deployments(ModelRegistry(), ModelStore(tmp_path / "store"), [repository])
    control = PollControl(
        RepositoryLoader(ModelLifecycle(deployments), AcceptedCopies(deployments)),
        deployments,
        [repository],
        poll_s=0.2,
        settle_s=0.2,
    )
    yield control
    control.close(TIMEOUT_S)


def states(control: PollControl) -> dict[str, str]:
    return {entry.name: entry.state.value for entry in control.index(only_ready=False)}


def test_a_directory_that_never_settles_keeps_no_start_waiting(
    control: PollControl, write_model: WriteModel, caplog: pytest.LogCaptureFixture
) -> None:
    write_model("m", CONFIG)
    log = write_model("busy", CONFIG) / "1" / "log"

    class WritesBetweenScans(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            log.write_text("x" * (1 + log.stat().st_size if log.exists() else 1))
            return super().wait(0.05)

    control.start(WritesBetweenScans())
    assert states(control) == {"m": "READY"}
    assert "model busy: its files keep changing" in caplog.text
    wait_until(lambda: "busy" in states(control))


def test_a_load_that_is_given_up_for_a_stop_is_no_failure_of_the_start(
    control: PollControl, write_model: WriteModel, counted: CountedBackend
) -> None:
    write_model("m", CONFIG)
    stop = threading.Event()

    class StopsThere(Gate):
        def pass_through(self) -> None:
            stop.set()

    counted.gates["m"] = StopsThere()
    counted.fails["m"] = GivenUp("model 'm': its load was given up: the server ends")
    control.start(stop)
    assert counted.loads["m"] == 1


def test_a_name_that_is_no_text_is_on_the_index_in_a_form_that_can_be_shown(
    control: PollControl, write_model: WriteModel, repository: Path
) -> None:
    write_model("m", CONFIG)
    (write_model("n", CONFIG) / "1" / "\udcff").touch()
    (repository / "\udcff").mkdir()
    with pytest.raises(ModelConfigError, match=r"models that cannot be loaded: n$"):
        control.start()
    reasons = {entry.name: entry.reason for entry in control.index(only_ready=False)}
    assert reasons["m"] == ""
    assert r"1/\xff: the name is not UTF-8; rename it" in reasons["n"]
    assert r"'\xff' is no model" in reasons[r"\xff"]


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """Let this process open so many further files, as on a board that has too many open."""
    # The lowest, between which others may be in use.
    free = [os.dup(0) for _ in range(number)]
    for each in free:
        os.close(each)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_error_of_the_first_scan_that_may_pass_ends_no_start_for_good(
    control: PollControl, write_model: WriteModel
) -> None:
    write_model("m", CONFIG)
    # The repository and the model's directory can be opened, and nothing in it.
    with (
        descriptors_left(2),
        pytest.raises(ModelLoadError, match=r"models that cannot be loaded: m$"),
    ):
        control.start()
    ((entry,)) = control.index(only_ready=False)
    assert "m: cannot be read: Too many open files" in entry.reason
    assert entry.may_pass
