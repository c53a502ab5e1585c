"""Plans are built in a process of its own, by one text for TensorRT 8.6 to 11.

Here against a simulation of its builder (tests/simulated_builder), which has of each version what
the real classes have, on a simulated Orin. The real process, pipe, driver calls and files.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.processes import is_running
from support.verb import run_verb
from support.waiting import wait_until

from edge_server import errors
from edge_server.backends.tensorrt import plan_process
from edge_server.backends.tensorrt.plan_cache import build_lock, timing_path
from edge_server.backends.tensorrt.plan_options import BuildOptions, GivenShapes, Placed, Range
from edge_server.backends.tensorrt.plan_process import BuildJob, Progressed, Step, TrtMessage

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.backends.tensorrt.plan_process import BuildEvent, PlanBuilt

ROOT = Path(__file__).parents[2]
SIMULATED = ROOT / "tests" / "simulated_builder"
VERSIONS = ("8.6", "10.3", "10.16", "11.4")
# Of a rule that holds for several, JetPack 6's and the newest; `scripts/test --all` has the others.
OLDER, LATER_10 = (pytest.param(each, marks=pytest.mark.long) for each in ("8.6", "10.16"))
MOST = (OLDER, "10.3", LATER_10, "11.4")
UP_TO_10 = MOST[:-1]
BATCH = BuildOptions(max_batch_size=4, dims={"x": (-1, 3, 4)})


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the simulated libcuda.so.1."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the simulated driver; apt install gcc")
    folder = tmp_path_factory.mktemp("driver")
    source, library = SIMULATED / "libcuda.c", folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return folder


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch, driver: Path) -> Callable[..., None]:
    """Puts a version of the simulated TensorRT, and a driver or none, before the next process."""

    def choose(version: str, *, dla: int = 2, gpu: bool = True) -> None:
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{SIMULATED}")
        monkeypatch.setenv("SIMULATED_TENSORRT", version)
        monkeypatch.setenv("SIMULATED_DLA", str(dla))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(driver) if gpu else "/nowhere")

    return choose


class Site:
    """Builds `name`.onnx in a folder; what was asked of TensorRT is in `plan`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out.plan"
        self.events: list[BuildEvent] = []

    def build(self, wish: BuildOptions = BATCH, name: str = "net", **how: Any) -> PlanBuilt:
        onnx = self.folder / f"{name}.onnx"
        onnx.write_bytes(b"onnx")
        job = BuildJob(str(onnx), str(self.out), wish, str(self.folder / "timing"))
        return plan_process.build(job, self.events.append, **how)

    @property
    def plan(self) -> Any:
        return json.loads(self.out.read_text())

    @property
    def flags(self) -> list[str]:
        return [said[1] for said in self.plan["said"] if said[0] == "flag"]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_builds_a_batching_network(
    version: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    built = site.build()
    most = (4, 3, 4)
    assert built.profiles == ({"x": Range((1, 3, 4), most, most)},)
    assert site.plan["profiles"] == [{"x": [[1, 3, 4], [4, 3, 4], [4, 3, 4]]}]
    assert site.plan["said"][:2] == [["limit", "WORKSPACE", 1 << 30], ["verbosity", "DETAILED"]]
    assert [(t.name, t.datatype, t.shape) for t in built.tensors] == [
        ("x", "FP32", (-1, 3, 4)),
        ("y", "FP32", (-1, 3, 4)),
    ]
    assert built.tensors[0].format == "Row major linear FP32 format of x"
    assert built.placed == Placed((), ("conv1",), 0)
    facts = built.facts
    assert facts.tensorrt == f"{version}.0.30"
    assert (facts.sm, facts.gpu, facts.multiprocessors) == ("sm_87", "Orin", 16)
    assert facts.dla_cores == 2
    assert not facts.reason


def test_what_every_profile_fixes_is_fixed_in_the_side_car_as_in_the_engine(
    site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt("10.3")
    built = site.build(BuildOptions(max_batch_size=1, dims={"x": (-1, 3, 4)}))
    assert [t.shape for t in built.tensors] == [(1, 3, 4), (1, 3, 4)]


@pytest.mark.parametrize("version", MOST)
def test_the_networks_flags_are_the_versions(
    version: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    site.build()
    # 11 has strongly typed networks only; of 8 the batch must be asked for. The numbers are the
    # simulation's: the members in alphabetical order.
    expected = {"8.6": 1, "10.3": 0, "10.16": 0}
    assert version == "11.4" or site.plan["flags"] == expected[version]
    assert version != "11.4" or site.plan["flags"] > 0


@pytest.mark.parametrize("version", UP_TO_10)
def test_precision_is_a_flag_up_to_10(
    version: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    assert site.build(BuildOptions("fp16"), "fixed").precision == "fp16"
    assert site.flags == ["FP16"]
    assert site.build(BuildOptions("int8"), "fixed quantised").precision == "int8"
    assert site.flags == ["FP16", "INT8"]


def test_11_takes_its_types_from_the_onnx_file(site: Site, tensorrt: Callable[..., None]) -> None:
    tensorrt("11.4")
    with pytest.raises(errors.Unsupported, match=r"TensorRT 11\.4 takes no --fp16: give an ONNX"):
        site.build(BuildOptions("fp16"), "fixed")
    built = site.build(BuildOptions("int8"), "fixed quantised")
    assert built.precision == "as the ONNX file"
    assert site.flags == []
    with pytest.raises(errors.Unsupported, match=r"TensorRT 11\.4 is not calibrated: give"):
        site.build(BuildOptions("int8", calibration="samples"), "fixed")


@pytest.mark.parametrize("version", ["10.3", LATER_10])
def test_a_strongly_typed_network_is_a_choice_on_10(
    version: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    assert site.build(BuildOptions(strongly_typed=True), "fixed").precision == "as the ONNX file"
    assert site.plan["flags"] > 0
    with pytest.raises(errors.Unsupported, match="a strongly typed network takes no --fp16"):
        site.build(BuildOptions("fp16", strongly_typed=True), "fixed")


def test_8_knows_no_strongly_typed_network(site: Site, tensorrt: Callable[..., None]) -> None:
    tensorrt("8.6")
    with pytest.raises(errors.Unsupported, match=r"TensorRT 8\.6 has no strongly typed"):
        site.build(BuildOptions(strongly_typed=True), "fixed")


@pytest.mark.parametrize("version", UP_TO_10)
def test_an_fp16_typed_file_that_is_refused_up_to_10_is_told_its_options(
    version: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    with pytest.raises(errors.InternalError) as caught:
        site.build(BuildOptions(), "half fixed")
    may_be_typed = version.startswith("10")
    keep = "--strongly-typed (plan_strongly_typed: true) to keep its types, or "
    assert str(caught.value).endswith(
        "built nothing: TensorRT gave no reason; where the ONNX file is typed FP16, add "
        f"{keep if may_be_typed else ''}--fp16 (plan_precision: fp16)"
    )
    assert not site.out.exists()
    assert site.build(BuildOptions("fp16"), "half fixed").precision == "fp16"
    if may_be_typed:
        typed = site.build(BuildOptions(strongly_typed=True), "half fixed")
        assert typed.precision == "as the ONNX file"


def test_11_takes_an_fp16_typed_file_as_it_is(site: Site, tensorrt: Callable[..., None]) -> None:
    tensorrt("11.4")
    site.build(BuildOptions(), "half fixed")


@pytest.mark.parametrize("version", UP_TO_10)
def test_int8_is_calibrated_with_the_samples_of_a_directory(
    version: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    samples = site.folder / "samples"
    samples.mkdir()
    for index in range(3):
        np.save(samples / f"{index}.npy", np.full((3, 4), index, np.float32))
    wish = BuildOptions("int8", max_batch_size=4, dims={"x": (-1, 3, 4)}, calibration=str(samples))
    site.build(wish)
    assert site.plan["samples"] == 3
    least = [1, 3, 4]
    assert ["calibration profile", {"x": [least, least, least]}] in site.plan["said"]
    np.save(samples / "9.npy", np.zeros((3, 5)))
    with pytest.raises(errors.InvalidRequest, match=r"9\.npy: has shape \[3, 5\], input 'x' takes"):
        site.build(wish)


def test_int8_without_ranges_is_refused(site: Site, tensorrt: Callable[..., None]) -> None:
    tensorrt("10.3")
    with pytest.raises(errors.InvalidRequest, match="INT8 needs the range of every tensor"):
        site.build(BuildOptions("int8"), "fixed")


@pytest.mark.parametrize("version", [OLDER, "10.3"])
def test_nvdla_takes_what_it_can_and_the_rest_is_told(
    version: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    built = site.build(BuildOptions("fp16", dla_core=1), "fixed")
    assert ["device", "DLA"] in site.plan["said"]
    assert ["core", 1] in site.plan["said"]
    assert site.flags == ["FP16", "GPU_FALLBACK"]
    assert site.plan["parser"] == []
    assert built.placed == Placed(("{ForeignNode[conv1...conv9]}",), ("resize", "softmax"), 1)
    site.build(BuildOptions("fp16", dla_core=0, gpu_fallback=False), "fixed")
    assert site.flags == ["FP16"]


def test_the_parser_of_10_16_writes_a_network_as_nvdla_takes_it(
    site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt("10.16")
    site.build(BuildOptions("fp16", dla_core=0), "fixed")
    assert site.plan["parser"] == ["ADJUST_FOR_DLA"]


def test_more_layers_on_the_gpu_than_may_fail_the_build(
    site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt("10.3")
    site.build(BuildOptions("fp16", dla_core=0, max_gpu_layers=2), "fixed")
    site.out.unlink()
    with pytest.raises(errors.Unsupported, match=r"2 layers would run on the GPU, 1 may") as caught:
        site.build(BuildOptions("fp16", dla_core=0, max_gpu_layers=1), "fixed")
    assert "\n  resize\n  softmax" in str(caught.value)
    assert not site.out.exists()


def test_a_core_that_is_not_there_is_told_with_where_there_is_one(
    site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt("10.16", dla=0)
    with pytest.raises(
        errors.Unsupported, match=r"no NVDLA core 0 here: TensorRT 10\.16\.0\.30 sees 0"
    ):
        site.build(BuildOptions("fp16", dla_core=0), "fixed")
    with pytest.raises(errors.InvalidRequest, match="FP16 and INT8 only"):
        site.build(BuildOptions(dla_core=0), "fixed")


@pytest.mark.parametrize("version", MOST)
def test_an_input_that_holds_a_shape_gets_its_values_bounded(
    version: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    given = GivenShapes({"size": (1, 1)}, {"size": (2, 2), "x": (1, 3, 4)}, {"size": (8, 8)})
    built = site.build(BuildOptions(profiles=(given,)), "sized")
    assert site.plan["profiles"][0]["values of size"] == [[1, 1], [2, 2], [8, 8]]
    assert [t.holds_shape for t in built.tensors] == [False, True, False]


@pytest.mark.parametrize(("version", "name"), [("8.6", ""), ("10.3", " 'conv1' (Conv)")])
def test_all_that_the_parser_says_is_told(
    version: str, name: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    with pytest.raises(errors.ModelConfigError) as caught:
        site.build(name="unreadable")
    assert str(caught.value).endswith(
        f"cannot read it:\n  no such operator: Wish\n  node 7{name}: bad axis"
    )


def test_a_build_that_gives_nothing_tells_what_tensorrt_said(
    site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt("10.3")
    with pytest.raises(errors.InternalError, match="built nothing: Could not find any implementa"):
        site.build(name="impossible")


@pytest.mark.parametrize("version", VERSIONS)
def test_progress_is_told_where_tensorrt_has_it(
    version: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    site.build()
    told = any(isinstance(event, Progressed) for event in site.events)
    assert told is (version != "8.6")
    assert TrtMessage("WARNING", "this is a simulation") in site.events
    assert Step("building") in site.events


@pytest.mark.parametrize("version", UP_TO_10)
def test_measurements_are_kept_for_the_next_build(
    version: str, site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt(version)
    facts = site.build().facts
    path = timing_path(site.folder / "timing", facts)
    assert path.name.startswith(f"{version}.0.30-Orin-sm_87-16")
    assert path.read_bytes() == b"+"
    site.build()
    assert path.read_bytes() == b"++"
    path.write_bytes(b"damaged")
    site.build()
    assert path.read_bytes() == b"+"


def test_without_a_driver_nothing_crashes_and_the_reason_is_told(
    site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt("10.3", gpu=False)
    facts = plan_process.probe_device()
    assert facts.reason.startswith("no CUDA driver: ")
    assert facts.tensorrt == "10.3.0.30"
    with pytest.raises(
        errors.InternalError, match="cannot build here: CUDA initialization failure"
    ):
        site.build()
    with pytest.raises(errors.Unavailable, match="no CUDA driver"):
        plan_process.read_layers(site.out, None)


def test_bindings_without_a_builder_are_told_with_the_remedy(
    site: Site, tensorrt: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorrt("10.3")
    monkeypatch.setenv("SIMULATED_LEAN", "1")
    with pytest.raises(errors.Unsupported, match="has no builder: install the whole one"):
        site.build()


def test_a_driver_without_a_device_is_told(
    tensorrt: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorrt("10.3")
    monkeypatch.setenv("SIMULATED_NO_DEVICE", "1")
    facts = plan_process.probe_device()
    assert "cuInit returns 100 (no CUDA-capable device is detected)" in (facts.reason)


def test_without_tensorrt_the_device_is_told_all_the_same(
    tensorrt: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensorrt("10.3")
    # A module that cannot be imported, wherever another one may be.
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.10: not found')")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    facts = plan_process.probe_device()
    assert facts.sm == "sm_87"
    assert facts.reason.startswith("no TensorRT here: libnvinfer.so.10: not found")


def test_a_device_that_does_not_answer_is_not_waited_for(
    tensorrt: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensorrt("10.3")
    (tmp_path / "tensorrt.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    with pytest.raises(errors.Unavailable, match="works with TensorRT gave no result within 3 s"):
        plan_process.probe_device(timeout_s=3)
    assert _children() == []


def test_the_layers_of_a_plan_are_told_by_the_device(
    site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt("11.4")
    site.build(BuildOptions(dla_core=1), "fixed")
    said = json.loads(plan_process.read_layers(site.out, 1))
    assert said["I/O Tensors"] == ["x", "y"]
    site.out.write_bytes(b"garbage")
    with pytest.raises(errors.InternalError, match="The engine plan file is not compatible"):
        plan_process.read_layers(site.out, None)


def test_a_build_that_crashes_costs_itself_alone(site: Site, tensorrt: Callable[..., None]) -> None:
    tensorrt("10.3")
    with pytest.raises(errors.InternalError, match="works with TensorRT died of SIGSEGV"):
        site.build(name="crash")


def test_a_build_that_leaves_too_little_memory_is_ended(
    site: Site, tensorrt: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorrt("10.3")
    monkeypatch.setattr(plan_process, "LEAVE_FREE_BYTES", 1 << 60)
    with pytest.raises(errors.Unavailable, match="shall stay free"):
        site.build(name="hang")
    assert _children() == []


def test_a_build_over_its_limit_of_memory_fails(site: Site, tensorrt: Callable[..., None]) -> None:
    tensorrt("10.3")
    with pytest.raises(errors.Unavailable, match="its limit of memory was not enough"):
        site.build(name="hungry", memory_limit_bytes=512 << 20)


def test_a_build_gives_way_and_ends_with_who_asked_for_it(
    site: Site, tensorrt: Callable[..., None]
) -> None:
    tensorrt("10.3")
    onnx = site.folder / "hang.onnx"
    onnx.write_bytes(b"onnx")
    asking = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys\n"
            "from edge_server.backends.tensorrt.plan_process import BuildJob\n"
            "from edge_server.backends.tensorrt.plan_process import build\n"
            "from edge_server.backends.tensorrt.plan_options import BuildOptions\n"
            f"build(BuildJob({str(onnx)!r}, {str(site.out)!r}, BuildOptions(max_batch_size=1, "
            "dims={'x': (-1, 3, 4)})), lambda e: print(e, flush=True))",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asking.stdout is not None
    with asking, asking.stdout as said:
        assert any("building" in line for line in said)
        (child,) = _children(asking.pid)
        assert os.getpriority(os.PRIO_PROCESS, child) == 19
        assert Path(f"/proc/{child}/oom_score_adj").read_text() == "1000\n"
        asking.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_running(child), 30)


def _children(pid: int | None = None) -> list[int]:
    own = pid or os.getpid()
    texts = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    return [int(text) for text in texts if b"edge_server.process.in_child" in _command(int(text))]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def test_the_verbs_report_nvdla_and_tell_a_plan_of_another_tensorrt(
    tensorrt: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = tmp_path / "models" / "lane"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.onnx").write_bytes(b"onnx")
    (model / "config.pbtxt").write_text(
        'platform: "tensorrt_plan" max_batch_size: 1\n'
        'input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 4 ] } ]\n'
        'output [ { name: "y" data_type: TYPE_FP32 dims: [ 3, 4 ] } ]\n'
        "instance_group [ { kind: KIND_GPU\n"
        "  secondary_devices [ { kind: KIND_NVDLA device_id: 1 } ] } ]\n"
        'parameters { key: "plan_precision" value { string_value: "fp16" } }\n'
    )
    tensorrt("10.3")
    built = _verb("build", model)
    assert built.returncode == 0, built.stderr
    assert "layers: 1 part on NVDLA, 2 layers on the GPU, 1 change of layout" in built.stdout
    assert "  NVDLA  {ForeignNode[conv1...conv9]}\n  GPU    resize\n" in built.stdout
    assert " --fp16 --minShapes=x:1x3x4 " in built.stdout
    assert " --useDLACore=1 --allowGPUFallback " in built.stdout

    shown = _verb("inspect", model, "--layers")
    assert "here       runs\n" in shown.stdout
    assert "\ntensors    x, y\n" in shown.stdout
    assert "DLA       {ForeignNode[conv1...conv9]}" in shown.stdout

    tensorrt("10.16", dla=0)
    said = (
        "built with TensorRT 10.3 for sm_87, this device has TensorRT 10.16 and sm_87; run "
        f"`edge-server plan build {model}`"
    )
    assert f"here       does not run: {said}\n" in _verb("inspect", model).stdout
    verified = _verb("verify", model)
    assert verified.returncode == 78
    assert said in verified.stderr
    refused = _verb("build", model)
    assert refused.returncode == 78
    assert "no NVDLA core 1 here: TensorRT 10.16.0.30 sees 0; NVDLA works with" in (refused.stderr)
    assert _verb("build", model, "--gpu").returncode == 0


def test_two_builds_take_turns(tensorrt: Callable[..., None], tmp_path: Path) -> None:
    tensorrt("10.3")
    (tmp_path / "fixed.onnx").write_bytes(b"onnx")
    with build_lock(lambda: None):
        waiting = subprocess.Popen(
            [
                *(sys.executable, "-m", "edge_server", "plan", "build"),
                *(str(tmp_path / "fixed.onnx"), "--no-timing-cache"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == "waiting for another build …\n"
    assert "built in" in waiting.communicate(timeout=60)[0]


def _verb(verb: str, model: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run_verb("plan", verb, model, *more)
