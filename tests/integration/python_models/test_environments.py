"""What a Python model imports may come with it: packages of a requirements.txt, or an environment
of conda-pack (simulated: an archive of the same form, without conda's Python)."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends.contract import NoRoom
from edge_server.backends.python import environments
from edge_server.model_config.config import ModelConfig
from edge_server.settings import Python

if TYPE_CHECKING:
    from collections.abc import Callable

    Serve = Callable[..., Any]

VERSION = ".".join(platform.python_version_tuple()[:2])
IMPORTS = """
def initialize(self, args):
    import tiny
    self.factor = tiny.FACTOR

def execute(self, requests):
    return [y(x(r) * self.factor) for r in requests]
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory, whose content no model may read but for its own environment."""
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    monkeypatch.setenv("STATE_DIRECTORY", str(made))
    return made


@pytest.fixture
def serve_closed(serve_with: Serve, state: Path) -> Serve:
    return lambda **models: serve_with(Python(private=(str(state),)), **models)


def path_parameter(value: str) -> str:
    return f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{value}" }} }}'


def conda_pack(archive: Path, version: str = VERSION, factor: int = 7) -> None:
    root = archive.parent / f"env-{archive.name}"
    packages = root / "lib" / f"python{version}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "tiny.py").write_text(f"FACTOR = {factor}\n")
    with tarfile.open(archive, "w:gz") as file:
        file.add(root, ".")


def make_wheel(folder: Path, factor: int) -> None:
    about = "tiny-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", f"FACTOR = {factor}\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture
def another_python() -> tuple[str, str]:
    """A Python of another minor version, with msgspec and numpy, and that version."""
    # One that is complete: scripts/test may be about to make another.
    for path in sorted(Path(__file__).parents[3].glob(".venv-3.*/.installed")):
        if (version := path.parent.name.removeprefix(".venv-")) != VERSION:
            return str(path.parent / "bin/python"), version
    pytest.skip("scripts/test has made no environment of another Python")


def failure(served: Any) -> str:
    return str(served.failed[0].reason)


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "directory"])
def test_an_environment_of_conda_pack_is_that_of_the_model(
    serve_closed: Serve, write: Serve, state: Path, is_archive: bool
) -> None:
    name = "env.tar.gz" if is_archive else "env-env.tar.gz"
    config = path_parameter(f"$$TRITON_MODEL_DIRECTORY/{name}")
    directory = write(m=(config, IMPORTS)) / "m"
    conda_pack(directory / "env.tar.gz")
    served = serve_closed(m=(config, IMPORTS))
    assert served.values("m", 2) == [14]
    kept = state / "environments"
    assert len(list(kept.iterdir()) if kept.exists() else []) == is_archive
    # It is unpacked once, and imported as it is.
    for path in kept.glob(f"*/lib/python{VERSION}/site-packages/tiny.py"):
        path.write_text("FACTOR = 8\n")
        assert serve_closed(m=(config, IMPORTS)).values("m", 2) == [16]


def test_what_was_unpacked_and_nothing_uses_any_more_makes_room_for_the_next_one(
    serve_closed: Serve, write: Serve, state: Path
) -> None:
    """Of a model that runs, of one that was loaded lately, and of one of 40 days ago."""
    config, places = path_parameter("$$TRITON_MODEL_DIRECTORY/env.tar.gz"), {}
    for factor, name in enumerate(("ago", "lately", "running", "next")):
        if name == "next":
            for unpacked in places["ago"], places["running"]:
                os.utime(unpacked, (0, time.time() - 40 * 24 * 3600))
        directory = write(**{name: (config, IMPORTS)}) / name
        conda_pack(directory / "env.tar.gz", factor=factor)
        served = serve_closed(**{name: (config, IMPORTS)})
        assert served.values(name, 1) == [factor]
        (places[name],) = {*(state / "environments").iterdir()}.difference(places.values())
        if name in {"ago", "lately"}:
            served.loader.close(20)
        shutil.rmtree(directory)
    assert [name for name, unpacked in places.items() if not unpacked.exists()] == ["ago"]


@pytest.mark.parametrize(
    ("path", "version", "text"),
    [
        ("$$TRITON_MODEL_DIRECTORY/env.tar.gz", "3.6", f"has python3.6 in lib, and .*{VERSION}"),
        ("$$TRITON_MODEL_DIRECTORY/none.tar.gz", VERSION, "none.tar.gz: is not there"),
        ("$$TRITON_MODEL_DIRECTORY/1/model.py", VERSION, "cannot be unpacked: tar: .*conda-pack"),
        ("env.tar.gz", VERSION, "give an absolute path, or begin it with"),
    ],
    ids=["another Python", "missing", "no archive", "relative"],
)
def test_an_environment_that_cannot_be_used_is_refused_with_the_remedy(
    serve_closed: Serve, write: Serve, path: str, version: str, text: str
) -> None:
    model = (path_parameter(path), IMPORTS)
    conda_pack(write(m=model) / "m" / "env.tar.gz", version)
    assert re.search(text, failure(serve_closed(m=model)))


def test_an_archive_that_would_fill_the_disk_is_left(
    serve_closed: Serve, write: Serve, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (path_parameter("$$TRITON_MODEL_DIRECTORY/env.tar.gz"), IMPORTS)
    conda_pack(write(m=model) / "m" / "env.tar.gz")
    monkeypatch.setattr(environments, "free_bytes", lambda _: 5)
    assert "has 5 bytes left, of which" in failure(serve_closed(m=model))
    assert not list((state / "environments").iterdir())


@pytest.mark.parametrize(
    ("free", "needed"), [((3, 3), "archive"), ((80_000, -1, -1), 90_000)], ids=["begin", "amid"]
)
def test_an_archive_without_room_waits_until_there_is_more_than_it_found(
    write: Serve,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: tuple[int, ...],
    needed: int | str,
) -> None:
    text = path_parameter("$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    directory = write(m=(text, IMPORTS)) / "m"
    conda_pack(directory / "env.tar.gz")
    config = ModelConfig.of(text_format.Parse(f'name: "m" {text}', pb.ModelConfig()))
    if isinstance(needed, str):
        needed = (directory / "env.tar.gz").stat().st_size
    monkeypatch.setattr(environments, "floor_bytes", lambda _: 0)
    monkeypatch.setattr(environments, "free_bytes", Mock(side_effect=[*free, needed - 1, needed]))
    with pytest.raises(NoRoom) as caught:
        environments.environment_of(directory / "1", config, environments.Interpreter())
    assert not list((state / "environments").iterdir())
    assert [caught.value.has_room() for _ in range(2)] == [False, True]


def test_of_an_archive_with_faults_the_first_one_is_named(
    serve_closed: Serve, write: Serve
) -> None:
    model = (path_parameter("$$TRITON_MODEL_DIRECTORY/env.tar.gz"), IMPORTS)
    archive = write(m=model) / "m" / "env.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for name, kind in (("/rooted", tarfile.REGTYPE), ("hard", tarfile.LNKTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "absent"
            file.addfile(entry)
    assert "tar: hard: Cannot hard link to " in failure(serve_closed(m=model))


def test_the_packages_of_a_requirements_txt_are_made_once_and_imported(
    serve_closed: Serve, write: Serve, state: Path, tmp_path: Path
) -> None:
    make_wheel(tmp_path, 5)
    directory = write(m=IMPORTS) / "m"
    (directory / "1" / "requirements.txt").write_text(f"--no-index\n--find-links {tmp_path}\ntiny")
    # Nothing is made of it yet: the error of the import says what would.
    assert "`edge-server models env`" in failure(serve_closed(m=IMPORTS))
    command = [sys.executable, "-m", "edge_server", "models", "env", str(directory)]
    done = [
        subprocess.run(
            [*command, "--to", str(state)], check=True, capture_output=True, text=True, timeout=120
        )
        for _ in range(2)
    ]
    assert "is made of it; models load it" in done[0].stdout
    assert "is made of it already" in done[1].stdout
    assert serve_closed(m=IMPORTS).values("m", 2) == [10]


def test_a_model_without_a_requirements_txt_is_told(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    command = [sys.executable, "-m", "edge_server", "models", "env", str(tmp_path / "m")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78
    assert "no version has a requirements.txt beside its model.py" in done.stderr


MINOR = "def execute(self, requests): return [y([sys.version_info.minor]) for r in requests]"


@pytest.mark.parametrize("by", ["interpreters", "model_interpreters"])
def test_a_model_runs_with_the_python_that_the_settings_name(
    serve_with: Serve, another_python: tuple[str, str], by: str
) -> None:
    python, version = another_python
    chosen = {"python" if by == "interpreters" else "m": python}
    served = serve_with(Python(**{by: chosen}), m=MINOR, n=MINOR)
    theirs, ours = int(version.partition(".")[2]), sys.version_info.minor
    assert served.values("m", 0) == [theirs]
    assert served.values("n", 0) == [theirs if by == "interpreters" else ours]


def test_the_environments_of_a_model_are_of_its_own_python(
    serve_with: Serve,
    write: Serve,
    state: Path,
    tmp_path: Path,
    another_python: tuple[str, str],
) -> None:
    python, version = another_python
    settings = Python(model_interpreters={"m": python, "n": python}, private=(str(state),))
    packed = path_parameter("$$TRITON_MODEL_DIRECTORY/env.tar.gz"), IMPORTS
    repository = write(m=IMPORTS, n=packed)
    make_wheel(tmp_path, 5)
    (repository / "m" / "1" / "requirements.txt").write_text(
        f"--no-index\n--find-links {tmp_path}\ntiny"
    )
    conda_pack(repository / "n" / "env.tar.gz", version)
    config = tmp_path / "config.toml"
    config.write_text(f'[python]\nmodel_interpreters = {{ m = "{python}" }}\n')
    command = [sys.executable, "-m", "edge_server", "models", "env", str(repository / "m")]
    subprocess.run([*command, "--to", str(state), "--config", str(config)], check=True, timeout=120)
    served = serve_with(settings, m=IMPORTS, n=packed)
    assert (served.values("m", 2), served.values("n", 2)) == ([10], [14])


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("exec /bin/false", "m': .python. interpreters or .*python is no Python that runs models"),
        ("exec {python} -S $@", "needs msgspec numpy, which .*: .*python -m pip install msgspec"),
    ],
    ids=["no Python", "without packages"],
)
def test_a_python_that_cannot_run_models_is_refused_with_the_remedy(
    serve_with: Serve, tmp_path: Path, lines: str, text: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{lines.format(python=sys.executable)}\n".replace("$@", '"$@"'))
    python.chmod(0o755)
    served = serve_with(Python(model_interpreters={"m": str(python)}), m=MINOR)
    assert re.search(text, failure(served))


def test_a_python_that_is_too_old_is_refused_with_the_oldest(serve_with: Serve) -> None:
    for old in sorted(Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python")):
        served = serve_with(Python(model_interpreters={"m": str(old)}), m=MINOR)
        assert re.search(r"it is Python 3\.\d, and 3\.10 is the oldest", failure(served))
        return
    pytest.skip("pyenv has no Python before 3.10 here")


ENSEMBLE = """
platform: "ensemble"
input { name: "x" data_type: TYPE_INT32 dims: -1 }
output { name: "y" data_type: TYPE_INT32 dims: -1 }
ensemble_scheduling { step {
  model_name: "m" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
} }
"""


def test_a_missing_module_is_told_with_its_remedy_and_once_with_its_traceback(
    serve: Serve, write: Serve
) -> None:
    ensemble = write() / "e"
    (ensemble / "1").mkdir(parents=True)
    (ensemble / "config.pbtxt").write_text(ENSEMBLE)
    served = serve(m=IMPORTS.replace("tiny", "PIL_of_nowhere"))
    reasons = {entry.name: str(entry.reason) for entry in served.failed}
    what = "No module named 'PIL_of_nowhere'; name it in a requirements.txt beside the model's file"
    assert what in reasons["m"]
    assert "\n\nAt:\n" in reasons["m"]
    assert what in reasons["e"]
    assert "At:" not in reasons["e"]
