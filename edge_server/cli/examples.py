"""Examples for the help of every verb that has none of its own; each parses as it stands."""

from __future__ import annotations

import argparse
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Verb → the arguments after it.
_EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "models push": (
            "new/laneDetect_model --to /srv/models --sign release.key",
            "new/laneDetect_model --to root@truck-7:/srv/models --wait",
        ),
        "models accept": ("--to /srv/models < laneDetect_model.tar",),
        "models pull": (
            "laneDetect_model --from truck-7:/srv/models --to .",
            "https://models.example/laneDetect_model.tar --to /srv/models",
        ),
        "models list": ("/srv/models", "truck-7:/srv/models --json"),
        "models verify": ("/srv/models/laneDetect_model --key release.key.pub",),
        "models rollback": ("laneDetect_model --to /srv/models", "laneDetect_model --to m --wait"),
        "models release": ("laneDetect_model",),
        "models sign": ("new/laneDetect_model --key release.key",),
        "models keygen": ("--out release.key",),
        "plan build": (
            "laneDetect_model --model-repository models --fp16",
            "network.onnx --min x:1x3x360x640 --opt x:4x3x360x640 --max x:8x3x360x640",
        ),
        "plan inspect": ("laneDetect_model", "laneDetect_model --layers"),
        "plan verify": ("laneDetect_model --samples 16",),
        "plan refresh": ("--config /etc/edge_server/config.toml",),
        "convert": (
            "yolo.onnx models/yolo --labels names.txt",
            "net.pt models/net --input images:-1x3x360x640",
        ),
        "cameras list": ("", "--json"),
        "cameras probe": (
            "/dev/video0 --picture seen.png",
            "rtsp://10.0.0.20/main --credentials camera.login --seconds 30",
        ),
        "recordings list": ("", "/var/lib/edge_server/recordings"),
        "recordings info": ("drive.mcap",),
        "recordings export": ("drive.mcap pictures --camera front",),
        "power apply": ("--config /etc/edge_server/config.toml",),
        "calibrate lens": ("front.toml --fov 70 --size 1920x1080",),
        "calibrate intrinsics": (
            "board/1.png board/2.png --board chessboard:9x6:0.025 --output front.toml",
            "--camera /dev/video0 --board charuco:11x8:0.03:0.022:DICT_5X5_100 --output front.toml",
        ),
        "calibrate mounting": (
            "front.toml --height 1.4 --pitch 3",
            "front.toml --picture marks.png --mark 512,630=6.0,1.5 --mark 790,628=6.0,-1.5 "
            "--mark 560,520=12.0,1.5 --mark 735,519=12.0,-1.5",
        ),
        "calibrate estimate": ("front.toml drive.mp4 --height 1.4 --write",),
        "calibrate show": ("front.toml drive.mp4 --lanes --output check.png",),
        "doctor": ("", "--config /etc/edge_server/config.toml --json", "--matrix"),
        "support-bundle": ("-o bundle.tar.gz", "--anonymous"),
        "health": (
            "",
            "--wait 120 --require model:lane_detection --require camera:front --require mqtt",
        ),
        "update status": ("", "--json"),
        "update commit": ("--require lanes:front --wait 300 --stable 60",),
        "update slot": ("get-current", "set-primary B", "set-state A good"),
        "update record": ("committed --engine mender --result 'release 2.1 is kept'",),
        "provision": ("/media/stick/edge_server.toml",),
        "demo": (
            "--frames 100",
            "--source road.mp4 --json",
            "--source rtsp://10.0.0.20/main --mqtt 10.0.0.2:1883",
        ),
    }
)


def add_examples(parser: argparse.ArgumentParser) -> None:
    """Put the examples into the help of each verb of the whole command line `parser`, whose lines
    stay as they are; the help of a verb with verbs below it has the first example of each."""
    for name, verb in verbs_of(parser):
        if verb.formatter_class is argparse.HelpFormatter:
            verb.formatter_class = argparse.RawDescriptionHelpFormatter
        below = [key for key in _EXAMPLES if key.startswith(f"{name} ")]
        own = [(name, each) for each in _EXAMPLES.get(name, ())]
        shown = own or [(key, _EXAMPLES[key][0]) for key in below]
        if shown:
            lines = (f"  {parser.prog} {key} {each}".rstrip() for key, each in shown)
            verb.epilog = "\n".join(["examples:", *lines, "", verb.epilog or ""]).rstrip()


def verbs_of(
    parser: argparse.ArgumentParser, above: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each verb, and each verb below one, by its words after the program's name."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other list of them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - likewise
            for word, verb in action.choices.items():
                name = f"{above} {word}".strip()
                yield name, verb
                yield from verbs_of(verb, name)
