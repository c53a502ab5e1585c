"""Parses config.pbtxt into an `inference.ModelConfig` message, with errors that name a remedy;
writes such a message as JSON; and says of each field whether it is acted on, accepted, or refused.

A configuration comes from the repository, and with `load_model` from a client: no list in it is
longer than is useful.

A silently ignored field is a silently broken promise, so the tables cover every field at every
depth. A path leads through messages, lists and map values alike; in `ACCEPTED` and `REFUSED` it
covers all fields under it, in `ACTED_ON` itself alone, so that a field that a later protocol adds
is refused until a developer has classified it."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, text_format
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import InvalidRequest, ModelConfigError
from edge_server.model_config.files import reading
from edge_server.tensors import DataType, shape_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from edge_server.model_config.config import ModelConfig


# A key of `parameters` in config.pbtxt: "true" declares that the callers know of the change.
ALLOW_INTERFACE_CHANGE = "allow_interface_change"
# Likewise: after so many seconds without a request the model is unloaded until the next one.
IDLE_UNLOAD_S = "idle_unload_s"
# Keys that a camera's contract reads, of whatever model the camera names: docs/networks.md.
CONTRACT_PARAMETERS = frozenset(
    {"task", "decoder", "boxes", "score_threshold", "nms_threshold", "top_k", "scores"}
)


def interface_break(old: ModelConfig, new: ModelConfig) -> str:
    """Why callers of `old` would break if `new` replaced it; empty where they would not. Extensions
    are allowed: another output, another optional input, an input that becomes optional, a dimension
    that becomes -1, larger batches."""
    return next(_breaks(old, new), "")


def _breaks(old: ModelConfig, new: ModelConfig) -> Iterator[str]:
    yield from _tensor_breaks(old, new)
    if 0 < new.max_batch_size < old.max_batch_size:
        yield f"max_batch_size is {new.max_batch_size}, was {old.max_batch_size}"
    if new.decoupled and not old.decoupled:
        yield "it is decoupled now, which only streams can call"
    if new.sequence_batching is not None and old.sequence_batching is None:
        yield "its requests need a correlation id now"


def _tensor_breaks(old: ModelConfig, new: ModelConfig) -> Iterator[str]:
    for kind, before, after in (
        ("input", old.inputs, new.inputs),
        ("output", old.outputs, new.outputs),
    ):
        present = {spec.name: spec for spec in after}
        for was in before:
            now = present.get(was.name)
            if now is None:
                yield f"{kind} '{was.name}' is gone"
                continue
            if was.datatype is not now.datatype:
                yield (f"{kind} '{was.name}' is {now.datatype.value}, was {was.datatype.value}")
            if was.optional and not now.optional:
                yield f"{kind} '{was.name}' is not optional any more"
            old_shape, new_shape = old.full_shape(was), new.full_shape(now)
            if not _accepted(kind, old, new, old_shape, new_shape):
                yield (
                    f"{kind} '{was.name}' has shape {shape_text(new_shape)}, had "
                    f"{shape_text(old_shape)}"
                )
        if kind == "input":
            for spec in after:
                if spec.name not in old.input_names and not spec.optional:
                    yield f"input '{spec.name}' is new and not optional"


def _accepted(
    kind: str,
    old: ModelConfig,
    new: ModelConfig,
    old_shape: tuple[int, ...],
    new_shape: tuple[int, ...],
) -> bool:
    if len(old_shape) != len(new_shape):
        return False
    pairs = list(zip(old_shape, new_shape, strict=True))
    if kind == "output":
        # A caller that accepts any size accepts one; -1 may still be the former size.
        return all(now == was or -1 in (now, was) for was, now in pairs)
    # The former free first dimension may become the batch, which is limited.
    unlimited = new.max_batch_size == 0 or old.max_batch_size > 0
    fits = unlimited or 1 <= old_shape[0] <= new.max_batch_size
    return fits and all(now in (was, -1) for was, now in pairs)


def unified(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that satisfies both declarations, a fixed size before -1, which is any size; None
    where they disagree."""
    if len(a) != len(b) or any(-1 not in (x, y) and x != y for x, y in zip(a, b, strict=True)):
        return None
    return tuple(max(x, y) for x, y in zip(a, b, strict=True))


# The one metric whose buckets a configuration can set.
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"

