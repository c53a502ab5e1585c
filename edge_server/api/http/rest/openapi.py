"""The description of the paths, in OpenAPI 3.1; made of the same table as the routes."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from edge_server.api.http.rest.table import PATHS, Path

_ERROR = {"$ref": "#/components/responses/Error"}
_ANY: dict[str, Any] = {"type": "object"}
_TENSOR = {
    "type": "object",
    "required": ["name", "datatype", "shape"],
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string", "examples": ["FP32"]},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "parameters": _ANY,
        "data": {"type": "array", "items": {}},
    },
}
_REGION = {
    "type": "object",
    "required": ["key", "byte_size"],
    "properties": {
        "key": {"type": "string"},
        "offset": {"type": "integer", "minimum": 0},
        "byte_size": {"type": "integer", "minimum": 1},
    },
}
_SCHEMAS: dict[str, Any] = {
    "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    "Server": {
        "type": "object",
        "required": ["name", "version", "extensions"],
        "properties": {
            "name": {"type": "string"},
            "version": {"type": "string"},
            "extensions": {"type": "array", "items": {"type": "string"}},
        },
    },
    "Model": {
        "type": "object",
        "required": ["name", "versions", "platform", "inputs", "outputs"],
        "properties": {
            "name": {"type": "string"},
            "versions": {"type": "array", "items": {"type": "string"}},
            "platform": {"type": "string"},
            "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
            "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
        },
    },
    "Config": _ANY,
    "Statistics": _ANY,
    "Tensor": _TENSOR,
    "InferRequest": {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": _ANY,
            "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}, "parameters": _ANY},
                },
            },
        },
    },
    "InferResponse": {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "id": {"type": "string"},
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "parameters": _ANY,
            "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
        },
    },
    "Generate": _ANY,
    "Generated": _ANY,
    "TraceSettings": _ANY,
    "LogSettings": _ANY,
    "IndexRequest": {"type": "object", "properties": {"ready": {"type": "boolean"}}},
    "Index": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {
                name: {"type": "string"} for name in ("name", "version", "state", "reason")
            },
        },
    },
    "LoadRequest": {
        "type": "object",
        "properties": {
            "parameters": {"type": "object", "additionalProperties": {"type": "string"}}
        },
    },
    "UnloadRequest": {
        "type": "object",
        "properties": {
            "parameters": {
                "type": "object",
                "properties": {"unload_dependents": {"type": "boolean"}},
            }
        },
    },
    "Region": _REGION,
    "Regions": {"type": "array", "items": _REGION},
}
_PARAMETER = re.compile(r"{(\w+)}")


def document(name: str, version: str) -> bytes:
    """Return the description of this server's paths as JSON."""
    paths: dict[str, dict[str, Any]] = {}
    for each in PATHS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": f"{name}: KServe v2 over HTTP, with the extensions of Triton",
                "version": version,
            },
            "paths": paths,
            "components": {
                "schemas": _SCHEMAS,
                "responses": {"Error": {"description": "Why not", **_content("Error")}},
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
            # Only where the server has tokens.
            "security": [{}, {"token": []}],
        }
    )


def _operation(path: Path) -> dict[str, Any]:
    content = _content(path.response, streams=path.streams) if path.response else {}
    made: dict[str, Any] = {
        "operationId": _operation_id(path),
        "summary": path.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _schema_of(name)}
            for name in _PARAMETER.findall(path.path)
        ],
        "responses": {"200": {"description": "Done", **content}, "default": _ERROR},
    }
    if path.body:
        made["requestBody"] = _content(path.body)
    if path.body == "InferRequest":
        binary: dict[str, Any] = {"application/octet-stream": {}}
        made["requestBody"]["content"] |= binary
        made["responses"]["200"]["content"] |= binary
        made["parameters"].append(
            {
                "name": "Inference-Header-Content-Length",
                "in": "header",
                "description": "Bytes of the JSON before the binary tensors; 0 is a body that is "
                "the model's one input",
                "schema": {"type": "integer", "minimum": 0},
            }
        )
    return made


def _content(schema: str, *, streams: bool = False) -> dict[str, Any]:
    kind = "text/event-stream" if streams else "application/json"
    return {"content": {kind: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}}


def _schema_of(parameter: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0} if parameter == "version" else {"type": "string"}


def _operation_id(path: Path) -> str:
    words = [word.strip("{}") for word in path.path.split("/") if word]
    return "_".join([path.method.lower(), *words]).replace("-", "_")
