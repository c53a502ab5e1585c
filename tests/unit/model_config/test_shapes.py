"""Two sides agree on a shape where each size is the same or left free by one of them."""

from __future__ import annotations

import pytest

from edge_server.model_config.interface import unified


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        ((-1, 3), (4, -1), (4, 3)),
        ((-1,), (-1,), (-1,)),
        ((), (), ()),
        ((3,), (4,), None),
        ((-1,), (-1, -1), None),
    ],
)
def test_the_fixed_size_wins_whichever_side_has_it(
    a: tuple[int, ...], b: tuple[int, ...], both: tuple[int, ...] | None
) -> None:
    assert unified(a, b) == both
    assert unified(b, a) == both
