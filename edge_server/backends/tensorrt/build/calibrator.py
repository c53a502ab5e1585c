"""INT8 calibration as TensorRT up to 10 does it: it runs the network on samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorrt as trt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.gpu.bare_gpu import BareGpu
    from edge_server.backends.tensorrt.build.calibration import Samples


def make_calibrator(samples: Samples, gpu: BareGpu) -> Any:
    """What TensorRT asks for batches; None where it has no calibration any more.

    Whoever gives it to a configuration keeps it for as long as the plan is built. Its `trouble` is
    what went wrong with a sample, if anything did.
    """
    if not hasattr(trt, "IInt8EntropyCalibrator2"):
        return None

    class Calibrator(trt.IInt8EntropyCalibrator2):  # type: ignore[misc]
        """TensorRT would print an exception of it, and go on."""

        def __init__(self) -> None:
            super().__init__()
            self._left = iter(samples)
            self.trouble: Exception | None = None

        def get_batch_size(self) -> int:
            return 1

        def get_batch(self, names: Sequence[str]) -> list[int] | None:
            try:
                sample = next(self._left, None)
                if sample is None:
                    return None
                return [gpu.put(name, sample[name]) for name in names]
            except Exception as error:  # noqa: BLE001 - told when the build has ended
                self.trouble = error
                return None

        def read_calibration_cache(self) -> None:
            """Nothing is known before the samples are run."""

        def write_calibration_cache(self, cache: Any) -> None:
            """The samples are the truth; nothing is kept."""

    return Calibrator()
