"""Tensors, batching, sequences, instances and warm-up: each rule in the contract's words."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import (
    Completion,
    ModelConfig,
    Placement,
    RateLimitResource,
    ragged_faults,
)
from edge_server.model_config.files import ModelFiles
from edge_server.model_config.scheduling import (
    ControlKind,
    SequenceControl,
    SequenceState,
    Warmup,
    WarmupInput,
)
from edge_server.model_config.validation import MAX_INSTANCES, batch_io_faults, validate
from edge_server.tensors import DataType

BACKENDS = frozenset({"identity", "onnxruntime", "tensorrt", "lane_decode"})
IO = (
    'input { name: "a" data_type: TYPE_FP32 dims: 4 } '
    'output { name: "b" data_type: TYPE_FP32 dims: 4 } '
)


def faults(text: str, *, auto: bool = True, gpus: int = 0) -> list[str]:
    files = ModelFiles("m", Path("/repository/m"), {1: Path("/repository/m/1")})
    if "backend:" not in text and "platform:" not in text:
        text = 'backend: "identity" ' + text
    message = text_format.Parse(text, pb.ModelConfig())
    completion = Completion(auto=auto, gpus=gpus, no_gpu="" if gpus else "there is no driver")
    complete(message, files, completion)
    try:
        validate(message, files, BACKENDS, completion)
    except ModelConfigError as error:
        return [
            line.removeprefix("/repository/m/config.pbtxt: ") for line in str(error).split("\n")
        ]
    ModelConfig.of(message)
    return []


def tensor(rest: str, kind: str = "input") -> str:
    return f'max_batch_size: 4 {kind} {{ name: "a" data_type: TYPE_FP32 {rest} }}'


def test_sound_tensors_pass() -> None:
    assert faults(IO) == []
    assert faults(tensor("dims: [2, 4, -1, 6] reshape { shape: [8, -1, 1, 6] }")) == []
    assert faults(tensor("dims: 1 reshape {}")) == []
    assert faults(tensor("dims: 1").replace("FP32", "BF16")) == []
    assert faults(tensor("dims: [3, 2, 2] format: FORMAT_NCHW")) == []
    assert faults(tensor("dims: 1 optional: true")) == []


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (
            "dims: -2",
            "dimension must be integer >= 1, or -1 to indicate a variable-size dimension",
        ),
        (
            "dims: 1 reshape { shape: 0 }",
            "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension",
        ),
        ("dims: [2, 3] reshape { shape: 7 }", "has different size for dims and reshape"),
        (
            "dims: [2, -1, 3] reshape { shape: [3, -1, 2] }",
            "has different size for dims and reshape",
        ),
        (
            "dims: [2, -1] reshape { shape: 2 }",
            "has different number of variable-size dimensions for dims and reshape",
        ),
        ("dims: 2 reshape {}", "has different size for dims and reshape"),
        (
            "dims: [-1, -1, 2] reshape { shape: [-1, -1, 1, 2] }",
            "has a reshape with more than one variable-size dimension, which is not supported",
        ),
    ],
)
def test_each_fault_of_a_tensor_is_named(kind: str, rest: str, expected: str) -> None:
    assert faults(tensor(rest, kind)) == [f"model {kind} 'a' {expected} for m"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'input { name: "a" data_type: TYPE_FP32 dims: 1 reshape {} }',
            "model input 'a' cannot have empty reshape for non-batching model as scalar tensors "
            "are not supported for m",
        ),
        (tensor("dims: 1 format: FORMAT_NHWC"), "model input NHWC/NCHW require 3 dims for m"),
        (
            tensor("dims: 1 is_shape_tensor: true"),
            "shape tensors are only supported for TensorRT platform for m",
        ),
        (
            tensor("dims: 1 is_non_linear_format_io: true", "output"),
            "Non-linear IO format is only supported for the TensorRT platform for m",
        ),
        (
            'backend: "tensorrt" ' + tensor("dims: 1 is_non_linear_format_io: true"),
            "Non-linear IO format input requires 3 dims for m",
        ),
        (
            'backend: "tensorrt" ' + tensor("dims: 1 is_non_linear_format_io: true", "output"),
            "Non-linear IO format output requires 3 dims for m",
        ),
        (
            'backend: "lane_decode" ' + tensor("dims: 1 optional: true"),
            "model input 'a' has 'optional', which backend 'lane_decode' does not support, for m; "
            "remove it",
        ),
        (
            'input { name: "a" data_type: TYPE_FP32 dims: 4 reshape { shape: [2, 2] } } '
            'output { name: "a" data_type: TYPE_FP32 dims: 4 }',
            "model output 'a' has another 'reshape' than the input of that name for m; give one of "
            "them another name",
        ),
    ],
)
def test_a_tensor_fits_its_model(text: str, expected: str) -> None:
    assert faults(text) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "batch_input { kind: BATCH_ELEMENT_COUNT data_type: TYPE_INT32 }",
            "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0",
        ),
        (
            'batch_input { data_type: TYPE_BOOL source_input: "a" }',
            "batch input data type must be TYPE_INT32 or TYPE_FP32",
        ),
        (
            'batch_input { data_type: TYPE_FP32 source_input: "q" }',
            "unknown source input name 'q'",
        ),
        (
            'batch_output { source_input: ["a", "a"] }',
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 2",
        ),
        (
            'batch_output { source_input: "a" target_name: ["q", "q"] }',
            "target output name 'q' can only be specified once",
        ),
        ('batch_output { source_input: "a" target_name: "q" }', "unknown target output name 'q'"),
    ],
)
def test_tensors_of_a_whole_batch_have_tritons_texts(text: str, expected: str) -> None:
    message = text_format.Parse('name: "m" input { name: "a" }' + text, pb.ModelConfig())
    assert expected in list(batch_io_faults(message))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'input { name: "r" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }',
            "model input 'r' has 'allow_ragged_batch', which backend 'tensorrt' does not support, "
            "for m; remove it, and pad the input",
        ),
        (
            'batch_output { source_input: "a" target_name: "y" }',
            "backend 'tensorrt' does not support 'batch_output', for m; remove it, or load the "
            "model as ONNX",
        ),
    ],
)
def test_ragged_batches_are_refused_where_a_backend_cannot_make_them(
    text: str, expected: str
) -> None:
    message = text_format.Parse('name: "m" backend: "tensorrt"' + text, pb.ModelConfig())
    assert list(ragged_faults(message)) == [expected]
    message.backend = "onnxruntime"
    assert list(ragged_faults(message)) == []


def test_types_and_dims_may_be_left_to_a_backend_that_completes_them() -> None:
    text = 'backend: "onnxruntime" input { name: "a" }'
    assert faults(text) == []
    assert faults(text, auto=False) == [
        "model input 'a' must specify 'data_type' for m; for example TYPE_FP32",
        "model input 'a' must specify 'dims' for m",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "preferred_batch_size: [0, 2]",
            "dynamic batching preferred size must be positive for m",
        ),
        (
            "preferred_batch_size: [2, 5]",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        ("priority_levels: 3", "default priority level must be in range [1, 3] for m"),
        (
            "priority_levels: 3 default_priority_level: 4",
            "default priority level must be in range [1, 3] for m",
        ),
        (
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 }",
            "priority queue policy must have priority level in range [1, 2] for m",
        ),
        (
            "priority_levels: 2 default_priority_level: 1 preserve_ordering: true",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "preserve_ordering: true default_queue_policy { timeout_action: DELAY "
            "default_timeout_microseconds: 1 }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            "for m",
        ),
        (
            "preserve_ordering: true priority_levels: 1 default_priority_level: 1 "
            "priority_queue_policy { key: 1 value { timeout_action: DELAY "
            "default_timeout_microseconds: 1 } }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            "for m",
        ),
        ("preserve_ordering: true preferred_batch_size: 4", None),
        ("preserve_ordering: true default_queue_policy { timeout_action: DELAY }", None),
        ("priority_levels: 2 default_priority_level: 2 priority_queue_policy { key: 1 }", None),
    ],
)
def test_dynamic_batching(text: str, expected: str | None) -> None:
    found = faults(f"max_batch_size: 4 dynamic_batching {{ {text} }}")
    assert found == ([] if expected is None else [expected])


START = 'control_input { name: "s" control { kind: CONTROL_SEQUENCE_START %s } }'
START_TEXT = "for CONTROL_SEQUENCE_START for m"
STATE = 'state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: [-1, 2] %s }'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (START % "int32_false_true: [0, 1]", []),
        (
            "control_input { control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }",
            ["sequence batching control tensor must have a name for m"],
        ),
        (
            'control_input { name: "s" }',
            ["sequence batching control tensor 's' specifies no control for m"],
        ),
        (
            'control_input { name: "s" control { kind: CONTROL_SEQUENCE_START '
            "fp32_false_true: [0, 1] } control { kind: CONTROL_SEQUENCE_END "
            "fp32_false_true: [0, 1] } }",
            [
                "sequence batching control tensor 's' is specified for multiple control kinds "
                "for m",
            ],
        ),
        (
            START % "bool_false_true: [false, true]"
            + (START % "bool_false_true: [false, true]").replace('"s"', '"t"'),
            ["sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m"],
        ),
        (
            START % "",
            [
                "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or "
                f"'bool_false_true' {START_TEXT}"
            ],
        ),
        (
            START % "int32_false_true: [0, 1] fp32_false_true: [0, 1]",
            [
                "sequence batching specifies more than one from 'int32_false_true', "
                f"'fp32_false_true' and 'bool_false_true' {START_TEXT}"
            ],
        ),
        *(
            (
                START % f"{field}: [{value}]",
                [f"sequence batching control '{field}' must have exactly 2 entries {START_TEXT}"],
            )
            for field, value in (
                ("int32_false_true", "1"),
                ("fp32_false_true", "1"),
                ("bool_false_true", "true"),
            )
        ),
        (
            'control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID '
            "data_type: TYPE_FP32 } }",
            [
                "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data "
                "types are TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            ],
        ),
        (
            "oldest { max_candidate_sequences: 2 preferred_batch_size: 0 }",
            ["sequence batching preferred batch size must be positive for m"],
        ),
        (
            "oldest { max_candidate_sequences: 2 preferred_batch_size: 5 }",
            ["sequence batching preferred batch size must be <= max batch size for m"],
        ),
        ("oldest {}", ["sequence batching max candidate sequences must be positive for m"]),
        *(
            (
                f"direct {{ minimum_slot_utilization: {value} }}",
                ["sequence batching minimum slot utilization must be in range (0.0, 1.0] for m"],
            )
            for value in ("-0.1", "1.1", "nan")
        ),
        ("direct { minimum_slot_utilization: 1.0 }", []),
        ("oldest { max_candidate_sequences: 2 preferred_batch_size: 4 }", []),
        (
            'control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID '
            "data_type: TYPE_STRING } }",
            [],
        ),
        (STATE % "", []),
        (STATE % 'initial_state { data_type: TYPE_FP32 dims: [3, 2] data_file: "zero" }', []),
        (
            STATE % "initial_state { data_type: TYPE_FP32 dims: [-1, 2] zero_data: true }",
            [
                "sequence batching state 'i': 'initial_state' must have the state's 'dims', with "
                "every variable-size dimension specified, for m"
            ],
        ),
        (
            STATE % 'initial_state { data_type: TYPE_FP32 dims: [1, 2] data_file: "../x" }',
            [
                "sequence batching state 'i': 'data_file' '../x' is outside "
                "/repository/m/initial_state for m"
            ],
        ),
        (
            STATE % "initial_state { data_type: TYPE_INT8 dims: [1, 2] }",
            [
                "sequence batching state 'i' and its 'initial_state' have different 'data_type' "
                "for m",
                "sequence batching state 'i': 'initial_state' must have 'zero_data' or 'data_file' "
                "for m",
            ],
        ),
        (
            STATE % "" + STATE.replace('"i"', '"j"') % "",
            ["sequence batching state 'j': output 'o' is another state's already for m"],
        ),
        (
            STATE % "initial_state { data_type: TYPE_FP32 dims: [1, 2] zero_data: true } "
            "initial_state { data_type: TYPE_FP32 dims: [1, 2] zero_data: true }",
            ["sequence batching state 'i' has more than one 'initial_state' for m"],
        ),
        (
            "state {}",
            [
                "sequence batching state must have 'input_name' and 'output_name' for m",
                "sequence batching state '' must specify 'data_type' for m",
                "sequence batching state '' must specify 'dims', integers >= 1, or -1 to indicate "
                "a variable-size dimension for m",
            ],
        ),
        (
            STATE.replace('"i"', '"a"') % "",
            [
                "model input 'a' is the sequence batcher's to fill in for m; remove it from "
                "'input'",
            ],
        ),
    ],
)
def test_sequence_batching(text: str, expected: list[str]) -> None:
    assert faults(f"max_batch_size: 4 {IO} sequence_batching {{ {text} }}") == expected


def test_the_oldest_strategy_has_a_typed_form() -> None:
    message = text_format.Parse(
        "sequence_batching { oldest { max_candidate_sequences: 3 preferred_batch_size: [4, 2] } "
        'control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID '
        "data_type: TYPE_STRING } } }",
        pb.ModelConfig(),
    )
    sequences = ModelConfig.of(message).sequence_batching
    assert sequences is not None
    assert (sequences.max_candidate_sequences, sequences.preferred_batch_sizes) == (3, (2, 4))
    assert sequences.controls == (SequenceControl("c", ControlKind.CORRID, DataType.BYTES, None),)


def test_controls_and_states_have_a_typed_form() -> None:
    message = text_format.Parse(
        'name: "m" sequence_batching { '
        + START % "int32_false_true: [0, 1]"
        + STATE % 'initial_state { name: "f" data_type: TYPE_FP32 dims: [3, 2] data_file: "z" }'
        + "}",
        pb.ModelConfig(),
    )
    sequences = ModelConfig.of(message).sequence_batching
    assert sequences is not None
    assert sequences.controls == (SequenceControl("s", ControlKind.START, DataType.INT32, (0, 1)),)
    state = SequenceState("i", "o", DataType.FP32, (-1, 2), (3, 2), "z")
    assert sequences.states == (state,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "sequence_batching {}",
            "Response Cache does not currently support model m with sequence batching scheduler. "
            "Please disable the response cache.",
        ),
        (
            "model_transaction_policy { decoupled: true }",
            "Response Cache does not currently support model m with 'decoupled' transaction "
            "policy. Please disable the response cache.",
        ),
    ],
)
def test_the_response_cache_needs_responses_that_depend_on_inputs_alone(
    text: str, expected: str
) -> None:
    assert faults(IO + text) == []
    assert faults(IO + "response_cache { enable: true }" + text) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind: KIND_MODEL gpus: 0", " has kind KIND_MODEL but specifies one or more GPUs"),
        ("kind: KIND_CPU gpus: 0", " has kind KIND_CPU but specifies one or more GPUs"),
        ("gpus: 0", " has kind KIND_CPU but specifies one or more GPUs"),
        (
            "kind: KIND_GPU",
            " has kind KIND_GPU but server does not support GPUs for backend 'identity'; give "
            "KIND_CPU",
        ),
        ("count: -1", " has a negative count"),
        (
            'profile: "0"',
            " and platform specifies profile field which is only supported for TensorRT models",
        ),
        ("rate_limiter { resources { count: 1 } }", " has a rate limiter resource without 'name'"),
    ],
)
def test_each_fault_of_an_instance_group_is_named(text: str, expected: str) -> None:
    assert faults(f"{IO} instance_group {{ {text} }}") == [
        f"instance group m_0 of model m{expected}"
    ]


@pytest.mark.parametrize("profile", ["-1", "x", "", "\u0663"])
def test_a_tensorrt_profile_is_a_number(profile: str) -> None:
    text = f'backend: "tensorrt" instance_group {{ profile: ["0", "{profile}"] }}'
    assert faults(text) == [
        f"instance group m_0 of model m and platform tensorrt_plan specifies invalid profile "
        f"{profile}. The field should contain the string representation of a non-negative integer."
    ]


def test_instances_are_bounded_over_all_groups() -> None:
    half = f"instance_group {{ count: {MAX_INSTANCES // 2} }}"
    assert faults(IO + half + half) == []
    assert faults(IO + half + half + "instance_group {}") == [
        f"model m has {MAX_INSTANCES + 1} instances; at most {MAX_INSTANCES} can be"
    ]


def test_something_must_run() -> None:
    assert faults(IO + "instance_group { passive: true } instance_group {}") == []
    assert faults(IO + "instance_group { passive: true }") == [
        "every instance group of model m is passive, so that nothing would run"
    ]


def test_what_the_rate_limiter_reserves_has_a_typed_form() -> None:
    text = (
        'instance_group { name: "g" kind: KIND_CPU count: 1 rate_limiter { priority: 2 '
        'resources { name: "a" global: true count: 3 } resources { name: "b" count: 1 } } }'
    )
    (group,) = ModelConfig.of(text_format.Parse(text, pb.ModelConfig())).instance_groups
    assert (group.kind, group.count, group.priority) == ("CPU", 1, 2)
    assert group.resources == (
        RateLimitResource("a", 3, per_device=False),
        RateLimitResource("b", 1, per_device=True),
    )


WARMUP = 'model_warmup { name: "w" inputs { key: "a" value { %s } } }'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data_type: TYPE_FP32 dims: 4 zero_data: true", []),
        ('data_type: TYPE_FP32 dims: 4 input_data_file: "a.raw"', []),
        (
            "data_type: TYPE_FP32 dims: -1 random_data: true",
            [
                "warmup setting expects all variable-size dimensions are specified for input 'a'; "
                "in sample 'w' for m"
            ],
        ),
        (
            "dims: 4",
            [
                "warmup setting expects 'data_type' for input 'a' in sample 'w' for m",
                "warmup setting expects 'zero_data', 'random_data' or 'input_data_file' for input "
                "'a' in sample 'w' for m",
            ],
        ),
        (
            'data_type: TYPE_FP32 dims: 4 input_data_file: "/etc/hostname"',
            [
                "warmup setting expects the data of input 'a' in /repository/m/warmup, where "
                "'/etc/hostname' is not, in sample 'w' for m"
            ],
        ),
    ],
)
def test_warmup(text: str, expected: list[str]) -> None:
    assert faults(IO + WARMUP % text) == expected


def test_a_warmup_sample_has_a_typed_form_and_runs_once_by_default() -> None:
    text = 'name: "m"' + WARMUP % 'data_type: TYPE_STRING dims: [1, 2] input_data_file: "x"'
    (sample,) = ModelConfig.of(text_format.Parse(text, pb.ModelConfig())).warmups
    tensor = WarmupInput(DataType.BYTES, (1, 2), file="x")
    assert sample == Warmup("w", 0, 1, {"a": tensor})


PLAN = 'platform: "tensorrt_plan" ' + IO


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        (
            "kind: KIND_GPU",
            0,
            "instance group m_0 of model m has kind KIND_GPU but no GPUs are available: there is "
            "no driver",
        ),
        (
            "kind: KIND_GPU gpus: 2",
            2,
            "instance group m_0 of model m specifies invalid or unsupported gpu id 2. GPUs with at "
            "least the minimum required CUDA compute compatibility of 6.000000 are: 0,1",
        ),
        (
            "secondary_devices { kind: KIND_NVDLA } secondary_devices { kind: KIND_NVDLA }",
            1,
            "m_0 of model m must have either zero or or one secondary devices",
        ),
    ],
)
def test_each_fault_of_a_group_on_a_gpu_is_named(text: str, gpus: int, expected: str) -> None:
    assert faults(f"{PLAN} instance_group {{ {text} }}", gpus=gpus) == [expected]


def placements(text: str, *, gpus: int) -> list[Placement]:
    files = ModelFiles("m", Path("/repository/m"), {1: Path("/repository/m/1")})
    message = text_format.Parse(text, pb.ModelConfig())
    completion = Completion(gpus=gpus)
    complete(message, files, completion)
    validate(message, files, BACKENDS, completion)
    groups = ModelConfig.of(message, completion).instance_groups
    return [each for group in groups for each in group.placements]


def test_what_can_use_a_gpu_does_where_there_is_one() -> None:
    assert placements(PLAN, gpus=1) == [Placement("GPU", 0)]
    assert placements(PLAN, gpus=0) == [Placement("CPU")]
    assert placements(PLAN + "instance_group { gpus: 1 }", gpus=2) == [Placement("GPU", 1)]
    assert placements(PLAN + "instance_group { kind: KIND_CPU }", gpus=1) == [Placement("CPU")]
    assert placements('platform: "onnxruntime_onnx"' + IO, gpus=1) == [Placement("CPU")] * 2


def test_a_gpu_that_is_not_there_may_come_unless_something_else_is_wrong() -> None:
    wants_gpu = PLAN + "instance_group { kind: KIND_GPU %s }"
    with pytest.raises(ModelLoadError, match="no GPUs are available"):
        placements(wants_gpu % "", gpus=0)
    with pytest.raises(ModelConfigError, match="no GPUs are available") as caught:
        placements(wants_gpu % "count: -1", gpus=0)
    assert type(caught.value) is ModelConfigError


def test_a_group_has_its_count_on_each_gpu() -> None:
    two = 'instance_group { count: 2 kind: KIND_GPU profile: "1" }'
    assert placements(PLAN + two, gpus=2) == [
        *[Placement("GPU", 0, profiles=(1,))] * 2,
        *[Placement("GPU", 1, profiles=(1,))] * 2,
    ]


def test_a_group_names_its_dla_core() -> None:
    core = "instance_group { secondary_devices { kind: KIND_NVDLA device_id: 1 } }"
    assert placements(PLAN + core, gpus=1) == [Placement("GPU", 0, dla_core=1)]