_QUEUE_POLICY = "timeout_action default_timeout_microseconds allow_timeout_override max_queue_size"
_GRAPH = "optimization.cuda.graph_spec"
_ACTED_ON = {
    "": "name platform backend max_batch_size default_model_filename cc_model_filenames "
    "metric_tags",
    "version_policy": "latest.num_versions all specific.versions",
    "input": "name data_type format dims reshape.shape is_shape_tensor optional "
    "is_non_linear_format_io allow_ragged_batch",
    "batch_input": "kind target_name data_type source_input",
    "batch_output": "kind target_name source_input",
    "output": "name data_type dims reshape.shape label_filename is_shape_tensor "
    "is_non_linear_format_io",
    "optimization": "priority graph.level input_pinned_memory.enable output_pinned_memory.enable",
    "optimization.execution_accelerators": "gpu_execution_accelerator.name "
    "gpu_execution_accelerator.parameters cpu_execution_accelerator.name "
    "cpu_execution_accelerator.parameters",
    "optimization.cuda": "graphs busy_wait_events output_copy_stream",
    _GRAPH: "batch_size input.dim graph_lower_bound.batch_size",
    "dynamic_batching": "preferred_batch_size max_queue_delay_microseconds preserve_ordering "
    "priority_levels default_priority_level",
    "dynamic_batching.default_queue_policy": _QUEUE_POLICY,
    "dynamic_batching.priority_queue_policy": _QUEUE_POLICY,
    "sequence_batching": "max_sequence_idle_microseconds direct.max_queue_delay_microseconds "
    "direct.minimum_slot_utilization control_input.name iterative_sequence",
    "sequence_batching.oldest": "max_candidate_sequences preferred_batch_size "
    "max_queue_delay_microseconds preserve_ordering",
    "sequence_batching.control_input.control": "kind int32_false_true fp32_false_true "
    "bool_false_true data_type",
    "sequence_batching.state": "input_name output_name data_type dims",
    "sequence_batching.state.initial_state": "name data_type dims zero_data data_file",
    "ensemble_scheduling": "max_inflight_requests step.model_name step.model_version "
    "step.input_map step.output_map",
    "instance_group": "name kind count gpus profile passive secondary_devices.kind "
    "secondary_devices.device_id",
    "instance_group.rate_limiter": "priority resources.name resources.global resources.count",
    "model_warmup": "name batch_size count",
    "model_warmup.inputs": "data_type dims zero_data random_data input_data_file",
    "parameters": "string_value",
    "model_metrics.metric_control": "metric_identifier.family histogram_options.buckets",
    "model_transaction_policy": "decoupled",
    "response_cache": "enable",
}
ACTED_ON = frozenset(
    f"{prefix}.{name}".removeprefix(".")
    for prefix, names in _ACTED_ON.items()
    for name in names.split()
)

# In every line of the log about something that a configuration asks for in vain; `check` collects
# these.
NO_EFFECT = "has no effect here"
_STATE_BUFFERS = "a state is handed on in memory that the server chooses"
ACCEPTED = {
    "runtime": "the backend is chosen by its name",
    "model_operations": "no libraries of custom operators are loaded",
    "optimization.gather_kernel_buffer_threshold": "the parts of a batch come together by copies",
    "optimization.eager_batching": "an instance takes its next batch when it is through with one; "
    "give it a second instance, which prepares its own meanwhile",
    f"{_GRAPH}.graph_lower_bound.input": "a graph serves smaller batches, not smaller tensors",
    "sequence_batching.state.use_same_buffer_for_input_output": _STATE_BUFFERS,
    "sequence_batching.state.use_growable_memory": _STATE_BUFFERS,
    "ensemble_scheduling.step.model_namespace": "there are no model namespaces here",
    "instance_group.host_policy": "instances are not bound to cores or memory nodes",
}
REFUSED = {
    "model_repository_agents": "there are no repository agents here; remove it, and check "
    "the files before they come into the repository",
}

MOST_ENTRIES = 1024
# numpy's own limit is 32, and one is the batch.
MOST_DIMS = 31
_MOST_ENTRIES_OF = {
    # Resources exist per instance; a graph holds device memory as long as the model is loaded.
    "instance_group.rate_limiter.resources": 64,
    _GRAPH: 64,
    "model_warmup": 64,
    # Each is on every line of the model's metrics, or a line of every scrape.
    "metric_tags": 32,
    "model_metrics.metric_control.histogram_options.buckets": 256,
}

