"""CUDA graphs: work recorded once and launched in one call.

pycuda lacks graphs, so this module uses cuda-bindings, on the same streams by their raw handles.
Where cuda-bindings is not installed, work is launched piece by piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edge_server.board.installation import remedy
from edge_server.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.gpu.device import Device
    from edge_server.gpu.stream import Stream


def record_graph(stream: Stream, work: Callable[[], None]) -> Graph:
    """Record the work that `work` queues on `stream`, without running it.

    Args:
        stream: any of `Device.stream`.
        work: queues on `stream` only, never waits on the host and allocates nothing. It has run
            once without being recorded, so that libraries are set up.

    Raises:
        Unavailable: cuda-bindings is not installed.
        InternalError: CUDA cannot record this work.
        EdgeServerError: raised by `work`.
    """
    driver = _bindings()
    device = stream.device
    doing = "record a graph"
    # In the stricter modes a free by the garbage collector during the capture invalidates the
    # graph.
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with device.current(doing):
        _call(device, doing, driver.cuStreamBeginCapture, stream.handle, mode)
        try:
            work()
        except BaseException:
            # A stream left in capture mode is unusable.
            code, graph = driver.cuStreamEndCapture(stream.handle)
            if not int(code):
                driver.cuGraphDestroy(graph)
            raise
        graph = _call(device, doing, driver.cuStreamEndCapture, stream.handle)
        try:
            executable = _call(device, doing, driver.cuGraphInstantiate, graph, 0)
        finally:
            driver.cuGraphDestroy(graph)
    return Graph(device, executable, driver)


class Graph:
    """A recorded graph; made by `record_graph`. Its memory must stay allocated, at the same
    address, as long as the graph lives."""

    def __init__(self, device: Device, executable: Any, driver: Any) -> None:
        self.device = device
        self._driver = driver
        self._box = device.hold(self, _Executable(executable, driver))

    def launch(self, stream: Stream) -> None:
        """Launch the recorded work on `stream`; return before it is done."""
        doing = "launch a graph"
        with self.device.current(doing):
            executable = self._box[0].handle
            _call(self.device, doing, self._driver.cuGraphLaunch, executable, stream.handle)

    def close(self) -> None:
        """Destroy the graph now; launched work still runs."""
        self.device.let_go(self._box)


class _Executable:
    """The executable graph, destroyed with its last reference."""

    def __init__(self, handle: Any, driver: Any) -> None:
        self.handle = handle
        self._driver = driver

    def __del__(self) -> None:
        self._driver.cuGraphExecDestroy(self.handle)


def _bindings() -> Any:
    try:
        # Imported only for a graph: the module is large, and nothing else needs it.
        from cuda.bindings import driver  # noqa: PLC0415
    except ImportError as error:
        raise Unavailable(f"no CUDA graphs: {error}; {remedy('cuda.bindings')}") from None
    return driver


def _call(device: Device, doing: str, function: Any, *arguments: object) -> Any:
    return _checked(device, doing, function.__name__, function(*arguments))


def _checked(device: Device, doing: str, name: str, returned: tuple[Any, ...]) -> Any:
    """Return the results of a cuda-bindings call without its error code.

    Raises:
        EdgeServerError: the code reports an error.
    """
    code, *values = returned
    if int(code):
        driver_text = f"{name} failed: {device.libcuda.error_text(int(code))}"
        raise device.failure(driver_text, doing)
    return values[0] if values else None
