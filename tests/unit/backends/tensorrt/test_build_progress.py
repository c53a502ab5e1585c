"""What is told of a build: all that is new, and no more than a broker can take."""

from __future__ import annotations

import pytest

from edge_server.backends.tensorrt.plan_process import (
    BuildEvent,
    BuildProgress,
    Progressed,
    Step,
    TrtMessage,
)

PHASE = "timing kernels"


class Build:
    """A build by a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.heard: list[str] = []
        self.told = BuildProgress(
            "m", "model.plan", "10.3.0.30", self.heard.append, now=lambda: self.now
        )

    def progressed(self, *percents: float) -> list[str]:
        """What is heard of it, none of the time going by."""
        begin = len(self.heard)
        for percent in percents:
            self.told(Progressed(percent / 100, PHASE))
        return self.heard[begin:]


@pytest.fixture
def build() -> Build:
    return Build()


def test_a_step_and_how_far_it_is_are_told_with_the_version_that_builds(build: Build) -> None:
    events: list[BuildEvent] = [
        Step("waiting for another build"),
        TrtMessage("INFO", "words"),
    ]
    with build.told as told:
        for event in [*events, Progressed(0.45, PHASE)]:
            told(event)
        assert build.heard == [
            "model.plan with TensorRT 10.3: waiting for another build",
            "building model.plan with TensorRT 10.3: 45 % (timing kernels)",
        ]


def test_at_once_only_steps_of_five_percent_are_told(build: Build) -> None:
    heard = build.progressed(*(0.01 * n for n in range(10001)))
    percents = [int(text.split(":")[1].split()[0]) for text in heard]
    assert percents == list(range(0, 101, 5))


def test_a_second_later_less_is_told_too_but_never_the_same_twice(build: Build) -> None:
    assert len(build.progressed(41, 42)) == 1
    build.now += 0.9
    assert build.progressed(42) == []
    build.now += 0.1
    assert len(build.progressed(42, 43)) == 1
    build.now += 1
    assert build.progressed(42) == []
    assert len(build.progressed(43, 44)) == 1


def test_a_phase_that_names_every_layer_is_cut(build: Build) -> None:
    build.told(Progressed(0.5, "conv+" * 1000))
    assert len(build.heard[0]) < 150


def test_when_a_build_has_ended_nothing_is_told_any_more(build: Build) -> None:
    with build.told:
        build.progressed(50)
    assert build.heard[-1] == ""


def test_a_plan_that_had_not_to_be_built_leaves_the_reason_as_it_is(build: Build) -> None:
    with build.told:
        pass
    assert build.heard == []
