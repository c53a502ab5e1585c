"""Topics: every name is one safe level, and the layout is the published one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.mqtt.payloads import Topics


def test_the_layout_is_the_documented_one() -> None:
    topics = Topics("truck-7")
    assert topics.status == "edge/v1/truck-7/status"
    assert topics.meta == "edge/v1/truck-7/meta"
    assert topics.update == "edge/v1/truck-7/update"
    assert topics.lanes("front") == "edge/v1/truck-7/cameras/front/lanes"
    assert topics.camera_status("front") == "edge/v1/truck-7/cameras/front/status"
    assert topics.model_state("laneDetect_model") == (
        "edge/v1/truck-7/models/laneDetect_model/state"
    )


@pytest.mark.parametrize(
    "name", ["", "Front", "a b", "a/b", "#", "+", "ä", "$sys", "a\n", "x" * 65]
)
def test_a_bad_name_is_refused_with_its_remedy(name: str) -> None:
    with pytest.raises(ValueError, match=r"device name .* use 1 to 64 of a-z"):
        Topics(name)
    with pytest.raises(ValueError, match=r"camera name .* use 1 to 64 of a-z"):
        Topics("d").lanes(name)


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a b", "a/b", "#", "+", "a\n", "x" * 65])
def test_a_bad_model_name_is_refused_with_its_remedy(name: str) -> None:
    with pytest.raises(ValueError, match=r"model name .* a letter or digit first"):
        Topics("d").model_state(name)


@given(st.text(max_size=70))
def test_no_name_adds_a_level_or_a_wildcard(name: str) -> None:
    try:
        topics = [Topics("d").camera_status(name), Topics("d").model_state(name)]
    except ValueError:
        return
    for topic in topics:
        assert topic.count("/") == 5
        assert not set(topic) & set("+#$ \0")


def test_a_state_is_of_this_device_and_of_a_name_that_may_be() -> None:
    topics = Topics("truck-7")
    for topic in (topics.model_state("M_1.a"), topics.camera_status("c"), topics.calibration("c")):
        assert topics.is_state(topic)
    root = "edge/v1/truck-7"
    for topic in ("", "+", f"{root}/models/+/state", f"{root}/models/m/state/", f"{root}/status"):
        assert not topics.is_state(topic)
    for topic in (f"{root}/cameras/C/status", f"{root}/cameras/c/lanes", "x/models/m/state"):
        assert not topics.is_state(topic)
