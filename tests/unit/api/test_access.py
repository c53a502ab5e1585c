"""Every method is open, an update or a control call; what a listener does not allow is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.access import OPEN, PROTOCOLS, UPDATES, AccessRules
from edge_server.api.grpc.lane_service import SERVICE
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from edge_server.settings import Grpc

_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
METHODS = {f"/{_SERVICE.full_name}/{method.name}" for method in _SERVICE.methods}
CONTROL = {
    f"/inference.GRPCInferenceService/{name}"
    for name in (
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    )
}
RESTRICTED = {
    "protocols": ["health", "inference"],
    "header": "triton-grpc-protocol-k",
    "value": "v",
}


def settings(**grpc: Any) -> Grpc:
    return read_settings(None, {"grpc": {"socket": "/run/s", **grpc}}).grpc


def test_of_the_lane_service_only_the_vehicles_state_is_a_control_call() -> None:
    methods = {f"/{SERVICE.full_name}/{method.name}" for method in SERVICE.methods}
    assert set(PROTOCOLS["lanes"]) == methods
    lanes = "/edge.lanes.v1.LaneService"
    assert methods - OPEN == {f"{lanes}/SetVehicleState", f"{lanes}/Record"}


def test_the_published_service_is_open_updates_and_control_and_nothing_else() -> None:
    assert METHODS - OPEN - UPDATES == CONTROL
    assert not OPEN & UPDATES


def test_every_published_method_belongs_to_one_of_tritons_protocols() -> None:
    grouped = [method for methods in PROTOCOLS.values() for method in methods]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) >= METHODS


@pytest.mark.parametrize(
    ("control", "unix", "allowed"),
    [
        ("everywhere", False, True),
        ("everywhere", True, True),
        ("unix", False, False),
        ("unix", True, True),
        ("off", False, False),
        ("off", True, False),
    ],
)
def test_control_calls_are_allowed_only_where_they_are_confined_to(
    control: str, unix: bool, allowed: bool
) -> None:
    rules = AccessRules.of(settings(control=control), unix=unix)
    for method in METHODS | {"/some.new.Service/Method"}:
        refusal = rules.refusal(method, ())
        confined = method in CONTROL or method.startswith("/some.new")
        assert bool(refusal) == (confined and not allowed), method
    for method in METHODS:
        assert bool(rules.update_refusal(method)) == (method in UPDATES and not allowed), method


def test_a_refusal_names_the_socket_that_serves_the_call() -> None:
    rules = AccessRules.of(settings(control="unix"), unix=False)
    load = "/inference.GRPCInferenceService/RepositoryModelLoad"
    assert rules.refusal(load, ()) == (
        "RepositoryModelLoad is a control call; those are served on the Unix socket /run/s"
    )


@pytest.mark.parametrize(
    ("metadata", "allowed"),
    [
        ({}, False),
        ({"triton-grpc-protocol-k": "w"}, False),
        ({"triton-grpc-protocol-k": "v"}, True),
        ({"triton-grpc-protocol-k": b"v"}, True),
        ({"triton-grpc-protocol-k": "ü"}, False),
    ],
)
@pytest.mark.parametrize("unix", [False, True])
def test_a_restricted_protocol_needs_the_header(metadata: dict, allowed: bool, unix: bool) -> None:
    rules = AccessRules.of(settings(restricted=[RESTRICTED]), unix=unix)
    restricted = {*PROTOCOLS["health"], *PROTOCOLS["inference"]}
    for method in METHODS:
        refusal = rules.refusal(method, metadata.items())
        assert bool(refusal) == (method in restricted and not allowed), method
        if refusal:
            assert refusal == (
                "This protocol is restricted, expecting header 'triton-grpc-protocol-k'"
            )
