"""Live cameras for tests and benchmarks, and the ways in which they fail.

- `rtsp.RtspCamera`: a GStreamer RTSP server as a process (H.264, H.265, JPEG; TCP, UDP; passwords),
  which can be killed, frozen, darkened and switched in size.
- `mjpeg.MjpegCamera`: an HTTP server of JPEGs that can stall and send damaged ones.
- `network`: a TCP proxy that stalls and cuts, an RTSP relay that loses UDP packets, a port that
  accepts and never responds, one that drops every SYN.
- `clip`: the pictures that cameras show.
- `time_code`: a capture time in the pixels, readable after a video codec.

Each is a context manager, and nothing of it is left after `close`.
"""
