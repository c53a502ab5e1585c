"""The verdict on a model is that of the daemon that runs, and of no other."""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import TYPE_CHECKING

import pytest
from unit.repository.verdict_writer import Verdicts

from edge_server.errors import SettingsError
from edge_server.repository.content import Content
from edge_server.repository.manifest import ManifestFile
from edge_server.repository.verdicts import (
    DECIDED,
    ENDED,
    GOOD,
    LOADING,
    NOBODY,
    REFUSED,
    REPLACED,
    SILENT,
    Verdict,
    followed,
    read_report,
    verdicts_on,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    place.mkdir()
    return place


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    place = tmp_path / "models"
    (place / "m").mkdir(parents=True)
    (place / "m" / "config.pbtxt").write_text("")
    return place


# Of the model in `repository`.
D1 = Content({"config.pbtxt": ManifestFile(hashlib.sha256(b"").hexdigest(), 0)}).digest


def wait(
    repository: Path,
    store: Path,
    since_ns: int = 0,
    *,
    passed: bool = False,
    meanwhile: Callable[[], object] | None = None,
) -> tuple[str, Verdict]:
    """Waits until `meanwhile` has happened after the first look; without it no longer than that."""

    def sleep(_: float) -> None:
        assert meanwhile is not None
        meanwhile()

    timeout_s = 60.0 if meanwhile else 0.0
    return wait_for(
        repository, "m", D1, since_ns, passed=passed, timeout_s=timeout_s, store=store, sleep=sleep
    )


def test_a_report_is_read_as_it_was_written(store: Path, repository: Path) -> None:
    verdicts = Verdicts(store, [repository])
    verdicts.is_good("m", "d0", store / "copies" / "key" / "m")
    verdicts.tell("m", REFUSED, "d1", "it is broken")
    verdicts_now = verdicts_on(repository, store)
    assert verdicts_now is not None
    assert verdicts_now["m"][:3] == (REFUSED, "d1", "it is broken")
    assert verdicts_now["m"][4:7] == ("d0", "d0", "copies/key/m")
    verdicts.gone("m")
    assert verdicts_on(repository, store) == {}


def test_a_verdict_that_could_not_be_written_is_written_again(
    store: Path, repository: Path
) -> None:
    verdicts = Verdicts(store, [repository])
    # What a full disk does: nothing can be written.
    (store / "verdicts.tmp").mkdir()
    verdicts.tell("m", REFUSED, "d1", "it is broken")
    assert verdicts_on(repository, store) == {}
    (store / "verdicts.tmp").rmdir()
    verdicts.write_again()
    verdicts_now = verdicts_on(repository, store)
    assert verdicts_now is not None
    assert verdicts_now["m"].reason == "it is broken"


def test_another_repository_is_followed_by_no_daemon(store: Path, repository: Path) -> None:
    Verdicts(store, [repository / "other"])
    assert followed(repository, store) is None
    assert wait(repository, store)[0] == NOBODY


def test_a_process_that_ended_reports_nothing_even_where_its_number_is_another_ones(
    store: Path, repository: Path
) -> None:
    Verdicts(store, [repository])
    path = store / "verdicts.json"
    fields = json.loads(path.read_text())
    assert fields["pid"] == os.getpid()
    path.write_text(json.dumps({**fields, "started": str(int(fields["started"]) - 1)}))
    report = read_report(store)
    assert report is not None
    assert not report.runs
    assert wait(repository, store)[0] == NOBODY


def test_a_verdict_from_before_the_push_does_not_count(store: Path, repository: Path) -> None:
    verdicts = Verdicts(store, [repository])
    verdicts.tell("m", REFUSED, D1, "old")
    since_ns = time.monotonic_ns()
    assert wait(repository, store, since_ns)[0] == SILENT
    assert wait(repository, store)[0] == DECIDED
    verdicts.tell("m", LOADING, D1)
    ended, verdict = wait(
        repository, store, since_ns, meanwhile=lambda: verdicts.serves("m", D1, on_trial=True)
    )
    assert (ended, verdict.serves) == (DECIDED, D1)
    # Of other content nothing is concluded.
    ended, verdict = wait(repository, store, since_ns, passed=True)
    assert ended == SILENT
    verdicts.is_good("m", D1, store / "copies" / "key" / "m")
    ended, verdict = wait(repository, store, since_ns, passed=True)
    assert (ended, verdict.outcome) == (DECIDED, GOOD)


@pytest.mark.parametrize("what", ["other content", "nothing"])
def test_the_waiting_ends_where_the_repository_no_longer_holds_the_model(
    store: Path, repository: Path, tmp_path: Path, what: str
) -> None:
    verdicts = Verdicts(store, [repository])
    verdicts.tell("m", LOADING, D1)

    def take() -> None:
        (repository / "m").rename(tmp_path / "was")
        if what == "other content":
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "config.pbtxt").write_text("new")
            (tmp_path / "new").rename(repository / "m")

    ended, verdict = wait(repository, store, meanwhile=take)
    assert (ended, verdict.outcome) == (REPLACED, LOADING)
    # A verdict that came in time counts all the same.
    verdicts.tell("m", REFUSED, D1, "it is broken")
    ended, verdict = wait(repository, store)
    assert (ended, verdict.reason) == (DECIDED, "it is broken")


def test_a_daemon_that_ends_meanwhile_ends_the_wait(store: Path, repository: Path) -> None:
    Verdicts(store, [repository])
    ended, _ = wait(repository, store, meanwhile=(store / "verdicts.json").unlink)
    assert ended == ENDED


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        pytest.param("[" * 200_000, id="deep"),
        "{}",
        '{"models": 1}',
        '{"models": {"m": {"x": 1}}}',
    ],
)
def test_what_is_no_report_is_none(store: Path, text: str) -> None:
    (store / "verdicts.json").write_text(text)
    assert read_report(store) is None


def test_a_store_that_may_not_be_read_is_an_error_with_the_remedy(
    repository: Path, tmp_path: Path
) -> None:
    # Also for root, who may read everything.
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SettingsError, match="run this as root or the daemon's user"):
        followed(repository, tmp_path / "loop")
