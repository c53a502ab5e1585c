"""The verbs that deliver, convert, build, try and measure models; see `Verb`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli.running_daemon import INSTALLED
from edge_server.cli.verbs import Verb, interval, number, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = f"--config FILE  the daemon's settings; default: {INSTALLED}, where it is there"
ADDRESS = f"""\
{CONFIG}
--grpc ADDRESS  HOST:PORT, or the path of a Unix socket; default: that of the settings
--metrics HOST:PORT  likewise of its metrics; default: 127.0.0.1:8002
"""


def version(text: str) -> int:
    if not text.isdecimal() or text.startswith("0"):
        raise argparse.ArgumentTypeError(f"{text}: a version is a whole number from 1")
    return int(text)


def _directory(text: str) -> Path:
    return Path(text).expanduser()


def _sha256(text: str) -> str:
    digest = text.removeprefix("sha256:").lower()
    if len(digest) != 64:
        raise argparse.ArgumentTypeError(f"{text}: a sha256 has 64 hexadecimal digits")
    return _digest(digest)


def _digest(text: str) -> str:
    if not text or len(text) > 64 or not set(text) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text}: a digest is hexadecimal, as `list` shows it")
    return text


_SSH = "--ssh COMMAND = ssh  like 'ssh -p 2222 -i KEY'"
_STORE = """\
--store DIR  where the daemon keeps its copies of models, its verdict on each and its quarantine;
    default: the installed daemon's, else yours
"""
_WAITING = f"""\
--wait  fail where no daemon decides on it; by default only one that follows REPO is waited for,
    until it serves the model, refuses it or rolls it back
--no-wait  do not wait for a daemon
--until-passed  as --wait, and until its canary has passed too, which takes requests
--wait-secs S = 300  how long; building a plan takes minutes
{_STORE}"""
_KEY = "--key PUB...  public key: check signatures with it, `verify` demands one; repeatable"

_MODELS = (
    Verb(
        "models",
        "deliver, list, verify and sign models",
        about="""\
Brings models into repositories so that a daemon which follows one never sees half of one: a copy
under a dot name, with a manifest of every file's size and sha256, then one rename. What was there
before is kept for `rollback`. What editors and Python leave behind (.*, *~, *.tmp, __pycache__) is
no part of a model and stays behind.

A repository is a directory, or [USER@]HOST:DIRECTORY, reached with ssh; that host needs edge-server
in the PATH of that user.
""",
        codes="""\
