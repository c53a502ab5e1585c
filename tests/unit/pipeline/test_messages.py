"""Messages: an event and a calibration become protobufs without a loss."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

import edge_server
from edge_server.board import watch
from edge_server.board.board import Identity
from edge_server.cameras.calibration import Calibration
from edge_server.cameras.status import UNUSABLE
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.lanes.departure import DepartureCause, DepartureSide
from edge_server.pipeline.event_log import Event
from edge_server.pipeline.messages import calibration_message, event_message
from edge_server.proto.edge.lanes.v1 import lanes_pb2

_CODES = lanes_pb2.ReasonCode.DESCRIPTOR
# What gives reasons their words: a keyword, or the first of the arguments of this.
_FIRST = {"Reason"}


def test_a_calibration_keeps_every_number() -> None:
    distortion = (-0.24, -0.08, -0.001, 0.0001, 0.02)
    lens = Lens("pinhole", 1280, 720, 1158.2, 1153.4, 670.8, 386.3, distortion)
    mounting = Mounting(1.35, 0.02, 0.001, -0.007, -1.6, 0.25)
    message = calibration_message(Calibration("0123456789ab", CameraModel(lens, mounting)))
    assert message.id == "0123456789ab"
    assert (message.lens, message.width, message.height) == ("pinhole", 1280, 720)
    assert (message.fx, message.fy, message.cx, message.cy) == (1158.2, 1153.4, 670.8, 386.3)
    assert tuple(message.distortion) == distortion
    assert (message.height_m, message.pitch_rad, message.roll_rad) == (1.35, 0.02, 0.001)
    assert (message.yaw_rad, message.x_m, message.y_m) == (-0.007, -1.6, 0.25)


def words() -> set[str]:
    """Return every reason that is written down in the package."""
    found = {*UNUSABLE, *get_args(DepartureSide), *get_args(DepartureCause)}
    found |= {*watch.REASONS, watch.NO_GPU, watch.NOT_RECORDED, watch.HTTP_CLOSED}
    found |= {watch.CLOCK_UNSYNCHRONIZED, "model_failed", "too_old", "age", "lane_not_finite"}
    found |= {"loading_gstreamer", "dark", "blurred", "degraded", "ended", "starting"}
    found |= {"rolled_back", "swapped", "removed", "reboot_needed"}
    for file in Path(edge_server.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if not any(f"{name}(" in text for name in (*_FIRST, "_fault")) and "reason=" not in text:
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call):
                name = getattr(call.func, "id", "")
                given = [each.value for each in call.keywords if each.arg == "reason"]
                given += call.args[:1] if name in _FIRST else []
                given += call.args[1:2] if name == "_fault" else []
                constants = [each.value for each in given if isinstance(each, ast.Constant)]
                in_cameras = "cameras" in file.parts or name in _FIRST
                found |= {word for word in constants if in_cameras and isinstance(word, str)}
    return found - {""}


def test_every_reason_has_a_code() -> None:
    codes = {each.name.removeprefix("REASON_CODE_").lower() for each in _CODES.values}
    assert len(words()) > 20
    assert words() <= codes


@pytest.mark.parametrize(
    ("cause", "code"), [("returned", lanes_pb2.REASON_CODE_RETURNED), ("new", 1), ("other", 1)]
)
def test_the_cause_of_an_event_has_its_code_beside_the_word(cause: str, code: int) -> None:
    event = Event("lane_departure", "end", cause, "", 0, 0)
    message = event_message(event, Identity("truck-7", "0", "b", "c"))
    assert (message.cause, message.cause_code) == (cause, code)
