"""A pattern of headers is searched for every name that a client makes up, and never for long."""

from __future__ import annotations

import time

import pytest

from edge_server.settings.transport import check_header_pattern, header_pattern


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(?-i)(a+)+$",
        "(a|aa)*$",
        "(x+x+)+y",
        "((a*)b)*",
        "(.*)\\1*c",
        ".*.*.*.*b",
        "[",
        "a**",
        "(?P<name>a*)*",
        "(?:[)*]+)+",
        "([(]a+){2,}",
        "(a*?b){,9}c",
        "(a)(?:\\1)+",
        "(?=(a|bc)+)",
        "a*(?:b|c*d*e*)",
        "(?x)a # (",
    ],
)
def test_a_pattern_that_some_name_makes_slow_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^forward_headers: "):
        check_header_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        ".*",
        "(?i)MY_.*",
        "(?-i)MY_.*",
        "x-(user|trip)-.*",
        "^x-.*-id-.*$",
        "(foo)+",
        "[ab]{2,9}c?",
        "(a*b)?c{1}",
        "a*|b*|c*|d*|(e*|f*)g*",
        "(\\(\\[\\*[]*+?(|)])+",
        "(?P<x>a)(?#(*+)\\*",
    ],
)
def test_other_patterns_are_taken_and_are_fast(pattern: str) -> None:
    check_header_pattern(pattern)
    began = time.thread_time()
    header_pattern(pattern).search("x" * 128)
    assert time.thread_time() - began < 0.5
