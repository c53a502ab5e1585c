"""Calibration files: TOML with a camera's lens and its mounting, one file for each camera.

docs/calibration.md has an example. Lenses have OpenCV's models and numbers, mountings the axes of
ISO 8855: `Lens` and `Mounting` in lanes/camera_model.py say what each value means.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import tomli_w

from edge_server.errors import SettingsError
from edge_server.lanes.camera_model import CameraModel, Lens, Mounting
from edge_server.settings.read import in_words, parse_toml, read_text_file
from edge_server.settings.sections import Section

if TYPE_CHECKING:
    import os

_REMEDY = "edge-server calibrate makes such files"
_ID_DIGITS = 12
_HEADER = "# A camera's calibration; cameras.NAME.calibration in the settings names this file."

Pixels = Annotated[int, msgspec.Meta(ge=16, le=16384)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
# Bounds keep out nan and inf, which TOML has.
Finite = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Angle = Annotated[float, msgspec.Meta(ge=-60, le=60)]
AngleStd = Annotated[float, msgspec.Meta(gt=0, le=10)]
Place = Annotated[float, msgspec.Meta(ge=-20, le=20)]

_COEFFICIENTS = {"pinhole": ("k1, k2, p1, p2, k3", 5), "fisheye": ("k1, k2, k3, k4", 4)}


class LensTable(Section, frozen=True):
    """`[lens]`; its size is that of its pictures, or of others with their shape."""

    kind: Literal["pinhole", "fisheye"]
    width: Pixels
    height: Pixels
    fx: Positive
    fy: Positive
    cx: Finite
    cy: Finite
    distortion: tuple[Finite, ...]
    reprojection_error_px: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None

    def __post_init__(self) -> None:
        names, count = _COEFFICIENTS[self.kind]
        if len(self.distortion) != count:
            raise ValueError(
                f"distortion: kind {self.kind} has {count} values ({names}); got "
                f"{len(self.distortion)}"
            )

    def lens(self) -> Lens:
        return Lens(
            self.kind, self.width, self.height, self.fx, self.fy, self.cx, self.cy, self.distortion
        )


class MountingTable(Section, frozen=True):
    """`[mounting]`; positive looks down, has its right side lower, looks to the left."""

    height_m: Annotated[float, msgspec.Meta(ge=0.1, le=6)]
    pitch_deg: Angle = 0.0
    roll_deg: Angle = 0.0
    yaw_deg: Angle = 0.0
    x_m: Place = 0.0
    y_m: Place = 0.0
    pitch_std_deg: AngleStd = 0.2
    yaw_std_deg: AngleStd = 0.2

    def mounting(self) -> Mounting:
        return Mounting(
            self.height_m,
            math.radians(self.pitch_deg),
            math.radians(self.roll_deg),
            math.radians(self.yaw_deg),
            self.x_m,
            self.y_m,
            math.radians(self.pitch_std_deg),
            math.radians(self.yaw_std_deg),
        )


class CalibrationTables(Section, frozen=True):
    """The whole file; one that `calibrate intrinsics` made has no mounting yet."""

    lens: LensTable
    mounting: MountingTable | None = None


@dataclass(frozen=True)
class Calibration:
    """A camera's calibration; two with the same id are equal.

    Attributes:
        id: 12 hexadecimal digits, made from lens and mounting.
        model: for pictures of the calibrated size.
        reprojection_error_px: of the pictures that the lens was calibrated with; None if unknown.
    """

    id: str
    model: CameraModel
    reprojection_error_px: float | None = None


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Return the calibration in a file.

    Raises:
        SettingsError: the file cannot be read, is damaged, or has no mounting; the text names file
            and key.
    """
    tables = read_tables(path)
    if tables.mounting is None:
        raise SettingsError(
            f"{path}: has no [mounting], so nothing is known of the road; add it with edge-server "
            f"calibrate mounting {path} --height METRES"
        )
    model = CameraModel(tables.lens.lens(), tables.mounting.mounting())
    return Calibration(calibration_id(model), model, tables.lens.reprojection_error_px)


def calibration_id(model: CameraModel) -> str:
    """Return the same digits for the same lens and mounting, on every machine."""
    return hashlib.sha256(repr(model).encode()).hexdigest()[:_ID_DIGITS]


def read_tables(path: str | os.PathLike[str]) -> CalibrationTables:
    """Return the tables of a file, with or without a mounting.

    Raises:
        SettingsError: as `read_calibration`.
    """
    try:
        table = parse_toml(read_text_file(path))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}; {_REMEDY}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text at byte {error.start}; {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: not TOML: {error}; {_REMEDY}") from error
    try:
        return msgspec.convert(table, CalibrationTables, strict=True)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: {_explain(str(error), table)}") from error


def text_of(tables: CalibrationTables) -> str:
    """Return the file's contents."""
    found = msgspec.to_builtins(tables)
    written = {
        name: {key: _rounded(value) for key, value in table.items() if value is not None}
        for name, table in found.items()
        if table is not None
    }
    return f"{_HEADER}\n{tomli_w.dumps(written)}"


def _rounded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(value, 9) if isinstance(value, float) else value


def _explain(text: str, table: dict[str, Any]) -> str:
    """Return msgspec's message as `lens.fx: fault`."""
    message, _, location = text.partition(" - at ")
    path = location.strip("`").removeprefix("$").lstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", message):
        return f"{path}.{missing[1]}".lstrip(".") + f": is missing; {_REMEDY}"
    if unknown := re.search(r"unknown field `([^`]*)`", message):
        return f"{path}.{unknown[1]}".lstrip(".") + ": unknown key"
    if message.startswith("Expected `"):
        message = in_words(message, path, table)
    return f"{path}: {message}" if path else message
