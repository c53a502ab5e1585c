"""INT8 calibration of TensorRT up to 10, which runs the network on samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorrt as trt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.gpu.bare_gpu import BareGpu
    from edge_server.backends.tensorrt.build.calibration import Samples


def make_calibrator(samples: Samples, gpu: BareGpu) -> Any:
    """Return the calibrator that feeds `samples` to TensorRT; None if TensorRT has no calibration.

    The builder configuration does not own the calibrator: hold it until the plan is built. Its
    `failure` is the exception that a sample raised, or None.
    """
    if not hasattr(trt, "IInt8EntropyCalibrator2"):
        return None

    class Calibrator(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]
        """Never raises: TensorRT would print the exception and continue without a calibration."""

        def __init__(self) -> None:
            super().__init__()
            self._left = iter(samples)
            self.failure: Exception | None = None

        def get_batch_size(self) -> int:
            return 1

        def get_batch(self, names: Sequence[str]) -> list[int] | None:
            try:
                sample = next(self._left, None)
                if sample is None:
                    return None
                return [gpu.put(name, sample[name]) for name in names]
            except Exception as error:  # noqa: BLE001 - raised after the build
                self.failure = error
                return None

        def read_calibration_cache(self) -> None:
            """Return no cache: every build runs the samples."""

        def write_calibration_cache(self, cache: Any) -> None:
            """Discard the cache: every build runs the samples."""

    return Calibrator()
