"""`check` finds what `run` would trip over, all of it in one go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from edge_server.cli.check import Findings, check, unseen_by_service
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.certificates import Authority
    from support.model_folders import WriteModel

IDENTITY = """
backend: "identity"
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
"""


# Any port: the usual ones may be taken on this machine.
PORTS: dict[str, Any] = {"grpc": {"port": 0}, "metrics": {"port": 0}, "http": {"port": 0}}


def checked(**sections: Any) -> Findings:
    for name, keys in PORTS.items():
        sections[name] = {**keys, **sections.get(name, {})}
    return check(read_settings(None, sections))


def check_with(repository: Path, **sections: Any) -> list[str]:
    findings = checked(repository={"paths": [str(repository)]}, **sections)
    assert not findings.faults
    assert not findings.unavailable
    return findings.well


def faults_of(repository: Path, **sections: Any) -> list[str]:
    return checked(repository={"paths": [str(repository)]}, **sections).faults


@pytest.mark.parametrize("paths", [["nothing"], []])
def test_a_repository_without_models_is_reported(tmp_path: Path, paths: list[str]) -> None:
    folders = [tmp_path / path for path in paths]
    for folder in folders:
        folder.mkdir()
    (line,) = checked(repository={"paths": [str(folder) for folder in folders]}).well
    assert line.startswith("warning: no models in ")
    assert all(str(folder) in line for folder in folders)


def test_faults_of_every_kind_are_reported_together(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("broken", "no such field")
    write_model("echo", IDENTITY)
    findings = checked(
        repository={"paths": [str(repository)]},
        cameras={
            "front": {"uri": "nowhere.mp4", "model": "echo"},
            "rear": {"uri": "synthetic://road", "model": "absent"},
            "side": {"uri": "foo://road", "model": "echo"},
        },
        mqtt={"host": "localhost", "password_file": "secret"},
    )
    model, front_model, side_model, side_uri, mqtt = findings.faults
    # Recordings and models may still come: `run` ends with 69 for them.
    front_uri, rear_model = findings.unavailable
    assert "broken" in model
    assert front_model.startswith("cameras.front.model: 'echo' gives no lanes: ")
    assert front_uri.startswith("cameras.front.uri: ")
    assert side_model.startswith("cameras.side.model: 'echo' gives no lanes: ")
    assert side_uri.startswith("cameras.side.uri: foo://road: unknown kind of source")
    assert rear_model.startswith("cameras.rear.model: 'absent' gives no lanes: ")
    assert rear_model.endswith(
        "; put it into a repository, and in mode explicit into repository.load (--load-model)"
    )
    assert mqtt == "mqtt: password_file needs a username beside it"


def test_a_camera_is_not_blamed_for_a_model_that_is_faulty_itself(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("broken", "no such field")
    findings = checked(
        repository={"paths": [str(repository)]},
        cameras={"front": {"uri": "synthetic://road", "model": "broken"}},
    )
    assert len(findings.faults) == 1
    assert not findings.unavailable
    assert not findings.well


def test_a_live_camera_that_gives_no_frames_is_a_warning_with_the_remedy(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("echo", IDENTITY)
    findings = checked(
        repository={"paths": [str(repository)]},
        cameras={"front": {"uri": "/dev/video999", "model": "echo"}},
    )
    (camera,) = (line for line in findings.well if "front" in line)
    assert camera.startswith("warning: camera front: /dev/video999: no such device; ")
    assert camera.endswith("; the daemon goes on, and opens it again")


def test_a_camera_is_not_blamed_for_a_repository_that_is_not_there(tmp_path: Path) -> None:
    findings = checked(
        repository={"paths": [str(tmp_path / "absent")]},
        cameras={"front": {"uri": "synthetic://road"}},
    )
    (reported,) = findings.unavailable
    assert "model repository cannot be read" in reported
    assert not findings.faults


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"username": "me", "password_file": "absent"}, "mqtt.password_file: "),
        ({"username": "me", "password_file": "latin1"}, "mqtt.password_file: "),
        ({"ca_file": "absent"}, "mqtt.ca_file: "),
        ({"ca_file": "latin1"}, "mqtt.ca_file: "),
        (
            {"ca_file": "ca", "cert_file": "absent", "key_file": "latin1"},
            "mqtt.cert_file, mqtt.key_",
        ),
        (
            {"ca_file": "ca", "cert_file": "ca", "key_file": "latin1"},
            "mqtt.cert_file, mqtt.key_file: ",
        ),
    ],
)
def test_the_brokers_files_are_read(
    tmp_path: Path, authority: Authority, files: dict[str, str], message: str
) -> None:
    (tmp_path / "latin1").write_bytes(b"\xe4")
    (tmp_path / "ca").write_bytes(authority.ca.read_bytes())
    (tmp_path / "models").mkdir()
    mqtt = {k: str(tmp_path / v) if k.endswith("_file") else v for k, v in files.items()}
    (fault,) = faults_of(tmp_path / "models", mqtt={"host": "localhost", **mqtt})
    assert fault.startswith(message)
    assert str(tmp_path) in fault


def test_good_models_are_reported_beside_a_faulty_one(
    repository: Path, write_model: WriteModel
) -> None:
    write_model("echo", IDENTITY)
    write_model("broken", "no such field")
    findings = checked(repository={"paths": [str(repository)]})
    assert findings.well == ["model echo version 1: READY, config.pbtxt on CPU"]
    (fault,) = findings.faults
    assert "broken" in fault


def test_certificates_are_tried(repository: Path, authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    tls = {"enabled": True, "certificate": str(certificate), "key": str(key)}
    found = check_with(repository, grpc={"tls": tls})
    assert f"grpc: {certificate} is shown to clients" in found
    tls["key"] = str(tmp_path / "gone")
    (fault,) = faults_of(repository, grpc={"tls": tls})
    assert fault.startswith(f"grpc.tls.key: {tmp_path}/gone: cannot be read")


def test_where_traces_cannot_be_written_is_reported(
    repository: Path, write_model: WriteModel, tmp_path: Path
) -> None:
    write_model("echo", IDENTITY)
    (fault,) = faults_of(repository, trace={"file": str(tmp_path)})
    assert fault.startswith(f"trace.file: {tmp_path}: Is a directory; ")
    path = tmp_path / "trace.json"
    lines = check_with(repository, trace={"file": str(path)})
    assert f"trace: {path} can be written" in lines
    assert not path.exists()


def test_where_the_log_cannot_be_written_is_reported(repository: Path, tmp_path: Path) -> None:
    (fault,) = faults_of(repository, log={"file": str(tmp_path)})
    assert fault == f"log.file: {tmp_path}: cannot be written: Is a directory"
    path = tmp_path / "gone" / "edge.log"
    (may_come,) = checked(
        repository={"paths": [str(repository)]}, log={"file": str(path)}
    ).unavailable
    assert may_come == f"log.file: {path}: cannot be written: No such file or directory"
    path.parent.mkdir()
    assert f"log: {path} can be written" in check_with(repository, log={"file": str(path)})
    assert not path.exists()


def test_where_the_socket_cannot_be_is_reported(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "run" / "grpc.sock"
    settings = {
        "repository": {"paths": [str(repository)]},
        "grpc": {"port": 0, "socket": str(path)},
    }
    (may_come,) = checked(**settings).unavailable
    assert may_come.startswith(f"grpc.socket: {path.parent}: No such file or directory; make the")
    path.parent.mkdir()
    assert f"grpc: the socket can be at {path}" in checked(**settings).well
    assert not list(path.parent.iterdir())
    path.write_text("precious")
    (fault,) = checked(**settings).faults
    assert "is there and is no socket" in fault


def test_only_the_models_of_the_start_are_loaded(repository: Path, write_model: WriteModel) -> None:
    write_model("echo", IDENTITY)
    write_model("broken", "no such field")
    settings = {"paths": [str(repository)], "mode": "explicit"}
    (line,) = checked(repository={**settings, "load": ["echo"]}).well
    assert line == "model echo version 1: READY, config.pbtxt on CPU"
    (line,) = checked(repository=settings).well
    assert line.startswith("warning: mode explicit and no --load-model")
    (reported,) = checked(repository={**settings, "load": ["absent"]}).unavailable
    assert "absent" in reported
    (fault,) = checked(repository={**settings, "load": ["*"]}).faults
    assert "broken" in fault


def test_what_a_configuration_may_leave_out_is_as_chosen(
    repository: Path, write_model: WriteModel, write_onnx: Callable[..., None]
) -> None:
    write_onnx(write_model("add", "") / "1" / "model.onnx")
    settings = {"paths": [str(repository)]}
    assert not checked(repository=settings).faults
    (fault,) = checked(repository={**settings, "auto_complete": False}).faults
    assert "add" in fault


def test_what_lies_in_a_home_is_out_of_the_services_sight() -> None:
    cameras = {
        "clip": {"uri": "file:///home/me/road.mp4?loop=true", "calibration": "/root/front.toml"},
        "road": {"uri": "synthetic://road", "calibration": "/etc/edge_server/front.toml"},
        "wrong": {"uri": "file://?"},
    }
    paths = ["/home/me/models", "/srv/models"]
    settings = read_settings(None, {"repository": {"paths": paths}, "cameras": cameras})
    hint = "; the service cannot read home directories: put it below /srv"
    assert list(unseen_by_service(settings)) == [
        f"warning: repository.paths: /home/me/models{hint}",
        f"warning: cameras.clip.uri: /home/me/road.mp4{hint}",
        f"warning: cameras.clip.calibration: /root/front.toml{hint}",
    ]


def test_an_interpreter_for_a_model_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    chosen = {"model_interpreters": {"preproces": "/opt/python"}}
    lines = check_with(tmp_path / "models", python=chosen)
    assert any("python.model_interpreters.preproces: no repository" in line for line in lines)
