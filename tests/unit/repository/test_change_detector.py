"""What is believed: complete changes, once each, and nothing that is still under way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import ModelConfigError
from edge_server.repository.change_detector import (
    Change,
    ChangeDetector,
    RepositoryScan,
)
from edge_server.repository.manifest import Manifest, ManifestFile
from edge_server.repository.scan import ModelTree, SeenFile

HERE = Path("/repository")
WINDOW_S = 2.0


def tree(name: str = "m", *, size: int = 1, fault: str = "") -> ModelTree:
    return ModelTree(name, HERE, (1, 1), (SeenFile("1/x", size, 1, 1),), ("1",), fault)


def seen(*trees: ModelTree, unreadable: str = "") -> RepositoryScan:
    return RepositoryScan({t.name: t for t in trees}, {HERE: unreadable} if unreadable else {})


def no_manifest(_: ModelTree) -> Manifest:
    raise AssertionError("there is none")


def change_detector(manifest: Manifest | None = None) -> ChangeDetector:
    read = no_manifest if manifest is None else lambda _: manifest
    return ChangeDetector([], WINDOW_S, read)


A, B = tree(), tree(size=2)


def test_a_plain_copy_is_believed_after_two_looks_and_the_window() -> None:
    detector = change_detector()
    assert detector.detect(seen(A), 0.0) == []
    assert detector.detect(seen(A), 1.9) == []
    assert detector.changing == ["m"]
    assert detector.detect(seen(A), 2.0) == [Change("m", A)]
    assert detector.detect(seen(A), 9.0) == []
    assert not detector.changing


def test_two_looks_are_two_however_long_ago_the_first_was() -> None:
    detector = ChangeDetector([], 0.0, no_manifest)
    assert detector.detect(seen(A), 0.0) == []
    assert detector.detect(seen(A), 0.0) == [Change("m", A)]


def test_whoever_still_writes_begins_the_window_anew() -> None:
    detector = change_detector()
    detector.detect(seen(A), 0.0)
    assert detector.detect(seen(B), 2.0) == []
    assert detector.detect(seen(B), 3.9) == []
    assert detector.detect(seen(B), 4.0) == [Change("m", B)]


def test_what_goes_back_to_what_it_was_is_no_change() -> None:
    detector = change_detector()
    detector.resume({"m": A.files})
    detector.detect(seen(B), 0.0)
    assert detector.detect(seen(A), 5.0) == []
    assert detector.detect(seen(B), 6.0) == []


def test_a_directory_renamed_into_place_is_believed_at_once() -> None:
    assert change_detector().detect(seen(A), 0.0, {"m"}) == [Change("m", A)]
    assert change_detector().detect(seen(A), 0.0, {"other"}) == []


FITS = Manifest("m", {"1/x": ManifestFile("0" * 64, 5)})


def test_what_fits_its_manifest_is_believed_at_once() -> None:
    complete = ModelTree(
        "m", HERE, files=(SeenFile("1/x", 5, 1, 1), SeenFile("manifest.json", 9, 1, 1))
    )
    assert change_detector(FITS).detect(seen(complete), 0.0) == [Change("m", complete)]


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
    detector = change_detector(FITS)
    assert detector.detect(seen(torn), 0.0, {"m"}) == []
    (change,) = detector.detect(seen(torn), 2.0)
    assert change.tree is not None
    assert text in change.tree.fault
    assert detector.detect(seen(torn), 9.0) == []


def test_a_broken_manifest_is_a_fault_too() -> None:
    def broken(_: ModelTree) -> Manifest:
        raise ModelConfigError("manifest.json: truncated")

    torn = ModelTree("m", HERE, files=(SeenFile("manifest.json", 9, 1, 1),))
    detector = ChangeDetector([], WINDOW_S, broken)
    detector.detect(seen(torn), 0.0)
    (change,) = detector.detect(seen(torn), 2.0)
    assert change.tree is not None
    assert "truncated" in change.tree.fault


def test_a_fault_is_told_once_it_lasts() -> None:
    detector, faulty = change_detector(), tree(fault="a link")
    assert detector.detect(seen(faulty), 0.0, {"m"}) == []
    assert detector.detect(seen(faulty), 2.0) == [Change("m", faulty)]
    assert detector.detect(seen(faulty), 9.0) == []


def test_what_is_missing_for_the_window_was_taken_away() -> None:
    detector, other = change_detector(), tree("other")
    detector.resume({"m": A.files})
    detector.resume({"other": other.files})
    assert detector.detect(seen(A, other), 0.0) == []
    assert detector.detect(seen(other), 1.0) == []
    assert detector.detect(seen(other), 3.0) == [Change("m", None)]
    assert detector.detect(seen(other), 9.0) == []


def test_where_nothing_can_be_seen_nothing_was_taken_away() -> None:
    detector = change_detector()
    detector.resume({"m": A.files})
    for now in (0.0, 5.0, 50.0):
        assert detector.detect(seen(unreadable="holds no model"), now) == []
    assert not detector.changing
    # Nor has what was unreadable counted towards the window.
    assert detector.detect(seen(tree("other")), 60.0) == []


def test_of_what_was_never_seen_here_any_blind_repository_could_be_the_home() -> None:
    detector = change_detector()
    detector.resume({"m": A.files})
    other = RepositoryScan({"other": tree("other")}, {Path("/elsewhere"): "cannot be read"})
    for now in (0.0, 5.0, 50.0):
        assert [c for c in detector.detect(other, now) if c.name == "m"] == []


def test_what_came_and_went_again_is_forgotten() -> None:
    detector = change_detector()
    detector.detect(seen(A, tree("other")), 0.0)
    detector.detect(seen(tree("other")), 1.0)
    assert detector.changing == ["other"]
    assert detector.detect(seen(A, tree("other")), 2.5) == [Change("other", tree("other"))]


def test_what_could_not_be_taken_as_it_was_is_told_again() -> None:
    detector = change_detector()
    assert detector.detect(seen(A), 0.0, {"m"}) == [Change("m", A)]
    detector.report_again({"m"})
    assert detector.detect(seen(A), 1.0) == []
    assert detector.detect(seen(A), 3.0) == [Change("m", A)]


def test_a_model_with_an_empty_version_is_told_once_more_after_a_start() -> None:
    ensemble = ModelTree("m", HERE, files=A.files, directories=("1", "2"))
    detector = change_detector()
    detector.resume({"m": ensemble.files})
    detector.detect(seen(ensemble), 0.0)
    assert detector.detect(seen(ensemble), 2.0) == [Change("m", ensemble)]
    assert detector.detect(seen(ensemble), 9.0) == []


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
    detector, now = change_detector(), 0.0
    other = tree("other")
    detector.resume({"other": other.files})
    last: ModelTree | None = None  # what was told last
    history: list[tuple[float, ModelTree | None]] = []
    for what, passes_s, renamed, unreadable in steps:
        now += passes_s
        models = [other] if what is None else [other, what]
        told = detector.detect(
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
