"""The version policy chooses among the versions on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError
from edge_server.model_config.files import ModelFiles, select_versions

FILES = ModelFiles("m", Path("m"), {version: Path("m") / str(version) for version in (1, 3, 10)})


def selected(policy: str, files: ModelFiles = FILES) -> tuple[int, ...]:
    text = f"version_policy {{ {policy} }}"
    return select_versions(text_format.Parse(text, pb.ModelConfig()), files)


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("latest { num_versions: 1 }", (10,)),
        ("latest { num_versions: 2 }", (3, 10)),
        ("latest { num_versions: 4294967295 }", (1, 3, 10)),
        ("all {}", (1, 3, 10)),
        ("specific { versions: [3, 1, 3] }", (1, 3)),
    ],
)
def test_versions_are_numbers_not_names(policy: str, versions: tuple[int, ...]) -> None:
    assert selected(policy) == versions


def test_one_missing_specific_version_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert selected("specific { versions: [1, 2] }") == (1,)
    assert caplog.messages == ["model m: version 2 is specified but not on disk"]


@pytest.mark.parametrize("policy", ["specific { versions: 2 }", "specific {}"])
def test_at_least_one_version_must_be_there(policy: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        selected(policy)
    assert ("at least one version must be available under the version policy of model 'm'") in str(
        caught.value
    )
    with pytest.raises(ModelConfigError, match="make a directory '1'"):
        selected("all {}", ModelFiles("m", Path("m"), {}))
