"""What was last found good goes back into the repository as it was, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from unit.repository.verdict_writer import Verdicts

from edge_server.errors import ModelConfigError
from edge_server.repository.content import remove
from edge_server.repository.scan import scan_model
from edge_server.repository.store import ModelStore
from edge_server.repository.transfer import to_last_good

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.deliveries import MakeModel

    from edge_server.repository.store import StagedModel


@pytest.fixture
def good(make_model: MakeModel, repository: Path, tmp_path: Path) -> Iterator[StagedModel]:
    """The copy of a model that a daemon which follows `repository` has found good."""
    made, place = make_model(), tmp_path / "store"
    store = ModelStore(place)
    staged = store.stage(scan_model(made.parent, made.name))
    Verdicts(place, [repository]).is_good("m", staged.digest, staged.directory)
    yield staged
    store.close()
    remove(place)


def test_the_last_good_copy_is_put_back(
    good: StagedModel, repository: Path, tmp_path: Path
) -> None:
    assert to_last_good(repository, "m", tmp_path / "store") > 0
    assert (repository / "m" / "1" / "weights").read_text() == "1"
    assert to_last_good(repository, "m", tmp_path / "store") == 0


def test_a_damaged_last_good_copy_is_refused(
    good: StagedModel, repository: Path, tmp_path: Path
) -> None:
    weights = good.directory / "1" / "weights"
    weights.chmod(0o644)
    weights.write_text("2")
    with pytest.raises(ModelConfigError, match="is damaged"):
        to_last_good(repository, "m", tmp_path / "store")
    assert list(repository.iterdir()) == []


def test_only_what_was_found_good_is_read_as_its_copy(
    good: StagedModel, repository: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    """Root may read more than the user of the daemon, who writes where the copy is."""
    secret = make_model("secret", **{"1/weights": "of root"})
    Verdicts(tmp_path / "store", [repository]).is_good(
        "m", good.digest, tmp_path / "store" / ".." / "made" / secret.name
    )
    with pytest.raises(ModelConfigError, match="is damaged"):
        to_last_good(repository, "m", tmp_path / "store")
    assert list(repository.iterdir()) == []
