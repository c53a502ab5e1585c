"""`edge-server cameras …`: the arguments of each verb. Each verb imports its code when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from edge_server.cli.verbs import OK, Verbs, number

_ABOUT = """\
The cameras of this machine: which are there, and what one gives. Neither needs the daemon; a camera
that the daemon reads may be held by it.
"""
_CODES = """\
exit codes: 0 done, 2 usage, 69 the camera gives no images now, or the picture cannot be written,
78 the URI or the credentials are wrong and stay so, 130 interrupted
"""
READERS = ("auto", "gstreamer", "opencv")


def add_camera_verbs(parser: argparse.ArgumentParser) -> None:
    """Add the verbs below `cameras`."""
    verbs = Verbs(parser, about=_ABOUT, codes=_CODES)

    listing = verbs.add("list", "the cameras that are plugged in, and what can read them", _list)
    listing.add_argument("--json", action="store_true", help="one object, with every mode")

    probe = verbs.add("probe", "what a camera gives: open it, read it for some seconds", _probe)
    kinds = "/dev/video0, rtsp://HOST/PATH, http://HOST/PATH, csi://0, gst:PIPELINE or a file"
    probe.add_argument("uri", metavar="URI", help=kinds)
    probe.add_argument(
        "--seconds",
        type=number(float, lambda value: 0 < value <= 3600, "a number of seconds, up to 3600"),
        default=5.0,
        metavar="N",
        help="default: 5",
    )
    probe.add_argument(
        "--picture", type=_picture, metavar="FILE", help="write the last image: .png or .jpg"
    )
    probe.add_argument(
        "--reader", choices=READERS, default="auto", help="default: GStreamer if any"
    )
    login = "user name and password, kept out of the list of processes"
    probe.add_argument("--credentials", type=Path, metavar="FILE", help=login)
    probe.add_argument("--json", action="store_true", help="one object instead of lines")


def _picture(text: str) -> Path:
    if Path(text).suffix.lower() not in {".png", ".jpg", ".jpeg"}:
        raise argparse.ArgumentTypeError(f"{text}: give a name that ends in .png or .jpg")
    return Path(text)


def _list(arguments: argparse.Namespace) -> int:
    # Here and below: --help imports no OpenCV.
    from edge_server.cli.camera_probing import list_cameras

    for line in list_cameras(Path("/dev"), as_json=arguments.json):
        print(line)
    return OK


def _probe(arguments: argparse.Namespace) -> int:
    from edge_server.cli.camera_probing import probe

    probe(
        arguments.uri,
        seconds=arguments.seconds,
        picture=arguments.picture,
        reader=arguments.reader,
        credentials_file=arguments.credentials,
        as_json=arguments.json,
    )
    return OK
