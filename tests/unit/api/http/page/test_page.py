"""The page answers its own browser pages alone, and sends no faster than they take."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from contextlib import AsyncExitStack
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from starlette.applications import Starlette

from edge_server.api.access import LOG_SETTINGS, AccessRules
from edge_server.api.http.page.routes import (
    COOKIE,
    MISTAKE,
    MOST_PAGES,
    NEEDS_TOKEN,
    TRY_LATER,
    LivePages,
    page_routes,
)
from edge_server.api.http.page.state import PageSources, PictureWriter, state_text
from edge_server.api.http.sources import Sources
from edge_server.board.board import Identity
from edge_server.cameras.camera import Camera
from edge_server.cameras.frame import Frame
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelEntry, ModelRegistry, ModelState
from edge_server.lanes.types import Lane, LaneFrame
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.pipeline.lane_feed import LaneFeed, LaneLatency
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pipeline.perception import Detections, NetworkFrame
from edge_server.pipeline.picture_feed import PictureFeed, Sight
from edge_server.pixels import Image
from edge_server.process.logs import LogTail
from edge_server.settings import Restriction

if TYPE_CHECKING:
    from collections.abc import Callable

IDENTITY = Identity("truck-7", "0.1.0", "boot", "client")
STATIC = files("edge_server.api.http.page") / "static"


def sources(**other: Any) -> PageSources:
    pipeline = LanePipeline(
        Camera("front", "synthetic://road"), DataPlane(ModelRegistry()), "lane_detection", ()
    )
    broken = ModelEntry("broken\udcff", 1, ModelState.UNAVAILABLE, "no such file: \udcff.onnx")
    parts = Sources("0.1.0", lambda: [broken], [pipeline], LaneLatency())
    feed = PictureFeed(PictureWriter(IDENTITY), processors=1000)
    return PageSources(IDENTITY, parts, feed, EventLog(), **other)


def ask(
    page: PageSources,
    path: str,
    method: str = "GET",
    body: bytes = b"",
    query: str = "",
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """The status, the headers and the body of an answer."""
    named = {"host": "localhost:8000", **{k.replace("_", "-"): v for k, v in headers.items()}}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(k.encode(), v.encode()) for k, v in named.items()],
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Starlette(routes=page_routes(page))(scope, receive, send))
    got = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], got, b"".join(each.get("body", b"") for each in sent[1:])


class Browser:
    """The other side of a WebSocket, without a network between."""

    def __init__(self, pages: LivePages, **headers: str) -> None:
        named = {"host": "localhost:8000", **headers}
        self._scope = {
            "type": "websocket",
            "path": "/page/live",
            "headers": [(k.encode(), v.encode()) for k, v in named.items()],
            "subprotocols": [],
        }
        self._pages = pages
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._outbox.put_nowait({"type": "websocket.connect"})
        self.takes = asyncio.Event()
        self.takes.set()
        self.is_closed = False  # by uvicorn, which says so

    async def _send(self, message: Any) -> None:
        await self.takes.wait()
        if self.is_closed:
            raise RuntimeError(f"Unexpected ASGI message '{message['type']}'")
        self._inbox.put_nowait(message)

    async def __aenter__(self) -> Browser:
        self._task = asyncio.create_task(self._pages(self._scope, self._outbox.get, self._send))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._outbox.put_nowait({"type": "websocket.disconnect", "code": 1001})
        self.takes.set()
        await asyncio.wait_for(self._task, 10)

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self._inbox.get(), 10)

    async def next_of(self, kind: str) -> Any:
        """The next text of that type, or the next bytes."""
        while True:
            message = await self.next()
            if kind == "bytes" and message.get("bytes"):
                return message["bytes"]
            if message.get("text") and json.loads(message["text"])["type"] == kind:
                return json.loads(message["text"])

    def put(self, text: str | None = None, data: bytes | None = None) -> None:
        self._outbox.put_nowait({"type": "websocket.receive", "text": text, "bytes": data})


def give(page: PageSources, number: int) -> None:
    """A frame of the camera, as its pipeline gives it; then the encoder's turn."""
    points = np.array([[10.0, 40.0], [20.0, 20.0]], np.float32)
    lane_frame = LaneFrame(
        "front", number, 0, 1, 1, 64, 48, "lane_detection", lanes=(Lane(points, 0.9),)
    )
    page.pictures(lane_frame, Frame.arrived(number, Image.of_bgr(np.zeros((48, 64, 3), np.uint8))))
    page.pictures.worker.wait = lambda _: None
    if page.pictures._waiting:
        page.pictures._rest_until_s = 0.0
        page.pictures.tick(0.0)


