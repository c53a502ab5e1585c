"""The real Python classes of TensorRT have what `tests/support/tensorrt_api/names.json` says.

They come from the package registry, are cached below `build`, and need no GPU. A version whose
wheel is not made for this Python is compared on another one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tensorrt_api import real_bindings

from edge_server import errors
from edge_server.backends.tensorrt import plan_process
from edge_server.backends.tensorrt.plan_options import BuildOptions
from edge_server.backends.tensorrt.plan_process import BuildJob

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "tensorrt_bindings"


@pytest.mark.parametrize("version", sorted(real_bindings.WHEELS))
def test_the_real_classes_have_what_is_written_down(version: str) -> None:
    try:
        found = real_bindings.look(version, FOLDER)
    except real_bindings.NotHere as error:
        pytest.skip(str(error)[:300])
    assert found == real_bindings.names()[version]


@pytest.fixture(params=sorted(real_bindings.WHEELS))
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A version whose real classes the next process finds under the name of TensorRT."""
    try:
        found = real_bindings.importing(request.param, FOLDER)
    except real_bindings.NotHere as error:
        pytest.skip(str(error)[:300])
    (tmp_path / "tensorrt.py").write_text(
        "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n"
    )
    paths = [str(ROOT), str(tmp_path), found["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("LD_LIBRARY_PATH", found["LD_LIBRARY_PATH"])
    return str(request.param)


def test_what_we_derive_from_the_real_classes_can_be_made(version: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c"),
            "import os\n"
            "from types import SimpleNamespace\n"
            "from edge_server.backends.tensorrt import plan_builder\n"
            "config = SimpleNamespace()\n"
            "monitor = plan_builder._set_monitor(config, print)\n"
            "made = monitor, plan_builder.make_calibrator([], None)\n"
            "print(*(type(each).__name__ for each in made), flush=True)\n"
            "os._exit(0)\n",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = {"8.6": "NoneType Calibrator", "11.4": "Monitor NoneType"}
    assert done.stdout.strip() == expected.get(version, "Monitor Calibrator")


def test_the_real_builder_without_a_driver_is_told_in_a_sentence(
    version: str, tmp_path: Path
) -> None:
    (tmp_path / "net.onnx").write_bytes(b"onnx")
    job = BuildJob(str(tmp_path / "net.onnx"), str(tmp_path / "net.plan"), BuildOptions())
    with pytest.raises(
        errors.InternalError, match=rf"TensorRT {version}[.\d]* cannot build here: "
    ):
        plan_process.build(job, lambda _: None)
