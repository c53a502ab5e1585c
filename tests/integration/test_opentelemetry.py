"""Spans of a daemon that serves, as a collector gets them; and a collector that hangs or ends."""

from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tritonclient.http as httpclient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace.export import SpanExportResult
from support.waiting import TIMEOUT_S, wait_until

from edge_server.inference.otlp import exporter
from edge_server.settings import TracingSection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import tritonclient.grpc as triton
    from support.daemon_process import Process

MODELS = Path(__file__).parents[2] / "models"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector:
    """OTLP over HTTP as a collector serves it; hangs while `hangs` is set."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self.hangs = threading.Event()
        self.asked = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.asked.set()
                while collector.hangs.is_set():
                    time.sleep(0.05)
                collector.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for each in request.resource_spans:
            self.resource = {a.key: a.value.string_value for a in each.resource.attributes}
            for scope in each.scope_spans:
                self.spans += scope.spans

    def wait_for(self, *names: str, trace_id: str = "") -> dict[str, Any]:
        """Spans by their names, once all of `names` are in one trace."""

        def found() -> dict[str, Any] | None:
            traces: dict[str, dict[str, Any]] = {}
            for span in list(self.spans):
                traces.setdefault(span.trace_id.hex(), {})[span.name] = span
            for found_id, trace in traces.items():
                if trace.keys() >= set(names) and trace_id in ("", found_id):
                    return trace
            return None

        return wait_until(found, otherwise=lambda: [span.name for span in self.spans])

    def close(self) -> None:
        self.hangs.clear()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def tracing(collector: Collector, rate: int) -> list[str]:
    return [
        *("--model-repository", str(MODELS)),
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url={collector.url}",
        "--trace-config=opentelemetry,resource=deployment.environment=test",
        f"--trace-config=rate={rate}",
    ]


def test_a_clients_trace_goes_on_through_the_steps_of_an_ensemble(
    collector: Collector,
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    road_input: triton.InferInput,
    road_image: Any,
) -> None:
    process = start(*tracing(collector, 1_000_000))
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01"}
    client(process).infer("lane_detection", [road_input], headers=headers, request_id="7")
    steps = ("lane_preprocess", "laneDetect_model", "lane_decode")
    found = collector.wait_for("InferRequest", "lane_detection", *steps, trace_id=TRACE_ID)
    assert found["InferRequest"].parent_span_id.hex() == PARENT
    assert found["lane_detection"].parent_span_id == found["InferRequest"].span_id
    for step in steps:
        assert found[step].parent_span_id == found["lane_detection"].span_id
    assert "compute_infer" in found
    assert "queue" in found
    begin, end = (
        found["InferRequest"].start_time_unix_nano,
        found["InferRequest"].end_time_unix_nano,
    )
    assert abs(begin / 1e9 - time.time()) < TIMEOUT_S
    assert all(
        begin <= s.start_time_unix_nano <= s.end_time_unix_nano <= end for s in found.values()
    )
    http = TRACE_ID[::-1]
    with httpclient.InferenceServerClient(f"127.0.0.1:{process.http_port}") as over_http:
        image = httpclient.InferInput("image", [1, *road_image.shape], "UINT8")
        image.set_data_from_numpy(road_image[None])
        headers = {"traceparent": f"00-{http}-{PARENT}-01"}
        over_http.infer("lane_detection", [image], headers=headers)
    found = collector.wait_for("InferRequest", "lane_detection", *steps, trace_id=http)
    assert found["InferRequest"].parent_span_id.hex() == PARENT
    assert collector.resource["service.name"] == "edge-server"
    assert collector.resource["deployment.environment"] == "test"
    assert process.terminate() == 0
    # What the client does not record was not traced, nor what nobody chose.
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID, http}


def test_a_frame_is_traced_until_its_lanes_are_published(
    collector: Collector,
    start: Callable[..., Process],
    road_image: object,
    tmp_path: Path,
    mosquitto: Any,
) -> None:
    process = start(
        *tracing(collector, 1),
        f"--camera=front=file://{tmp_path}/road?loop=true&fps=5",
        f"--mqtt=127.0.0.1:{mosquitto.port}",
    )
    found = collector.wait_for("frame", "capture", "wait", "infer", "publish", "lane_detection")
    frame = found["frame"]
    assert {a.key: a.value.string_value for a in frame.attributes}["edge.camera"] == "front"
    for name in ("capture", "wait", "infer", "publish"):
        assert found[name].parent_span_id == frame.span_id
    assert found["lane_detection"].parent_span_id == found["infer"].span_id
    assert process.terminate() == 0


def test_a_collector_that_hangs_or_is_killed_costs_spans_alone(
    collector: Collector,
    start: Callable[..., Process],
    client: Callable[..., triton.InferenceServerClient],
    road_input: triton.InferInput,
) -> None:
    collector.hangs.set()
    process = start(*tracing(collector, 1))
    triton_client = client(process)
    triton_client.infer("lane_detection", [road_input])
    assert collector.asked.wait(TIMEOUT_S)
    for _ in range(20):
        triton_client.infer("lane_detection", [road_input], client_timeout=TIMEOUT_S)
    collector.close()
    for _ in range(20):
        triton_client.infer("lane_detection", [road_input], client_timeout=TIMEOUT_S)
    began = time.monotonic()
    assert process.terminate() == 0
    assert time.monotonic() - began < 8.0
    assert "Traceback" not in process.log.read_text()


@pytest.mark.parametrize(
    ("head", "is_taken"),
    [
        ("200 OK\r\nContent-Length: 1000000000000", True),
        ("200 OK\r\nTransfer-Encoding: chunked", True),
        ("200 OK\r\nContent-Length: 0\r\nTransfer-Encoding: chunked", True),
        ("307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 1000", False),
    ],
)
def test_no_body_of_a_collector_is_read_and_a_redirect_takes_no_spans(
    head: str, is_taken: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        hung_up = threading.Event()

        def respond_without_end() -> None:
            connection, _ = listening.accept()
            connection.settimeout(TIMEOUT_S)
            with connection:
                connection.recv(65536)
                connection.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode())
                try:
                    for _ in range(1000):
                        connection.sendall(b"7fff\r\n" + bytes(0x7FFF) + b"\r\n")
                except OSError:
                    hung_up.set()

        thread = threading.Thread(target=respond_without_end)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/traces"
        made = exporter(TracingSection(enabled=True, endpoint=url))
        assert (made.export([]) is SpanExportResult.SUCCESS) is is_taken
        made.shutdown()
        thread.join()
    assert hung_up.is_set()