async def until(condition: Callable[[], bool]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), 10)


def test_everything_that_the_page_loads_is_served_with_its_type_and_policy() -> None:
    page = sources()
    status, headers, body = ask(page, "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["content-security-policy"]
    found = set(re.findall(r'(?:src|href)="([^"]+)"', body.decode()))
    assert found == {"page/icon.svg", "page/page.css", "page/page.js"}
    scripts = "".join((STATIC / each).read_text() for each in ("page.js", "lists.js"))
    modules = set(re.findall(r'from "\./([^"]+)"', scripts))
    for path in (*found, *(f"page/{each}" for each in modules), "favicon.ico"):
        assert ask(page, f"/{path}")[0] == 200, path
    assert ask(page, "/", if_none_match=headers["etag"])[::2] == (304, b"")


def test_the_files_name_no_other_host_and_need_no_inline_style_or_script() -> None:
    for name in ("index.html", "page.css", "page.js", "birds_eye.js", "elements.js", "lists.js"):
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, name
        assert not re.search(r"style=|onclick=|innerHTML", text), name


def test_the_state_is_valid_json_whatever_models_are_called() -> None:
    state = json.loads(state_text(sources()))
    assert [each["state"] for each in state["models"]] == ["UNAVAILABLE"]
    assert state["models"][0]["reason"] == "no such file: \\xff.onnx"
    assert state["cameras"][0]["state"] == "starting"
    assert state["broker"] is state["recorder"] is state["board"] is None


def test_a_right_token_becomes_a_cookie_that_no_script_reads() -> None:
    page = sources(may_read=lambda token: token == "right")  # noqa: S105  # a test's own
    status, headers, _ = ask(page, "/page/token", "POST", b'{"token": " right "}')
    assert status == 204
    assert headers["set-cookie"].startswith(f"{COOKIE}=right;")
    assert "HttpOnly" in headers["set-cookie"]
    assert "SameSite=strict" in headers["set-cookie"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"token": "wrong"}', 401),
        (b'{"token": ""}', 401),
        (b'{"token": 7}', 400),
        (b"token=right", 400),
        (b'{"token": "\xff"}', 400),
        (b'{"token": "' + b"x" * 5000 + b'"}', 413),
    ],
)
def test_any_other_token_is_refused(body: bytes, status: int) -> None:
    page = sources(may_read=lambda token: token == "right")  # noqa: S105  # a test's own
    got, headers, _ = ask(page, "/page/token", "POST", body)
    assert got == status
    assert "set-cookie" not in headers


def run(page: PageSources, scenario: Callable[[LivePages], Any]) -> None:
    async def play() -> None:
        await scenario(LivePages(page))

    asyncio.run(play())


def test_a_page_gets_state_then_events_then_pictures_with_their_lanes() -> None:
    page = sources()

    async def scenario(pages: LivePages) -> None:
        async with Browser(pages) as browser:
            assert (await browser.next())["type"] == "websocket.accept"
            assert (await browser.next_of("state"))["device"] == "truck-7"
            page.events.put(Event("model", "instant", "swapped", "version 2 serves", 1, 1))
            page.events._tick(0.0)
            assert (await browser.next_of("events"))["events"][0]["cause"] == "swapped"
            browser.put('{"look_at": {"front": "large"}}')
            await until(lambda: page.pictures._viewers[0].size_of("front") == "large")
            give(page, 5)
            data = await browser.next_of("bytes")
            length = int.from_bytes(data[:4], "big")
            frame = json.loads(data[4 : 4 + length])
            assert (frame["camera"], frame["frame_id"], len(frame["lanes"])) == ("front", 5, 1)
            assert data[4 + length :][:2] == b"\xff\xd8"
        assert page.pictures.viewers == 0

    run(page, scenario)


