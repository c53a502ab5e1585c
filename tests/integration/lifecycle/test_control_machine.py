"""Whatever is loaded, broken, repaired and unloaded in whatever order, requests keep their world.

A request holds a lease; no model is closed under it. Every model is closed once, when the last
request that could need it is over, and every ensemble that is ready fits its members.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from edge_server.errors import InternalError, ModelConfigError
from edge_server.inference.registry import ModelRegistry, ModelState
from edge_server.lifecycle.control import RepositoryControl
from edge_server.lifecycle.lifecycle import ModelLifecycle
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.repository.scan import Repositories
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from pathlib import Path

    from support.counted_backend import CountedBackend

    from edge_server.inference.registry import Lease

TIMEOUT_S = 30.0
TYPES = ("TYPE_FP32", "TYPE_INT32")
MODELS = ("m", "n")


def model_config(datatype: str) -> str:
    return (
        f'backend: "counted" input {{ name: "a" data_type: {datatype} dims: -1 }} '
        f'output {{ name: "b" data_type: {datatype} dims: -1 }} version_policy {{ all {{}} }}'
    )


def ensemble_config(datatype: str) -> str:
    """From `x` through both models to `z`."""
    return (
        f'platform: "ensemble" input {{ name: "x" data_type: {datatype} dims: -1 }} '
        f'output {{ name: "z" data_type: {datatype} dims: -1 }} '
        'ensemble_scheduling { step { model_name: "m" model_version: -1 '
        'input_map { key: "a" value: "x" } output_map { key: "b" value: "y" } } '
        'step { model_name: "n" model_version: -1 '
        'input_map { key: "a" value: "y" } output_map { key: "b" value: "z" } } }'
    )


class Machine(RuleBasedStateMachine):
    def __init__(self, repository: Path, backend: CountedBackend, *, take_down: bool) -> None:
        super().__init__()
        self.take_down = take_down
        self.repository = repository
        self.backend = backend
        backend.made.clear()
        self.registry = ModelRegistry()
        self.table = ModelTable(self.registry)
        self.loader = RepositoryLoader(
            ModelLifecycle(self.table, take_down=take_down), Repositories([repository])
        )
        self.control = RepositoryControl(self.loader, explicit=True)
        self.leases: list[Lease] = []
        # What a plain load would make of the disk; None is broken.
        self.number: dict[tuple[str, int], int | None] = {}
        for name in MODELS:
            self.write_config(name, TYPES[0])
            for version in (1, 2):
                self.write_number(name, version, 0)
        self.write_config("e", TYPES[0])

    @rule(name=st.sampled_from([*MODELS, "e"]), datatype=st.sampled_from(TYPES))
    def write_config(self, name: str, datatype: str) -> None:
        directory = self.repository / name
        (directory / "1").mkdir(parents=True, exist_ok=True)
        config = ensemble_config(datatype) if name == "e" else model_config(datatype)
        (directory / "config.pbtxt").write_text(config)

    @rule(
        name=st.sampled_from(MODELS),
        version=st.sampled_from([1, 2]),
        number=st.none() | st.integers(0, 9),
    )
    def write_number(self, name: str, version: int, number: int | None) -> None:
        directory = self.repository / name / str(version)
        directory.mkdir(exist_ok=True)
        (directory / "add").write_text(str(-1 if number is None else number))
        self.number[name, version] = number

    @rule(name=st.sampled_from([*MODELS, "e"]))
    def load(self, name: str) -> None:
        before = {n: self.registry.snapshot.ready_versions(n) for n in (*MODELS, "e")}
        asked = MODELS if name == "e" else (name,)
        try:
            self.control.load(name)
        except (ModelConfigError, InternalError):
            # What served still does.
            for each, versions in before.items():
                if versions and not (self.take_down and each == "e"):
                    assert self.registry.snapshot.ready_versions(each)
            return
        for each in asked:
            for version in (1, 2):
                found = self.registry.snapshot.find(each, str(version)).model
                assert found.number == self.number[each, version]

    @rule(name=st.sampled_from([*MODELS, "e", "nowhere"]), unload_dependents=st.booleans())
    def unload(self, name: str, unload_dependents: bool) -> None:
        self.control.unload(name, unload_dependents=unload_dependents)
        ready = {entry.name for entry in self.control.index(only_ready=True)}
        assert name not in ready
        assert name not in MODELS or "e" not in ready

    @rule()
    def start_request(self) -> None:
        self.leases.append(self.registry.lease())

    @rule(which=st.integers(0, 9))
    def end_request(self, which: int) -> None:
        if self.leases:
            self.leases.pop(which % len(self.leases)).release()

    @invariant()
    def requests_meet_open_models(self) -> None:
        for lease in self.leases:
            for entry in lease.snapshot.entries.values():
                if entry.loaded is not None and entry.loaded.model is not None:
                    assert entry.loaded.model.closed == 0  # type: ignore[attr-defined]  # the stand-in has it

    @invariant()
    def a_ready_ensemble_fits_its_members(self) -> None:
        snapshot = self.registry.snapshot
        if snapshot.ready_versions("e"):
            datatype = snapshot.find("e").config.inputs[0].datatype
            value = Tensor(np.zeros(1, datatype.numpy))
            with contextlib.suppress(InternalError):  # the counted model adds floats only
                snapshot.infer(InferRequest("e", {"x": value}))
            assert all(snapshot.find(m).config.inputs[0].datatype is datatype for m in MODELS)

    @invariant()
    def an_ensemble_waits_only_for_what_it_does_not_fit(self) -> None:
        wish = self.table.get("e")
        if wish.serving is None and wish.coming is not None:
            datatype = wish.coming.config.inputs[0].datatype
            found = [self.registry.snapshot.ready_versions(m) for m in MODELS]
            assert not all(found) or any(
                self.registry.snapshot.find(m).config.inputs[0].datatype is not datatype
                for m in MODELS
            )

    @invariant()
    def states_agree_with_what_is_loaded(self) -> None:
        for entry in self.registry.snapshot.entries.values():
            assert (entry.state is ModelState.READY) == (entry.loaded is not None)
            assert entry.state is not ModelState.LOADING

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        self.control.close(TIMEOUT_S)
        assert self.registry.wait_closed(TIMEOUT_S)
        assert [model.closed for model in self.backend.made] == [1] * len(self.backend.made)


@pytest.mark.parametrize("take_down", [False, True])
def test_no_request_loses_its_model_and_every_model_is_closed_once(
    take_down: bool, counted: CountedBackend, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_state_machine_as_test(
        lambda: Machine(tmp_path_factory.mktemp("repository"), counted, take_down=take_down),
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
