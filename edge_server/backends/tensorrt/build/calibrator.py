"""INT8 calibration as TensorRT up to 10 does it: it runs the network on samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorrt as trt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.gpu.bare_gpu import BareGpu
    from edge_server.backends.tensorrt.build.calibration import Samples


def make_calibrator(samples: Samples, gpu: BareGpu) -> Any:
    """The calibrator that feeds `samples` to TensorRT; None where TensorRT has no calibration.

    The builder configuration does not own the calibrator: hold it until the plan is built. Its
    `failure` is the exception that a sample raised, or None.
    """
    if not hasattr(trt, "IInt8EntropyCalibrator2"):
        return None

    class Calibrator(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]
        """Raises nothing: TensorRT would print the exception and go on without a calibration."""

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
            """Nothing is known before the samples are run."""

        def write_calibration_cache(self, cache: Any) -> None:
            """The samples are the truth; nothing is kept."""

    return Calibrator()
