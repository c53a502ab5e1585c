"""`edge-server check`: what `run` would trip over, found without starting anything.

Not looked for is what may change by itself: a taken port, a broker or a live camera that is away.
"""

from __future__ import annotations

import ssl
from functools import partial
from typing import TYPE_CHECKING

from edge_server.cameras.camera import Camera
from edge_server.cuda.devices import Devices
from edge_server.errors import ModelConfigError, SettingsError, SourceError, Unavailable
from edge_server.grpc_api.credentials import server_credentials
from edge_server.model_parts import chosen_control, chosen_scheduling, chosen_signatures
from edge_server.mqtt.broker_address import BrokerAddress
from edge_server.pipeline import LanePipeline
from edge_server.serving.data_plane import DataPlane
from edge_server.serving.registry import ModelRegistry
from edge_server.tracing.trace_file import TraceFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edge_server import settings as chosen
    from edge_server.repository.control import RepositoryControl

# Models that are being closed get so long.
CLOSE_S = 5.0


def check(settings: chosen.Settings) -> list[str]:
    """Load the models of the start, prove every camera's, open recordings, read the broker's files.

    Returns:
        What was found well, a line for each; a repository without models is told there too.

    Raises:
        SettingsError: something is faulty; one line per fault, of all kinds together.
    """
    registry = ModelRegistry()
    scheduling = chosen_scheduling(settings.serving)
    devices = Devices()
    control = chosen_control(registry, scheduling, devices, settings.repository)
    try:
        data_plane = DataPlane(registry)
        lines, faults, faulty_models = _check_models(settings.repository, control, data_plane)
        for name, camera in settings.cameras.items():
            found = _check_camera(name, camera, data_plane, faulty_models)
            faults += found
            if not found:
                lines.append(f"camera {name}: {camera.uri}: gives frames to {camera.model}")
        for try_it, well in _tries(settings):
            try:
                try_it()
            except (SettingsError, Unavailable) as error:
                faults.append(str(error))
            else:
                lines.append(well)
        if settings.mqtt is not None:
            found = _check_broker(settings.mqtt)
            faults += found
            if not found:
                address = f"{settings.mqtt.host}:{settings.mqtt.port}"
                lines.append(f"mqtt {address}: lanes and status go there")
    finally:
        control.close(CLOSE_S)
        scheduling.close()
        devices.close()
    if faults:
        raise SettingsError("\n".join(faults))
    return lines


def _tries(settings: chosen.Settings) -> Iterator[tuple[Callable[[], object], str]]:
    """What raises a SettingsError where it is not well, and what is told where it is."""
    tls, trace, repository = settings.grpc.tls, settings.trace, settings.repository
    if tls.on:
        yield partial(server_credentials, tls), f"grpc: {tls.certificate} is shown to clients"
    if trace.file:
        yield partial(TraceFile, trace.file), f"trace: {trace.file} can be written"
    if repository.signatures != "off":
        keys = ", ".join(repository.signature_keys) or "no key"
        yield partial(chosen_signatures, repository), f"models: held against {keys}"


def _check_models(
    repository: chosen.Repository, control: RepositoryControl, data_plane: DataPlane
) -> tuple[list[str], list[str], set[str] | None]:
    """What was found well, the faults, and the models to which they belong; None is to all."""
    try:
        failed = control.load_first()
    except ModelConfigError as error:
        return [], [str(error)], None
    ready = data_plane.index(only_ready=True)
    lines = [f"model {e.name} version {e.version}: {e.state.value}" for e in ready]
    if not ready and not failed:
        lines.append(f"warning: {_nothing(repository)}")
    return lines, [entry.reason for entry in failed], {entry.name for entry in failed}


def _nothing(repository: chosen.Repository) -> str:
    """Why no model is loaded at the start."""
    if repository.mode == "explicit" and not repository.load:
        return "mode explicit and no --load-model: nothing is served until it is asked for"
    where = ", ".join(repository.paths) or "repository.paths, which is empty"
    return f"no models in {where}: there is nothing to serve"


def _check_camera(
    name: str, settings: chosen.Camera, data_plane: DataPlane, faulty_models: set[str] | None
) -> list[str]:
    """The camera's faults; one of its model's own has been told with the model."""
    faults = []
    camera = Camera(name, settings.uri)
    if faulty_models is not None and settings.model not in faulty_models:
        try:
            LanePipeline(camera, data_plane, settings.model, ()).prove()
        except (SettingsError, Unavailable) as error:
            faults.append(str(error))
    try:
        camera.open()
    except SourceError as error:
        faults.append(f"cameras.{name}.uri: {error}")
    finally:
        camera.stop()
    return faults


def _check_broker(mqtt: chosen.Mqtt) -> list[str]:
    try:
        address = BrokerAddress.of(mqtt)
    except SettingsError as error:
        return [str(error)]
    faults = []
    try:
        address.password()
    except OSError as error:
        faults.append(
            f"mqtt.password_file: {address.password_file}: cannot be read: {error.strerror}"
        )
    except UnicodeDecodeError as error:
        faults.append(
            f"mqtt.password_file: {address.password_file}: not UTF-8 at byte {error.start}"
        )
    if address.ca_file is not None:
        try:
            ssl.create_default_context(cafile=address.ca_file)
        except ssl.SSLError:
            faults.append(f"mqtt.ca_file: {address.ca_file}: holds no certificate in PEM form")
        except OSError as error:
            faults.append(f"mqtt.ca_file: {address.ca_file}: cannot be read: {error.strerror}")
    if address.cert_file is not None:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_cert_chain(address.cert_file, address.key_file, password="")
        except OSError as error:  # ssl.SSLError is one
            faults.append(
                f"mqtt.cert_file, mqtt.key_file: {address.cert_file}, {address.key_file}: cannot "
                f"be used: {error.strerror or error}; give a certificate and its key in PEM form, "
                "without a password"
            )
    return faults
