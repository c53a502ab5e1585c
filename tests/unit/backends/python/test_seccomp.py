"""What the filter of system calls decides, on each architecture, run as the kernel runs it."""

from __future__ import annotations

import errno
import struct

import pytest

from edge_server.backends.python.sandbox import (
    ARCHITECTURES,
    CLONE,
    OF_A_PROCESS,
    REFUSED,
    REFUSED_VALUES,
    SOCKET,
    UNKNOWN,
    USER_NOTIF,
    WITHOUT_EFFECT,
    filter_program,
)

OWN = 4711
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
READ = (0, 63)


@pytest.fixture(params=ARCHITECTURES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def decided(
    machine: str, numbers: tuple[int, int], *arguments: int, unix_sockets: bool = True
) -> int:
    architecture = ARCHITECTURES[machine]
    wide = [argument % (1 << 64) for argument in (*arguments, *[0] * 6)][:6]
    number = numbers[architecture.column]
    return run(machine, struct.pack("<IIQ6Q", number, architecture.audit, 0, *wide), unix_sockets)


def run(machine: str, data: bytes, unix_sockets: bool) -> int:
    """The few instructions of classic BPF that the filter uses."""
    program = filter_program(machine, OWN, unix_sockets=unix_sockets)
    value = at = 0
    while True:
        code, jump_true, jump_false, k = program[at]
        at += 1
        if code == 0x06:
            return k
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, k)
        elif code == 0x54:
            value &= k
        else:
            true = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += jump_true if true else jump_false


def test_what_computes_is_allowed(machine: str) -> None:
    assert decided(machine, READ) == ALLOW
    assert decided(machine, CLONE, 0x3D0F00) == ALLOW
    assert decided(machine, REFUSED_VALUES["ioctl"][0], 3, 0xC0384627) == ALLOW
    assert decided(machine, REFUSED_VALUES["fcntl"][0], 3, 2) == ALLOW
    assert decided(machine, SOCKET, 2, 1, unix_sockets=False) == ALLOW
    assert decided(machine, SOCKET, 1, 1) == ALLOW


def test_what_reaches_into_others_is_refused(machine: str) -> None:
    column = ARCHITECTURES[machine].column
    for numbers in REFUSED.values():
        if numbers[column] >= 0:
            assert decided(machine, numbers) == ERRNO | errno.EPERM
    for numbers, argument, values in REFUSED_VALUES.values():
        for value in values:
            wrong = [*[0] * argument, value]
            assert decided(machine, numbers, *wrong) == ERRNO | errno.EPERM
    for flag in (0x10000000, 0x8000):
        assert decided(machine, CLONE, 0x11 | flag) == ERRNO | errno.EPERM
    assert decided(machine, UNKNOWN["clone3"]) == ERRNO | errno.ENOSYS
    for numbers in WITHOUT_EFFECT.values():
        if numbers[column] >= 0:
            assert decided(machine, numbers) == ERRNO
    assert decided(machine, SOCKET, 1, 1 | 0o2000000, unix_sockets=False) == ERRNO | errno.EACCES


def test_calls_that_name_another_process_are_handed_over(machine: str) -> None:
    for numbers, argument in OF_A_PROCESS.values():
        before = [0] * argument
        for mine in (0, OWN):
            assert decided(machine, numbers, *before, mine) == ALLOW
        for other in (1, OWN + 1, -1):
            assert decided(machine, numbers, *before, other) == USER_NOTIF
    kill, _ = OF_A_PROCESS["kill"]
    assert decided(machine, kill, -OWN) == ALLOW
    assert decided(machine, OF_A_PROCESS["setpriority"][0], 2, 0) == ERRNO | errno.EPERM


def test_programs_of_other_architectures_may_call_nothing(machine: str) -> None:
    data = struct.pack("<IIQ6Q", 0, 0x40000003, 0, *[0] * 6)
    assert run(machine, data, unix_sockets=True) == ERRNO | errno.EPERM
