"""Headers become parameters where their names match, and never the protocol's own."""

from __future__ import annotations

import pytest

from edge_server.api.parameters import HeaderForwarding
from edge_server.errors import InvalidRequest
from edge_server.requests import InferRequest

REQUEST = InferRequest("m", {}, parameters={"own": 1, "my-key": "client"})


def test_a_header_is_forwarded_where_the_pattern_matches_anywhere_in_its_name() -> None:
    headers = [("my-key", "proxy"), ("x-my-trace", b"7"), ("user-agent", "grpc")]
    read = HeaderForwarding("my-").add(REQUEST, headers)
    assert read.parameters == {"own": 1, "my-key": "proxy", "x-my-trace": "7"}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("PREFIX_.*", {"PREFIX_a", "prefix_b"}),
        ("(?i)PREFIX_.*", {"PREFIX_a", "prefix_b"}),
        ("(?-i)PREFIX_.*", {"PREFIX_a"}),
        ("(?-i)prefix_.*", {"prefix_b"}),
        ("(?-i)", {"PREFIX_a", "prefix_b"}),
    ],
)
def test_case_counts_only_for_a_pattern_that_says_so(pattern: str, names: set[str]) -> None:
    headers = [("PREFIX_a", "1"), ("prefix_b", "2")]
    read = HeaderForwarding(pattern).add(InferRequest("m", {}), headers)
    assert read.parameters.keys() == names


def test_without_a_match_the_request_stays_as_it_is() -> None:
    assert HeaderForwarding("MY_").add(REQUEST, [("user-agent", "grpc")]) is REQUEST
    assert HeaderForwarding().add(REQUEST, [("my-key", "proxy")]) is REQUEST


@pytest.mark.parametrize("name", ["priority", "sequence_id", "triton_final_response", "headers"])
def test_a_reserved_name_is_refused_with_tritons_text(name: str) -> None:
    with pytest.raises(
        InvalidRequest,
        match=f"^Header '{name}' is reserved for Triton usage and cannot be forwarded.$",
    ):
        HeaderForwarding(".*").add(REQUEST, [(name, "1")])


def test_a_binary_header_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^Header 'x-bin' is not UTF-8 text"):
        HeaderForwarding("x").add(REQUEST, [("x-bin", b"\xff")])


def test_the_daemons_own_tokens_are_not_forwarded() -> None:
    headers = [("authorization", "Bearer secret"), ("Cookie", "edge_token=secret"), ("x-key", "s")]
    assert HeaderForwarding(".*", ["x-key"]).add(REQUEST, headers) is REQUEST


def test_a_name_that_no_proxy_gives_is_refused_before_it_is_searched() -> None:
    with pytest.raises(InvalidRequest, match="a name of 8000 characters"):
        HeaderForwarding(".*b.*c").add(REQUEST, [("a" * 8000, "1")])
