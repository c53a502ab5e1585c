"""A loaded model of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from unit.inference.sequences import A_MINUTE, Accumulate, Road, model_config

from edge_server.backends.contract import TensorModel
from edge_server.inference.scheduling import Scheduling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def road() -> Iterator[Callable[..., Road]]:
    made: list[Road] = []

    def build(batching: str = A_MINUTE, max_batch_size: int = 4, extra: str = "") -> Road:
        model = Accumulate()
        config = model_config(batching, max_batch_size, extra)
        loaded = Scheduling().model(config, 1, TensorModel(model))
        made.append(Road(loaded, model))
        return made[-1]

    yield build
    for each in made:
        each.model.allowed.set()
        each.loaded.close()
