"""`edge-server check`: finds the errors that `run` would meet, without starting anything.

A temporary condition, such as an unreachable broker or live camera, is no fault: the daemon waits
for it.
"""

from __future__ import annotations

import errno
import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from edge_server.api.access import Tokens
from edge_server.api.certificates import check_certificates
from edge_server.api.grpc.client import TOKEN, server_name
from edge_server.api.grpc.server import check_path
from edge_server.board.board import Identity
from edge_server.board.listening import listener, remedy
from edge_server.cameras.camera import LIVE, Camera
from edge_server.cameras.source_uri import home_hint, masked_uri, parse_source_uri
from edge_server.daemon.camera_set import calibration_of, source_options
from edge_server.daemon.parts import (
    check_channel,
    check_recorder,
    chosen_signatures,
    models_aside,
    python_of,
)
from edge_server.errors import (
    EdgeServerError,
    ModelConfigError,
    SettingsError,
    SourceError,
    Unavailable,
    may_pass,
)
from edge_server.inference.tracing import TraceFile
from edge_server.model_config.parse import NO_EFFECT
from edge_server.mqtt.broker import address_of, faults_of
from edge_server.mqtt.clients import try_broker
from edge_server.pipeline.fair_shares import FairShares
from edge_server.pipeline.lane_pipeline import LanePipeline
from edge_server.pipeline.networks import NetworkPipeline
from edge_server.process.logs import check_log_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server import settings as chosen
    from edge_server.inference.data_plane import DataPlane
    from edge_server.lifecycle.control import RepositoryControl


@dataclass
class Findings:
    """The results of `check`, a line for each.

    Attributes:
        well: successful checks, and warnings.
        faults: permanent errors that `run` would refuse, with the remedy.
        unavailable: errors that would end `run` now, but may be temporary.
        no_effects: what the models' configurations ask for and the daemon does not act on.
    """

    well: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    unavailable: list[str] = field(default_factory=list)
    no_effects: list[str] = field(default_factory=list)

    def note(self, error: EdgeServerError, prefix: str = "") -> None:
        """Add `error` to the errors of exit code 69, or to those of 78."""
        (self.unavailable if may_pass(error) else self.faults).append(f"{prefix}{error}")


