"""The first boot of a flashed board, under a real systemd in a container: from the image's
`firstboot` to lanes by a plan. GPU and TensorRT are simulated; there is no data partition."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from support.simulated_gpu import SIMULATED_GPU
from support.systemd_machine import (
    CHECKOUT,
    CONFIG,
    SHIPPED_MODELS,
    Container,
    Unit,
    checkout_binds,
    install_units,
    skip_where_no_container_can_be_made,
)
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.simulated_gpu import SimulatedGpu

OVERLAY = CHECKOUT / "jetpack/overlay"
SETTINGS = f"""
[repository]
paths = ["{SHIPPED_MODELS}"]
[cameras.road]
uri = "synthetic://road?seed=7&fps=5"
"""
# Shorter than the build, as on a board: what extends it is the unit itself.
LIMIT_S = 30
BOARD = f"""
[Service]
Environment=PYTHONPATH={SIMULATED_GPU} LD_LIBRARY_PATH=/opt/board
Environment=EDGE_SIMULATED_CUDA=compute=87,integrated=1,driver=12060
Environment=EDGE_SIMULATED_KERNELS=/opt/board/kernels.so
Environment=EDGE_SIMULATED_TENSORRT=build_s=40
"""
UNITS = ("edge-server-firstboot", "edge-server-plans", "edge-server", "edge-server-report")
SERVES = """
import tritonclient.grpc as triton
with triton.InferenceServerClient("127.0.0.1:8001") as client:
    config = client.get_model_config("laneDetect_model").config
    print(config.platform, config.instance_group[0].kind)
"""

pytestmark = [pytest.mark.early, pytest.mark.timeout(400)]


@pytest.fixture
def board(
    tmp_path: Path, simulated_libcuda: SimulatedGpu, kernels_on_cpu: Path
) -> Iterator[Container]:
    skip_where_no_container_can_be_made()
    parts = tmp_path / "board"
    parts.mkdir(mode=0o755)
    shutil.copy(simulated_libcuda.path, parts)
    shutil.copy(kernels_on_cpu, parts)
    container = Container(tmp_path, *checkout_binds(), f"--bind-ro={parts}:/opt/board")
    try:
        container.wait_until_up()
        # What flashing leaves: the package's files, the image's, and the settings.
        install_units(container, tmp_path / "root")
        for file in filter(lambda path: path.is_file(), (OVERLAY / "usr").rglob("*")):
            container.write(f"/{file.relative_to(OVERLAY)}", file.read_text())
        container.do("chmod", "755", "/usr/lib/edge-server-image/firstboot")
        container.write(CONFIG, SETTINGS)
        container.write("/etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 1\n")
        for name in ("edge-server", "edge-server-plans"):
            container.write(f"/etc/systemd/system/{name}.service.d/board.conf", BOARD)
        container.write(
            "/etc/systemd/system/edge-server-plans.service.d/limit.conf",
            f"[Service]\nTimeoutStartSec={LIMIT_S}\n",
        )
        container.do("systemctl", "daemon-reload")
        yield container
    finally:
        container.close()


def test_a_flashed_board_builds_its_plan_before_lanes_and_reports_it(board: Container) -> None:
    plans, daemon = Unit(board, "edge-server-plans"), Unit(board)
    board.do("/usr/lib/edge-server-image/firstboot", "data")
    board.do("systemctl", "start", "--no-block", *UNITS)
    wait_until(
        lambda: plans["StatusText"].startswith(
            "laneDetect_model: building model.plan with TensorRT 10.3: "
        ),
        180,
    )
    # Lanes start with the plan, for which the unit has asked systemd for more time.
    assert daemon["ActiveState"] == "inactive"
    wait_until(lambda: plans["ActiveState"] == "active", 180)
    assert plans["Result"] == "success"
    took_us = int(plans["ActiveEnterTimestampMonotonic"]) - int(
        plans["ExecMainStartTimestampMonotonic"]
    )
    assert took_us > 1e6 * LIMIT_S
    assert plans["StatusText"] == "0 fit, 1 built"
    wait_until(lambda: daemon["ActiveState"] == "active", 180)
    assert board.do(sys.executable, "-c", SERVES) == "tensorrt_plan 1"
    wait_until(lambda: "serving 4 models, 1 camera, " in daemon["StatusText"])
    wait_until(lambda: board.run("test", "-s", "/data/report").returncode == 0, 180)
    report = board.do("cat", "/data/report").splitlines()
    assert "plans: 0 fit, 1 built" in report
    assert "health: ok" in report
    # The next boot finds it.
    board.do("systemctl", "restart", "edge-server-plans")
    wait_until(lambda: plans["StatusText"] == "1 fit, 0 built", 60)
