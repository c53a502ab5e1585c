"""The models that the tests of transfers deliver, too."""

from support.deliveries import make_model

__all__ = ["make_model"]
