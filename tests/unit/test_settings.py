"""The daemon's configuration: an error names file, key and remedy; flags win over the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from edge_server.errors import SettingsError
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from pathlib import Path


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
    ("text", "says"),
    [
        ("[grpc]\nprot = 3", 'grpc.prot: unknown key; did you mean "port"?'),
        ("[gprc]\nport = 3", 'gprc: unknown key; did you mean "grpc"?'),
        ('[cameras.front]\nurl = "x"', 'cameras.*.url: unknown key; did you mean "uri"?'),
        ('[cameras.Front]\nuri = "x"', "a name has at most 64 of a-z, 0-9, '_' and '-'; got: Fro"),
        ('[grpc]\nport = "3"', "grpc.port: Expected `int`, got `str`"),
        ("[grpc]\nport = 99999", "grpc.port: Expected `int` <= 65535"),
        ("[mqtt]\nport = 3", "mqtt: Object missing required field `host`"),
        ('[repository]\nmode = "always"', "repository.mode: Invalid enum value 'always'"),
        ('[device]\nid = "A b"', "device.id: "),
        ("grpc", "not TOML"),
    ],
)
def test_each_mistake_names_the_file_and_the_key(path: Path, text: str, says: str) -> None:
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings(path, {})
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config\.toml: cannot be read: No such file"):
        read_settings(path, {})
