"""Which requests run together, and when, whatever stands in the line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.inference.dynamic_batch import BatchRule, OpenBatch
from edge_server.inference.execution import Executor, Job
from edge_server.inference.registry import Snapshot
from edge_server.inference.statistics import ModelStatistics
from edge_server.model_config.config import ModelConfig
from edge_server.model_config.scheduling import DynamicBatching
from edge_server.requests import InferRequest
from edge_server.tensors import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

US = 1000
NOW_NS = 1_000_000_000


def config(max_batch_size: int) -> ModelConfig:
    return ModelConfig.of(
        text_format.Parse(
            f"""
            name: "m" backend: "identity" max_batch_size: {max_batch_size}
            input {{ name: "a" data_type: TYPE_FP32 dims: -1 }}
            input {{ name: "b" data_type: TYPE_FP32 dims: -1 optional: true }}
            output {{ name: "c" data_type: TYPE_FP32 dims: -1 }}
            """,
            pb.ModelConfig(),
        )
    )


def job(
    rows: int = 1, columns: int = 2, age_us: int = 0, max_batch_size: int = 8, with_b: bool = False
) -> Job:
    tensor = Tensor(np.zeros((rows, columns), np.float32))
    inputs = {"a": tensor, "b": tensor} if with_b else {"a": tensor}
    executor = Executor(config(max_batch_size), 1, ModelStatistics())
    made = Job(executor, InferRequest("m", inputs), Snapshot({}))
    made.queued_at_ns = NOW_NS - age_us * US
    return made


def batch(batching: DynamicBatching, *line: Job, max_batch_size: int = 8) -> OpenBatch:
    return BatchRule(config(max_batch_size), batching).batch(line, NOW_NS)


def test_without_delay_all_that_fits_goes_at_once() -> None:
    assert batch(DynamicBatching(), job(3), job(1), job(2)) == OpenBatch(3, NOW_NS)


def test_requests_are_never_split() -> None:
    assert batch(DynamicBatching(), job(5), job(4)).count == 1


def test_another_shape_or_another_set_of_inputs_ends_the_batch() -> None:
    assert batch(DynamicBatching(), job(), job(columns=3), job()).count == 1
    assert batch(DynamicBatching(), job(), job(with_b=True), job()).count == 1
    assert batch(DynamicBatching(), job(with_b=True), job(with_b=True)).count == 2


def test_the_shapes_of_ragged_inputs_may_differ_within_a_batch() -> None:
    message = config(8).message
    message.input[0].allow_ragged_batch = True
    rule = BatchRule(ModelConfig.of(message), DynamicBatching())
    assert rule.batch([job(), job(columns=3), job()], NOW_NS).count == 3
    assert rule.batch([job(), job(columns=3), job(with_b=True)], NOW_NS).count == 2


def test_a_model_without_batches_runs_requests_one_by_one() -> None:
    line = [job(max_batch_size=0), job(max_batch_size=0)]
    found = BatchRule(config(0), DynamicBatching(max_queue_delay_us=50)).batch(line, NOW_NS)
    assert found == OpenBatch(1, NOW_NS)


def test_the_oldest_waits_for_company_no_longer_than_the_delay() -> None:
    batching = DynamicBatching(max_queue_delay_us=50)
    assert batch(batching, job(age_us=10), job()) == OpenBatch(2, NOW_NS + 40 * US)
    assert batch(batching, job(age_us=50), job()).due_ns <= NOW_NS
    # It may stand further back, where somebody has overtaken it.
    assert batch(batching, job(), job(age_us=60)) == OpenBatch(2, NOW_NS - 10 * US)


def test_a_preferred_size_goes_at_once_and_the_largest_one_reached_counts() -> None:
    batching = DynamicBatching(preferred_batch_sizes=(2, 4), max_queue_delay_us=50)
    assert batch(batching, job(), job()) == OpenBatch(2, NOW_NS)
    assert batch(batching, *[job()] * 5) == OpenBatch(4, NOW_NS)
    assert batch(batching, job()).due_ns > NOW_NS
    # Past the delay nobody is left behind for the sake of a size.
    assert batch(batching, *[job(age_us=50)] * 3).count == 3


def test_a_caller_that_cannot_get_company_does_not_wait_for_it() -> None:
    batching = DynamicBatching(max_queue_delay_us=50)
    assert batch(batching, job(), job(columns=3)) == OpenBatch(1, NOW_NS)
    assert batch(batching, job(8)) == OpenBatch(1, NOW_NS)
    batching = DynamicBatching(preferred_batch_sizes=(4,), max_queue_delay_us=50)
    assert batch(batching, job(3), job(3)) == OpenBatch(2, NOW_NS)


def test_an_empty_line_has_no_batch() -> None:
    assert batch(DynamicBatching()).count == 0


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 2), st.booleans(), st.integers(0, 100)),
        min_size=1,
        max_size=12,
    ),
    preferred=st.frozensets(st.integers(1, 8), max_size=3),
    delay_us=st.sampled_from([0, 1, 40, 200]),
)
def test_every_batch_keeps_the_rules(
    sizes: list[tuple[int, int, bool, int]], preferred: frozenset[int], delay_us: int
) -> None:
    line = [job(rows, columns, age_us, with_b=with_b) for rows, columns, with_b, age_us in sizes]
    batching = DynamicBatching(tuple(sorted(preferred)), delay_us)
    found = BatchRule(config(8), batching).batch(iter(line), NOW_NS)
    taken = line[: found.count]
    total = sum(each.batch_size for each in taken)
    assert taken
    assert total <= 8
    assert len({(frozenset(each.inputs), each.inputs["a"].shape[1]) for each in taken}) == 1
    oldest_ns = min(each.queued_at_ns for each in taken)
    assert found.due_ns <= max(NOW_NS, oldest_ns + delay_us * US)
    if found.due_ns > NOW_NS:
        # It waits: for company that may still come, of all those that are there, for less than
        # the delay, and short of every size that would let it go.
        assert taken == line
        assert total not in (preferred or {8})
        assert total < max(preferred or {8})
    elif total in preferred:
        longer = [sum(e.batch_size for e in line[:n]) for n in range(found.count + 1, len(line))]
        reached = {size for size in longer if size in preferred and size <= 8}
        alike = all(
            (frozenset(e.inputs), e.inputs["a"].shape[1])
            == (frozenset(line[0].inputs), line[0].inputs["a"].shape[1])
            for e in line
        )
        assert not (alike and reached), "a larger preferred size was there"


def test_the_queue_is_not_read_further_than_the_batch_may_go() -> None:
    def line() -> Iterator[Job]:
        yield from [job(4), job(4)]
        raise AssertionError("read on")

    assert BatchRule(config(8), DynamicBatching()).batch(line(), NOW_NS).count == 2
