from __future__ import annotations

import os
import re
import struct
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest

from edge_server.board.installation import remedy
from edge_server.cameras.colour import bgr_of
from edge_server.cameras.source import SourceKind, is_live, open_source
from edge_server.errors import SourceError
from edge_server.tools.road.renderer import render
from edge_server.tools.road.scene import RoadScene

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_server.cameras.frame import FrameSource
    from edge_server.cameras.source_uri import SourceOptions, SourceUri

CLIPS = Path(__file__).parents[4] / "shared" / "data" / "lanes" / "clips"
STEP = 10


def grey(number: int) -> NDArray[np.uint8]:
    """An image that tells its number after JPEG compression too."""
    return np.full((48, 64, 3), STEP * number, np.uint8)


def image_of(source: FrameSource) -> NDArray[np.uint8]:
    frame = source.read()
    assert frame is not None
    return bgr_of(frame.image)


def numbers_of(source: FrameSource, limit: int = 1000) -> list[int]:
    """The numbers of the next images, to the end or to `limit` of them."""
    numbers: list[int] = []
    while len(numbers) < limit and (frame := source.read()) is not None:
        image = bgr_of(frame.image)
        assert image.shape == (48, 64, 3)
        assert image.dtype == np.uint8
        numbers.append(round(float(image.mean()) / STEP))
    source.close()
    source.close()
    return numbers


