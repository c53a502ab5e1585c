"""A model as it is to be loaded: its configuration, read and complete, and where its files are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import BACKENDS
from edge_server.errors import ModelConfigError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import USUAL_COMPLETION, ModelConfig
from edge_server.model_config.labels import read_labels
from edge_server.model_config.parse import read_model_config
from edge_server.model_config.validation import validate
from edge_server.model_config.version_policy import select_versions
from edge_server.repository.fingerprint import fingerprint

if TYPE_CHECKING:
    from edge_server.lifecycle.staging import StagedFiles
    from edge_server.model_config.config import Completion
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.fingerprint import Fingerprint


@dataclass(frozen=True, eq=False)
class Override:
    """What a client wants of a model instead of what is on disk.

    Attributes:
        message: its `inference.ModelConfig`.
        staged: its files; None are those on disk.
    """

    message: Any
    staged: StagedFiles | None = None


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """One model, not yet loaded.

    Attributes:
        config: inputs and outputs are the backend's to complete, what only an ensemble's members
            know is missing.
        versions: those that the version policy asks for, ascending, at least one.
        fingerprint: of its files, taken before any was read; None where it is overridden.
        staged: the files' holder, where a client sent them.
    """

    files: ModelFiles
    config: ModelConfig
    versions: tuple[int, ...]
    fingerprint: Fingerprint | None
    staged: StagedFiles | None = None

    @staticmethod
    def read(
        files: ModelFiles,
        override: Override | None = None,
        completion: Completion = USUAL_COMPLETION,
    ) -> ModelSpec:
        """The draft of the model in `files`.

        Raises:
            ModelConfigError: the configuration is wrong, or no version of it is there.
        """
        if override is not None:
            message = pb.ModelConfig()
            message.CopyFrom(override.message)
            try:
                return _completed(files, message, completion, None, override.staged)
            except ModelConfigError as error:
                # It is not the file's fault.
                text = str(error).replace(str(files.config_path), "config override")
                raise type(error)(text) from error
        seen = fingerprint(files.directory) if files.fingerprint is None else files.fingerprint
        return _completed(files, read_model_config(files.config_path), completion, seen, None)

    @property
    def name(self) -> str:
        return self.files.name

    @property
    def is_overridden(self) -> bool:
        return self.fingerprint is None

    def is_same_as(self, other: ModelSpec) -> bool:
        """Whether both are of the same files; of what is overridden nobody can tell."""
        return self is other or (not self.is_overridden and self.fingerprint == other.fingerprint)

    @property
    def message(self) -> Any:
        """The completed `inference.ModelConfig`."""
        return self.config.message

    @property
    def is_ensemble(self) -> bool:
        return self.config.is_ensemble

    @property
    def members(self) -> frozenset[str]:
        """The models that an ensemble uses itself."""
        return frozenset(step.model_name for step in self.config.steps)


def _completed(
    files: ModelFiles,
    message: Any,
    completion: Completion,
    seen: Fingerprint | None,
    staged: StagedFiles | None,
) -> ModelSpec:
    complete(message, files, completion)
    validate(message, files, frozenset(BACKENDS), completion)
    config = replace(ModelConfig.of(message, completion), labels=read_labels(message, files))
    return ModelSpec(files, config, select_versions(message, files), seen, staged)