exit codes: 0 done, 1 failed (verify: it is not what its manifest says, or not signed by that key;
push, rollback: the daemon refused it or rolled it back, or other content took its place before the
daemon decided), 2 usage, 69 the host or the daemon cannot be reached, 75 the daemon has not decided
yet, 78 no such model, or it or a key cannot be used; the text says why, 130 interrupted
""",
        interrupted="edge-server: interrupted; no half model is left",
    ),
    Verb(
        "models push",
        "put a model into a repository",
        "cli.models:push",
        """
        DIR  the model, named as its directory is
        --to REPO!  where to
        --version VERSION  only this version; the rest of the model stays as it is there
        --sign KEY  sign it with this private key
        --allow-interface-change  it may break those who call what it replaces: other names, types
            or shapes
        --in-place  leave the manifest, and the signature, in DIR as well
        """,
        (_WAITING, _SSH),
        types={"VERSION": version},
        examples="""
        new/laneDetect_model --to /srv/models --sign release.key
        new/laneDetect_model --to root@truck-7:/srv/models --wait
        """,
    ),
    Verb(
        "models accept",
        "put the model into a repository that comes as an archive on stdin",
        "cli.models:accept",
        "--to DIR!  where to",
        (_WAITING,),
        types={"--to": _directory},
        examples="--to /srv/models < laneDetect_model.tar",
    ),
    Verb(
        "models pull",
        "fetch a model, held against its manifest",
        "cli.models:fetch",
        """
        MODEL|URL  s3://BUCKET/KEY, https://HOST/PATH or oci://REGISTRY/REPOSITORY:TAG is a URL; one
            of the first two that ends with / is a model's directory with its manifest, any other an
            archive
        --from REPO  where from, for a MODEL
        --to DIR!  it becomes DIR/MODEL; '-' writes an archive to stdout, as `accept` reads it
        --name NAME  what a URL's model becomes
        --sha256 D  of a URL's archive, or of its manifest: nothing else is taken
        """,
        (_SSH,),
        types={"--to": _directory, "D": _sha256},
        examples="""
        laneDetect_model --from truck-7:/srv/models --to .
        https://models.example/laneDetect_model.tar --to /srv/models
        """,
    ),
    Verb(
        "models list",
        "what is in a repository, and whether it is as it was made",
        "cli.models:show",
        """
        [REPO]  default: models
        --inventory NAME  ==SUPPRESS==
        --json  a list of objects, with whole digests
        """,
        (_KEY, _STORE, _SSH),
        examples="""
        /srv/models
        truck-7:/srv/models --json
        """,
    ),
    Verb(
        "models verify",
        "whether a model is what its manifest says",
        "cli.models:verify",
        "DIR  the model's, or REPO/NAME",
        (_KEY,),
        examples="/srv/models/laneDetect_model --key release.key.pub",
    ),
    Verb(
        "models rollback",
        "what a model was before its last push; again undoes it",
        "cli.models:undo_push",
        """
        NAME
        --to REPO!  where
        --to-last-good  to what the daemon which follows REPO has last found good, whatever was
            pushed since
        """,
        (_WAITING, _SSH),
        examples="""
        laneDetect_model --to /srv/models
        laneDetect_model --to m --wait
        """,
    ),
    Verb(
        "models release",
        "let a model out of quarantine; the daemon tries it again",
        "cli.models:release_model",
        """
        NAME
        --digest D  only what has this digest, or one that begins so; default: all of that model
        """,
        (_STORE,),
        types={"D": _digest},
        examples="laneDetect_model",
    ),
    Verb(
        "models sign",
        "write a model's manifest and signature into its directory",
        "cli.models:sign",
        """
        DIR  the model
        --key KEY!  the private key
        """,
        examples="new/laneDetect_model --key release.key",
    ),
    Verb(
        "models keygen",
        "make a key to sign models with",
        "cli.models:keygen",
        "--out KEY!  the public one becomes KEY.pub",
        examples="--out release.key",
    ),
)

_MODEL = """\
MODEL  a name, a directory, or an ONNX file
--model-repository DIR...  where names are looked for; repeatable; default: models
--config FILE  or where the daemon's settings have them
--version N  default: the latest
"""

_PLANS = (
    Verb(
        "plan",
        "build, inspect and verify TensorRT plans",
        about="""\
TensorRT plans of a model's ONNX file. A plan belongs to one GPU with one TensorRT: it is built on
the device that runs it, and again after an update. The ONNX file stays the truth.

MODEL is a model's name in the repository, its directory, or an ONNX file.
""",
        codes="""\
