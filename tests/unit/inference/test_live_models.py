"""What a model asks of the loading of others is checked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.errors import InvalidRequest, Unavailable
from edge_server.inference.live_models import LiveModels
from edge_server.inference.registry import ModelRegistry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.inference.snapshot import ModelEntry


class Notes:
    """A ModelControl that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def load(
        self,
        name: str,
        *,
        config: str | None,
        files: Mapping[str, bytes],
        within: str,
        cancellation: object = None,
    ) -> None:
        self.asked.append((name, config, dict(files), within))

    def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.asked.append((name, unload_dependents))

    def index(self, *, only_ready: bool) -> list[ModelEntry]:
        return []


def controlled() -> tuple[LiveModels, Notes]:
    models, control = LiveModels(ModelRegistry()), Notes()
    models.control = control
    return models, control


def test_files_are_named_as_the_protocol_names_them() -> None:
    models, control = controlled()
    models.load("b", config="{}", files={"file:1/./model.py": b"x"}, within="a")
    models.unload("b", unload_dependents=True)
    assert control.asked == [("b", "{}", {"1/model.py": b"x"}, "a"), ("b", True)]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("1/model.py", "unrecognized load parameter '1/model.py'."),
        (
            "file:../b/1/model.py",
            "Invalid file parameter 'file:../b/1/model.py' with normalized path '../b/1/model.py' "
            "must stay within model directory.",
        ),
    ],
)
def test_other_names_are_refused_in_the_contracts_words(key: str, says: str) -> None:
    models, control = controlled()
    with pytest.raises(InvalidRequest) as caught:
        models.load("b", config="{}", files={key: b"x"}, within="a")
    assert str(caught.value) == says
    assert control.asked == []


def test_without_control_nothing_is_loaded_or_unloaded() -> None:
    models = LiveModels(ModelRegistry())
    text = "explicit model load / unload is not allowed if polling is enabled"
    with pytest.raises(Unavailable, match=text):
        models.load("b", config=None, files={}, within="a")
    with pytest.raises(Unavailable, match=text):
        models.unload("b", unload_dependents=False)
