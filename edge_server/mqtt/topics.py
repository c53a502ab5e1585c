"""The topics of this device: `edge/v1/<device>/...`."""

from __future__ import annotations

import re
from dataclasses import dataclass

PREFIX = "edge/v1"

_NAME = re.compile(r"[a-z0-9_-]{1,64}", re.ASCII)
# Model names are the repository's, and Triton's allow capitals: `laneDetect_model`.
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class Topics:
    """The topics of one device; every name in them is safe as one level of a topic.

    Raises:
        ValueError: an unsafe name; the text names it and the remedy. The methods raise it too.
    """

    device: str

    def __post_init__(self) -> None:
        _check("device", self.device, _NAME, "a-z, 0-9, '_' and '-'")

    @property
    def status(self) -> str:
        """Retained: online or offline; the broker publishes offline as the last will."""
        return f"{PREFIX}/{self.device}/status"

    @property
    def meta(self) -> str:
        """Retained, the birth message: versions, schemas, cameras and models."""
        return f"{PREFIX}/{self.device}/meta"

    @property
    def health(self) -> str:
        """Retained: temperatures, power, clocks and drives of the board."""
        return f"{PREFIX}/{self.device}/health"

    @property
    def update(self) -> str:
        """Retained: version, slot, and what became of the last update."""
        return f"{PREFIX}/{self.device}/update"

    @property
    def provision(self) -> str:
        """Retained: the signed provisioning file that somebody published for this device."""
        return f"{PREFIX}/{self.device}/provision"

    @property
    def plans(self) -> str:
        """Retained: how far the builds of TensorRT plans are, by `edge-server plan refresh`."""
        return f"{PREFIX}/{self.device}/plans"

    @property
    def acknowledged(self) -> str:
        """Retained: the id of the newest event that the broker has acknowledged."""
        return f"{PREFIX}/{self.device}/acknowledged"

    @property
    def vehicle(self) -> str:
        """Never retained, for others to publish: what the vehicle measures of itself."""
        return f"{PREFIX}/{self.device}/vehicle"

    def lanes(self, camera: str) -> str:
        """Live, never retained: the lanes of every frame."""
        return f"{self._camera(camera)}/lanes"

    def camera_status(self, camera: str) -> str:
        """Retained: whether the camera delivers."""
        return f"{self._camera(camera)}/status"

    def calibration(self, camera: str) -> str:
        """Retained: how the camera sees and is mounted; empty where it has no calibration."""
        return f"{self._camera(camera)}/calibration"

    def event(self, kind: str, camera: str = "") -> str:
        """Never retained, at least once: what begins and ends; of a camera, or of the device."""
        root = self._camera(camera) if camera else f"{PREFIX}/{self.device}"
        return f"{root}/events/{kind}"

    def model_state(self, model: str) -> str:
        """Retained: whether the model serves."""
        _check("model", model, _MODEL, "A-Z, a-z, 0-9, '_', '.' and '-', a letter or digit first")
        return f"{PREFIX}/{self.device}/models/{model}/state"

    def states(self) -> tuple[str, ...]:
        """Filters for the retained topics of all models and cameras, those of earlier runs too."""
        root = f"{PREFIX}/{self.device}"
        cameras = f"{root}/cameras/+"
        return f"{root}/models/+/state", f"{cameras}/status", f"{cameras}/calibration"

    def is_state(self, topic: str) -> bool:
        """Whether `topic` is one of `states`, of a name that a model or a camera may have."""
        levels = topic.split("/")
        if levels[:3] != [*PREFIX.split("/"), self.device]:
            return False
        match levels[3:]:
            case ["models", name, "state"]:
                return _MODEL.fullmatch(name) is not None
            case ["cameras", name, "status" | "calibration"]:
                return _NAME.fullmatch(name) is not None
        return False

    def _camera(self, camera: str) -> str:
        _check("camera", camera, _NAME, "a-z, 0-9, '_' and '-'")
        return f"{PREFIX}/{self.device}/cameras/{camera}"


def _check(kind: str, name: str, allowed: re.Pattern[str], remedy: str) -> None:
    if allowed.fullmatch(name) is None:
        raise ValueError(
            f"{kind} name {name!r} cannot be part of an MQTT topic: use 1 to 64 of {remedy}"
        )
