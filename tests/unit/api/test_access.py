"""Every method is open, an update or a control call; what a listener does not allow is refused."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, cast

import pytest
from tritonclient.grpc import service_pb2 as pb

from edge_server.api.access import OPEN, PROTOCOLS, UPDATES, AccessRules, BrowserRule
from edge_server.api.grpc.lane_service import SERVICES
from edge_server.settings import Grpc, Http, Tls, read_settings

if TYPE_CHECKING:
    from edge_server.api.access import Tokens

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
    methods = {f"/{each.full_name}/{method.name}" for each in SERVICES for method in each.methods}
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
    for method in UPDATES:
        assert bool(rules.refusal(method, (), updates=True)) == (not allowed), method


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


TOKENS = cast("Tokens", object())
MUTUAL = Tls(mutual=True, certificate="c", key="k", client_ca="a")


@pytest.mark.parametrize(
    ("more", "tokens", "allowed"),
    [
        ({}, None, False),
        ({"tls": Tls(enabled=True, certificate="c", key="k")}, None, False),
        ({"tls": MUTUAL}, None, True),
        ({}, TOKENS, True),
        ({"host": "127.0.0.1"}, None, True),
    ],
)
def test_beyond_the_loopback_every_change_needs_a_token_or_a_certificate_over_both(
    more: dict[str, Any], tokens: Tokens | None, allowed: bool
) -> None:
    there = {"host": "192.168.1.2", "insecure": True, **more}
    grpc, http = Grpc(**there), Http(**there)
    lanes = {f"/edge.lanes.v1.LaneService/{name}" for name in ("SetVehicleState", "Record")}
    for rules, section in (
        (AccessRules.of(grpc, unix=False, tokens=tokens), "grpc"),
        (AccessRules.of_http(http, Grpc(), tokens), "http"),
    ):
        for method in CONTROL | lanes:
            refusal = rules.refusal(method, ())
            assert bool(refusal) != allowed, method
            if refusal:
                assert "[access] tokens_file" in refusal
                assert f"mutual in [{section}.tls]" in refusal
        for method in UPDATES:
            assert bool(rules.refusal(method, (), updates=True)) != allowed
        assert all(not rules.refusal(method, ()) for method in OPEN)
    assert not AccessRules.of(grpc, unix=True, tokens=tokens).refusal(min(CONTROL), ())


def asked(rule: BrowserRule, method: str = "POST", **headers: str) -> str:
    named = {"host": "localhost:8000", **headers}
    return rule.refusal(
        method, [(k.replace("_", "-").encode(), v.encode("latin-1")) for k, v in named.items()]
    )


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:8000", "[::1]:8000", "192.168.0.7", "cab.example"],
)
def test_addresses_and_the_devices_own_names_are_its_hosts(host: str) -> None:
    rule = BrowserRule(["Cab.Example"])
    assert asked(rule, host=host) == ""
    assert asked(rule, host=f"{socket.gethostname()}.local:8000") == ""
    assert asked(rule, host=host, origin=f"http://{host.lower()}") == ""
    assert rule.refusal("GET", []) == "", "no browser leaves out the host"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8000", "", "localhost.", "\xff", "a@b"]
)
def test_another_name_is_refused_as_it_may_be_rebound(host: str) -> None:
    refusal = asked(BrowserRule(), host=host)
    assert "http.host_names" in refusal
    assert asked(BrowserRule(), host=host, origin=f"http://{host}") == refusal


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://localhost:8002"},
        {"origin": "http://localhost:8000.evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
        {"sec_fetch_site": "same-origin", "origin": "http://evil.example"},
    ],
)
def test_a_page_of_another_site_is_refused(headers: dict[str, str]) -> None:
    for method in ("POST", "GET", "OPTIONS"):
        assert "another site" in asked(BrowserRule(), method, **headers)


def test_own_pages_and_links_to_the_page_are_served() -> None:
    rule = BrowserRule()
    own = {"origin": "http://localhost:8000", "sec_fetch_site": "same-origin"}
    assert asked(rule, **own) == ""
    assert asked(rule, "GET", sec_fetch_site="none", sec_fetch_mode="navigate") == ""
    link = {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert asked(rule, "GET", sec_fetch_site="cross-site", **link) == ""
    assert asked(rule, "POST", sec_fetch_site="cross-site", **link) != ""
    assert rule.refusal("GET", [(b"host", b"localhost"), (b"host", b"evil.example")]) != ""
