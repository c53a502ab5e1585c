"""The command line is light, and each kind of failure has its exit code."""

from __future__ import annotations

import errno
import os
import pwd
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from edge_server import errors
from edge_server.cli.flags import GROUPS
from edge_server.cli.main import command_line, run_command
from edge_server.cli.run import choose_file
from edge_server.cli.verbs import report


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"edge-server \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_a_wrong_flag_is_a_usage_error_and_names_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, message in (
        (["run", "--grpc-prot", "1"], "did you mean --grpc-port?"),
        (["run", "--model-repo=/m"], "did you mean --model-repository?"),
        (["demo", "--fames", "1"], "did you mean --frames?"),
        (["check", "8001"], "unknown argument 8001"),
        (["demo", "--frames", "0"], "--frames: 0: give a whole number, 1 or above"),
        (["demo", "--frames", "many"], "--frames: many: give a whole number, 1 or above"),
    ):
        with pytest.raises(SystemExit) as caught:
            run_command(arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


class Interrupted(ModuleType):
    """A module that a user interrupts while it is imported."""

    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_an_interrupt_while_a_verb_imports_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "edge_server.cli.infer"
    monkeypatch.setitem(sys.modules, name, Interrupted(name))
    assert run_command(["infer", "net", "--image", "road.png"]) == 130


class Closed(ModuleType):
    """A module that looks at a path in a directory which this user may not enter."""

    def __getattr__(self, name: str) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", "/srv/closed/net")


def test_a_path_that_is_closed_to_the_user_is_named_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "edge_server.cli.infer"
    monkeypatch.setitem(sys.modules, name, Closed(name))
    assert run_command(["infer", "net", "--image", "road.png"]) == 69
    assert capsys.readouterr().err == "edge-server: /srv/closed/net: Permission denied\n"


def test_provisioning_a_device_that_cannot_be_written_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "edge-server.toml"
    file.write_text('[device]\nid = "truck-7"\n')
    config = tmp_path / "missing/config.toml"
    flags = [f"--{name}={path}" for name, path in (("config", config), ("data", tmp_path))]
    assert run_command(["provision", str(file), *flags]) == 69
    error = capsys.readouterr().err
    assert "missing/.provision-" in error
    assert "cannot be written: No such file or directory" in error


def help_of(verb: str, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        run_command([verb, flag])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", ["run", "check"])
def test_help_groups_what_can_be_chosen_with_defaults_and_an_example(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = help_of(verb, "--help", capsys)
    for output in ("Model repository:", "gRPC:", "Metrics:", "(default: 8001)", "(default: none)"):
        assert output in text
    assert f"edge-server {verb} --model-repository models --camera front=road.mp4" in text
    assert "no effect: " not in text
    assert "--http-thread-count" not in text
    assert "Deprecated:" not in text
    assert len(text.splitlines()) < 120


def test_the_rest_of_tritonservers_flags_has_a_help_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = help_of("run", "--help-triton", capsys)
    for output in (
        "--http-thread-count",
        "no effect: ",
        "only false: ",
        "Deprecated:",
        "(default: 8001)",
    ):
        assert output in text
    for flags in GROUPS.values():
        for flag in flags:
            assert f"--{flag.name}" in text


def test_check_reports_of_flags_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = ["--grpc-port=0", "--metrics-port=0", "--http-port=0"]
    arguments = ["--model-repository", str(tmp_path), "--cache-directory", "/opt", *ports]
    assert run_command(["check", *arguments]) == 0
    assert "note: --cache-directory=/opt has no effect: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "is_there", "config", "what"),
    [
        ([], True, "service.toml", "settings: {}/service.toml"),
        ([], False, None, "settings: the flags and the defaults; --config names a file"),
        (["--config", "own.toml"], True, "own.toml", "settings: own.toml"),
        (
            ["--grpc-port=0"],
            True,
            None,
            "settings: the flags alone; those of the service: --config {}/service.toml",
        ),
    ],
)
def test_check_without_a_flag_takes_the_settings_of_the_service(
    tmp_path: Path, flags: list[str], is_there: bool, config: str | None, what: str
) -> None:
    installed = tmp_path / "service.toml"
    if is_there:
        installed.touch()
    arguments = command_line().parse_args(["check", *flags])
    assert choose_file(arguments, installed, "no-such-user") == what.format(tmp_path)
    assert (arguments.config and arguments.config.name) == config


def test_check_says_when_its_rights_are_not_those_of_the_service(tmp_path: Path) -> None:
    installed = tmp_path / "service.toml"
    installed.write_text("")

    def settings_line(user: str) -> str:
        return choose_file(command_line().parse_args(["check"]), installed, user)

    other = next(each.pw_name for each in pwd.getpwall() if each.pw_uid != os.geteuid())
    me = pwd.getpwuid(os.geteuid()).pw_name
    assert settings_line(other).endswith(f"those of the service: sudo -u {other} edge-server check")
    assert settings_line(me) == f"settings: {installed}"


# systemd restarts the daemon after every code but 2 and 78.
CODES = {
    "EdgeServerError": 1,
    "SettingsError": 78,
    "ModelConfigError": 78,
    "ModelLoadError": 69,
    "InvalidRequest": 78,
    "NotFound": 1,
    "Unavailable": 69,
    "Unsupported": 78,
    "AlreadyExists": 1,
    "OutOfRange": 1,
    "LimitReached": 1,
    "PermissionDenied": 1,
    "Unauthenticated": 1,
    "DeadlineExceeded": 1,
    "Cancelled": 1,
    "InternalError": 1,
    "UnknownError": 1,
    "AlreadyRunning": 75,
    "SourceError": 69,
    "SourceUriError": 78,
    "StageStuck": 87,
    "DeviceLost": 86,
}


def test_every_kind_of_error_has_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    classes = {k: v for k, v in vars(errors).items() if isinstance(v, type)}
    kinds = {name: each for name, each in classes.items() if issubclass(each, Exception)}
    assert {name: report(kind("why")) for name, kind in kinds.items()} == CODES
    assert capsys.readouterr().err == "edge-server: why\n" * len(CODES)


def test_what_stays_and_what_may_pass_agree_with_the_exit_codes() -> None:
    for name, code in CODES.items():
        if name != "EdgeServerError":
            assert errors.may_pass(getattr(errors, name)()) is (code != 78), name


def test_an_error_of_a_room_has_the_code_of_its_kind() -> None:
    class TornModel(errors.ModelLoadError):
        pass

    assert report(TornModel("torn")) == 69


def test_the_unit_restarts_after_every_code_but_those_that_stay() -> None:
    unit = (Path(__file__).parents[3] / "systemd/edge-server.service").read_text()
    assert "\nRestart=on-failure\n" in unit
    assert "\nRestartPreventExitStatus=2 78\n" in unit
    assert "\nStartLimitIntervalSec=0\n" in unit


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("broker", {"host": "broker"}),
        ("broker:1884", {"host": "broker", "port": 1884}),
        ("10.0.0.2:1", {"host": "10.0.0.2", "port": 1}),
        ("::1", {"host": "::1"}),
        ("fe80::1%eth0", {"host": "fe80::1%eth0"}),
        ("[::1]", {"host": "::1"}),
        ("[::1]:1884", {"host": "::1", "port": 1884}),
    ],
)
def test_an_address_is_a_host_and_perhaps_a_port(text: str, address: dict[str, object]) -> None:
    from edge_server.cli.flags import values

    assert values.address(text) == address


