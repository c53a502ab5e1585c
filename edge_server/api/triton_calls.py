"""Calls that change the server: models to load and unload, trace and log settings."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2 as pb

from edge_server.api.parameters import typed_value
from edge_server.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from edge_server.inference.data_plane import NOT_ALLOWED, LoadOptions, path_in_model
from edge_server.inference.request_check import parse_version
from edge_server.model_config.parse import MAX_CONFIG_BYTES
from edge_server.process.text import as_utf8

if TYPE_CHECKING:
    from edge_server.api.shared_memory import SharedMemory
    from edge_server.inference.data_plane import DataPlane, ModelControl
    from edge_server.inference.registry import LoadedModel
    from edge_server.inference.tracing import Tracer
    from edge_server.process.logs import LogSwitches
    from edge_server.requests import Cancellation


def server_extensions(
    control: ModelControl | None, shared_memory: SharedMemory | None, tracer: Tracer
) -> tuple[str, ...]:
    """Return the supported extensions, in Triton's order and spelling."""
    offered = {
        "classification": True,
        "sequence": True,
        "model_repository": control is not None,
        "model_repository(unload_dependents)": control is not None,
        "schedule_policy": True,
        "model_configuration": True,
        "system_shared_memory": shared_memory is not None,
        "binary_tensor_data": True,
        "parameters": True,
        "statistics": True,
        "trace": bool(tracer.file_name),
        "logging": True,
    }
    return tuple(name for name, works in offered.items() if works)


def metadata_message(data_plane: DataPlane, name: str, version: str) -> Any:
    """Return a `ModelMetadataResponse`, with the batch dimension in the shapes."""
    metadata = data_plane.metadata(name, version)
    config = metadata.config
    response = pb.ModelMetadataResponse(
        name=config.name,
        versions=[str(version) for version in metadata.versions],
        platform=config.kind,
    )
    for tensors, specs in ((response.inputs, config.inputs), (response.outputs, config.outputs)):
        for spec in specs:
            tensors.add(name=spec.name, datatype=spec.datatype.value, shape=config.full_shape(spec))
    return response


def statistics_message(data_plane: DataPlane, name: str, version: str) -> Any:
    """Return a `ModelStatisticsResponse` for all loaded models, one model, or one version; raise
    InvalidRequest where it is not loaded (Triton's texts).
    """
    wanted_version = parse_version(version) if version else None
    found = [
        entry.loaded
        for entry in data_plane.index(only_ready=True)
        if entry.loaded is not None and name in ("", entry.name)
    ]
    if name and not found:
        raise InvalidRequest(f"requested model '{name}' is not available")
    if name and wanted_version is not None:
        found = [loaded for loaded in found if loaded.version == wanted_version]
        if not found:
            raise InvalidRequest(f"requested model version is not available for model '{name}'")
    response = pb.ModelStatisticsResponse()
    for loaded in found:
        _add(response, loaded)
    return response


def _add(response: Any, loaded: LoadedModel) -> None:
    counts = loaded.statistics.counts()
    model = response.model_stats.add(
        name=loaded.config.name,
        version=str(loaded.version),
        last_inference=counts.last_inference_ms,
        inference_count=counts.inference_count,
        execution_count=counts.execution_count,
    )
    _copy_durations(model.inference_stats, counts)
    for batch_size, batch in sorted(counts.batches.items()):
        _copy_durations(model.batch_stats.add(batch_size=batch_size), batch)
    for index, counted in counts.responses.items():
        _copy_durations(model.response_stats[index], counted)


