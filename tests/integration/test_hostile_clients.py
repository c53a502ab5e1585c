"""Clients that want to end the daemon, or to take its memory: it answers them, and everybody else.

`EDGE_ATTACK_ROUNDS` says how often each attack is made, `EDGE_MALFORMED_REQUESTS` how many damaged
requests are sent. With either set the Unix socket shall also answer within a second throughout.
"""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from support.daemon_process import Process
from support.half_sender import HalfSender
from support.processes import resident_bytes
from support.waiting import wait_until
from tritonclient.grpc import service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.early

TIMEOUT_S = 60.0
ROUNDS = int(os.environ.get("EDGE_ATTACK_ROUNDS", "1"))
MALFORMED = int(os.environ.get("EDGE_MALFORMED_REQUESTS", "2000"))
# A quiet machine is what a person has who asks for more.
QUIET = bool({"EDGE_ATTACK_ROUNDS", "EDGE_MALFORMED_REQUESTS"} & {*os.environ})
SHALL_ANSWER_WITHIN_S = 1.0 if QUIET else TIMEOUT_S

MIB = 1024 * 1024
# Beside other work the allocator gives pages back late.
MOST_MORE_BYTES = (1024 if QUIET else 1280) * MIB
LARGE_BYTES = 62 * MIB
SERVICE = "/inference.GRPCInferenceService/"
TYPES = ("FP32", "UINT8", "BF16", "STRING")
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
LISTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,  # Triton's, for regions that cannot be opened
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # a message that got stuck
}