def test_a_page_that_takes_nothing_keeps_one_picture_and_others_go_on() -> None:
    page = sources()

    async def scenario(pages: LivePages) -> None:
        async with Browser(pages) as asleep, Browser(pages) as awake:
            for each in (asleep, awake):
                await each.next_of("state")
                each.put('{"look_at": {"front": "large"}}')
            await until(lambda: all(v.size_of("front") for v in page.pictures._viewers))
            asleep.takes.clear()
            for number in range(4):
                for viewer in page.pictures._viewers:
                    viewer._due_s.clear()
                give(page, number)
                data = await awake.next_of("bytes")
                frame = json.loads(data[4 : 4 + int.from_bytes(data[:4], "big")])
                assert frame["frame_id"] == number
                awake.put(data=b"\0")
                await until(lambda: not page.pictures._viewers[1]._sent)

    run(page, scenario)


def test_more_pages_than_allowed_learn_why_they_must_wait() -> None:
    page = sources()

    async def scenario(pages: LivePages) -> None:
        async with AsyncExitStack() as opened:
            for _ in range(MOST_PAGES):
                each = await opened.enter_async_context(Browser(pages))
                await each.next_of("state")
            async with Browser(pages) as refused:
                refusal = await refused.next()
                assert refusal["type"] == "websocket.close"
                assert (refusal["code"], refusal["reason"]) == (
                    TRY_LATER,
                    f"{MOST_PAGES} pages are open already",
                )
        async with Browser(pages) as third:
            await third.next_of("state")

    run(page, scenario)


def test_a_page_without_a_token_is_refused_before_its_socket_opens_and_told_why() -> None:
    page = sources(may_read=lambda token: token == "right")  # noqa: S105  # a test's own

    async def scenario(pages: LivePages) -> None:
        async with Browser(pages, cookie=f"{COOKIE}=wrong") as browser:
            refused = await browser.next()
            assert (refused["type"], refused["code"]) == ("websocket.close", NEEDS_TOKEN)
        async with Browser(pages, cookie=f"{COOKIE}=right") as browser:
            await browser.next_of("state")

    run(page, scenario)
    assert ask(page, "/page/token", cookie=f"{COOKIE}=wrong")[0] == 401
    assert ask(page, "/page/token", cookie=f"{COOKIE}=right")[0] == 200


def test_a_page_ends_when_its_token_is_valid_no_more() -> None:
    valid = {"right"}
    page = sources(may_read=valid.__contains__)

    async def scenario(pages: LivePages) -> None:
        async with Browser(pages, cookie=f"{COOKIE}=right") as browser:
            await browser.next_of("state")
            valid.clear()
            while (message := await browser.next())["type"] != "websocket.close":
                pass
            assert message["code"] == NEEDS_TOKEN

    run(page, scenario)


@pytest.mark.parametrize(
    "text", ["", "look", '{"look_at": {"front": "huge"}}', '{"load": "model"}', '{"look_at": 1}']
)
def test_what_no_page_sends_ends_its_connection(text: str) -> None:
    page = sources()

    async def scenario(pages: LivePages) -> None:
        async with Browser(pages) as browser:
            await browser.next_of("state")
            browser.put(text)
            while (message := await browser.next())["type"] != "websocket.close":
                pass
            assert message["code"] == MISTAKE

    run(page, scenario)


def test_a_socket_that_its_protocol_has_closed_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    page = sources()

    async def scenario(pages: LivePages) -> None:
        async with Browser(pages) as browser:
            await browser.next_of("state")
            browser.is_closed = True
            await until(browser._task.done)

    run(page, scenario)
    assert not caplog.records


def test_a_page_that_keeps_looking_elsewhere_does_not_keep_the_server_busy() -> None:
    page = sources()

    async def scenario(pages: LivePages) -> None:
        async with Browser(pages) as browser:
            await browser.next_of("state")
            for _ in range(200):
                browser.put('{"look_at": {"front": "small"}}')
            await until(lambda: page.pictures._viewers[0].size_of("front") == "small")
            for _ in range(500):
                await asyncio.sleep(0)
            assert browser._outbox.qsize() > 150
            while not browser._outbox.empty():
                browser._outbox.get_nowait()

    run(page, scenario)


