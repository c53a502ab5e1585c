"""The store gives back what was staged, whole, or nothing; and it keeps no more than it may."""

from __future__ import annotations

import os
import resource
import stat
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest
from unit.repository.stores import text

from edge_server.errors import (
    InternalError,
    ModelConfigError,
)
from edge_server.repository import store as store_module
from edge_server.repository.manifest import Manifest, ManifestFile
from edge_server.repository.scan import files_in, scan_model

if TYPE_CHECKING:
    from pathlib import Path

    from unit.repository.stores import Open, Write

    from edge_server.repository.scan import ModelTree
    from edge_server.repository.store import ModelStore


class Keys:
    """A signature policy that knows one signature."""

    def __init__(self) -> None:
        self.good = b"signed"

    def check(self, name: str, signed: tuple[bytes | None, bytes | None] | None) -> None:
        if signed is None or signed[0] is None or signed[1] != self.good:
            raise ModelConfigError(f"model {name}: not signed")


def contents(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def manifest_of(tree: ModelTree, **changes: object) -> bytes:
    files = {
        seen.path: ManifestFile(
            sha256((tree.directory / seen.path).read_bytes()).hexdigest(), seen.size
        )
        for seen in tree.files
    }
    return Manifest(**{"model": tree.name, "files": files, **changes}).encode()


def test_a_copy_is_what_the_repository_had_and_is_read_only(
    reopened: Open, write: Write, tmp_path: Path
) -> None:
    files = {"config.pbtxt": b"a", "1/model.onnx": b"b" * 3_000_000, "2": None, "1/sub/x": b""}
    tree = write(files)
    staged = reopened().stage(tree)
    assert (staged.name, staged.directory.name, staged.source) == ("m", "m", tree.files)
    assert contents(staged.directory) == {**files, "1": None, "1/sub": None}
    assert list(files_in(staged.directory).versions) == [1, 2]
    assert {stat.S_IMODE(p.stat().st_mode) for p in staged.directory.rglob("*")} == {0o444, 0o555}
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    assert not list((tmp_path / "store/incoming").iterdir())


def test_what_can_be_executed_still_can(reopened: Open, write: Write, repository: Path) -> None:
    write({"tool": b"", "data": b""})
    (repository / "m/tool").chmod(0o744)
    staged = reopened().stage(scan_model(repository, "m"))
    assert os.access(staged.directory / "tool", os.X_OK)
    assert not stat.S_IMODE((staged.directory / "data").stat().st_mode) & 0o111


def test_the_digest_is_that_of_the_content_alone(reopened: Open, write: Write) -> None:
    store = reopened()
    files = {"1/b": b"x" * 5000, "a": b""}
    one, two = store.stage(write(files, "one")), store.stage(write(files, "two"))
    lines = "".join(f"{p}\0{len(f)}\0{sha256(f).hexdigest()}\n" for p, f in files.items())
    assert one.digest == two.digest == sha256(lines.encode()).hexdigest()
    assert one.directory != two.directory
    signed = store.stage(write({"manifest.json": manifest_of(write({}, "two"))}, "two"))
    assert signed.digest == one.digest
    assert store.stage(write({"2": None}, "one")).digest != one.digest


def test_the_same_content_is_kept_once(reopened: Open, write: Write, tmp_path: Path) -> None:
    store = reopened()
    first = store.stage(write({"a": b"x"}))
    again = store.stage(write({"a": b"x"}))
    assert (again.directory, again.digest) == (first.directory, first.digest)
    assert again.source != first.source
    assert len(list((tmp_path / "store/copies").iterdir())) == 1


def test_a_manifest_that_agrees_is_no_obstacle(reopened: Open, write: Write) -> None:
    tree = write({"a": b"x", "1/b": b"y"})
    tree = write({"manifest.json": manifest_of(tree), "manifest.json.sig": b"?"})
    assert reopened().stage(tree).source == tree.files


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"a": b"?"}, "/m/a: content is not what manifest.json says: torn, or damaged on "),
        ({"a": b"longer"}, "/m/manifest.json: a has 6 bytes, not 1; push the model again"),
        ({"c": b""}, "/m/manifest.json: c is not in it; push the model again"),
        ({"manifest.json": b"{"}, "push the model again"),
        ({"manifest.json": b'{"model":"m","files":{}}'}, "/m/manifest.json: 1/b is not in it"),
        ({"manifest.json": b" " * ((4 << 20) + 1)}, "/m/manifest.json: 4194305 bytes, more than"),
        ({"manifest.json.sig": b" " * 65537}, "/m/manifest.json.sig: 65537 bytes, more than"),
    ],
)  # fmt: skip
def test_what_differs_from_its_manifest_is_refused(
    reopened: Open, write: Write, tmp_path: Path, changed: dict[str, bytes], reason: str
) -> None:
    write({"manifest.json": manifest_of(write({"a": b"x", "1/b": b"y"}))})
    with pytest.raises(ModelConfigError) as caught:
        reopened().stage(write(dict(changed)))
    assert reason in str(caught.value)
    assert not list((tmp_path / "store/incoming").iterdir())
    assert not list((tmp_path / "store/copies").iterdir())


