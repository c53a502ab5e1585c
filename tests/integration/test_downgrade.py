"""State on the data partition is read by the version before and the version after.

The daemon of an earlier commit and this one take turns on one store: each serves, with the
repository gone, what the other one found good.
"""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tritonclient.grpc as triton
from support.adding_models import network
from support.daemon_process import Process
from support.polling_server import POLL, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
# An earlier daemon, of the first days of HTTP: tests start it with the port of that.
BEFORE = "657895ff"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the version before."""
    folder = tmp_path_factory.mktemp("before")
    archive = folder / "before.zip"
    git = ["git", "-C", str(ROOT), "archive", "--format=zip"]
    command = [*git, "--output", str(archive), BEFORE, "edge_server"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the history of this checkout does not reach back: {done.stderr.strip()}")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder)
    return folder


class Vehicle:
    """One store and one repository, on which the daemons of several versions take turns."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repository = folder / "repository"
        self.repository.mkdir()
        self._folder = folder
        self._patch = monkeypatch

    def deliver(self, number: float) -> None:
        model = self.repository / "m"
        (model / "1").mkdir(parents=True, exist_ok=True)
        (model / "config.pbtxt").write_text('backend: "onnxruntime"')
        new = model / "1/.model.onnx"
        new.write_bytes(network(number))
        new.rename(model / "1/model.onnx")

    def run(self, sources: Path, *, repository: bool) -> Iterator[Server]:
        """A daemon of those sources; without the repository it has nothing but the store."""
        away = self.repository.with_name("away")
        if not repository:
            self.repository.rename(away)
        self._patch.chdir(sources)  # the first place where `python -m` looks
        settings = self._folder / "settings.toml"
        settings.write_text("[repository]\nprobation_requests = 0\n")
        process = Process(
            self._folder,
            *POLL,
            f"--config={settings}",
            f"--model-repository={self.repository}",
            f"--repository-copies={self._folder / 'store'}",
        )
        client = triton.InferenceServerClient(f"127.0.0.1:{process.port}")
        try:
            process.wait_for("READY=1")
            assert Path(f"/proc/{process.popen.pid}/cwd").resolve() == sources
            yield Server(process, client, self.repository)
            assert process.terminate() == 0
        finally:
            client.close()
            process.close()
            if not repository:
                away.rename(self.repository)

    def learn(self, sources: Path, number: float) -> None:
        """Deliver a model to a daemon of those sources, until it serves and is kept."""
        self.deliver(number)
        for server in self.run(sources, repository=True):
            server.wait_for(number)

    def recall(self, sources: Path) -> float:
        """What a daemon of those sources answers from the store alone."""
        (answer,) = (server.answer() for server in self.run(sources, repository=False))
        return answer


@pytest.mark.long
def test_each_version_serves_what_the_other_one_kept(
    before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vehicle = Vehicle(tmp_path, monkeypatch)
    vehicle.learn(before, 1)
    assert vehicle.recall(ROOT) == 1  # the upgrade
    vehicle.learn(ROOT, 2)
    assert vehicle.recall(before) == 2  # the downgrade
    assert not list((tmp_path / "store").glob("state*.damaged"))
    assert not list((tmp_path / "store").glob("state*.format-*"))
