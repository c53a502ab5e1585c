"""The profile that is nearest runs a batch, and none that does not take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.backends.tensorrt.plan_config import PlanIO, free_over_profiles, nearest_profile
from edge_server.backends.tensorrt.plan_options import PlanTensor, Range
from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.tensorrt.plan_options import Shapes

SMALL = {"x": Range((1, 4), (2, 4), (4, 4))}
LARGE = {"x": Range((1, 4), (8, 4), (16, 4))}


def choice(
    *profiles: dict[str, Range], allowed: tuple[int, ...] | None = None
) -> Callable[[Shapes], int]:
    io = PlanIO((), profiles)
    return lambda sizes: nearest_profile(io, allowed or range(len(profiles)), sizes, "m_0")


@pytest.mark.parametrize(("batch", "expected"), [(1, 0), (2, 0), (4, 0), (5, 1), (8, 1), (16, 1)])
def test_the_profile_with_the_nearest_best_shape_is_taken(batch: int, expected: int) -> None:
    assert choice(SMALL, LARGE)({"x": (batch, 4)}) == expected


def test_of_two_that_are_equally_near_the_first_is_taken() -> None:
    # 5 is as far from 2 as from 8, and both take it.
    wide = {"x": Range((1, 4), (2, 4), (16, 4))}
    assert choice(wide, LARGE)({"x": (5, 4)}) == 0
    assert choice(LARGE, wide)({"x": (5, 4)}) == 0


def test_only_those_that_are_allowed_are_taken() -> None:
    assert choice(SMALL, LARGE, allowed=(1,))({"x": (2, 4)}) == 1


def test_the_batch_counts_in_the_distance() -> None:
    """Triton's own compares shapes one dimension off where there is a batch."""
    by_batch = {"x": Range((1, 1), (1, 90), (99, 99))}
    by_width = {"x": Range((1, 1), (90, 1), (99, 99))}
    assert choice(by_batch, by_width)({"x": (80, 10)}) == 1


def test_what_fits_none_is_told_with_what_the_first_one_wants(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        choice(SMALL, LARGE)({"x": (17, 4)})
    assert str(caught.value) == (
        "request specifies invalid shape for input 'x' for m_0. Error details: model expected the "
        "shape of dimension 0 to be between 1 and 4 but received 17"
    )
    assert caplog.messages == [
        "failed to find any Optimization Profile among [ 0 1 ] to support the requested dimensions "
        "(or shape values), proceeding with first profile."
    ]


sizes = st.integers(1, 9)
ranges = (
    st.tuples(sizes, sizes, sizes)
    .map(sorted)
    .map(lambda three: {"x": Range(*((size,) for size in three))})
)


@given(st.lists(ranges, min_size=1, max_size=4), sizes)
def test_whatever_is_taken_takes_the_shape_and_none_that_does_is_nearer(
    profiles: list[dict[str, Range]], size: int
) -> None:
    def distance(profile: dict[str, Range]) -> int | None:
        found = profile["x"]
        return abs(found.opt[0] - size) if found.min[0] <= size <= found.max[0] else None

    fitting = [d for profile in profiles if (d := distance(profile)) is not None]
    try:
        taken = choice(*profiles)({"x": (size,)})
    except InvalidRequest:
        assert not fitting
    else:
        assert distance(profiles[taken]) == min(fitting)


def test_what_a_plan_takes_comes_back_from_the_process_that_read_it() -> None:
    read = PlanIO(
        (PlanTensor("x", is_input=True, datatype="FP32", shape=(-1, 4)),),
        ({"x": Range((1, 4), (2, 4), (8, 4))},),
    )
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(read)), PlanIO) == read


def test_what_tensorrt_8_tells_of_the_first_profile_is_free_where_others_differ() -> None:
    """So TensorRT 8.6 told a plan of two profiles, the first for a batch of 1, on an H200."""
    told = [
        PlanTensor("x", True, "FP32", (1, 4), "", False),
        PlanTensor("fixed", True, "FP32", (1, 3), "", False),
        PlanTensor("y", False, "FP32", (1, 9), "", False),
        PlanTensor("sum", False, "FP32", (9,), "", False),
    ]
    fixed = Range((1, 3), (1, 3), (1, 3))
    profiles = [
        {"x": Range((1, 4), (1, 4), (1, 4)), "fixed": fixed},
        {"x": Range((2, 4), (8, 4), (8, 4)), "fixed": fixed},
    ]
    shapes = [tensor.shape for tensor in free_over_profiles(told, profiles)]
    assert shapes == [(-1, 4), (1, 3), (-1, 9), (9,)]
    same = [profiles[0], profiles[0]]
    assert free_over_profiles(told, same) == tuple(told)
