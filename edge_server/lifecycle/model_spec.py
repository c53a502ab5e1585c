"""The specification of a model to load: its completed configuration and the place of its files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from edge_server.backends import BACKENDS
from edge_server.errors import ModelConfigError
from edge_server.model_config.completion import complete
from edge_server.model_config.config import USUAL_COMPLETION, ModelConfig
from edge_server.model_config.files import select_versions
from edge_server.model_config.parse import read_model_config
from edge_server.model_config.validation import validate
from edge_server.repository.tree import fingerprint

if TYPE_CHECKING:
    from edge_server.lifecycle.staging import StagedFiles
    from edge_server.model_config.config import Completion
    from edge_server.model_config.files import ModelFiles
    from edge_server.repository.tree import Fingerprint


@dataclass(frozen=True, eq=False)
class Override:
    """A client's replacement for the model on disk.

    Attributes:
        message: the `inference.ModelConfig` to load with.
        staged: the files that the client sent; None uses the files on disk.
    """

    message: Any
    staged: StagedFiles | None = None


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """One model, not yet loaded.

    Attributes:
        files: the places of the model's files.
        config: the configuration; the backend still completes inputs and outputs, and the members
            of an ensemble supply the rest.
        versions: the versions that the version policy selects, ascending, at least one.
        fingerprint: the fingerprint of the files, taken before the first is read; None for an
            override.
        staged: the holder of the files that a client sent.
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
        """Return the spec of the model in `files`.

        Args:
            files: the places of the model's files.
            override: a client's configuration and files, in place of those on disk.
            completion: the fields that a configuration may leave out.

        Raises:
            ModelConfigError: the configuration is wrong, or the model has no version.
        """
        if override is not None:
            message = pb.ModelConfig()
            message.CopyFrom(override.message)
            try:
                return _completed(files, message, completion, None, override.staged)
            except ModelConfigError as error:
                # The error is in the override, so the text must not name the file.
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
        """Return whether both specs are of the same files; False for two different overrides."""
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
        """The models that an ensemble uses directly."""
        return frozenset(step.model_name for step in self.config.steps)


def _completed(
    files: ModelFiles,
    message: Any,
    completion: Completion,
    seen: Fingerprint | None,
    staged: StagedFiles | None,
) -> ModelSpec:
    complete(message, files, completion)
    labels = validate(message, files, frozenset(BACKENDS), completion)
    config = replace(ModelConfig.of(message, completion), labels=labels)
    return ModelSpec(files, config, select_versions(message, files), seen, staged)
