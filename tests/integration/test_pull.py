"""Models are pulled from a real S3 server, a real HTTPS server and a real OCI registry.

Moto's S3 server, Starlette's file server and Docker's registry run here; a proxy before them cuts
connections.
"""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import tarfile
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import boto3
import numpy as np
import oras.client
import pytest
import requests
from support.free_ports import free_ports
from support.oci_registry import Registry
from support.waiting import TIMEOUT_S, wait_until

from edge_server.cli.main import run_command
from edge_server.cli.model_push import write_manifest
from edge_server.repository.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.certificates import Authority

WEIGHTS_BYTES = 3 << 20
CUT_BYTES = 700 << 10
CONFIG = (
    'backend: "identity" input { name: "a" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "b" data_type: TYPE_FP32 dims: -1 }'
)


class CuttingProxy:
    """Passes connections on to `target_port`, and cuts each after `limit` bytes of the server's.

    Attributes:
        passed: bytes of the server's, over all connections.
        limit: None cuts nothing.
    """

    def __init__(self, target_port: int, limit: int | None) -> None:
        self.limit = limit
        self.passed = 0
        self.cuts = 0
        self._target_port = target_port
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target_port))
            self._sockets += [client, server]
            for source, sink, counts in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pump, args=(source, sink, counts))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        count = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                count += len(data)
                self.passed += len(data) if counts else 0
                if counts and self.limit is not None and count > self.limit:
                    self.cuts += 1
                    break
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as each:
        yield each


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's directories: a cache of its own, and credentials that any test server takes."""
    for name, value in (
        ("XDG_CACHE_HOME", str(tmp_path / "cache")),
        ("HOME", str(tmp_path)),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "eu-central-1"),
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def model(home: Path) -> Path:
    """A model with weights that do not compress, and its manifest."""
    directory = home / "made" / "net"
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(CONFIG)
    random = np.random.default_rng(5)
    (directory / "1" / "weights.bin").write_bytes(random.bytes(WEIGHTS_BYTES))
    write_manifest(directory, None)
    return directory


@pytest.fixture
def archive(model: Path) -> Path:
    path = model.parent / "net.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(model, "net")
    return path


class Store:
    """An S3 server with one bucket, reached over a proxy."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
        direct = f"http://127.0.0.1:{port}"
        self.client = boto3.client("s3", endpoint_url=direct)
        self.client.create_bucket(
            Bucket="fleet", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"}
        )
        self.proxy = CuttingProxy(port, None)
        stack.callback(self.proxy.close)
        stack.callback(self.client.close)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{self.proxy.port}")

    def put(self, directory: Path, prefix: str) -> None:
        for path in directory.rglob("*"):
            if path.is_file():
                key = f"{prefix}{path.relative_to(directory)}"
                self.client.put_object(Bucket="fleet", Key=key, Body=path.read_bytes())


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """Moto's server, which takes seconds to start."""
    with ExitStack() as stack:
        (port,) = free_ports(1)
        _start(stack, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), port=port)
        yield port


@pytest.fixture
def s3(home: Path, s3_port: int, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Store:
    requests.post(f"http://127.0.0.1:{s3_port}/moto-api/reset", timeout=TIMEOUT_S).close()
    return Store(stack, monkeypatch, s3_port)


FILES = """
import sys
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
folder, port, certificate, key = sys.argv[1:]
uvicorn.run(
    Starlette(routes=[Mount("/", StaticFiles(directory=folder))]),
    port=int(port), ssl_certfile=certificate, ssl_keyfile=key, log_level="warning",
)
"""


@pytest.fixture
def https(
    model: Path, stack: ExitStack, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> CuttingProxy:
    """A server of the files beside the model; it has ranges and ETags."""
    (port,) = free_ports(1)
    certificate, key = authority.issue("files")
    _start(stack, "-c", FILES, str(model.parent), str(port), str(certificate), str(key), port=port)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.ca))
    proxy = CuttingProxy(port, None)
    stack.callback(proxy.close)
    return proxy


def _start(stack: ExitStack, *arguments: str, port: int) -> None:
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)

    def accepts() -> bool:
        assert process.poll() is None, "the test server has ended"
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        return False

    wait_until(accepts, 60, otherwise="the test server does not start")


def pull(url: str, repository: Path, *arguments: str) -> int:
    return run_command(["models", "pull", url, "--to", str(repository), *arguments])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same(directory: Path, model: Path) -> bool:
    """Whether the pulled model has the files of the one that was made, and passes `check`."""
    paths = {path.relative_to(model) for path in model.rglob("*")}
    there = {path.relative_to(directory) for path in directory.rglob("*")}
    files = [path for path in paths if (model / path).is_file()]
    equal = all((model / p).read_bytes() == (directory / p).read_bytes() for p in files)
    code = run_command(
        ["check", "--model-repository", str(directory.parent), "--grpc-port=0", "--metrics-port=0"]
    )
    return there == paths and equal and code == 0


