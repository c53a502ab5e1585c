"""One record of a model: what becomes of each copy, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.lifecycle.deployment import ModelRecord
from edge_server.lifecycle.model_spec import LoadedVersions, ModelSpec
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.files import ModelFiles
from edge_server.repository.store import StagedModel
from edge_server.repository.verdicts import GOOD, LOADING, ROLLED_BACK

CONFIG = ModelConfig.of(text_format.Parse('name: "m" backend: "identity"', pb.ModelConfig()))
STORE = Path("/store")


def copy(digest: str) -> StagedModel:
    return StagedModel("m", digest, STORE / digest / "m", ())


def spec(staged: StagedModel | None = None) -> ModelSpec:
    files = ModelFiles("m", Path("/models/m"), {1: Path("/models/m/1")})
    return ModelSpec(replace(files, holder=staged), CONFIG, (1,), frozenset({(str(id(staged)),)}))


def serve(record: ModelRecord, staged: StagedModel) -> None:
    model_spec = spec(staged)
    record.begin_load(model_spec, explicit=True)
    record.serve(LoadedVersions(model_spec))


def test_a_new_delivery_outlives_the_rollback_of_the_one_before() -> None:
    record, first, second, third = ModelRecord("m"), copy("1"), copy("2"), copy("3")
    record.deliver(first, Path("/models/m"))
    serve(record, first)
    record.is_good(first)
    record.deliver(second, Path("/models/m"))
    serve(record, second)
    record.deliver(third, Path("/models/m"))
    record.rolled_back(second, "slow")
    assert record.accepted is third
    assert record.outcome == (LOADING, "3", "")
    serve(record, third)
    serve(record, first)
    record.rolled_back(third, "slow")
    assert record.outcome == (ROLLED_BACK, "3", "slow")
    assert record.accepted is first


def test_a_canary_that_passed_before_its_report_is_good() -> None:
    record, first = ModelRecord("m"), copy("1")
    record.deliver(first, Path("/models/m"))
    serve(record, first)
    assert record.uncommitted is first
    record.is_good(first)
    assert record.uncommitted is None
    assert record.verdict(STORE)[:2] == (GOOD, "1")
    assert record.verdict(STORE)[4:7] == ("1", "1", "1/m")


def test_a_verdict_on_a_candidate_is_one_on_the_content_that_it_was_found_of() -> None:
    record, first = ModelRecord("m"), copy("1")
    record.deliver(first, Path("/models/m"))
    serve(record, first)
    record.candidate = "1", "good: in 700 frames", "lanes"
    assert record.verdict(STORE)[7:] == ("good: in 700 frames", "lanes")
    record.candidate = "0", "good: in 700 frames", "lanes"
    assert record.verdict(STORE)[7:] == ("", "")
