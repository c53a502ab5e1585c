"""Builds the parts that load and schedule models from the settings, for the daemon and `check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_server.errors import SettingsError
from edge_server.inference.canary_monitor import CanaryTerms
from edge_server.inference.data_plane import BoundedControl, LiveModels
from edge_server.inference.rate_limiter import RateLimiter, ResourceLimit
from edge_server.inference.scheduling import Scheduling
from edge_server.inference.statistics import LatencyMetrics
from edge_server.lifecycle.build import MemoryBudget
from edge_server.lifecycle.control import PollControl, RepositoryControl
from edge_server.lifecycle.fit import InterfaceRule
from edge_server.lifecycle.loader import RepositoryLoader
from edge_server.lifecycle.records import ModelTable
from edge_server.lifecycle.updates import Deployments
from edge_server.model_config.config import Completion
from edge_server.pipeline.lane_tensors import check_replacement
from edge_server.process.disk import state_directory
from edge_server.process.utf8 import is_utf8, shown
from edge_server.repository.content import PrivateCopies, PrivateDirectory
from edge_server.repository.manifest import SignaturePolicy
from edge_server.repository.scan import Repositories
from edge_server.repository.store import ModelStore
from edge_server.settings import Metrics, Python

if TYPE_CHECKING:
    from collections.abc import Collection

    from edge_server.gpu.device import Devices
    from edge_server.inference.registry import ModelRegistry
    from edge_server.settings import Repository, Serving, Settings

# A model that loads others waits in a thread of its own, and the loaded ones may load others.
_LOADS_BY_MODELS = 16
_ANY_PYTHON = Python()
_ANY_METRICS = Metrics()


def chosen_scheduling(settings: Serving, metrics: Metrics = _ANY_METRICS) -> Scheduling:
    """Return the scheduling resources that the schedulers of all models share.

    Raises:
        SettingsError: see `RateLimiter`.
    """
    limiter = None
    if settings.rate_limit != "off":
        limiter = RateLimiter(
            [
                ResourceLimit(each.name, each.count, each.device if each.device >= 0 else None)
                for each in settings.rate_limit_resources
            ]
        )
    kept = LatencyMetrics(
        metrics.counter_latencies,
        metrics.enabled and metrics.summary_latencies,
        metrics.enabled and metrics.histogram_latencies,
        metrics.summary_quantiles,
    )
    return Scheduling(limiter, settings.cache_bytes, kept)


def chosen_completion(settings: Repository, devices: Devices, python: Python) -> Completion:
    """Return the defaults for model configurations and the Python models' access, of this host."""
    return Completion(
        settings.auto_complete,
        settings.default_max_batch_size,
        devices.count,
        devices.reason,
        python,
        settings.config_name,
    )


def python_of(settings: Settings) -> Python:
    """Return the paths and sockets open to Python models, without the daemon's own files."""
    private = (
        str(store_directory(settings.repository)),
        str(state_directory()),
        settings.grpc.tls.key,
        settings.http.tls.key,
        settings.access.tokens_file or "",
        settings.grpc.socket or "",
        (settings.mqtt.password_file if settings.mqtt else None) or "",
        *(camera.credentials_file or "" for camera in settings.cameras.values()),
        *settings.python.private,
    )
    unix_sockets = settings.python.unix_sockets
    return msgspec.structs.replace(
        settings.python,
        private=tuple(path for path in private if path),
        unix_sockets=not settings.grpc.socket if unix_sockets is None else unix_sockets,
    )


def chosen_control(
    registry: ModelRegistry,
    scheduling: Scheduling,
    devices: Devices,
    settings: Repository,
    *,
    python: Python = _ANY_PYTHON,
    camera_models: Collection[str] = (),
) -> RepositoryControl:
    """Return the control that loads models into `registry`, at the start and on request.

    In mode `poll` this control only loads the models present at the start.

    Args:
        python: see `python_of`.
        camera_models: names of the models of cameras; read at each load, so it may change.
    """
    server_context = LiveModels(registry)
    private = PrivateDirectory()
    control = RepositoryControl(
        RepositoryLoader(
            ModelTable(registry),
            Repositories(_paths(settings), PrivateCopies(private).copy),
            scheduling=scheduling,
            completion=chosen_completion(settings, devices, python),
            load_threads=settings.load_threads,
            load_retries=settings.load_retries,
            devices=devices,
            server_context=server_context,
            signatures=chosen_signatures(settings),
            take_down=settings.incompatible_member == "take_down",
            interface=InterfaceRule(camera_models, check_replacement),
        ),
        explicit=settings.mode == "explicit",
        load=settings.load,
        exit_on_error=settings.exit_on_error,
        private=private,
    )
    server_context.control = BoundedControl(control, _LOADS_BY_MODELS)
    return control


def _paths(settings: Repository) -> list[Path]:
    """Raises: SettingsError: a path is not UTF-8."""
    for path in settings.paths:
        if not is_utf8(path):
            raise SettingsError(f"repository.paths: {shown(path)}: is not UTF-8; rename it")
    return [Path(path) for path in settings.paths]


def store_directory(settings: Repository) -> Path:
    return Path(settings.store) if settings.store else state_directory() / "store"


def chosen_signatures(settings: Repository) -> SignaturePolicy:
    """Raises: SettingsError: see `SignaturePolicy`."""
    return SignaturePolicy(settings.signatures, [Path(path) for path in settings.signature_keys])


def following_control(
    registry: ModelRegistry,
    scheduling: Scheduling,
    devices: Devices,
    settings: Repository,
    *,
    python: Python = _ANY_PYTHON,
    camera_models: Collection[str] = (),
) -> PollControl:
    """Return the control that keeps `registry` like the repositories; see `chosen_control`."""
    paths = _paths(settings)
    signatures = chosen_signatures(settings)
    store = ModelStore(
        store_directory(settings),
        most_bytes=settings.store_max_bytes,
        reserve_bytes=settings.disk_reserve_bytes,
        signatures=signatures,
        repositories=paths,
    )
    table = ModelTable(registry)
    deployments = Deployments(table, store, paths)
    budget = MemoryBudget(settings.memory_reserve_bytes)
    terms = CanaryTerms(settings.probation_requests, settings.probation_s)
    loader = RepositoryLoader(
        table,
        deployments,
        scheduling=scheduling,
        completion=chosen_completion(settings, devices, python),
        load_threads=settings.load_threads,
        load_retries=settings.load_retries,
        devices=devices,
        # In mode `poll` no request loads a model.
        server_context=LiveModels(registry),
        budget=budget,
        canary_terms=terms if settings.probation_requests else None,
        quarantine=deployments.quarantine,
        on_rolled_back=deployments.rolled_back,
        on_passed=deployments.passed,
        signatures=signatures,
        take_down=settings.incompatible_member == "take_down",
        interface=InterfaceRule(camera_models, check_replacement, deployments.has_served),
    )
    return PollControl(
        loader,
        deployments,
        paths,
        poll_s=settings.poll_s,
        settle_s=settings.settle_s,
        exit_on_error=settings.exit_on_error,
        budget=budget,
    )
