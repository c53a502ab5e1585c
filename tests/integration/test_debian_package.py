"""The Debian package, from a signed repository, under the real systemd of its distribution: of this
machine's own, and as a long test of Ubuntu 22.04 (systemd 249) and 24.04 (255)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from debian_package.targets import TARGETS, target_named
from support.systemd_machine import (
    CONFIG,
    Container,
    Unit,
    make_root,
    skip_where_no_container_can_be_made,
)
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from debian_package.targets import Target

CHECKOUT = Path(__file__).parents[2]
UBUNTUS = ("jammy", "noble")
MOSQUITTO = "/usr/sbin/mosquitto"
PYTHON = "/usr/lib/edge-server/bin/python3"
ROAD = """
[repository]
paths = ["/usr/share/edge_server/models"]
[mqtt]
host = "127.0.0.1"
[cameras.road]
uri = "synthetic://road?seed=7&fps=2"
"""
OTHER_PORTS = "[grpc]\nport = 8011\n[metrics]\nport = 8012\n[http]\nport = 8010\n"
SOURCES = """\
Types: deb
URIs: file:/srv/repository/apt
Suites: {suite}
Components: main
Signed-By: /srv/repository/apt/edge-server.asc
"""
# Writes a line with the time for each frame with lanes, until it is ended.
WATCH_LANES = """
import json, sys, time
import paho.mqtt.client as mqtt

def seen(client, userdata, message):
    if json.loads(message.payload).get("lanes"):
        print(time.monotonic(), flush=True)

client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
client.on_connect = lambda client, *_: client.subscribe("edge/v1/+/cameras/road/lanes")
client.on_message = seen
client.connect("127.0.0.1")
client.loop_forever()
"""
# The validator of what writes the bill; it exits with the fault.
VALIDATE = """
import json, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
text = sys.stdin.read()
schema = SchemaVersion.from_version(json.loads(text)["specVersion"])
sys.exit(JsonStrictValidator(schema).validate_str(text))
"""
# What dpkg says of an edited conffile.
CHANGED_SETTINGS = f"??5?????? c {CONFIG}\n"
# What changes in a machine that installs anything at all; and /var/tmp of the machine below, on
# others work on
OTHERS = (
    *("/var/lib/dpkg", "/var/lib/apt", "/var/cache/apt", "/var/cache/debconf", "/var/cache/man"),
    *("/var/log", "/var/lib/systemd", "/var/tmp"),  # noqa: S108 - nothing is written there
)

# The first builds and boots; each installation compiles.
pytestmark = [pytest.mark.early, pytest.mark.timeout(600)]


def build(folder: Path, *arguments: str) -> Path:
    """Run `scripts/build_deb`; the package."""
    command = [CHECKOUT / "scripts/build_deb", "--out", folder, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def revised(deb: Path, revision: int, folder: Path) -> Path:
    """The same package as a later revision, without packing its files anew."""
    tree = folder / "tree"
    tree.mkdir()
    subprocess.run(["dpkg-deb", "--control", deb, tree / "DEBIAN"], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(control.read_text().replace("-1~", f"-{revision}~"))
    later = folder / deb.name.replace("-1~", f"-{revision}~")
    # Its settings are in the other package: not checked.
    command = ["dpkg-deb", "--nocheck", "--root-owner-group", "-Zzstd", "--build", tree, later]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(tree)
    format_and_control, files = members(later)[:2], members(deb)[2:]
    later.write_bytes(b"!<arch>\n" + b"".join((*format_and_control, *files)))
    return later


def members(deb: Path) -> list[bytes]:
    """The members of the package, an archive as `ar` makes them, each with its header."""
    data, at = deb.read_bytes(), len(b"!<arch>\n")
    found = []
    while at < len(data):
        end = at + 60 + int(data[at + 48 : at + 58])
        end += end % 2
        found.append(data[at:end])
        at = end
    return found


@pytest.fixture(
    scope="module",
    params=["here", *(pytest.param(f"{each}-amd64", marks=pytest.mark.long) for each in UBUNTUS)],
)
def target(request: pytest.FixtureRequest) -> Target:
    for tool in ("dpkg-deb", "apt-get"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: this is no Debian or Ubuntu")
    try:
        return target_named(request.param)
    except SystemExit as none:
        pytest.skip(str(none))


@pytest.fixture(scope="module")
def root(target: Target) -> Path:
    """A root of the target's distribution."""
    own = f"VERSION_CODENAME={target.suite}\n" in Path("/etc/os-release").read_text()
    return Path("/") if own else make_root(target.name)


