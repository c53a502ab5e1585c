"""Every method is open, an update or a control call; what a listener does not allow is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.grpc.access import OPEN, PROTOCOLS, UPDATES, AccessRules
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


def test_the_published_service_is_open_updates_and_control_and_nothing_else() -> None:
    assert METHODS - OPEN - set(UPDATES) == CONTROL
    assert not OPEN & set(UPDATES)


def test_every_published_method_belongs_to_one_of_tritons_protocols() -> None:
    grouped = [method for methods in PROTOCOLS.values() for method in methods]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) >= METHODS


@pytest.mark.parametrize(
    ("control", "unix", "answered"),
    [
        ("everywhere", False, True),
        ("everywhere", True, True),
        ("unix", False, False),
        ("unix", True, True),
        ("off", False, False),
        ("off", True, False),
    ],
)
def test_control_calls_are_answered_where_they_are_confined_to(
    control: str, unix: bool, answered: bool
) -> None:
    rules = AccessRules.of(settings(control=control), unix=unix)
    for method in METHODS | {"/some.new.Service/Method"}:
        refusal = rules.refusal(method, {})
        confined = method in CONTROL or method.startswith("/some.new")
        assert bool(refusal) == (confined and not answered), method
    for method, update in (
        ("TraceSetting", pb.TraceSettingRequest()),
        ("LogSettings", pb.LogSettingsRequest()),
    ):
        path = f"/inference.GRPCInferenceService/{method}"
        assert rules.update_refusal(path, update.SerializeToString()) == ""
        assert rules.update_refusal(path, b"\xff") == ""
        update.settings["log_info" if method == "LogSettings" else "trace_rate"].SetInParent()
        assert bool(rules.update_refusal(path, update.SerializeToString())) != answered


def test_a_refusal_says_where_the_call_is_answered() -> None:
    rules = AccessRules.of(settings(control="unix"), unix=False)
    load = "/inference.GRPCInferenceService/RepositoryModelLoad"
    assert rules.refusal(load, {}) == (
        "RepositoryModelLoad is a control call; those are answered on the Unix socket /run/s"
    )


@pytest.mark.parametrize(
    ("metadata", "answered"),
    [
        ({}, False),
        ({"triton-grpc-protocol-k": "w"}, False),
        ({"triton-grpc-protocol-k": "v"}, True),
        ({"triton-grpc-protocol-k": b"v"}, True),
        ({"triton-grpc-protocol-k": "ü"}, False),
    ],
)
@pytest.mark.parametrize("unix", [False, True])
def test_a_restricted_protocol_is_for_who_knows_the_word(
    metadata: dict, answered: bool, unix: bool
) -> None:
    rules = AccessRules.of(settings(restricted=[RESTRICTED]), unix=unix)
    restricted = {*PROTOCOLS["health"], *PROTOCOLS["inference"]}
    for method in METHODS:
        refusal = rules.refusal(method, metadata)
        assert bool(refusal) == (method in restricted and not answered), method
        if refusal:
            assert refusal == (
                "This protocol is restricted, expecting header 'triton-grpc-protocol-k'"
            )
