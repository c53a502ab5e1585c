"""Chooses the scheduler of a configuration and holds the resources that schedulers share."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.inference.direct import DirectScheduler
from edge_server.inference.dynamic_batch import DynamicBatchScheduler
from edge_server.inference.ensemble import EnsembleScheduler
from edge_server.inference.ensemble_limits import StepThreads
from edge_server.inference.execution import Executor
from edge_server.inference.instance_pool import InstancePool
from edge_server.inference.latency_metrics import LatencyMetrics
from edge_server.inference.line_watch import LineWatch
from edge_server.inference.response_cache import CachingScheduler, ResponseCache
from edge_server.inference.sequence import SequenceScheduler
from edge_server.inference.snapshot import LoadedModel, RefCount
from edge_server.inference.statistics import ModelStatistics
from edge_server.inference.warm_up import warmed_up

if TYPE_CHECKING:
    from edge_server.backends.contract import Model
    from edge_server.inference.rate_limiter import RateLimiter
    from edge_server.inference.snapshot import Scheduler
    from edge_server.model_config.config import ModelConfig

log = logging.getLogger(__name__)

_NO_EFFECT = "model %s: field '%s' has no effect here: the server runs without %s"
_COUNTERS_ONLY = LatencyMetrics()


class Scheduling:
    """Makes loaded models: instances, statistics and the scheduler, together.

    To be closed when no loaded model runs any more.

    Args:
        limiter: decides which instances of all models run at once; None lets all run.
        cache_bytes: size of the response cache for models that allow it; 0 is no cache.
        latency_metrics: the distributions of latencies that the statistics keep.
    """

    def __init__(
        self,
        limiter: RateLimiter | None = None,
        cache_bytes: int = 0,
        latency_metrics: LatencyMetrics = _COUNTERS_ONLY,
    ) -> None:
        self._limiter = limiter
        self._latency_metrics = latency_metrics
        self._watch = LineWatch()
        self._step_threads = StepThreads(watch=self._watch)
        self._watch.add(self._step_threads)
        self._cache = ResponseCache(cache_bytes) if cache_bytes > 0 else None

    def close(self) -> None:
        self._step_threads.close()
        self._watch.close()

    def ensemble(self, config: ModelConfig, version: int) -> LoadedModel:
        """Make a loaded model of an ensemble whose graph has been resolved."""
        statistics = self._statistics(config)
        ensemble = EnsembleScheduler(config, version, statistics, self._step_threads, self._watch)
        scheduler = self._cached(config, ensemble, statistics)
        return LoadedModel(config, version, scheduler, statistics)

    def model(
        self,
        config: ModelConfig,
        version: int,
        model: Model,
        directory: Path = Path(),
        statistics: ModelStatistics | None = None,
    ) -> LoadedModel:
        """Make a loaded model of a backend's model, warmed up; both are closed together.

        Args:
            directory: the model's, for the files of its warm-up and of initial states.
            statistics: statistics to continue; None begins new ones.

        Raises:
            EdgeServerError: an instance cannot be made or warmed up, or would never run; nothing
                is left open.
        """
        statistics = self._statistics(config) if statistics is None else statistics
        scheduler = self._of_instances(config, version, model, directory, statistics)
        return LoadedModel(config, version, scheduler, statistics, model)

    def with_instances(
        self, loaded: LoadedModel, config: ModelConfig, directory: Path
    ) -> LoadedModel | None:
        """Make a second loaded model with the instances of `config`, beside `loaded`, warmed up.

        Both share model and statistics; the model is closed with the last of both. None where
        `loaded` is closed already, or has no model.

        Raises: as `model`.
        """
        held = loaded.shared(config)
        if held is None:
            return None
        try:
            if held.model is None:
                return None
            scheduler = self._of_instances(
                config, held.version, held.model, directory, held.statistics
            )
            held.model_uses.more()
            return replace(held, scheduler=scheduler, scheduler_uses=RefCount())
        finally:
            held.close()

    def _of_instances(
        self,
        config: ModelConfig,
        version: int,
        model: Model,
        directory: Path,
        statistics: ModelStatistics,
    ) -> Scheduler:
        if config.response_cache and self._cache is None:
            log.warning(
                _NO_EFFECT, config.name, "response_cache", "--cache-config=local,size=BYTES"
            )
        if self._limiter is None and any(g.resources for g in config.instance_groups):
            log.warning(_NO_EFFECT, config.name, "rate_limiter", "--rate-limit=execution_count")
        executor = Executor(config, version, statistics)
        warm = warmed_up(config, model, directory)
        return self._cached(config, self._scheduler(executor, warm, directory), statistics)

    def _statistics(self, config: ModelConfig) -> ModelStatistics:
        bounds_ms = config.first_response_bounds_ms if config.decoupled else ()
        cached = self._cache is not None and config.response_cache
        return ModelStatistics(self._latency_metrics, bounds_ms, config.metric_tags, cached=cached)

    def _cached(
        self, config: ModelConfig, scheduler: Scheduler, statistics: ModelStatistics
    ) -> Scheduler:
        if self._cache is None or not config.response_cache:
            return scheduler
        return CachingScheduler(scheduler, self._cache, config, statistics)

    def _scheduler(self, executor: Executor, model: Model, directory: Path) -> Scheduler:
        config = executor.config
        if config.sequence_batching is not None:
            return SequenceScheduler(
                executor,
                config.sequence_batching,
                model,
                directory,
                watch=self._watch,
                limiter=self._limiter,
            )
        pool = InstancePool.of(config, model, self._limiter)
        if config.dynamic_batching is not None:
            return DynamicBatchScheduler(executor, pool, config.dynamic_batching, self._watch)
        return DirectScheduler(executor, pool)
