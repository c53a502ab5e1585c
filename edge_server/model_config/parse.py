"""config.pbtxt → `inference.ModelConfig` message, with errors a person can act on."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool, text_format
from tritonclient.grpc import model_config_pb2 as pb

from edge_server.errors import ModelConfigError

if TYPE_CHECKING:
    from pathlib import Path

# A configuration is a page of text; a text of this size already takes 0.14 s to parse.
MAX_CONFIG_BYTES = 256 * 1024

_UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "(\w+)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "([\w.]+)" has no value named (\w+)')


def read_model_config(path: Path) -> Any:
    """The message that `path` holds; an absent file is an empty configuration.

    Raises:
        ModelConfigError: unreadable, too large, or not a ModelConfig; names file, line and remedy.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return pb.ModelConfig()
    except OSError as error:
        raise ModelConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ModelConfigError(
            f"{path}: {len(raw)} bytes; a model configuration has at most {MAX_CONFIG_BYTES}"
        )
    try:
        return text_format.Parse(raw.decode("utf-8"), pb.ModelConfig())
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{path}: not UTF-8 text at byte {error.start}; config.pbtxt is protobuf text format"
        ) from error
    except RecursionError as error:
        raise ModelConfigError(f"{path}: nested too deeply to be a model configuration") from error
    except text_format.ParseError as error:
        text = re.sub(r"^\d+:\d+ : ", "", str(error))
        raise ModelConfigError(
            f"{path}:{error.GetLine()}:{error.GetColumn()}: {text}{_suggestion(text)}"
        ) from error


def _suggestion(text: str) -> str:
    """The nearest name to an unknown field or enum value, as a remedy."""
    pool = descriptor_pool.Default()
    if match := _UNKNOWN_FIELD.search(text):
        message = pool.FindMessageTypeByName(match[1])
        known, wrong = [str(field.name) for field in message.fields], match[2]
    elif match := _UNKNOWN_VALUE.search(text):
        enum = pool.FindEnumTypeByName(match[1])
        known, wrong = [str(value.name) for value in enum.values], match[2]
    else:
        return ""
    nearest = difflib.get_close_matches(wrong, known, n=1)
    return f' Did you mean "{nearest[0]}"?' if nearest else f" Known: {', '.join(known)}."