exit codes: 0 done, 1 failed (verify: the plan's outputs differ from the ONNX file's; refresh: a
model is left without a plan that fits), 2 usage,
69 no GPU or no TensorRT here, 78 no such model, or it or a flag's value cannot be
used; the text gives the reason, 130 interrupted
""",
        interrupted="\nedge-server: interrupted; what was there is as it was",
    ),
    Verb(
        "plan build",
        "build a model's plan on this device",
        "tools.plan:build_plan",
        """
        --out FILE  the plan; default: beside the ONNX file
        --calibration DIR  typical inputs for INT8 (TensorRT up to 10): DIR/*.npy, or
            DIR/<input>/*.npy
        --min SHAPES...  least shapes, like input:1x3x360x640; once for each profile
        --opt SHAPES...  usual shapes, likewise
        --max SHAPES...  largest shapes, likewise
        --dla-core CORE  build for NVDLA
        --max-gpu-layers COUNT  fail where more fall back to the GPU
        --workspace N  MiB that a layer may take; default: 1024
        --memory-limit N  MiB of the host's memory, for the build
        --fp16  layers may calculate in FP16 (TensorRT up to 10)
        --int8  layers may calculate in INT8 and FP16: with Q/DQ nodes, or with --calibration
        --strongly-typed  calculate as the ONNX file is typed, as TensorRT 11 always does (10)
        --gpu  build for the GPU, whatever is configured
        --no-gpu-fallback  fail where NVDLA cannot take a layer, rather than run it on the GPU
        --no-timing-cache  measure every layer anew
        --verbose  show all messages of TensorRT
        """,
        (_MODEL,),
        types={"CORE": whole_number, "COUNT": whole_number},
        examples="""
        laneDetect_model --model-repository models --fp16
        network.onnx --min x:1x3x360x640 --opt x:4x3x360x640 --max x:8x3x360x640
        """,
    ),
    Verb(
        "plan inspect",
        "what a plan was built of and for",
        "tools.plan:inspect_plan",
        """
        --layers  its layers, which takes the device
        --json  the side-car as it is
        """,
        (_MODEL,),
        examples="""
        laneDetect_model
        laneDetect_model --layers
        """,
    ),
    Verb(
        "plan verify",
        "whether a plan's outputs are those of its ONNX file",
        "tools.plan:verify_plan",
        """
        --tolerance X  how far any element may be off; default: by precision
        --samples N = 4  random inputs
        """,
        (_MODEL,),
        types={"X": float},
        examples="laneDetect_model --samples 16",
    ),
    Verb(
        "plan refresh",
        "build every plan of the repositories that is missing or of another device or TensorRT",
        "cli.plan:refresh",
        """
        --config FILE  the daemon's settings
        --model-repository DIR...  instead of the settings' repositories; repeatable
        --hold N  for systemd: count as started after so many seconds; default: when all is built
        """,
        types={"DIR": str},
        examples="--config /etc/edge_server/config.toml",
    ),
)

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


_CONVERT = Verb(
    "convert",
    "make a model's directory of a file of another framework",
    "cli.convert:convert",
    """
    SRC
    DST
    --to {onnx,graphdef,openvino,plan} = onnx  what it becomes
    --from FORMAT  what SRC is, if it does not show
    --fp16  in half precision; inputs and outputs stay FP32
    --int8  with Q/DQ nodes; needs --calibration
    --int8-operators NAMES = Conv  the ONNX operators to quantise, like Conv,Gemm
    --per-tensor  INT8: one scale for all channels of a weight
    --calibration PATH...  recorded inputs for --int8: an .npz of arrays <input> or input.<input>,
        an .npy, or a directory of them; repeatable
    --simplify  fold constants and drop what does nothing
    --version N = 1  of the model
    --max-batch COUNT  max_batch_size; default: SRC's, or 4 where the batch is open
    --labels FILE  of the first output; default: SRC's
    --input NAME:SHAPE[:TYPE]...  an input's shape, like images:-1x3x360x640:FP32, -1 for any size:
        PyTorch's files do not have it; of other sources, the sizes of random inputs; repeatable
    --outputs NAMES  names of the outputs: of a GraphDef its nodes, of PyTorch's what they get
    --signature NAME  of a SavedModel; default: serving_default
    --module FILE.py:CLASS  of a PyTorch checkpoint
    --module-path PLACE  where a pickled module's class lies
    --trust  SRC may run the code in it: a pickled module, Keras' Lambda layers
    --compare PATH...  recorded inputs to compare on, beside random ones; as --calibration has them
    --samples N = 4  random inputs
    --seed COUNT = 0  of the random inputs
    --limit X  the largest error, as a share of the output's largest value; default: 1e-4, with
        --fp16 1e-2, with --int8 5e-2
    --isolated  run each framework in an environment of its own, made once below the user's cache
    --python FILE...  an interpreter that has the framework; repeatable
    --verbose  show what the frameworks print
    """,
    types={
        "FORMAT": _FORMATS,
        "NAMES": _names,
        "COUNT": whole_number,
        "NAME:SHAPE[:TYPE]": _tensor,
        "X": number(float, lambda value: 0 <= value <= 1, "a share, 0 to 1"),
    },
    about="""\
Converts a model file into a model's directory, complete with config.pbtxt, a version and labels,
and placed by one rename once the result gives what the source gives.

SRC is an ONNX file, a Keras model (.keras, .h5), a SavedModel's directory, a frozen GraphDef (.pb,
.graphdef), a TorchScript file, a program of torch.export (.pt2), a PyTorch module or checkpoint, a
Paddle model, or a model's directory of a repository, of which the latest version is taken.
DST is the directory of the new model, whose name the model gets.
""",
    examples="""
    yolo.onnx models/yolo --labels names.txt
    net.pt models/net --input images:-1x3x360x640
    """,
    codes="""\
exit codes: 0 done, 1 the result differs from the source by more than is allowed, 2 usage,
69 a framework is not installed, 78 SRC, DST or a flag cannot be used; the text says why,
130 interrupted; nothing is written unless the code is 0
""",
    interrupted="\nedge-server: interrupted; nothing is written",
)


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


_INFER = Verb(
    "infer",
    "one request to a model, with a picture or arrays",
    "cli.infer:run_infer",
    """
    MODEL
    |--image URI  a picture, or the first frame of any source that a camera can have
    |--input NAME=FILE.npy...  an input as numpy saves arrays; repeatable. The batch dimension may
        be left out
    --save FILE  the picture with its lanes (.png, .jpg), or all outputs (.npz)
    --classes N  print the N best classes of each output
    --model-version VERSION  default: the latest
    --json  one object, with all numbers
    """,
    (ADDRESS,),
    types={"NAME=FILE.npy": _named_file, "--save": file_with(".png", ".jpg", ".npz")},
    about="""\
Sends one request to a model of the running daemon, over gRPC, and prints the outputs. A picture
goes through the daemon's own preprocessing: where MODEL takes none, through the steps before it in
the ensemble that it is a member of. Lanes are drawn into the picture.
""",
    examples="""
    lane_detection --image road.jpg --save lanes.png
    laneDetect_model --image 'synthetic://road?seed=7'
    classifier --image cat.png --classes 3
    my_model --input x=x.npy --input mask=mask.npy --save outputs.npz
    my_model --input x=x.npy --json | jq '.outputs[0].shape'
    """,
    codes="""\
exit codes: 0 done, 1 the model failed, or there is no such model, 2 usage, 69 the daemon, the
model or a file cannot be reached, 78 the model takes no such request, 130 interrupted
""",
)


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


_BENCH = Verb(
    "bench",
    "how fast a model is, also with other settings",
    "cli.bench:run_bench",
    """
    MODEL
    --concurrency N,… = 1,2,4  requests at a time, like 1,2,4 or 1:4
    --batch N = 1  elements of a request
    --image URI  a picture, in place of a drawn road
    --shape NAME:SIZES...  of a made-up input whose shape is open, without the batch; repeatable
    --seconds S = 5  of each measurement, after a first request
    --json  one object
    sweep:
    --sweep  measure other settings of the model
    --instances N,… = 1,2
    --delays US,… = 0,1000  of a batch, where the model batches, in microseconds
    --backends NAME,…  like onnxruntime,tensorrt; default: the model's
    --model-repository DIR...  default: as the settings have it; the shipped models without a
        settings file
    """,
    (ADDRESS,),
    types={
        "N,…": numbers(1),
        "US,…": numbers(0),
        "NAME:SIZES": _shape,
        "S": interval,
        "NAME,…": lambda text: tuple(dict.fromkeys(filter(None, text.split(",")))),
        "DIR": str,
    },
    about="""\
Measures a model of the running daemon over gRPC: percentiles of the latency, throughput by the
number of requests at a time, and where the time goes in the server. Inputs are made up; a model
that takes pictures, or is in an ensemble that does, gets a drawn road through the real
preprocessing. For other loads, inputs and protocols use perf_analyzer.

--sweep starts a daemon of its own on the same model files, loads the model there with other
instance counts, batching delays and backends, and measures each; the running daemon and the
repository stay as they are. Stop the running daemon first: both would share the processors and the
GPU.
""",
    examples="""
    lane_detection
    laneDetect_model --concurrency 1:4 --json > bench.json
    my_model --batch 8 --shape text:128 --seconds 10
    laneDetect_model --sweep --instances 1,2
    laneDetect_model --sweep --backends onnxruntime,tensorrt
    """,
    codes="""\
exit codes: 0 done, 1 no request succeeded, or there is no such model, 2 usage, 69 the daemon, the
model or a file cannot be reached, 78 the model takes no such request, 130 interrupted
""",
)

MODEL_COMMANDS = (*_MODELS, *_PLANS, _CONVERT, _INFER, _BENCH)
