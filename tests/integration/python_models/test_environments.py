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
from typing import TYPE_CHECKING, Any

import pytest

from edge_server.settings import Python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
