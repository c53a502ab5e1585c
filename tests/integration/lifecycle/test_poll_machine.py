"""Whatever happens to a repository while clients ask, no request fails and nothing torn answers.

Every complete model adds a multiple of 1001; what is torn or damaged would add something else.
Time is the machine's own: nothing waits for a window.
"""

from __future__ import annotations

import os
import shutil
import threading
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.model_folders import write_manifest

from edge_server.errors import NotFound, Unavailable
from edge_server.inference.canary_monitor import CanaryTerms
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.poll import PollControl
from edge_server.lifecycle.records import AcceptedCopies, Deployments
from edge_server.repository.store import ModelStore
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from support.counted_backend import CountedBackend

TIMEOUT_S = 30.0
WINDOW_S = 2.0
CONFIG = (
    'backend: "counted" input { name: "a" data_type: TYPE_FP32 dims: 1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: 1 }'
)
numbers = st.integers(1, 9).map(lambda n: 1001 * n)


class Client(threading.Thread):
    """Asks `m` all the time."""

    def __init__(self, plane: DataPlane) -> None:
        super().__init__(daemon=True)
        self.answers: set[float] = set()
        self.failures: list[Exception] = []
        self.gone = threading.Event()  # the model may rightly be missing
        # Held by a request until its end has been judged.
        self.asking = threading.Lock()
        self._plane = plane
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.0005):
            with self.asking:
                self._ask()

    def is_back(self) -> None:
        """From now on the model must answer; a request that missed it has been judged by then."""
        with self.asking:
            self.gone.clear()

    def stop(self) -> None:
        self._over.set()
        self.join(TIMEOUT_S)
        assert not self.is_alive()

    def _ask(self) -> None:
        try:
            self.answers.add(ask(self._plane))
        except (NotFound, Unavailable) as error:
            if not self.gone.is_set():
                self.failures.append(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure
            self.failures.append(error)


def ask(plane: DataPlane) -> float:
    request = InferRequest("m", {"a": Tensor(np.zeros(1, np.float32))})
    return float(plane.infer(request).outputs["b"].array[0])


class Machine(RuleBasedStateMachine):
    def __init__(self, folder: Path, backend: CountedBackend) -> None:
        super().__init__()
        backend.made.clear()
        self.backend = backend
        self.folder = folder
        self.repository = folder / "repository"
        self.model = self.repository / "m"
        self.now = 1000.0
        self.good: int | None = 1001  # what the disk says, where it says something complete
        self.complete = {1001.0}  # all that ever was complete
        self.torn_at: float | None = None
        self.away = False
        (self.repository / "other").mkdir(parents=True)
        (self.repository / "other" / "config.pbtxt").write_text(CONFIG)
        (self.repository / "other" / "1").mkdir()
        self._build(self.model, "1001")
        self._start()
        self.client = Client(self.plane)  # that is not yet running
        self.settle()
        self._ask_all_the_time()

    # What people do.

    @rule(number=numbers, hint=st.booleans(), old=st.booleans())
    def rename_into_place(self, number: int, hint: bool, old: bool) -> None:
        if self.away:
            return
        self._build(self.folder / "incoming", str(number), old=old)
        self._swap(self.folder / "incoming")
        self._is_good(number)
        if hint:
            self.look({"m"})

    @rule(number=numbers, old=st.booleans())
    def write_in_place(self, number: int, old: bool) -> None:
        if self._there():
            self._finish()
            (self.model / "manifest.json").unlink(missing_ok=True)
            self._write(self.model / "1" / "add", str(number), old=old)
            self._is_good(number)

    @rule(number=numbers)
    def write_the_manifest_last(self, number: int) -> None:
        if self._there():
            self._finish()
            (self.model / "manifest.json").unlink(missing_ok=True)
            self._write(self.model / "1" / "add", str(number))
            self.look()
            write_manifest(self.model, "m")
            self._is_good(number)

    @rule(number=numbers)
    def begin_to_write(self, number: int) -> None:
        """In place and without a manifest: it goes on before the window is over."""
        if self._there():
            self._finish()
            (self.model / "manifest.json").unlink(missing_ok=True)
            self._write(self.model / "1" / "add", str(number)[:2])
            self.torn_at, self.good = self.now, None
            self.writes = number
            for _ in range(2):
                self.now += 0.1
                self.look()

    @rule(number=numbers)
    def write_half_of_what_a_manifest_says(self, number: int) -> None:
        if self._there():
            self._finish()
            self._write(self.model / "1" / "add", str(number))
            write_manifest(self.model, "m")
            self._write(self.model / "1" / "add", str(number)[:2])
            self.good = None
            self.settle()

    @rule(number=numbers)
    def damage_what_a_manifest_says(self, number: int) -> None:
        if not self.away:
            self._build(self.folder / "incoming", str(number))
            write_manifest(self.folder / "incoming", "m")
            self._write(self.folder / "incoming" / "1" / "add", "7777")
            self._swap(self.folder / "incoming")
            self.good = None
            self.look({"m"})
            self.settle()

    @rule(config=st.sampled_from(["no such field", "", 'backend: "nothing"', "\xff"]))
    def break_the_configuration(self, config: str) -> None:
        if not self.away:
            self._build(self.folder / "incoming", "7777")
            (self.folder / "incoming" / "config.pbtxt").write_text(config, "latin-1")
            self._swap(self.folder / "incoming")
            self.good = None
            self.settle()

    @rule()
    def end_the_process_that_loads(self) -> None:
        if not self.away:
            self._build(self.folder / "incoming", "-1")
            self._swap(self.folder / "incoming")
            self.good = None
            self.settle()

    @rule()
    def put_a_link_in(self) -> None:
        if self._there():
            self._finish()
            (self.model / "1" / "link").symlink_to("/etc/passwd")
            self.good = None
            self.settle()

    @rule(number=numbers)
    def remove_and_copy_anew(self, number: int) -> None:
        """As those do who know no better: for a moment there is nothing."""
        if self._there():
            shutil.rmtree(self.model)
            self.torn_at = None
            for _ in range(2):
                self.look()
                self.now += 0.5
            self._build(self.model, str(number))
            self._is_good(number)
            self.look()

    @rule()
    def take_the_model_away(self) -> None:
        if self._there():
            self.client.gone.set()
            shutil.rmtree(self.model)
            self.torn_at = self.good = None

    @rule()
    def take_the_repository_away(self) -> None:
        if not self.away:
            self._finish()
            self.repository.rename(self.folder / "away")
            self.away = True

    @rule()
    def empty_the_mount_point(self) -> None:
        if self.away:
            self.repository.mkdir(exist_ok=True)

    @rule()
    def bring_the_repository_back(self) -> None:
        if self.away:
            if self.repository.exists():
                self.repository.rmdir()
            (self.folder / "away").rename(self.repository)
            self.away = False

    # What happens of itself.

    @rule(passes_s=st.sampled_from([0.0, 0.1, 0.5, 1.9]))
    def look_a_little_later(self, passes_s: float) -> None:
        if self.torn_at is not None and self.now + passes_s - self.torn_at >= WINDOW_S:
            self._finish()
        self.now += passes_s
        self.look()

    @rule()
    def settle(self) -> None:
        self._finish()
        for _ in range(3):
            self.now += WINDOW_S
            self.look()
        if self.good is not None and not self.away:
            assert ask(self.plane) == self.good
            self.client.is_back()

    @rule()
    def start_again(self) -> None:
        self._finish()
        self._stop()
        # Up to the end a version may pass its probation, and become the last known good.
        good = [float((s.directory / "1" / "add").read_text()) for s in self.store.history("m")]
        self._start()
        if good:
            # What was still in its canary is not the last known good.
            assert ask(self.plane) == good[0]
            assert good[0] in self.complete
        self._ask_all_the_time()

    @invariant()
    def nobody_was_hurt(self) -> None:
        assert self.client.failures == []
        assert self.client.answers <= self.complete

    def teardown(self) -> None:
        self._stop()
        assert self.client.failures == []
        assert self.client.answers <= self.complete
        assert [model.closed for model in self.backend.made] == [1] * len(self.backend.made)

    def look(self, arrived: set[str] | None = None) -> None:
        self.control.scan(self.now, arrived or ())
        assert self.control.updates.wait_idle(TIMEOUT_S)

    def _start(self) -> None:
        self.registry = ModelRegistry()
        self.plane = DataPlane(self.registry)
        self.store = ModelStore(self.folder / "store", boot="test")
        deployments = Deployments(self.registry, self.store, [])
        loader = RepositoryLoader(
            ModelLifecycle(deployments, terms=CanaryTerms(requests=20, least_s=0.0)),
            AcceptedCopies(deployments),
        )
        # Its thread is not started: every scan is a rule's.
        self.control = PollControl(
            loader, deployments, [self.repository], poll_s=1.0, settle_s=WINDOW_S
        )
        self.control.load_last_good()

    def _ask_all_the_time(self) -> None:
        gone = self.client.gone.is_set()
        self.client = Client(self.plane)
        if gone:
            self.client.gone.set()
        self.client.start()

    def _stop(self) -> None:
        self.client.stop()
        self.nobody_was_hurt()
        self.control.close(2 * TIMEOUT_S)
        assert self.registry.wait_closed(TIMEOUT_S)

    def _there(self) -> bool:
        return (
            not self.away and self.model.exists() and not (self.model / "1" / "link").is_symlink()
        )

    def _finish(self) -> None:
        """Whoever was writing comes to an end."""
        if self.torn_at is not None:
            self._write(self.model / "1" / "add", str(self.writes))
            self._is_good(self.writes)

    def _is_good(self, number: int) -> None:
        # The configuration may be one that was broken before.
        if (self.model / "config.pbtxt").read_text("latin-1") == CONFIG:
            self.good = number
            self.complete.add(float(number))
        else:
            self.good = None
        self.torn_at = None

    def _build(self, folder: Path, number: str, *, old: bool = False) -> None:
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(CONFIG)
        self._write(folder / "1" / "add", number, old=old)

    def _swap(self, folder: Path) -> None:
        self.torn_at = None
        if self.model.exists():
            self.model.rename(self.folder / "replaced")
        folder.rename(self.model)
        shutil.rmtree(self.folder / "replaced", ignore_errors=True)

    def _write(self, path: Path, text: str, *, old: bool = False) -> None:
        path.write_text(text)
        if old:  # a copy that keeps times, or a clock that was set back
            os.utime(path, (1, 1))


def test_no_request_fails_and_nothing_torn_responds(
    counted: CountedBackend, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_state_machine_as_test(
        lambda: Machine(tmp_path_factory.mktemp("poll"), counted),
        settings=settings(
            max_examples=int(os.environ.get("EDGE_POLL_EXAMPLES", "15")),
            stateful_step_count=20,
            # To shrink an example that has threads in it takes minutes and seldom helps.
            phases=(Phase.explicit, Phase.generate),
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