def test_an_acknowledgement_of_nothing_ends_the_connection() -> None:
    async def scenario(pages: LivePages) -> None:
        async with Browser(pages) as browser:
            await browser.next_of("state")
            browser.put(data=b"\0")
            while (message := await browser.next())["type"] != "websocket.close":
                pass
            assert message["code"] == MISTAKE

    run(sources(), scenario)


def test_recordings_are_for_readers_and_record_now_for_who_may_control() -> None:
    page = sources(may_read=lambda token: token == "right")  # noqa: S105  # a test's own
    for path in ("/page/recordings", "/page/recordings/x.mcap"):
        assert ask(page, path)[0] == 401
    status, _, body = ask(page, "/page/recordings", cookie=f"{COOKIE}=right")
    assert (status, json.loads(body)) == (200, {"recordings": None}), "the recorder is off"
    assert ask(page, "/page/recordings", "POST")[0] == 503
    closed = sources(rules=AccessRules("is a control call", {}))
    status, _, body = ask(closed, "/page/recordings", "POST")
    assert (status, json.loads(body)["error"]) == (403, "Record is a control call")


VIEWS = ("/page/history/hour", "/page/history/day", "/page/log", "/page/settings")


def test_history_log_and_settings_are_for_readers() -> None:
    page = sources(may_read=lambda token: token == "right")  # noqa: S105  # a test's own
    for path in VIEWS:
        assert ask(page, path)[0] == 401, path
        status, headers, _ = ask(page, path, cookie=f"{COOKIE}=right")
        assert (status, headers["content-type"]) == (200, "application/json"), path


def test_log_and_settings_need_what_triton_s_log_settings_need() -> None:
    logging_alone = Restriction(("logging",), "triton-grpc-protocol-x", "secret")
    page = sources(rules=AccessRules("", {LOG_SETTINGS: logging_alone}, what="API"))
    assert [ask(page, path)[0] for path in VIEWS] == [200, 200, 403, 403]
    assert b"expecting header" in ask(page, "/page/log")[2]


def test_the_log_is_sent_from_the_line_on_that_a_page_names() -> None:
    tail = LogTail(kept=3)
    log = logging.Logger("tested")  # of this test alone
    log.addHandler(tail)
    page = sources(log=tail)
    assert json.loads(state_text(page))["log_id"] == 0
    for number in range(5):
        log.warning("camera %s: line %s\x1b[2J", "front", number)

    def texts(query: str) -> list[str]:
        return [
            text for _, _, _, text in json.loads(ask(page, "/page/log", query=query)[2])["lines"]
        ]

    whole = [f"camera front: line {number}\\x1b[2J" for number in (2, 3, 4)]
    assert (
        texts("") == texts("after=0") == texts("after=abc") == texts("after=" + "9" * 9000) == whole
    )
    assert texts("after=4") == whole[2:]
    assert texts("after=5") == []
    assert texts("after=77") == whole, "the id of an earlier run of the daemon"
    assert json.loads(state_text(page))["log_id"] == 5


def test_marks_of_the_last_half_second_are_with_the_picture() -> None:
    networks = LaneFeed(IDENTITY)
    boxes = Detections(np.array([[1.0, 2, 3, 4]]), np.array([0]), np.array([0.9]), ("car",))
    for name, age_ns in (("new", 100_000_000), ("old", 900_000_000)):
        found = NetworkFrame(
            "front",
            1,
            0,
            10**9 - age_ns,
            0,
            64,
            36,
            "net",
            network=name,
            task="detection",
            result=boxes,
        )
        networks(found)
    frame = Frame(1, Image.of_bgr(np.zeros((36, 64, 3), np.uint8)), 10**9, 0)
    lanes = LaneFrame("front", 1, 0, 10**9, 0, 64, 36, "lane_detection")
    written = PictureWriter(IDENTITY, networks)(Sight(lanes, frame, 10**9), 64)
    fields = json.loads(written[4 : 4 + int.from_bytes(written[:4], "big")])
    (mark,) = fields["marks"]
    assert (mark["text"], mark["points"][2], mark["filled"]) == ("car 0.90", [3, 4], False)
