"""What an HTTPS server sends is taken as it is stored, and no address but https:// is asked."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import requests
import urllib3

from edge_server.errors import ModelConfigError, Unavailable
from edge_server.repository import remote
from edge_server.repository.remote_files import ConnectionCut, HttpsStore, OciRepository

if TYPE_CHECKING:
    from pathlib import Path

Response = tuple[int, dict[str, str], bytes]


class Server(requests.adapters.BaseAdapter):
    """Responds to each request with the next of `responses`; `urls` are those that were asked."""

    def __init__(self, *responses: Response) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.logins: list[str | None] = []
        self._responses = iter(responses)

    def send(self, request: Any, **how: Any) -> requests.Response:
        del how
        self.urls.append(request.url)
        self.logins.append(request.headers.get("Authorization"))
        status, headers, data = next(self._responses)
        response = requests.Response()
        response.status_code, response.url, response.request = status, request.url, request
        response.headers.update(headers)
        response.raw = urllib3.HTTPResponse(
            io.BytesIO(data), headers=headers, status=status, preload_content=False
        )
        return response

    def close(self) -> None:
        pass


def store(server: Server) -> HttpsStore:
    found = HttpsStore("https://host")
    session = found.close.__self__
    session.mount("https://", server)
    return found


@pytest.mark.parametrize("target", ["http://host/net.tar.gz", "file:///etc/passwd"])
def test_a_redirect_to_another_protocol_is_not_followed(target: str) -> None:
    server = Server((302, {"Location": target}, b""))
    with pytest.raises(Unavailable, match="not https"):
        store(server).open("net.tar.gz", 0, "")
    assert server.urls == ["https://host/net.tar.gz"]


def test_an_encoding_of_the_server_is_left_as_it_is_stored() -> None:
    """Some servers call a .tar.gz a tar with an encoding; its digest is that of the .tar.gz."""
    data = b"no gzip, but the bytes as they are stored"
    server = Server((200, {"Content-Encoding": "gzip", "Content-Length": str(len(data))}, data))
    body = store(server).open("net.tar.gz", 0, "")
    assert b"".join(body.pieces) == data


def test_nothing_is_left_of_a_file_that_came_whole() -> None:
    server = Server((416, {"Content-Range": "bytes */300", "ETag": '"one"'}, b"no such range"))
    body = store(server).open("net.tar.gz", 300, '"one"')
    assert (body.offset, body.size, list(body.pieces)) == (300, 300, [])


def test_a_file_that_became_shorter_begins_anew() -> None:
    gone: Response = (416, {"Content-Range": "bytes */200"}, b"")
    server = Server(gone, (200, {"Content-Length": "200"}, bytes(200)))
    body = store(server).open("net.tar.gz", 300, '"one"')
    assert (body.offset, body.size) == (0, 200)


def test_a_length_of_many_digits_is_none() -> None:
    server = Server((200, {"Content-Length": "9" * 5000}, b""))
    assert store(server).open("net.tar.gz", 0, "").size is None


def registry(server: Server, monkeypatch: pytest.MonkeyPatch, home: Path) -> OciRepository:
    monkeypatch.setenv("HOME", str(home))
    found = OciRepository("registry.example/fleet/net:1")
    session = found.close.__self__
    session.mount("https://", server)
    return found


WANTED = {"Www-Authenticate": 'Bearer realm="https://login.example/token",service="r",scope="pull"'}


def test_a_registry_gets_a_token_once_it_asks_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server(
        (401, WANTED, b""),
        (200, {}, b'{"token": "one"}'),
        (200, {"Content-Length": "2"}, b"{}"),
        (403, WANTED, b""),
        (401, WANTED, b""),
        (200, {}, b'{"token": "two"}'),
        (200, {"Content-Length": "3"}, b"abc"),
    )
    found = registry(server, monkeypatch, tmp_path)
    assert b"".join(found.manifest("x").pieces) == b"{}"
    assert server.logins == [None, None, "Bearer one"]
    blob = found.blob("sha256:0", 0, "")
    assert (b"".join(blob.pieces), blob.tag) == (b"abc", "sha256:0")
    assert server.logins[-1] == "Bearer two"


ENDLESS = b"[" * (2 << 20)


def test_a_redirect_is_not_read_without_end() -> None:
    server = Server((302, {"Location": "https://host/x"}, ENDLESS), (200, {}, b"abc"))
    with pytest.raises(ConnectionCut, match="a redirect or a login of more than 1 MiB"):
        store(server).open("net.tar.gz", 0, "")


@pytest.mark.parametrize(
    ("responses", "error", "says"),
    [
        ([(401, WANTED, b""), (200, {}, ENDLESS)], ConnectionCut, "more than 1 MiB"),
        (
            [(401, WANTED, b""), (200, {}, ENDLESS[:500_000])],
            Unavailable,
            "neither asks for a login",
        ),
        ([(401, WANTED, b""), (200, {}, b"[]")], Unavailable, "neither asks for a login"),
        (
            [(401, {"Www-Authenticate": "Bearer realm"}, b"")],
            Unavailable,
            "neither asks for a login",
        ),
    ],
    ids=["endless", "deep", "no_object", "no_realm"],
)
def test_a_login_that_is_none_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    responses: list[Response],
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        registry(Server(*responses), monkeypatch, tmp_path).manifest("x")


def test_a_layer_of_an_impossible_size_makes_no_manifest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digest = "sha256:" + "0" * 64
    manifest = f'{{"layers": [{{"digest": "{digest}", "size": 1e999}}]}}'.encode()
    monkeypatch.setenv("HOME", str(tmp_path))

    class Simulated(OciRepository):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.close.__self__.mount("https://", Server((200, {}, manifest)))

    monkeypatch.setattr(remote, "OciRepository", Simulated)
    with pytest.raises(ModelConfigError, match="is no image manifest"):
        remote.open_origin("oci://registry.example/fleet/net:1")


def test_a_registry_that_names_no_login_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = registry(Server((401, {}, b"")), monkeypatch, tmp_path)
    with pytest.raises(Unavailable, match="`docker login` stores credentials"):
        found.manifest("x")