def write_video(path: Path, frames: int, fps: float = 25.0, codec: str = "MJPG") -> Path:
    # Matroska plays as far as it goes, so a shortened one breaks off in the middle.
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), fps, (64, 48))
    for number in range(frames):
        writer.write(grey(number))
    writer.release()
    return path


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return write_video(tmp_path / "road.mkv", 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number, name in enumerate(("a.png", "b.jpg", "c.JPEG", "d.png")):
        cv2.imwrite(str(folder / name), grey(number))
    (folder / "notes.txt").write_text("not an image")
    return folder


# Videos


def test_a_video_gives_its_frames_in_order_and_ends(video: Path) -> None:
    assert numbers_of(open_source(f"file://{video}?fps=0")) == list(range(8))


def test_a_plain_path_is_a_file_source(video: Path) -> None:
    assert numbers_of(open_source(str(video)), 3) == [0, 1, 2]


def test_the_end_of_a_video_stays_the_end(video: Path) -> None:
    source = open_source(f"file://{video}?fps=0")
    while source.read() is not None:
        pass
    assert source.read() is None


def test_a_looping_video_starts_again(video: Path) -> None:
    source = open_source(f"file://{video}?fps=0&loop=true")
    assert numbers_of(source, 20) == [number % 8 for number in range(20)]


def test_a_looping_video_that_is_gone_is_an_error_at_its_end(video: Path) -> None:
    source = open_source(f"file://{video}?fps=0&loop=true")
    for _ in range(8):
        source.read()
    video.unlink()
    with pytest.raises(SourceError, match=r"road\.mkv"):
        source.read()


def test_a_video_that_breaks_off_ends_there_with_a_log_line(
    video: Path, caplog: pytest.LogCaptureFixture
) -> None:
    video.write_bytes(video.read_bytes()[: video.stat().st_size * 7 // 10])
    source = open_source(f"file://{video}?fps=0")
    numbers = numbers_of(source)
    assert numbers == list(range(len(numbers)))
    assert 1 <= len(numbers) < 8
    assert source.read() is None
    assert caplog.text.count(f"broke off after {len(numbers)} of 8 frames") == 1


def test_a_percent_sign_in_a_uri_encodes_and_in_a_path_does_not(tmp_path: Path) -> None:
    write_video(tmp_path / "a 100% b.mkv", 2)
    assert numbers_of(open_source(f"file://{tmp_path}/a%20100%25%20b.mkv?fps=0")) == [0, 1]
    assert numbers_of(open_source(f"{tmp_path}/a 100% b.mkv")) == [0, 1]


# Folders of images


def test_a_folder_gives_its_images_by_name_and_ends(folder: Path) -> None:
    assert numbers_of(open_source(f"file://{folder}?fps=0")) == [0, 1, 2, 3]


def test_a_looping_folder_starts_again(folder: Path) -> None:
    source = open_source(f"file://{folder}?fps=0&loop=true")
    assert numbers_of(source, 10) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_a_single_image_is_a_folder_of_one(folder: Path) -> None:
    assert numbers_of(open_source(str(folder / "d.png"))) == [3]


BROKEN_IMAGES = (
    "nothing",
    "text",
    "a folder",
    "half a PNG",
    "half a JPEG",
    "half a JPEG with a whole thumbnail",
)


def jpeg_with_thumbnail(image: NDArray[np.uint8]) -> bytes:
    """A JPEG that carries another, whole one in an APP1 segment, as EXIF does."""
    whole = cv2.imencode(".jpg", image)[1].tobytes()
    thumbnail = cv2.imencode(".jpg", image[::4, ::4])[1].tobytes()
    return whole[:2] + b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail + whole[2:]


def test_a_jpeg_with_a_thumbnail_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg_with_thumbnail(grey(4)))
    assert numbers_of(open_source(str(tmp_path))) == [4]


@pytest.mark.parametrize("broken", BROKEN_IMAGES)
def test_a_broken_image_is_skipped_with_one_log_line(
    folder: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "bb.png"
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    contents = {
        "nothing": b"",
        "text": b"hello",
        "half a PNG": cv2.imencode(".png", noise)[1].tobytes()[:-2000],
        "half a JPEG": cv2.imencode(".jpg", noise)[1].tobytes()[:-2000],
        "half a JPEG with a whole thumbnail": jpeg_with_thumbnail(noise)[:-2000],
    }
    if broken == "a folder":
        path.mkdir()
    else:
        path.write_bytes(contents[broken])
    source = open_source(f"file://{folder}?fps=0&loop=true")
    assert numbers_of(source, 12) == [0, 1, 2, 3] * 3
    assert caplog.text.count("bb.png: skipped") == (broken != "a folder")
    assert ("its end is missing" in caplog.text) == ("half" in broken)


def test_a_folder_that_becomes_unreadable_is_an_error_when_it_loops(folder: Path) -> None:
    source = open_source(f"file://{folder}?fps=0&loop=true")
    assert source.read() is not None
    for path in folder.iterdir():
        path.write_bytes(b"gone")
    with pytest.raises(SourceError, match="none of its images"):
        source.read()


def test_an_image_of_any_kind_becomes_three_channels_of_8_bits(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), grey(5)[..., 0])
    cv2.imwrite(str(tmp_path / "b.png"), np.dstack([grey(6), grey(25)[..., :1]]))
    cv2.imwrite(str(tmp_path / "c.png"), grey(7).astype(np.uint16) * 257)
    assert numbers_of(open_source(f"file://{tmp_path}?fps=0")) == [5, 6, 7]


# What cannot be opened


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("text.mp4", b"hello\n" * 100, "convert it"),
        ("text.txt", b"hello\n" * 100, "convert it"),
        ("empty.mp4", b"", "convert it"),
        ("bad.jpg", b"hello", "no JPEG or PNG"),
    ],
)
def test_a_file_that_is_no_video_is_refused_at_open(
    tmp_path: Path, name: str, content: bytes, remedy: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=rf"(?s){name}.*{remedy}"):
        open_source(str(tmp_path / name))


def test_a_truncated_mp4_is_refused_at_open(tmp_path: Path) -> None:
    path = tmp_path / "cut.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 25, (64, 48))
    for number in range(5):
        writer.write(grey(number))
    writer.release()
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(SourceError, match=r"cut\.mp4: .*incomplete"):
        open_source(str(path))


def test_a_missing_file_is_named_with_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=rf"{tmp_path}/no\.mp4: no such file .*check the path$"):
        open_source("no.mp4")


@pytest.mark.parametrize("name", ["road.mp4", "road.jpg"])
def test_a_file_that_may_not_be_read_is_distinguished_from_a_damaged_one(name: str) -> None:
    # Not tmp_path, which only its owner may enter: root has to become somebody else here.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / name
        path.touch(mode=0)
        whoever = os.geteuid()
        if whoever == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(SourceError, match=rf"{name}: Permission denied; check .* rights"):
                open_source(str(path))
        finally:
            os.seteuid(whoever)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.mp4", "ffconcat version 1.0\nfile other.avi\n"),
        ("list.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nother.avi\n#EXT-X-ENDLIST\n"),
    ],
)
def test_a_file_has_no_further_files_opened(tmp_path: Path, name: str, text: str) -> None:
    write_video(tmp_path / "other.avi", frames=3)
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match="no video can be read"):
        open_source(str(tmp_path / name))


