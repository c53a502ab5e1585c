"""A loaded plan: the one in the version directory, or one built now; and its instances."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from edge_server.backends.contract import Model
from edge_server.backends.tensorrt.engine import Engine, facts_of
from edge_server.backends.tensorrt.instance import PlanInstance, graph_shapes
from edge_server.backends.tensorrt.plan_config import NOT_ON_A_GPU, agreed
from edge_server.errors import ModelConfigError
from edge_server.model_config.files import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_server.backends.contract import LoadContext, MemoryKind
    from edge_server.backends.tensorrt.backend import PlanSource
    from edge_server.backends.tensorrt.plan_config import Options
    from edge_server.model_config.config import Placement

log = logging.getLogger(__name__)


class PlanModel(Model):
    """A plan on every GPU and NVDLA core that runs instances of it, loaded once on each; once per
    instance where TensorRT requires that, see `Engine.shares_profiles`."""

    def __init__(self, context: LoadContext, options: Options, source: PlanSource) -> None:
        self._files = ModelFiles(context.config.name, context.directory.parent, {})
        self._config = context.config
        self._options = options
        self._devices = context.devices
        self._source = source
        self._lock = threading.Lock()
        self._shared: dict[tuple[int, int | None], Engine] = {}
        self._instances: WeakSet[PlanInstance] = WeakSet()

    def make_instance(self, name: str, placement: Placement) -> PlanInstance:
        """Load the plan if needed and return an instance. Raises ModelConfigError or Unavailable
        where it cannot be loaded there, differs from the configuration's plan, or lacks the
        profile."""
        if placement.gpu is None:
            raise ModelConfigError(NOT_ON_A_GPU.format(model=self._config.name))
        engine, is_own = self._engine(placement)
        try:
            # As in Triton, the lowest of equally near profiles.
            ordered = sorted(set(placement.profiles or (0,)))
            _check_profile(engine, ordered[-1], name)
            wants_graphs = self._options.graphs or (
                self._options.graph_if_fixed and engine.io.is_fixed and engine.dla_core is None
            )
            instance = PlanInstance(
                engine,
                name,
                ordered,
                self._options,
                graphs=graph_shapes(self._config, engine.io, ordered) if wants_graphs else (),
                owns_engine=is_own,
            )
        except BaseException:
            if is_own:
                engine.close()
            raise
        self._instances.add(instance)
        return instance

    def degraded_reason(self) -> str:
        return next(filter(None, (each.without_graphs for each in self._running())), "")

    def memory_bytes(self) -> Mapping[MemoryKind, int]:
        instances = self._running()
        engines = {*list(self._shared.values()), *(each.engine for each in instances)}
        return {
            "file": sum(engine.plan_bytes for engine in engines),
            "contexts": sum(each.engine.context_bytes for each in instances),
            "buffers": sum(each.buffer_bytes for each in instances),
        }

    def close(self) -> None:
        while self._shared:
            _, engine = self._shared.popitem()
            engine.close()

    def _running(self) -> list[PlanInstance]:
        return [each for each in self._instances.copy() if not each.is_closed]

    def _engine(self, placement: Placement) -> tuple[Engine, bool]:
        gpu = placement.gpu or 0
        with self._lock:
            device = self._devices.gpu(gpu)
            key = (gpu, placement.dla_core)
            if key in self._shared:
                return self._shared[key], False
            facts = facts_of(device)
            plan, dla_core = self._source.find(facts, placement)
            name = self._config.name
            try:
                engine = Engine(device, plan, dla_core, name)
            except ModelConfigError as error:
                plan = self._source.instead(plan, facts, dla_core, error)
                engine = Engine(device, plan, dla_core, name)
            try:
                self._check(engine)
            except BaseException:
                engine.close()
                raise
            if engine.shares_profiles:
                self._shared[key] = engine
            return engine, not engine.shares_profiles

    def _check(self, engine: Engine) -> None:
        completion = replace(self._config.completion, auto=False)
        agreed(self._files, replace(self._config, completion=completion), engine.io)


def _check_profile(engine: Engine, index: int, name: str) -> None:
    last = engine.io.profile_count - 1
    if index > last:
        raise ModelConfigError(
            f"Can not set the specified optimization profile {index}[{index}] for {name}. Expected "
            f"optimization profile index range 0-{last}"
        )
