"""Work that is recorded once and given to a stream in one call: CUDA graphs.

pycuda has none, so this is the second driver's part: cuda-bindings, on the same streams by their
raw handles. Where it is not installed, work is given piece by piece as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream


def no_graphs_because() -> str:
    """Why there are no CUDA graphs, with the remedy; empty where there are."""
    try:
        _bindings()
    except Unavailable as error:
        return str(error)
    return ""


def record_graph(stream: Stream, work: Callable[[], None]) -> Graph:
    """Record the work that `work` gives to `stream`, without running it.

    Args:
        stream: any of `Device.stream`.
        work: gives to `stream` alone, waits for nothing on the host and allocates nothing. It
            ran once before without being recorded, so that libraries have set up what they need.

    Raises:
        Unavailable: cuda-bindings is not here.
        InternalError: CUDA cannot record this work.
        EdgeServerError: what `work` raised.
    """
    driver = _bindings()
    device = stream.device
    doing = "record a graph"
    # In the stricter modes memory that the collector happens to free meanwhile spoils the graph.
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with device.current(doing):
        _call(device, doing, driver.cuStreamBeginCapture, stream.handle, mode)
        try:
            work()
        finally:
            # Also after an error: a stream that goes on recording is of no use to anybody.
            ended = driver.cuStreamEndCapture(stream.handle)
        graph = _checked(device, doing, "cuStreamEndCapture", ended)
        try:
            executable = _call(device, doing, driver.cuGraphInstantiate, graph, 0)
        finally:
            driver.cuGraphDestroy(graph)
    return Graph(device, executable, driver)


class Graph:
    """Made by `record_graph`; the memory that it uses must outlive it, at its address."""

    def __init__(self, device: Device, executable: Any, driver: Any) -> None:
        self.device = device
        self._driver = driver
        self._box = device.hold(self, _Executable(executable, driver))

    def launch(self, stream: Stream) -> None:
        """Give the recorded work to `stream`; returns before it is done."""
        doing = "launch a graph"
        with self.device.current(doing):
            executable = self._box[0].handle
            _call(self.device, doing, self._driver.cuGraphLaunch, executable, stream.handle)

    def close(self) -> None:
        """Destroy the graph now; launched work still runs."""
        self.device.let_go(self._box)


class _Executable:
    """Destroyed with its last reference."""

    def __init__(self, handle: Any, driver: Any) -> None:
        self.handle = handle
        self._driver = driver

    def __del__(self) -> None:
        self._driver.cuGraphExecDestroy(self.handle)


def _bindings() -> Any:
    try:
        # Only where a graph is wanted: it is large, and not needed for anything else.
        from cuda.bindings import driver  # noqa: PLC0415
    except ImportError as error:
        raise Unavailable(
            f"no CUDA graphs: {error}; pip install cuda-bindings, of the driver's major version"
        ) from None
    return driver


def _call(device: Device, doing: str, function: Any, *arguments: object) -> Any:
    return _checked(device, doing, function.__name__, function(*arguments))


def _checked(device: Device, doing: str, name: str, answer: tuple[Any, ...]) -> Any:
    """The results of a call of cuda-bindings beside its error code.

    Raises:
        EdgeServerError: the code is one of an error.
    """
    code, *values = answer
    if int(code):
        driver_text = f"{name} failed: {device.libcuda.error_text(int(code))}"
        raise device.failure(driver_text, doing)
    return values[0] if values else None
