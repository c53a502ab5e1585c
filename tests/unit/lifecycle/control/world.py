"""A repository under model control, and what is written into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelRegistry
from edge_server.lifecycle.control import RepositoryControl
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.repository.content import PrivateCopies, PrivateDirectory
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

TIMEOUT_S = 30.0

IO = 'input {{ name: "a" data_type: {0} dims: -1 }} output {{ name: "b" data_type: {0} dims: -1 }} '
COUNTED = 'backend: "counted" ' + IO.format("TYPE_FP32")
# Their callers know of what changes.
MAY_BREAK = 'parameters { key: "allow_interface_change" value { string_value: "true" } } '
KNOWN = COUNTED + MAY_BREAK
INT32 = 'backend: "counted" ' + IO.format("TYPE_INT32") + MAY_BREAK
BOTH = COUNTED + "version_policy { all {} }"

READY = ("READY", "")
UNLOADED = ("UNAVAILABLE", "unloaded")
NEVER = ("", "")


def ensemble(*members: str, tensors: str = "ab") -> str:
    """From `x` through `members`, one after the other, to `z`."""
    names = ["x", *(f"t{i}" for i in range(1, len(members))), "z"]
    steps = "".join(
        f'step {{ model_name: "{member}" model_version: -1 '
        f'input_map {{ key: "{tensors[0]}" value: "{source}" }} '
        f'output_map {{ key: "{tensors[1]}" value: "{target}" }} }} '
        for member, source, target in zip(members, names, names[1:], strict=False)
    )
    return (
        'platform: "ensemble" input { name: "x" data_type: TYPE_FP32 dims: -1 } '
        f'output {{ name: "z" data_type: TYPE_FP32 dims: -1 }} ensemble_scheduling {{ {steps} }}'
    )


def set_number(model: Path, number: float, version: int = 1) -> None:
    (model / str(version)).mkdir(exist_ok=True)
    (model / str(version) / "add").write_text(str(number))


class World:
    """A repository under model control, and what a client sees of it."""

    def __init__(
        self,
        *repositories: Path,
        strict: bool = True,
        take_down: bool = False,
        kept: Collection[str] = (),
        **options: object,
    ) -> None:
        self.registry = ModelRegistry()
        private = PrivateDirectory()
        source = Repositories(repositories, PrivateCopies(private).copy)
        self.loader = RepositoryLoader(
            ModelLifecycle(ModelTable(self.registry), take_down=take_down), source, kept=kept
        )
        options = {"explicit": True, "private": private, **options}
        self.control = RepositoryControl(self.loader, **options)
        self.door = DataPlane(self.registry, strict_readiness=strict)

    def start(self) -> World:
        self.control.start()
        self.door.open()
        return self

    def states(self) -> dict[tuple[str, int], tuple[str, str]]:
        assert self.registry.wait_closed(TIMEOUT_S)
        entries = self.control.index(only_ready=False)
        return {(e.name, e.version): (e.state.value, e.reason) for e in entries}

    def ask(self, name: str, version: str = "", tensor: str = "a") -> float:
        request = InferRequest(
            name, {tensor: Tensor(np.zeros(1, np.float32))}, model_version=version
        )
        (answer,) = self.door.infer(request).outputs.values()
        return float(answer.array[0])


@pytest.fixture
def world(repository: Path) -> Iterator[World]:
    made = World(repository).start()
    yield made
    made.control.close(TIMEOUT_S)
