"""An instance runs with the profiles that its plan has and its configuration allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.workshop import Asked, add_one

from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.model_config.config import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.workshop import Workshop

PROFILES = [{"x": ((1, 4), (2, 4), (4, 4))}, {"x": ((1, 4), (8, 4), (16, 4))}]


@pytest.mark.parametrize("version", ["8.6.1.6", "10.3.0.30"])
def test_an_instance_goes_from_profile_to_profile(
    workshop: Workshop, ask: Callable[..., Asked], version: str
) -> None:
    workshop.tensorrt(f"version={version}")
    workshop.write(add_one(("n", 4)), profiles=PROFILES)
    instance = workshop.instance('max_batch_size: 4 instance_group { profile: ["0", "1"] }')
    for rows in (1, 8, 3, 16, 16, 4):
        x = np.full((rows, 4), rows, np.float32)
        np.testing.assert_array_equal(ask(instance, inputs={"x": x}).array(), x + 1)
    error = ask(instance, inputs={"x": np.zeros((17, 4), np.float32)}).answer
    assert isinstance(error, InvalidRequest)


def test_a_profile_that_the_plan_does_not_have_is_told(workshop: Workshop) -> None:
    workshop.write(add_one(("n", 4)), profiles=PROFILES)
    with pytest.raises(ModelConfigError, match="invalid profile 7 "):
        workshop.instance('max_batch_size: 4 instance_group { profile: ["7"] }')
    # Instances may be made anew of what is loaded already.
    config = workshop.complete("max_batch_size: 4")
    with pytest.raises(ModelConfigError, match=r"profile 7\[7\] for m_9\. Expected .* range 0-1"):
        workshop.model(config).make_instance("m_9", Placement("GPU", 0, None, (1, 7)))