def test_what_looking_has_found_wrong_is_refused(reopened: Open, write: Write) -> None:
    tree = write({"a": b"x"})
    (tree.directory / "link").symlink_to("a")
    with pytest.raises(ModelConfigError, match="link is a symbolic link"):
        reopened().stage(scan_model(tree.repository, "m"))


def test_a_name_that_no_text_can_have_is_refused(reopened: Open, write: Write) -> None:
    tree = write({"a": b"x"})
    try:
        (tree.directory / os.fsdecode(b"\xff")).touch()
    except OSError:
        pytest.skip("this file system takes no such name")
    with pytest.raises(ModelConfigError, match=r"\\xff: the name is not UTF-8; rename it"):
        reopened().stage(scan_model(tree.repository, "m"))


def test_signatures_are_checked_before_and_at_every_start(
    reopened: Open, write: Write, tmp_path: Path
) -> None:
    keys = Keys()
    with pytest.raises(ModelConfigError, match="model m: not signed"):
        reopened(signatures=keys).stage(write({"a": b"x"}))
    assert not list((tmp_path / "store/copies").iterdir())
    store = reopened()
    store.commit(store.stage(write({"a": b"x"})))
    manifest = manifest_of(write({}))
    store = reopened(signatures=keys)
    assert store.last_good() == {}
    signed = store.stage(write({"manifest.json": manifest, "manifest.json.sig": keys.good}))
    store.commit(signed)
    store = reopened(signatures=keys)
    assert store.last_good() == {"m": signed}
    # A key that is not trusted for a while costs nothing that it has signed.
    keys.good = b"another"
    assert reopened(signatures=keys).last_good() == {}
    assert reopened().last_good() == {"m": signed}


def test_what_served_last_is_there_after_a_restart_and_what_it_replaced(
    reopened: Open, write: Write
) -> None:
    store = reopened()
    assert store.last_good() == {}
    for content in "abcd":
        staged = store.stage(write({"a": content.encode()}))
        assert text(store.last_good().get("m")) != content
        store.commit(staged)
    store.commit(store.stage(write({"a": b"x"}, "other")))
    store = reopened()
    assert store.last_good()["m"] == staged
    assert [text(kept) for kept in store.history("m")] == ["d", "c", "b"]
    store.commit(store.history("m")[1])
    assert [text(kept) for kept in reopened().history("m")] == ["c", "d", "b"]
    assert reopened().history("nobody") == []


def test_what_is_forgotten_is_gone(reopened: Open, write: Write, tmp_path: Path) -> None:
    store = reopened()
    store.commit(store.stage(write({"a": b"x"})))
    store.forget("m")
    store.forget("nobody")
    assert store.history("m") == []
    assert not list((tmp_path / "store/copies").iterdir())
    assert reopened().last_good() == {}


def test_files_stay_as_long_as_somebody_holds_the_model(reopened: Open, write: Write) -> None:
    store = reopened()
    held = store.stage(write({"a": b"held"}))
    dropped = store.stage(write({"a": b"dropped"})).directory
    store.commit(store.stage(write({"a": b"new"})))
    assert text(held) == "held"
    assert not dropped.exists()
    directory = held.directory
    del held
    store.commit(store.stage(write({"a": b"newer"})))
    assert not directory.exists()


