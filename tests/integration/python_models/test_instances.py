"""The instances of a model: they start side by side, and those that stay keep their process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.waiting import TIMEOUT_S

from edge_server.requests import InferRequest
from edge_server.settings import Python
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GROUP = "instance_group {{ count: {} kind: KIND_CPU }}"
REQUEST = InferRequest("m", {"x": Tensor(np.zeros(1, np.int32))})
# Each start leaves a file; the first lines of `initialize` may wait for those of others.
STARTS = """
def initialize(self, args):
    self.name = args["model_instance_name"]
    open(os.path.join(FOLDER, f"{self.name}-{os.getpid()}"), "w").close()
    while len(os.listdir(FOLDER)) < LEAST:
        time.sleep(0.01)
    if self.name == "m_0_1" and FAILS:
        raise ValueError("no weights")
    while FAILS:
        time.sleep(0.01)

def execute(self, requests):
    return [y([os.getpid()]) for _ in requests]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "starts"
    made.mkdir()
    return made


@pytest.fixture
def serve_starts(serve_with: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def serve(count: int, least: int = 0, *, fails: bool = False) -> Any:
        values = {"FOLDER": repr(str(folder)), "LEAST": str(least), "FAILS": str(fails)}
        source = STARTS
        for word, value in values.items():
            source = source.replace(word, value)
        return serve_with(Python(writable=(str(folder),)), m=(GROUP.format(count), source))

    return serve


def starts(folder: Path) -> dict[str, set[str]]:
    """The processes that have been started, by instance."""
    found: dict[str, set[str]] = {}
    for path in folder.iterdir():
        name, _, pid = path.name.partition("-")
        found.setdefault(name, set()).add(pid)
    return found


def test_instances_start_side_by_side(serve_starts: Callable[..., Any], folder: Path) -> None:
    served = serve_starts(4, least=4)
    assert not served.failed
    assert len(starts(folder)) == 4


def test_where_one_does_not_start_the_others_are_not_waited_for(
    serve_starts: Callable[..., Any],
) -> None:
    served = serve_starts(3, least=3, fails=True)
    assert "instance 'm_0_1' does not start: ValueError: no weights" in str(served.failed[0].reason)


def test_a_change_of_the_instance_group_alone_keeps_the_processes_that_stay(
    serve_starts: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    served = serve_starts(3)
    config = tmp_path / "models" / "m" / "config.pbtxt"
    before = starts(folder)
    for count in (4, 2):
        text = config.read_text()
        config.write_text(text[: text.index("instance_group")] + GROUP.format(count))
        lease = served.registry.lease()
        assert not served.loader.load("m")
        # Those of the scheduler that ends have the instances beside those of the new one.
        assert served.values("m", 0)
        assert lease.snapshot.infer(REQUEST)
        lease.release()
    assert served.registry.wait_closed(TIMEOUT_S)
    after = starts(folder)
    assert {name: after[name] for name in before} == before
    assert sum(map(len, after.values())) == 4
    assert len(served.model("m").instances) == 2
    # Two interpreters with numpy.
    assert 2 << 20 < served.model("m").memory_bytes()["processes"] < 1 << 30
    pid = str(served.values("m", 0)[0])
    assert pid in before["m_0_0"] | before["m_0_1"]
