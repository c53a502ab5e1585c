"""A loaded Python model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.backends.python.config_json import config_json
from edge_server.backends.python.instance import PythonInstance
from edge_server.backends.python.instance_arbiter import InstanceArbiter
from edge_server.backends.python.messages import Start
from edge_server.backends.python.metrics import MetricBook
from edge_server.backends.python.offer import offered, rules_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_server.backends.contract import ModelMetric
    from edge_server.backends.python.instance import ChildLimits
    from edge_server.backends.server_context import ServerContext
    from edge_server.model_config.config import ModelConfig, Placement


class PythonModel:
    """One version of a Python model; each instance runs in its own process.

    Args:
        directory: the version directory.
        config: the complete configuration.
        server_context: for the requests and loads that the model starts outside of any request.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        limits: ChildLimits,
        server_context: ServerContext,
    ) -> None:
        self._directory = directory
        self._config = config
        self._limits = limits
        self._server_context = server_context
        self._metrics = MetricBook()
        self._arbiter: InstanceArbiter[PythonInstance] = InstanceArbiter(
            stand_in=config.sequence_batching is None
        )
        self._instances: list[PythonInstance] = []

    def make_instance(self, name: str, placement: Placement) -> PythonInstance:
        """Start a process and return its instance.

        Raises:
            ModelConfigError: the process does not start, or `initialize` fails.
        """
        del placement  # the model itself chooses its device
        instance = PythonInstance(
            name,
            start_message(self._directory, self._config, name),
            self._config,
            self._directory.name,
            limits=self._limits,
            metrics=self._metrics,
            arbiter=self._arbiter,
            server_context=self._server_context,
        )
        instance.open()
        self._arbiter.add(instance)
        self._instances.append(instance)
        return instance

    def not_ready_reason(self) -> str:
        """Return why no instance can execute now; empty when at least one instance can."""
        reasons = []
        for instance in self._instances:
            if not (reason := instance.not_ready_reason()):
                return ""
            reasons.append(reason)
        return "; ".join(reasons)

    def metrics(self) -> Sequence[ModelMetric]:
        """Return the current values of the model's own metrics."""
        return self._metrics.metrics()

    def close(self) -> None:
        """Do nothing: the instances, closed before the model, own all resources."""


def start_message(
    directory: Path, config: ModelConfig, instance: str = "", *, complete: bool = False
) -> Start:
    """Build the first message to a process; as in Triton, the arguments of `initialize` are all
    strings."""
    directory = directory.resolve()
    kind = config.instance_groups[0].kind if config.instance_groups else "CPU"
    arguments = {
        "model_config": json.dumps(config_json(config.message)),
        "model_instance_kind": kind,
        "model_instance_name": instance,
        "model_instance_device_id": "0",
        "model_repository": str(directory.parent),
        "model_version": directory.name,
        "model_name": config.name,
    }
    return Start(
        complete,
        arguments,
        str(directory),
        config.default_model_filename,
        str(Path.cwd()),
        config.decoupled,
        rules_of(config.completion.python, offered()),
    )
