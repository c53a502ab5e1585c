"""The verbs of the command line, each with its arguments as its help has them; see `Verb`.

`run` and `check` have the flags of all settings, which are in `flags`.
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from typing import TYPE_CHECKING

from edge_server.cli.model_commands import ADDRESS, CONFIG, MODEL_COMMANDS, file_with
from edge_server.cli.running_daemon import INSTALLED
from edge_server.cli.verbs import Verb, interval, number, positive, whole_number
from edge_server.process.disk import INSTALLED_STATE

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_server.cli.verbs import N

SHELLS = ("bash", "zsh", "fish")
_JSON = "--json  one object"

_CAMERAS = (
    Verb(
        "cameras",
        "which cameras are there, what one gives",
        about="""\
The cameras of this machine: which are there, and what one gives. Neither needs the daemon; a camera
that the daemon reads may be held by it.
""",
        codes="""\
exit codes: 0 done, 2 usage, 69 the camera gives no images now, or the picture cannot be written,
78 the URI or the credentials are wrong and stay so, 130 interrupted
""",
    ),
    Verb(
        "cameras list",
        "the cameras that are plugged in, and what can read them",
        "cli.cameras:plugged_in",
        "--json  one object, with every mode",
        examples="""

        --json
        """,
    ),
    Verb(
        "cameras probe",
        "what a camera gives: open it, read it for some seconds",
        "cli.cameras:probe",
        """
        URI  /dev/video0, rtsp://HOST/PATH, http://HOST/PATH, csi://0, gst:PIPELINE or a file
        --seconds S = 5
        --picture FILE  write the last image: .png or .jpg
        --reader {auto,gstreamer,opencv} = auto  GStreamer, if any
        --credentials FILE  user name and password, kept out of the list of processes
        --json  one object instead of lines
        """,
        types={
            "S": number(float, lambda value: 0 < value <= 3600, "a number of seconds, up to 3600"),
            "--picture": file_with(".png", ".jpg"),
        },
        examples="""
        /dev/video0 --picture seen.png
        rtsp://10.0.0.20/main --credentials camera.login --seconds 30
        """,
    ),
    Verb(
        "recordings",
        "what the recorder has written, and pictures of it",
        about="""\
The recordings of the recorder, MCAP files that Foxglove opens. A camera of mcap:///FILE plays one.
None of these verbs needs the daemon, or changes a recording.
""",
        codes="""\
exit codes: 0 done, 2 usage, 69 a file cannot be read or written, 78 a library is missing,
130 interrupted
""",
    ),
    Verb(
        "recordings list",
        "the recordings of a directory, the oldest first",
        "cli.recordings:show",
        "[DIR]  default: recordings in the state directory, as the daemon's",
        examples="""

        /var/lib/edge_server/recordings
        """,
    ),
    Verb(
        "recordings info",
        "what a recording has, and whether it is whole",
        "cli.recordings:info",
        "FILE",
        examples="drive.mcap",
    ),
    Verb(
        "recordings export",
        "the pictures of one camera, a JPEG each",
        "cli.recordings:export",
        """
        FILE
        FOLDER  is made where it is missing
        --camera NAME  needed where there are several
        """,
        examples="drive.mcap pictures --camera front",
    ),
    Verb(
        "power",
        "a Jetson's power mode and clocks",
        about="""\
The power mode (nvpmodel) and the clocks (jetson_clocks) of a Jetson, as [power] of the settings
wants them. Needs root's rights; edge-server-power.service runs it at boot.
""",
        codes="""\
exit codes: 0 set, or nothing to set, 2 usage, 69 nvpmodel or jetson_clocks is missing or fails, or
the mode needs a reboot, 78 the settings are wrong or the board has no such mode
""",
    ),
    Verb(
        "power apply",
        "set the power mode and the clocks of the settings",
        "cli.power:apply",
        "--config FILE  the daemon's settings",
        examples="--config /etc/edge_server/config.toml",
    ),
)


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


_MOUNTING = """\
--roll DEG  positive: right side lower; default: 0
--x METRES  lens forward of the front axle; default: 0
--y METRES  lens left of the middle; default: 0
"""
_LANE_MODEL = """\
--model-repository DIR...  where the lane model is; default: the shipped models
--model NAME = lane_detection
"""
_OF_A_MOUNTING = {"METRES": float, "DEG": float, "DIR": str}

_CALIBRATE = (
    Verb(
        "calibrate",
        "put a camera's lanes on the road, in metres",
        about="""\
