"""What is believed: complete changes, once each, and nothing that is still under way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import ModelConfigError
from edge_server.repository.change_detector import (
    Change,
    ChangeDetector,
    RepositoryScan,
    SeenFiles,
)
from edge_server.repository.manifest import Manifest, ManifestFile
from edge_server.repository.scan import ModelTree, SeenFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

HERE = Path("/repository")
WINDOW_S = 2.0


def tree(name: str = "m", *, size: int = 1, fault: str = "") -> ModelTree:
    return ModelTree(name, HERE, (1, 1), (SeenFile("1/x", size, 1, 1),), ("1",), fault)


def seen(*trees: ModelTree, unreadable: str = "") -> RepositoryScan:
    return RepositoryScan({t.name: t for t in trees}, {HERE: unreadable} if unreadable else {})


def no_manifest(_: ModelTree) -> Manifest:
    raise AssertionError("there is none")


class Judge:
    """A change detector, and what it has seen."""

    def __init__(self, window_s: float, read_manifest: Callable[[ModelTree], Manifest]) -> None:
        self._detector = ChangeDetector(window_s, read_manifest)
        self.seen: dict[str, SeenFiles] = {}

    def accept(self, name: str, files: tuple[SeenFile, ...]) -> None:
        self.seen[name] = SeenFiles.of_earlier_run(files)

    def doubt(self, name: str) -> None:
        self.seen[name] = self.seen[name].doubted()

    @property
    def settling(self) -> list[str]:
        return [name for name, files in self.seen.items() if files.candidate is not None]

    def look(self, scan: RepositoryScan, now: float, arrived: Collection[str] = ()) -> list[Change]:
        self.seen, changes = self._detector.detect(scan, self.seen, now, arrived)
        return changes


def change_detector(manifest: Manifest | None = None) -> Judge:
    return Judge(WINDOW_S, no_manifest if manifest is None else lambda _: manifest)


A, B = tree(), tree(size=2)


def test_a_plain_copy_is_believed_after_two_looks_and_the_window() -> None:
    judge = change_detector()
    assert judge.look(seen(A), 0.0) == []
    assert judge.look(seen(A), 1.9) == []
    assert list(judge.settling) == ["m"]
    assert judge.look(seen(A), 2.0) == [Change("m", A)]
    assert judge.look(seen(A), 9.0) == []
    assert not judge.settling


def test_two_looks_are_two_however_long_ago_the_first_was() -> None:
    judge = Judge(0.0, no_manifest)
    assert judge.look(seen(A), 0.0) == []
    assert judge.look(seen(A), 0.0) == [Change("m", A)]


def test_whoever_still_writes_begins_the_window_anew() -> None:
    judge = change_detector()
    judge.look(seen(A), 0.0)
    assert judge.look(seen(B), 2.0) == []
    assert judge.look(seen(B), 3.9) == []
    assert judge.look(seen(B), 4.0) == [Change("m", B)]


def test_what_goes_back_to_what_it_was_is_no_change() -> None:
    judge = change_detector()
    judge.accept("m", A.files)
    judge.look(seen(B), 0.0)
    assert judge.look(seen(A), 5.0) == []
    assert judge.look(seen(B), 6.0) == []


def test_a_directory_renamed_into_place_is_believed_at_once() -> None:
    assert change_detector().look(seen(A), 0.0, {"m"}) == [Change("m", A)]
    assert change_detector().look(seen(A), 0.0, {"other"}) == []


FITS = Manifest("m", {"1/x": ManifestFile("0" * 64, 5)})


def test_what_fits_its_manifest_is_believed_at_once() -> None:
    complete = ModelTree(
        "m", HERE, files=(SeenFile("1/x", 5, 1, 1), SeenFile("manifest.json", 9, 1, 1))
    )
    assert change_detector(FITS).look(seen(complete), 0.0) == [Change("m", complete)]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "1/x is missing"),
        ({"1/x": 4}, "1/x has 4 bytes, not 5"),
        ({"1/x": 5, "1/y": 1}, "1/y is not in it"),
    ],
)
def test_what_does_not_fit_its_manifest_is_never_believed_and_in_the_end_says_why(
    files: dict[str, int], text: str
) -> None:
    have = {**files, "manifest.json": 9}
    torn = ModelTree("m", HERE, files=tuple(SeenFile(p, s, 1, 1) for p, s in sorted(have.items())))
    judge = change_detector(FITS)
    assert judge.look(seen(torn), 0.0, {"m"}) == []
    (change,) = judge.look(seen(torn), 2.0)
    assert change.tree is not None
    assert text in change.tree.fault
    assert judge.look(seen(torn), 9.0) == []


def test_a_broken_manifest_is_a_fault_too() -> None:
    def broken(_: ModelTree) -> Manifest:
        raise ModelConfigError("manifest.json: truncated")

    torn = ModelTree("m", HERE, files=(SeenFile("manifest.json", 9, 1, 1),))
    judge = Judge(WINDOW_S, broken)
    judge.look(seen(torn), 0.0)
    (change,) = judge.look(seen(torn), 2.0)
    assert change.tree is not None
    assert "truncated" in change.tree.fault


def test_a_fault_is_told_once_it_lasts() -> None:
    judge, faulty = change_detector(), tree(fault="a link")
    assert judge.look(seen(faulty), 0.0, {"m"}) == []
    assert judge.look(seen(faulty), 2.0) == [Change("m", faulty)]
    assert judge.look(seen(faulty), 9.0) == []


def test_what_is_missing_for_the_window_was_taken_away() -> None:
    judge, other = change_detector(), tree("other")
    judge.accept("m", A.files)
    judge.accept("other", other.files)
    assert judge.look(seen(A, other), 0.0) == []
    assert judge.look(seen(other), 1.0) == []
    assert judge.look(seen(other), 3.0) == [Change("m", None)]
    assert judge.look(seen(other), 9.0) == []


def test_where_nothing_can_be_seen_nothing_was_taken_away() -> None:
    judge = change_detector()
    judge.accept("m", A.files)
    for now in (0.0, 5.0, 50.0):
        assert judge.look(seen(unreadable="holds no model"), now) == []
    assert not judge.settling
    # Nor has what was unreadable counted towards the window.
    assert judge.look(seen(tree("other")), 60.0) == []


def test_of_what_was_never_seen_here_any_blind_repository_could_be_the_home() -> None:
    judge = change_detector()
    judge.accept("m", A.files)
    other = RepositoryScan({"other": tree("other")}, {Path("/elsewhere"): "cannot be read"})
    for now in (0.0, 5.0, 50.0):
        assert [c for c in judge.look(other, now) if c.name == "m"] == []


def test_what_came_and_went_again_is_forgotten() -> None:
    judge = change_detector()
    judge.look(seen(A, tree("other")), 0.0)
    judge.look(seen(tree("other")), 1.0)
    assert list(judge.settling) == ["other"]
    assert judge.look(seen(A, tree("other")), 2.5) == [Change("other", tree("other"))]


def test_what_could_not_be_taken_as_it_was_is_told_again() -> None:
    judge = change_detector()
    assert judge.look(seen(A), 0.0, {"m"}) == [Change("m", A)]
    judge.doubt("m")
    assert judge.look(seen(A), 1.0) == []
    assert judge.look(seen(A), 3.0) == [Change("m", A)]


def test_a_model_with_an_empty_version_is_told_once_more_after_a_start() -> None:
    ensemble = ModelTree("m", HERE, files=A.files, directories=("1", "2"))
    judge = change_detector()
    judge.accept("m", ensemble.files)
    judge.look(seen(ensemble), 0.0)
    assert judge.look(seen(ensemble), 2.0) == [Change("m", ensemble)]
    assert judge.look(seen(ensemble), 9.0) == []


SIGHTS = [A, B, tree(fault="a link"), None]


@given(
    st.lists(
        st.tuples(st.sampled_from(SIGHTS), st.floats(0.0, 3.0), st.booleans(), st.booleans()),
        max_size=30,
    )
)
def test_whatever_happens_only_what_lasted_is_believed_and_each_once(
    steps: list[tuple[ModelTree | None, float, bool, bool]],
) -> None:
    judge, now = change_detector(), 0.0
    other = tree("other")
    judge.accept("other", other.files)
    last: ModelTree | None = None  # what was told last
    history: list[tuple[float, ModelTree | None]] = []
    for what, passes_s, renamed, unreadable in steps:
        now += passes_s
        models = [other] if what is None else [other, what]
        told = judge.look(
            RepositoryScan(
                {m.name: m for m in models if not unreadable or m is what},
                {HERE: "x"} if unreadable else {},
            ),
            now,
            {"m"} if renamed else (),
        )
        told = [change for change in told if change.name == "m"]
        history.append((now, what))
        for change in told:
            assert change.tree == what
            assert change.tree != last
            last = change.tree
            if renamed and what is not None and not what.fault:
                continue
            unbroken = []
            for seen_at, it in reversed(history):
                if it != what:
                    break
                unbroken.append(seen_at)
            assert len(unbroken) >= 2
            assert now - unbroken[-1] >= WINDOW_S
        if what is None and unreadable:
            assert told == []