@pytest.mark.parametrize("text", ["", ":1", "host:", "host:1:2", "[::1", "[]:1", "::1]:1", "[a]1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    from edge_server.cli.flags import values

    with pytest.raises(ValueError, match="give it as HOST, HOST:PORT or"):
        values.address(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('device = "truck-7"', "device: "),
        ("repository = 5", "repository: "),
        ("grpc = 5", "grpc: "),
        ("log = true", "log: "),
        ("cameras = 3", "cameras: "),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--device-id", "a", "--grpc-port", "1", "--camera", "a=b"]])
def test_a_value_in_the_place_of_a_table_is_a_fault_whatever_the_flags(
    tmp_path: Path, line: str, message: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(line)
    arguments = ["check", "--config", str(path), "--model-repository", str(tmp_path), *flags]
    assert run_command(arguments) == 78
    assert f"{path}: {message}expected a table" in capsys.readouterr().err


def test_a_flag_is_not_blamed_on_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[grpc]\nport = 9001\n")
    assert run_command(["check", "--config", str(path), "--grpc-port", "99999"]) == 78
    assert (
        "command line: grpc.port: expected a whole number <= 65535; got 99999"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["bnch", "m"], "unknown verb bnch; did you mean bench?"),
        (["models", "lst"], "unknown verb models lst; did you mean list?"),
        (["xyzzy"], "unknown verb xyzzy; there are run, check, models,"),
    ],
)
def test_an_unknown_verb_gets_the_nearest_or_all(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(words)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
