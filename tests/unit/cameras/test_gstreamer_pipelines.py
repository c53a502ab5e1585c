"""Pipelines from the table, for the elements of a Jetson, of Debian and of poorer machines."""

from __future__ import annotations

from fractions import Fraction

import pytest

from edge_server.cameras.frame import LARGEST_VIDEO_PX
from edge_server.cameras.gstreamer_pipelines import SIZES, missing_elements, pipeline_of
from edge_server.cameras.source_uri import NO_OPTIONS, Credentials, SourceOptions, parse_source_uri
from edge_server.cameras.v4l2 import VideoMode, wanted_mode
from edge_server.errors import SourceError

DEBIAN = frozenset(
    {
        *("appsink", "videoconvert", "videoflip", "v4l2src"),
        *("rtspsrc", "rtph264depay", "rtph265depay", "rtpjpegdepay", "h264parse", "h265parse"),
        *("souphttpsrc", "multipartdemux", "avdec_h264", "avdec_h265", "jpegdec"),
    }
)
# NVIDIA's GStreamer plugins of JetPack 6 and 7, beside Ubuntu's.
JETSON = DEBIAN | {"nvarguscamerasrc", "nvv4l2decoder", "nvvidconv"}
WEBCAM = (
    VideoMode("YUY2", (640, 480), Fraction(30)),
    VideoMode("YUY2", (640, 480), Fraction(15)),
    VideoMode("JPEG", (1280, 720), Fraction(30)),
)
SINK = "appsink name=frames max-buffers=1 drop=true sync=false"
ANY_FORMAT = "videoconvert ! video/x-raw,format=(string){NV12,I420,YUY2,BGR,GRAY8}"
HIDDEN = "hunter2-secret"


def pipeline(
    uri: str,
    elements: frozenset[str] = JETSON,
) -> str:
    has = elements.__contains__
    made = pipeline_of(
        parse_source_uri(uri), NO_OPTIONS, has, lambda parsed: wanted_mode(parsed, WEBCAM)
    )
    return made.whole()


# What a Jetson runs. Only a board can run these; the elements, their properties and their memory
# are those that NVIDIA documents for JetPack 6 and 7.


def test_a_csi_camera_stays_in_hardware_up_to_nv12() -> None:
    assert pipeline("csi://0") == (
        "nvarguscamerasrc name=source sensor-id=0 "
        "! video/x-raw(memory:NVMM),width=1920,height=1080,framerate=30/1,format=NV12 "
        f"! nvvidconv ! video/x-raw,format=NV12 ! {SINK}"
    )


def test_a_csi_camera_has_the_size_rate_mode_and_orientation_of_its_uri() -> None:
    text = pipeline("csi://1?width=1280&height=720&fps=59.94&mode=3&flip=rotate-180")
    assert "sensor-id=1 sensor-mode=3" in text
    assert "width=1280,height=720,framerate=2997/50,format=NV12" in text
    assert "nvvidconv flip-method=2 ! video/x-raw,format=NV12" in text


def test_a_sensor_mode_alone_decides_size_and_rate() -> None:
    assert "sensor-mode=2 ! video/x-raw(memory:NVMM),format=NV12 !" in pipeline("csi://0?mode=2")


def test_the_jetson_decodes_rtsp_in_hardware() -> None:
    assert pipeline("rtsp://camera/stream") == (
        "rtspsrc name=source protocols=tcp latency=100 drop-on-latency=true buffer-mode=none "
        "tcp-timeout=3000000 ! rtph264depay name=packets ! h264parse config-interval=-1 "
        "! video/x-h264,width=(int)[1,5440],height=(int)[1,3072];"
        "video/x-h264,width=(int)[1,4096],height=(int)[1,4096];"
        "video/x-h264,width=(int)[1,3072],height=(int)[1,5440] "
        "! nvv4l2decoder name=decoder ! nvvidconv ! video/x-raw,format=NV12 "
        f"! {SINK}"
    )


def test_the_jetson_decodes_the_jpegs_of_a_webcam_in_hardware() -> None:
    assert pipeline("/dev/video0") == (
        "v4l2src name=source io-mode=2 do-timestamp=true "
        "! image/jpeg,width=1280,height=720,framerate=30/1 "
        "! nvv4l2decoder name=jpeg mjpeg=1 ! nvvidconv ! video/x-raw,format=NV12 "
        f"! {SINK}"
    )


# The same on any Linux.


def test_raw_frames_of_a_webcam_are_not_converted() -> None:
    for elements in (DEBIAN, JETSON):
        assert pipeline("v4l2:///dev/video2?format=yuy2", elements) == (
            "v4l2src name=source io-mode=2 do-timestamp=true "
            "! video/x-raw,format=YUY2,width=640,height=480,framerate=30/1 "
            f"! {ANY_FORMAT} ! {SINK}"
        )


