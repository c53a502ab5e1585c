"""The small parts of the demo: what waits is bounded, and a picture is whole or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from edge_server.cameras.recordings import write_picture
from edge_server.cli.demo import KEPT, Inbox, free_name
from edge_server.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path


def test_messages_that_nobody_takes_give_way_to_newer_ones() -> None:
    inbox = Inbox()
    for number in range(KEPT + 10):
        inbox.add(b"%d" % number)
    taken = [inbox.get_nowait() for _ in range(KEPT)]
    assert taken == [b"%d" % n for n in range(10, KEPT + 10)]
    assert inbox.empty()


def test_a_picture_that_cannot_be_encoded_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lanes.nonsense"
    with pytest.raises(SourceError, match=r"lanes\.nonsense: cannot be encoded"):
        write_picture(path, np.zeros((4, 4, 3), np.uint8))
    assert not path.exists()


def test_a_picture_that_is_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be encoded"):
        write_picture(tmp_path / "lanes.png", np.zeros((0, 4, 3), np.uint8))


def test_a_picture_never_takes_the_place_of_another_file(tmp_path: Path) -> None:
    picture = tmp_path / "lanes.png"
    assert free_name(picture) == picture
    picture.write_text("somebody's")
    assert free_name(picture) == tmp_path / "lanes-2.png"
    (tmp_path / "lanes-2.png").symlink_to("nowhere")
    assert free_name(picture) == tmp_path / "lanes-3.png"
