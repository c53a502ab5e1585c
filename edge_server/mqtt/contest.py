"""Contest: finds out that another client publishes as this device, and spaces out the fight.

Two with one MQTT client id end each other's connection; a broker may say so (MQTT 5's reason code
0x8E), but mosquitto 2.0.11 only closes it. So each also looks for births (`meta`) of others.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from edge_server.mqtt import payloads
from edge_server.process.backoff import Backoff

if TYPE_CHECKING:
    from edge_server.board.identity import Identity

log = logging.getLogger(__name__)

# Longer and longer pauses leave the broker, and whoever reads, in peace.
_PAUSE_S: Final = (5.0, 300.0)
# A connection that lasts for longer than any pause shows that the other client is gone.
_OVER_S: Final = 2 * _PAUSE_S[1]
_OWN_ID: Final = "give every device an id of its own: device.id (--device-id)"


class Contest:
    """What is known of others that publish as this device; for one thread.

    Args:
        identity: of this device.
        session: of this process, as in its births.

    Attributes:
        text: which other client there is, and the remedy; empty while none is known.
        taken_over: number of connections that another client with this client id has ended.
    """

    def __init__(self, identity: Identity, session: str) -> None:
        self.text = ""
        self.taken_over = 0
        self._identity = identity
        self._session = session
        self._earlier: set[str] = set()  # runs that had retained their birth before ours
        self._hints = 0
        self._has_our_id = False
        self._is_here = False  # it was seen with our client id during this connection
        self._backoff = Backoff(*_PAUSE_S)

    def see(self, payload: bytes, *, retained: bool, first: bool) -> bool:
        """Look at a birth on this device's topic; return whether the other client is news.

        Args:
            retained: the broker had it already when this device subscribed.
            first: the broker had no birth of this process then, so that a retained one is likely
                that of the run before.
        """
        birth = payloads.birth_of(payload)
        if birth.session in ("", self._session):
            return False
        if retained and first:
            self._earlier.add(birth.session)
        if retained and birth.session in self._earlier:
            return False
        return self._found(has_our_id=birth.client_id == self._identity.client_id)

    def lose(self, *, taken_over: bool) -> float | None:
        """Return how long to wait after an open connection has ended; None as after any other end:
        while nothing shows the other client, it is the network that breaks.

        Args:
            taken_over: the broker said that another client came. Once, that may have been this
                device itself, whose earlier connection the broker still had.
        """
        self._hints += taken_over
        if self._hints > 1:
            self._found(has_our_id=True)
        was_here, self._is_here = self._is_here, False
        if not (taken_over or was_here):
            return None
        self.taken_over += 1
        return self._backoff.next_s() if self._has_our_id else None

    def log_in_anew(self) -> None:
        """Note that this device has logged in while it was connected: it has ended its own
        connection where the broker is the same."""
        self._hints = 0

    def last(self, seconds: float) -> None:
        """Note that a connection has lasted for so long."""
        if seconds > _OVER_S and (self._hints or self._has_our_id):
            self._hints = 0
            self._backoff.reset()
            if self._has_our_id:
                self._has_our_id = self._is_here = False
                self.text = ""
                log.info("mqtt: no other client has this device's client id now")

    def _found(self, *, has_our_id: bool) -> bool:
        self._is_here = has_our_id
        if self.text and has_our_id == self._has_our_id:
            return False
        self._has_our_id = has_our_id
        if has_our_id:
            self.text = (
                "another client logs in with this device's client id, "
                f"'{self._identity.client_id}', and each ends the other's connection; {_OWN_ID}"
            )
        else:
            self.text = (
                f"another machine publishes as '{self._identity.device}' too, and who reads gets "
                f"the lanes of both; {_OWN_ID}"
            )
        log.error("mqtt: %s", self.text)
        return True
