"""Over ssh a push has happened or it has not, and what stood in its way is told by name.

The ssh here is a simulation (see conftest.py); a real one is in tests/integration/test_delivery.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from edge_server.cli.models.inspection import Inspection, rows
from edge_server.cli.models.push import pull, push
from edge_server.errors import (
    EdgeServerError,
    InternalError,
    ModelConfigError,
    NotFound,
    SettingsError,
    Unavailable,
)
from edge_server.repository.transfer.local import LocalRepository
from edge_server.repository.transfer.remote import RemoteRepository, _modules, repository_at

if TYPE_CHECKING:
    from tests.unit.repository.transfer.conftest import MakeModel, SimulatedSsh


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("truck:models", "truck:models"),
        ("root@truck-7:/srv/models", "root@truck-7:/srv/models"),
        ("root@10.0.0.2:~/models", "root@10.0.0.2:~/models"),
        ("[::1]:/m", "::1:/m"),
        ("root@[fe80::1%eth0]:/m", "root@fe80::1%eth0:/m"),
        ("truck:/a:b c", "truck:/a:b c"),
    ],
)
def test_a_host_and_a_directory_are_read_as_scp_reads_them(text: str, reads: str) -> None:
    repository = repository_at(text, "ssh")
    assert isinstance(repository, RemoteRepository)
    assert str(repository) == reads


@pytest.mark.parametrize("text", ["models", "/srv/models", "./a:b", "/a:b", "../a@b:c"])
def test_what_has_a_slash_before_its_colon_is_a_directory_here(text: str) -> None:
    repository = repository_at(text, "ssh")
    assert isinstance(repository, LocalRepository)
    assert repository.path == Path(text)


@pytest.mark.parametrize("text", ["truck:", "-oProxyCommand=x:/m", "root@truck:"])
def test_what_is_neither_is_refused_and_never_an_option_of_ssh(text: str) -> None:
    with pytest.raises(SettingsError, match=r"give it as DIRECTORY or \[USER@\]HOST:DIRECTORY"):
        repository_at(text, "ssh")


def test_no_name_there_is_ever_a_command(
    tmp_path: Path, make_model: MakeModel, over_ssh: SimulatedSsh
) -> None:
    over_ssh()
    odd = tmp_path / "a $(touch pwned) `touch pwned`; touch pwned '\""
    odd.mkdir()
    repository = RemoteRepository("host", os.fspath(odd), [os.fspath(tmp_path / "ssh")])
    push(make_model(**{"1/$(touch pwned)": "x"}), repository)
    assert (odd / "m/1/$(touch pwned)").read_text() == "x"
    assert not list(tmp_path.rglob("pwned"))
    assert not Path("pwned").exists()


@pytest.mark.parametrize("into", ["the modules", "a file", "the list of contents"])
def test_a_connection_that_breaks_changes_nothing(
    repository: Path, make_model: MakeModel, over_ssh: SimulatedSsh, into: str
) -> None:
    push(make_model(**{"1/weights": "old"}), LocalRepository(repository))
    model = make_model(**{"1/weights": "new" * 1_000_000})
    modules = len(json.dumps(_modules()))
    most = {"the modules": 100, "a file": modules + 1_000_000}.get(into, modules + 3_003_500)
    # The far side runs behind a pipe that ends.
    over_ssh(f'head -c {most} | PATH="/usr/bin:$PATH" sh -c "$*" 2>/dev/null; exit')
    target = over_ssh(f'head -c {most} | PATH="/usr/bin:$PATH" sh -c "$*" 2>/dev/null; exit')
    with pytest.raises(EdgeServerError, match=r"ended early|without reply|ends .* bytes early"):
        push(model, target)
    assert [path.name for path in repository.iterdir()] == ["m"]
    assert (repository / "m/1/weights").read_text() == "old"


@pytest.mark.parametrize(
    ("first", "kind", "says"),
    [
        ("exit 255", Unavailable, "host: ssh could not connect, or was not let in"),
        ("exit 127", Unavailable, "host: has no python3"),
        ("exit 3", InternalError, "host: the other side ended with 3, without reply"),
        ("echo edge-server-reply no; exit", InternalError, "answered with what is no reply"),
    ],
)
def test_a_host_that_does_not_answer_is_told_by_its_kind(
    make_model: MakeModel,
    over_ssh: SimulatedSsh,
    first: str,
    kind: type[EdgeServerError],
    says: str,
) -> None:
    target = over_ssh(first)
    with pytest.raises(kind, match=says):
        push(make_model(), target)
    with pytest.raises(kind, match=says):
        target.names()


def test_without_ssh_its_package_is_named(make_model: MakeModel) -> None:
    with pytest.raises(Unavailable, match=r"/no/ssh: cannot be run: .*; install OpenSSH's client"):
        push(make_model(), RemoteRepository("host", "models", ["/no/ssh"]))


def test_what_a_shell_there_greets_with_is_passed_over(
    repository: Path, make_model: MakeModel, over_ssh: SimulatedSsh, tmp_path: Path
) -> None:
    target = over_ssh("echo Welcome; echo")
    push(make_model(), target)
    assert pull("m", target, tmp_path / "back").outcome == "new"


def test_errors_of_the_far_side_come_back_as_what_they_are(
    repository: Path, over_ssh: SimulatedSsh, tmp_path: Path
) -> None:
    target = over_ssh()
    with pytest.raises(NotFound, match=r"^host: .*there is nothing to go back to"):
        target.roll_back("m")
    with pytest.raises(ModelConfigError, match=r"^host: .*there is no model 'm'"):
        pull("m", target, tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []
    repository.rmdir()
    with pytest.raises(ModelConfigError, match=r"^host: .*the model repository cannot be read"):
        target.names()


def test_a_repository_there_is_listed_as_it_is_here(
    repository: Path, make_model: MakeModel, over_ssh: SimulatedSsh
) -> None:
    local = LocalRepository(repository)
    push(make_model("a"), local)
    push(make_model("b", **{"1/x": "old"}), local)
    push(make_model("b", **{"1/x": "new"}), local)
    (repository / "c").mkdir()
    (repository / "d").symlink_to(repository / "a")
    (repository / "b/1/x").write_text("bad")
    inspection = Inspection([])
    here, there = rows(local, inspection), rows(over_ssh(), inspection)
    assert here == there
    assert [row["name"] for row in here] == ["a", "b", "c", "d"]
