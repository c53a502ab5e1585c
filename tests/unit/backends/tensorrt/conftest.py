"""What all tests of plan builds need."""

from support.build_lock import own_build_lock  # noqa: F401 - a fixture
