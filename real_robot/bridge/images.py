"""Camera messages to pictures, raw and compressed; what a header claims is checked before anything is decoded."""

from __future__ import annotations

import io

import numpy as np

from real_robot.transports.messages import CompressedImage, Image, MessageError

MAX_SIDE = 8192
_CHANNELS = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1}
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"


def decode_image(
    message: Image | CompressedImage, size: tuple[int, int] | None = None, published: tuple[int, int] | None = None
) -> np.ndarray:
    """The picture, uint8 (height, width, 3), RGB.

    Args:
        size: (height, width) to resize to; None keeps the camera's.
        published: (height, width) that the camera's picture must have before; None: any.

    Raises:
        MessageError: unknown encoding, sizes that do not fit the data, too large, damaged or cut-off file, another size
            than `published`.
    """
    picture = _decode_raw(message) if isinstance(message, Image) else _decode_file(message.data)
    if published is not None and picture.shape[:2] != published:
        height, width = picture.shape[:2]
        raise MessageError(f"image of {height} x {width}, the contract says {published[0]} x {published[1]}")
    if size is None or picture.shape[:2] == size:
        return picture
    import cv2

    shrinks = picture.shape[0] >= size[0] and picture.shape[1] >= size[1]
    return cv2.resize(picture, size[::-1], interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def encode_image(picture: np.ndarray, kind: str, quality: int = 95) -> bytes:
    """A picture, uint8 (height, width, 3) RGB, as a "jpeg" (of that quality) or "png" file."""
    from PIL import Image as Pillow

    buffer = io.BytesIO()
    Pillow.fromarray(picture).save(buffer, kind, **({"quality": quality} if kind == "jpeg" else {"compress_level": 1}))
    return buffer.getvalue()


def _decode_raw(message: Image) -> np.ndarray:
    channels = _CHANNELS.get(message.encoding)
    if channels is None:
        raise MessageError(f"image encoding {message.encoding!r} is not among {', '.join(_CHANNELS)}")
    height, width, step = message.height, message.width, message.step
    _check_size(height, width)
    if step < width * channels or len(message.data) != height * step:
        raise MessageError(
            f"image of {height} x {width} {message.encoding} with step {step} has {len(message.data)} bytes"
        )
    rows = np.frombuffer(message.data, np.uint8).reshape(height, step)[:, : width * channels]
    picture = rows.reshape(height, width, channels)
    if channels == 1:
        return np.repeat(picture, 3, axis=2)
    order = [2, 1, 0] if message.encoding.startswith("bgr") else [0, 1, 2]
    return np.ascontiguousarray(picture[..., order])


def _decode_file(data: bytes) -> np.ndarray:
    from PIL import Image as Pillow

    # libjpeg fills the missing part of a cut-off file with gray and only warns.
    if data.startswith(_JPEG_START) and not data.rstrip(b"\0").endswith(_JPEG_END):
        raise MessageError("JPEG cut off: it has no end marker")
    try:
        # No filter of warnings here: they are the whole process's, and cameras decode in several threads at once.
        with Pillow.open(io.BytesIO(data), formats=("JPEG", "PNG")) as file:
            _check_size(file.height, file.width)  # As the header says, before anything is decoded.
            if file.mode not in ("RGB", "RGBA", "L"):
                raise MessageError(f"compressed image of mode {file.mode}; RGB, RGBA and L are read")
            return np.array(file.convert("RGB"))
    except MessageError:
        raise
    # Pillow's decoders raise these, and SyntaxError, for damaged files.
    except (
        OSError,
        ValueError,
        SyntaxError,
        IndexError,
        TypeError,
        EOFError,
        Pillow.DecompressionBombError,
    ) as e:
        raise MessageError(f"compressed image not readable: {e}") from None


def _check_size(height: int, width: int) -> None:
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise MessageError(f"image of {height} x {width}; each side is 1 to {MAX_SIDE}")