def test_a_webcam_is_flipped_where_the_machine_can() -> None:
    uri = "/dev/video0"
    assert "flip" not in pipeline(uri, DEBIAN)
    uri = "v4l2:///dev/video0?flip=rotate-90"
    assert f"{ANY_FORMAT} ! videoflip method=clockwise ! {SINK}" in pipeline(uri, DEBIAN)
    assert "nvvidconv flip-method=3 !" in pipeline(uri)


def test_rtsp_and_http_are_decoded_on_the_cpu() -> None:
    assert f"avdec_h264 ! {ANY_FORMAT} ! {SINK}" in pipeline("rtsp://camera/stream", DEBIAN)
    assert f"jpegdec name=jpeg ! {ANY_FORMAT} ! {SINK}" in pipeline("http://camera/mjpeg", DEBIAN)


def test_the_codec_of_the_stream_chooses_the_decoder() -> None:
    made = pipeline_of(
        parse_source_uri("rtsp://camera/stream"),
        NO_OPTIONS,
        DEBIAN.__contains__,
        lambda _: "",
    )
    # A size that no camera has ends at the parser, before a decoder takes memory for it.
    assert (
        "rtph265depay name=packets ! h265parse config-interval=-1 "
        "! video/x-h265,width=(int)[1,5440],height=(int)[1,3072];"
        "video/x-h265,width=(int)[1,4096],height=(int)[1,4096];"
        "video/x-h265,width=(int)[1,3072],height=(int)[1,5440] ! avdec_h265"
    ) in made.whole("H265")
    assert all(width * height <= LARGEST_VIDEO_PX for width, height in SIZES)
    with pytest.raises(SourceError, match=r"sends MP4V-ES; set it to one of H\.264") as caught:
        made.whole("MP4V-ES")
    assert caught.value.reason == "no_decoder"


def test_the_transport_of_rtsp_is_ours_and_the_rest_of_the_query_the_cameras() -> None:
    made = pipeline_of(
        parse_source_uri("rtsp://camera:8554/live?channel=1&transport=udp&subtype=0"),
        NO_OPTIONS,
        DEBIAN.__contains__,
        lambda _: "",
    )
    assert " protocols=udp " in made.text
    assert made.properties["source"]["location"] == "rtsp://camera:8554/live?channel=1&subtype=0"


def test_the_certificates_of_cameras_are_their_own() -> None:
    assert " tls-validation-flags=0 " in pipeline("rtsps://camera/live")
    assert " ssl-strict=false " in pipeline("https://camera/mjpeg")
    assert "tls" not in pipeline("rtsp://camera/live")


@pytest.mark.parametrize("scheme", ["rtsp", "http"])
@pytest.mark.parametrize("in_uri", [True, False])
def test_a_password_is_a_property_and_in_no_text(scheme: str, in_uri: bool) -> None:
    login = f"user:{HIDDEN}@" if in_uri else ""
    made = pipeline_of(
        parse_source_uri(f"{scheme}://{login}camera/stream"),
        SourceOptions(credentials=Credentials("other" if in_uri else "user", HIDDEN)),
        DEBIAN.__contains__,
        lambda _: "",
    )
    assert made.properties["source"]["user-id"] == "user"
    assert made.properties["source"]["user-pw"] == HIDDEN
    assert HIDDEN not in made.properties["source"]["location"]
    assert HIDDEN not in repr(made) + made.whole()


def test_a_persons_own_pipeline_gets_the_appsink_and_obeys_its_rotation() -> None:
    assert pipeline("gst:videotestsrc ! queue", DEBIAN) == (
        f"videotestsrc ! queue ! {ANY_FORMAT} ! videoflip video-direction=auto ! {SINK}"
    )


# What is missing.


@pytest.mark.parametrize(
    ("scheme", "lacks", "package"),
    [
        ("rtsp", "avdec_h265", "gstreamer1.0-libav"),
        ("rtsp", "h264parse", "gstreamer1.0-plugins-bad"),
        ("rtsp", "rtspsrc", "gstreamer1.0-plugins-good"),
        ("http", "souphttpsrc", "gstreamer1.0-plugins-good"),
        ("v4l2", "jpegdec", "gstreamer1.0-plugins-good"),
        ("gst", "videoconvert", "gstreamer1.0-plugins-base"),
    ],
)
def test_what_is_missing_comes_with_its_package(scheme: str, lacks: str, package: str) -> None:
    assert missing_elements(scheme, DEBIAN.__contains__) == ""
    without = missing_elements(scheme, (DEBIAN - {lacks}).__contains__)
    assert without.endswith(package)


def test_a_csi_camera_needs_a_jetson() -> None:
    assert missing_elements("csi", JETSON.__contains__) == ""
    with pytest.raises(SourceError, match=r"no nvarguscamerasrc, nvvidconv; .* a Jetson"):
        pipeline("csi://0", DEBIAN)


def test_openh264_stands_in_where_libav_is_missing() -> None:
    elements = DEBIAN - {"avdec_h264"} | {"openh264dec"}
    assert " ! openh264dec ! " in pipeline("rtsp://camera/stream", elements)