_ENSEMBLE_HANDS_ON = "an ensemble hands tensors from model to model as they are"
# Acted on for other models, without effect for an ensemble.
_WITHOUT_EFFECT_FOR_ENSEMBLES = {
    "parameters": "an ensemble has no backend that reads them, and nothing to unload; its members "
    "have",
    "input.reshape": _ENSEMBLE_HANDS_ON,
    "output.reshape": _ENSEMBLE_HANDS_ON,
    "input.format": _ENSEMBLE_HANDS_ON,
    "input.allow_ragged_batch": "an ensemble forms no batches; set it in the member",
    "default_model_filename": "an ensemble has no file of its own",
}
# Backends that run the models of other frameworks, each instance in a process of its own.
FRAMEWORK_BACKENDS = frozenset({"pytorch", "tensorflow", "openvino", "paddle"})
# Backends whose models consist of such processes only.
PROCESS_BACKENDS = FRAMEWORK_BACKENDS | {"python"}
# Path → the backends that act on it; without effect for the others.
ACTED_ON_BY = {
    "optimization.graph": frozenset({"onnxruntime"}),
    "optimization.execution_accelerators": frozenset({"onnxruntime", "paddle"}),
    "optimization.cuda": frozenset({"tensorrt"}),
    "optimization.priority": frozenset({"tensorrt"}),
    "cc_model_filenames": frozenset({"tensorrt"}),
    "batch_input": frozenset({"onnxruntime"}),
    "batch_output": frozenset({"onnxruntime"}),
    "instance_group.secondary_devices": frozenset({"tensorrt"}),
    "default_model_filename": PROCESS_BACKENDS | {"onnxruntime", "tensorrt"},
}


def without_effect(message: Any) -> dict[str, str]:
    """The fields of a completed, valid configuration without effect on this server → why."""
    found = {}
    for path, _, _, _ in _fields(message):
        if path in ACCEPTED:
            found[path] = ACCEPTED[path]
        elif message.platform == "ensemble":
            known = CONTRACT_PARAMETERS | {ALLOW_INTERFACE_CHANGE}
            if path == "parameters" and known.issuperset(message.parameters):
                continue
            if path in _WITHOUT_EFFECT_FOR_ENSEMBLES:
                found[path] = _WITHOUT_EFFECT_FOR_ENSEMBLES[path]
        elif message.backend not in ACTED_ON_BY.get(path, {message.backend}):
            found[path] = f"backend '{message.backend}' does not use it"
    for index, control in enumerate(message.model_metrics.metric_control):
        if control.metric_identifier.family != FIRST_RESPONSE:
            found[f"model_metrics.metric_control[{index}]"] = (
                f"only the buckets of {FIRST_RESPONSE} can be set"
            )
    batching = message.dynamic_batching
    if not batching.priority_levels and (
        batching.default_priority_level or batching.priority_queue_policy
    ):
        found["dynamic_batching.priority_queue_policy"] = "'priority_levels' is 0"
    return found


def list_faults(message: Any) -> Iterator[str]:
    """Yield the lists that are too long; the other rules iterate over them."""
    for path, shown, descriptor, value in _fields(message):
        if descriptor.is_repeated:
            dims = descriptor.name in ("dims", "dim", "shape")
            most = MOST_DIMS if dims else _MOST_ENTRIES_OF.get(path, MOST_ENTRIES)
            if len(value) > most:
                yield f"field '{shown}' has {len(value)} entries; at most {most} can be"


def field_faults(message: Any) -> Iterator[str]:
    for path, shown, descriptor, value in _fields(message):
        if path in REFUSED:
            yield f"field '{shown}' is not supported by this server: {REFUSED[path]}"
        elif descriptor.enum_type is not None:
            if value not in descriptor.enum_type.values_by_number:
                known = ", ".join(descriptor.enum_type.values_by_name)
                yield f"field '{shown}' has value {value}, which means nothing; known: {known}"
        elif not (_is_message(descriptor) or path in ACTED_ON or path in ACCEPTED):
            yield f"field '{shown}' is not supported by this server; remove it"


def datatype_of(number: int) -> DataType | None:
    """The type of a `data_type` field; None for TYPE_INVALID and unknown numbers."""
    known = number in pb.DataType.values()
    return DataType.from_config(pb.DataType.Name(number)) if known else None


