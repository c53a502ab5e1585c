"""Read a plan's inputs and outputs in a separate process, because reading may crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

import edge_server
from edge_server.backends.tensorrt.plan_io import PlanIO  # noqa: TC001 - read by msgspec
from edge_server.errors import EdgeServerError, ModelConfigError, ModelLoadError

PATIENCE_S = 300.0
_ROOT = Path(edge_server.__file__).parent.parent


class Description(msgspec.Struct, frozen=True):
    """The result of the process: the plan's inputs and outputs, or the reason why they are
    missing."""

    io: PlanIO | None = None
    failure: str = ""


def described(plan: Path, gpu: int, dla_core: int | None) -> PlanIO:
    """Return the plan's inputs and outputs.

    Raises:
        ModelConfigError: TensorRT refuses the plan, or crashes.
    """
    core = "" if dla_core is None else str(dla_core)
    try:
        done = subprocess.run(  # noqa: S603 - this very program
            [sys.executable, "-m", __name__, str(plan.absolute()), str(gpu), core],
            # `-m` searches the working directory first.
            cwd=_ROOT,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelLoadError(
            _unreadable(plan, f"TensorRT did not read it within {PATIENCE_S:g} s")
        ) from None
    try:
        found = msgspec.json.decode(_last_line(done.stdout), type=Description)
    except msgspec.MsgspecError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        how = f"died of signal {-done.returncode}" if done.returncode < 0 else "failed"
        raise ModelLoadError(
            _unreadable(
                plan,
                f"the process that read it {how}: {lines[-1] if lines else 'it printed nothing'}",
            )
        ) from None
    if found.io is None:
        raise ModelConfigError(_unreadable(plan, found.failure))
    return found.io


def _last_line(output: bytes) -> bytes:
    """Return the description; plugins may have printed lines before it."""
    return next(reversed(output.splitlines()), b"")


def _unreadable(plan: Path, why: str) -> str:
    return f"unable to load plan file to auto complete config: {plan}: {why}"


def _describe(plan: str, gpu: str, dla_core: str) -> Description:
    from edge_server.backends.tensorrt.engine import Engine  # noqa: PLC0415
    from edge_server.gpu.devices import Devices  # noqa: PLC0415

    devices = Devices()
    try:
        core = int(dla_core) if dla_core else None
        engine = Engine(devices.gpu(int(gpu)), Path(plan), core, Path(plan).parent.parent.name)
        found = Description(engine.io)
        engine.close()
    except (EdgeServerError, ImportError) as error:
        found = Description(failure=str(error))
    devices.close()
    return found


if __name__ == "__main__":
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(_describe(*sys.argv[1:])))
