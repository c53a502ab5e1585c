"""Errors of files name the path; whether they may pass decides on another attempt."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edge_server.errors import ModelConfigError, ModelLoadError
from edge_server.model_config.files import reading

PATH = Path("/models/m/config.pbtxt")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM])
def test_what_the_disk_or_the_kernel_refuses_may_pass(number: int) -> None:
    with pytest.raises(ModelLoadError, match=rf"{PATH}: cannot be read: {os.strerror(number)}"):
        fail_with(number)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ELOOP, errno.ENOTDIR])
def test_what_is_wrong_with_the_file_stays(number: int) -> None:
    with pytest.raises(ModelConfigError, match="the user that the daemon runs as") as caught:
        fail_with(number)
    assert type(caught.value) is ModelConfigError


def fail_with(number: int) -> None:
    with reading(PATH):
        raise OSError(number, os.strerror(number))