Makes the file that puts a camera's lanes on the road: first its lens (intrinsics, or roughly:
lens), then where the camera sits in the vehicle (mounting, or estimate while driving), then a look
at the result (show). cameras.NAME.calibration in the settings names the file.
""",
        codes="""\
exit codes: 0 done, 2 usage, 69 a camera or a picture gives nothing, or a file cannot be written,
78 the pictures, numbers or the file do not make a calibration; the text says why, 130 interrupted
""",
        interrupted="\nedge-server: interrupted; no file was changed",
    ),
    Verb(
        "calibrate lens",
        "the lens, roughly, from its field of view",
        "tools.calibrate:lens",
        """
        FILE  the calibration to write
        --fov DEG!  from the left edge to the right
        --size WxH = 1280x720  in px
        """,
        types={"DEG": _angle, "WxH": _size},
        examples="front.toml --fov 70 --size 1920x1080",
    ),
    Verb(
        "calibrate intrinsics",
        "the lens, from pictures of a board",
        "tools.calibrate:intrinsics",
        """
        PICTURES...  images of the board
        --camera URI  take the pictures now: hold the board in view
        --views N = 20  of --camera
        --board KIND!  chessboard:9x6:0.025 (inner corners, metres) or
            charuco:11x8:0.03:0.022:DICT_5X5_100 (squares, square and marker in metres; :legacy for
            boards of before OpenCV 4.6)
        --lens {pinhole,fisheye} = pinhole
        --output FILE!  the calibration to write
        --residuals PNG  picture of the errors; default: beside FILE
        """,
        examples="""
        board/1.png board/2.png --board chessboard:9x6:0.025 --output front.toml
        --camera /dev/video0 --board charuco:11x8:0.03:0.022:DICT_5X5_100 --output front.toml
        """,
    ),
    Verb(
        "calibrate mounting",
        "where the camera sits: given, or from marks",
        "tools.calibrate:mounting",
        """
        FILE  the calibration, with its lens
        --height METRES  of the lens above the road
        --pitch DEG  positive looks down; default: 0
        --yaw DEG  positive looks left; default: 0
        --picture PICTURE  of marks on the ground
        --mark U,V=X,Y...  a mark on the ground: its pixel, and metres forward and left of the front
            axle's middle; 4 or more, not in one line
        --board KIND  like chessboard:9x6:0.1, that lies flat in --picture, its columns across the
            road
        --at X,Y  of the board's nearest inner corner on the left, metres, as for --mark
        """,
        (_MOUNTING,),
        types={
            **_OF_A_MOUNTING,
            "U,V=X,Y": partial(_floats, "U,V=X,Y, like 512,630=6.0,1.5"),
            "X,Y": partial(_floats, "X,Y in metres, like 6.0,0.9"),
        },
        examples="""
        front.toml --height 1.4 --pitch 3
        front.toml --picture marks.png --board chessboard:9x6:0.1 --at 6.0,0.9
        """,
    ),
    Verb(
        "calibrate estimate",
        "where the camera looks, from a straight drive",
        "tools.calibrate:estimate",
        """
        FILE  the calibration, with its lens
        URI  a clip of the drive, or the camera on the vehicle
        --frames N = 1500  end after N
        --lane-width METRES = 3.6  of the lanes driven on, from which the height follows where
            --height is not given
        --height METRES  of the lens above the road
        --write  put the mounting into the file
        """,
        (_MOUNTING, _LANE_MODEL),
        types={**_OF_A_MOUNTING, "--lane-width": _in_range(float, 0.1, "metres")},
        examples="front.toml drive.mp4 --height 1.4 --write",
    ),
    Verb(
        "calibrate show",
        "a grid on the road and a bird's-eye view, to check by eye",
        "tools.calibrate:show",
        """
        FILE  the calibration
        URI  a picture, a clip or a camera
        --output PNG!  the picture to write
        --frame N = 0  of a clip
        --lanes  detect lanes, draw them, print their numbers
        """,
        (_LANE_MODEL,),
        types={"N": whole_number, "DIR": str},
        examples="front.toml drive.mp4 --lanes --output check.png",
    ),
)

_MACHINE = (
    Verb(
        "doctor",
        "what is wrong with this machine, and the remedies",
        "cli.doctor:doctor",
        """
        --json  one object, with all facts found
        --matrix  only print which JetPack brings what, and where NVDLA can be used
        """,
        (CONFIG,),
        about="""\
