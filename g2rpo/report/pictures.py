"""Images of the report, embedded as WebP in a size that keeps the page below its limit."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

EDGES = (512, 384, 320, 256, 192, 160, 128, 96)
"""Sizes to try for the longer side of an image, in pixels."""

QUALITY = 82
SAMPLED = 12
"""Images that are encoded to choose a size."""


def embedded(files: Sequence[Path], budget: int) -> tuple[list[str], int]:
    """Returns the images as data URIs, all scaled to the largest size at which they fit the budget.

    Args:
        files: PNG files.
        budget: bytes of all URIs together.

    Returns:
        The URIs in order, and the longer side in pixels. If even the smallest size is estimated to need more
        than the budget, the smallest size is used.
    """
    if not files:
        return [], 0
    some = files[:: max(1, len(files) // SAMPLED)][:SAMPLED]
    edge = EDGES[-1]
    for candidate in EDGES:
        mean = sum(len(data_uri(file, candidate)) for file in some) / len(some)
        if mean * len(files) <= budget:
            edge = candidate
            break
    # Pillow decodes, scales and encodes outside the interpreter lock.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda file: data_uri(file, edge), files)), edge


def fitting_steps(steps: Sequence[int], images_per_step: int, budget: int) -> list[int]:
    """Returns the iterations whose images fit the budget at 128 px, where a WebP has about 4 kB.

    The first and the last are among them, and the others are spread evenly.
    """
    most = max(2, budget // (max(1, images_per_step) * 5_500))
    if len(steps) <= most:
        return list(steps)
    return sorted({steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)})


def data_uri(file: Path, edge: int) -> str:
    """Returns an image file as the data URI of a WebP whose longer side has at most `edge` pixels.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        with Image.open(file) as image:
            small = image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # PIL raises SyntaxError for a broken PNG
        raise ValueError(f"{file} cannot be read: {error}") from error
    small.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=QUALITY, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
