"""Messages: an event and a calibration become protobufs without a loss."""

from __future__ import annotations

from edge_server.cameras.calibration import Calibration
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.pipeline.messages import calibration_message


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