Looks at the board, its JetPack, GPU and NVDLA, at cameras, libraries, settings and surroundings,
and reports of each whether it is well and what to do where it is not. Changes nothing. Drivers and
libraries are tried in processes of their own, so that one that crashes or hangs costs its line.
""",
        examples="""

        --config /etc/edge_server/config.toml --json
        --matrix
        """,
        codes="exit codes: 0 no fault (warnings there may be), 1 at least one fault, 2 usage",
    ),
    Verb(
        "support-bundle",
        "one archive that a vendor can be sent, without secrets",
        "cli.support_bundle:make_bundle",
        """
        -o, --output FILE  default: edge-server-support-DEVICE-TIME.tar.gz in this directory
        --anonymous  without the names of device and host
        """,
        (CONFIG,),
        about="""\
Gathers settings, versions, doctor's findings, models, metrics, logs, plans and the board's state
into one archive, without passwords, keys and tokens. The daemon need not run. Run as root to have
the unit's journal and the files of its user.
""",
        examples="""
        -o bundle.tar.gz
        --anonymous
        """,
    ),
    Verb(
        "health",
        "whether the daemon serves what is required",
        "cli.health:health",
        """
        --require WHAT...  model:NAME is READY, camera:NAME delivers frames, lanes:NAME has valid
            lanes, or mqtt is connected; repeatable
        --wait S = 0  look for so long
        --stable S  of --wait, how long it must stay healthy; default: 10, or all of --wait
        --lanes-within S = 2  greatest age of the lanes of lanes:NAME
        --json  one object with every requirement
        """,
        (CONFIG,),
        about="""\
Looks at the running daemon: it is ready on gRPC, is of the installed version, and has what each
--require names. With --wait it looks again until all of that has been so for --stable seconds
without a restart. Reads the metrics endpoint, so [metrics] must be on.
""",
        examples="""

        --wait 120 --require model:lane_detection --require camera:front --require mqtt
        """,
        codes="exit codes: 0 healthy, 2 usage, 69 not healthy (in time), 78 the settings are wrong",
    ),
    Verb(
        "status",
        "what the daemon does now",
        "cli.status:print_status",
        _JSON,
        (ADDRESS,),
        about="""\
Shows what the daemon on this machine does: models with their states and reasons, cameras, lanes,
the broker, the board, plans, the recorder, and whether settings wait for a restart. Rates and times
are those of one second. Changes nothing, and needs no rights but those of a client.
""",
        examples="""

        --json | jq '.models[] | select(.state != "READY")'
        --grpc 127.0.0.1:18001 --metrics 127.0.0.1:18002
        """,
        codes="""\
exit codes: 0 the daemon responds, whatever its state (`edge-server health` judges that), 2 usage,
69 it does not respond, 78 the settings are wrong, 130 interrupted
""",
    ),
    Verb(
        "top",
        "likewise, again and again",
        "cli.status:run_top",
        """
        --interval S = 2
        --count N  end after N times
        --json  one object on a line each time
        """,
        (ADDRESS,),
        types={"S": interval},
        about="""\
Shows what `status` shows, again and again, until q or Ctrl-C. Without a terminal it prints once in
each interval. A daemon that stops is waited for. Over ssh it needs a terminal: ssh -t.
""",
        examples="""

        --interval 1
        --count 60 --json > minute.jsonl
        """,
        codes="""\
exit codes: 0 ended as requested, 2 usage, 69 the daemon did not respond at the start,
78 the settings are wrong
""",
    ),
)

_STATE = f"""\
--state-directory DIR = {INSTALLED_STATE}  with the record of updates, on the data partition
"""
_ROOT = "--root DIR = /  above sys and dev; tests"

_UPDATE = (
    Verb(
        "update",
        "slots, trial and verdict of an image update",
        about="Chooses the slot that boots, judges the system that booted, shows the last update.",
        codes="""\