class Target:
    """A daemon with models of one tensor, watched: its memory, and how its socket answers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        for datatype in TYPES:
            (folder / "models" / datatype / "1").mkdir(parents=True)
            (folder / "models" / datatype / "config.pbtxt").write_text(
                f'backend: "identity" input {{ name: "x" data_type: TYPE_{datatype} dims: -1 }} '
                f'output {{ name: "y" data_type: TYPE_{datatype} dims: -1 }}'
            )
        address = folder / "grpc.sock"
        self.process = Process(
            folder,
            f"--model-repository={folder / 'models'}",
            "--model-control-mode=explicit",
            "--load-model=*",
            "--allow-client-shm=true",
            f"--grpc-socket={address}",
        )
        stack.callback(self.process.close)
        self.process.wait_for("READY=1")
        self.port = self.process.port
        self._stack = stack
        self._tcp = stack.enter_context(self.connect())
        self._socket = stack.enter_context(grpc.insecure_channel(f"unix:{address}", OPTIONS))
        self._done = threading.Event()
        self._round = stack
        for datatype in TYPES:
            self.infer(request(datatype, [1], b"\0\0\0\0" if datatype == "STRING" else None))
        self.rest_bytes = self.peak_bytes = self.resident_bytes()
        self.slowest_s = 0.0
        self._log_read = 0
        self.failed: list[grpc.RpcError] = []
        watches = [threading.Thread(target=watch) for watch in (self._sample, self._ask)]
        for watch in watches:
            watch.start()
            stack.callback(watch.join)
        stack.callback(self._done.set)

    def connect(self) -> grpc.Channel:
        """A connection of its own, which the caller closes."""
        return grpc.insecure_channel(f"127.0.0.1:{self.port}", OPTIONS)

    def channel(self) -> grpc.Channel:
        """A connection of its own, open until this round of the attack ends."""
        return self._round.enter_context(self.connect())

    @contextmanager
    def round(self) -> Iterator[None]:
        """Of the places for connections a round holds none when it ends."""
        with ExitStack() as self._round:
            yield

    def ask(self, method: str, data: bytes, channel: grpc.Channel | None = None) -> str:
        """What is answered; one of the listed codes, in words where it is an error."""
        try:
            (channel or self._tcp).unary_unary(SERVICE + method)(data, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            told = error
        else:
            return "OK"
        assert told.code() in LISTED, told
        return f"{told.code().name}: {told.details()}"

    def infer(self, data: bytes, channel: grpc.Channel | None = None) -> str:
        return self.ask("ModelInfer", data, channel)

    def at_once(self, calls: list[Callable[[], str]]) -> list[str]:
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda call: call(), calls))

    def resident_bytes(self) -> int:
        return resident_bytes(self.process.popen.pid)

    def __str__(self) -> str:
        more, now = (n - self.rest_bytes for n in (self.peak_bytes, self.resident_bytes()))
        return (
            f"at rest {self.rest_bytes / MIB:.0f} MiB, at most {more / MIB:.0f} more, now "
            f"{now / MIB:.0f} more; slowest answer on the socket {self.slowest_s:.3f} s"
        )

    def is_well(self) -> None:
        assert self.process.popen.poll() is None, self.process.log.read_text()
        # What fails is the fault of one attack.
        failed, self.failed = self.failed, []
        assert not failed
        assert self.slowest_s < SHALL_ANSWER_WITHIN_S
        assert self.peak_bytes - self.rest_bytes < MOST_MORE_BYTES
        log = self.process.log.read_text()
        new, self._log_read = log[self._log_read :], len(log)
        assert "Traceback" not in new

    def _sample(self) -> None:
        while not self._done.wait(0.02) and self.process.popen.poll() is None:
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes())

    def _ask(self) -> None:
        live = self._socket.unary_unary(SERVICE + "ServerLive")
        while not self._done.wait(0.05):
            asked_at = time.monotonic()
            try:
                live(b"", timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                self.failed.append(error)
            self.slowest_s = max(self.slowest_s, time.monotonic() - asked_at)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with ExitStack() as stack:
        made = Target(tmp_path_factory.mktemp("target"), stack)
        yield made
        print(f"\n{made}")


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def request(
    datatype: str,
    shape: list[int],
    raw: bytes | None = None,
    tensor: bytes = b"",
    more: bytes = b"",
) -> bytes:
    """A ModelInferRequest to the model of that type; `tensor` and `more` are fields beside."""
    name = "BYTES" if datatype == "STRING" else datatype
    head = pb.ModelInferRequest.InferInputTensor(name="x", datatype=name, shape=shape)
    if raw is None and not tensor:
        raw = bytes(4 if datatype == "FP32" else 2 if datatype == "BF16" else 1)
    return b"".join(
        (
            pb.ModelInferRequest(model_name=datatype).SerializeToString(),
            field(5, head.SerializeToString() + tensor),
            more,
            b"" if raw is None else field(7, raw),
        )
    )


def contents(number: int, payload: bytes) -> bytes:
    return field(5, field(number, payload))


def typed_contents(target: Target) -> None:
    told = target.infer(request("FP32", [LARGE_BYTES // 4], tensor=contents(6, bytes(LARGE_BYTES))))
    assert "send large tensors in raw_input_contents" in told


def typed_contents_that_are_read(target: Target) -> None:
    count = 900_000
    large = request("FP32", [count], tensor=contents(6, bytes(4 * count)))
    assert target.at_once([lambda: target.infer(large, target.channel())] * 8) == ["OK"] * 8


def texts_as_contents(target: Target) -> None:
    empty = field(8, b"")
    for bytes_ in (3 * MIB, LARGE_BYTES):
        many = bytes_ // len(empty)
        told = target.infer(request("STRING", [many], tensor=field(5, empty * many)))
        assert told.startswith("INVALID_ARGUMENT")


def texts_as_raw_bytes(target: Target) -> None:
    many = LARGE_BYTES // 4
    told = target.infer(request("STRING", [many], bytes(LARGE_BYTES)))
    assert "strings, at most 1048576 are read" in told
    assert target.infer(request("STRING", [2**20], bytes(4 * 2**20))) == "OK"


def parameters_by_the_million(target: Target) -> None:
    entry = b"".join(field(4, field(1, b"%06x" % n) + field(2, b"\x10\1")) for n in range(200_000))
    for many in (1, 10):
        told = target.infer(request("UINT8", [1], bytes(1), tensor=entry * many))
        assert told == "OK" or "beside its raw_input_contents" in told
    told = target.infer(request("UINT8", [1], bytes(1), more=entry[: 8 * MIB]))
    assert "more than 1000 fields" in told


def shapes_nobody_has(target: Target) -> None:
    for shape in ([1] * 3_000_000, [-(2**63)] * 40, [2**62] * 3, [2**40], []):
        assert target.infer(request("UINT8", shape, bytes(1))).startswith("INVALID_ARGUMENT")


def names_that_are_no_text(target: Target) -> None:
    for name in (b"\xff\xfe", b"n" * MIB, b"\0" * 1000, "ü".encode() * 10_000):
        for method in ("ModelInfer", "ModelReady", "ModelMetadata", "ModelStatistics"):
            assert target.ask(method, field(1, name)) != "OK" or method == "ModelReady"
        assert target.infer(request("UINT8", [1], bytes(1), more=field(5, field(1, name)))) != "OK"
        target.ask("SystemSharedMemoryRegister", field(1, name) + field(2, name))
        target.ask("RepositoryModelLoad", field(2, name))


def questions_of_megabytes(target: Target) -> None:
    setting = b"".join(field(1, field(1, b"%06x" % n) + field(2, b"")) for n in range(100_000))
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        if not method.server_streaming:
            assert target.ask(method.name, setting * 20).startswith("INVALID_ARGUMENT")


def files_by_the_hundred_thousand(target: Target) -> None:
    entry = b"".join(
        field(3, field(1, b"file:%06x" % n) + field(2, field(4, b"x"))) for n in range(200_000)
    )
    told = target.ask("RepositoryModelLoad", field(2, b"m") + entry)
    assert "of more than 1000 fields" in told
    deep = b"file:" + b"a/" * 2000 + b"f"
    config = field(3, field(1, b"config") + field(2, field(3, b'{"backend":"identity"}')))
    file = field(3, field(1, deep) + field(2, field(4, b"x")))
    assert target.ask("RepositoryModelLoad", field(2, b"m") + config + file) != "OK"


def brain_floats_of_nothing(target: Target) -> None:
    assert target.infer(request("BF16", [0], tensor=field(5, b""))) == "OK"
    assert target.infer(request("BF16", [2], tensor=field(5, b""))).startswith("INVALID_ARGUMENT")


def regions_by_the_thousand(target: Target) -> None:
    with shared(1) as key:
        told = [
            target.ask("SystemSharedMemoryRegister", region(f"r{n}", key, 1)) for n in range(1100)
        ]
    assert "256 shared memory regions are registered already" in told[-1]
    assert told.count("OK") == 256
    assert target.ask("SystemSharedMemoryUnregister", b"") == "OK"


def objects_that_shrink(target: Target) -> None:
    size = 4 * MIB
    with registered(target, size) as key:
        path = Path("/dev/shm") / key  # noqa: S108
        done = threading.Event()

        def shrink_and_grow() -> None:
            while not done.is_set():
                os.truncate(path, 0)
                os.truncate(path, size)

        shrinking = threading.Thread(target=shrink_and_grow)
        shrinking.start()
        told = [target.infer(in_region("UINT8", "r", size)) for _ in range(100)]
        done.set()
        shrinking.join()
    assert {each.partition(":")[0] for each in told} <= {"OK", "INVALID_ARGUMENT"}


def objects_larger_than_memory(target: Target) -> None:
    size = 2**36
    with registered(target, size):
        assert "grpc.max_message_bytes" in target.infer(in_region("UINT8", "r", size))
        large = in_region("UINT8", "r", LARGE_BYTES)
        told = target.at_once([lambda: target.infer(large, target.channel())] * 12)
    assert all(each == "OK" or "grpc.max_pending_bytes" in each for each in told), told


def responses_that_nobody_reads(target: Target) -> None:
    """Their requests have a few bytes: the tensors are in shared memory."""
    with registered(target, LARGE_BYTES), ExitStack() as stack:
        large = in_region("UINT8", "r", LARGE_BYTES)
        senders = [half_sender(target, stack, reads=False) for _ in range(24)]
        numbers = []
        for sender in senders:
            numbers.append(sender.call(SERVICE + "ModelInfer", len(large)))
            assert sender.send(numbers[-1], large)
            # One after another, as copies of the tensor are counted while their models run.
            time.sleep(0.1)
        for sender, number in zip(senders, numbers, strict=True):
            assert sender.wait_for_end(number)


def calls_that_are_half_sent(target: Target) -> None:
    """As many as all threads and more, on as many connections as it takes; others get through."""
    with ExitStack() as stack:
        senders = [half_sender(target, stack) for _ in range(8)]
        calls = [(s, s.call(SERVICE + "ModelInfer", MIB)) for s in senders for _ in range(12)]
        channel = stack.enter_context(target.connect())
        assert target.ask("ServerLive", b"", channel) == "OK"
        assert all(sender.wait_for_end(number) for sender, number in calls)


def bodies_that_are_half_sent(target: Target) -> None:
    with ExitStack() as stack:
        senders = [half_sender(target, stack) for _ in range(3)]

        def send(sender: HalfSender) -> str:
            number = sender.call(SERVICE + "ModelInfer", LARGE_BYTES + 1)
            sender.send_zeros(number, LARGE_BYTES)
            return str(sender.wait_for_end(number))

        assert target.at_once([lambda s=s: send(s) for s in senders * 16]) == ["True"] * 48


def large_requests(target: Target) -> None:
    large = request("UINT8", [LARGE_BYTES], bytes(LARGE_BYTES))
    told = target.at_once([lambda: target.infer(large, target.channel())] * 12)
    assert {each.partition(":")[0] for each in told} <= {"OK", "UNAVAILABLE", "CANCELLED"}


def streams_of_large_requests(target: Target) -> None:
    large = request("UINT8", [LARGE_BYTES // 2], bytes(LARGE_BYTES // 2))

    def stream() -> str:
        call = target.channel().stream_stream(SERVICE + "ModelStreamInfer")
        return str(len(list(call(iter([large] * 4), timeout=TIMEOUT_S))))

    assert target.at_once([stream] * 4) == ["4"] * 4


def streams_that_nobody_reads(target: Target) -> None:
    """They hold all bytes that requests may have, but not for ever."""
    large = request("UINT8", [LARGE_BYTES], bytes(LARGE_BYTES))
    with ExitStack() as stack:
        senders = [half_sender(target, stack, reads=False) for _ in range(4)]

        def send(sender: HalfSender) -> None:
            number = sender.call(SERVICE + "ModelStreamInfer", LARGE_BYTES)
            sender.send_zeros(number, LARGE_BYTES)
            assert sender.wait_for_end(number)

        with ThreadPoolExecutor(len(senders)) as pool:
            list(pool.map(send, senders))
        assert target.infer(large) == "OK"


def damaged_requests(target: Target) -> None:
    chance = random.Random(1)  # noqa: S311 - the same each time
    seeds = [
        request("FP32", [3], bytes(12), more=field(4, field(1, b"sequence_id") + b"\x12\2\x10\1")),
        request("STRING", [2], b"\1\0\0\0a" * 2),
        request("BF16", [3], bytes(6), more=field(6, field(1, b"y"))),
        in_region("UINT8", "r", 3),
        request("FP32", [3], tensor=contents(6, bytes(12))),
    ]
    infer = target.channel().unary_unary(SERVICE + "ModelInfer")
    room = threading.Semaphore(32)
    codes: set[object] = set()

    def note(call: grpc.Call) -> None:
        codes.add(call.code())
        room.release()

    for _ in range(MALFORMED):
        room.acquire()
        infer.future(damaged(chance.choice(seeds), chance)).add_done_callback(note)
    for _ in range(32):
        room.acquire()
    assert codes <= LISTED
    assert len(codes) >= 3


def damaged(data: bytes, chance: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(made) or 1)
        match chance.randrange(4):
            case 0:
                made[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del made[place : place + chance.randint(1, 8)]
            case 2:
                made[place:place] = chance.randbytes(chance.randint(1, 8))
            case _:
                made[place:place] = made[place : place + 16]
    return bytes(made)


def half_sender(target: Target, stack: ExitStack, *, reads: bool = True) -> HalfSender:
    sender = HalfSender(target.port, TIMEOUT_S, reads=reads)
    stack.callback(sender.close)
    return sender


class shared:  # noqa: N801 - reads as a function
    """An object in shared memory of so many bytes, of which nothing is there; its key."""

    def __init__(self, bytes_: int) -> None:
        self._bytes = bytes_
        self._key = f"edge-hostile-{os.getpid()}"
        self._path = Path("/dev/shm") / self._key  # noqa: S108

    def __enter__(self) -> str:
        with self._path.open("wb") as file:
            file.truncate(self._bytes)
        return self._key

    def __exit__(self, *_: object) -> None:
        self._path.unlink()


@contextmanager
def registered(target: Target, bytes_: int) -> Iterator[str]:
    """Such an object as the region `r`, whatever becomes of the attack; its key."""
    with shared(bytes_) as key:
        assert target.ask("SystemSharedMemoryRegister", region("r", key, bytes_)) == "OK"
        try:
            yield key
        finally:
            assert target.ask("SystemSharedMemoryUnregister", b"") == "OK"


def region(name: str, key: str, bytes_: int) -> bytes:
    asked = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=bytes_)
    return bytes(asked.SerializeToString())


def in_region(datatype: str, name: str, bytes_: int) -> bytes:
    asked = pb.ModelInferRequest(model_name=datatype)
    tensor = asked.inputs.add(name="x", datatype=datatype, shape=[bytes_])
    tensor.parameters["shared_memory_region"].string_param = name
    tensor.parameters["shared_memory_byte_size"].int64_param = bytes_
    return bytes(asked.SerializeToString())


def many_strings_at_once(target: Target) -> None:
    """Each has a few megabytes, and its objects ten times as many."""
    many = 2**20
    strings = request("STRING", [many], b"\2\0\0\0ab" * many)
    texts = request("STRING", [900_000], tensor=field(5, field(8, b"ab") * 900_000))
    for large in (strings, texts):
        told = target.at_once([lambda: target.infer(large, target.channel())] * 12)  # noqa: B023
        assert "OK" in told
        assert all(each == "OK" or "grpc.max_pending_bytes" in each for each in told)


def compressed_requests(target: Target) -> None:
    large = request("UINT8", [LARGE_BYTES], bytes(LARGE_BYTES))

    def unary(how: grpc.Compression) -> str:
        infer = target.channel().unary_unary(SERVICE + "ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            infer(large, timeout=TIMEOUT_S, compression=how)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        return str(caught.value.details())

    told = target.at_once(
        [lambda how=how: unary(how) for how in (grpc.Compression.Gzip, grpc.Compression.Deflate)]
        * 4
    )
    assert all("or set grpc.max_decompressed_bytes" in each for each in told)
    call = target.channel().stream_stream(SERVICE + "ModelStreamInfer")
    (response,) = call(iter([large]), timeout=TIMEOUT_S, compression=grpc.Compression.Gzip)
    message = pb.ModelStreamInferResponse.FromString(response).error_message
    assert "send it without compression" in message


def small_responses_that_nobody_reads(target: Target) -> None:
    small = request("UINT8", [60_000], bytes(60_000))
    with ExitStack() as stack:
        senders = [half_sender(target, stack, reads=False) for _ in range(20)]
        calls = []
        for sender in senders:
            for _ in range(20):
                number = sender.call(SERVICE + "ModelInfer", len(small))
                for place in range(0, len(small), 16384):
                    assert sender.send(number, small[place : place + 16384])
                calls.append((sender, number))
        assert all(sender.wait_for_end(number) for sender, number in calls)


ATTACKS = (
    many_strings_at_once,
    compressed_requests,
    small_responses_that_nobody_reads,
    typed_contents,
    typed_contents_that_are_read,
    texts_as_contents,
    texts_as_raw_bytes,
    parameters_by_the_million,
    shapes_nobody_has,
    names_that_are_no_text,
    questions_of_megabytes,
    files_by_the_hundred_thousand,
    brain_floats_of_nothing,
    regions_by_the_thousand,
    objects_that_shrink,
    objects_larger_than_memory,
    responses_that_nobody_reads,
    calls_that_are_half_sent,
    bodies_that_are_half_sent,
    streams_of_large_requests,
    streams_that_nobody_reads,
    damaged_requests,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_the_daemon_goes_on_and_its_socket_answers(
    target: Target, attack: Callable[[Target], None]
) -> None:
    for _ in range(1 if attack is damaged_requests else ROUNDS):
        with target.round():
            attack(target)
        print(f"\n{attack.__name__}: {target}")
        target.is_well()


def test_the_daemon_goes_on_and_gives_memory_back_after_large_requests(target: Target) -> None:
    for _ in range(ROUNDS):
        with target.round():
            large_requests(target)
        print(f"\nlarge requests: {target}")
        target.is_well()
    wait_until(
        lambda: target.resident_bytes() - target.rest_bytes <= 200 * MIB,
        TIMEOUT_S,
        otherwise=target.resident_bytes,
        every_s=0.1,
    )
    values = np.zeros(4, np.float32)
    assert target.infer(request("FP32", [4], values.tobytes())) == "OK"