def test_a_picture_that_is_named_like_a_video_is_not_unpacked(tmp_path: Path) -> None:
    picture = cv2.imencode(".png", np.zeros((48, 64, 3), np.uint8))[1]
    (tmp_path / "picture.mp4").write_bytes(picture.tobytes())
    with pytest.raises(SourceError, match="no video can be read"):
        open_source(str(tmp_path / "picture.mp4"))


def test_options_behind_a_plain_path_are_refused_with_their_form(video: Path) -> None:
    with pytest.raises(SourceError, match=r"file:///absolute/path\?loop=true"):
        open_source(f"{video}?loop=true")


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"{tmp_path}: has no images in it; put \.jpeg, \.jpg"):
        open_source(str(tmp_path))


def test_a_folder_with_broken_images_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"hello")
    with pytest.raises(SourceError, match="none of its images can be read"):
        open_source(str(tmp_path))


def test_a_device_is_no_file() -> None:
    with pytest.raises(SourceError, match="neither a file nor a folder"):
        open_source("/dev/null")


def test_a_video_filmed_upright_is_shown_upright(tmp_path: Path) -> None:
    path = tmp_path / "phone.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 25, (64, 48))
    for _ in range(3):
        writer.write(grey(5))
    writer.release()
    data = bytearray(path.read_bytes())
    # The matrix of the track header (ISO 14496-12, 8.3.2): a quarter turn instead of none.
    matrix = data.index(b"tkhd") + 4 + 40
    none, turned = ((1, 0, 0, 0, 1, 0), (0, 1, 0, -1, 0, 0))
    one = 0x10000
    assert struct.unpack_from(">6i", data, matrix) == tuple(one * value for value in none)
    struct.pack_into(">6i", data, matrix, *(one * value for value in turned))
    path.write_bytes(data)
    assert image_of(open_source(str(path))).shape == (64, 48, 3)