exit codes: 0 done, 2 usage, 69 not healthy, or the firmware refuses, 78 this board has no slots, or
the settings are wrong
""",
        interrupted="interrupted: nothing was decided",
    ),
    Verb(
        "update status",
        "print what became of the last update",
        "cli.update:show",
        _JSON,
        (_STATE,),
        examples="""

        --json
        """,
    ),
    Verb(
        "update commit",
        "keep the system that runs if it is healthy; see health",
        "cli.update:commit",
        f"""
        --config FILE = {INSTALLED}  the settings
        --require WHAT...  as of health; repeatable
        --wait S = 300  as of health
        --stable S = 60  as of health
        """,
        (_STATE, _ROOT),
        examples="--require lanes:front --wait 300 --stable 60",
    ),
    Verb(
        "update slot",
        "ask or change the firmware's slots, as RAUC's backend",
        "cli.update:slot",
        """
        ACTION
        [SLOT]
        [STATE]
        --engine NAME = rauc  of who calls
        """,
        (_STATE, _ROOT),
        types={
            "ACTION": ("get-current", "get-primary", "set-primary", "get-state", "set-state"),
            "SLOT": ("A", "B"),
            "STATE": ("good", "bad"),
        },
        examples="""
        get-current
        set-primary B
        set-state A good
        """,
    ),
    Verb(
        "update record",
        "note what became of an update without slots",
        "cli.update:record",
        """
        STATE
        --engine NAME!  of who updates
        --result TEXT  one sentence for people
        """,
        (_STATE,),
        types={"STATE": ("pending", "committed", "rolled_back", "failed")},
        examples="committed --engine mender --result 'release 2.1 is kept'",
    ),
    Verb(
        "provision",
        "id, broker and keys, from a file",
        "cli.provision:provision",
        f"""
        FILE  the provisioning file
        --config PATH = {INSTALLED}  the daemon's settings, which are changed
        --data PATH = /data  the data partition
        --key PATH = /usr/lib/edge-server-image/provision.pem  the Ed25519 key that must have signed
            the file, where this exists
        --replace  also where the device is provisioned already
        """,
        about="""\
Changes this device as a provisioning file says: its id, broker, ssh keys, Wi-Fi and cameras. The
settings that come of it are checked before anything is changed.

A file counts once: where it was applied before, nothing happens. Without a key in the image the
first file is accepted from anybody who can plug in a stick, and no other; --replace is for who is
logged in. With a key only what it signed counts, and after the first file only one whose serial in
[file] is greater than all before.
""",
        examples="/media/stick/edge_server.toml",
        codes="""\
exit codes: 0 applied, now or before, 69 the device's files cannot be written, 78 refused: the text
says why
""",
    ),
    Verb(
        "completion",
        "what a shell completes after edge-server",
        "cli.main:print_completion",
        "SHELL",
        types={"SHELL": SHELLS},
        about="""\
Prints a script that makes a shell complete verbs, flags and the names of files. The Debian package
has installed them already. To try one: source <(edge-server completion bash)
""",
        examples="""
        bash > ~/.local/share/bash-completion/completions/edge-server
        zsh > "${fpath[1]}/_edge-server"
        fish > ~/.config/fish/completions/edge-server.fish
        """,
        codes="exit codes: 0 done, 2 usage",
    ),
    Verb(
        "demo",
        "show lanes arriving, with no camera or broker needed",
        "cli.run:demo",
        """
        --source URI = synthetic://road?seed=7&fps=25  a video, an image, a folder of images,
            /dev/video0, rtsp://HOST/PATH, http://HOST/PATH, csi://0 or gst:PIPELINE
        --frames N  end after N frames
        --mqtt HOST[:PORT]  publish there, not on a private broker
        --calibration FILE  of edge-server calibrate: lanes in metres, tracked
        --video FILE  write what is published, drawn into the frames, as .mp4 or .avi
        --json  one JSON object per frame
        --serve [PORT=8000]  go on until Ctrl-C, with the page at this port (8000)
        --model-repository DIR...  models in Triton's layout, not the shipped ones; repeatable
        """,
        types={"PORT": positive, "FILE": str, "DIR": str},
        examples="""
        --frames 100
        --source road.mp4 --json
        --source rtsp://10.0.0.20/main --mqtt 10.0.0.2:1883
        """,
    ),
)

COMMANDS = (*MODEL_COMMANDS, *_CAMERAS, *_CALIBRATE, *_MACHINE, *_UPDATE)