@pytest.fixture(scope="module")
def built(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    return build(folder, "--target", target.name, "--compression=fast")


def version_of(deb: Path) -> str:
    return deb.name.split("_")[1]


@pytest.fixture(scope="module")
def key() -> Iterator[dict[str, str]]:
    """An environment in which gpg has a key of edge-server@test.invalid."""
    for tool, package in (("gpg", "gnupg"), ("apt-ftparchive", "apt-utils")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt install {package}")
    # Its agent has a socket there, whose address must be short.
    with tempfile.TemporaryDirectory(prefix="gpg.", dir="/tmp") as home:
        environment = {**os.environ, "GNUPGHOME": home}
        make = ["gpg", "--batch", "--passphrase", "", "--quick-generate-key"]
        subprocess.run(
            [*make, "edge-server@test.invalid", "ed25519", "sign", "never"],
            env=environment,
            check=True,
            capture_output=True,
        )
        yield environment
        subprocess.run(["gpgconf", "--kill", "gpg-agent"], env=environment, check=True)


class Repository:
    """A signed repository that the container sees at /srv/repository/apt."""

    def __init__(self, folder: Path, key: dict[str, str]) -> None:
        self.folder = folder
        self._key = key

    def publish(self, *debs: Path) -> None:
        command = [CHECKOUT / "scripts/build_repo", "--key", "edge-server@test.invalid"]
        subprocess.run(
            [*command, "--out", "apt", *debs],
            cwd=self.folder,
            env=self._key,
            check=True,
            capture_output=True,
        )


@pytest.fixture(scope="module")
def repository(
    built: Path, key: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Repository:
    folder = tmp_path_factory.mktemp("repository")
    # apt reads as a user of its own.
    folder.chmod(0o755)
    made = Repository(folder, key)
    made.publish(built)
    return made


class Machine:
    """A container with a package source, and what apt does in it."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.unit = Unit(container)

    def apt(self, *arguments: str) -> str:
        noninteractive = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-q")
        return self.container.do(*noninteractive, "--no-install-recommends", *arguments)

    def is_installed(self) -> bool:
        return self.container.run("dpkg", "-s", "edge-server").returncode == 0

    def files(self) -> set[str]:
        """Of the whole system, but for what any installation changes."""
        prune = " -o ".join(f"-path {path}" for path in OTHERS)
        found = self.container.do(
            "sh", "-c", f"find /etc /usr /var -xdev \\( {prune} \\) -prune -o -print"
        )
        return set(found.splitlines())


@pytest.fixture(scope="module")
def bare(
    target: Target, root: Path, repository: Repository, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Machine, set[str]]]:
    """A machine without the package, and its files."""
    skip_where_no_container_can_be_made()
    booted = Container(
        tmp_path_factory.mktemp("machine"),
        f"--bind-ro={repository.folder}:/srv/repository",
        root=root,
    )
    try:
        booted.wait_until_up()
        machine = Machine(booted)
        # Only the test's own source; and services start, which images of containers forbid. No
        # installation reads all manual pages of the machine anew.
        unwanted = "/etc/apt/sources.list* /usr/sbin/policy-rc.d /var/lib/man-db/auto-update"
        booted.do("sh", "-c", f"rm -rf {unwanted}")
        sources = SOURCES.format(suite=target.suite)
        booted.write("/etc/apt/sources.list.d/edge.sources", sources)
        machine.apt("update")
        yield machine, machine.files()
    finally:
        booted.close()


@pytest.fixture
def machine(bare: tuple[Machine, set[str]]) -> Machine:
    """A machine with the package installed; where a test fails, its journal is shown."""
    machine, _ = bare
    if not machine.is_installed():
        machine.apt("install", "edge-server")
    return machine


def test_an_installation_serves_at_once_with_nothing_of_this_checkout(machine: Machine) -> None:
    unit = machine.unit
    assert (unit["ActiveState"], unit["UnitFileState"]) == ("active", "enabled")
    assert unit["DropInPaths"] == ""
    ports = ("--grpc-port=0", "--metrics-port=0", "--http-port=0")
    told = machine.container.do("edge-server", "check", "--config", CONFIG, *ports)
    assert "lane_detection" in told
    assert "laneDetect_model" in machine.container.do("edge-server", "status")
    machine.container.do("bash", "-n", "/usr/share/bash-completion/completions/edge-server")
    # Its children run in the same environment.
    facts = json.loads(machine.container.run("edge-server", "doctor", "--json").stdout)
    levels = {check["name"]: check["level"] for check in facts["checks"]}
    assert (levels["onnxruntime"], levels["unit"]) == ("ok", "ok")
    maps = machine.container.do("cat", f"/proc/{unit['MainPID']}/maps")
    loaded = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.endswith(".so")}
    assert any(path.startswith("/usr/lib/edge-server/") for path in loaded)
    assert not [path for path in loaded if not path.startswith("/usr/lib/")]
    # The settings are another test's.
    verified = machine.container.run("dpkg", "--verify", "edge-server").stdout
    assert verified in ("", CHANGED_SETTINGS)


def test_an_upgrade_while_lanes_are_published_keeps_the_settings(
    machine: Machine, repository: Repository, built: Path, tmp_path: Path
) -> None:
    container, unit = machine.container, machine.unit
    if container.run("test", "-x", MOSQUITTO).returncode:
        pytest.skip("mosquitto is missing: apt install mosquitto")
    later = revised(built, 2, tmp_path)
    repository.publish(built, later)
    machine.apt("update")
    # Another test may have installed a later one.
    machine.apt("install", "--allow-downgrades", f"edge-server={version_of(built)}")
    container.do("systemd-run", "--quiet", "--unit=broker", MOSQUITTO, "-p", "1883")
    container.write(CONFIG, ROAD)
    container.write("/root/watch_lanes.py", WATCH_LANES)
    container.do("systemctl", "restart", "edge-server")
    watch = f"exec {PYTHON} /root/watch_lanes.py >/root/lanes"
    container.do("systemd-run", "--quiet", "--unit=watch", "sh", "-c", watch)

    def seen() -> list[float]:
        return [float(line) for line in container.do("cat", "/root/lanes").splitlines()]

    wait_until(lambda: container.run("test", "-s", "/root/lanes").returncode == 0)
    before = unit["MainPID"]
    machine.apt("install", f"edge-server={version_of(later)}")
    assert unit.restarted(before)
    assert "-2~" in container.do("dpkg-query", "-W", "edge-server")
    assert container.do("cat", CONFIG) == ROAD.strip()
    after = len(seen())
    wait_until(lambda: len(seen()) > after + 5)
    times = seen()
    gap_s = max(later - earlier for earlier, later in pairwise(times))
    print(f"longest time without lanes: {gap_s:.1f} s")
    # The old version serves while the new one is unpacked and compiled.
    assert gap_s < 20
    container.do("systemctl", "stop", "watch", "broker")


def test_the_journal_is_searched_by_model_and_explains_an_error(machine: Machine) -> None:
    container = machine.container
    # Recommended, and here of the machine below.
    if container.run("/usr/bin/python3", "-c", "import systemd.journal").returncode:
        pytest.skip("systemd's Python library is missing: apt install python3-systemd")

    def journal(*matches: str) -> str:
        container.do("journalctl", "--sync")
        return container.do("journalctl", "-x", "-u", "edge-server", "-o", "short", *matches)

    container.do("systemctl", "restart", "edge-server")
    assert "model lane_detection: READY" in journal("MODEL=lane_detection")
    assert "laneDetect_model" not in journal("MODEL=lane_detection")
    kept = container.do("cat", CONFIG)
    try:
        container.write(CONFIG, "[mqtt]\nhsot = 1\n")
        assert container.run("systemctl", "restart", "edge-server").returncode != 0
        told = journal("ERROR_ID=SettingsError")
        assert "mqtt.hsot: unknown key" in told
        # The catalog's remedy.
        assert "Subject: The settings are wrong" in told
        assert "edge-server check --config /etc/edge_server/config.toml" in told
    finally:
        container.write(CONFIG, f"{kept}\n")
        container.do("systemctl", "restart", "edge-server")


@pytest.mark.long
def test_the_daemon_serves_on_while_an_upgrade_is_cut_off_and_another_completes_it(
    machine: Machine, repository: Repository, built: Path, tmp_path: Path
) -> None:
    container, unit = machine.container, machine.unit
    # Settings as they were shipped: apt asks nothing.
    container.do("systemctl", "restart", "edge-server")
    later = revised(built, 3, tmp_path)
    repository.publish(built, later)
    deb = next((repository.folder / "apt").glob(f"pool/*/{later.name}"))
    seen = deb.relative_to(repository.folder)
    states = set()
    # While it is unpacked, while its own script runs, and after.
    for seconds in ("0.3", "1", "2", "3"):
        cut = ("timeout", "--signal=KILL", seconds, "dpkg", "--install", "--force-confold")
        container.run(*cut, f"/srv/repository/{seen}")
        assert unit["ActiveState"] in ("active", "activating"), seconds
        states.add(container.do("dpkg-query", "-Wf", "${db:Status-Status}", "edge-server"))
    assert states & {"half-installed", "unpacked", "half-configured"}, states
    container.run("dpkg", "--force-confold", "--configure", "-a")
    machine.apt("update")
    machine.apt("install", "--reinstall", "edge-server")
    assert container.do("dpkg-query", "-Wf", "${db:Status-Abbrev}", "edge-server") == "ii"
    assert container.run("dpkg", "--verify", "edge-server").stdout in ("", CHANGED_SETTINGS)
    wait_until(lambda: unit["ActiveState"] == "active")
    assert container.do("dpkg-query", "-Wf", "${Version}", "edge-server") == version_of(later)


def test_settings_that_are_wrong_keep_the_version_before_serving_and_what_is_disabled_stays_so(
    machine: Machine, built: Path
) -> None:
    container, unit = machine.container, machine.unit
    kept = container.do("cat", CONFIG)
    container.write("/etc/edge_server/rear.toml", ROAD + OTHER_PORTS)
    container.do("systemctl", "restart", "edge-server", "edge-server@rear")
    rear = Unit(container, "edge-server@rear")
    before, before_rear = unit["MainPID"], rear["MainPID"]
    container.write(CONFIG, "[mqtt]\nhsot = 1\n")
    container.do("systemctl", "disable", "edge-server")
    try:
        # A downgrade, where another test has installed a later one.
        keep = ("-o", "Dpkg::Options::=--force-confold", "--reinstall", "--allow-downgrades")
        machine.apt("install", *keep, f"edge-server={version_of(built)}")
        assert container.do("dpkg-query", "-Wf", "${Version}", "edge-server") == version_of(built)
        assert container.do("cat", CONFIG) == "[mqtt]\nhsot = 1"
        assert (unit["ActiveState"], unit["MainPID"]) == ("active", before)
        assert unit["UnitFileState"] == "disabled"
        assert rear.restarted(before_rear)
    finally:
        container.write(CONFIG, f"{kept}\n")
        container.do("systemctl", "enable", "edge-server")
        container.do("systemctl", "restart", "edge-server")
        container.do("systemctl", "stop", "edge-server@rear")
        container.do("rm", "/etc/edge_server/rear.toml")


@pytest.mark.long
def test_a_unit_that_the_operator_disabled_stays_so(machine: Machine) -> None:
    machine.container.do("systemctl", "disable", "--now", "edge-server")
    try:
        machine.apt("install", "--reinstall", "edge-server")
        assert machine.unit["UnitFileState"] == "disabled"
        assert machine.unit["ActiveState"] == "inactive"
    finally:
        machine.container.do("systemctl", "enable", "--now", "edge-server")


def test_a_removal_keeps_settings_and_state_an_image_enables_the_unit_a_purge_keeps_nothing(
    bare: tuple[Machine, set[str]], machine: Machine
) -> None:
    _, before = bare
    container = machine.container
    container.write("/etc/edge_server/mqtt_password", "secret")
    container.write("/var/lib/edge_server/store/kept", "")
    container.write("/etc/edge_server/rear.toml", ROAD + OTHER_PORTS)
    container.do("systemctl", "enable", "--now", "edge-server@rear")
    machine.apt("remove", "edge-server")
    assert machine.unit["ActiveState"] == "inactive"
    assert Unit(container, "edge-server@rear")["ActiveState"] == "inactive"
    for kept in (CONFIG, "/etc/edge_server/mqtt_password", "/var/lib/edge_server/store/kept"):
        container.do("test", "-f", kept)
    assert container.run("test", "-e", "/usr/lib/edge-server").returncode != 0
    # As an image is made: in a root whose systemd does not run.
    install = "mount -t tmpfs none /run && apt-get install -y --no-install-recommends edge-server"
    container.do("unshare", "--mount", "sh", "-c", install)
    container.do("systemctl", "daemon-reload")
    assert (machine.unit["ActiveState"], machine.unit["UnitFileState"]) == ("inactive", "enabled")
    # As on an image, whose settings lie on the data partition: emptied, it stays.
    container.do("mount", "--bind", "/etc/edge_server", "/etc/edge_server")
    machine.apt("purge", "edge-server")
    container.do("umount", "/etc/edge_server")
    container.do("rmdir", "/etc/edge_server")
    left = machine.files() - before
    # The user stays; the files of users were changed for it.
    assert {path for path in left if not path.startswith(("/etc/passwd", "/etc/group"))} <= {
        *("/etc/shadow-", "/etc/gshadow-", "/etc/subuid-", "/etc/subgid-")
    }
    assert before <= machine.files()
    assert container.do("id", "-un", "edge-server") == "edge-server"


def test_a_repository_that_somebody_changed_is_refused(
    bare: tuple[Machine, set[str]], repository: Repository
) -> None:
    machine, _ = bare
    (release,) = repository.folder.glob("apt/dists/*/InRelease")
    shipped = release.read_text()
    release.write_text(shipped.replace("Origin: edge-server", "Origin: edge-zerver"))
    refused = machine.container.run("apt-get", "update", "--error-on=any")
    release.write_text(shipped)
    assert refused.returncode != 0
    assert "edge-server.asc" in refused.stderr or "BADSIG" in refused.stderr
    machine.apt("update")


def test_a_package_that_somebody_changed_is_refused(
    machine: Machine, repository: Repository, key: dict[str, str]
) -> None:
    deb = max(repository.folder.glob("apt/pool/*/*.deb"))
    shipped = deb.read_bytes()
    verify = ["gpg", "--batch", "--verify", f"{deb}.asc", deb]
    assert subprocess.run(verify, env=key, capture_output=True, check=False).returncode == 0
    deb.write_bytes(shipped[:-1] + bytes([shipped[-1] ^ 1]))
    signed = subprocess.run(verify, env=key, capture_output=True, text=True, check=False)
    installed = machine.container.run(
        "apt-get", "-y", "--no-install-recommends", "install", "--reinstall", "edge-server"
    )
    deb.write_bytes(shipped)
    assert signed.returncode != 0
    assert "BAD signature" in signed.stderr
    assert installed.returncode != 0
    assert "Hash Sum mismatch" in installed.stderr


@pytest.mark.long
def test_a_second_build_gives_the_same_bytes(target: Target, tmp_path: Path) -> None:
    built, again = (build(tmp_path / each, "--target", target.name) for each in ("one", "two"))
    assert again.name == built.name
    for suffix in (".deb", ".deb.sha256", ".cdx.json"):
        first, second = built.with_suffix(suffix), again.with_suffix(suffix)
        assert first.read_bytes() == second.read_bytes(), suffix


def test_checksum_and_bill_of_materials_lie_beside_the_package(built: Path) -> None:
    checksum, name = Path(f"{built}.sha256").read_text().split()
    assert (checksum, name) == (hashlib.sha256(built.read_bytes()).hexdigest(), built.name)
    text = built.with_suffix(".cdx.json").read_text()
    tools = CHECKOUT / ".venv-package/bin/python"
    validated = subprocess.run(
        [tools, "-c", VALIDATE], input=text, capture_output=True, text=True, check=False
    )
    assert validated.returncode == 0, validated.stderr
    bill = json.loads(text)
    parts = {part["name"]: part for part in bill["components"]}
    model = CHECKOUT / "models/laneDetect_model/1/model.onnx"
    shipped = parts[f"usr/share/edge_server/{model.relative_to(CHECKOUT)}"]
    assert shipped["hashes"][0]["content"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert {"numpy", "grpcio", "onnxruntime"} <= set(parts)


def test_the_maintainer_scripts_are_clean_shell(built: Path, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is missing: apt install shellcheck")
    subprocess.run(["dpkg-deb", "--control", built, tmp_path], check=True)
    scripts = [tmp_path / name for name in ("postinst", "prerm", "postrm")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_target_is_built_with_libraries_that_it_can_load(name: str, tmp_path: Path) -> None:
    # The build itself refuses a library of another architecture, or one that is not aligned.
    deb = build(tmp_path, "--target", name)
    assert deb.name.endswith(f"~{name.replace('-', '_')}.deb")
    listed = subprocess.run(
        ["dpkg-deb", "--contents", deb], check=True, capture_output=True, text=True
    ).stdout
    machine = TARGETS[name].machine
    foreign = {"aarch64": "x86_64-linux-gnu", "x86_64": "aarch64-linux-gnu"}[machine]
    assert f"{machine}-linux-gnu.so" in listed
    assert f"{foreign}.so" not in listed


@pytest.mark.long
def test_lintian_finds_nothing_that_is_not_explained(tmp_path: Path) -> None:
    if shutil.which("lintian") is None:
        pytest.skip("lintian is missing: apt install lintian")
    deb = build(tmp_path, "--compression=xz")
    command = ["lintian", "--fail-on=error,warning", "--suppress-tags=bogus-mail-host", str(deb)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
