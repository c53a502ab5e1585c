"""Every path of the protocol: what serves it, what it needs, and its description."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from edge_server.api.access import TRITON
from edge_server.api.http.rest import server_calls as calls
from edge_server.api.http.rest.infer import infer

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.api.http.rest.api import Answer, RestApi, RestCall

    Function = Callable[[RestApi, RestCall], Answer]


class Path(NamedTuple):
    """One path.

    Attributes:
        path: as in OpenAPI.
        method: GET or POST.
        operation: the same call of gRPC, by which the access rules know it.
        summary: for the description.
        function: runs on a thread; None is generate, whose responses come one by one.
        body: name of the schema of its body, if it has one.
        response: likewise of its response.
        streams: its response is a stream of events.
    """

    path: str
    method: str
    operation: str
    summary: str
    function: Function | None
    body: str = ""
    response: str = ""
    streams: bool = False

    @property
    def runs_model(self) -> bool:
        return self.operation in ("ModelInfer", "ModelStreamInfer")

    @property
    def is_question(self) -> bool:
        """Whether its body has neither tensors nor files."""
        return not self.runs_model and self.operation != "RepositoryModelLoad"

    @property
    def method_name(self) -> str:
        """As the access rules spell it."""
        return TRITON + self.operation


_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"


def _of_models(rest: str, *described: Any, **more: Any) -> tuple[Path, Path]:
    """Return the path of a model, and that of one version."""
    return Path(_MODEL + rest, *described, **more), Path(_VERSION + rest, *described, **more)


def _of_regions(kind: str, operation: str, functions: tuple[Function, ...]) -> list[Path]:
    status, register, unregister = functions
    found = []
    for at in (f"/v2/{kind}sharedmemory", f"/v2/{kind}sharedmemory/region/{{region}}"):
        where = "of all regions" if at.endswith("memory") else "of a region"
        found += [
            Path(
                f"{at}/status",
                "GET",
                f"{operation}Status",
                f"Status {where}",
                status,
                "",
                "Regions",
            ),
            Path(
                f"{at}/register",
                "POST",
                f"{operation}Register",
                "Register a region",
                register,
                "Region",
            ),
            Path(
                f"{at}/unregister",
                "POST",
                f"{operation}Unregister",
                f"Unregistration {where}",
                unregister,
            ),
        ]
    return found


def _of_repository(at: str) -> list[Path]:
    model = f"{at}/models/{{model}}"
    return [
        Path(
            f"{at}/index",
            "POST",
            "RepositoryIndex",
            "The models of the repositories",
            calls.repository_index,
            "IndexRequest",
            "Index",
        ),
        Path(
            f"{model}/load",
            "POST",
            "RepositoryModelLoad",
            "Load a model",
            calls.load,
            "LoadRequest",
        ),
        Path(
            f"{model}/unload",
            "POST",
            "RepositoryModelUnload",
            "Unload a model",
            calls.unload,
            "UnloadRequest",
        ),
    ]


PATHS: tuple[Path, ...] = (
    Path("/v2/health/live", "GET", "ServerLive", "200 while the server runs", calls.live),
    Path(
        "/v2/health/ready",
        "GET",
        "ServerReady",
        "200 while the server is ready, else 400",
        calls.ready,
    ),
    Path(
        "/v2",
        "GET",
        "ServerMetadata",
        "The server's name and extensions",
        calls.server_metadata,
        "",
        "Server",
    ),
    Path(
        "/v2/models/stats",
        "GET",
        "ModelStatistics",
        "Statistics of all models",
        calls.statistics,
        "",
        "Statistics",
    ),
    *_of_models(
        "",
        "GET",
        "ModelMetadata",
        "A model's inputs and outputs",
        calls.model_metadata,
        "",
        "Model",
    ),
    *_of_models(
        "/ready", "GET", "ModelReady", "200 while the model is ready, else 400", calls.model_ready
    ),
    *_of_models(
        "/config", "GET", "ModelConfig", "A model's configuration", calls.model_config, "", "Config"
    ),
    *_of_models(
        "/stats",
        "GET",
        "ModelStatistics",
        "A model's statistics",
        calls.statistics,
        "",
        "Statistics",
    ),
    *_of_models(
        "/infer", "POST", "ModelInfer", "Run a model", infer, "InferRequest", "InferResponse"
    ),
    *_of_models(
        "/generate",
        "POST",
        "ModelInfer",
        "Run a model: one flat object in, one out",
        None,
        "Generate",
        "Generated",
    ),
    *_of_models(
        "/generate_stream",
        "POST",
        "ModelStreamInfer",
        "The same with any number of responses",
        None,
        "Generate",
        "Generated",
        True,
    ),
    *(
        Path(
            f"{at}/trace/setting",
            method,
            "TraceSetting",
            "Trace settings",
            calls.trace_setting,
            body,
            "TraceSettings",
        )
        for at in ("/v2", _MODEL, _VERSION)
        for method, body in (("GET", ""), ("POST", "TraceSettings"))
    ),
    Path(
        "/v2/logging", "GET", "LogSettings", "Log settings", calls.log_settings, "", "LogSettings"
    ),
    Path(
        "/v2/logging",
        "POST",
        "LogSettings",
        "Log settings",
        calls.log_settings,
        "LogSettings",
        "LogSettings",
    ),
    *_of_repository("/v2/repository"),
    *_of_repository("/v2/repository/{repository}"),
    *_of_regions(
        "system",
        "SystemSharedMemory",
        (calls.region_status, calls.register_region, calls.unregister_region),
    ),
    *_of_regions(
        "cuda",
        "CudaSharedMemory",
        (calls.cuda_region_status, calls.register_cuda_region, calls.unregister_cuda_region),
    ),
)
