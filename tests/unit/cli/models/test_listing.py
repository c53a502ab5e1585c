"""A person sees at a glance what is in a repository and what is wrong with it; a script too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.deliveries import push

from edge_server.cli.main import run_command
from edge_server.cli.models import faults_of, local_listing, rows, table
from edge_server.errors import ModelConfigError
from edge_server.repository.content import take_inventory
from edge_server.repository.manifest import NAME as MANIFEST
from edge_server.repository.manifest import SIGNATURE_NAME as SIGNATURE
from edge_server.repository.manifest import SigningKey, make_keys

if TYPE_CHECKING:
    from pathlib import Path

    from support.deliveries import MakeModel


def test_each_state_has_its_word(repository: Path, make_model: MakeModel, tmp_path: Path) -> None:
    public = make_keys(tmp_path / "key")
    key = SigningKey(tmp_path / "key")
    for name in ("changed", "forged", "plain", "signed", "stray", "unsigned"):
        push(make_model(name), repository, key=None if name == "unsigned" else key)
    (repository / "changed/1/weights").write_text("2")
    (repository / "forged" / SIGNATURE).write_bytes(bytes(64))
    for name in (MANIFEST, SIGNATURE):
        (repository / "plain" / name).unlink()
    (repository / "stray" / MANIFEST).unlink()
    (repository / "linked").symlink_to("signed")

    def states(*keys: Path) -> dict[str, tuple[str, str]]:
        found = rows(local_listing(repository), keys)
        return {row["name"]: (row.get("manifest", ""), row.get("signature", "")) for row in found}

    trusted = states(public)
    assert trusted["signed"] == ("fits", "good")
    assert trusted["unsigned"] == ("fits", "none")
    assert trusted["plain"] == ("none", "none")
    assert trusted["changed"] == ("1/weights has other content than manifest.json says", "good")
    assert "is not good under" in trusted["forged"][1]
    assert "manifest.json, which it signs, is missing" in trusted["stray"][1]
    assert states()["signed"] == ("fits", "unchecked")

    lines = table(rows(local_listing(repository), [public]))
    assert lines[0].split()[:4] == ["MODEL", "VERSIONS", "SIZE", "DIGEST"]
    marks = {line.split()[0]: line.split()[-3:] for line in lines[1:8]}
    assert marks["signed"] == ["fits", "good", "-"]
    assert marks["changed"] == ["WRONG", "good", "-"]
    assert marks["linked"] == ["WRONG", "-", "-"]
    assert len({line.index(line.split()[-3]) for line in lines[2:4]}) == 1
    assert lines[8:] == sorted(lines[8:])
    assert [line.partition(":")[0] for line in lines[8:]] == [
        "changed",
        "forged",
        "linked",
        "stray",
    ]


def test_versions_and_digest_are_listed(repository: Path, make_model: MakeModel) -> None:
    done = push(make_model(**{"10/x": "", "2/x": "", "01/x": "", "configs/x": ""}), repository)
    (row,) = rows(local_listing(repository))
    assert row["versions"] == [1, 2, 10]
    assert row["digest"] == done.content.digest
    assert len(done.content.digest) == 64


def test_a_digest_is_of_content_alone(repository: Path, make_model: MakeModel) -> None:
    one, other = push(make_model("one"), repository), push(make_model("other"), repository)
    assert one.content.digest == other.content.digest
    (make_model("one") / "2").mkdir()
    assert push(make_model("one"), repository).content.digest != other.content.digest


def test_what_cannot_be_read_is_no_verdict(repository: Path) -> None:
    with pytest.raises(ModelConfigError, match="m: cannot be read: No such file"):
        faults_of(take_inventory(repository, "m"))


def test_a_name_that_is_no_text_is_listed_as_a_fault(
    repository: Path, make_model: MakeModel, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    push(make_model("m"), repository)
    (repository / "\udcff").mkdir()
    assert run_command(["models", "list", str(repository)]) == 0
    assert rb"\xff: '\xff' is no model" in capfdbinary.readouterr().out
    assert run_command(["models", "list", "--json", str(repository)]) == 0
    assert json.loads(capfdbinary.readouterr().out)[0]["name"] == r"\xff"
