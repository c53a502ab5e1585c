"""A model to load: its spec, the files that a client sends for it, and the result of its load."""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import BACKENDS, missing_library
from edge_server.backends.contract import NoRoom
from edge_server.errors import (
    EdgeServerError,
    InternalError,
    InvalidRequest,
    ModelConfigError,
)
from edge_server.inference.registry import close_model
from edge_server.model_config.completion import complete, configurations, missing_device
from edge_server.model_config.config import USUAL_COMPLETION, ModelConfig, python_backend
from edge_server.model_config.files import CONFIGS_DIRECTORY, select_versions
from edge_server.model_config.validation import validate
from edge_server.process.text import as_utf8, is_utf8
from edge_server.repository.scan import DEEPEST, MOST_FILES, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edge_server.inference.canary_monitor import CanaryMonitor
    from edge_server.inference.registry import LoadedModel
    from edge_server.model_config.config import Completion
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.scan import Fingerprint

log = logging.getLogger(__name__)

# A reason may quote a client's configuration; it is kept in memory and sent with every index.
LONGEST_REASON = 4000


class StagedFiles:
    """A private model directory, removed by `remove` or when this object is not referenced."""

    def __init__(self, root: Path, name: str, files: Mapping[str, bytes]) -> None:
        """Write `files` (`<version>/<name>` → content) below `root`. Raises InvalidRequest where a
        path leaves the model's directory, or two conflict; InternalError or OSError of the file
        system."""
        if len(files) > MOST_FILES:
            raise InvalidRequest(
                f"{len(files)} file parameters; a model has at most {MOST_FILES} files"
            )
        paths = {key: _inside(key) for key in files}
        place = Path(tempfile.mkdtemp(dir=root))
        self.remove = weakref.finalize(self, shutil.rmtree, place, ignore_errors=True)
        self.directory = place / name
        try:
            self.directory.mkdir()
            for key, path in paths.items():
                _write(self.directory / path, key, files[key])
        except BaseException:
            self.remove()
            raise


def _write(target: Path, key: str, content: bytes) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise InvalidRequest(
            f"file parameter '{_wire(key)}' names a file where another one needs a directory"
        ) from error
    except OSError as error:
        raise InternalError(
            f"file parameter '{_wire(key)}' cannot be kept: {target}: {error.strerror}"
        ) from error


def _inside(key: str) -> PurePosixPath:
    if not is_utf8(key):
        raise InvalidRequest(f"Invalid file parameter {_wire(key)[:200]!a}: is not UTF-8 text")
    parts: list[str] = []
    for part in key.split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part not in {"", "."}:
            parts.append(part)
    if key.startswith("/") or not parts or parts[0] == ".." or "\0" in key:
        normalized = ("/" if key.startswith("/") else "") + "/".join(parts)
        raise InvalidRequest(
            f"Invalid file parameter '{_wire(key)}' with normalized path '{normalized}' must stay "
            "within model directory."
        )
    if len(parts) > DEEPEST:
        raise InvalidRequest(
            f"Invalid file parameter '{_wire(key)[:200]}': {len(parts)} directories deep; at most "
            f"{DEEPEST} are possible"
        )
    return PurePosixPath(*parts)


def _wire(key: str) -> str:
    return f"file:{key}"


@dataclass(frozen=True, eq=False)
class Override:
    """A client's replacement for the model on disk: the `inference.ModelConfig` to load with, and
    the files that the client sent; None uses those on disk."""

    message: Any
    staged: StagedFiles | None = None


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """One model, not yet loaded.

    Attributes:
        config: the backend still completes inputs and outputs, and an ensemble's members the rest.
        versions: those that the version policy selects, ascending, at least one.
        fingerprint: taken before the first file is read; None for an override.
        fallback: the next of the model's configurations (`model_config.preferred`), loaded where
            this one cannot be; None for the last one.
        instead_of: the first of the configurations before this one that may still be loaded.
        why: why this one is loaded and not one before it; empty for the first.
        is_degraded: this machine should have served one before it."""

    files: ModelFiles
    config: ModelConfig
    versions: tuple[int, ...]
    fingerprint: Fingerprint | None
    fallback: ModelSpec | None = None
    instead_of: ModelSpec | None = None
    why: str = ""
    is_degraded: bool = False

    @staticmethod
    def read(
        files: ModelFiles,
        override: Override | None = None,
        completion: Completion = USUAL_COMPLETION,
    ) -> ModelSpec:
        """Return the spec of the model in `files`.
        Raises: ModelConfigError: the configuration is wrong, or the model has no version."""
        if override is not None:
            message = pb.ModelConfig()
            message.CopyFrom(override.message)
            try:
                return _completed(files, message, completion, None)
            except ModelConfigError as error:
                # The error is in the override, so the text must not name the file.
                text = str(error).replace(str(files.config_path), "config override")
                raise type(error)(text) from error
        seen = fingerprint(files.directory) if files.fingerprint is None else files.fingerprint
        *preferred, (last, message) = configurations(files, completion.config_name)
        spec = _completed(last, message, completion, seen)
        lacks: dict[str, list[str]] = {}
        for chosen, message in reversed(preferred):
            complete(message, chosen, completion)
            lacking = missing_device(message, completion, missing_library(message.backend))
            if lacking:
                lacks.setdefault(lacking, []).insert(0, chosen.config_name)
            else:
                better = _completed(chosen, message, completion, seen)
                spec, lacks = replace(better, fallback=spec), {}
        reasons = [f"{', '.join(names)}: {text}" for text, names in reversed(lacks.items())]
        asked = f"{CONFIGS_DIRECTORY}/{completion.config_name}.pbtxt"
        if preferred and completion.config_name and preferred[0][0].config_name != asked:
            reasons.insert(0, f"{asked}, which config_name asks for: there is none")
        why = "; ".join(reasons)
        return replace(spec, why=why, is_degraded=bool(lacks) and completion.jetson)

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def is_overridden(self) -> bool:
        return self.fingerprint is None

    def is_same_as(self, other: ModelSpec) -> bool:
        """Return whether both specs are of the same files; False for two different overrides."""
        return self is other or (not self.is_overridden and self.fingerprint == other.fingerprint)

    def standing_in(self, head: ModelSpec, why: str) -> ModelSpec:
        """Return the fallback, to be loaded as `head` and what came before it cannot be."""
        if self.fallback is None:
            raise AssertionError(f"{self.name}: {self.files.config_name} has no fallback")
        why = "; ".join(filter(None, (self.why, f"{self.files.config_name}: {why}")))
        return replace(self.fallback, instead_of=head, why=why, is_degraded=True)

    @property
    def message(self) -> Any:
        return self.config.message

    @property
    def is_ensemble(self) -> bool:
        return self.config.is_ensemble

    @property
    def members(self) -> frozenset[str]:
        return frozenset(step.model_name for step in self.config.steps)


