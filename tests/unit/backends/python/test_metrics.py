"""A model's own metrics: one value for all that make the same name and labels."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edge_server.backends.contract import ModelMetric
from edge_server.backends.python.context import MetricBook
from edge_server.backends.python.messages import ChangeMetric, MakeFamily, MakeMetric
from edge_server.errors import InvalidRequest


def make(book: MetricBook, name: str, description: str, kind: Any, *fields: Any) -> int:
    return book.make(MakeMetric(MakeFamily(name, description, kind), *fields))


def test_the_same_name_and_labels_are_the_same_metric() -> None:
    book = MetricBook()
    number = make(book, "frames", "seen", "counter", {"a": "1", "b": "2"})
    assert make(book, "frames", "seen", "counter", {"b": "2", "a": "1"}) == number
    assert make(book, "frames", "seen", "counter", {"a": "2"}) != number


def test_values_are_kept_by_kind() -> None:
    book = MetricBook()
    counter = make(book, "frames", "seen", "counter", {})
    gauge = make(book, "load", "now", "gauge", {"core": "0"})
    book.change(ChangeMetric(counter, "increment", 2))
    book.change(ChangeMetric(counter, "increment", 3))
    book.change(ChangeMetric(gauge, "increment", -1))
    book.change(ChangeMetric(gauge, "set", 7))
    assert book.metrics() == (
        ModelMetric("frames", "seen", "counter", {}, 5.0),
        ModelMetric("load", "now", "gauge", {"core": "0"}, 7.0),
    )


def test_a_histogram_counts_what_is_not_above_each_bound() -> None:
    book = MetricBook()
    number = make(book, "ms", "took", "histogram", {}, [1.0, 10.0])
    for value in (0.5, 1.0, 5.0, 100.0):
        book.change(ChangeMetric(number, "observe", value))
    (histogram,) = book.metrics()
    assert histogram.value == 106.5
    assert histogram.buckets == {1.0: 2, 10.0: 3, math.inf: 4}


def test_a_family_keeps_its_kind_and_first_description_before_it_has_metrics() -> None:
    book = MetricBook()
    book.make_family(MakeFamily("frames", "first", "counter"))
    with pytest.raises(InvalidRequest, match="'frames' is a counter already, no gauge"):
        book.make_family(MakeFamily("frames", "first", "gauge"))
    make(book, "frames", "second", "counter", {})
    assert [metric.description for metric in book.metrics()] == ["first"]


def test_a_model_has_a_limited_number_of_families() -> None:
    book = MetricBook()
    for number in range(1000):
        book.make_family(MakeFamily(f"n{number}", "", "counter"))
    with pytest.raises(InvalidRequest, match="at most 1000 families"):
        book.make_family(MakeFamily("n1000", "", "counter"))
    book.make_family(MakeFamily("n7", "", "counter"))


def test_a_histogram_without_bounds_counts_all() -> None:
    book = MetricBook()
    number = make(book, "ms", "took", "histogram", {}, [])
    book.change(ChangeMetric(number, "observe", 5))
    (histogram,) = book.metrics()
    assert histogram.buckets == {math.inf: 1}


@pytest.mark.parametrize(
    ("name", "description", "labels", "bounds", "why"),
    [
        *((name, "", {}, [], "name") for name in ("", "1st", "a b", "nv_gpu_power", "edge_frames")),
        *(("n", "", {label: "x"}, [], "cannot be a label") for label in ("", "a-b", "__name__")),
        *(("n", "", {}, each, "do not ascend") for each in ([2.0, 1.0], [math.nan], [1, math.nan])),
        ("n", "", {"le": "1"}, [1.0], "'le' is a histogram's own label"),
        ("n" * 5000, "", {}, [], "more than 4096 characters"),
        ("n", "d" * 5000, {}, [], "more than 4096 characters"),
        ("n", "", {"l": "v" * 5000}, [], "more than 4096 characters"),
    ],
)
def test_what_would_spoil_the_page_is_refused(
    name: str, description: str, labels: dict[str, str], bounds: list[float], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        make(MetricBook(), name, description, "histogram", labels, bounds)


def test_a_label_that_takes_ever_new_values_ends_at_a_limit() -> None:
    book = MetricBook()
    numbers = [make(book, "seen", "", "counter", {"frame": str(i)}) for i in range(1000)]
    with pytest.raises(InvalidRequest, match="at most 1000 metrics"):
        make(book, "seen", "", "counter", {"frame": "1000"})
    with pytest.raises(InvalidRequest, match="at most 1000 metrics"):
        make(book, "other", "", "counter", {})
    assert make(book, "seen", "", "counter", {"frame": "7"}) == numbers[7]
