"""A backend's `parameters` in config.pbtxt: text values → a typed struct."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from edge_server.model_config.config import ModelConfig


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names and types of a backend's parameters; the defaults are the backend's."""


P = TypeVar("P", bound=Parameters)


def read_parameters(config: ModelConfig, kind: type[P]) -> P:
    """What the configuration says, as `kind`.

    Raises:
        ModelConfigError: an unknown parameter, or a value that does not fit its type.
    """
    try:
        return msgspec.convert(dict(config.parameters), kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise ModelConfigError(
            f"model '{config.name}': parameters: {error}; backend '{config.backend}' knows: {known}"
        ) from error