def test_models_are_staged_and_served_side_by_side(reopened: Open, write: Write) -> None:
    store = reopened(most_bytes=2000)

    def follow(name: str) -> None:
        for turn in range(8):
            staged = store.stage(write({"a": f"{name}{turn}".encode(), "b": b"x" * 50}, name))
            with store.loading(staged):
                assert text(staged) == f"{name}{turn}"
            store.commit(staged)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(follow, "mnop"))
    store = reopened()
    assert {n: text(good) for n, good in store.last_good().items()} == {n: f"{n}7" for n in "mnop"}
    assert [text(kept) for kept in store.history("p")] == ["p7", "p6", "p5"]


def test_what_served_before_makes_room_oldest_first(reopened: Open, write: Write) -> None:
    def serve(name: str, content: str) -> None:
        store.commit(store.stage(write({"a": content.encode()}, name)))

    store = reopened(most_bytes=5)
    for name, content in [("m", "a"), ("n", "b"), ("m", "c"), ("n", "d"), ("m", "e"), ("n", "f")]:
        serve(name, content)
    assert [text(kept) for kept in store.history("m")] == ["e", "c"]
    assert [text(kept) for kept in store.history("n")] == ["f", "d", "b"]
    serve("n", "ggg")
    assert [text(kept) for kept in store.history("m")] == ["e"]
    assert [text(kept) for kept in store.history("n")] == ["ggg", "f"]
    with pytest.raises(InternalError, match="no room for 2 bytes beside what serves, of 5 in all"):
        store.stage(write({"a": b"22"}, "third"))
    assert len(store.history("n")) == 2, "in vain"
    with pytest.raises(ModelConfigError, match=r"/n: 6 bytes, more than the model store may hold"):
        store.stage(write({"a": b"666666"}, "n"))
    assert {name: text(kept) for name, kept in reopened().last_good().items()} == {
        "m": "e",
        "n": "ggg",
    }


def test_what_is_in_use_does_not_make_room(reopened: Open, write: Write) -> None:
    store = reopened(most_bytes=2)
    before = store.stage(write({"a": b"a"}))
    store.commit(before)
    store.commit(store.stage(write({"a": b"b"})))
    with pytest.raises(InternalError, match="no room for 1 bytes"):
        store.stage(write({"a": b"c"}))
    assert text(before) == "a"
    del before
    assert text(store.stage(write({"a": b"c"}))) == "c"


def test_a_disk_that_takes_no_more_leaves_nothing_half_there(
    reopened: Open, write: Write, tmp_path: Path
) -> None:
    store = reopened()
    tree = write({"a": b"x" * 100_000})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(InternalError) as caught:
            store.stage(tree)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == (
        f"model store {tmp_path / 'store'}: File too large; check the disk, or give it "
        "another directory"
    )
    assert not list((tmp_path / "store/incoming").iterdir())
    assert len(text(store.stage(tree))) == 100_000


