"""Redaction takes a time that grows with the text alone, and hides what plain expressions would."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge_server.cli import support_bundle
from edge_server.cli.support_bundle import Redaction
from edge_server.process import text as masking

if TYPE_CHECKING:
    from collections.abc import Callable

# What is to be hidden, as one expression each; they take minutes for some texts.
USERINFO = re.compile(r"://([^\s:/@]*)(:?)(\S*)@")
KEYED = re.compile(
    r"(?i)(?<![a-z])([a-z]*-?(?:pass?(?:word|wd|phrase|code)?|pwd|pw|token|secret))="
    r"(\"[^\"]*\"|'[^']*'|[^\s&;,\"'/?]+)"
)
NAMED = re.compile(
    r"(?i)((?:pass(?:word|wd|phrase)|secret|token|api[-_]?key|access[-_]?key|private[-_]?key"
    r"|credentials?|psk|cookie)\\*[\"']?\s*[:=]\s*)"
    r"(\\+\"[^\"\n]*\"|\"(?:\\.|[^\"\\\n])*\"|'[^'\n]*'|[^\s,;}\])\"']+)"
)
FLAG = re.compile(r"(?i)(--?[a-z-]*(?:password|passphrase|token|secret)\s+)(?!-)(\S+)")
AUTHORIZATION = re.compile(r"(?i)\b(basic|bearer|digest)(\s+)([\w.~+/=-]{4,}(?:\s*,?\s*\w+=\S+)*)")
WORDS = (
    *("password", "PassWord", "pass", "pas", "pwd", "pw", "token", "Secret", "api_key", "apikey"),
    *("credentials", "credential", "cookie", "psk", "passphrase", "Bearer", "basic", "digest"),
    *("--", "-", "=", ":", "://", "@", " ", "  ", "\n", '"', "'", "\\", ",", ";", "/", "?", "&"),
    *("x", "user", "hunter2", "\u017f", "\u0130", "7", "_", "a=b", "rtsp"),
)
TEXTS = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)


def without(names: str, value: str, fits: str = "") -> Callable[[str], str]:
    given_fits = (getattr(support_bundle, fits),) if fits else ()
    return lambda text: support_bundle._without_values(
        text, getattr(support_bundle, names), getattr(support_bundle, value), *given_fits
    )


@given(TEXTS)
def test_what_a_plain_expression_hides_is_hidden(text: str) -> None:
    logins = [match.group(0, 1, 2, 3) for match in USERINFO.finditer(text)]
    assert [match.group(0, 1, 2, 3) for match in masking._logins(text)] == logins
    assert [match[0] for match in masking._keyed_values(text)] == [
        match[2] for match in KEYED.finditer(text)
    ]
    for expression, linear in (
        (NAMED.sub(r"\1***", text), without("_NAMES", "_NAMED_VALUE")),
        (FLAG.sub(r"\1***", text), without("_FLAGS", "_FLAG_VALUE", "_is_flag")),
        (AUTHORIZATION.sub(r"\1\2***", text), without("_SCHEMES", "_CREDENTIALS", "_is_word")),
    ):
        assert linear(text) == expression


@given(
    st.text("ab%4é'x", min_size=4, max_size=6),
    st.text("ab%4é'x ", max_size=8),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
@example("4444", "%", [False] * 6)
@example("4ab4", "%a", [False] * 6)
def test_a_secret_is_found_in_a_long_text_in_every_form(
    secret: str, around: str, encoded: list[bool]
) -> None:
    form = "".join(
        "".join(f"%{byte:02X}" for byte in char.encode()) if each else char
        for char, each in zip(secret, encoded, strict=False)
    )
    assert masking._may_have(f"{around}{form}{around}", secret)


@pytest.mark.parametrize(
    "part",
    [
        *("://a:b", "http://a:b ", "-a", "--a-", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----"),
        *("bearer aaaa ", "bearer ", "password ", "password\\", "a=", 'pw="', "token:'", "x\n"),
    ],
)
def test_no_text_takes_more_than_its_length(part: str) -> None:
    text = part * (50_000 // len(part))
    began = time.process_time()
    Redaction().text(text)
    Redaction().text("bearer aaaa" + " " * 50_000 + "x")
    assert time.process_time() - began < 10.0  # minutes where it grows with the square
