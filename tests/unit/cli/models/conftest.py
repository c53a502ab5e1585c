"""The models that the tests of transfers deliver, too."""

from tests.unit.repository.transfer.conftest import make_model

__all__ = ["make_model"]
