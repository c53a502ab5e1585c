"""Who cannot listen is told why, and what to do."""

from __future__ import annotations

from edge_server.board.listening import listener, remedy


def why(host: str, port: int) -> str:
    try:
        listener(host, port).close()
    except OSError as error:
        return remedy(error, "--grpc")
    return ""


def test_a_taken_port_can_be_freed_or_another_chosen() -> None:
    with listener("127.0.0.1", 0) as taken:
        text = why("127.0.0.1", taken.getsockname()[1])
    assert text.startswith("Address already in use; another process may hold the port")
    assert text.endswith("choose another with --grpc-port")


def test_an_address_of_another_machine_is_not_blamed_on_the_port() -> None:
    # 192.0.2.0/24 is for documentation (RFC 5737).
    text = why("192.0.2.1", 0)
    assert text.endswith("give an address of this machine with --grpc-address")
    assert "port" not in text