def _fields(message: Any, path: str = "", shown: str = "") -> Iterator[tuple[str, str, Any, Any]]:
    """Yield each set field: its path in the tables, its displayed name, descriptor and value.

    Fields under a path of `ACCEPTED` or `REFUSED` are left out.
    """
    for descriptor, value in message.ListFields():
        here = f"{path}.{descriptor.name}" if path else descriptor.name
        name = f"{shown}.{descriptor.name}" if shown else descriptor.name
        yield here, name, descriptor, value
        if here in ACCEPTED or here in REFUSED or not _is_message(descriptor):
            continue
        if is_map(descriptor):
            for key, element in sorted(value.items()):
                yield from _fields(element, here, f"{name}[{key!r}]")
        elif descriptor.is_repeated:
            for index, element in enumerate(value):
                yield from _fields(element, here, f"{name}[{index}]")
        else:
            yield from _fields(value, here, name)


def is_map(descriptor: Any) -> bool:
    return descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry


def _is_message(descriptor: Any) -> bool:
    """Whether a field's values have fields of their own: not so for a map from text to text."""
    if is_map(descriptor):
        return descriptor.message_type.fields_by_name["value"].message_type is not None
    return descriptor.message_type is not None


# A configuration is a page of text; a text of this size already takes 0.14 s to parse.
MAX_CONFIG_BYTES = 256 * 1024
# To unescape backslashes in a row protobuf takes the square of their number, in which no other
# thread runs: half a minute for 100 kB.
_MOST_BACKSLASHES = 64
# The message itself nests eight deep.
_MAX_JSON_DEPTH = 32

_UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "(\w+)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "([\w.]+)" has no value named (\w+)')

# Protobuf writes 64-bit integers as strings. For these fields Triton converts them back to numbers,
# so that a model may use `dims` directly.
_INTEGERS = frozenset(
    {
        "dims",
        "shape",
        "versions",
        "model_version",
        "max_queue_delay_microseconds",
        "default_timeout_microseconds",
        "max_sequence_idle_microseconds",
    }
)


def read_model_config(path: Path) -> Any:
    """Read the message from `path`; an absent file is an empty configuration.

    Raises:
        ModelConfigError: unreadable, too large, or not a ModelConfig; names file, line and remedy.
    """
    with reading(path):
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_CONFIG_BYTES + 1)
        except FileNotFoundError:
            return pb.ModelConfig()
    if len(raw) > MAX_CONFIG_BYTES:
        raise ModelConfigError(
            f"{path}: a model configuration has at most {MAX_CONFIG_BYTES} bytes; this one is "
            "larger"
        )
    if b"\\" * (_MOST_BACKSLASHES + 1) in raw:
        raise ModelConfigError(
            f"{path}: has more than {_MOST_BACKSLASHES} backslashes in a row, which no model "
            "configuration needs; remove them"
        )
    try:
        entries = text_format.Parse(raw.decode("utf-8"), _message_with_plain_entries()())
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{path}: not UTF-8 text at byte {error.start}; config.pbtxt is protobuf text format"
        ) from error
    except RecursionError as error:
        raise ModelConfigError(f"{path}: nested too deeply to be a model configuration") from error
    except text_format.ParseError as error:
        text = re.sub(r"^\d+:\d+ : ", "", str(error))
        raise ModelConfigError(
            f"{path}:{error.GetLine()}:{error.GetColumn()}: {text}{_suggestion(text)}"
        ) from error
    faults = "\n".join(f"{path}: {fault}" for fault in _keys_given_twice(entries, path))
    if faults:
        raise ModelConfigError(faults)
    return pb.ModelConfig.FromString(entries.SerializeToString())


def parse_model_config_json(text: str, name: str) -> Any:
    """Parse `text` in the protocol's JSON form; a message without a name gets `name`. Raises
    InvalidRequest where it is too large, nested too deeply, or no ModelConfig (Triton's text)."""
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidRequest(
            f"Invalid config override: {len(text)} characters; a model configuration has at most "
            f"{MAX_CONFIG_BYTES}"
        )
    if not text.lstrip().startswith("{"):
        raise InvalidRequest("Invalid config override: not a JSON object")
    try:
        fields = json.loads(text, object_pairs_hook=_without_repetition)
        # protobuf raises no error of its own for half a surrogate pair, which JSON can have.
        json.dumps(fields, ensure_ascii=False).encode()
        fields = _with_lists(fields, pb.ModelConfig.DESCRIPTOR)
        message = json_format.ParseDict(
            fields, pb.ModelConfig(), max_recursion_depth=_MAX_JSON_DEPTH
        )
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"Invalid config override: {error}") from error
    message.name = message.name or name
    return message


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises: ValueError: a key is given twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = Counter(key for key, _ in pairs)
        raise ValueError(f"'{keys.most_common(1)[0][0]}' is given more than once")
    return made


