"""A profile bounds every free dimension, by what is said, else by the configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.backends.tensorrt.plan_options import (
    BuildOptions,
    GivenShapes,
    PlanTensor,
    Range,
    profiles_for,
)
from edge_server.errors import InvalidRequest


def network_input(name: str, *shape: int, holds_shape: bool = False) -> PlanTensor:
    return PlanTensor(name, True, "FP32", shape, holds_shape=holds_shape)


FRAME = network_input("x", -1, 3, 360, 640)


def test_fixed_shapes_need_no_profile() -> None:
    assert profiles_for([network_input("x", 1, 3)], BuildOptions(max_batch_size=4)) == ()


def test_a_batch_goes_from_1_to_what_the_model_takes() -> None:
    options = BuildOptions(max_batch_size=8, dims={"x": (-1, 3, 360, 640)})
    most = (8, 3, 360, 640)
    assert profiles_for([FRAME], options) == ({"x": Range((1, 3, 360, 640), most, most)},)


def test_other_dimensions_are_as_the_configuration_fixes_them() -> None:
    options = BuildOptions(dims={"x": (1, 3, 8)})
    assert profiles_for([network_input("x", -1, 3, -1)], options) == (
        {"x": Range((1, 3, 8), (1, 3, 8), (1, 3, 8))},
    )


def test_what_nobody_says_is_asked_for_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"input 'x' has shape \[-1,3,-1\].*--opt x:1x3x1"):
        profiles_for([network_input("x", -1, 3, -1)], BuildOptions(dims={"x": (-1, 3, -1)}))


def test_what_is_said_wins_and_the_rest_is_what_is_said() -> None:
    options = BuildOptions(
        max_batch_size=8,
        dims={"x": (-1, 3, 360, 640)},
        profiles=(
            GivenShapes({}, {"x": (2, 3, 360, 640)}, {}),
            GivenShapes({"x": (1, 3, 360, 640)}, {}, {"x": (4, 3, 360, 640)}),
        ),
    )
    two = (2, 3, 360, 640)
    most = (4, 3, 360, 640)
    assert profiles_for([FRAME], options) == (
        {"x": Range(two, two, two)},
        {"x": Range((1, 3, 360, 640), most, most)},
    )


@pytest.mark.parametrize(
    ("given_shapes", "text"),
    [
        (GivenShapes({}, {"y": (1,)}, {}), "has no input 'y', only x"),
        (GivenShapes({}, {"x": (1, 3)}, {}), "'x' has 4 dimensions, --min gives 2"),
        (GivenShapes({}, {"x": (1, 4, 360, 640)}, {}), "has 3 in dimension 1, --min gives 4"),
        (
            GivenShapes({"x": (4, 3, 360, 640)}, {"x": (2, 3, 360, 640)}, {}),
            "dimension 0: min 4, opt 2 and max 2 are not in that order",
        ),
    ],
)
def test_a_shape_that_cannot_be_is_told(given_shapes: GivenShapes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        profiles_for([FRAME], BuildOptions(profiles=(given_shapes,)))


def test_a_mistyped_name_gets_the_nearest() -> None:
    options = BuildOptions(profiles=(GivenShapes({}, {"inptu": (1,)}, {}),))
    with pytest.raises(InvalidRequest, match="did you mean 'input'"):
        profiles_for([network_input("input", -1)], options)


def test_of_an_input_that_holds_a_shape_the_values_are_bounded() -> None:
    size = network_input("size", 2, holds_shape=True)
    options = BuildOptions(profiles=(GivenShapes({"size": (1, 1)}, {}, {"size": (640, 360)}),))
    assert profiles_for([size], options) == ({"size": Range((1, 1), (640, 360), (640, 360))},)
    with pytest.raises(InvalidRequest, match="input 'size' holds a shape"):
        profiles_for([size], BuildOptions(dims={"size": (2,)}))


def test_nvdla_takes_fixed_shapes_only() -> None:
    options = BuildOptions(max_batch_size=8, dims={"x": (-1, 3, 360, 640)}, dla_core=0)
    with pytest.raises(InvalidRequest, match=r"varies from \[1,3,360,640\] to \[8,3,360,640\]"):
        profiles_for([FRAME], options)


@given(
    st.lists(st.integers(-1, 4).filter(bool), min_size=1, max_size=4),
    st.integers(0, 4),
    st.lists(st.integers(-1, 4).filter(bool), min_size=1, max_size=4),
)
def test_a_range_is_in_order_and_keeps_what_the_network_fixes(
    shape: list[int], batch: int, dims: list[int]
) -> None:
    options = BuildOptions(max_batch_size=batch, dims={"x": tuple(dims)})
    try:
        profiles = profiles_for([network_input("x", *shape)], options)
    except InvalidRequest:
        return
    for profile in profiles:
        found = profile["x"]
        for has, least, best, most in zip(shape, found.min, found.opt, found.max, strict=True):
            assert 1 <= least <= best <= most
            assert has in (-1, best)
