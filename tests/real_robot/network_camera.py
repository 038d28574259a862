"""A network camera: an MJPEG stream over HTTP, 30 frames a second, that can freeze and be unplugged."""

from __future__ import annotations

import http.server
import threading
import time
from typing import Any

import numpy as np

from real_robot.bridge.codec import encode_image


class NetworkCamera:
    """`frozen`: frames stop, the connection stays. `unplug` ends it; `plug_in` brings it back at the same address."""

    def __init__(self, size: tuple[int, int] = (120, 160)) -> None:
        slope = np.linspace(0, 255, size[1]).astype(np.uint8)
        picture = np.zeros((*size, 3), np.uint8)
        picture[..., 0] = slope  # red grows to the right
        data = encode_image(picture, "jpeg", 90)
        self._part = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(data) + data + b"\r\n"
        self.frozen = threading.Event()
        self._gone = threading.Event()
        self._port = 0
        self.plug_in()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/stream.mjpg"

    def plug_in(self) -> None:
        self._gone.clear()
        camera = self

        class Stream(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
                self.end_headers()
                while not camera._gone.wait(1 / 30):
                    if not camera.frozen.is_set():
                        self.wfile.write(camera._part)

            def log_message(self, format: str, *args: Any) -> None: ...

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            allow_reuse_address = True

            def handle_error(self, request: Any, client_address: Any) -> None: ...  # a viewer that left

        self._server = Server(("127.0.0.1", self._port), Stream)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def unplug(self) -> None:
        """Returns when the last frame has been sent."""
        self._gone.set()
        self._server.shutdown()
        self._server.server_close()
        time.sleep(0.05)
