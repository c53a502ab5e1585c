"""The daemon's configuration: an error names file, key and remedy; flags win over the file."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from edge_server.errors import SettingsError
from edge_server.settings import Settings, read_settings
from edge_server.settings.read import read_text_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_defaults_serve_the_loopback_and_publish_nowhere() -> None:
    settings = read_settings(None, {})
    assert (settings.grpc.host, settings.grpc.port) == ("127.0.0.1", 8001)
    assert settings.mqtt is None
    assert settings.cameras == {}


def test_a_whole_file_is_read(path: Path) -> None:
    path.write_text(
        '[device]\nid = "truck-7"\n[repository]\npaths = ["a", "b"]\nmode = "none"\n'
        '[grpc]\nhost = "::1"\nport = 9001\n[mqtt]\nhost = "broker"\n'
        '[cameras.front]\nuri = "road.mp4"\n[cameras.rear]\nuri = "x"\nmodel = "other"\n'
    )
    settings = read_settings(path, {})
    assert settings.device.id == "truck-7"
    assert settings.repository.paths == ("a", "b")
    assert settings.mqtt is not None
    assert settings.mqtt.port == 1883
    assert settings.cameras["front"].model == "lane_detection"
    assert settings.cameras["rear"].model == "other"


def test_the_command_line_wins_key_by_key(path: Path) -> None:
    path.write_text('[grpc]\nhost = "::1"\nport = 9001\n[cameras.front]\nuri = "a"\n')
    settings = read_settings(path, {"grpc": {"port": 1}, "cameras": {"rear": {"uri": "b"}}})
    assert (settings.grpc.host, settings.grpc.port) == ("::1", 1)
    assert settings.cameras.keys() == {"front", "rear"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[grpc]\nprot = 3", 'grpc.prot: unknown key; did you mean "port"?'),
        ("[gprc]\nport = 3", 'gprc: unknown key; did you mean "grpc"?'),
        ('[cameras.front]\nurl = "x"', 'cameras.front.url: unknown key; did you mean "uri"?'),
        (
            '[cameras.front]\nuri = "x"\n[python]\ninterpreters = { torch = "x" }',
            "python.interpreters.torch: unknown key; "
            "known: python, pytorch, tensorflow, openvino, paddle",
        ),
        (
            '[cameras.front]\nuri = "x"\n[python]\ninterpreters = { pytorch = 1 }',
            "python.interpreters",
        ),
        (
            '[repository]\npaths = ["s3://fleet/models"]',
            "s3://fleet/models: models are served from local disks; `edge-server models pull`",
        ),
        ('[cameras.Front]\nuri = "x"', "a name has at most 64 of a-z, 0-9, '_' and '-'; got: Fro"),
        ('[cameras."front\\n"]\nuri = "x"', "a name has at most 64 of a-z, 0-9, '_' and '-'"),
        ('[device]\nid = "truck-7\\n"', r"device.id: expected at most 64 of a-z, 0-9, "),
        ('[grpc]\nport = "3"', 'grpc.port: expected a whole number; got "3"'),
        ("[grpc]\nport = 99999", "grpc.port: expected a whole number <= 65535; got 99999"),
        ('[grpc]\nhost = "0.0.0.0"', "grpc: 0.0.0.0 is beyond the loopback"),
        ('[grpc]\nhost = "vehicle.local"', "set insecure = true (--grpc-insecure)"),
        (
            '[mqtt]\nhost = "broker"\nusername = "me"\npassword_file = "p"',
            "mqtt: broker is beyond the loopback, and the password would cross the network in "
            "plain text; encrypt it with ca_file, or set insecure = true",
        ),
        ('[mqtt]\nhost = "b"\nvehicle_state = true', "anybody on the network withhold warnings"),
        ('[mqtt]\nhost = "b"\ncert_file = "c"', "mqtt: cert_file and key_file belong together"),
        ('[mqtt]\nhost = "b"\ncert_file = "c"\nkey_file = "k"', "mqtt: cert_file needs ca_file"),
        ("[mqtt]\nport = 3", "mqtt.host: is missing, and has no default"),
        (
            '[repository]\nmode = "always"',
            "repository.mode: expected one of none, explicit, poll; got 'always'",
        ),
        (
            "[repository]\nmode = 'poll'\n[repository.channels.lanes]\nsource = 'oci://r/lanes'\n"
            "keys = ['k']",
            "repository.channels.lanes.source: expected oci://REGISTRY/REPOSITORY:TAG",
        ),
        (
            "[repository.channels.lanes]\nsource = 'oci://r/lanes:stable'\nkeys = ['k']",
            'channels need mode = "poll"',
        ),
        (
            "[repository.channels.lanes]\nsource = 'oci://r/lanes:stable'\nkeys = []",
            "repository.channels.lanes.keys: ",
        ),
        ("[repository.channels.Lanes]\nsource = ''", "repository.channels: a name has at most 64"),
        (
            "[cameras.a]\nuri = 'x'\n[cameras.b]\nmodel = 'x'",
            "cameras.b.uri: is missing, and has no default",
        ),
        ("cameras.a.uri = 'x'\ncameras.b = 3", "cameras.b: expected a table; got 3"),
        (
            "[cameras.a]\nuri = 'x'\n[cameras.b]\nuri = 'x'\n[cameras.b.networks.s]\nmodel = 'm'\n"
            "[cameras.b.networks.t]\nmodel = 'm'\nmax_hz = -1",
            "cameras.b.networks.t.max_hz: expected a number >= 0",
        ),
        (
            "[cameras.a]\nuri = 'x'\n[cameras.a.networks.s]\nmodels = 'm'",
            'cameras.a.networks.s.models: unknown key; did you mean "model"?',
        ),
        (
            "[cameras.a]\nuri = 'x'\n[cameras.a.networks.S]\nmodel = 'm'",
            "a name has at most 64 of a-z, 0-9, '_' and '-'; got: S",
        ),
        (
            "[cameras.a]\nuri = 'x'\n[cameras.a.networks.s]\nmodel = 'm'\nregion = 'left'",
            'cameras.a.networks.s.region: expected "road", or x,y,width,height',
        ),
        (
            "[cameras.a]\nuri = 'x'\nmodel = ''",
            "cameras.a: model is empty, and there are no networks: nothing would look at the",
        ),
        (
            "[cameras.a]\nuri = 'x'\nmodel = ''\n[cameras.a.networks.s]\nmodel = 'm'\n"
            "shadow_of = 'lanes'",
            "cameras.a: networks.s.shadow_of: the camera has no lanes to compare with",
        ),
        (
            "[cameras.a]\nuri = 'x'\n[cameras.a.networks.lanes]\nmodel = 'm'",
            "`lanes` is the network of the camera's own model; give another one another name",
        ),
        (
            "[cameras.a]\nuri = 'x'\nreader = 'ffmpeg'",
            "cameras.a.reader: expected one of auto, gstreamer, opencv; got 'ffmpeg'",
        ),
        (
            "[cameras.a]\nuri = 'x'\ncolor_range = 'wide'",
            "cameras.a.color_range: expected one of limited, full; got 'wide'",
        ),
        (
            "[cameras.a]\nuri = 'x'\npriority = 0",
            "cameras.a.priority: expected a whole number >= 1",
        ),
        (
            "[cameras.a]\nuri = 'x'\nmax_age_ms = 2000",
            "cameras.a.max_age_ms: expected a whole number <= 1000; got 2000",
        ),
        (
            '[device]\nid = "A b"',
            "device.id: expected at most 64 of a-z, 0-9, '_' and '-'; got \"A b\"",
        ),
        ("grpc", "not TOML"),
    ],
)
def test_each_mistake_names_the_file_and_the_key(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings(path, {})
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    for make, why in (
        (lambda: None, "No such file"),
        (lambda: path.symlink_to(path), "Too many levels"),
        (lambda: (path.unlink(), path.mkdir()), "Is a directory"),
    ):
        make()
        with pytest.raises(SettingsError, match=rf"config\.toml: cannot be read: {why}"):
            read_settings(path, {})


def test_an_empty_file_is_refused_and_a_comment_is_the_defaults(path: Path) -> None:
    path.touch()
    with pytest.raises(
        SettingsError, match=r"config\.toml: is empty, as a file that was cut short"
    ):
        read_settings(path, {})
    path.write_text("# The defaults.\n")
    assert read_settings(path, {}) == Settings() == read_settings(Path("/dev/null"), {})


def test_a_byte_order_mark_is_no_mistake(path: Path) -> None:
    path.write_text('\ufeff[device]\nid = "truck-7"\n')
    assert read_settings(path, {}).device.id == "truck-7"


def test_a_table_that_is_nested_without_end_is_a_mistake(path: Path) -> None:
    path.write_text(f"a = {'[' * 10_000}{']' * 10_000}")
    with pytest.raises(SettingsError, match=r"config\.toml: not TOML"):
        read_settings(path, {})


@pytest.mark.parametrize("line", ["x = ", "[serving]\nexit_timeout_s = "])
def test_a_number_that_is_longer_than_python_converts_is_a_mistake(path: Path, line: str) -> None:
    path.write_text(line + "1" * 5000)
    with pytest.raises(SettingsError, match="not TOML for settings: a number is too long"):
        read_settings(path, {})


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[mqtt]\nca_file = "a\\u0000b"\nhost = "x"\n', "mqtt.ca_file"),
        ('[repository]\npaths = ["a", "\\u0000"]\n', "repository.paths"),
        ('[cameras.front]\nuri = "/dev/video\\u0000"\n', "cameras.front.uri"),
    ],
)
def test_a_text_that_no_call_of_the_system_takes_is_a_mistake(
    path: Path, text: str, key: str
) -> None:
    path.write_text(text)
    with pytest.raises(SettingsError, match=rf"{key}: holds the character NUL.*line 2"):
        read_settings(path, {})


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(SettingsError, match="/dev/zero: cannot be read: it is longer than 16 MiB"):
        read_settings(Path("/dev/zero"), {})


def test_a_pipe_is_read_where_it_has_a_writer_and_else_refused(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(OSError, match="its writer is late"):
        read_text_file(path, wait_s=0.01)
    writer = threading.Thread(target=path.write_text, args=('[device]\nid = "truck-7"\n',))
    writer.start()
    assert read_settings(path, {}).device.id == "truck-7"
    writer.join()


def test_what_the_command_line_adds_may_complete_a_table_of_the_file(path: Path) -> None:
    path.write_text('[mqtt]\nusername = "me"\n')
    settings = read_settings(path, {"mqtt": {"host": "broker"}})
    assert settings.mqtt is not None
    assert (settings.mqtt.host, settings.mqtt.username) == ("broker", "me")


def test_a_mistake_is_blamed_on_where_it_was_made(path: Path) -> None:
    path.write_text("[grpc]\nport = 9001\n")
    with pytest.raises(SettingsError, match=r"^command line: grpc\.port: "):
        read_settings(path, {"grpc": {"port": -1}})
    path.write_text('[cameras.Front]\nuri = "a"\n')
    with pytest.raises(SettingsError, match=r"config\.toml: cameras: a name .*; got: Front$"):
        read_settings(path, {"cameras": {"rear": {"uri": "b"}}})
    path.write_text("[grpc]\nprot = 9001\n")
    with pytest.raises(SettingsError, match=r"config\.toml: grpc\.prot: unknown key"):
        read_settings(path, {"grpc": {"port": 1}})


@pytest.mark.parametrize("table", ["device", "grpc", "cameras"])
def test_flags_do_not_hide_a_value_in_the_place_of_a_table(path: Path, table: str) -> None:
    path.write_text(f"{table} = 3\n")
    with pytest.raises(SettingsError, match=f"{table}: expected a table"):
        read_settings(path, {table: {}})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_the_loopback_needs_no_leave(host: str) -> None:
    assert read_settings(None, {"grpc": {"host": host}}).grpc.host == host


def test_plain_text_beyond_the_loopback_is_served_where_it_is_requested_by_name() -> None:
    reported = {"host": "0.0.0.0", "insecure": True, "control": "off"}  # noqa: S104
    assert read_settings(None, {"grpc": reported}).grpc.insecure


@pytest.mark.parametrize("trust", [{"insecure": True}, {"tls": {"enabled": True}}])
@pytest.mark.parametrize("control", [{}, {"control": "everywhere"}])
def test_control_beyond_the_loopback_has_no_effect_without_certificates_or_tokens(
    trust: dict[str, Any], control: dict[str, str]
) -> None:
    files = {"certificate": "c", "key": "k", "client_ca": "a"}
    grpc = {"host": "192.168.1.2", "socket": "/run/s", **control}
    known = {"tls": {**files, "enabled": True}} if "tls" in trust else trust

    def notes(settings: dict[str, Any], **others: Any) -> list[str]:
        found = read_settings(None, {"grpc": settings, **others}).without_effect()
        return [line for line in found if line.startswith("grpc.control")]

    (note,) = notes({**grpc, **known})
    assert "on grpc, as 192.168.1.2 is beyond the loopback" in note
    assert "[access] tokens_file" in note
    assert "mutual in [grpc.tls]" in note
    for confined in ("unix", "off"):
        assert notes({**grpc, **known, "control": confined}) == []
    assert notes({**grpc, "tls": {**files, "mutual": True}}) == []
    assert notes({**grpc, **known}, access={"tokens_file": "/etc/tokens"}) == []
    assert notes({**grpc, "host": "127.0.0.1"}) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[grpc.tls]\ncertificat = 'x'", 'grpc.tls.certificat: unknown key; did you mean "certi'),
        ("[grpc.tls]\nenabled = true", "grpc.tls: TLS needs certificate and key (of gRPC: --grpc"),
        (
            "[grpc.tls]\nmutual = true\ncertificate = 'c'\nkey = 'k'",
            "grpc.tls: mutual TLS needs client_ca (of gRPC: --grpc-root-cert)",
        ),
        ('[grpc]\ncontrol = "unix"', 'control = "unix" needs a socket (--grpc-socket)'),
        (f'[grpc]\nsocket = "/{"x" * 107}"', "grpc: socket: the path must have 1 to 107 bytes"),
        (
            "[grpc]\nmax_connections = 0",
            "max_connections: expected a whole number >= 1; got 0",
        ),
        (
            '[[grpc.restricted]]\nprotocols = ["healt"]\nheader = "h"\nvalue = "v"',
            "grpc.restricted[0].protocols[0]: unknown restricted protocol 'healt'; known: health, ",
        ),
        (
            '[[http.restricted]]\nprotocols = ["healt"]\nheader = "h"\nvalue = "v"',
            "http.restricted[0].protocols[0]: unknown restricted api 'healt'; known: health, ",
        ),
        (
            '[[http.restricted]]\nprotocols = ["health", "health"]\nheader = "h"\nvalue = "v"',
            "restricted api 'health' can not be specified in multiple config groups",
        ),
        (
            '[[grpc.restricted]]\nprotocols = ["health", "health"]\nheader = "h"\nvalue = "v"',
            "restricted protocol 'health' can not be specified in multiple config groups",
        ),
        ('[[grpc.restricted]]\nprotocol = ["health"]', 'did you mean "protocols"?'),
        ("[grpc]\nport = 8002", "grpc.port and metrics.port are both 8002"),
        ("[http]\nport = 8001", "grpc.port and http.port are both 8001"),
        ('[http]\nhost = "0.0.0.0"', "http: 0.0.0.0 is beyond the loopback"),
        ('[trace]\nlevel = ["OFF", "TENSORS"]', "trace: Expect only one trace level 'OFF'"),
        ('[metrics]\nhost = "0.0.0.0"', "metrics: 0.0.0.0 is beyond the loopback"),
        ('[repository]\nload = ["*", "a"]', "repository: Wildcard model name '*' must be the ONLY"),
        ('[trace]\nlevel = ["TENSORS"]', "trace: level TENSORS is not supported: no tensors are"),
        (
            '[serving]\nrate_limit = "on"',
            "serving.rate_limit: expected one of off, execution_count; got 'on'",
        ),
        ('[[serving.rate_limit_resources]]\nnam = "x"', 'did you mean "name"?'),
    ],
)
def test_settings_that_do_not_fit_together_are_named(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings(path, {})
    assert message in str(caught.value)


def test_tls_needs_no_leave_beyond_the_loopback() -> None:
    tls = {"enabled": True, "certificate": "c", "key": "k"}
    reported = {"host": "0.0.0.0", "tls": tls, "control": "off"}  # noqa: S104
    assert read_settings(None, {"grpc": reported}).grpc.tls.on


def test_metrics_beyond_the_loopback_are_nobodys_fault_where_there_are_none() -> None:
    metrics = {"enabled": False, "host": "0.0.0.0"}  # noqa: S104
    assert not read_settings(None, {"metrics": metrics}).metrics.enabled


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"repository": {"load": ["a"]}}, "repository.load: no effect"),
        (
            {"serving": {"rate_limit_resources": [{"name": "R", "count": 1}]}},
            "serving.rate_limit_resources: no effect",
        ),
        ({"grpc": {"tls": {"certificate": "c"}}}, "grpc.tls: no effect"),
        (
            {"grpc": {"tls": {"enabled": True, "certificate": "c", "key": "k", "client_ca": "a"}}},
            "grpc.tls.client_ca: no effect",
        ),
        ({"trace": {"level": ["TIMESTAMPS"]}}, "trace.level: no effect: no trace.file"),
    ],
)
def test_what_means_nothing_beside_the_rest_is_reported(chosen: dict, message: str) -> None:
    (line,) = read_settings(None, chosen).without_effect()
    assert line.startswith(message)


def test_the_defaults_leave_nothing_to_report() -> None:
    assert read_settings(None, {}).without_effect() == []


@pytest.mark.parametrize(
    ("text", "hidden", "message"),
    [
        (
            '[[grpc.restricted]]\nprotocols = ["health"]\nheader = "a"\nvalue = ["hunter2"]',
            "hunter2",
            "grpc.restricted[0].value: expected a text in quotes",
        ),
        ('grpc.restricted = "health:a=hunter2"', "hunter2", "grpc.restricted: expected a list"),
        (
            'cameras.front = "rtsp://me:hunter2@10.0.0.2/1"',
            "hunter2",
            'cameras.front: expected a table; got "rtsp://…@10.0.0.2/1"',
        ),
        (
            'cameras.front.uri = ["rtsp://me:hun@ter2@10.0.0.2/1"]',
            "ter2",
            'cameras.front.uri: expected a text in quotes; got ["rtsp://…@10.0.0.2/1"]',
        ),
        ('cameras.front = "rtsp://me:hunter 2/@[::1]/1"', "hunter", '"rtsp://…@[::1]/1"'),
        (
            'cameras.front = {uri = "x", reader = "rtsp://me:hunter2@10.0.0.2/1"}',
            "hunter2",
            "cameras.front.reader: expected one of auto, gstreamer, opencv; got 'rtsp://…@10",
        ),
        ('cameras."rtsp://me:hunter2@10.0.0.2/1".uri = "x"', "hunter2", "got: rtsp://…@10.0.0.2/1"),
        ('"rtsp://me:hunter2@10.0.0.2/1" = "x"', "hunter2", "unknown key"),
        (f'grpc.port = "{"x" * 1000}"', "x" * 100, "grpc.port: expected a whole number; got"),
    ],
)
def test_a_secret_or_a_long_value_is_not_printed_in_full(
    tmp_path: Path, text: str, hidden: str, message: str
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings(path, {})
    assert message in str(caught.value)
    assert hidden not in str(caught.value)


@pytest.mark.parametrize(
    "mqtt",
    [
        {"host": "broker", "ca_file": "ca"},
        {"host": "broker", "insecure": True},
        {"host": "127.0.0.1"},
        {"host": "localhost"},
    ],
)
def test_a_password_goes_where_nobody_listens_or_where_it_is_set(
    mqtt: dict[str, object],
) -> None:
    settings = read_settings(None, {"mqtt": {"username": "me", "password_file": "p", **mqtt}})
    assert settings.mqtt is not None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[grpc]\n# port = 1\nprot = 2\n", 3),
        ("\n[grpc]\n\n\nport = -1\n", 5),
        ("grpc.port = -1\n", 1),
        ("grpc = {port = -1}\n", 1),
        ('[cameras.a]\nuri = "x"\n[cameras."b"]\nuri = 1\n', 4),
        ("[cameras.a]\nuri = 'x'\n\n[cameras.b]\nmodel = 'm'\n", 4),
        ("[grpc]\nport = 1\n[[grpc.restricted]]\nprotocols = []\n", 4),
        ("[grpc]\nport = 1\n[metrics]\nport = 1\n", None),
    ],
)
def test_a_fault_names_its_line(tmp_path: Path, text: str, line: int | None) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings(path, {})
    assert str(caught.value).endswith(f" (line {line})") == (line is not None)


def test_a_fault_of_the_command_line_names_no_line(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[grpc]\nport = 1\n")
    with pytest.raises(SettingsError, match=r"^command line: grpc\.port: .*[^)]$"):
        read_settings(path, {"grpc": {"port": -1}})