def _with_lists(value: Any, message: Any) -> Any:
    """`value` with each object in a list of its own where `message` has a list of objects: Triton's
    own parser takes `{"instance_group": {"count": 2}}`."""
    if not isinstance(value, dict):
        return value
    made = {}
    for key, entry in value.items():
        field = message.fields_by_name.get(key) or message.fields_by_camelcase_name.get(key)
        inside = None if field is None else field.message_type
        if inside is not None and not inside.GetOptions().map_entry:
            if field.is_repeated and isinstance(entry, dict):
                entry = [entry]  # noqa: PLW2901 - the same entry in its own form
            if isinstance(entry, list):
                made[key] = [_with_lists(each, inside) for each in entry]
                continue
            entry = _with_lists(entry, inside)  # noqa: PLW2901
        made[key] = entry
    return made


@cache
def _message_with_plain_entries() -> Any:
    """`inference.ModelConfig` with lists of entries for maps: a map keeps the last duplicate."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    unseen = list(file.message_type)
    while unseen:
        message = unseen.pop()
        message.options.ClearField("map_entry")
        unseen += message.nested_type
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(pb.ModelConfig.DESCRIPTOR.full_name))


def _keys_given_twice(entries: Any, path: Path) -> Iterator[str]:
    name = entries.name or path.parent.name
    for key in _repeated(entries.parameters):
        yield f"parameter '{key}' is given more than once for {name}"
    for level in _repeated(entries.dynamic_batching.priority_queue_policy):
        yield f"priority queue policy for level {level} is given more than once for {name}"
    for sample in entries.model_warmup:
        for key in _repeated(sample.inputs):
            yield f"input '{key}' is given more than once in warm-up '{sample.name}' for {name}"
    for index, step in enumerate(entries.ensemble_scheduling.step):
        for kind, pairs in (("input", step.input_map), ("output", step.output_map)):
            for key in _repeated(pairs):
                yield (
                    f"{kind} '{key}' in model '{step.model_name}' is mapped to multiple ensemble "
                    f"tensors for ensemble '{name}' step {index}"
                )


def _repeated(pairs: Iterable[Any]) -> list[Any]:
    return [key for key, count in Counter(pair.key for pair in pairs).items() if count > 1]


def _suggestion(text: str) -> str:
    pool = descriptor_pool.Default()
    if match := _UNKNOWN_FIELD.search(text):
        message = pool.FindMessageTypeByName(match[1])
        known, wrong = [str(field.name) for field in message.fields], match[2]
    elif match := _UNKNOWN_VALUE.search(text):
        enum = pool.FindEnumTypeByName(match[1])
        known, wrong = [str(value.name) for value in enum.values], match[2]
    else:
        return ""
    nearest = difflib.get_close_matches(wrong, known, n=1)
    return f' Did you mean "{nearest[0]}"?' if nearest else f" Known: {', '.join(known)}."


def config_json(message: Any) -> dict[str, Any]:
    """Return an `inference.ModelConfig` as the dict that Triton gives to `model.py`; unset fields
    are present with their defaults."""
    whole = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _with_integers(whole, message.DESCRIPTOR)


def _with_integers(fields: dict[str, Any], message: Any) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in fields.items():
        field = message.fields_by_name[key]
        inside = field.message_type
        if is_map(field):
            # Its keys are anybody's, such as a metric tag `model_version`.
            each = inside.fields_by_name["value"].message_type
            made[key] = {k: _with_integers(v, each) if each else v for k, v in value.items()}
        elif inside is not None and field.is_repeated:
            made[key] = [_with_integers(element, inside) for element in value]
        elif inside is not None:
            made[key] = _with_integers(value, inside)
        elif key in _INTEGERS:
            made[key] = [int(each) for each in value] if field.is_repeated else int(value)
        else:
            made[key] = value
    return made