def test_a_directory_of_s3_resumes_after_every_cut(
    s3: Store, model: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.put(model, "models/net/")
    s3.proxy.limit = CUT_BYTES
    assert pull("s3://fleet/models/net/", repository) == 0
    assert s3.proxy.cuts >= WEIGHTS_BYTES // CUT_BYTES
    # Begun anew at each cut, it would never end; every byte but those of a cut piece came once.
    assert s3.proxy.passed < 2 * WEIGHTS_BYTES
    assert same(repository / "net", model)
    assert "net: " in capsys.readouterr().out


def test_an_interrupted_pull_is_taken_up_by_the_next(
    s3: Store, model: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.put(model, "net/")
    s3.proxy.limit = CUT_BYTES
    script = (
        "import sys; from edge_server.repository import remote_files as d; d._MOST_ATTEMPTS = 0;"
        "from edge_server.cli.main import run_command; sys.exit(run_command(sys.argv[1:]))"
    )
    url = "s3://fleet/net/"
    killed = subprocess.run(
        [sys.executable, "-c", script, "models", "pull", url, "--to", str(repository)],
        stderr=subprocess.PIPE,
        check=False,
    )
    assert killed.returncode != 0
    assert list(repository.iterdir()) == []
    before = s3.proxy.passed
    s3.proxy.limit = None
    assert pull(url, repository) == 0
    assert s3.proxy.passed - before < WEIGHTS_BYTES - CUT_BYTES // 2
    assert same(repository / "net", model)


@pytest.mark.long
def test_what_was_replaced_at_the_store_is_fetched_anew(
    s3: Store, model: Path, repository: Path
) -> None:
    """The rest of another object never follows the beginning of the first."""
    s3.put(model, "net/")
    script = (
        "import sys; from edge_server.repository import remote_files as d; d._MOST_ATTEMPTS = 0;"
        "from edge_server.cli.main import run_command; sys.exit(run_command(sys.argv[1:]))"
    )
    s3.proxy.limit = CUT_BYTES
    url = "s3://fleet/net/"
    subprocess.run(
        [sys.executable, "-c", script, "models", "pull", url, "--to", str(repository)],
        stderr=subprocess.PIPE,
        check=False,
    )
    s3.proxy.limit = None
    weights = model / "1" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[::-1])
    write_manifest(model, None)
    s3.put(model, "net/")
    assert pull(url, repository) == 0
    assert same(repository / "net", model)


def test_a_wrong_digest_never_reaches_the_repository(
    s3: Store, model: Path, archive: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.put(model, "net/")
    wrong = bytearray((model / "1" / "weights.bin").read_bytes())
    wrong[-1] ^= 1
    s3.client.put_object(Bucket="fleet", Key="net/1/weights.bin", Body=bytes(wrong))
    assert pull("s3://fleet/net/", repository) == 78
    assert "1/weights.bin: has sha256" in capsys.readouterr().err
    assert pull("s3://fleet/net/", repository, "--sha256", "0" * 64) == 78
    assert "manifest.json: has sha256" in capsys.readouterr().err
    s3.client.put_object(Bucket="fleet", Key="net.tar.gz", Body=archive.read_bytes())
    assert pull("s3://fleet/net.tar.gz", repository, "--sha256", "0" * 64) == 78
    assert pull("s3://fleet/net.tar.gz", repository) == 78
    assert "give --sha256" in capsys.readouterr().err
    assert pull("s3://fleet/nobody.tar.gz", repository) != 0
    assert list(repository.iterdir()) == []


def test_an_archive_of_s3_with_its_own_checksum_needs_no_digest(
    s3: Store, model: Path, archive: Path, repository: Path
) -> None:
    s3.client.put_object(
        Bucket="fleet", Key="net.tar.gz", Body=archive.read_bytes(), ChecksumAlgorithm="SHA256"
    )
    assert pull("s3://fleet/net.tar.gz", repository, "--name", "renamed") == 0
    manifest = Manifest.parse((repository / "renamed" / "manifest.json").read_bytes())
    assert manifest.model == "renamed"
    assert pull("s3://fleet/net.tar.gz", repository) == 0
    assert same(repository / "net", model)


def test_https_resumes_and_is_checked(
    https: CuttingProxy,
    model: Path,
    archive: Path,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at = f"https://127.0.0.1:{https.port}"
    assert pull(f"{at}/net.tar.gz", repository, "--sha256", "0" * 64) == 78
    assert list(repository.iterdir()) == []
    https.limit, https.passed = CUT_BYTES, 0
    assert pull(f"{at}/net.tar.gz", repository, "--sha256", sha256(archive)) == 0
    assert https.cuts >= WEIGHTS_BYTES // CUT_BYTES
    assert https.passed < 2 * WEIGHTS_BYTES
    assert same(repository / "net", model)
    https.limit = None
    assert pull(f"{at}/net/", repository, "--name", "again") == 0
    assert (repository / "again" / "1" / "weights.bin").stat().st_size == WEIGHTS_BYTES


def test_a_certificate_that_nobody_trusts_ends_it(
    https: CuttingProxy,
    stranger: Authority,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(stranger.ca))
    assert pull(f"https://127.0.0.1:{https.port}/net/", repository) == 69
    assert "certificate is not trusted" in capsys.readouterr().err


@pytest.fixture
def registry(
    home: Path, stack: ExitStack, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> CuttingProxy:
    """Docker's own registry."""
    docker = Registry(home, authority)
    stack.callback(docker.stop)
    docker.start()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.ca))
    proxy = CuttingProxy(docker.port, None)
    stack.callback(proxy.close)
    return proxy


def test_an_artifact_of_a_registry_resumes_and_is_checked(
    registry: CuttingProxy,
    model: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(model)
    where = f"127.0.0.1:{registry.port}/fleet/net:v1"
    pusher = oras.client.OrasClient(hostname=f"127.0.0.1:{registry.port}")
    # The version's directory becomes an archive in a layer of its own.
    files = ["config.pbtxt", "1", "manifest.json"]
    pusher.push(target=where, files=files, disable_path_validation=True)
    pusher.session.close()
    registry.limit, registry.passed = CUT_BYTES, 0
    assert pull(f"oci://{where}", repository) == 0
    assert registry.cuts >= WEIGHTS_BYTES // CUT_BYTES
    assert registry.passed < 2 * WEIGHTS_BYTES
    assert same(repository / "net", model)
    wrong = where.replace(":v1", f"@sha256:{'0' * 64}")
    assert pull(f"oci://{wrong}", repository) != 0
