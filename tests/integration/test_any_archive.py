"""Whatever a model consists of: what was pushed fits its manifest, and nothing else does."""

from __future__ import annotations

import string
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.deliveries import CONFIG, push

from edge_server.cli.model_push import pull
from edge_server.cli.models import faults_of
from edge_server.repository.content import take_inventory
from edge_server.repository.manifest import ABOUT_CONTENT, SigningKey, make_keys
from edge_server.repository.manifest import NAME as MANIFEST
from edge_server.repository.scan import is_left_behind, scan_model

names = st.text(
    string.ascii_letters + string.digits + " ._-~äß日'\"$`;&|*?", min_size=1, max_size=8
)
paths = st.lists(names.filter(lambda n: n not in {".", ".."}), min_size=1, max_size=3).map("/".join)
trees = st.dictionaries(paths, st.binary(max_size=300), max_size=6)


def write(directory: Path, files: dict[str, bytes]) -> None:
    """As many of `files` as fit together."""
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(CONFIG)
    for path, data in files.items():
        target = directory / path
        if target.exists() or any(above.is_file() for above in target.parents):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def content(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
        and not any(is_left_behind(part) for part in path.relative_to(directory).parts)
        and path.relative_to(directory).as_posix() not in ABOUT_CONTENT
    }


quick = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(files=trees)
def test_what_arrives_is_what_was_sent_and_fits(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, to, back = (Path(folder) / name for name in ("made/m", "to", "back"))
        write(model, files)
        to.mkdir()
        sent = push(model, to)
        assert content(to / "m") == content(model)
        assert scan_model(to, "m").directories == scan_model(model.parent, "m").directories
        inventory = take_inventory(to, "m")
        assert faults_of(inventory) == []
        assert push(model, to).outcome == "unchanged"
        fetched = pull("m", to, back)
        assert content(back / "m") == content(model)
        assert fetched.content.digest == sent.content.digest == inventory.content.digest


@quick
@given(files=trees, data=st.data())
def test_any_one_bit_or_file_that_changes_is_found(
    files: dict[str, bytes], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, to = Path(folder) / "made/m", Path(folder) / "to"
        write(model, files)
        to.mkdir()
        public = make_keys(Path(folder) / "key")
        push(model, to, key=SigningKey(Path(folder) / "key"))
        assert faults_of(take_inventory(to, "m"), [public]) == []
        there = [file.path for file in scan_model(to, "m").files]
        path = to / "m" / data.draw(st.sampled_from(there))
        how = data.draw(st.sampled_from(["bit", "cut", "remove", "add"]))
        before = path.read_bytes()
        if how == "bit" and before:
            bit = data.draw(st.integers(0, 8 * len(before) - 1))
            changed = bytearray(before)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
        elif how == "cut" and before:
            path.write_bytes(before[: data.draw(st.integers(0, len(before) - 1))])
        elif how == "remove":
            path.unlink()
        else:
            (to / "m" / "added").write_bytes(b"x" + before)
        assert faults_of(take_inventory(to, "m"), [public]) != []


def test_the_manifest_is_of_the_model_that_it_names(tmp_path: Path) -> None:
    write(tmp_path / "made/m", {})
    push(tmp_path / "made/m", tmp_path)
    (tmp_path / "m").rename(tmp_path / "n")
    faults = faults_of(take_inventory(tmp_path, "n"))
    assert faults == [f"{MANIFEST} is of model 'm'"]
