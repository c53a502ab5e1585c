"""Every path of the protocol: what serves it, what it needs, and its description by OpenAPI."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from edge_server.api.access import TRITON
from edge_server.api.http.rest import server_calls as calls
from edge_server.api.http.rest.infer import infer

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.api.http.rest.api import Answer, RestApi, RestCall

    Function = Callable[[RestApi, RestCall], Answer]


class Path(NamedTuple):
    """One path, as OpenAPI writes it.

    Attributes:
        operation: the same call of gRPC, by which the access rules know it.
        function: runs on a thread, and its docstring begins with what the path does; None is
            generate, whose responses come one by one.
    """

    method: str
    path: str
    operation: str
    function: Function | None

    @property
    def runs_model(self) -> bool:
        return self.operation in ("ModelInfer", "ModelStreamInfer")

    @property
    def streams(self) -> bool:
        """Whether its response is a stream of events."""
        return self.operation == "ModelStreamInfer"

    @property
    def is_question(self) -> bool:
        """Whether its body has neither tensors nor files."""
        return not self.runs_model and self.operation != "RepositoryModelLoad"

    @property
    def method_name(self) -> str:
        """As the access rules spell it."""
        return TRITON + self.operation


# The beginnings of paths that differ in nothing else.
_BEGINNINGS = {
    "MODEL": ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"),
    "REPOSITORY": ("/v2/repository", "/v2/repository/{repository}"),
    "SYSTEM": ("/v2/systemsharedmemory", "/v2/systemsharedmemory/region/{region}"),
    "CUDA": ("/v2/cudasharedmemory", "/v2/cudasharedmemory/region/{region}"),
    "/v2": ("/v2",),
}
_ROWS: tuple[tuple[str, str, Function | None], ...] = (
    ("GET /v2/health/live", "ServerLive", calls.live),
    ("GET /v2/health/ready", "ServerReady", calls.ready),
    ("GET /v2", "ServerMetadata", calls.server_metadata),
    ("GET /v2/models/stats", "ModelStatistics", calls.statistics),
    ("GET MODEL", "ModelMetadata", calls.model_metadata),
    ("GET MODEL/ready", "ModelReady", calls.model_ready),
    ("GET MODEL/config", "ModelConfig", calls.model_config),
    ("GET MODEL/stats", "ModelStatistics", calls.statistics),
    ("POST MODEL/infer", "ModelInfer", infer),
    ("POST MODEL/generate", "ModelInfer", None),
    ("POST MODEL/generate_stream", "ModelStreamInfer", None),
    ("GET /v2/trace/setting", "TraceSetting", calls.trace_setting),
    ("POST /v2/trace/setting", "TraceSetting", calls.trace_setting),
    ("GET MODEL/trace/setting", "TraceSetting", calls.trace_setting),
    ("POST MODEL/trace/setting", "TraceSetting", calls.trace_setting),
    ("GET /v2/logging", "LogSettings", calls.log_settings),
    ("POST /v2/logging", "LogSettings", calls.log_settings),
    ("POST REPOSITORY/index", "RepositoryIndex", calls.repository_index),
    ("POST REPOSITORY/models/{model}/load", "RepositoryModelLoad", calls.load),
    ("POST REPOSITORY/models/{model}/unload", "RepositoryModelUnload", calls.unload),
    ("GET SYSTEM/status", "SystemSharedMemoryStatus", calls.region_status),
    ("POST SYSTEM/register", "SystemSharedMemoryRegister", calls.register_region),
    ("POST SYSTEM/unregister", "SystemSharedMemoryUnregister", calls.unregister_region),
    ("GET CUDA/status", "CudaSharedMemoryStatus", calls.cuda_region_status),
    ("POST CUDA/register", "CudaSharedMemoryRegister", calls.register_cuda_region),
    ("POST CUDA/unregister", "CudaSharedMemoryUnregister", calls.unregister_cuda_region),
)


def _paths(at: str, operation: str, function: Function | None) -> list[Path]:
    method, _, path = at.partition(" ")
    begin = next(word for word in _BEGINNINGS if path.startswith(word))
    rest = path.removeprefix(begin)
    return [Path(method, each + rest, operation, function) for each in _BEGINNINGS[begin]]


PATHS = tuple(path for row in _ROWS for path in _paths(*row))


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", "properties": properties}
    return made | ({"required": list(required)} if required else {})


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_TEXT, _ANY = {"type": "string"}, {"type": "object"}
_COUNT = {"type": "integer", "minimum": 0}
_TENSORS = _list(_ref("Tensor"))
_SCHEMAS = {
    "Error": _object("error", error=_TEXT),
    "Tensor": _object(
        *("name", "datatype", "shape"),
        name=_TEXT,
        datatype={"type": "string", "examples": ["FP32"]},
        shape=_list({"type": "integer"}),
        parameters=_ANY,
        data=_list({}),
    ),
    "Server": _object(
        *("name", "version", "extensions"), name=_TEXT, version=_TEXT, extensions=_list(_TEXT)
    ),
    "Model": _object(
        *("name", "versions", "platform", "inputs", "outputs"),
        name=_TEXT,
        versions=_list(_TEXT),
        platform=_TEXT,
        inputs=_TENSORS,
        outputs=_TENSORS,
    ),
    "InferRequest": _object(
        "inputs",
        id=_TEXT,
        parameters=_ANY,
        inputs=_TENSORS,
        outputs=_list(_object("name", name=_TEXT, parameters=_ANY)),
    ),
    "InferResponse": _object(
        *("model_name", "model_version", "outputs"),
        id=_TEXT,
        model_name=_TEXT,
        model_version=_TEXT,
        parameters=_ANY,
        outputs=_TENSORS,
    ),
    "Generate": _ANY,
    "Generated": _ANY,
    "Config": _ANY,
    "Statistics": _ANY,
    "TraceSettings": _ANY,
    "LogSettings": _ANY,
    "IndexRequest": _object(ready={"type": "boolean"}),
    "Index": _list(_object("name", name=_TEXT, version=_TEXT, state=_TEXT, reason=_TEXT)),
    "LoadRequest": _object(parameters={"type": "object", "additionalProperties": _TEXT}),
    "UnloadRequest": _object(parameters=_object(unload_dependents={"type": "boolean"})),
    "Region": _object("key", "byte_size", key=_TEXT, offset=_COUNT, byte_size=_COUNT),
    "Regions": _list(_ref("Region")),
}
# By operation: of a POST's body, and of the response.
_BODIES = {
    "TraceSetting": "TraceSettings",
    "LogSettings": "LogSettings",
    "ModelInfer": "InferRequest",
    "RepositoryIndex": "IndexRequest",
    "RepositoryModelLoad": "LoadRequest",
    "RepositoryModelUnload": "UnloadRequest",
    "SystemSharedMemoryRegister": "Region",
    "CudaSharedMemoryRegister": "Region",
}
_RESPONSES = {
    "ServerMetadata": "Server",
    "ModelMetadata": "Model",
    "ModelConfig": "Config",
    "ModelStatistics": "Statistics",
    "ModelInfer": "InferResponse",
    "TraceSetting": "TraceSettings",
    "LogSettings": "LogSettings",
    "RepositoryIndex": "Index",
    "SystemSharedMemoryStatus": "Regions",
    "CudaSharedMemoryStatus": "Regions",
}


def document(name: str, version: str) -> bytes:
    """Return the description of this server's paths as JSON."""
    paths: dict[str, dict[str, Any]] = {}
    for each in PATHS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    error = {"description": "Why not", **_content("application/json", "Error")}
    title = f"{name}: KServe v2 over HTTP, with the extensions of Triton"
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": version},
            "paths": paths,
            "components": {
                "schemas": _SCHEMAS,
                "responses": {"Error": error},
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
            # Only where the server has tokens.
            "security": [{}, {"token": []}],
        }
    )


