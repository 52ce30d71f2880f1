"""Images as clients send them."""

import base64
import io

import numpy as np


def picture(seed=0, height=32, width=32):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def png(pixels, **options):
    """An image file of pixels, or of an image of Pillow."""
    from PIL import Image

    file = io.BytesIO()
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    image.save(file, options.pop("format", "PNG"), **options)
    return file.getvalue()


def base64_of(content):
    return base64.b64encode(content).decode()


def form(*parts, boundary="edge"):
    """A multipart body of (name, text) and (name, bytes), and its headers."""
    content = b""
    for name, value in parts:
        content += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"'.encode()
        content += b'; filename="a.png"\r\n\r\n' + value if isinstance(value, bytes) else b"\r\n\r\n" + value.encode()
        content += b"\r\n"
    return content + f"--{boundary}--\r\n".encode(), {"content-type": f"multipart/form-data; boundary={boundary}"}