def _copy_durations(message: Any, source: object) -> None:
    """Copy each duration that the message has; `source` has them by the same names."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            duration, target = getattr(source, field.name), getattr(message, field.name)
            target.count, target.ns = duration.count, duration.ns


log = logging.getLogger(__name__)

_TRACE_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
# The names of `TraceRule`, and the minimum of each.
_TRACE_NUMBERS = {
    "trace_rate": ("rate", 0),
    "trace_count": ("count", -1),
    "log_frequency": ("log_frequency", 0),
}
_TRACE_NAMES = ("trace_file", "trace_level", *_TRACE_NUMBERS, "trace_mode")
_MOST = 2**31 - 1

_LOG_BOOLEANS = {"log_info": "info", "log_warning": "warning", "log_error": "error"}
_LOG_FORMATS = ("default", "ISO8601")
_LOG_NAMES = ("log_file", *_LOG_BOOLEANS, "log_verbose_level", "log_format")


def index_message(known: ModelControl | DataPlane, *, only_ready: bool) -> Any:
    """Return a `RepositoryIndexResponse`."""
    response = pb.RepositoryIndexResponse()
    for entry in known.index(only_ready=only_ready):
        response.models.add(
            name=as_utf8(entry.name),
            version=str(entry.version) if entry.version else "",
            state=entry.state.value,
            reason=as_utf8(entry.reason),
        )
    return response


def loading(control: ModelControl | None) -> ModelControl:
    """Return `control`, before a request, which may carry many bytes, is parsed.

    Raises: Unavailable: its mode loads no model on request.
    """
    if control is None or not control.loads_on_request:
        raise Unavailable(NOT_ALLOWED)
    return control


def load_model(
    control: ModelControl, request: Any, cancellation: Cancellation | None = None
) -> None:
    """Execute a `RepositoryModelLoadRequest`; raise as `ModelControl.load`, or Triton's texts."""
    refuse_repository_name(request.repository_name)
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in request.parameters.items():
        where = f"load parameter '{key}'"
        if key == "config":
            refuse_long_config(value.ByteSize())
            config = typed_value(value, where, "string_param")
        else:
            path = path_in_model(key)
            files[path] = typed_value(value, where, "bytes_param")
    control.load(request.model_name, LoadOptions(config, files, cancellation=cancellation))


def refuse_long_config(size_bytes: int) -> None:
    """Raises: InvalidRequest: it is too long for a model's configuration."""
    if size_bytes > 2 * MAX_CONFIG_BYTES:
        raise InvalidRequest(
            f"load parameter 'config' has {size_bytes} bytes; a model configuration has at most "
            f"{MAX_CONFIG_BYTES}"
        )


def unload_model(control: ModelControl | None, request: Any) -> None:
    """Execute a `RepositoryModelUnloadRequest`; raise as `ModelControl.unload`, or Triton's
    texts.
    """
    refuse_repository_name(request.repository_name)
    dependents = False
    if "unload_dependents" in request.parameters:
        value = request.parameters["unload_dependents"]
        dependents = typed_value(value, "'unload_dependents' parameter", "bool_param")
    loading(control).unload(request.model_name, unload_dependents=dependents)


def refuse_repository_name(name: str) -> None:
    """Raises: Unsupported: the request names a repository."""
    if name:
        raise Unsupported("'repository_name' specification is not supported")


def refuse_unknown_model(data_plane: DataPlane, name: str) -> None:
    """Raises: InvalidRequest: trace settings are for a model that does not serve; empty is all."""
    if name:
        try:
            data_plane.find(name, "")
        except (NotFound, Unavailable):
            raise InvalidRequest(f"Request for unknown model : {name}") from None


def update_trace_settings(tracer: Tracer, model_name: str, settings: Any) -> Any:
    """Apply a `TraceSettingRequest`'s settings, all or none; return the settings then in force.

    A setting without a value is reset: that of the model `model_name` to the global one, the global
    one to its value at the start.

    Raises:
        InvalidRequest: an unknown setting, or an invalid value (Triton's texts).
        Unsupported: a setting that is fixed at the start of the server, or tensors.
    """
    changes = dict(_trace_change(name, tuple(value.value)) for name, value in settings.items())
    before = tracer.rule(model_name)
    if changes:
        tracer.change(model_name, changes)
    rule = tracer.rule(model_name)
    if rule.timestamps and not before.timestamps and not tracer.file_name:
        log.warning(
            "trace: a client asks for traces, and no file was chosen for them "
            "(--trace-config triton,file=FILE)"
        )
    values = {
        "trace_file": tracer.file_name,
        "trace_level": "TIMESTAMPS" if rule.timestamps else "OFF",
        "trace_rate": str(rule.rate),
        "trace_count": str(rule.count),
        "log_frequency": str(rule.log_frequency),
        "trace_mode": "triton",
    }
    response = pb.TraceSettingResponse()
    for name, value in values.items():
        response.settings[name].value.append(value)
    return response


