"""What is counted stays small, however long a model answers."""

from __future__ import annotations

from edge_server.inference.statistics import ModelStatistics


def test_a_model_that_answers_without_end_does_not_fill_the_memory() -> None:
    statistics = ModelStatistics()
    for index in range(1500):
        statistics.responded(index, 1)
    responses = statistics.counts().responses
    assert len(responses) == 1000
    assert responses["998"].success.count == 1
    assert responses["999"].success.count == 501
