"""What is pushed arrives whole, with a manifest that fits, or nothing has happened."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.deliveries import Archived, push

from edge_server.cli.model_push import _in_words, pull, write_manifest
from edge_server.cli.models import faults_of
from edge_server.errors import ModelConfigError, NotFound
from edge_server.repository.change_detector import read_repositories
from edge_server.repository.content import copy_model, take_inventory
from edge_server.repository.manifest import NAME as MANIFEST
from edge_server.repository.manifest import SIGNATURE_NAME as SIGNATURE
from edge_server.repository.manifest import Manifest, SigningKey, make_keys
from edge_server.repository.scan import scan_model
from edge_server.repository.transfer import roll_back
from edge_server.repository.verdicts import REPLACED, SILENT, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.deliveries import MakeModel

    Repository = Path | Archived


@pytest.fixture(params=["local", "as an archive"])
def target(request: pytest.FixtureRequest, repository: Path) -> Repository:
    return repository if request.param == "local" else Archived(repository)


@pytest.fixture
def local(repository: Path) -> Path:
    return repository


def texts(directory: Path) -> dict[str, str]:
    """Path → text of all files below but manifest and signature."""
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in {MANIFEST, SIGNATURE}
    }


def faults(repository: Path, name: str, *keys: Path) -> list[str]:
    return faults_of(take_inventory(repository, name), keys)


def names(repository: Path) -> list[str]:
    return sorted(path.name for path in repository.iterdir())


def test_a_model_arrives_whole_with_a_manifest_of_all_its_files(
    target: Repository, repository: Path, make_model: MakeModel
) -> None:
    model = make_model(
        **{"labels.txt": "a\nb\n", "1/deep/er": "x", ".git/x": "no", "1/a.tmp": "no"}
    )
    (model / "2").mkdir()
    done = push(model, target)
    assert (done.name, done.outcome, done.note) == ("m", "new", "")
    assert texts(repository / "m").keys() == {
        "config.pbtxt",
        "labels.txt",
        "1/weights",
        "1/deep/er",
    }
    assert (repository / "m" / "2").is_dir()
    assert names(repository) == ["m"]
    assert faults(repository, "m") == []
    said = Manifest.parse((repository / "m" / MANIFEST).read_bytes())
    assert said.missing(scan_model(repository, "m")) == ""
    assert not (model / MANIFEST).exists()


def test_times_and_what_may_be_run_are_kept(
    target: Repository, repository: Path, make_model: MakeModel
) -> None:
    model = make_model()
    os.utime(model / "1/weights", (1_000_000_000, 1_000_000_000))
    (model / "1/weights").chmod(0o755)
    push(model, target)
    status = (repository / "m/1/weights").stat()
    assert status.st_mtime == 1_000_000_000
    assert status.st_mode & 0o777 == 0o755
    assert (repository / "m/config.pbtxt").stat().st_mode & 0o777 == 0o644


def test_a_push_keeps_what_was_there_and_rollback_brings_it_back_and_forth(
    target: Repository, repository: Path, make_model: MakeModel
) -> None:
    for text in ("one", "two", "three"):
        push(make_model(**{"1/weights": text}), target)
    for text in ("two", "three"):
        roll_back(repository, "m")
        assert texts(repository / "m")["1/weights"] == text
        assert faults(repository, "m") == []
    assert names(repository) == [".previous-m", "m"]
    assert read_repositories([repository]).models.keys() == {"m"}


def test_the_same_content_again_does_not_lose_the_way_back(
    local: Path, repository: Path, make_model: MakeModel
) -> None:
    push(make_model(**{"1/weights": "old"}), local)
    push(make_model(**{"1/weights": "new"}), local)
    inode = (repository / "m").stat().st_ino
    assert push(make_model(), local).outcome == "replaced"
    roll_back(local, "m")
    assert (repository / "m").stat().st_ino == inode
    assert push(make_model(**{"1/weights": "new"}), local).outcome == "unchanged"
    assert (repository / "m").stat().st_ino == inode


def test_what_was_damaged_there_is_replaced_by_the_same_content(
    local: Path, repository: Path, make_model: MakeModel
) -> None:
    model = make_model()
    push(model, local)
    (repository / "m/1/weights").write_text("2")
    assert push(model, local).outcome == "replaced"
    assert faults(repository, "m") == []


def test_without_a_former_one_there_is_nothing_to_go_back_to(
    local: Path, make_model: MakeModel
) -> None:
    push(make_model(), local)
    for name in ("m", "other"):
        with pytest.raises(NotFound, match=f"of model '{name}' there is nothing to go back to"):
            roll_back(local, name)
    with pytest.raises(ModelConfigError, match=r"'\.\./m' is no model"):
        roll_back(local, "../m")


def test_a_model_that_was_removed_comes_back(
    repository: Path, local: Path, make_model: MakeModel
) -> None:
    push(make_model(**{"1/weights": "old"}), local)
    push(make_model(), local)
    shutil.rmtree(repository / "m")
    roll_back(local, "m")
    assert texts(repository / "m")["1/weights"] == "old"


def test_one_version_goes_there_and_the_rest_stays(
    target: Repository, repository: Path, make_model: MakeModel
) -> None:
    model = make_model(**{"labels.txt": "there", "1/weights": "one", "2/weights": "two"})
    (model / "4").mkdir()
    push(model, target)
    (model / "4").rmdir()
    model = make_model(**{"labels.txt": "here", "1/weights": "1", "2/new": "2", "3/x": "3"})
    assert push(model, target, version=2).outcome == "replaced"
    expected = {"1/weights": "one", "2/weights": "two", "2/new": "2", "labels.txt": "there"}
    assert texts(repository / "m").items() >= expected.items()
    assert "3/x" not in texts(repository / "m")
    assert (repository / "m" / "4").is_dir()
    assert faults(repository, "m") == []
    (model / "2" / "weights").unlink()
    done = push(model, target, version=2)
    assert "2/weights" not in texts(repository / "m")
    inventory = take_inventory(repository, "m")
    assert done.content.digest == inventory.content.digest
    assert inventory.content.empty == ("4",)


def test_a_version_needs_a_model_to_go_to_and_must_be_there(
    local: Path, repository: Path, make_model: MakeModel
) -> None:
    with pytest.raises(ModelConfigError, match="push the whole model, without --version"):
        push(make_model(), local, version=1)
    push(make_model(), local)
    with pytest.raises(ModelConfigError, match="m/2: no such directory; it has 1"):
        push(make_model(), local, version=2)
    assert names(repository) == ["m"]


def test_a_signed_model_is_good_under_its_key_wherever_it_goes(
    target: Repository, repository: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    public = make_keys(tmp_path / "key")
    key = SigningKey(tmp_path / "key")
    push(make_model(), target, key=key)
    assert faults(repository, "m", public) == []
    assert push(make_model(), target, key=key).outcome == "unchanged"
    fetched = tmp_path / "fetched"
    pull("m", target, fetched)
    assert faults(fetched, "m", public) == []
    # Its signature goes along with it, without the key.
    other = tmp_path / "other"
    other.mkdir()
    push(fetched / "m", other)
    assert faults(other, "m", public) == []
    (fetched / "m/1/weights").write_text("changed")
    done = push(fetched / "m", other)
    assert "was of other content and is left out" in done.note
    assert faults(other, "m") == []
    assert not (other / "m" / SIGNATURE).exists()


def test_one_version_of_a_signed_model_needs_the_key_again(
    local: Path, repository: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    public = make_keys(tmp_path / "key")
    key = SigningKey(tmp_path / "key")
    push(make_model(), local, key=key)
    model = make_model(**{"2/weights": "2"})
    push(model, local, version=2, key=key)
    assert faults(repository, "m", public) == []
    model = make_model(**{"2/weights": "3"})
    assert "is left out" in push(model, local, version=2).note
    assert faults(repository, "m") == []


def test_a_key_signs_no_rest_that_it_had_not_signed(
    local: Path, repository: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    make_keys(tmp_path / "key")
    key = SigningKey(tmp_path / "key")
    model = make_model(**{"2/weights": "2"})
    push(make_model(), local)
    with pytest.raises(ModelConfigError, match=r"was not signed with this key, .* the whole model"):
        push(model, local, version=2, key=key)
    (repository / "m/1/weights").write_text("changed")
    with pytest.raises(ModelConfigError, match="is not what its manifest says: 1/weights has 7"):
        push(model, local, version=2)
    (repository / "m" / MANIFEST).unlink()
    assert push(model, local, version=2).outcome == "replaced"


def test_in_place_the_manifest_and_its_signature_stand_beside_the_files(
    make_model: MakeModel, tmp_path: Path
) -> None:
    model = make_model()
    public = make_keys(tmp_path / "key")
    write_manifest(model, SigningKey(tmp_path / "key"))
    assert faults(model.parent, "m", public) == []
    (model / "1/weights").write_text("changed")
    assert faults(model.parent, "m") == ["1/weights has 7 bytes, not 1"]
    assert "is left out" in write_manifest(model, None).note
    assert names(model) == ["1", "config.pbtxt", MANIFEST]
    assert faults(model.parent, "m") == []


def test_the_same_files_have_the_same_manifest_to_the_byte(
    make_model: MakeModel, tmp_path: Path
) -> None:
    model = make_model()
    write_manifest(model, None)
    first = (model / MANIFEST).read_bytes()
    (model / MANIFEST).unlink()
    write_manifest(model, None)
    assert (model / MANIFEST).read_bytes() == first


def test_that_callers_know_of_another_interface_stands_in_the_manifest_and_is_signed(
    local: Path, repository: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    model, public = make_model(), make_keys(tmp_path / "key")
    key = SigningKey(tmp_path / "key")
    there = repository / "m" / MANIFEST
    push(model, local)
    assert "allow_interface_change" not in there.read_text()
    assert push(model, local, allow_interface_change=True).outcome == "replaced"
    assert Manifest.parse(there.read_bytes()).allow_interface_change is True
    push(model, local, key=key, allow_interface_change=True)
    assert Manifest.parse(there.read_bytes()).allow_interface_change is True
    assert faults(repository, "m", public) == []
    push(model, local)
    assert "allow_interface_change" not in there.read_text()
    # What was signed without it does not get it unseen.
    write_manifest(model, key)
    with pytest.raises(ModelConfigError, match="is signed and does not allow another interface"):
        push(model, local, allow_interface_change=True)
    write_manifest(model, key, allow_interface_change=True)
    push(model, local, allow_interface_change=True)
    assert faults(repository, "m", public) == []


def misspell(model: Path) -> None:
    (model / "config.pbtxt").write_text("max_batchsize: 1")


def link(model: Path) -> None:
    (model / "1/link").symlink_to("/etc/passwd")


def pipe(model: Path) -> None:
    os.mkfifo(model / "1/pipe")


def forget_versions(model: Path) -> None:
    (model / "1/weights").unlink()
    (model / "1").rmdir()


def forget_file(model: Path) -> None:
    (model / "config.pbtxt").write_text('backend: "onnxruntime"')


def name_oddly(model: Path) -> None:
    (model / "1/a\nb").touch()


def name_in_no_text(model: Path) -> None:
    Path(os.fsdecode(os.fsencode(model) + b"/1/\xff")).touch()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (misspell, 'config.pbtxt:1:1: .* has no field named "max_batchsize"'),
        (link, "1/link is a symbolic link"),
        (pipe, "1/pipe is no regular file; remove it"),
        (forget_versions, "at least one version must be available"),
        (forget_file, "1/model.onnx: missing; model 'm' is loaded from it"),
        (name_oddly, r"'1/a\\nb' is no printable text; rename that file"),
        (name_in_no_text, r"1/\\xff: the name is not UTF-8; rename it"),
    ],
)
def test_what_the_daemon_would_refuse_is_not_pushed(
    repository: Path,
    make_model: MakeModel,
    damage: Callable[[Path], None],
    says: str,
) -> None:
    push(make_model(), repository)
    model = make_model(**{"1/weights": "new"})
    damage(model)
    with pytest.raises(ModelConfigError, match=says):
        push(model, repository)
    assert texts(repository / "m")["1/weights"] == "1"
    assert names(repository) == ["m"]


def test_a_model_for_a_gpu_can_be_pushed_from_where_none_is(
    repository: Path, make_model: MakeModel
) -> None:
    config = (
        'backend: "image_preprocess" instance_group { kind: KIND_GPU } '
        'input { name: "i" data_type: TYPE_UINT8 dims: [-1, -1, 3] } '
        'output { name: "o" data_type: TYPE_FP32 dims: [3, 2, 2] }'
    )
    push(make_model(**{"config.pbtxt": config}), repository)
    assert texts(repository / "m")["config.pbtxt"] == config


def test_a_model_that_is_written_to_meanwhile_is_not_taken(
    repository: Path, target: Repository, make_model: MakeModel
) -> None:
    model = make_model()

    def meddle(read_bytes: int) -> None:
        (model / "1/weights").write_text("longer")

    def cut(read_bytes: int) -> None:
        (model / "1/weights").write_text("")

    for change in (meddle, cut):
        make_model()
        with pytest.raises(ModelConfigError, match=r"while it was copied|somebody writing"):
            push(model, target, progress=change)
    assert names(repository) == []


def test_a_repository_that_is_not_there_is_not_made(
    make_model: MakeModel, repository: Path, target: Repository
) -> None:
    repository.rmdir()
    with pytest.raises(ModelConfigError, match=r"models: .* make the directory first"):
        push(make_model(), target)
    assert not repository.exists()


def test_a_file_or_a_link_in_the_model_s_place_stays(
    repository: Path, local: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    place = repository / "m"
    for take in (place.touch, lambda: place.symlink_to(tmp_path)):
        take()
        with pytest.raises(ModelConfigError, match="m: is no directory; remove it"):
            push(make_model(), local)
        assert names(repository) == ["m"]
        place.unlink()


def test_a_pulled_model_is_held_against_its_manifest(
    repository: Path, target: Repository, make_model: MakeModel, tmp_path: Path
) -> None:
    push(make_model(), target)
    fetched = tmp_path / "fetched"
    assert pull("m", target, fetched).outcome == "new"
    assert texts(fetched / "m") == texts(repository / "m")
    (repository / "m/1/weights").write_text("2")
    with pytest.raises(ModelConfigError, match="1/weights has other content than"):
        pull("m", target, fetched)
    assert texts(fetched / "m")["1/weights"] == "1"
    assert names(fetched) == ["m"]
    (repository / "m" / MANIFEST).unlink()
    assert "its content cannot be verified" in pull("m", target, fetched).note
    with pytest.raises(ModelConfigError, match="there is no model 'n'"):
        pull("n", target, fetched)


@pytest.mark.parametrize("change", [lambda m: (m / "9").mkdir(), lambda m: (m / "5").rmdir()])
def test_directories_with_nothing_in_them_are_signed_too(
    local: Path,
    repository: Path,
    make_model: MakeModel,
    tmp_path: Path,
    change: Callable[[Path], None],
) -> None:
    model = make_model()
    (model / "5").mkdir()
    public = make_keys(tmp_path / "key")
    push(model, local, key=SigningKey(tmp_path / "key"))
    assert faults_of(take_inventory(repository, "m"), [public]) == []
    change(repository / "m")
    assert "which is empty, is" in faults_of(take_inventory(repository, "m"), [public])[0]
    with pytest.raises(ModelConfigError, match="which is empty, is"):
        pull("m", local, tmp_path / "pulled")
    with pytest.raises(ModelConfigError, match="which is empty, is"):
        copy_model(scan_model(repository, "m"), tmp_path / "copy")


@pytest.mark.parametrize("ended", [REPLACED, SILENT])
def test_the_list_that_shows_it_later_is_that_of_the_repository(ended: str) -> None:
    text, _ = _in_words("m", ended, Verdict(), Path("/srv/models"), 300.0)
    assert "`edge-server models list /srv/models`" in text


def test_a_refusal_names_the_rollback_that_does_not_restore_another_refused_content() -> None:
    refused = Verdict(outcome="refused", reason="no ONNX", serves="a" * 64, last_good="b" * 64)
    text, _ = _in_words("m", "", refused, Path("/srv/models"), 300.0)
    assert "models rollback m --to /srv/models --to-last-good` restores bbb" in text
    never_good = Verdict(outcome="refused", reason="no ONNX")
    text, _ = _in_words("m", "", never_good, Path("/srv/models"), 300.0)
    assert "rollback" not in text
