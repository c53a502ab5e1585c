"""The packages for JetPack 6 and 7, installed into arm64 roots and run by an emulator.

The roots are Debian's, with Ubuntu's Python (`make_root`); packages without content stand in for
NVIDIA's, but for OpenCV's wheel in JetPack's place. No GPU is there: models run on the CPU.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from debian_package.targets import TARGETS
from support.systemd_machine import make_root

if TYPE_CHECKING:
    from debian_package.targets import Target

HERE = Path(__file__).parent
CHECKOUT = Path(__file__).parents[2]
PYTHON = "/usr/lib/edge-server/bin/python3"
# As JetPack 6.2 and 7.2 bring them.
STAND_INS = {
    "jammy": {
        "python3.10": "3.10.12-1~22.04",
        "nvidia-l4t-cuda": "36.4.3-20250107174145",
        "nvidia-l4t-dla-compiler": "36.4.3-20250107174145",
        "cuda-cudart-12-6": "12.6.68-1",
        "python3-libnvinfer": "10.3.0.30-1+cuda12.5",
        "libopencv-python": "4.8.0-1-g6371ee1",
    },
    "noble": {
        "python3.12": "3.12.3-1ubuntu0",
        "nvidia-l4t-cuda": "39.2.0-20260601141651",
        "cuda-cudart-13-2": "13.2.75-1",
        "python3-libnvinfer": "10.16.2.10-1+cuda13.2",
        "libopencv-python": "4.8.0-1-g52c7569",
    },
}
# A board has OpenCV from apt and NumPy 1 for it.
OF_ONE_ALONE = {"cv2", "opencv_python_headless", "numpy"}
CONTROL = """\
Package: {name}
Version: {version}
Architecture: {architecture}
Maintainer: tests <tests@test.invalid>
Description: stands in
"""
INSTALL = """\
rm -rf /etc/apt/sources.list*
apt-get install -y -q --no-install-recommends /srv/*.deb >/srv/apt.log 2>&1
"""
LOOK = f"""\
dpkg --verify edge-server
systemctl is-enabled edge-server >/srv/enabled
NUMPY_EXPERIMENTAL_DTYPE_API=1 {PYTHON} -I /srv/imports.py >/srv/imports.json
edge-server doctor --json >/srv/doctor.json || true
PORTS='--grpc-port=0 --metrics-port=0 --http-port=0'
edge-server check --config /etc/edge_server/config.toml $PORTS >/srv/check
{PYTHON} -I /srv/lanes_of_a_road.py >/srv/lanes.json
"""
# Every library of the package is loaded; one of NumPy's own tests asks for a word of consent, the
# variable above.
IMPORTS = """\
import importlib, json, sys, sysconfig
from pathlib import Path
site = Path(sysconfig.get_path("purelib"))
loaded = {}
for path in sorted(site.rglob("*.so")):
    if "-linux-gnu.so" in path.name or ".abi3.so" in path.name:
        name = ".".join(path.relative_to(site).parts).split(".cpython")[0].split(".abi3")[0]
        name = "cv2" if name == "cv2.cv2" else name  # it wants to be loaded by its package
        try:
            importlib.import_module(name)
            loaded[name] = ""
        except Exception as error:
            loaded[name] = str(error)
print(json.dumps(loaded))
"""

pytestmark = [pytest.mark.serial, pytest.mark.long]


def build(target: Target, folder: Path) -> Path:
    command = [CHECKOUT / "scripts/build_deb", "--target", target.name, "--out", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def stand_in(name: str, version: str, target: Target, tree: Path) -> None:
    """Make a package of that name beside `tree`, with what lies in `tree`."""
    (tree / "DEBIAN").mkdir(parents=True)
    control = CONTROL.format(name=name, version=version, architecture=target.architecture)
    (tree / "DEBIAN/control").write_text(control)
    command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", tree, tree.parent]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def opencv_wheel(target: Target, tree: Path) -> None:
    """JetPack's OpenCV is of that version, and compiled for NumPy 1 as well."""
    uv = CHECKOUT / ".venv-package/bin/uv"
    fits = ("--python-version", target.python, "--python-platform", target.platform)
    site = tree / "usr/lib/python3/dist-packages"
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--target", site, *fits]
    subprocess.run([*command, "opencv-python-headless==4.8.0.76"], check=True)
    (site / ".lock").unlink(missing_ok=True)


def run_in(root: Path, shared: Path, script: str, *emulated: str | Path) -> None:
    command = [*emulated, HERE / "in_root", root, shared]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"


def install(target: Target, folder: Path) -> Path:
    """Install the package into its root; the folder with what was seen there."""
    shared = folder / target.name
    shared.mkdir()
    build(target, shared)
    (shared / "imports.py").write_text(IMPORTS)
    script = HERE.parent / "support" / "lanes_of_a_road.py"
    (shared / script.name).write_text(script.read_text())
    root = make_root(target.name)
    emulated: tuple[Path, ...] = ()
    if target.architecture == "arm64":
        emulated = (HERE / "with_arm64",)
        for name, version in STAND_INS[target.suite].items():
            tree = shared / "trees" / name
            if name == "libopencv-python":
                opencv_wheel(target, tree)
            stand_in(name, version, target, tree)
        for deb in (shared / "trees").glob("*.deb"):
            deb.rename(shared / deb.name)
    run_in(root, shared, INSTALL + LOOK, *emulated)
    return shared


def files_of(shared: Path) -> set[str]:
    """The files of the package, without what names an architecture or belongs to one build only."""
    (deb,) = shared.glob("edge-server_*.deb")
    listed = subprocess.run(
        ["dpkg-deb", "--contents", deb], check=True, capture_output=True, text=True
    )
    names = {line.split(maxsplit=5)[5].split(" -> ")[0] for line in listed.stdout.splitlines()}
    return {name.replace("aarch64", "x86_64") for name in names}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("suite", sorted(STAND_INS))
def test_a_boards_package_installs_checks_and_finds_the_lanes_of_a_pcs(
    suite: str, tmp_path: Path
) -> None:
    board = install(TARGETS[f"{suite}-arm64"], tmp_path)
    pc = install(TARGETS[f"{suite}-amd64"], tmp_path)
    for seen in (board, pc):
        assert (seen / "enabled").read_text() == "enabled\n"
        ready = [line for line in (seen / "check").read_text().splitlines() if "READY" in line]
        assert len(ready) == 4, ready
        wrong = {name: error for name, error in read(seen / "imports.json").items() if error}
        assert wrong == {}
        levels = {each["name"]: each["level"] for each in read(seen / "doctor.json")["checks"]}
        assert (levels["onnxruntime"], levels["opencv"]) == ("ok", "ok")
        assert "fault" not in levels.values(), levels
    of_board, of_pc = (read(seen / "lanes.json") for seen in (board, pc))
    assert np.shape(of_board["lane_scores"]) == np.shape(of_pc["lane_scores"])
    assert len(of_pc["lane_scores"][0]) > 2
    apart = np.abs(np.subtract(of_board["lane_points"], of_pc["lane_points"])).max()
    print(f"lanes at most {apart:.2f} px apart")
    # Two processors round differently, and two versions of OpenCV resize differently.
    np.testing.assert_allclose(of_board["lane_points"], of_pc["lane_points"], atol=1.0)
    np.testing.assert_allclose(of_board["lane_scores"], of_pc["lane_scores"], atol=0.01)


@pytest.mark.parametrize("suite", sorted(STAND_INS))
def test_both_builds_hold_the_same_files_but_for_the_architecture(
    suite: str, tmp_path: Path
) -> None:
    for target in (TARGETS[f"{suite}-arm64"], TARGETS[f"{suite}-amd64"]):
        (tmp_path / target.architecture).mkdir()
        build(target, tmp_path / target.architecture)
    board, pc = files_of(tmp_path / "arm64"), files_of(tmp_path / "amd64")
    differ = {name.partition("/site-packages/")[2].partition("/")[0] for name in board ^ pc}
    libraries = {re.split(r"[-.]", name)[0] for name in differ}
    assert libraries <= OF_ONE_ALONE, sorted(board ^ pc)
