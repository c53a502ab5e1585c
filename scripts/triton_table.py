"""Write the generated tables of docs/triton.md: every field, flag, RPC, extension and Python
function of Triton.

python scripts/triton_table.py            # write them
python scripts/triton_table.py --check    # fail where they are not current
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2, service_pb2

from edge_server.api.triton_calls import server_extensions
from edge_server.backends.python import pb_utils
from edge_server.cli.flags import GROUPS
from edge_server.model_config.parse import ACCEPTED, ACTED_ON, ACTED_ON_BY, REFUSED

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "triton.md"
BEGIN = "<!-- from here on written by scripts/triton_table.py -->\n"
_DEEPEST = 8
# Triton's command line has all groups but this one.
_OURS = "Appliance"
# CUDA shared memory has no Jetson driver: answered, never registered.
_ABSENT_RPCS = {
    "CudaSharedMemoryRegister": "no CUDA IPC on a Jetson; use system shared memory",
}
# Flags whose default or effect differs; the help says how.
_DIFFERENT_FLAGS = {
    "backend-config",
    "grpc-address",
    "grpc-http2-max-ping-strikes",
    "http-address",
    "metrics-address",
}
# In Triton's order; the note is ours.
_EXTENSIONS = {
    "classification": "",
    "sequence": "",
    "model_repository": "",
    "model_repository(unload_dependents)": "",
    "schedule_policy": "",
    "model_configuration": "",
    "system_shared_memory": "listed with --allow-client-shm=true only",
    "cuda_shared_memory": "no CUDA IPC on a Jetson; use system shared memory",
    "binary_tensor_data": "",
    "parameters": "",
    "statistics": "",
    "trace": "listed with --trace-config triton,file=FILE only",
    "logging": "",
}
# Class of pb_utils, or none, and what model.py uses of it.
_PYTHON = {
    "": "get_input_tensor_by_name get_output_tensor_by_name get_input_config_by_name "
    "get_output_config_by_name using_decoupled_model_transaction_policy triton_to_numpy_type "
    "numpy_to_triton_type triton_string_to_numpy TRITON_STRING_TO_NUMPY serialize_byte_tensor "
    "deserialize_bytes_tensor get_model_dir load_model unload_model is_model_ready "
    "TritonModelException TRITONSERVER_REQUEST_FLAG_SEQUENCE_START "
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END TRITONSERVER_RESPONSE_COMPLETE_FINAL "
    "TRITONSERVER_REQUEST_RELEASE_ALL TRITONSERVER_REQUEST_RELEASE_RESCHEDULE "
    "TRITONSERVER_MEMORY_GPU TRITONSERVER_MEMORY_CPU",
    "InferenceRequest": "inputs request_id correlation_id requested_output_names flags set_flags "
    "timeout parameters preferred_memory trace exec async_exec get_response_sender is_cancelled "
    "set_release_flags",
    "InferenceResponse": "output_tensors has_error error parameters",
    "InferenceResponseSender": "send is_cancelled",
    "ResponseIterator": "__iter__ __next__ cancel",
    "Tensor": "name as_numpy triton_dtype shape is_cpu to_dlpack from_dlpack __dlpack__ "
    "__dlpack_device__",
    "TritonError": "message code UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED "
    "ALREADY_EXISTS CANCELLED",
    "Logger": "log log_info log_warn log_error log_verbose INFO WARNING ERROR VERBOSE",
    "MetricFamily": "Metric COUNTER GAUGE HISTOGRAM",
    "Metric": "increment set observe value",
    "ModelConfig": "as_dict set_max_batch_size set_dynamic_batching add_input add_output "
    "set_model_transaction_policy",
    "PreferredMemory": "__init__",
}
_ON_HOST = "a Python model's tensors are on the host"
_DIFFERENT_IN_PYTHON = {
    "InferenceRequest.preferred_memory": _ON_HOST,
    "PreferredMemory": _ON_HOST,
    "Tensor.is_cpu": f"always true: {_ON_HOST}",
    "Tensor.from_dlpack": f"refuses memory of a GPU: {_ON_HOST}",
    "InferenceRequest.trace": "what the constructor got; a nested request is in its caller's trace "
    "in any case",
    "ResponseIterator.__iter__": "a second time over the first 64 responses only",
    "InferenceRequest.set_release_flags": "without effect after the last response",
}
# What model.py defines.
_OF_MODELS = ("initialize", "execute", "finalize", "auto_complete_config", "is_ready")


def tables() -> str:
    return "\n".join(
        [
            "## config.pbtxt\n",
            *_table("field", _fields(model_config_pb2.ModelConfig.DESCRIPTOR, "", 0)),
            "\n## Flags\n",
            *_table("flag", _flags()),
            "\n## RPCs\n",
            *_table("RPC", _rpcs()),
            "\n## Extensions\n",
            *_table("extension", _extensions()),
            "\n## Python functions\n",
            *_table("function", _python()),
        ]
    )


def _table(what: str, rows: Iterator[tuple[str, str, str]]) -> list[str]:
    lines = [f"| {what} | here | why |", "|---|---|---|"]
    return lines + [
        f"| `{name}` | {here} | {why.replace('|', chr(92) + '|')} |" for name, here, why in rows
    ]


def _fields(message: Any, prefix: str, depth: int) -> Iterator[tuple[str, str, str]]:
    for field in message.fields:
        path = f"{prefix}{field.name}"
        if path in REFUSED:
            yield path, "absent", REFUSED[path]
        elif path in ACCEPTED:
            yield path, "without effect", ACCEPTED[path]
        elif path in ACTED_ON:
            yield path, "same", _backends(path)
        elif field.message_type is not None and depth < _DEEPEST:
            inside = field.message_type
            if inside.GetOptions().map_entry:
                inside = inside.fields_by_name["value"].message_type
            yield from _fields(inside, f"{path}.", depth + 1)
        else:
            raise SystemExit(f"{path}: edge_server/model_config/parse.py does not classify it")


def _backends(path: str) -> str:
    """The backends that act on a field; empty where all do."""
    found = (names for key, names in ACTED_ON_BY.items() if f"{path}.".startswith(f"{key}."))
    return "".join(f"by {', '.join(sorted(names))}" for names in found)


def _flags() -> Iterator[tuple[str, str, str]]:
    for title, flags in GROUPS.items():
        for flag in flags:
            here = {"ignored": "without effect", "refused": "absent"}.get(flag.effect, "same")
            if title == _OURS:
                here = "only here"
            elif flag.name in _DIFFERENT_FLAGS:
                here = "different"
            yield f"--{flag.spelling}", here, flag.text


def _rpcs() -> Iterator[tuple[str, str, str]]:
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    for method in service.methods:
        why = _ABSENT_RPCS.get(method.name, "")
        yield method.name, "absent" if why else "same", why


def _extensions() -> Iterator[tuple[str, str, str]]:
    everything: Any = SimpleNamespace(file_name="traces")
    offered = server_extensions(everything, everything, everything)
    if unknown := set(offered) - _EXTENSIONS.keys():
        raise SystemExit(f"{unknown}: no extension of Triton's")
    for name, note in _EXTENSIONS.items():
        yield name, "same" if name in offered else "absent", note


def _python() -> Iterator[tuple[str, str, str]]:
    for name in _OF_MODELS:
        yield f"TritonPythonModel.{name}", "same", "" if name != "execute" else "also async"
    for group, names in _PYTHON.items():
        owner = getattr(pb_utils, group) if group else pb_utils
        for name in names.split():
            path = f"{group}.{name}".removeprefix(".").removesuffix(".__init__")
            if not hasattr(owner, name):
                yield path, "absent", ""
            elif path in _DIFFERENT_IN_PYTHON:
                yield path, "different", _DIFFERENT_IN_PYTHON[path]
            else:
                yield path, "same", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    before = PAGE.read_text()
    made = before.partition(BEGIN)[0] + BEGIN + "\n" + tables() + "\n"
    if not check:
        PAGE.write_text(made)
    elif made != before:
        sys.exit("docs/triton.md is not current: run scripts/triton_table.py")


if __name__ == "__main__":
    main()