def _operation(path: Path) -> dict[str, Any]:
    body = _BODIES.get(path.operation, "") if path.method == "POST" else ""
    response = _RESPONSES.get(path.operation, "")
    summary = "Run a model: one flat object in, one or many out."
    if path.function is None:
        body, response = "Generate", "Generated"
    else:
        summary = (path.function.__doc__ or "").partition("\n")[0]
    words = [word.strip("{}") for word in path.path.split("/") if word]
    made: dict[str, Any] = {
        "operationId": "_".join([path.method.lower(), *words]).replace("-", "_"),
        "summary": summary.removesuffix("."),
        "parameters": [
            _parameter(name, "path", _COUNT if name == "version" else _TEXT, required=True)
            for name in re.findall(r"{(\w+)}", path.path)
        ],
        "responses": {
            "200": {"description": "Done"},
            "default": {"$ref": "#/components/responses/Error"},
        },
    }
    kind = "text/event-stream" if path.streams else "application/json"
    if response:
        made["responses"]["200"] |= _content(kind, response)
    if body:
        made["requestBody"] = _content("application/json", body)
    if path.function is infer:
        for each in (made["requestBody"], made["responses"]["200"]):
            each["content"]["application/octet-stream"] = {}
        text = (
            "Bytes of the JSON before the binary tensors; 0 is a body that is the model's one input"
        )
        length = _parameter("Inference-Header-Content-Length", "header", _COUNT, description=text)
        made["parameters"].append(length)
    return made


def _parameter(name: str, place: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "schema": schema, **more}


def _content(kind: str, schema: str) -> dict[str, Any]:
    return {"content": {kind: {"schema": _ref(schema)}}}
