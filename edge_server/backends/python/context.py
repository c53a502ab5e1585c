"""What all instances of a Python model share: configuration, limits, and how a process starts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends.parameters import Parameters, own_parameters
from edge_server.backends.python.child import sandbox
from edge_server.backends.python.messages import Start
from edge_server.backends.python.metrics import MetricBook
from edge_server.backends.python.shared_memory import MIB
from edge_server.model_config.config import ON_CPU
from edge_server.model_config.parse import config_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.backends.server_context import ServerContext
    from edge_server.model_config.config import ModelConfig, Placement


class PythonParameters(Parameters, frozen=True):
    """The parameters that the docstring of `backend` lists."""

    execution_timeout_s: float | None = None
    initialize_timeout_s: float = 120.0
    shared_memory_limit_mib: int = 256

    @staticmethod
    def of(config: ModelConfig) -> PythonParameters:
        """Return the parameters; all others of the configuration belong to the model.

        Raises:
            msgspec.ValidationError: a value does not fit its type.
        """
        return own_parameters(config, PythonParameters)

    @property
    def arena_bytes(self) -> int:
        """Size of the shared memory of each direction."""
        return self.shared_memory_limit_mib * MIB


def not_checked(completed: str) -> None:
    """Accept every process: for models that say nothing of themselves."""


@dataclass(frozen=True)
class ModelProgram:
    """What a model's processes run.

    Attributes:
        interpreter: a Python that has what the model imports; empty is the daemon's own.
        runner: see `Start`.
        arguments: more arguments of `initialize`.
        check: called with what a started process says of itself; raises an EdgeServerError for a
            process that must not serve.
    """

    interpreter: str = ""
    runner: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[str], None] = not_checked


USERS_PROGRAM = ModelProgram()


@dataclass(frozen=True)
class ModelContext:
    """One version of a model, as its instances know it.

    Attributes:
        directory: the version directory.
        config: the complete configuration.
        server_context: resolves and loads other models for this model.
        metrics: the model's own.
        program: what its processes run.
    """

    directory: Path
    config: ModelConfig
    parameters: PythonParameters
    server_context: ServerContext
    metrics: MetricBook = field(default_factory=MetricBook)
    program: ModelProgram = USERS_PROGRAM

    @property
    def version(self) -> str:
        return self.directory.name

    @property
    def outputs(self) -> list[str]:
        """The outputs that a client may request, and those that carry a sequence's state."""
        sequences = self.config.sequence_batching
        states = sequences.states if sequences else ()
        return [spec.name for spec in self.config.outputs] + [s.output_name for s in states]


def start_message(
    directory: Path,
    config: ModelConfig,
    instance: str = "",
    *,
    complete: bool = False,
    program: ModelProgram = USERS_PROGRAM,
    placement: Placement = ON_CPU,
) -> Start:
    """Build the first message to a process; as in Triton, the arguments of `initialize` are all
    strings."""
    directory = directory.resolve()
    arguments = {
        "model_config": json.dumps(config_json(config.message)),
        "model_instance_kind": placement.kind,
        "model_instance_name": instance,
        "model_instance_device_id": str(placement.gpu or 0),
        "model_repository": str(directory.parent),
        "model_version": directory.name,
        "model_name": config.name,
        **program.arguments,
    }
    return Start(
        complete,
        arguments,
        str(directory),
        config.default_model_filename,
        str(Path.cwd()),
        config.decoupled,
        sandbox.rules_of(config.completion.python),
        program.runner,
    )
