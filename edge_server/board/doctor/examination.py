"""Gather the evidence and run every check on it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.board.board import read_board
from edge_server.board.device_nodes import read_disk
from edge_server.board.doctor import hardware, software
from edge_server.errors import EdgeServerError, SettingsError
from edge_server.process.child import ChildFailed, ChildOptions, run_in_child
from edge_server.process.disk import state_directory
from edge_server.process.threads import run_parallel
from edge_server.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.board.board import Board
    from edge_server.board.device_nodes import Account
    from edge_server.settings import Settings

CHECKS: Mapping[str, Callable[[hardware.Evidence], hardware.Finding]] = MappingProxyType(
    {
        "jetpack": hardware.jetpack,
        "power_mode": hardware.power_mode,
        "heat": hardware.heat,
        "supply": hardware.supply,
        "clock": hardware.clock,
        "memory": hardware.memory,
        "disk": hardware.disk,
        "storage": hardware.storage,
        "gpu_nodes": hardware.gpu_nodes,
        "driver": hardware.driver,
        "cuda_runtime": hardware.cuda_runtime,
        "pycuda": hardware.pycuda,
        "tensorrt": software.tensorrt,
        "nvdla": software.nvdla,
        "models": software.models,
        "onnxruntime": software.onnxruntime,
        "opencv": software.opencv,
        "cameras": software.cameras,
        "argus": software.argus,
        "gstreamer": software.gstreamer,
        "settings": software.settings,
        "grpc_port": software.grpc_port,
        "broker": software.broker,
        "unit": software.unit,
    }
)

# The packaged settings file, and the unit's state directory under systemd.
_USUAL_CONFIGURATION = "etc/edge_server/config.toml"
_STATE_OF_THE_UNIT = "var/lib/edge_server"
_PROBES = "edge_server.board.doctor.probes:"
# By name: who knows models lies above this room.
_MODELS = "edge_server.cli.plan:would_serve"
# The probes of every machine; settings and systemd add further ones.
_ALWAYS = (
    "driver",
    "cuda_runtime",
    "pycuda",
    "tensorrt",
    "nvdla",
    "opencv",
    "gstreamer",
    "onnxruntime",
    "kernel_clock",
    "nvme_wear",
)
# Maximum number of concurrent probes; more would compete for the few cores of a board.
_PROCESSES = 4
_NETWORK_TIMEOUT_S = 8.0
# The first import of a large library from a slow disk takes seconds.
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Probe:
    """A function that may crash or hang (drivers, third-party libraries, networks): it runs in a
    new process, which costs only its result, and at most its time limit.

    Attributes:
        function: as `package.module:name`; it returns a dict that JSON can encode.
        account: the account that runs it, where root examines; other users run it as themselves.
    """

    function: str
    arguments: tuple[str, ...] = ()
    timeout_s: float = _TIMEOUT_S
    account: Account | None = None


@dataclass(frozen=True)
class Examination:
    evidence: hardware.Evidence
    findings: Mapping[str, hardware.Finding]

    def count(self, level: hardware.Level) -> int:
        return sum(finding.level is level for finding in self.findings.values())


def examine(
    config: Path | None = None,
    root: Path = Path("/"),
    run: Callable[[Probe], hardware.ProbeResult] | None = None,
    now_s: float | None = None,
) -> Examination:
    """Run all probes and checks; no finding raises. `config` is /etc/edge_server/config.toml by
    default."""
    board = read_board(root, now_s)
    configuration = read_configuration(config, root)
    probes = _probes(board, configuration, root)
    found = run_parallel("probe", _PROCESSES, run or run_probe, probes.values())
    evidence = hardware.Evidence(
        board,
        configuration,
        read_disk(_store(board, configuration.settings, root), board.account),
        dict(zip(probes, found, strict=True)),
        platform.python_version(),
        version("edge-server"),
    )
    return Examination(evidence, run_checks(evidence))


def run_probe(probe: Probe) -> hardware.ProbeResult:
    """Run the probe; return soon after its `timeout_s`; never raise."""
    account = None
    if probe.account is not None and probe.account.uid and os.geteuid() == 0:
        account = probe.account.uid, tuple(sorted(probe.account.gids))

    try:
        facts = run_in_child(
            probe.function,
            *probe.arguments,
            timeout_s=probe.timeout_s,
            options=ChildOptions(account=account),
        )
    except OSError as error:
        return hardware.ProbeResult(failure=f"no process for it: {error.strerror}")
    except (ChildFailed, EdgeServerError) as error:
        return hardware.ProbeResult(failure=f"the process that tried {error}")
    if not isinstance(facts, dict):
        return hardware.ProbeResult(
            failure=f"the process that tried found {facts!r}, which is no dict"
        )
    return hardware.ProbeResult(facts)


def run_checks(evidence: hardware.Evidence) -> dict[str, hardware.Finding]:
    """Return the finding of each check; a check that raises counts as a fault, and the others
    run."""
    findings = {}
    for name, check in CHECKS.items():
        try:
            findings[name] = check(evidence)
        except Exception as error:  # noqa: BLE001 - a bug in one check must not hide the others
            findings[name] = hardware.fault(
                f"the check itself failed: {type(error).__name__}: {error}",
                "report it, with the output of edge-server doctor --json",
            )
    return findings


def read_configuration(path: Path | None, root: Path) -> hardware.Configuration:
    """Read the settings in `path`, or in the packaged file; return the defaults if that file
    does not exist."""
    chosen = path or _usual_configuration(root)
    try:
        return hardware.Configuration(chosen, read_settings(chosen, {}))
    except SettingsError as error:
        return hardware.Configuration(chosen, None, str(error))


def _usual_configuration(root: Path) -> Path | None:
    usual = root / _USUAL_CONFIGURATION
    try:
        usual.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass  # exists; the error of reading it names the fault
    return usual


def _probes(board: Board, configuration: hardware.Configuration, root: Path) -> dict[str, Probe]:
    settings = configuration.settings
    probes = {name: Probe(_PROBES + name) for name in _ALWAYS}
    if settings is not None and configuration.path is not None:
        where = (str(configuration.path), str(_state(board, root)))
        probes["models"] = Probe(_MODELS, where)
    # Permission to open the GPU depends on the user.
    for name in probes.keys() & {"driver", "models"}:
        probes[name] = replace(probes[name], account=board.account)
    if board.systemd and board.unit is not None:
        probes["unit"] = Probe(f"{_PROBES}unit")
    if settings is not None and settings.grpc.enabled and settings.grpc.port:
        where = (settings.grpc.host, str(settings.grpc.port))
        probes["grpc_port"] = Probe(f"{_PROBES}grpc_port", where)
    if settings is not None and settings.mqtt is not None:
        where = (settings.mqtt.host, str(settings.mqtt.port))
        probes["broker"] = Probe(f"{_PROBES}broker", where, _NETWORK_TIMEOUT_S)
    return probes


def _store(board: Board, settings: Settings | None, root: Path) -> Path:
    if settings is not None and settings.repository.store:
        return root / settings.repository.store.lstrip("/")
    return _state(board, root) / "store"


def _state(board: Board, root: Path) -> Path:
    # The unit runs as another user, in another environment, than this process.
    return root / _STATE_OF_THE_UNIT if board.unit is not None else state_directory()
