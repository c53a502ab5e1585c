"""Paths that tell about the server and its models, and those that change them: JSON and the words
of a path become the message of the same call over gRPC, whose response becomes JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonclient.grpc import service_pb2 as pb

from edge_server.api.http.rest import json_fields as fields
from edge_server.api.http.rest.api import NOTHING, Answer, as_json
from edge_server.api.triton_calls import refuse_long_config, refuse_repository_name
from edge_server.errors import InternalError, InvalidRequest
from edge_server.inference.data_plane import LoadOptions, path_in_model
from edge_server.model_config.parse import config_json

if TYPE_CHECKING:
    from edge_server.api.http.rest.api import RestApi, RestCall


def live(api: RestApi, _: RestCall) -> Answer:
    """Return 200 while the server runs."""
    return Answer(200 if api.calls.data_plane.server_live() else 400)


def ready(api: RestApi, _: RestCall) -> Answer:
    """Return 200 while the server is ready, else 400."""
    return Answer(200 if api.calls.data_plane.server_ready() else 400)


def model_ready(api: RestApi, call: RestCall) -> Answer:
    """Return 200 while the model is ready, else 400."""
    if not api.calls.data_plane.model_ready(call.model, call.version):
        raise InvalidRequest("Model version not ready")
    return NOTHING


def server_metadata(api: RestApi, _: RestCall) -> Answer:
    """Return the server's name and extensions."""
    return as_json(_plain(api.calls.ServerMetadata(pb.ServerMetadataRequest())))


def model_metadata(api: RestApi, call: RestCall) -> Answer:
    """Return a model's inputs and outputs."""
    request = pb.ModelMetadataRequest(name=call.model, version=call.version)
    return as_json(_plain(api.calls.ModelMetadata(request)))


def model_config(api: RestApi, call: RestCall) -> Answer:
    """Return a model's configuration."""
    request = pb.ModelConfigRequest(name=call.model, version=call.version)
    return as_json(config_json(api.calls.ModelConfig(request).config))


def statistics(api: RestApi, call: RestCall) -> Answer:
    """Return the statistics of all models, or of one."""
    request = pb.ModelStatisticsRequest(name=call.model, version=call.version)
    return as_json(_plain(api.calls.ModelStatistics(request)))


def _plain(message: Any) -> dict[str, Any]:
    """Return a message as a dict; unlike protobuf's JSON with numbers for 64 bits, as Triton."""
    made: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            made[field.name] = list(value) if hasattr(value, "append") else value
        elif field.message_type.GetOptions().map_entry:
            made[field.name] = {key: _plain(value[key]) for key in value}
        else:
            is_list = hasattr(value, "add")
            made[field.name] = [_plain(each) for each in value] if is_list else _plain(value)
    return made


def repository_index(api: RestApi, call: RestCall) -> Answer:
    """Return the models of the repositories."""
    refuse_repository_name(call.repository)
    only_ready = fields.field(fields.read_json(call.body), "ready", bool, default=False)
    request = pb.RepositoryIndexRequest(ready=only_ready)
    models = _plain(api.calls.RepositoryIndex(request))["models"]
    # As Triton: one that was never loaded has its name alone.
    return as_json([m if m["version"] or m["state"] else {"name": m["name"]} for m in models])


def load(api: RestApi, call: RestCall) -> Answer:
    """Load a model; files of it come in base64."""
    refuse_repository_name(call.repository)
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in fields.read_load_parameters(call.body, api.longest_bytes).items():
        if key == "config":
            refuse_long_config(memoryview(value).nbytes)
            config = fields.load_value(key, value, str)
        elif key.startswith("file:"):
            files[path_in_model(key)] = fields.load_value(key, value, bytes)
        else:
            raise InternalError("unexpected error on creating Triton parameter")
    options = LoadOptions(config, files, cancellation=call.connection)
    api.calls.loading().load(call.model, options)
    return NOTHING


def unload(api: RestApi, call: RestCall) -> Answer:
    """Unload a model."""
    refuse_repository_name(call.repository)
    parameters = fields.field(fields.read_json(call.body), "parameters", dict, default={})
    dependents = fields.field(parameters, "unload_dependents", bool, default=False)
    api.calls.loading().unload(call.model, unload_dependents=dependents)
    return NOTHING


def region_status(api: RestApi, call: RestCall) -> Answer:
    """Return all regions, or one."""
    request = pb.SystemSharedMemoryStatusRequest(name=call.region)
    regions = _plain(api.calls.SystemSharedMemoryStatus(request))["regions"]
    return as_json([regions[name] for name in sorted(regions)])


def register_region(api: RestApi, call: RestCall) -> Answer:
    """Register a region of shared memory."""
    regions, name = api.calls.regions(), call.region
    if not name:
        raise InvalidRequest("'region name' is necessary to register system shared memory region")
    given = fields.read_json(call.body)
    for required in ("key", "byte_size"):
        if required not in given:
            raise InvalidRequest(f"Shared memory register request has no '{required}' field")
    regions.register(
        name,
        fields.field(given, "key", str),
        fields.field(given, "offset", int, default=0),
        fields.field(given, "byte_size", int),
    )
    return NOTHING


def unregister_region(api: RestApi, call: RestCall) -> Answer:
    """Forget all regions, or one."""
    api.calls.regions().unregister(call.region)
    return NOTHING


def cuda_region_status(api: RestApi, call: RestCall) -> Answer:
    """Return no region: CUDA shared memory is unsupported."""
    api.calls.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(name=call.region))
    return as_json([])


def register_cuda_region(api: RestApi, call: RestCall) -> Answer:
    """Refuse a region of CUDA shared memory."""
    api.calls.regions()
    if not call.region:
        raise InvalidRequest("'region name' is necessary to register cuda shared memory region")
    raise InvalidRequest(
        f"failed to register CUDA shared memory region: '{call.region}', GPUs not supported"
    )


def unregister_cuda_region(api: RestApi, _: RestCall) -> Answer:
    """Do nothing: there is no region of CUDA shared memory."""
    api.calls.regions()
    return NOTHING


def trace_setting(api: RestApi, call: RestCall) -> Answer:
    """Return the trace settings, after the changes in the body."""
    request = pb.TraceSettingRequest(model_name=call.model)
    for key, value in _changes(call).items():
        values = request.settings[key].value
        if isinstance(value, list):
            values.extend(fields.field({key: each}, key, str) for each in value)
        elif value is not None:
            values.append(fields.field({key: value}, key, str))
    settings = api.calls.TraceSetting(request).settings
    shown = {name: list(settings[name].value) for name in sorted(settings)}
    return as_json(
        {name: value if name == "trace_level" else value[0] for name, value in shown.items()}
    )


def log_settings(api: RestApi, call: RestCall) -> Answer:
    """Return the log settings, after the changes in the body."""
    request = pb.LogSettingsRequest()
    for key, value in _changes(call).items():
        setting = request.settings[key]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int) and 0 <= value < 2**32:
            setting.uint32_param = value
        elif value is None:
            del request.settings[key]
        else:
            setting.string_param = fields.field({key: value}, key, str)
    settings = api.calls.LogSettings(request).settings
    return as_json(
        {
            name: getattr(settings[name], settings[name].WhichOneof("parameter_choice"))
            for name in sorted(settings)
        }
    )


def _changes(call: RestCall) -> dict[str, Any]:
    """Return the settings in the body; a call that only reads has none."""
    return fields.read_json(call.body) if call.method == "POST" else {}
