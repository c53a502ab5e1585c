"""A repository under model control."""

from tests.unit.lifecycle.control.world import world  # noqa: F401 - a fixture
