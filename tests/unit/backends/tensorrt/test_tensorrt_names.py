"""Every name of TensorRT that is used exists in each supported version, or stands behind a guard.

`tests/support/tensorrt_api` has what each version's classes have, taken from the real ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tensorrt_api import real_bindings, walk

ROOT = Path(__file__).parents[4]
SOURCES = sorted(
    [
        *(ROOT / "edge_server" / "backends").glob("tensorrt*.py"),
        *(ROOT / "edge_server" / "backends").glob("tensorrt*/**/*.py"),
        ROOT / "scripts" / "onnx_to_plan.py",
    ]
)


NAMES: dict[str, Any] = real_bindings.names()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_is_in_every_version_or_behind_a_guard(path: Path) -> None:
    assert walk.lacking(path.read_text(), NAMES, path.name) == []


def test_the_builder_is_walked_as_a_whole() -> None:
    """If nothing of it were understood, nothing would be found missing."""
    nothing = {version: {"": {}} for version in NAMES}
    found = walk.lacking(
        (ROOT / "edge_server/backends/tensorrt/plan_builder.py").read_text(), nothing
    )
    assert sum("trt." in line for line in found) > 15


PLANTED = {
    "an enum's member that 11 has dropped, its guard taken away": (
        "plan_builder.py",
        'if not typed and hasattr(trt.BuilderFlag, "FP16"):',
        "if not typed:",
        "trt.BuilderFlag.FP16 is not in TensorRT 11.4",
    ),
    "a flag that 11 has forgotten, for every version": (
        "plan_builder.py",
        "    if version < (10, 0):\n",
        "    if version < (12, 0):\n",
        "trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH is not in TensorRT 11.4",
    ),
    "what 10 has dropped, of the class that a method gives": (
        "plan_builder.py",
        "engine.num_io_tensors",
        "engine.num_bindings",
        "trt.ICudaEngine.num_bindings is not in TensorRT 10.3, 10.7, 10.13, 10.16, 11.4",
    ),
    "what only 10 has, on 8": (
        "plan_builder.py",
        'if not hasattr(trt, "IProgressMonitor"):',
        "if config is None:",
        "trt.IProgressMonitor is not in TensorRT 8.6",
    ),
    "the calibrator's place, its guard taken away": (
        "plan_builder.py",
        'if calibrator is not None and hasattr(config, "int8_calibrator"):',
        "if calibrator is not None:",
        "trt.IBuilderConfig.int8_calibrator is not in TensorRT 11.4",
    ),
    "a misspelt guard, which would hide what it guards for ever": (
        "plan_builder.py",
        'hasattr(trt.BuilderFlag, "FP16")',
        'hasattr(trt.BuilderFlag, "FP61")',
        "'FP61'): the name itself is not in TensorRT",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_seen(mistake: str) -> None:
    name, right, wrong, said = PLANTED[mistake]
    source = (ROOT / "edge_server/backends/tensorrt" / name).read_text()
    assert right in source
    found = walk.lacking(source.replace(right, wrong), NAMES, name)
    assert any(said in line for line in found), found


def test_what_belongs_to_nobody_known_is_told_where_a_version_has_it_nowhere() -> None:
    found = walk.lacking("def run(context):\n    context.execute_async_v2([], 0)\n", NAMES, "x.py")
    assert found == [
        "x.py:2: .execute_async_v2 is not in TensorRT 10.3, 10.7, 10.13, 10.16, 11.4, and no "
        "guard covers it"
    ]


@pytest.mark.parametrize(
    "source",
    [
        "if version < (10, 0):\n    trt.BuilderFlag.STRICT_TYPES",
        "flags = 0 if version >= (11, 0) else trt.BuilderFlag.FP16",
        "typed = version >= (11, 0)\nif not typed:\n    trt.BuilderFlag.FP16",
        "def f():\n"
        '    if not hasattr(trt, "IProgressMonitor"):\n        return\n'
        "    trt.IProgressMonitor",
        'has = hasattr(trt.BuilderFlag, "FP16") and a()\nhas and trt.BuilderFlag.FP16'
        ' if hasattr(trt.BuilderFlag, "FP16") else 0',
        "def f(e: trt.ICudaEngine | None):\n"
        '    e.serialize_with_config if hasattr(e, "serialize_with_config") else e.serialize',
    ],
)
def test_a_guard_is_a_condition_that_this_version_decides(source: str) -> None:
    assert walk.lacking(source, NAMES) == []


def test_an_attribute_of_self_is_what_it_is_annotated_with() -> None:
    source = (
        "class A:\n"
        "    def __init__(self, engine):\n"
        "        self._engine: trt.ICudaEngine = engine\n"
        "    def f(self):\n"
        "        return self._engine.name, self._engine.binding_is_input\n"
    )
    assert walk.lacking(source, NAMES) == [
        ":5: trt.ICudaEngine.binding_is_input is not in TensorRT 10.3, 10.7, 10.13, 10.16, 11.4, "
        "and no guard covers it"
    ]


def test_what_is_written_down_is_read_back_as_it_was() -> None:
    assert real_bindings.NAMES.read_text() == real_bindings.written(NAMES)