def test_a_name_too_long_for_the_file_system_is_a_source_error() -> None:
    with pytest.raises(SourceError, match="check the path"):
        open_source("x" * 5000)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("", "the source is empty"),
        ("file://clips/road.mp4", r"wants an absolute path; write file:///.*/clips/road\.mp4"),
        ("file:///x.mp4?lop=true", "unknown option 'lop'; did you mean 'loop'"),
        ("file:///x.mp4?zzz=1", "unknown option 'zzz'; known: loop, fps"),
        ("file:///x.mp4?loop=yes", "loop is 'yes'; write true or false"),
        ("file:///x.mp4?loop", "malformed"),
        ("file:///x.mp4?fps=1&fps=2", "given twice"),
        ("file:///x.mp4?fps=fast", "fps is 'fast'; write 1 to 1000"),
        ("file:///x.mp4?fps=nan", "fps is 'nan'"),
        ("file:///x.mp4?fps=-1", "fps is '-1'"),
        ("file:///x.mp4?fps=0.5", "fps is '0.5'"),
        ("synthetic://rod", "unknown scene 'rod'; did you mean 'road'"),
        ("synthetic://road/left", "unknown scene"),
        ("synthetic://road?conditions=rain,nigt", "unknown condition 'nigt'; did you mean 'night'"),
        ("synthetic://road?sed=1", "unknown option 'sed'; did you mean 'seed'"),
        ("synthetic://road?seed=-1", "seed is '-1'; write a number 0 to 4294967295"),
        ("synthetic://road?width=9999", "width is '9999'; write a number 64 to 4096"),
        ("synthetic://road?frames=" + "9" * 5000, "frames is"),
        ("rtmp://host/live", "unknown kind of source 'rtmp'; did you mean 'rtsp'"),
        ("file://[x", "a file:// source is malformed"),
    ],
)
def test_a_wrong_uri_is_refused_with_the_right_form(uri: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_source(uri)


@pytest.mark.parametrize(
    "uri", ["rtsp://me:secret@host/live?transport=x", "rtsp://me:secret@[host?x"]
)
def test_a_password_never_shows_in_an_error(uri: str) -> None:
    with pytest.raises(SourceError) as caught:
        open_source(uri)
    assert "rtsp" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_recordings_are_not_live() -> None:
    assert not is_live("road.mp4")
    assert not is_live("synthetic://road")


def test_missing_opencv_is_reported_with_its_remedy() -> None:
    def without_opencv(uri: SourceUri, _: SourceOptions) -> FrameSource:
        raise ModuleNotFoundError("No module named 'cv2'", name="cv2")

    with pytest.raises(SourceError, match=re.escape(remedy("cv2"))):
        open_source("x.mp4", {"file": SourceKind(without_opencv, live=False)})


# Pace


def test_a_video_plays_at_its_own_rate(tmp_path: Path) -> None:
    source = open_source(str(write_video(tmp_path / "fast.mkv", 3, fps=200.0)))
    assert source.pace.period_ns == pytest.approx(5_000_000)  # type: ignore[attr-defined]  # a file's


def test_a_transport_stream_plays_at_its_own_rate(tmp_path: Path) -> None:
    source = open_source(str(write_video(tmp_path / "drive.ts", 25, codec="mp2v")))
    assert source.pace.period_ns == pytest.approx(40_000_000)  # type: ignore[attr-defined]  # a file's


def test_a_given_rate_overrides_the_videos_own(video: Path) -> None:
    source = open_source(f"file://{video}?fps=500")
    assert source.pace.period_ns == pytest.approx(2_000_000)  # type: ignore[attr-defined]  # this source has it


def test_a_folder_plays_10_images_a_second(folder: Path) -> None:
    assert open_source(str(folder)).pace.period_ns == pytest.approx(100_000_000)  # type: ignore[attr-defined]  # this source has it


# The synthetic road


def test_a_synthetic_road_has_the_requested_size_and_ends_after_its_frames() -> None:
    source = open_source("synthetic://road?fps=0&width=320&height=180&frames=3")
    for _ in range(3):
        frame = source.read()
        assert frame is not None
        image = bgr_of(frame.image)
        assert image.shape == (180, 320, 3)
    assert source.read() is None


def test_a_synthetic_road_moves_and_its_lanes_are_known() -> None:
    source = open_source("synthetic://road?fps=0&width=320&height=180")
    first, second = image_of(source), image_of(source)
    assert not np.array_equal(first, second)
    image, lanes = render(RoadScene.for_camera(0), 0.0, 320, 180)
    assert np.array_equal(first, image)
    assert len(lanes) >= 2
    for lane in lanes:
        assert lane.shape[1:] == (2,)
        assert lane.dtype == np.float32


def test_a_seed_always_gives_the_same_road() -> None:
    uri = "synthetic://road?fps=0&width=320&height=180&seed="
    same, again, other = (image_of(open_source(uri + seed)) for seed in ("5", "5", "6"))
    assert np.array_equal(same, again)
    assert not np.array_equal(same, other)


# Real clips


@pytest.mark.parametrize("name", ["highway_1280x720.mp4", "highway_960x540.mp4"])
def test_a_real_clip_gives_images_of_its_size(name: str) -> None:
    if not (CLIPS / name).exists():
        pytest.skip(f"{CLIPS / name} is not here: no real H.264 clip was read")
    width, height = map(int, Path(name).stem.rpartition("_")[2].split("x"))
    source = open_source(f"file://{CLIPS / name}?fps=0")
    for _ in range(3):
        frame = source.read()
        assert frame is not None
        image = bgr_of(frame.image)
        assert image.shape == (height, width, 3)
        assert image.std() > 10
    source.close()


def test_a_video_whose_name_is_not_utf_8_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.mp4")
    Path(path).write_bytes(b"no video")
    with pytest.raises(SourceError, match="the name is not UTF-8; rename it"):
        open_source(path)


def png(width: int, height: int) -> bytes:
    """A PNG of that size, with the begin of its pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(2**20), 9)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    )


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.png", png(65_500, 65_500), "65500 x 65500, more than 32 megapixels"),
        ("a.png", png(32_000, 32_000), "32000 x 32000, more than 32 megapixels"),
        ("a.png", cv2.imencode(".tiff", grey(1))[1].tobytes(), "no JPEG header"),
        ("a.jpg", cv2.imencode(".webp", grey(1))[1].tobytes(), "no JPEG header"),
        ("a.jpg", cv2.imencode(".bmp", grey(1))[1].tobytes(), "no JPEG header"),
    ],
)
def test_an_image_that_no_camera_gives_is_not_decoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match="none of its images can be read"):
        open_source(str(tmp_path))
    assert reason in caplog.text


def test_an_image_that_became_a_pipe_or_a_device_holds_nobody(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = open_source(f"file://{folder}?fps=0&loop=true")
    assert source.read() is not None
    changed = sorted(folder.iterdir())[:2]
    for path in changed:
        path.unlink()
    os.mkfifo(changed[0])
    changed[1].symlink_to("/dev/zero")
    assert numbers_of(source, 5) == [2, 3, 2, 3, 2]
    assert caplog.text.count("is no regular file") == 2


def test_a_looping_video_that_became_a_pipe_is_an_error_and_holds_nobody(video: Path) -> None:
    source = open_source(f"file://{video}?fps=0&loop=true")
    assert source.read() is not None
    video.unlink()
    os.mkfifo(video)
    with pytest.raises(SourceError, match="cannot be played: is no regular file"):
        numbers_of(source)
    source.close()


def box(name: bytes, *parts: bytes) -> bytes:
    """A box of an MP4 file."""
    data = b"".join(parts)
    return struct.pack(">I", 8 + len(data)) + name + data


def mp4(tracks: int, jpeg: bytes) -> bytes:
    """An MP4 file with so many tracks, each of which shows that picture of 64 x 48 once."""
    file_type = box(b"ftyp", b"isom", bytes(4), b"isom")
    matrix = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)

    def track(number: int) -> bytes:
        look = box(
            b"jpeg",
            *(struct.pack(">6xH16x", 1), struct.pack(">HHIIIH", 64, 48, 72 << 16, 72 << 16, 0, 1)),
            struct.pack(">32xHh", 24, -1),
        )
        table = box(
            b"stbl",
            box(b"stsd", struct.pack(">II", 0, 1), look),
            box(b"stts", struct.pack(">IIII", 0, 1, 1, 1000)),
            box(b"stsc", struct.pack(">IIIII", 0, 1, 1, 1, 1)),
            box(b"stsz", struct.pack(">III", 0, len(jpeg), 1)),
            box(b"stco", struct.pack(">III", 0, 1, len(file_type) + 8)),
        )
        media = box(
            b"mdia",
            box(b"mdhd", struct.pack(">IIIIIHH", 0, 0, 0, 1000, 1000, 0x55C4, 0)),
            box(b"hdlr", bytes(8), b"vide", bytes(13)),
            box(b"minf", box(b"vmhd", struct.pack(">I8x", 1)), table),
        )
        head = struct.pack(">IIIIII16x", 3, 0, 0, number, 0, 1000) + matrix
        return box(b"trak", box(b"tkhd", head, struct.pack(">II", 64 << 16, 48 << 16)), media)

    head = struct.pack(">IIIIIIH10x", 0, 0, 0, 1000, 1000, 1 << 16, 1 << 8) + matrix
    movie = box(b"mvhd", head, bytes(24), struct.pack(">I", tracks + 1))
    shown = box(b"moov", movie, *(track(number) for number in range(1, tracks + 1)))
    return file_type + box(b"mdat", jpeg) + shown


def test_a_video_of_many_tracks_takes_no_memory_for_what_they_claim(tmp_path: Path) -> None:
    """Each track of 150 bytes may claim frames whose table takes 75 MB."""
    jpeg = cv2.imencode(".jpg", np.full((48, 64, 3), 90, np.uint8))[1].tobytes()
    path = tmp_path / "many.mp4"
    path.write_bytes(mp4(8, jpeg))
    source = open_source(f"file://{path}?fps=0")
    frame = source.read()
    source.close()
    assert frame is not None
    assert frame.size == (64, 48)
    path.write_bytes(mp4(9, jpeg))
    with pytest.raises(SourceError, match="or has more than 8 tracks: play it elsewhere"):
        open_source(str(path))


@pytest.mark.parametrize(("width", "height"), [(15_000, 15_000), (5_120, 3_328)])
def test_a_video_of_a_size_that_no_camera_has_is_not_decoded(
    tmp_path: Path, width: int, height: int
) -> None:
    # FFmpeg would take 0.9 GB for the first, and for H.264 of the second as much.
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 64, 48, 0) + b"\x02\x02\x44\x01\x00"
    path = tmp_path / "x.gif"
    path.write_bytes(head + frame + b";")
    with pytest.raises(SourceError, match=f"{width} x {height}, more than 16 megapixels"):
        open_source(str(path))


def test_an_image_that_would_fill_the_memory_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "huge.jpg").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(SourceError, match="none of its images can be read"):
        open_source(str(tmp_path))
    assert "larger than 256 MiB" in caplog.text
