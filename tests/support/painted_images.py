"""Folders of plain pictures."""

from PIL import Image


def paint(folder, values, size=(8, 8)):
    """A picture a name whose red is VALUE / 255."""
    folder.mkdir(exist_ok=True)
    for name, value in values.items():
        Image.new("RGB", size, (value, 0, 0)).save(folder / name)
    return folder