def test_each_set_of_repositories_has_its_own_models_and_quarantine(
    reopened: Open, write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = [tmp_path / "a"], [tmp_path / "b", tmp_path / "c"]
    store = reopened(repositories=a)
    bad = store.stage(write({"a": b"bad"}))
    store.quarantine(bad.digest, "rolled back", "m")
    for content in (b"before", b"of a"):
        store.commit(store.stage(write({"a": content})))
    assert not caplog.text

    store = reopened(repositories=b)
    assert f"was last used for {a[0]}, now for {b[0]}, {b[1]}: the models and" in caplog.text
    assert store.last_good() == {}
    assert store.quarantined(bad.digest) == ""
    store.commit(store.stage(write({"a": b"of b"})))
    # A death while a model of the one is loaded is not held against the other's.
    with store.loading(store.stage(write({"a": b"deadly"}))):
        store = reopened(repositories=a, died=True)
    assert text(store.last_good()["m"]) == "of a"
    assert [text(each) for each in store.history("m")] == ["of a", "before"]
    assert store.quarantined(bad.digest) == "rolled back"
    assert not store.suspected(store.stage(write({"a": b"deadly"})).digest)

    caplog.clear()
    store = reopened(repositories=[b[1], b[0], b[0]])
    assert "of these 1 models are known" in caplog.text
    assert text(store.last_good()["m"]) == "of b"
    assert store.suspected(store.stage(write({"a": b"deadly"})).digest)


def test_a_store_from_before_sets_were_recorded_is_taken_over(
    reopened: Open, write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = reopened()
    store.commit(store.stage(write({"a": b"x"})))
    assert text(reopened(repositories=[tmp_path]).last_good()["m"]) == "x"
    assert not caplog.text
    assert reopened(repositories=[tmp_path / "b"]).last_good() == {}


def test_what_is_of_other_repositories_makes_room_first(
    reopened: Open, write: Write, tmp_path: Path
) -> None:
    def serve(name: str, content: str) -> None:
        store.commit(store.stage(write({"a": content.encode()}, name)))

    def of(repository: str) -> ModelStore:
        return reopened(most_bytes=11, repositories=[tmp_path / repository])

    store = of("a")
    for name, content in [("m", "1"), ("m", "2"), ("n", "same")]:
        serve(name, content)
    store = of("b")
    for name, content in [("n", "same"), ("m", "x"), ("m", "yyyyy")]:
        serve(name, content)
    store = of("a")
    assert [text(each) for each in store.history("m")] == ["2"]
    store = of("b")
    serve("m", "w")
    assert [text(each) for each in store.history("m")] == ["w", "yyyyy"]
    serve("m", "vvvvvv")
    assert [text(each) for each in store.history("m")] == ["vvvvvv", "w"]
    assert text(store.last_good()["n"]) == "same"
    store = of("a")
    assert store.history("m") == []
    assert text(store.last_good()["n"]) == "same"


def test_a_disk_near_its_floor_gives_up_the_oldest_copy_that_nobody_needs(
    write: Write, reopened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 10_000
    monkeypatch.setattr(store_module, "floor_bytes", lambda *_: 1000)
    store = reopened(reserve_bytes=1000)
    # What the copies take is no longer free.
    monkeypatch.setattr(store_module, "free_bytes", lambda _: free - store._copies.size_bytes)
    for letter in (b"a", b"b", b"c"):
        store.commit(store.stage(write({"1/x": letter * 1000, "config.pbtxt": b""})))
    first, second, _ = reversed(store.history("m"))
    keys = (first.key, second.key)
    del first, second
    free = 4500
    store.commit(store.stage(write({"1/x": b"d" * 1000, "config.pbtxt": b""})))
    assert not {keys[0]} & store._copies.keys
    assert keys[1] in store._copies.keys
    free = 2000
    with pytest.raises(InternalError, match=r"the disk has -?\d+ left, of which 1000 stay free"):
        store.stage(write({"1/x": b"e" * 2000, "config.pbtxt": b""}))
    assert store.last_good()["m"].directory.joinpath("1/x").read_bytes() == b"d" * 1000


def test_a_model_that_is_removed_on_a_full_disk_makes_room_for_the_state(
    write: Write, reopened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = reopened()
    store.commit(store.stage(write({"1/x": b"a" * 1000, "config.pbtxt": b""})))
    store.commit(store.stage(write({"1/x": b"b", "config.pbtxt": b""}, "other")))
    real = store._file.write

    def full(state: object) -> None:
        if store._copies.size_bytes > 500:
            raise OSError(28, "No space left on device")
        real(state)

    monkeypatch.setattr(store._file, "write", full)
    store.forget("m")
    assert list(store.last_good()) == ["other"]
    assert list(reopened().last_good()) == ["other"]


def test_a_model_that_is_removed_where_nothing_can_be_written_is_gone_after_a_restart_too(
    write: Write, reopened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = reopened()
    store.commit(store.stage(write({"1/x": b"a" * 1000, "config.pbtxt": b""})))

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._file, "write", full)
    with pytest.raises(InternalError, match="make room"):
        store.forget("m")
    assert store._copies.keys == set()
    assert reopened(died=True).last_good() == {}
