"""The calls of Triton's protocol that run no model: state, metadata, models to load and unload,
regions, trace and log settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2 as pb

from edge_server.api.calls import RequestMetrics
from edge_server.api.parameters import typed_value
from edge_server.api.shared_memory import DISABLED
from edge_server.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from edge_server.inference.data_plane import NOT_ALLOWED, LoadOptions, path_in_model
from edge_server.inference.request_check import parse_version
from edge_server.inference.tracing import Tracer
from edge_server.model_config.parse import MAX_CONFIG_BYTES
from edge_server.process.logs import LogSwitches
from edge_server.process.text import as_utf8

if TYPE_CHECKING:
    from edge_server.api.shared_memory import SharedMemory
    from edge_server.inference.data_plane import DataPlane, ModelControl
    from edge_server.inference.registry import LoadedModel
    from edge_server.requests import Cancellation

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


@dataclass(frozen=True)
class TritonCalls:
    """What clients use of the daemon, and the calls that run no model, on the protocol's messages.

    gRPC and HTTP serve the same ones; the errors have Triton's texts.

    Attributes:
        control: loads and unloads models on request; None refuses such requests.
        shared_memory: the clients' regions; None refuses shared memory.
    """

    data_plane: DataPlane
    name: str
    version: str
    control: ModelControl | None = None
    shared_memory: SharedMemory | None = None
    tracer: Tracer = field(default_factory=Tracer)
    log_switches: LogSwitches = field(default_factory=LogSwitches)
    requests: RequestMetrics = field(default_factory=RequestMetrics)

    def ServerLive(self, request: Any) -> Any:
        return pb.ServerLiveResponse(live=self.data_plane.server_live())

    def ServerReady(self, request: Any) -> Any:
        return pb.ServerReadyResponse(ready=self.data_plane.server_ready())

    def ModelReady(self, request: Any) -> Any:
        ready = self.data_plane.model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    def ServerMetadata(self, request: Any) -> Any:
        extensions = server_extensions(self.control, self.shared_memory, self.tracer)
        return pb.ServerMetadataResponse(
            name=self.name, version=self.version, extensions=extensions
        )

    def ModelMetadata(self, request: Any) -> Any:
        """Return the tensors of a model, with the batch dimension in their shapes."""
        metadata = self.data_plane.metadata(request.name, request.version)
        config = metadata.config
        response = pb.ModelMetadataResponse(
            name=config.name,
            versions=[str(version) for version in metadata.versions],
            platform=config.kind,
        )
        for to, specs in ((response.inputs, config.inputs), (response.outputs, config.outputs)):
            for spec in specs:
                shape = config.full_shape(spec)
                to.add(name=spec.name, datatype=spec.datatype.value, shape=shape)
        return response

    def ModelConfig(self, request: Any) -> Any:
        metadata = self.data_plane.metadata(request.name, request.version)
        return pb.ModelConfigResponse(config=metadata.config.message)

    def ModelStatistics(self, request: Any) -> Any:
        """Return the statistics of all loaded models, of one model, or of one version."""
        name, version = request.name, request.version
        wanted_version = parse_version(version) if version else None
        found = [
            entry.loaded
            for entry in self.data_plane.index(only_ready=True)
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

    def RepositoryIndex(self, request: Any) -> Any:
        refuse_repository_name(request.repository_name)
        response = pb.RepositoryIndexResponse()
        for entry in (self.control or self.data_plane).index(only_ready=request.ready):
            response.models.add(
                name=as_utf8(entry.name),
                version=str(entry.version) if entry.version else "",
                state=entry.state.value,
                reason=as_utf8(entry.reason),
            )
        return response

    def loading(self) -> ModelControl:
        """Return the control, before a request, which may carry many bytes, is parsed.

        Raises: Unavailable: its mode loads no model on request.
        """
        if self.control is None or not self.control.loads_on_request:
            raise Unavailable(NOT_ALLOWED)
        return self.control

    def load(self, request: Any, cancellation: Cancellation | None) -> None:
        """Execute a `RepositoryModelLoadRequest`; raise as `ModelControl.load`."""
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
        options = LoadOptions(config, files, cancellation=cancellation)
        self.loading().load(request.model_name, options)

    def RepositoryModelUnload(self, request: Any) -> Any:
        refuse_repository_name(request.repository_name)
        dependents = False
        if "unload_dependents" in request.parameters:
            value = request.parameters["unload_dependents"]
            dependents = typed_value(value, "'unload_dependents' parameter", "bool_param")
        self.loading().unload(request.model_name, unload_dependents=dependents)
        return pb.RepositoryModelUnloadResponse()

    def regions(self) -> SharedMemory:
        """Return the clients' regions; raise Unsupported where clients may use none."""
        if self.shared_memory is None:
            raise Unsupported(DISABLED)
        return self.shared_memory

    def SystemSharedMemoryStatus(self, request: Any) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        if self.shared_memory is None:
            return response
        for region in self.shared_memory.regions(request.name):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return response

    def SystemSharedMemoryRegister(self, request: Any) -> Any:
        self.regions().register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryUnregister(self, request: Any) -> Any:
        self.regions().unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def CudaSharedMemoryStatus(self, request: Any) -> Any:
        """Return no region: CUDA shared memory is unsupported."""
        if request.name and self.shared_memory is not None:
            raise NotFound(f"Unable to find cuda shared memory region: '{request.name}'")
        return pb.CudaSharedMemoryStatusResponse()

    def CudaSharedMemoryRegister(self, request: Any) -> Any:
        self.regions()
        raise Unsupported(
            f"failed to register CUDA shared memory region: '{request.name}', GPUs not supported"
        )

    def CudaSharedMemoryUnregister(self, request: Any) -> Any:
        self.regions()
        return pb.CudaSharedMemoryUnregisterResponse()

    def TraceSetting(self, request: Any) -> Any:
        if request.model_name:
            try:
                self.data_plane.find(request.model_name, "")
            except (NotFound, Unavailable):
                raise InvalidRequest(f"Request for unknown model : {request.model_name}") from None
        return update_trace_settings(self.tracer, request.model_name, request.settings)

    def LogSettings(self, request: Any) -> Any:
        return update_log_settings(self.log_switches, request)


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
    for each in message.DESCRIPTOR.fields:
        if each.message_type is not None:
            duration, target = getattr(source, each.name), getattr(message, each.name)
            target.count, target.ns = duration.count, duration.ns


def refuse_repository_name(name: str) -> None:
    """Raises: Unsupported: the request names a repository."""
    if name:
        raise Unsupported("'repository_name' specification is not supported")


def refuse_long_config(size_bytes: int) -> None:
    """Raises: InvalidRequest: it is too long for a model's configuration."""
    if size_bytes > 2 * MAX_CONFIG_BYTES:
        raise InvalidRequest(
            f"load parameter 'config' has {size_bytes} bytes; a model configuration has at most "
            f"{MAX_CONFIG_BYTES}"
        )


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
