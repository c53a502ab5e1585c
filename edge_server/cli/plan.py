"""`edge-server plan refresh`: builds the plans of the repositories that do not fit this device; and
for `doctor`, which models would be served by them."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edge_server.backends.contract import LoadContext, no_progress, parameters_of
from edge_server.backends.tensorrt import backend
from edge_server.backends.tensorrt.backend import PlanSource
from edge_server.backends.tensorrt.plan_config import TensorRtParameters
from edge_server.backends.tensorrt.plan_process import device_in_child, probe_device
from edge_server.board.board import Identity, is_jetson
from edge_server.cli.verbs import FAILED, OK
from edge_server.daemon.parts import chosen_completion, python_of
from edge_server.errors import EdgeServerError, ModelConfigError, Unavailable
from edge_server.gpu.device import Devices
from edge_server.inference.registry import ServedConfiguration
from edge_server.lifecycle.model_spec import ModelSpec
from edge_server.model_config.completion import complete, configurations, devices_of
from edge_server.model_config.config import Completion
from edge_server.mqtt.clients import RetainedState
from edge_server.mqtt.payloads import Topics
from edge_server.process.logs import set_up_logging
from edge_server.process.sd_notify import notify
from edge_server.repository.scan import Repositories
from edge_server.settings import read_settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from edge_server.backends.contract import ProgressCallback
    from edge_server.backends.tensorrt.plan_options import DeviceFacts
    from edge_server.model_config.config import Placement
    from edge_server.model_config.files import ModelFiles
    from edge_server.settings import Settings

log = logging.getLogger(__name__)

_PLANS = "tensorrt"
# Beyond the time that the daemon waits, only a process that hangs is not ready.
_MORE_S = 60.0
# Characters: a broker's clients want a line, the journal has all of it.
_LONGEST_TEXT = 500

State = Literal["building", "ready", "failed", "unavailable"]


@dataclass
class Refreshed:
    """What came of a refresh.

    Attributes:
        fit: number of plans that fitted this device already.
        built: the plans that were built now.
        failures: a text for each model, or plan, that has no plan that fits.
        needless: why no plan was looked for; empty if some were.
    """

    fit: int = 0
    built: list[Path] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    needless: str = ""

    def __str__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return self.needless or f"{self.fit} fit, {len(self.built)} built{failed}"


def refresh(arguments: argparse.Namespace) -> int:
    """Build the plans that are missing; return the exit code."""
    paths = list(map(str, arguments.model_repository))
    settings = read_settings(arguments.config, {"repository": {"paths": paths}} if paths else {})
    # Its progress is for the console, too.
    set_up_logging(settings.log, fields=False)
    refreshed = refresh_for_unit(settings, version("edge-server"))
    print(f"plans: {refreshed}")
    for failure in refreshed.failures:
        print(f"edge-server: {failure}", file=sys.stderr)
    return FAILED if refreshed.failures else OK


def refresh_for_unit(settings: Settings, version: str) -> Refreshed:
    """Refresh all plans; report to systemd, to the log and to the broker of `settings`.

    systemd gets READY=1 after the setting `wait_for_plans_s`, or at the end, whatever that is: the
    units ordered after this one start then.

    Raises:
        Unavailable: models here run plans, and there is no GPU or no TensorRT to build them with.
        ModelConfigError: a repository cannot be read.
    """
    hold_s = settings.repository.wait_for_plans_s
    with ExitStack() as stack:
        stack.callback(notify, "READY=1")
        notify(f"EXTEND_TIMEOUT_USEC={round(1e6 * (hold_s + _MORE_S))}")
        timer = threading.Timer(hold_s, _let_others_start, (hold_s,))
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        found = Refreshed()
        models = list(_plan_models(settings, found))
        facts = probe_device() if models or found.failures else None
        if facts is None:
            found.needless = f"no model of {', '.join(settings.repository.paths)} runs one"
        elif facts.reason and not (
            is_jetson() or found.failures or any(only for _, only in models)
        ):
            found.needless = f"none is needed: {facts.reason}"
        if facts is None or found.needless:
            log.info("plans: %s", found)
            notify(f"STATUS={found}".replace("\n", " "))
            return found
        report = stack.enter_context(_Report(settings, version))
        try:
            _refresh(settings, facts, [files for files, _ in models], found, report)
        except EdgeServerError as error:
            report("unavailable", "", str(error))
            raise
        report(
            "failed" if found.failures else "ready", "", "; ".join([str(found), *found.failures])
        )
        return found


def _plan_models(settings: Settings, found: Refreshed) -> Iterator[tuple[ModelFiles, bool]]:
    """Yield the models that run plans, and whether they run nothing else; those that cannot be read
    become failures of `found`."""
    for files in Repositories(map(Path, settings.repository.paths)).all().values():
        try:
            if isinstance(files, ModelConfigError):
                raise files
            backends = []
            for chosen, message in configurations(files, settings.repository.config_name):
                complete(message, chosen)
                backends.append(message.backend)
        except ModelConfigError as error:
            found.failures.append(str(error))
            continue
        if _PLANS in backends:
            yield files, backends[-1] == _PLANS


def _refresh(
    settings: Settings,
    facts: DeviceFacts,
    models: Iterable[ModelFiles],
    found: Refreshed,
    report: _Report,
) -> None:
    if facts.reason:
        raise Unavailable(f"no plan can be built here: {facts.reason}")
    repository = settings.repository
    completion = Completion(
        repository.auto_complete,
        repository.default_max_batch_size,
        gpus=1,
        config_name=repository.config_name,
    )
    for files in models:
        name = files.name
        try:
            spec: ModelSpec | None = ModelSpec.read(files, completion=completion)
        except EdgeServerError as error:
            _fail(name, error, found)
            continue
        # As the daemon: the first configuration that has what it needs serves.
        while spec is not None and spec.config.backend == _PLANS:
            try:
                for source, placement in _sources(spec, partial(report.building, name)):
                    plan, is_new = source.refresh(facts, placement)
                    if is_new:
                        log.info("model %s: plan %s was built", name, plan)
                        found.built.append(plan)
                    else:
                        found.fit += 1
                break
            except EdgeServerError as error:
                _fail(name, error, found)
                spec = spec.fallback


def _fail(name: str, error: EdgeServerError, found: Refreshed) -> None:
    log.error("model %s: no plan that fits: %s", name, error)
    found.failures.append(f"{name}: {error}")


def _sources(
    spec: ModelSpec, on_progress: ProgressCallback = no_progress, *, builds: bool = True
) -> Iterator[tuple[PlanSource, Placement]]:
    parameters = parameters_of(spec.config, TensorRtParameters)
    for number in spec.versions:
        config = spec.config
        if parameters.auto_build:
            # As the daemon does before it loads: the shapes decide which cached plan it looks for.
            config = backend.complete(spec.files, number, config)
        directory = spec.files.versions[number]
        context = LoadContext(directory, config, Devices(), on_progress, builds=builds)
        source = PlanSource(context)
        for placement in dict.fromkeys(p for g in config.instance_groups for p in g.placements):
            yield source, placement


def would_serve(config: str, state: str) -> dict[str, dict[str, str]]:
    """Return, for `doctor`: model → which of its configurations a daemon would serve now, on what
    and why, as `serves` or `degraded`; or `error`. Models that prefer none are left out.

    It runs in a process of its own, and loads and builds nothing.

    Args:
        config: the file of settings.
        state: the daemon's state directory.
    """
    os.environ["STATE_DIRECTORY"] = state
    settings = read_settings(Path(config), {})
    completion = chosen_completion(settings.repository, Devices(), python_of(settings))
    facts = device_in_child()
    found: dict[str, dict[str, str]] = {}
    for name, files in Repositories(map(Path, settings.repository.paths)).all().items():
        try:
            if isinstance(files, ModelConfigError):
                raise files
            if len(configurations(files, completion.config_name)) > 1:
                spec = _with_plans(ModelSpec.read(files, completion=completion), facts)
                file, devices = spec.files.config_name, devices_of(spec.config)
                degraded = spec.why if spec.is_degraded else ""
                served = ServedConfiguration(file, devices, spec.why, degraded)
                found[name] = {"degraded" if degraded else "serves": str(served)}
        except EdgeServerError as error:
            found[name] = {"error": str(error)}
    return found


def _with_plans(head: ModelSpec, facts: DeviceFacts) -> ModelSpec:
    """Return the first configuration of `head` and its fallbacks that lacks no plan."""
    spec = head
    while spec.fallback is not None and spec.config.backend == _PLANS:
        try:
            for source, placement in _sources(spec, builds=False):
                source.find(facts, placement)
            break
        except EdgeServerError as error:
            spec = spec.standing_in(head, str(error))
    return spec


def _let_others_start(hold_s: float) -> None:
    log.warning("plans: not all are built after %g s; the daemon starts meanwhile", hold_s)
    notify("READY=1")


class _Report:
    """How far the builds are: systemd's status, and a retained topic of the broker."""

    def __init__(self, settings: Settings, version: str) -> None:
        self._state = None
        if settings.mqtt is not None:
            identity = Identity.of_this_host(settings.device.id, version)
            topic = Topics(identity.device).plans
            self._state = RetainedState(settings.mqtt, f"{identity.client_id}-plans", topic)

    def __enter__(self) -> _Report:
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            self._state.close()

    def __call__(self, state: State, model: str, text: str) -> None:
        status = f"{model}: {text}" if model else text
        notify(f"STATUS={status}".replace("\n", " "))
        if self._state is not None:
            payload = {"state": state, "model": model, "text": text[:_LONGEST_TEXT]}
            self._state.publish(json.dumps(payload).encode())

    def building(self, model: str, text: str) -> None:
        """Report the progress of a build; the empty text, its end, is followed by other news."""
        if text:
            self("building", model, text)