def _trace_change(name: str, values: tuple[str, ...]) -> tuple[str, int | None]:
    """Return the change, by the names of `TraceRule`; None resets the setting."""
    if name == "trace_file":
        raise Unsupported("trace file location can not be updated through network protocol")
    if name == "trace_mode":
        raise Unsupported("trace mode can not be updated through network protocol")
    if name not in _TRACE_NAMES:
        raise InvalidRequest(f"unknown trace setting '{name}'; known: {', '.join(_TRACE_NAMES)}")
    if name == "trace_level":
        return "timestamps", _timestamps(values)
    if len(values) > 1:
        raise InvalidRequest(f"expect only 1 value for '{name}'")
    field, least = _TRACE_NUMBERS[name]
    return field, _number(name, values[0], least) if values else None


def _timestamps(levels: tuple[str, ...]) -> bool | None:
    """Return whether those levels trace timestamps; None without levels."""
    for level in levels:
        if level not in _TRACE_LEVELS:
            raise InvalidRequest(
                f"unknown trace level '{level}'; known: {', '.join(_TRACE_LEVELS)}"
            )
    if "OFF" in levels and len(levels) > 1:
        raise InvalidRequest("Expect only one trace level 'OFF' is specified")
    if "TENSORS" in levels:
        raise Unsupported(
            "trace level TENSORS is not supported: no tensors are written to traces; set "
            "TIMESTAMPS alone"
        )
    return "TIMESTAMPS" in levels if levels else None


def _number(name: str, value: str, least: int) -> int:
    digits = value.removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) < 11:
        number = int(value)
        if least <= number <= _MOST:
            return number
    raise InvalidRequest(f"Unable to parse '{name}', got: {value}")


def update_log_settings(switches: LogSwitches, request: Any) -> Any:
    """Apply a `LogSettingsRequest`, all of it or nothing; return the settings then in force.

    Raises: InvalidRequest, Unsupported: Triton's texts.
    """
    changes: dict[str, Any] = {}
    for name, value in request.settings.items():
        kind = value.WhichOneof("parameter_choice")
        if name not in _LOG_NAMES:
            raise InvalidRequest(f"unknown log setting '{name}'; known: {', '.join(_LOG_NAMES)}")
        if name == "log_file":
            raise Unsupported("log file location can not be updated through network protocol")
        if name == "log_verbose_level":
            if kind != "uint32_param":
                raise InvalidRequest("expect int32 for 'log_verbose_level'")
            changes["verbose_level"] = value.uint32_param
        elif name == "log_format":
            if value.string_param not in _LOG_FORMATS:
                raise InvalidRequest(f"invalid argument for log_format, got: {value.string_param}")
            changes["iso8601"] = value.string_param == "ISO8601"
        else:
            if kind != "bool_param":
                raise InvalidRequest(f"expect boolean for '{name}'")
            changes[_LOG_BOOLEANS[name]] = value.bool_param
    settings = switches.change(**changes) if changes else switches.settings
    response = pb.LogSettingsResponse()
    response.settings["log_file"].string_param = switches.file
    for name, attribute in _LOG_BOOLEANS.items():
        response.settings[name].bool_param = getattr(settings, attribute)
    response.settings["log_verbose_level"].uint32_param = settings.verbose_level
    response.settings["log_format"].string_param = _LOG_FORMATS[settings.iso8601]
    return response
