"""Progress is of the whole, whatever phases TensorRT goes through, and never goes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_server.backends.tensorrt.plan_process import PhaseTree


def test_steps_of_a_phase_within_a_phase_count_for_a_part_of_its_step() -> None:
    tree = PhaseTree()
    tree.start("build", None, 2)
    assert tree.fraction == 0
    tree.start("tactics", "build", 4)
    tree.step("tactics", 1)
    assert tree.fraction == 0.25
    tree.finish("tactics")
    tree.step("build", 0)
    assert tree.fraction == 0.5
    tree.step("build", 1)
    assert tree.fraction == 1


NAMES = st.sampled_from("abcd")
CALLS = st.one_of(
    st.tuples(st.just("start"), NAMES, st.none() | NAMES, st.integers(-1, 5)),
    st.tuples(st.just("step"), NAMES, st.integers(-1, 9)),
    st.tuples(st.just("finish"), NAMES),
)


@given(st.lists(CALLS, max_size=40))
def test_any_order_of_calls_gives_a_fraction_that_never_goes_back(
    calls: list[tuple[object, ...]],
) -> None:
    tree = PhaseTree()
    before = 0.0
    for name, *arguments in calls:
        getattr(tree, str(name))(*arguments)
        assert before <= tree.fraction <= 1
        before = tree.fraction
