"""A repository under model control."""

from unit.lifecycle.control.world import world  # noqa: F401 - a fixture
