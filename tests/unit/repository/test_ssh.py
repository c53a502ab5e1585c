"""What names a repository on another machine is read as scp reads it; see also delivery."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_server.errors import SettingsError
from edge_server.repository.remote import RemoteRepository, repository_at


@pytest.mark.parametrize(
    ("text", "reads", "there"),
    [
        ("truck:models", "truck:models", "./models"),
        ("truck:-x", "truck:-x", "./-x"),
        ("truck:a:b", "truck:a:b", "./a:b"),
        ("root@truck-7:/srv/models", "root@truck-7:/srv/models", "/srv/models"),
        ("root@10.0.0.2:~/models", "root@10.0.0.2:~/models", "~/models"),
        ("[::1]:/m", "::1:/m", "/m"),
        ("root@[fe80::1%eth0]:/m", "root@fe80::1%eth0:/m", "/m"),
        ("truck:/a:b c", "truck:/a:b c", "/a:b c"),
    ],
)
def test_a_host_and_a_directory_are_read_as_scp_reads_them(
    text: str, reads: str, there: str
) -> None:
    repository = repository_at(text, "ssh")
    assert isinstance(repository, RemoteRepository)
    assert str(repository) == reads
    assert repository.directory == there
    # And there it is a directory, not another host's.
    assert isinstance(repository_at(there, "ssh"), Path)


@pytest.mark.parametrize("text", ["models", "/srv/models", "./a:b", "/a:b", "../a@b:c"])
def test_what_has_a_slash_before_its_colon_is_a_directory_here(text: str) -> None:
    assert repository_at(text, "ssh") == Path(text)


@pytest.mark.parametrize("text", ["truck:", "-oProxyCommand=x:/m", "root@truck:"])
def test_what_is_neither_is_refused_and_never_an_option_of_ssh(text: str) -> None:
    with pytest.raises(SettingsError, match=r"give it as DIRECTORY or \[USER@\]HOST:DIRECTORY"):
        repository_at(text, "ssh")
