"""A browser on the vehicle's network, and what pages of other sites may have it send here."""

from __future__ import annotations

import json
import os
import socket
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tritonclient.http as triton
from integration.test_http_triton import Server, call, start
from support.waiting import TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

CHROMIUM = Path("/usr/bin/chromium")
# What changes something, and what only reads: of every listener.
_CHANGES = (
    "/v2/repository/models/add/unload",
    "/v2/repository/models/add/load",
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/systemsharedmemory/unregister",
    "/v2/models/add/infer",
    "/page/token",
)
_READS = ("/", "/v2", "/v2/health/live", "/openapi.json", "/metrics", "/v2/logging", "/nothing")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    daemon = start(tmp_path_factory.mktemp("models"))
    yield Server(daemon, f"127.0.0.1:{daemon.http_port}")
    daemon.stop()


class _OtherSite(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>another site</title>")

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def other_site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _OtherSite) as site:
        serving = threading.Thread(target=site.serve_forever)
        serving.start()
        yield f"http://localhost:{site.server_port}/"
        site.shutdown()
        serving.join()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    if not CHROMIUM.exists():
        pytest.skip("no browser on this machine: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Names that a stranger's name server leads here.
        rules = "--host-resolver-rules=MAP rebound.example 127.0.0.1"
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", rules],
            env={**os.environ, "HOME": str(tmp_path)},
        )
        yield browser.new_page()
        browser.close()


def _status(port: int, method: str, path: str, *headers: bytes) -> int:
    """Send one request as it is; return the status."""
    head = b"%s %s HTTP/1.1\r\n" % (method.encode(), path.encode())
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        lines = b"".join(b"%s\r\n" % each for each in (*headers, b"Content-Length: 0", b""))
        connection.sendall(head + lines)
        return int(connection.recv(65536)[9:12])


def _ready(server: Server) -> bool:
    return call(server.url, "GET", "/v2/models/add/ready").status == 200


def test_a_page_of_another_site_changes_nothing(
    server: Server, page: Page, other_site: str
) -> None:
    page.goto(other_site)
    before = call(server.url, "GET", "/v2/logging").json
    bodies = {"/v2/logging": json.dumps({"log_verbose_level": 4})}
    for path in _CHANGES:
        # The browser asks for nobody's leave to send these.
        page.evaluate(
            """([url, body]) => fetch(url, {method: "POST", mode: "no-cors", body,
                headers: {"Content-Type": "text/plain"}}).then(() => 0)""",
            [f"http://{server.url}{path}", bodies.get(path, "{}")],
        )
    page.evaluate(
        """(url) => new Promise((done) => {
            const frame = Object.assign(document.createElement("iframe"), {name: "f"});
            frame.onload = done;
            const form = Object.assign(document.createElement("form"),
                {method: "post", action: url, target: "f", enctype: "text/plain"});
            document.body.append(frame, form);
            form.submit();
        })""",
        f"http://{server.url}/v2/repository/models/add/unload",
    )
    assert _ready(server)
    assert call(server.url, "GET", "/v2/logging").json == before


def test_a_page_of_another_site_opens_no_socket(
    server: Server, page: Page, other_site: str
) -> None:
    page.goto(other_site)
    opened = page.evaluate(
        """(url) => new Promise((done) => {
            const socket = new WebSocket(url);
            socket.onopen = () => done(true);
            socket.onerror = () => done(false);
        })""",
        f"ws://{server.url}/page/live",
    )
    assert opened is False


def test_a_rebound_name_reads_nothing_in_a_browser(server: Server, page: Page) -> None:
    for port in (server.daemon.http_port, server.daemon.metrics_port):
        response = page.goto(f"http://rebound.example:{port}/metrics")
        assert response is not None
        assert response.status == 403
        assert "http.host_names" in response.text()


def test_the_own_page_and_a_link_to_it_are_served(
    server: Server, page: Page, other_site: str
) -> None:
    page.goto(other_site)
    page.evaluate("(url) => { location.href = url; }", f"http://{server.url}/")
    page.wait_for_selector("#stage", state="attached")
    told = page.evaluate("() => fetch('page/token').then((response) => response.status)")
    assert told == 200
    opened = page.evaluate(
        """() => new Promise((done) => {
            const socket = new WebSocket(`ws://${location.host}/page/live`);
            socket.onmessage = () => done(true);
            socket.onerror = () => done(false);
        })"""
    )
    assert opened is True


@pytest.mark.parametrize("listener", ["http", "metrics"])
@pytest.mark.parametrize(
    "header",
    [
        b"Host: rebound.example",
        b"Host: 127.0.0.1.rebound.example:8000",
        b"Host: localhost\r\nHost: rebound.example",
        b"Host: localhost\r\nOrigin: http://evil.example",
        b"Host: localhost\r\nOrigin: null",
        b"Host: localhost\r\nSec-Fetch-Site: cross-site",
    ],
)
def test_every_path_of_every_listener_refuses_foreign_requests(
    server: Server, listener: str, header: bytes
) -> None:
    port = server.daemon.http_port if listener == "http" else server.daemon.metrics_port
    send = partial(_status, port)
    assert {send("GET", path, header) for path in _READS} == {403}
    assert {send("POST", path, header) for path in _CHANGES} == {403}
    assert {send("OPTIONS", "/v2", header), send("PUT", "/nothing", header)} == {403}
    assert _ready(server)


def test_stock_clients_go_on_unnoticed(server: Server) -> None:
    for host in (b"localhost:8000", b"127.0.0.1", b"[::1]:8000", socket.gethostname().encode()):
        assert _status(server.daemon.metrics_port, "GET", "/metrics", b"Host: " + host) == 200
    # An old probe's, which is of no browser.
    assert _status(server.daemon.http_port, "GET", "/v2/health/live") == 200
    with triton.InferenceServerClient(server.url) as client:
        client.unload_model("count")
        client.load_model("count")
        client.update_log_settings({"log_verbose_level": 0})
        assert client.is_model_ready("count")


def test_other_names_of_the_device_are_served_at_every_listener(tmp_path: Path) -> None:
    daemon = start(tmp_path / "models", http={"host_names": ["truck-7.fleet.example"]})
    try:
        host = b"Host: Truck-7.fleet.example:80"
        assert _status(daemon.http_port, "GET", "/v2", host) == 200
        assert _status(daemon.metrics_port, "GET", "/metrics", host) == 200
        assert _status(daemon.http_port, "GET", "/v2", b"Host: fleet.example") == 403
    finally:
        daemon.stop()
