"""The page in a real browser: lanes move over the picture, and it comes back after a restart."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

import cv2
import numpy as np
import pytest
import tritonclient.grpc as triton
from support.daemon_process import Process
from support.fake_board import FakeBoard
from support.free_ports import free_ports
from support.waiting import TIMEOUT_S, wait_until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from edge_server.api.http.page.routes import MOST_PAGES, page_routes
from edge_server.api.http.page.state import PageSources, PictureWriter
from edge_server.api.http.server import HttpListener, HttpServer
from edge_server.api.http.sources import Sources
from edge_server.board.board import Identity
from edge_server.board.watch import BoardWatch
from edge_server.cameras.camera import Camera
from edge_server.cameras.frame import Frame
from edge_server.cameras.status import CameraState, CameraStatus
from edge_server.cli.demo import _calibration_file
from edge_server.inference.data_plane import DataPlane
from edge_server.inference.registry import ModelEntry, ModelRegistry, ModelState
from edge_server.lanes.types import LaneFrame
from edge_server.pipeline.event_log import Event, EventLog
from edge_server.pipeline.lane_feed import LaneLatency
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pipeline.picture_feed import PictureFeed
from edge_server.pixels import Image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray
    from playwright.sync_api import Browser, Page
    from websockets.sync.client import ClientConnection

CHROMIUM = Path("/usr/bin/chromium")
MODELS = Path(__file__).parents[2] / "models"
FRONT = "synthetic://road?seed=7&fps=5&width=640&height=360&manoeuvres=true"
TIMEOUT_MS = 30_000
TOKEN = "a-token-of-this-device"  # noqa: S105  # a test's own
# Of a lane that bounds the ego lane, BGR.
LANE = np.array([0xD4, 0xEA, 0x5E])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip("no browser on this machine: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        home = {**os.environ, "HOME": str(tmp_path_factory.mktemp("home"))}
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], env=home)


class Seen:
    """A page, and what its browser noticed."""

    def __init__(self, browser: Browser, width: int = 1280, **options: Any) -> None:
        context = browser.new_context(viewport={"width": width, "height": 844}, **options)
        self.page = context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console", lambda m: m.type in {"error", "warning"} and self.errors.append(m.text)
        )
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda one: self.requests.append(one.url))

    def open(self, port: int) -> Page:
        self.page.goto(f"http://127.0.0.1:{port}/")
        return self.page

    def close(self) -> None:
        self.page.context.close()


@pytest.fixture
def see(browser: Browser) -> Iterator[Callable[..., Seen]]:
    """Opens a page of its own session: `see(width=390)`."""
    with ExitStack() as opened:

        def make(**options: Any) -> Seen:
            return opened.enter_context(closing(Seen(browser, **options)))

        yield make


def flags_of(folder: Path, *more: str, **cameras: str) -> list[str]:
    lines = ["[lane_departure]", "min_speed_mps = 0", *more]
    for name, uri in cameras.items():
        lines += [f"[cameras.{name}]", f'uri = "{uri}"', "max_age_ms = 1000"]
        if uri == FRONT:
            lines.append(f'calibration = "{folder / "front.toml"}"')
    with ExitStack() as short:
        made = _calibration_file(FRONT, short)
        assert made is not None
        (folder / "front.toml").write_bytes(Path(made).read_bytes())
    (folder / "edge.toml").write_text("\n".join(lines))
    return [f"--config={folder / 'edge.toml'}", f"--model-repository={MODELS}"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("page")
    ended = "synthetic://road?seed=8&fps=5&width=320&height=180&frames=5"
    # Nothing listens there.
    (port,) = free_ports(1)
    settings = [
        *("[mqtt]", 'host = "127.0.0.1"', f"port = {port}", f'username = "{TOKEN}"'),
        *("[recorder]", 'mode = "events"', "before_s = 1", "after_s = 1"),
        f'directory = "{folder / "recordings"}"',
    ]
    process = Process(folder, *flags_of(folder, *settings, front=FRONT, rear=ended))
    try:
        process.wait_for("READY=1")
        yield process
    finally:
        process.close()


def wait_for(page: Page, expression: str) -> None:
    # Playwright's own wait evaluates text later on, which the page's policy forbids.
    wait_until(
        lambda: page.evaluate(expression),
        TIMEOUT_MS / 1e3,
        otherwise=lambda: f"{expression}; {page.inner_text('#stage')}",
        every_s=0.05,
    )


def wait_for_text(page: Page, selector: str, text: str) -> None:
    """Wait until the first element of the selector shows that text."""
    wait_until(
        lambda: page.inner_text(selector) == text,
        otherwise=lambda: f"{selector} shows {page.inner_text(selector)!r}, not {text!r}",
        every_s=0.05,
    )


LIVE = "document.querySelector('#stage').dataset.state === 'live'"
OLD = (
    "['figures', 'road-card', 'timing-card']"
    ".every((id) => document.getElementById(id).classList.contains('old'))"
)
ON_THE_ROAD = "/^[2-9] lane/.test(document.querySelector('#road').getAttribute('aria-label'))"


def lane_pixels(page: Page) -> NDArray[np.bool_]:
    """Where the picture of the chosen camera has the colour of a lane."""
    png = np.frombuffer(page.locator("#picture").screenshot(), np.uint8)
    return (np.abs(cv2.imdecode(png, cv2.IMREAD_COLOR).astype(int) - LANE) < 12).all(axis=2)


def test_lanes_move_over_the_picture_and_nothing_leaves_the_host(
    daemon: Process, see: Callable[..., Seen]
) -> None:
    seen = see()
    page = seen.open(daemon.http_port)
    wait_for(page, LIVE)
    wait_for(page, ON_THE_ROAD)

    def lanes() -> list[NDArray[np.bool_]]:
        shown = lane_pixels(page)
        return [shown] if shown.sum() > 500 else []  # two lines of some pixels' width

    (before,) = wait_until(lanes)
    wait_until(
        lambda: (before != lane_pixels(page)).sum() >= 200, otherwise="the lanes stand still"
    )
    assert page.inner_text("#device") != "edge-server", "the device's own name"
    assert "laneDetect_model" in page.inner_text("#models")
    assert not seen.errors
    assert {url.partition("://")[2].partition("/")[0] for url in seen.requests} == {
        f"127.0.0.1:{daemon.http_port}"
    }


def test_the_keyboard_chooses_cameras_and_an_ended_one_says_so(
    daemon: Process, see: Callable[..., Seen]
) -> None:
    page = see().open(daemon.http_port)
    wait_for(page, LIVE)
    for button in ("pause", "zoom-out", "zoom-reset", "zoom-in", "full"):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == button
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText").startswith("front")
    page.keyboard.press("2")
    wait_for(page, "document.querySelector('#stage').dataset.state === 'ended'")
    assert page.inner_text("#stage-why") == "Ended: it ended after 5 frames"
    assert page.get_attribute("#stage-state", "data-tone") == "", "an end is no fault"
    assert "rear" not in page.inner_text("#alarms")
    page.keyboard.press("ArrowLeft")
    wait_for(page, LIVE)
    page.keyboard.press("p")
    wait_for(page, "document.querySelector('#stage').dataset.state === 'paused'")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    for selector in ("#link", "#strip .chip >> nth=0"):
        wait_for_text(page, selector, "paused")
    assert page.evaluate(OLD)
    page.keyboard.press("p")
    wait_for(page, LIVE)
    wait_for(page, f"!({OLD})")


def test_what_needs_a_person_is_on_top(daemon: Process, see: Callable[..., Seen]) -> None:
    page = see().open(daemon.http_port)
    wait_for(page, "document.querySelector('#alarms').innerText.includes('MQTT broker')")
    wait_for_text(page, "#link", "1 fault")
    assert page.get_attribute("#link", "data-tone") == "bad"
    above = page.locator("#alarms").bounding_box()
    stage = page.locator("#stage").bounding_box()
    assert above is not None
    assert stage is not None
    assert above["y"] + above["height"] <= stage["y"]
    # A role takes the meaning of a list from its items.
    assert page.locator("ol[role], ul[role]").count() == 0


def test_recordings_are_made_listed_and_downloaded(
    daemon: Process, see: Callable[..., Seen]
) -> None:
    page = see().open(daemon.http_port)
    wait_for(page, LIVE)
    page.click("#record")
    wait_for(page, "document.querySelector('#record-fault').textContent.includes('being written')")
    name = page.inner_text("#record-fault").partition(" ")[0]
    # On a slow machine an event has begun one, which is then the one that is asked for.
    assert name.endswith(".mcap")
    wait_for(page, f"!!document.querySelector('#recordings [download=\"{name}\"]')")
    with page.expect_download() as download:
        page.click(f"#recordings [download='{name}']")
    data = download.value.path().read_bytes()
    assert data[:8] == data[-8:] == b"\x89MCAP0\r\n", "it is whole"
    # The camera that ended was an event.
    wait_for(page, "!!document.querySelector('#events a[download*=\"-event-\"]')")
    for wrong in ("events.jsonl", "..%2Fedge.toml", f"{name}.part"):
        url = f"http://127.0.0.1:{daemon.http_port}/page/recordings/{wrong}"
        with pytest.raises(HTTPError, match="404"):
            urllib.request.urlopen(url, timeout=TIMEOUT_S)


def test_the_log_and_the_settings_are_shown_without_secrets(
    daemon: Process, see: Callable[..., Seen]
) -> None:
    seen = see()
    page = seen.open(daemon.http_port)
    wait_for(page, LIVE)
    assert not [url for url in seen.requests if url.endswith(("/page/settings", "/page/log"))]
    page.click("#log-card summary")
    wait_for(page, "document.querySelector('#log').innerText.includes('mqtt: cannot reach')")
    assert "camera front: live" in page.inner_text("#log")
    page.check("#log-faults")
    assert "camera front: live" not in page.inner_text("#log")
    assert "mqtt: cannot reach" in page.inner_text("#log")
    page.click("#settings-card summary")
    wait_for(page, "document.querySelector('#settings').innerText.includes('mqtt.host')")
    shown = page.inner_text("#settings")
    assert "recorder.before_s" in shown
    assert "mqtt.payload" not in shown, "it has its default"
    assert "mqtt.username" in shown
    assert TOKEN not in shown + page.inner_text("#log")
    page.check("#settings-all")
    assert "mqtt.payload" in page.inner_text("#settings")
    assert not seen.errors


def magnified(page: Page) -> float:
    """How many times."""
    return float(page.inner_text("#zoom-reset")[:-1])


def test_the_picture_is_magnified_by_keys_mouse_and_buttons(
    daemon: Process, see: Callable[..., Seen]
) -> None:
    seen = see()
    page = seen.open(daemon.http_port)
    wait_for(page, LIVE)
    wait_for(page, ON_THE_ROAD)
    for _ in range(3):
        page.keyboard.press("+")
    assert magnified(page) == 3.4
    wait_for(page, LIVE)
    # Three times as near, a line of the same width is longer; it moves with the picture.
    before = lane_pixels(page)
    page.keyboard.press("Shift+ArrowUp")
    wait_until(lambda: (before != lane_pixels(page)).sum() > 200)
    page.keyboard.press("0")
    assert magnified(page) == 1
    page.dblclick("#picture")
    assert magnified(page) == 2.5
    box = page.locator("#picture").bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 80, y)
    page.mouse.up()
    page.click("#zoom-out")
    assert magnified(page) == 1.7
    page.keyboard.press("2")
    assert magnified(page) == 1, "another camera is seen whole"
    assert not seen.errors


def test_full_screen_shows_the_whole_picture_and_ends(
    daemon: Process, see: Callable[..., Seen]
) -> None:
    page = see(width=1600).open(daemon.http_port)
    wait_for(page, LIVE)
    page.keyboard.press("f")
    wait_for(page, "document.fullscreenElement?.id === 'stage'")
    wait_for(page, "document.querySelector('#picture').clientHeight > 600")
    assert page.evaluate(
        "(({clientWidth: width, clientHeight: height}) => width <= innerWidth"
        " && height <= innerHeight)(document.querySelector('#picture'))"
    )
    page.keyboard.press("f")
    wait_for(page, "document.fullscreenElement === null")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_fits_a_phone_and_every_text_can_be_read(
    daemon: Process, see: Callable[..., Seen], scheme: str
) -> None:
    page = see(width=390, color_scheme=scheme, device_scale_factor=2).open(daemon.http_port)
    wait_for(page, LIVE)
    wait_for(page, ON_THE_ROAD)
    page.click("#log-card summary")
    page.click("#settings-card summary")
    wait_for(page, "document.querySelector('#settings').innerText.includes('mqtt.host')")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(CONTRASTS) == []


# Texts whose contrast is below 4.5 : 1 on the surface behind them, by WCAG 2.2; those on the
# picture have a dark gradient below them, which no style says.
CONTRASTS = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => {
    const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = numbers(getComputedStyle(node).backgroundColor);
      if ((colour[3] ?? 1) === 1) return colour.slice(0, 3);
    }
  };
  const low = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!own || !node.checkVisibility() || node.closest('figcaption, .why')) continue;
    const [a, b] = [numbers(getComputedStyle(node).color).slice(0, 3), behind(node)].map(luminance);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) low.push(`${node.textContent.trim()}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


def test_it_comes_back_after_a_restart_without_a_reload(
    tmp_path: Path, start: Callable[..., Process], see: Callable[..., Seen]
) -> None:
    rear = "synthetic://road?seed=8&fps=5&width=320&height=180"
    flags = flags_of(tmp_path, front=FRONT, rear=rear)
    first = start(*flags)
    page = see().open(first.http_port)
    wait_for(page, LIVE)
    wait_for(page, f"!({OLD})")
    page.evaluate("window.sameDocument = true")
    first.popen.kill()
    wait_for(page, "document.querySelector('#stage-why').innerText.includes('Reconnecting')")
    wait_for(page, "document.querySelector('#stage').dataset.state === 'stale'")
    wait_for_text(page, "#link", "reconnecting")
    chips = page.locator("#strip .chip")
    assert [each.inner_text() for each in chips.all()] == ["no connection"] * 2
    wait_for(page, OLD)
    wait_for(page, "/s old/.test(document.querySelector('#road-age').textContent)")
    first.popen.wait()
    start(*flags, f"--http-port={first.http_port}")
    wait_for(page, LIVE)
    # Until the other camera has its first lanes, none come from it.
    wait_for(page, "document.querySelector('#link').textContent === 'live'")
    assert page.evaluate("window.sameDocument")


def test_lanes_of_a_model_that_was_unloaded_grow_old_and_the_model_stays_in_its_list(
    tmp_path: Path, start: Callable[..., Process], see: Callable[..., Seen]
) -> None:
    flags = [*flags_of(tmp_path, front=FRONT), "--model-control-mode=explicit", "--load-model=*"]
    process = start(*flags)
    page = see().open(process.http_port)
    wait_for(page, ON_THE_ROAD)
    wait_for(page, f"!({OLD})")
    client = triton.InferenceServerClient(f"127.0.0.1:{process.port}")
    client.unload_model("lane_detection")
    wait_for(page, OLD)
    # On a busy machine lanes are old before that.
    wait_for_text(page, "#stage-state", "no lanes")
    wait_for_text(page, "#summary", "Lanes from 0 of 1 camera")
    wait_for_text(page, "#link", "1 fault")
    assert "Camera front" in page.inner_text("#alarms")
    model = "#models li:has-text('lane_detection')"
    wait_for_text(page, f"{model} .chip", "unavailable")
    wait_for_text(page, f"{model} .reason", "unloaded")
    client.load_model("lane_detection")
    client.close()
    wait_for(page, f"!({OLD})")
    wait_for(page, "document.querySelector('#link').textContent === 'live'")


def test_cameras_that_a_reload_removes_leave_the_page_and_hostile_texts_stay_texts(
    tmp_path: Path, start: Callable[..., Process], see: Callable[..., Seen]
) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    (tmp_path / "models" / "hostile" / "1").mkdir(parents=True)
    (tmp_path / "models" / "hostile" / "config.pbtxt").write_text(f'backend: "{hostile}"')
    flags = flags_of(tmp_path, __proto__="synthetic://road?seed=8&fps=5&width=320&height=180")
    flags += [f"--model-repository={tmp_path / 'models'}", "--exit-on-error=false"]
    process = start(*flags)
    seen = see()
    page = seen.open(process.http_port)
    wait_for(page, "![undefined, 300].includes(document.querySelector('#strip canvas')?.width)")
    assert hostile in page.inner_text("#models")
    assert page.locator("[onerror]").count() == 0
    (tmp_path / "edge.toml").write_text("[lane_departure]\nmin_speed_mps = 0\n")
    process.popen.send_signal(signal.SIGHUP)
    wait_for(page, "document.querySelector('#stage').dataset.state === 'empty'")
    assert page.evaluate("document.querySelector('#picture').width") == 0
    assert page.inner_text("#stage-why") == "No camera is configured"
    assert not seen.errors


def test_more_sockets_than_pages_are_refused_and_everything_else_goes_on(
    daemon: Process, see: Callable[..., Seen]
) -> None:
    url = f"ws://127.0.0.1:{daemon.http_port}/page/live"
    first, second = see(), see()
    for one in (first, second):
        wait_for(one.open(daemon.http_port), LIVE)
    with ExitStack() as opened:

        def connected() -> ClientConnection | None:
            with suppress(InvalidStatus):
                return connect(url, max_queue=1, close_timeout=0.1)
            return None

        # These take nothing and acknowledge nothing, as a laptop does that has fallen asleep. The
        # pages of the tests before may be about to leave.
        for _ in range(MOST_PAGES - 2):
            each = opened.enter_context(wait_until(connected))
            each.send('{"look_at": {"front": "large"}}')
            each.recv(timeout=TIMEOUT_S)
        for _ in range(20):
            with pytest.raises(InvalidStatus, match="403"):
                connect(url)
        told = f"http://127.0.0.1:{daemon.http_port}/page/token"
        with pytest.raises(HTTPError, match="503"):
            urllib.request.urlopen(told, timeout=TIMEOUT_S)
        health = f"http://127.0.0.1:{daemon.http_port}/v2/health/ready"
        with urllib.request.urlopen(health, timeout=TIMEOUT_S) as answer:
            assert answer.status == 200
        for page in (first.page, second.page):
            before = lane_pixels(page)
            wait_until(
                lambda page=page, before=before: (before != lane_pixels(page)).any(),
                otherwise="the picture stands still",
            )
        assert not first.errors


def test_with_tokens_the_page_takes_one_and_keeps_it(see: Callable[..., Seen]) -> None:
    identity = Identity("truck-7", "0.1.0", "boot", "client")
    parts = Sources("0.1.0", list, [], LaneLatency())
    feed = PictureFeed(PictureWriter(identity))
    sources = PageSources(
        identity,
        parts,
        feed,
        EventLog(),
        may_read=lambda token: token == "right",  # noqa: S105  # a test's own
    )
    server = HttpServer([HttpListener("http", "127.0.0.1", 0, lambda: page_routes(sources))])
    server.start()
    try:
        seen = see()
        page = seen.open(server.port_of("http"))
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        wait_for(page, "document.querySelector('#login-fault').textContent.includes('not let you')")
        page.fill("#token", "right")
        # Pressed twice it makes one connection.
        page.evaluate("for (const _ of 'ab') document.querySelector('form').requestSubmit()")
        wait_for(page, "document.querySelector('#link').textContent === 'live'")
        page.wait_for_load_state("networkidle")
        assert len([url for url in seen.requests if url.startswith("ws")]) == 2
        assert page.inner_text("#device") == "truck-7"
        assert page.evaluate("document.cookie") == "", "no script reads the token"
        page.reload()
        wait_for(page, "document.querySelector('#link').textContent === 'live'")
    finally:
        server.stop(1.0)


def test_a_departure_that_an_earlier_run_left_open_warns_nobody(
    tmp_path: Path, see: Callable[..., Seen]
) -> None:
    begin = Event("lane_departure", "begin", "left", "it leaves its lane", 1, 1, camera="front")
    identity = Identity("truck-7", "0.1.0", "boot", "client")
    pipeline = LanePipeline(
        Camera("front", "synthetic://road"), DataPlane(ModelRegistry()), "lanes", ()
    )
    parts = Sources("0.1.0", list, [pipeline], LaneLatency())

    def serve(events: EventLog, port: int = 0) -> HttpServer:
        sources = PageSources(identity, parts, PictureFeed(PictureWriter(identity)), events)
        listener = HttpListener("http", "127.0.0.1", port, lambda: page_routes(sources))
        server = HttpServer([listener])
        server.start()
        return server

    def put(events: EventLog) -> EventLog:
        events.put(begin)
        events._tick(0.0)
        return events

    put(EventLog(tmp_path / "events.db"))._end()  # without an end of the departure, as at a kill
    events = EventLog(tmp_path / "events.db")
    server = serve(events)
    port = server.port_of("http")
    page = see().open(port)
    try:
        wait_for(page, "document.querySelector('#events').textContent.includes('Lane departure')")
        title = page.inner_text("#events b")
        assert title == "Lane departure to the left · camera front"
        assert page.locator("#warning").is_hidden()
        put(events)
        wait_for(page, "!document.querySelector('#warning').hidden")
        server.stop(0.1)
        wait_until(lambda: not server.worker.alive)
        server = serve(EventLog(), port)  # without a file it has no event
        wait_for(page, "document.querySelector('#link').textContent === 'live'")
        wait_for(page, "document.querySelector('#warning').hidden")
    finally:
        server.stop(1.0)


def test_a_camera_without_lanes_shows_its_networks_alone(
    tmp_path: Path, see: Callable[..., Seen]
) -> None:
    (tmp_path / "edge.toml").write_text(
        f"""
        [cameras.rear]
        uri = "{FRONT}"
        model = ""
        [cameras.rear.networks.vehicles]
        model = "vehicles"
        """
    )
    examples = MODELS.parent / "examples" / "networks"
    process = Process(
        tmp_path, f"--config={tmp_path / 'edge.toml'}", f"--model-repository={examples}"
    )
    try:
        process.wait_for("READY=1")
        seen = see()
        page = seen.open(process.http_port)
        wait_for(page, LIVE)
        wait_for(page, "document.querySelector('#figures').innerText.includes('vehicles')")
        names = [each.inner_text() for each in page.query_selector_all("#figures dt")]
        assert names == ["Age", "vehicles"]
        wait_until(lambda: page.inner_text("#summary").startswith("Pictures from 1 of 1 camera"))
        assert "lane" not in (page.get_attribute("#picture", "aria-label") or "")
        wait_for_text(page, "#stage-state", "live")
        assert not seen.errors
    finally:
        process.close()


def test_a_model_that_serves_on_after_a_refusal_says_why_it_does(see: Callable[..., Seen]) -> None:
    identity = Identity("truck-7", "0.1.0", "boot", "client")
    refused = ModelEntry("lanes", 1, ModelState.READY, "config.pbtxt:3: no such field")
    parts = Sources("0.1.0", lambda: [refused], (), LaneLatency())
    sources = PageSources(identity, parts, PictureFeed(PictureWriter(identity)), EventLog())
    server = HttpServer([HttpListener("http", "127.0.0.1", 0, lambda: page_routes(sources))])
    server.start()
    try:
        page = see().open(server.port_of("http"))
        wait_for(page, "document.querySelector('#alarms').innerText.includes('no such field')")
        assert page.get_attribute("#models .chip", "data-tone") == "wait"
        assert page.inner_text("#models .chip") == "ready"
        assert page.inner_text("#link") == "live", "it serves"
    finally:
        server.stop(1.0)


class FreshLanes(LaneLatency):
    """Lanes come all the time, however seldom the page gets a picture of them."""

    def last_valid_age_s(self, camera: str) -> float | None:
        return 0.1


def test_a_picture_that_comes_seldom_has_its_age_and_its_camera_is_live(
    see: Callable[..., Seen],
) -> None:
    identity = Identity("truck-7", "0.1.0", "boot", "client")
    camera = Camera("front", "synthetic://road")
    camera.status = CameraStatus(CameraState.LIVE)
    pipeline = LanePipeline(camera, DataPlane(ModelRegistry()), "lanes", ())
    parts = Sources("0.1.0", list, [pipeline], FreshLanes())
    feed = PictureFeed(PictureWriter(identity))
    sources = PageSources(identity, parts, feed, EventLog())
    server = HttpServer([HttpListener("http", "127.0.0.1", 0, lambda: page_routes(sources))])
    server.start()
    feed.worker.start()
    try:
        page = see().open(server.port_of("http"))
        wait_for(
            page, "document.querySelector('#stage-why').textContent === 'Waiting for a picture'"
        )
        grey = np.full((90, 160, 3), 128, np.uint8)

        def has_picture() -> bool:
            if page.evaluate(LIVE):
                return True
            frame = Frame.arrived(1, Image.of_bgr(grey))
            times = (frame.capture_mono_ns, frame.capture_epoch_ns)
            feed(LaneFrame("front", 1, 0, *times, 160, 90, "lanes"), frame)
            return False

        wait_until(has_picture, every_s=0.1)
        wait_for(
            page, "/picture \\d+ s old/.test(document.querySelector('#stage-rate').textContent)"
        )
        assert page.inner_text("#strip .chip").startswith("live, picture ")
        assert page.evaluate(LIVE)
        assert page.locator("#strip .stale").count() == 0
        assert not page.evaluate(OLD)
        assert page.inner_text("#link") == "live"
        camera.status = CameraStatus(CameraState.LOST, "lost", "unplugged")
        wait_for(page, "document.querySelector('#stage').dataset.state === 'stale'")
        wait_for_text(page, "#alarms", "Camera front\nunplugged")
        wait_for(page, OLD)
    finally:
        server.stop(1.0)
        feed.stop()


def test_the_history_shows_what_was_measured_before_the_page_was_opened(
    tmp_path: Path, see: Callable[..., Seen]
) -> None:
    fake = FakeBoard(tmp_path)
    fake.jetson("NVIDIA Jetson Orin NX", "p3767-0000", "36.4.3")
    board, latency, now_s = BoardWatch(tmp_path), LaneLatency(), time.monotonic()
    identity = Identity("truck-7", "0.1.0", "boot", "client")
    camera = Camera("front", "synthetic://road")
    pipeline = LanePipeline(camera, DataPlane(ModelRegistry()), "lanes", ())
    parts = Sources("0.1.0", list, [pipeline], latency, board=board)
    sources = PageSources(identity, parts, PictureFeed(PictureWriter(identity)), EventLog())
    for number in range(60):  # of ten minutes
        celsius = 90 if 20 <= number < 40 else 50
        fake.write("sys/class/thermal/thermal_zone0/temp", f"{1000 * celsius}\n")
        board._tick(0.0)
        for _ in range(40):
            latency(LaneFrame("front", 1, 0, time.monotonic_ns(), 0, 160, 90, "lanes"), None)
        sources.history.look(now_s - 600 + 10 * number, parts)
    server = HttpServer([HttpListener("http", "127.0.0.1", 0, lambda: page_routes(sources))])
    server.start()
    try:
        seen = see()
        page = seen.open(server.port_of("http"))
        wait_for(page, "document.querySelectorAll('#charts svg').length >= 4")
        row = page.locator("#charts li", has_text="Temperature")
        assert row.locator(".name small").inner_text() == "50 to 90 °C"
        assert row.locator("path").count() == 2, "a line for each zone"
        assert page.locator("#charts li", has_text="Lane rate").inner_text().endswith("4.0 Hz")
        # Under the pointer: the value of that time. 300 s ago is eleven twelfths of an hour.
        chart = row.locator("svg")
        box = chart.bounding_box()
        assert box is not None
        chart.hover(position={"x": box["width"] * 11 / 12, "y": 5})
        assert row.locator(".value").inner_text().startswith("90 °C\ncpu")
        assert page.inner_text("#history-at").startswith("5 min ago")
        page.click("[data-span=day]")
        wait_for(page, "document.querySelector('#history-at').textContent === 'last day'")
        wait_for(
            page, "/^51 to 75/.test(document.querySelectorAll('#charts small')[2].textContent)"
        )
        assert not seen.errors
    finally:
        server.stop(1.0)