class _NoEffects(logging.Handler):
    """Keeps what the daemon would log of a model's configuration that it does not act on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if NO_EFFECT in record.msg and (line := record.getMessage()) not in self.lines:
            self.lines.append(line)


@contextmanager
def _no_effects() -> Iterator[list[str]]:
    ours, kept = logging.getLogger("edge_server"), _NoEffects()
    level, propagate = ours.level, ours.propagate
    ours.addHandler(kept)
    ours.setLevel(logging.WARNING)
    ours.propagate = False
    try:
        yield kept.lines
    finally:
        ours.removeHandler(kept)
        ours.setLevel(level)
        ours.propagate = propagate


def check(settings: chosen.Settings) -> Findings:
    """Load the start's models, run each camera's, open cameras, test files, ports and broker."""
    findings = Findings()
    _check_ports(settings, findings)
    models = models_aside(settings.repository, settings.serving, python_of(settings))
    with models as (control, data_plane):
        with _no_effects() as findings.no_effects:
            faulty_models = _check_models(settings.repository, control, data_plane, findings)
        if faulty_models is not None:
            known = {each.name for each in control.index(only_ready=False)}
            findings.well += (
                f"warning: python.model_interpreters.{name}: no repository has a model of that name"
                for name in settings.python.model_interpreters
                if name not in known
            )
        for name, camera in settings.cameras.items():
            _check_camera(name, camera, data_plane, faulty_models, findings)
        for try_it, well in _tries(settings):
            try:
                try_it()
            except (SettingsError, Unavailable) as error:
                findings.note(error)
            else:
                findings.well.append(well)
        if settings.mqtt is not None:
            _check_broker(settings.mqtt, settings.device.id, findings)
    return findings


def unseen_by_service(settings: chosen.Settings) -> Iterator[str]:
    """Yield a warning for each path in a home, which the installed service cannot see."""
    for path in settings.repository.paths:
        if hint := home_hint(path):
            yield f"warning: repository.paths: {path}{hint}"
    for name, camera in settings.cameras.items():
        # A URI that is wrong is reported with its camera.
        with suppress(SettingsError):
            uri = parse_source_uri(camera.uri)
            if uri.scheme in {"file", "mcap"} and (hint := home_hint(uri.path)):
                yield f"warning: cameras.{name}.uri: {uri.path}{hint}"
        if hint := home_hint(camera.calibration or ""):
            yield f"warning: cameras.{name}.calibration: {camera.calibration}{hint}"


def _tries(settings: chosen.Settings) -> Iterator[tuple[Callable[[], object], str]]:
    """Yield checks that raise a SettingsError on a fault, each with the line for its success."""
    tls, trace, repository = settings.grpc.tls, settings.trace, settings.repository
    if settings.log.file:
        yield partial(check_log_file, settings.log.file), f"log: {settings.log.file} can be written"
    if settings.grpc.enabled and (path := settings.grpc.socket):
        yield partial(check_path, path), f"grpc: the socket can be at {path}"
    if tls.on:
        yield partial(check_certificates, tls), f"grpc: {tls.certificate} is shown to clients"
    if settings.http.enabled and (tls := settings.http.tls).on:
        yield (
            partial(check_certificates, tls, "http.tls"),
            f"http: {tls.certificate} is shown to clients",
        )
    if (file := settings.access.tokens_file) is not None:
        yield partial(Tokens, file), f"access: tokens of {file}"
    if trace.file:
        yield partial(TraceFile, trace.file), f"trace: {trace.file} can be written"
    if settings.recorder.mode != "off":
        yield partial(check_recorder, settings), f"recorder: {settings.recorder.mode}"
    if repository.signatures != "off":
        keys = ", ".join(repository.signature_keys) or "no key"
        yield partial(chosen_signatures, repository), f"models: held against {keys}"
    for name, channel in repository.channels.items():
        keys = ", ".join(channel.keys)
        yield partial(check_channel, name, channel), f"channel {name}: held against {keys}"


def _check_ports(settings: chosen.Settings, findings: Findings) -> None:
    runs = settings.grpc.enabled and settings.grpc.port > 0 and _check_grpc(settings, findings)
    http, metrics = settings.http, settings.metrics
    for name, enabled, host, port in (
        ("http", http.enabled, http.host, http.port),
        ("metrics", metrics.enabled, metrics.host, metrics.port),
    ):
        if not (enabled and port):
            continue
        where = f"{host}:{port}"
        trouble, is_taken = _try_port(host, port, f"--{name}")
        if not trouble:
            findings.well.append(f"{name} {where}: is free")
        elif not (runs and is_taken):
            findings.unavailable.append(f"{name} cannot listen on {where}: {trouble}")


def _check_grpc(settings: chosen.Settings, findings: Findings) -> bool:
    """Return whether the daemon itself seems to run there."""
    grpc = settings.grpc
    where = f"{grpc.host}:{grpc.port}"
    trouble, is_taken = _try_port(grpc.host, grpc.port, "--grpc")
    if not trouble:
        findings.well.append(f"grpc {where}: is free")
        return False
    us = f"{settings.serving.name} {version('edge-server')}"
    if is_taken and server_name(grpc) == us:
        findings.well.append(f"grpc {where}: is taken by {us}: the daemon runs")
        return True
    needs_token = settings.access.tokens_file is not None
    if is_taken and (grpc.tls.on or grpc.restricted or needs_token):
        # The daemon does not identify itself to a client without credentials.
        hint = f"; {TOKEN} with a token that may read shows which" if needs_token else ""
        findings.well.append(
            f"warning: grpc {where}: is taken, by the daemon or something else{hint}"
        )
        return True
    findings.unavailable.append(f"gRPC cannot listen on {where}: {trouble}")
    return False


def _try_port(host: str, port: int, flags: str) -> tuple[str, bool]:
    """Bind and release the address.

    Args:
        flags: prefix of the flags for address and port: `--grpc`.

    Returns:
        Why the address cannot be bound now, with the remedy, empty if it can be; and whether a
        process listens there.
    """
    try:
        listener(host, port).close()
    except OSError as error:
        return remedy(error, flags), error.errno == errno.EADDRINUSE
    return "", False


def _check_models(
    repository: chosen.Repository,
    control: RepositoryControl,
    data_plane: DataPlane,
    findings: Findings,
) -> set[str] | None:
    """Return the names of the faulty models; None means all of them."""
    try:
        failed = control.load_first()
    except ModelConfigError as error:
        findings.note(error)
        return None
    ready = data_plane.index(only_ready=True)
    for each in ready:
        chosen = each.configuration
        where = "" if chosen is None else f", {chosen}"
        warning = "warning: " if chosen is not None and chosen.degraded else ""
        line = f"{warning}model {each.name} version {each.version}: {each.state.value}{where}"
        findings.well.append(line)
    if not ready and not failed:
        findings.well.append(f"warning: {_nothing(repository)}")
    for entry in failed:
        if not repository.exit_on_error:
            findings.well.append(f"warning: {entry.reason}; the daemon goes on without it")
        elif entry.may_pass:
            findings.unavailable.append(entry.reason)
        else:
            findings.faults.append(entry.reason)
    return {entry.name for entry in failed}


def _nothing(repository: chosen.Repository) -> str:
    """Return the reason why no model is loaded at the start."""
    if repository.mode == "explicit" and not repository.load:
        return "mode explicit and no --load-model: nothing is served until a client loads it"
    where = ", ".join(repository.paths) or "repository.paths, which is empty"
    return f"no models in {where}: there is nothing to serve"


def _check_camera(
    name: str,
    settings: chosen.CameraSection,
    data_plane: DataPlane,
    faulty_models: set[str] | None,
    findings: Findings,
) -> None:
    """Check one camera; a fault of its model is reported with the model, not here."""
    try:
        camera = Camera(name, settings.uri, options=source_options(name, settings))
        if (calibration := calibration_of(name, settings)) is not None:
            findings.well.append(f"camera {name}: calibration {calibration.id}")
    except SettingsError as error:
        findings.note(error)
        return
    is_well = faulty_models is not None and settings.model not in faulty_models
    if is_well:
        try:
            LanePipeline(camera, data_plane, settings.model, ()).validate()
            for network, section in settings.networks.items():
                _check_network(
                    NetworkPipeline(
                        name,
                        network,
                        section,
                        data_plane,
                        (),
                        shares=FairShares(),
                        calibration=calibration,
                    ),
                    camera,
                    findings,
                )
        except (SettingsError, Unavailable) as error:
            findings.note(error)
            is_well = False
    try:
        camera.open(LIVE.first_frame)
        status = camera.status
    except SourceError as error:
        findings.note(error, f"cameras.{name}.uri: ")
        return
    finally:
        camera.stop()
    if camera.is_live and not status.arriving:
        findings.well.append(
            f"warning: camera {name}: {status.text}; the daemon goes on, and opens it again"
        )
    elif is_well:
        shown = masked_uri(settings.uri)
        takers = settings.model or ", ".join(settings.networks)
        findings.well.append(f"camera {name}: {shown}: gives frames to {takers}")


def _check_network(network: NetworkPipeline, camera: Camera, findings: Findings) -> None:
    try:
        network.validate(live=camera.is_live)
    except (SettingsError, Unavailable) as error:
        findings.note(error)
    else:
        findings.well.append(
            f"camera {camera.name}: network {network.name}: {network.model.name} gives "
            f"{network.model.task}"
        )


def _check_broker(mqtt: chosen.Mqtt, device: str, findings: Findings) -> None:
    if faults := faults_of(mqtt):
        findings.faults += faults
        return
    address = address_of(mqtt)
    client_id = f"{Identity.of_this_host(device, '').client_id}-check"
    tested = try_broker(mqtt, client_id)
    if not tested.fault:
        findings.well.append(f"mqtt {address}: accepts the connection; lanes and status go there")
    elif tested.permanent:
        findings.faults.append(
            f"mqtt {address}: the broker refuses us: {tested.fault}; correct username and "
            "password_file of [mqtt], or ca_file, or what the broker lets in"
        )
    else:
        findings.well.append(
            f"warning: mqtt {address}: {tested.fault}; the daemon goes on, and tries again"
        )
