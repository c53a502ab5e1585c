"""What a board's files and the probes' answers mean, board by board."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.boards import plant

from edge_server.board.device_nodes import Disk
from edge_server.board.doctor.examination import CHECKS, examine, run_checks
from edge_server.board.doctor.hardware import Finding, Level, ProbeResult
from edge_server.board.doctor.probes import parse_smart_log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from support.fake_board import FakeBoard

    from edge_server.board.doctor.examination import Probe
    from edge_server.board.doctor.hardware import Evidence

NOW_S = 4e9
OK, WARNING, FAULT = Level.OK, Level.WARNING, Level.FAULT
WHEEL = "/venv/lib/python3.10/site-packages"
APT = "/usr/lib/python3.10/dist-packages"
_GPU = {"name": "Orin", "compute_capability": "8.7", "memory_bytes": 1 << 34, "integrated": True}
# What the probes of a Jetson say on which everything is as it should be.
_HEALTHY: Mapping[str, Mapping[str, Any]] = {
    "driver": {"init": 0, "version": "12.6", "devices": [_GPU]},
    "cuda_runtime": {"version": "12.6", "library": "libcudart.so.12"},
    "pycuda": {"version": "2026.1"},
    "tensorrt": {"version": "10.3.0", "file": f"{APT}/tensorrt/__init__.py"},
    "nvdla": {"cores": 2},
    "would_serve": {"laneDetect_model": {"serves": "configs/tensorrt.pbtxt on GPU 0"}},
    "opencv": {"version": "4.8.0", "file": f"{APT}/cv2/__init__.py", "gstreamer": True},
    "gstreamer": {
        "version": "GStreamer 1.20.3",
        "decoders": dict.fromkeys(("H.264", "H.265", "JPEG"), "nvv4l2decoder"),
        "lacking": {},
    },
    "onnxruntime": {"version": "1.23.0", "providers": ["CPUExecutionProvider"]},
    "kernel_clock": {"synchronized": True},
    "nvme_wear": {},
    "grpc_port": {"free": True},
    "broker": {},
    "unit": {"ActiveState": "active", "SubState": "running", "UnitFileState": "enabled"},
}
# What they say on a desktop without a GPU.
_DESKTOP: Mapping[str, Mapping[str, Any]] = {
    "driver": {"missing": True, "error": "libcuda.so.1: cannot open shared object file"},
    "cuda_runtime": {"missing": True},
    "pycuda": {"missing": True},
    "tensorrt": {"missing": True},
    "nvdla": {"error": "no CUDA driver: libcuda.so.1: cannot open shared object file"},
    "opencv": {"version": "5.0.0", "file": f"{WHEEL}/cv2/__init__.py", "gstreamer": False},
    "gstreamer": {"missing": True, "reason": "PyGObject is not there; apt install python3-gi"},
}
_NO_CSI = "GStreamer has no nvarguscamerasrc; a CSI camera needs a Jetson; apt install nvidia-l4t"


@pytest.fixture
def orin(fake_board: FakeBoard) -> FakeBoard:
    """With JetPack 6.2, on which all is as it should be."""
    fake_board.jetson("NVIDIA Jetson Orin NX", "p3767-0000", "36.4.3")
    return fake_board


class Probes:
    """Answers as told here; a text is trouble."""

    def __init__(self, **answers: Mapping[str, Any] | str) -> None:
        self._answers = {**_HEALTHY, **answers}
        self.asked: list[str] = []

    def __call__(self, question: Probe) -> ProbeResult:
        name = question.function.partition(":")[2]
        self.asked.append(name)
        said = self._answers[name]
        return ProbeResult(failure=said) if isinstance(said, str) else ProbeResult(said)


def evidence(board: FakeBoard, config: Path | None = None, **answers: Any) -> Evidence:
    """All that is known of `board`, on the Python of JetPack 6, with 50 GiB free."""
    probes = Probes(**answers)
    found = examine(config, board.root, probes, NOW_S).evidence
    assert found.disk is not None
    disk = replace(found.disk, free_bytes=50 << 30, writable=True)
    return replace(found, python="3.10.12", version="1", disk=disk)


def worse(known: Evidence) -> dict[str, Level]:
    """The checks that are not ok. Whatever is not ok says what to do."""
    findings = run_checks(known)
    assert list(findings) == list(CHECKS)
    assert all(finding.found for finding in findings.values())
    assert all(bool(each.remedy) == (each.level is not OK) for each in findings.values())
    return {name: each.level for name, each in findings.items() if each.level is not OK}


def told(known: Evidence, name: str) -> Finding:
    return run_checks(known)[name]


def test_jetpack_6_2_on_orin_nx_is_well(orin: FakeBoard) -> None:
    known = evidence(orin)
    assert worse(known) == {}
    assert told(known, "jetpack").found == "JetPack 6.2 (L4T 36.4.3) on Jetson Orin NX 16GB"
    assert told(known, "nvdla").found == "2 cores"


def test_another_python_than_jetpacks_own_finds_none_of_its_libraries(
    orin: FakeBoard,
) -> None:
    known = replace(evidence(orin), python="3.12.3")
    assert worse(known) == {"jetpack": WARNING}
    assert "python3.10 -m venv --system-site-packages" in told(known, "jetpack").remedy


def test_restarts_of_the_unit_are_told(orin: FakeBoard) -> None:
    known = evidence(orin, unit={**_HEALTHY["unit"], "NRestarts": "7"})
    assert told(known, "unit").found == "active (running), restarted 7 times"


@pytest.mark.parametrize(
    ("said", "level", "found", "remedy"),
    [
        ({"serves": "configs/t.pbtxt on GPU 0"}, OK, "m: configs/t.pbtxt on GPU 0", ""),
        (
            {"degraded": "config.pbtxt on CPU: degraded: no plan"},
            WARNING,
            "m: config.pbtxt on CPU: degraded: no plan",
            "edge-server-plans",
        ),
        ({"error": "names 'tensort', and there is no"}, FAULT, "m: names 'tensort'", "check --con"),
        (None, OK, "none prefers a further configuration", ""),
        ("no answer within 20 s", WARNING, "would serve is unknown: no answer", "check --config"),
    ],
)
def test_the_configuration_that_would_serve_each_model_is_told(
    orin: FakeBoard, said: Any, level: Level, found: str, remedy: str
) -> None:
    config = orin.root / "config.toml"
    config.write_text('[repository]\npaths = ["/models"]\n')
    answer = said if isinstance(said, str) else {"m": said} if said else {}
    finding = told(evidence(orin, config, would_serve=answer), "models")
    assert finding.level is level
    assert found in finding.found
    assert remedy in finding.remedy


def test_jetpack_5_1_has_too_old_a_python(fake_board: FakeBoard) -> None:
    fake_board.jetson("NVIDIA Jetson Orin NX", "p3767-0000", "35.4.1")
    known = evidence(fake_board, tensorrt={"missing": True})
    assert worse(known) == {"jetpack": WARNING, "tensorrt": FAULT}
    assert "3.8" in told(known, "jetpack").found


def test_jetpack_7_2_has_no_nvdla_for_orin(fake_board: FakeBoard) -> None:
    fake_board.jetson("NVIDIA Jetson AGX Orin", "p3701-0005", "39.2.0")
    tensorrt = {**_HEALTHY["tensorrt"], "version": "10.16.2"}
    known = evidence(fake_board, tensorrt=tensorrt, nvdla={"cores": 0})
    known = replace(known, python="3.12.3")
    assert worse(known) == {"nvdla": WARNING}
    assert "JetPack 7.2 does not support" in told(known, "nvdla").found


@pytest.mark.parametrize(
    ("module", "tensorrt", "says"),
    [
        ("p3767-0000", "11.4.1", "on AGX Orin only"),
        ("p3701-0005", "10.16.2", "TensorRT 10.16.2 does not support"),
        ("p3701-0005", "11.4.1", "0 cores, where 2 should be"),
    ],
)
def test_later_jetpacks_have_nvdla_on_agx_with_tensorrt_11_4(
    fake_board: FakeBoard, module: str, tensorrt: str, says: str
) -> None:
    fake_board.jetson("NVIDIA Jetson", module, "39.3.0")
    library = {**_HEALTHY["tensorrt"], "version": tensorrt}
    known = evidence(fake_board, tensorrt=library, nvdla={"cores": 0})
    assert says in told(known, "nvdla").found


def test_orin_nano_has_no_nvdla_and_is_well(fake_board: FakeBoard) -> None:
    fake_board.jetson("NVIDIA Jetson Orin Nano Super", "p3767-0005", "36.4.7")
    fake_board.power_modes("15W", "25W", "MAXN_SUPER", "7W", current=2)
    known = evidence(fake_board, nvdla={"cores": 0})
    assert worse(known) == {}
    assert "has none" in told(known, "nvdla").found


def test_a_desktop_without_a_gpu_is_well(fake_board: FakeBoard) -> None:
    known = evidence(fake_board, **_DESKTOP)
    assert worse(known) == {}
    assert told(known, "driver").found == "no NVIDIA GPU: models run on the CPU"


def test_a_jetson_that_has_lost_its_gpu_is_at_fault(orin: FakeBoard) -> None:
    libraries = {name: _HEALTHY[name] for name in ("opencv", "gstreamer")}
    known = evidence(orin, **{**_DESKTOP, **libraries})
    assert worse(known) == {
        "driver": FAULT,
        "cuda_runtime": WARNING,
        "pycuda": WARNING,
        "tensorrt": FAULT,
        "nvdla": WARNING,
    }


def test_a_broken_jetson_is_told_all_that_is_wrong_and_how_to_mend_it(
    orin: FakeBoard,
) -> None:
    orin.write("etc/group", f"video:x:{orin.video}:somebody\n")
    orin.node("video0", label="vi-output, imx219 9-0010")
    orin.power_modes("MAXN", "10W", "15W", "25W", current=2)
    (orin.root / "run/systemd/timesync/synchronized").unlink()
    lost = "libnvdla_compiler.so: cannot open shared object file"
    known = evidence(
        orin,
        driver={"init": 999, "error": "CUDA_ERROR_UNKNOWN"},
        tensorrt={"error": f"ImportError: {lost}"},
        pycuda="the process that tried was ended by SIGSEGV",
        kernel_clock={"synchronized": False},
        nvdla={"error": "no CUDA driver: CUDA_ERROR_UNKNOWN"},
        unit={"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "78"},
    )
    known = replace(
        known, board=replace(known.board, wall_clock=replace(known.board.wall_clock, now_s=0.0))
    )
    assert worse(known) == {
        "power_mode": WARNING,
        "clock": FAULT,
        "gpu_nodes": FAULT,
        "driver": FAULT,
        "pycuda": WARNING,
        "tensorrt": FAULT,
        "nvdla": WARNING,
        "cameras": FAULT,
        "argus": WARNING,
        "unit": FAULT,
    }
    joins = "sudo usermod -aG video edge-server"
    for name, remedy in {
        "power_mode": "sudo nvpmodel -m 0",
        "clock": "timedatectl",
        "gpu_nodes": joins,
        "driver": joins,
        "tensorrt": "nvidia-l4t-dla-compiler",
        "cameras": joins,
        "argus": "systemctl restart nvargus-daemon",
        "unit": "edge-server check",
    }.items():
        assert remedy in told(known, name).remedy, name
    assert "1970-01-01" in told(known, "clock").found
    assert "SIGSEGV" in told(known, "pycuda").found


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ({"opencv": {**_HEALTHY["opencv"], "file": f"{WHEEL}/cv2"}}, {"opencv": WARNING}),
        ({"opencv": {**_HEALTHY["opencv"], "gstreamer": False}}, {}),  # it is not read through
        ({"opencv": {"missing": True}}, {"opencv": FAULT}),
        ({"opencv": "no answer within 20 s"}, {"opencv": FAULT}),
        ({"gstreamer": _DESKTOP["gstreamer"]}, {"gstreamer": WARNING}),
        ({"gstreamer": "no answer within 20 s"}, {"gstreamer": WARNING}),
        (
            {"gstreamer": {**_HEALTHY["gstreamer"], "lacking": {"csi": _NO_CSI}}},
            {"gstreamer": WARNING},
        ),
        (
            {"gstreamer": {**_HEALTHY["gstreamer"], "decoders": {"H.264": "avdec_h264"}}},
            {"gstreamer": WARNING},
        ),
        ({"tensorrt": {"version": "10.3.0", "file": WHEEL}}, {"tensorrt": WARNING}),
        ({"nvdla": {"cores": 1}}, {"nvdla": FAULT}),
        ({"nvdla": "the process that tried was ended by SIGSEGV"}, {"nvdla": FAULT}),
        ({"driver": {"init": 0, "version": "12.2", "devices": []}}, {"driver": FAULT}),
        ({"cuda_runtime": {"version": "13.0", "library": "x"}}, {"cuda_runtime": FAULT}),
        ({"cuda_runtime": {"missing": True}}, {"cuda_runtime": WARNING}),
        ({"pycuda": {"missing": True}}, {"pycuda": WARNING}),
        ({"pycuda": {"version": "1", "error": "ImportError"}}, {"pycuda": FAULT}),
        ({"onnxruntime": {"missing": True}}, {"onnxruntime": WARNING}),
        ({"onnxruntime": {"error": "ImportError: numpy"}}, {"onnxruntime": FAULT}),
        ({"grpc_port": {"free": False, "name": "triton", "version": "1"}}, {}),
        ({"grpc_port": {"free": False, "name": "other", "version": "1"}}, {"grpc_port": FAULT}),
        ({"grpc_port": {"free": False, "name": "triton", "version": "2"}}, {"grpc_port": FAULT}),
        ({"grpc_port": {"free": False, "error": "no"}}, {}),  # the unit is active
        ({"grpc_port": {"error": "Permission denied"}}, {"grpc_port": FAULT}),
        ({"unit": {"ActiveState": "inactive"}}, {"unit": WARNING}),
        ({"unit": {"ActiveState": "activating", "SubState": "auto-restart"}}, {"unit": FAULT}),
        ({"unit": {**_HEALTHY["unit"], "UnitFileState": "disabled"}}, {"unit": WARNING}),
        ({"unit": "no answer within 20 s"}, {"unit": WARNING}),
    ],
)
def test_one_thing_that_is_wrong_is_told_alone(
    orin: FakeBoard, answers: dict[str, Any], wrong: dict[str, Level]
) -> None:
    assert worse(evidence(orin, **answers)) == wrong


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        (lambda board: board.cooling(1, "gpu-throttle-alert", 1), {"heat": WARNING}),
        (
            lambda board: board.write("sys/class/hwmon/hwmon1/oc3_event_cnt", "7"),
            {"supply": WARNING},
        ),
        (
            lambda board: board.write("sys/class/thermal/thermal_zone1/temp", "88000"),
            {"heat": WARNING},
        ),
        (
            lambda board: board.write("proc/meminfo", "MemTotal: 7 kB\nMemAvailable: 5 kB\n"),
            {"memory": WARNING},
        ),
        (
            lambda board: [
                board.write("proc/self/cgroup", "0::/\n"),
                board.write("sys/fs/cgroup/memory.max", "134217728"),
            ],
            {"memory": FAULT},
        ),
        (lambda board: (board.root / "etc/nvpmodel.conf").unlink(), {"power_mode": WARNING}),
        (lambda board: (board.root / "etc/nv_tegra_release").unlink(), {"jetpack": WARNING}),
        (
            lambda board: board.write("etc/nv_tegra_release", "# R41 (release), REVISION: 1.0"),
            {"jetpack": WARNING},
        ),
        (
            lambda board: board.write("proc/device-tree/compatible", "nvidia,tegra194\0"),
            {"jetpack": FAULT},
        ),
        (
            lambda board: (board.root / "etc/systemd/system/edge-server.service").unlink(),
            {"unit": WARNING},
        ),
    ],
)
def test_one_file_that_is_wrong_is_told_alone(
    orin: FakeBoard, spoil: Callable[[FakeBoard], object], wrong: dict[str, Level]
) -> None:
    spoil(orin)
    known = evidence(orin)
    if "unit" in wrong:  # whose user is not looked at then
        known = replace(known, board=replace(known.board, gpu_nodes=known.board.gpu_nodes[:1]))
    assert worse(known) == wrong


@pytest.mark.parametrize("mode", [0o440, 0o600])
def test_whether_cuda_starts_as_the_daemons_user_decides_and_not_the_modes(
    orin: FakeBoard, mode: int
) -> None:
    orin.node("nvmap", mode)
    works = {**_HEALTHY["driver"], "uid": 990}
    known = evidence(orin, driver=works)
    assert worse(known) == {}
    assert told(known, "gpu_nodes").found == (
        "3 device files open to edge-server, 2 not, which CUDA does not need to start"
    )
    # As somebody else it tells nothing of that user.
    known = evidence(orin, driver={**works, "uid": 1000})
    assert worse(known) == ({} if mode == 0o440 else {"gpu_nodes": FAULT})
    assert "as edge-server it is tried by: sudo edge-server doctor" in told(known, "driver").found
    refused = {"init": 999, "uid": 990, "error": "CUDA_ERROR_UNKNOWN"}
    known = evidence(orin, driver=refused)
    assert told(known, "gpu_nodes").level is (OK if mode == 0o440 else FAULT)


@pytest.mark.parametrize("code", [100, 801, 999])
def test_a_cuda_that_may_not_open_the_gpu_means_two_groups(orin: FakeBoard, code: int) -> None:
    known = evidence(orin, driver={"init": code, "uid": 990, "error": "CUDA_ERROR_X"})
    finding = told(known, "driver")
    assert finding.level is FAULT
    assert finding.remedy.startswith("sudo usermod -aG video,render edge-server, then ")
    assert "dmesg" in finding.remedy


def test_a_driver_that_is_too_old_is_to_be_replaced(orin: FakeBoard) -> None:
    old = {"init": None, "uid": 990, "error": "the CUDA driver is too old"}
    finding = told(evidence(orin, driver=old), "driver")
    assert (finding.level, finding.found) == (FAULT, old["error"])
    assert finding.remedy == "use a newer JetPack"


def test_the_driver_is_asked_as_the_daemons_user(orin: FakeBoard) -> None:
    asked = {}

    def asks(question: Probe) -> ProbeResult:
        asked[question.function.partition(":")[2]] = question.account
        return ProbeResult()

    examine(None, orin.root, asks, NOW_S)
    account = asked.pop("driver")
    assert account is not None
    assert (account.name, account.uid) == ("edge-server", 990)
    assert set(asked.values()) == {None}


def test_the_disk_must_have_room_and_be_writable_where_models_are_followed(
    orin: FakeBoard, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[repository]\nmode = "poll"\n')
    known = evidence(orin, config)
    assert isinstance(known.disk, Disk)
    assert known.disk.directory == orin.root / "var/lib/edge_server/store"
    for change, level in (
        ({}, OK),
        ({"free_bytes": 500 << 20}, WARNING),
        ({"free_bytes": 1 << 20}, FAULT),
        ({"writable": False}, OK),  # systemd makes it when the unit starts first
        ({"writable": False, "stands": orin.root / "var/lib/edge_server"}, FAULT),
    ):
        changed = replace(known, disk=replace(known.disk, **change))
        assert told(changed, "disk").level is level, change


def test_settings_that_cannot_be_read_are_a_fault_and_what_needs_them_unknown(
    fake_board: FakeBoard,
) -> None:
    fake_board.write("etc/edge_server/config.toml", "[grpc]\nprot = 1\n")
    known = evidence(fake_board, **_DESKTOP)
    unknown = dict.fromkeys(("models", "grpc_port", "broker"), WARNING)
    assert worse(known) == {"settings": FAULT, **unknown}
    assert 'did you mean "port"?' in told(known, "settings").found
    assert "edge-server check --config" in told(known, "settings").remedy


@pytest.mark.parametrize(
    ("more", "level"),
    [
        ("[grpc]", FAULT),
        ('[grpc.tls]\nenabled = true\ncertificate = "c"\nkey = "k"\n', WARNING),
    ],
)
def test_a_taken_port_is_a_fault_unless_it_may_be_a_daemon_that_tells_nobody(
    fake_board: FakeBoard, tmp_path: Path, more: str, level: Level
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(more)
    answers = {**_DESKTOP, "grpc_port": {"free": False, "error": "failed to connect"}}
    assert worse(evidence(fake_board, config, **answers)) == {"grpc_port": level}


def test_a_broker_is_asked_only_where_one_is_configured(
    fake_board: FakeBoard, tmp_path: Path
) -> None:
    probes = Probes()
    examine(None, fake_board.root, probes, NOW_S)
    assert "broker" not in probes.asked
    assert "unit" not in probes.asked

    config = tmp_path / "config.toml"
    config.write_text('[mqtt]\nhost = "broker"\n[grpc]\nenabled = false\n')
    known = evidence(fake_board, config, **_DESKTOP, broker={"error": "Connection refused"})
    assert worse(known) == {"broker": WARNING}
    assert "broker:1883: Connection refused" in told(known, "broker").found
    assert "grpc_port" not in known.results


def test_a_check_that_fails_itself_is_a_fault_and_the_others_run(fake_board: FakeBoard) -> None:
    known = evidence(fake_board, **{**_DESKTOP, "onnxruntime": {"nothing": "expected"}})
    findings = run_checks(known)
    assert findings["onnxruntime"].level is FAULT
    assert "KeyError" in findings["onnxruntime"].found
    assert findings["unit"].level is OK


@pytest.mark.parametrize(
    ("uri", "gstreamer", "wrong"),
    [
        ("csi://0", _DESKTOP["gstreamer"], {"gstreamer": FAULT}),
        ("csi://0", {**_HEALTHY["gstreamer"], "lacking": {"csi": _NO_CSI}}, {"gstreamer": FAULT}),
        ("rtsp://camera/live", _DESKTOP["gstreamer"], {}),
        ("rtsp://camera/live", {**_HEALTHY["gstreamer"], "lacking": {"csi": _NO_CSI}}, {}),
        ("/dev/video7", _DESKTOP["gstreamer"], {"cameras": FAULT}),
    ],
)
def test_what_a_configured_camera_needs_is_a_fault_where_it_is_missing(
    fake_board: FakeBoard, uri: str, gstreamer: dict[str, Any], wrong: dict[str, Level]
) -> None:
    config = fake_board.write("etc/edge_server/config.toml", f'[cameras.front]\nuri = "{uri}"\n')
    known = evidence(fake_board, config, **{**_DESKTOP, "gstreamer": gstreamer})
    assert {name: worse(known).get(name) for name in wrong} == wrong
    assert not {"cameras", "gstreamer"} & (worse(known).keys() - wrong.keys())
    for name in wrong:
        assert "front" in told(known, name).found


def test_a_csi_camera_that_the_kernel_has_not_found_is_a_fault(orin: FakeBoard) -> None:
    config = orin.write("etc/edge_server/config.toml", '[cameras.front]\nuri = "csi://0"\n')
    known = evidence(orin, config)
    assert worse(known)["argus"] == FAULT
    assert told(known, "argus").found.startswith("the kernel has found no CSI sensor: front ")
    orin.node("video0", label="vi-output, imx219 9-0010")
    orin.write("tmp/argus_socket", "")
    assert told(evidence(orin, config), "argus").level is OK


@pytest.mark.parametrize(
    ("own", "found", "level"),
    [
        ({}, "nvme0 42 °C", OK),
        ({"error": "Permission denied"}, "nvme0 42 °C", OK),
        ({"used_percent": 7, "critical_warning": 0}, "nvme0 up to 7 % worn 42 °C", OK),
        ({"used_percent": 103, "critical_warning": 0}, "nvme0 up to 103 % worn 42 °C", WARNING),
        ({"used_percent": 3, "critical_warning": 4}, "nvme0 up to 3 % worn 42 °C", WARNING),
    ],
)
def test_the_wear_of_a_drive_is_its_own_account(
    fake_board: FakeBoard, own: dict[str, Any], found: str, level: Level
) -> None:
    plant("orin_nx_jetpack6", fake_board.root)
    finding = told(evidence(fake_board, nvme_wear={"nvme0": own}), "storage")
    assert (finding.found, finding.level) == (found, level)


@pytest.mark.parametrize(("life_time", "level"), [("0x02 0x03", OK), ("0x02 0x0b", WARNING)])
def test_a_worn_emmc_is_a_warning(fake_board: FakeBoard, life_time: str, level: Level) -> None:
    plant("agx_orin_jetpack7", fake_board.root)
    fake_board.write("sys/block/mmcblk0/device/life_time", life_time)
    assert told(evidence(fake_board), "storage").level is level


def test_a_drives_log_has_its_numbers_at_their_bytes() -> None:
    log = bytes([4, 0x2D, 0x01, 98, 10, 37, *bytes(506)])
    assert parse_smart_log(log) == {
        "critical_warning": 4,
        "spare_percent": 98,
        "spare_limit_percent": 10,
        "used_percent": 37,
    }


def test_a_supply_that_fails_is_a_warning_with_its_counters(fake_board: FakeBoard) -> None:
    plant("agx_orin_jetpack7", fake_board.root)
    finding = told(evidence(fake_board), "supply")
    assert finding.level is WARNING
    assert "undervoltage (oc1) 2 times, peak over-current (oc3) 37 times" in finding.found
    assert "VDD_GPU_SOC 6.3 W" in finding.found


def test_a_board_whose_sensors_hang_is_a_warning(fake_board: FakeBoard) -> None:
    known = evidence(fake_board)
    known = replace(known, board=replace(known.board, facts=None))
    assert told(known, "heat").level is WARNING
    assert told(known, "memory").found == "not known here"
