"""The note of a build that failed, beside the place of its plan.

A build takes minutes of the whole board, and systemd starts a daemon that ended again at once: the
note keeps it from building what has just failed. It is of one ONNX file, one set of options and one
TensorRT, as its directory is.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from edge_server.board.identity import boot_id
from edge_server.errors import EdgeServerError, ModelConfigError, Unavailable, may_pass
from edge_server.process.disk import atomic_write

if TYPE_CHECKING:
    from pathlib import Path

# A build that failed for want of memory, or crashed, may succeed later; a boot is later, too.
RETRY_S = 1800.0
_NAME = "failed.json"


class _Failed(msgspec.Struct, frozen=True):
    """Attributes:
    reason: the text of the failure.
    may_pass: False where TensorRT refuses the ONNX file or the options.
    boot: identifies the boot.
    at_s: seconds since that boot.
    """

    reason: str
    may_pass: bool
    boot: str
    at_s: float


def note_failure(plan: Path, error: EdgeServerError) -> None:
    """Note that the build of `plan` failed; a disk that takes no note costs another build."""
    failed = _Failed(str(error), may_pass(error), boot_id(), _now_s())
    with suppress(OSError):
        atomic_write(plan.with_name(_NAME), msgspec.json.encode(failed))


def forget_failure(plan: Path) -> None:
    with suppress(OSError):
        plan.with_name(_NAME).unlink()


def check_not_failed(plan: Path, model: str) -> None:
    """Check that no build of `plan` has failed that should not be repeated yet.

    Raises:
        ModelConfigError: TensorRT refused the ONNX file or the options.
        Unavailable: the build failed less than `RETRY_S` ago, in this boot.
    """
    try:
        failed = msgspec.json.decode(plan.with_name(_NAME).read_bytes(), type=_Failed)
    except (OSError, ValueError):
        return
    text = f"model '{model}': no plan, as its build failed: {failed.reason}"
    now = "at once by `systemctl restart edge-server-plans`, which is `edge-server plan refresh`"
    if not failed.may_pass:
        raise ModelConfigError(
            f"{text}\nit is built again when its ONNX file, its options or TensorRT change; {now}"
        )
    left_s = failed.at_s + RETRY_S - _now_s()
    if failed.boot == boot_id() and left_s > 0:
        raise Unavailable(
            f"{text}\nit is built again after {left_s / 60:.0f} min, or after a boot; {now}"
        )


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