def _completed(
    files: ModelFiles,
    message: Any,
    completion: Completion,
    seen: Fingerprint | None,
) -> ModelSpec:
    complete(message, files, completion)
    known = frozenset(BACKENDS)
    if python_backend(message, completion):
        known |= {message.backend}
    labels = validate(message, files, known, completion)
    config = replace(ModelConfig.of(message, completion), labels=labels)
    return ModelSpec(files, config, select_versions(message, files), seen)


class Part(NamedTuple):
    """A model as ensembles see it: its spec, and the configuration of each version."""

    model_spec: ModelSpec
    configs: Mapping[int, ModelConfig]


@dataclass(frozen=True, eq=False)
class LoadedVersions:
    """All versions of a model that its spec selects, loaded; those of an ensemble are made only
    after it fits its members.

    Attributes:
        kept: the versions reused from the predecessor, apart from a change of instances.
        idle: the index's reason if they are idle (`idle.IdleModels`): they have no model in
            memory."""

    model_spec: ModelSpec
    models: tuple[LoadedModel, ...] = ()
    took_s: float = 0.0
    kept: frozenset[int] = frozenset()
    idle: str = ""

    def as_part(self) -> Part:
        if self.model_spec.is_ensemble:
            return Part(
                self.model_spec, dict.fromkeys(self.model_spec.versions, self.model_spec.config)
            )
        return Part(self.model_spec, {model.version: model.config for model in self.models})

    def close(self) -> None:
        """Close all versions; used when they are not published."""
        for model in self.models:
            close_model(model)


@dataclass(frozen=True)
class LoadFailure:
    """The failure of one model's load; `version` is 0 if it is of no single one. A `misfit` was
    loaded and does not fit the ensembles."""

    error: EdgeServerError
    version: int = 0
    model_spec: ModelSpec | None = None
    misfit: bool = False

    @staticmethod
    def of(
        error: BaseException, name: str, version: int = 0, model_spec: ModelSpec | None = None
    ) -> LoadFailure:
        """Return the failure for any `error` of the load of `name`; log an unexpected one."""
        if isinstance(error, EdgeServerError):
            return LoadFailure(error, version, model_spec)
        text = f"model '{name}': unexpected {type(error).__name__}: {error}; see the log"
        log.error("model %s: loading failed", name, exc_info=error)
        return LoadFailure(InternalError(text), version, model_spec)

    @property
    def has_room(self) -> Callable[[], bool]:
        """Returns whether there is the room that the load lacked; true if it lacked none."""
        return self.error.has_room if isinstance(self.error, NoRoom) else lambda: True

    @property
    def reason(self) -> str:
        """The error's text, with the paths of the repository instead of those of the copies."""
        reason = str(self.error)
        if self.model_spec is not None:
            reason = self.model_spec.files.as_shown(reason)
        # A model may raise any text, and every transport must carry the reason.
        return as_utf8(reason)[:LONGEST_REASON]


@dataclass(frozen=True, eq=False)
class KeptPredecessor:
    """The predecessor of a version in a canary, open, and the specs of the ensembles that changed
    together with it; for an ensemble also its `members`, direct and indirect, for the comparison.
    Who takes them publishes or closes the versions, and closes the members."""

    built: LoadedVersions
    ensembles: Mapping[str, ModelSpec]
    members: tuple[LoadedModel, ...] = ()

    def close(self) -> None:
        """Close the predecessor and its members; used when the predecessor is discarded."""
        self.built.close()
        self.close_members()

    def close_members(self) -> None:
        LoadedVersions(self.built.model_spec, self.members).close()


@dataclass(eq=False)
class CanaryRun:
    """The canary of one model's new versions.
    Attributes: before: the predecessor; None once another owner has taken it."""

    model_spec: ModelSpec
    before: KeptPredecessor | None
    versions: frozenset[int]
    monitor: CanaryMonitor = field(init=False)
    has_passed: bool = False

    def take_predecessor(self) -> KeptPredecessor | None:
        """Return the predecessor and pass its ownership to the caller."""
        before, self.before = self.before, None
        return before
