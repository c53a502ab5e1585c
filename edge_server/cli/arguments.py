"""How the values of arguments are read; an error says what is taken.

Nothing heavy is imported here: every start of the command line imports this module.
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

N = TypeVar("N", int, float)


def number(
    kind: Callable[[str], N], is_right: Callable[[N], bool], words: str
) -> Callable[[str], N]:
    """Return a parser of a flag's number, which names in `words` what it takes."""

    def parse(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            pass
        else:
            if is_right(value):
                return value
        raise argparse.ArgumentTypeError(f"{text}: give {words}")

    return parse


def _digits(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


positive = number(_digits, lambda value: value >= 1, "a whole number, 1 or above")
whole_number = number(_digits, lambda _: True, "a whole number, 0 or above")
seconds = number(float, lambda value: 0 <= value < 1e6, "seconds, 0 or above")


def version(text: str) -> int:
    if not text.isdecimal() or text.startswith("0"):
        raise argparse.ArgumentTypeError(f"{text}: a version is a whole number from 1")
    return int(text)


def _sha256(text: str) -> str:
    digest = text.removeprefix("sha256:").lower()
    if len(digest) != 64:
        raise argparse.ArgumentTypeError(f"{text}: a sha256 has 64 hexadecimal digits")
    return _digest(digest)


def _digest(text: str) -> str:
    if not text or len(text) > 64 or not set(text) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text}: a digest is hexadecimal, as `list` shows it")
    return text


_DATATYPES = ("FP16", "FP32", "FP64", "BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64")
_FORMATS = (
    *("onnx", "keras", "savedmodel", "graphdef", "paddle"),
    *("torchscript", "torch-export", "torch-module", "torch-weights"),
)
_INPUT = re.compile(r"(?:(?P<name>[^:]+):)?(?P<shape>-?\d+(?:x-?\d+)*|)(?::(?P<type>\w+))?")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text}: give names with commas between")
    return names


def _tensor(text: str) -> tuple[str, str, list[int]]:
    match = _INPUT.fullmatch(text)
    datatype = ((match and match["type"]) or "FP32").upper()
    if match is None or datatype not in _DATATYPES:
        raise argparse.ArgumentTypeError(
            f"{text}: give it as NAME:SHAPE or NAME:SHAPE:TYPE, like images:-1x3x360x640:FP32; "
            f"types are {', '.join(_DATATYPES)}"
        )
    sizes = [int(size) for size in match["shape"].split("x")] if match["shape"] else []
    if any(size == 0 or size < -1 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text}: a size is 1 or more, or -1 for any")
    return match["name"] or "", datatype, sizes


def file_with(*suffixes: str) -> Callable[[str], Path]:
    """Return a parser of a file's name that ends with one of `suffixes`."""

    def parse(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower().replace(".jpeg", ".jpg") not in suffixes:
            ends = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
            raise argparse.ArgumentTypeError(f"{text}: give a name that ends in {ends}")
        return path

    return parse


def _named_file(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text}: give it as NAME=FILE.npy")
    return name, Path(path)


def numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of `1,2,4` and `1:4` (from, to), of numbers from `least` on."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            if ":" in text:
                first, last = map(int, text.split(":"))
                found = tuple(range(first, last + 1))
            else:
                found = tuple(map(int, text.split(",")))
        except ValueError:
            found = ()
        if not found or min(found) < least or len(found) > 64:
            raise argparse.ArgumentTypeError(
                f"{text}: give whole numbers, {least} or above, like 1,2,4 or 1:4"
            )
        return tuple(dict.fromkeys(found))

    return parse


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.rpartition(":")
    try:
        shape = tuple(map(int, sizes.split(",")))
    except ValueError:
        shape = (-1,)
    if not name or min(shape) < 0:
        raise argparse.ArgumentTypeError(f"{text}: give it as NAME:720,1280,3")
    return name, shape


def _in_range(kind: type[N], low: float, what: str) -> Callable[[str], N]:
    return number(kind, lambda value: low <= value < 1e6, what)


def _angle(text: str) -> float:
    value = _in_range(float, 10, "an angle")(text)
    if value > 120:
        raise argparse.ArgumentTypeError(f"{text}: a wider lens needs calibrate intrinsics")
    return value


def _size(text: str) -> tuple[int, int]:
    width, times, height = text.partition("x")
    if not times:
        raise argparse.ArgumentTypeError(f"{text}: write it as 1280x720")
    return _in_range(int, 16, "a width")(width), _in_range(int, 16, "a height")(height)


def _floats(form: str, text: str) -> tuple[float, ...]:
    """Parse numbers between the signs that `form` has, up to its first space."""
    signs = [sign for sign in form.partition(" ")[0].rstrip(",") if sign in ",="]
    try:
        found = tuple(map(float, re.split("[,=]", text)))
    except ValueError:
        found = ()
    if len(found) != len(signs) + 1 or [sign for sign in text if sign in ",="] != signs:
        raise argparse.ArgumentTypeError(f"{text}: write it as {form}")
    return found


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, text.split(","))))


SHELLS = ("bash", "zsh", "fish")
# Words for a value that is a path.
PATHS = ("DIR", "FILE", "FOLDER", "PATH", "PICTURE", "PICTURES", "PNG", "KEY", "PUB", "SRC", "DST")
# How a value is read, or its choices, by the word for it or by its flag; others are texts.
FORMS: Mapping[str, Callable[[str], Any] | tuple[str, ...]] = {
    **dict.fromkeys(PATHS, lambda text: Path(text).expanduser()),
    "ACTION": ("get-current", "get-primary", "set-primary", "get-state", "set-state"),
    "SLOT": ("A", "B"),
    "STATE": ("good", "bad"),
    "OUTCOME": ("pending", "committed", "rolled_back", "failed"),
    "SHELL": SHELLS,
    "FORMAT": _FORMATS,
    "IMAGE": file_with(".png", ".jpg"),
    "RESULT": file_with(".png", ".jpg", ".npz"),
    "N": positive,
    "PORT": positive,
    "COUNT": whole_number,
    "CORE": whole_number,
    "N,…": numbers(1),
    "US,…": numbers(0),
    "S": seconds,
    "--seconds": number(float, lambda value: 0 < value <= 3600, "seconds, above 0, up to 3600"),
    "--interval": number(float, lambda value: 0.1 <= value < 1e6, "seconds, 0.1 or above"),
    "VERSION": version,
    "D": _digest,
    "--sha256": _sha256,
    "--limit": number(float, lambda value: 0 <= value <= 1, "a share, 0 to 1"),
    "--tolerance": float,
    "NAMES": _names,
    "NAME,…": _words,
    "NAME:SHAPE[:TYPE]": _tensor,
    "NAME:SIZES": _shape,
    "NAME=FILE.npy": _named_file,
    "METRES": float,
    "--lane-width": _in_range(float, 0.1, "metres"),
    "DEG": float,
    "--fov": _angle,
    "WxH": _size,
    "U,V=X,Y": partial(_floats, "U,V=X,Y, like 512,630=6.0,1.5"),
    "X,Y": partial(_floats, "X,Y in metres, like 6.0,0.9"),
}
