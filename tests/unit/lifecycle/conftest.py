"""A backend of the tests' own."""

from support.counted_backend import counted, gate  # noqa: F401 - fixtures
