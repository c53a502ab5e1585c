"""Models to deliver."""

from support.deliveries import make_model  # noqa: F401 - a fixture
