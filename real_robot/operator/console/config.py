"""Where and how the operator console is served."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from real_robot.serving.address import ListenHost
from vla_rl.config import Config


class ConsoleConfig(Config):
    """Where and how the console is served."""

    host: ListenHost = Field(
        default="127.0.0.1", description="Address to listen on. Beyond loopback a token is required."
    )
    port: int = Field(default=8080, ge=0, le=65535, description="Port; 0 takes a free one.")
    token: str | None = Field(default=None, repr=False, description="What a person must give to take control.")
    token_file: str = Field(
        default="", description="Name of the token's file, which a person who gives a wrong token is told."
    )
    origins: tuple[str, ...] = Field(
        default=(), description="Pages of other consoles that may show this robot too, such as http://bench2:8080."
    )
    allow_host: tuple[str, ...] = Field(
        default=(), description="Further names by which browsers may address it, besides this machine's."
    )
    certificate: Path | None = Field(default=None, description="PEM file; with it the page is https, its sockets wss.")
    key: Path | None = Field(default=None, description="PEM file of the certificate's key, where it is another file.")
    status_rate: float = Field(default=10.0, gt=0, le=60, description="Status messages a second, to each browser.")
    camera_rate: float = Field(default=10.0, gt=0, le=60, description="Pictures a second of each camera, at most.")
    camera_side: int = Field(default=480, ge=32, le=4096, description="Larger pictures are made smaller: longest side.")
    jpeg_quality: int = Field(default=75, ge=10, le=100, description="JPEG quality of the pictures shown.")
    link_timeout: float = Field(
        default=1.0, gt=0, le=30, description="Seconds of silence of the console in control after which it holds."
    )
    max_clients: int = Field(default=16, ge=1, description="Browsers at a time.")
