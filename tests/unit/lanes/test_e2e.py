"""The envelope: each fault of a network that AUTOSAR's E2E protocol names is found."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.lanes.e2e import Check, Checker, Envelope, new_session, protect, unprotect

TOPIC = "edge/v1/truck-7/cameras/front/lanes"
OTHER = "edge/v1/truck-7/cameras/rear/lanes"
SESSION = "5f1a7a3e"
PERIOD_S = 0.033

payloads = st.binary(max_size=300)
counters = st.integers(0, 2**32 - 1)


@dataclass
class Message:
    payload: bytes
    value: str | None
    sent_s: float


def sent(
    counter: int,
    *,
    first: int = 0,
    session: str = SESSION,
    topic: str = TOPIC,
    payload: bytes = b"p",
) -> Message:
    """What a device sends; its clock is 1000 s ahead of the receiver's."""
    sent_s = (counter - first) * PERIOD_S
    envelope = Envelope(session, counter, round(1000 * (1000 + sent_s)))
    return Message(payload, protect(topic, payload, envelope), sent_s)


def checks(*messages: Message, delay_s: float = 0.002, **limits: float) -> list[Check]:
    checker = Checker(TOPIC, **limits)
    return [checker.check(m.payload, m.value, m.sent_s + delay_s) for m in messages]


def test_the_envelope_is_the_documented_text() -> None:
    text = "1 5f1a7a3e 7 123456"
    crc = zlib.crc32(f"{TOPIC}\0{text}\0".encode() + b"payload")
    value = protect(TOPIC, b"payload", Envelope(SESSION, 7, 123456))
    assert value == f"{text} {crc:08x}"
    # The check value of CRC-32 as IEEE 802.3 has it, so that no other polynomial passes.
    assert zlib.crc32(b"123456789") == 0xCBF43926


@given(payloads, counters, st.integers(0, 10**15))
def test_what_was_sent_is_read(payload: bytes, counter: int, sent_ms: int) -> None:
    envelope = Envelope(new_session(), counter, sent_ms)
    assert unprotect(TOPIC, payload, protect(TOPIC, payload, envelope)) == envelope


@given(counters, st.integers(1, 50))
def test_messages_in_their_order_are_ok_across_the_end_of_the_counter(
    first: int, count: int
) -> None:
    messages = [sent(first + k, first=first) for k in range(count)]
    assert checks(*messages) == [Check.OK] * count


@given(payloads, st.data())
def test_corruption_is_found(payload: bytes, data: st.DataObject) -> None:
    good = sent(0, payload=payload)
    assert good.value is not None
    raw = payload + good.value.encode()
    bits = data.draw(st.sets(st.integers(0, 8 * len(raw) - 1), min_size=1, max_size=3))
    flipped = bytearray(raw)
    for bit in bits:
        flipped[bit // 8] ^= 1 << bit % 8
    wrong = flipped[len(payload) :].decode("latin-1")
    (found,) = checks(Message(bytes(flipped[: len(payload)]), wrong, 0.0))
    assert found in {Check.CORRUPT, Check.INVALID}


@given(payloads, payloads)
def test_an_exchanged_payload_is_found(payload: bytes, other: bytes) -> None:
    message = sent(0, payload=payload)
    (found,) = checks(Message(other, message.value, 0.0))
    assert (found is Check.OK) == (payload == other)


@given(counters)
def test_a_masquerade_as_another_topic_is_found(counter: int) -> None:
    assert checks(sent(counter, topic=OTHER)) == [Check.CORRUPT]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "1",
        "2 5f1a7a3e 7 1 00000000",
        "1 5F1A7A3E 7 1 00000000",
        "1 5f1a7a3e -7 1 00000000",
    ],
)
def test_an_insertion_without_an_envelope_is_invalid(value: str | None) -> None:
    assert checks(sent(0), Message(b"p", value, 0.1), sent(1)) == [
        Check.OK,
        Check.INVALID,
        Check.OK,
    ]


@given(st.integers(1, 5))
def test_repetition_is_found_and_the_sequence_goes_on(times: int) -> None:
    found = checks(sent(0), *[sent(0)] * times, sent(1))
    assert found == [Check.OK, *[Check.REPEATED] * times, Check.OK]


@given(counters, st.integers(1, 20), st.integers(0, 10))
def test_loss_is_found_and_too_much_of_it_is_no_good(first: int, lost: int, max_lost: int) -> None:
    after = first + lost + 1
    messages = [sent(first + k, first=first) for k in (0, lost + 1, lost + 2)]
    verdict = Check.OK_SOME_LOST if lost <= max_lost else Check.WRONG_SEQUENCE
    assert checks(*messages, max_lost=max_lost) == [Check.OK, verdict, Check.OK], after


@given(st.permutations(range(6)))
def test_a_message_that_was_overtaken_is_no_good(order: list[int]) -> None:
    found = checks(*(sent(k) for k in order), max_delay_s=10.0)
    newest = -1
    for k, verdict in zip(order, found, strict=True):
        assert verdict.usable == (k > newest)
        assert verdict.usable or verdict is Check.WRONG_SEQUENCE
        newest = max(newest, k)


@given(st.integers(2, 30), st.floats(0.001, 0.9), st.floats(1.1, 60.0))
def test_delay_is_found_without_a_common_clock(count: int, little_s: float, much_s: float) -> None:
    checker = Checker(TOPIC, max_delay_s=1.0)
    for k in range(count):
        good = sent(k)
        jitter_s = little_s * (k % 3) / 2
        assert checker.check(good.payload, good.value, good.sent_s + jitter_s) is Check.OK
    late = sent(count)
    assert checker.check(late.payload, late.value, late.sent_s + much_s) is Check.TIMEOUT


def test_clocks_that_drift_apart_make_nothing_late() -> None:
    checker = Checker(TOPIC, max_delay_s=0.1, max_lost=20)
    for k in range(0, 200_000, 20):
        message = sent(k)
        arrives_s = message.sent_s * (1 + 100e-6)
        assert checker.check(message.payload, message.value, arrives_s).usable


def test_silence_is_a_timeout_from_the_start() -> None:
    checker = Checker(TOPIC, timeout_s=0.5)
    assert checker.silence(0.0) is Check.TIMEOUT
    message = sent(0)
    checker.check(message.payload, message.value, 1.0)
    assert checker.silence(1.5) is Check.OK
    assert checker.silence(1.6) is Check.TIMEOUT
    # What is no good does not end the silence.
    checker.check(message.payload, message.value, 1.6)
    assert checker.silence(1.7) is Check.TIMEOUT


def test_a_daemon_that_starts_again_is_followed_and_its_old_messages_are_not() -> None:
    old = [sent(k, session="00000001") for k in range(3)]
    new = [sent(k, session="00000002") for k in range(2)]
    assert checks(old[0], new[0], old[1], new[1], old[2]) == [
        Check.OK,
        Check.OK_SOME_LOST,
        Check.WRONG_SEQUENCE,
        Check.OK,
        Check.WRONG_SEQUENCE,
    ]
