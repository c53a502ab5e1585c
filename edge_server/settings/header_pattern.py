"""The pattern of forwarded headers, which clients must not be able to make slow."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any, Final

# `re` holds the interpreter's lock while it searches, and so every camera's thread.
_PARSER: Final = "re._parser" if sys.version_info >= (3, 11) else "sre_parse"
_MOST_REPEATS: Final = 3
_REPEATS: Final = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})


def check_header_pattern(pattern: str) -> None:
    """Raises: ValueError: `pattern` is no regular expression, or some name of a header takes longer
    than any camera can wait."""
    try:
        re.compile(pattern)
        repeats = _repeats_of(importlib.import_module(_PARSER).parse(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"forward_headers: no regular expression: {error}") from None
    if repeats > _MOST_REPEATS:
        raise ValueError(
            f"forward_headers: more than {_MOST_REPEATS} repeats one behind the other take too "
            "long for some names; name the headers, as in ^x-(user|trip)-"
        )


def _repeats_of(parsed: Any, *, within: bool = False) -> int:
    """Return how many repeats without end follow one another.

    Raises:
        ValueError: one repeats what has another, or alternatives.
    """
    count = 0
    for code, value in parsed:
        name = str(code)
        if within and (name in _REPEATS or name in ("BRANCH", "GROUPREF")):
            raise ValueError(
                "forward_headers: a repeat of something with repeats or alternatives takes too "
                "long for some names; write it without the outer repeat"
            )
        if name in _REPEATS:
            _, most, what = value
            inner = _repeats_of(what, within=most > 1)
            count += max(inner, int(most > 1))
        elif name == "BRANCH":
            count += max(_repeats_of(each, within=within) for each in value[1])
        else:
            parts = value if isinstance(value, tuple) else (value,)
            count += sum(_repeats_of(each, within=within) for each in parts if _is_pattern(each))
    return count


def _is_pattern(value: object) -> bool:
    return type(value).__name__ == "SubPattern"
