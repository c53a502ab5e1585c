"""Types of lanes: one frozen value from decode to MQTT, gRPC and page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Lane:
    """One lane boundary in the image.

    Attributes:
        points: (N, 2) float32, N >= 2, x and y in px of the original frame, origin top left,
            ordered from the bottom of the image upwards.
        score: confidence, 0..1.
    """

    points: NDArray[np.float32]
    score: float


@dataclass(frozen=True)
class StageLatency:
    """Where one frame's time went, in microseconds; `queue` is the wait for the loop to be free."""

    queue: int
    preprocess: int
    infer: int
    postprocess: int


@dataclass(frozen=True, eq=False)
class LaneFrame:
    """The lanes of one camera frame, with everything a consumer needs to judge their worth.

    Attributes:
        camera: name of the camera as configured.
        frame_id: counts every captured frame of this camera, dropped ones included.
        dropped: frames captured since start that a newer one replaced.
        capture_mono_ns: CLOCK_MONOTONIC at capture.
        capture_epoch_ns: Unix time at capture; it may jump, join by the monotonic one on a host.
        width: of the original frame, px.
        height: of the original frame, px.
        model_name: the model (an ensemble, mostly) that answered.
        model_version: its version, as the protocol spells it.
        latency_us: per stage.
        lanes: highest score first.
        failure: why the model gave none; empty where it answered, and `lanes` is what it saw.
    """

    camera: str
    frame_id: int
    dropped: int
    capture_mono_ns: int
    capture_epoch_ns: int
    width: int
    height: int
    model_name: str
    model_version: str
    latency_us: StageLatency
    lanes: tuple[Lane, ...]
    failure: str = ""

    def age_ns(self, now_mono_ns: int) -> int:
        """Time since capture, in ns; `now_mono_ns` is `time.monotonic_ns()` of this host."""
        return now_mono_ns - self.capture_mono_ns
