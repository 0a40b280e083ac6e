"""Which picture has which prompt, and that all kinds of files become the same pixels."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from support.painted_images import paint

from g2rpo.evaluation.image_files import read_pixels, size_of
from g2rpo.evaluation.matching import in_order, match
from g2rpo.evaluation.score_folder import score
from g2rpo.inference.images import save_png


def test_sorted_order_pairs_the_prompts_and_repeats_stay(tmp_path):
    folder = paint(tmp_path / "in", {"c.png": 30, "a.jpg": 10, "b.webp": 20})
    (folder / "notes.txt").write_text("not a picture")
    (folder / "._c.png").write_text("what a Mac leaves behind")
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "text": "hi"}\n\n{"prompt": "y"}\n{"prompt": "x"}\n')
    items = match(folder, str(tmp_path / "p.jsonl")).items
    assert [(item.name, item.prompt) for item in items] == [("a.jpg", "x"), ("b.webp", "y"), ("c.png", "x")]
    assert items[0].metadata == {"text": "hi"} and items[1].metadata == {}


def test_a_name_says_nothing_about_the_prompt(tmp_path):
    folder = paint(tmp_path / "in", {"a blue star.png": 1, "a red circle.png": 2})
    (tmp_path / "p.txt").write_text("a red circle\na blue star\n")
    items = match(folder, str(tmp_path / "p.txt")).items
    assert [(item.name, item.prompt) for item in items] == [
        ("a blue star.png", "a red circle"),
        ("a red circle.png", "a blue star"),
    ]


@pytest.mark.parametrize(
    "names",
    [["img_02.png", "img_10.png"], ["0.png", "1.png", "9.jpg"], ["a.png", "a2.png", "b.png"], ["Z", "a"]],
)
def test_an_order_that_is_clear(names):
    assert in_order(names[::-1]) == names


@pytest.mark.parametrize(
    "names",
    [["img_2.png", "img_10.png"], [f"{i}.png" for i in range(12)], ["x9y", "x10a"], ["cat-2.png", "cat.png"]],
)
def test_an_order_that_is_not_clear_is_refused(names):
    with pytest.raises(ValueError, match=r"order of the images is ambiguous.*--map"):
        in_order(names)


def test_counts_that_differ_are_both_named(tmp_path):
    folder = paint(tmp_path / "in", {"a.png": 1, "b.png": 2, "c.png": 3})
    (folder / "d.gif").write_bytes(b"GIF89a")
    (tmp_path / "p.txt").write_text("x\ny\n")
    with pytest.raises(ValueError, match=r"3 images in .*d\.gif, ignored.* but 2 prompts in .*p\.txt"):
        match(folder, str(tmp_path / "p.txt"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.jsonl", '{"file": "b.png", "prompt": "two", "text": "T"}\n{"file": "a.png", "prompt": "one"}\n'),
        ("m.csv", "file,prompt,text\nb.png,two,T\na.png,one\n"),
    ],
)
def test_a_mapping_pairs_by_file_and_brings_metadata(tmp_path, name, text):
    folder = paint(tmp_path / "in", {"a.png": 1, "b.png": 2, "c.png": 3})
    (tmp_path / name).write_text(text)
    found = match(folder, mapping=str(tmp_path / name))
    assert [(item.name, item.prompt) for item in found.items] == [("b.png", "two"), ("a.png", "one")]
    assert found.items[0].metadata == {"text": "T"} and found.items[1].metadata.get("text") is None
    assert len(found.notes) == 1 and "c.png" in found.notes[0]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["gone.png", "also.png"],
            r"no file in .*\n2 of 2 files .*\n  gone\.png: there is no such file\n  also",
        ),
        (["a.png", "b.png", "./a.png"], r"line 3: \./a\.png is already in line 1"),
        (["a.png", "../in/a.png"], r"line 2: '\.\./in/a\.png' is outside the folder of images"),
        (["/etc/a.png"], r"line 1: '/etc/a\.png' is outside the folder of images"),
        (["sub/../../a.png"], r"line 1: 'sub/\.\./\.\./a\.png' is outside the folder of images"),
        ([None], r"line 1: the field `file` must name the image; this record has none"),
        ([7], r"this record has 7"),
    ],
)
def test_mappings_that_do_not_fit(tmp_path, lines, said):
    folder = paint(tmp_path / "in", {"a.png": 1, "b.png": 2})
    records = [{"prompt": "x"} | ({"file": name} if name is not None else {}) for name in lines]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(ValueError, match=said):
        match(folder, mapping=str(tmp_path / "m.jsonl"))


def test_images_that_carry_their_prompts(tmp_path):
    folder = tmp_path / "in"
    for i, prompt in enumerate(["one", "two"]):
        save_png(torch.rand(3, 8, 8), folder / f"{i}.png", prompt, {"seed": i})
    paint(folder, {"grid.png": 9})
    found = match(folder)
    assert [(item.name, item.prompt) for item in found.items] == [("0.png", "one"), ("1.png", "two")]
    assert "grid.png left out" in found.notes[0]
    (tmp_path / "p.txt").write_text("x\ny\n")  # the overview is no picture of the prompts' either
    assert [item.prompt for item in match(folder, str(tmp_path / "p.txt")).items] == ["x", "y"]
    save_png(
        torch.rand(3, 8, 8), folder / "other.png", '{"3": {"class_type": "KSampler"}}'
    )  # ComfyUI's field
    with pytest.raises(
        ValueError, match=r"1 of 3 images .* contain no prompt that g2rpo wrote: other\.png; give"
    ):
        match(folder)


def test_leftovers_of_another_model_are_reported(tmp_path):
    """As `sample` leaves them that made fewer images into the same folder than the call before."""
    for i in range(5):
        save_png(torch.rand(3, 8, 8), tmp_path / f"{i}.png", "x", {"model": "old" if i > 1 else "new"})
    found = match(tmp_path)
    assert len(found.items) == 5
    said = "2 by new (0.png …), 3 by old (2.png …); the means are over all of them"
    assert found.notes == [f"note: the folder contains images of 2 models: {said}"]
    for i in range(2, 5):
        (tmp_path / f"{i}.png").unlink()
    assert match(tmp_path).notes == []


def test_a_picture_called_grid_is_one_where_no_other_carries_a_prompt(tmp_path):
    folder = paint(tmp_path / "in", {"grid.png": 1, "z.png": 2})
    (tmp_path / "p.txt").write_text("x\ny\n")
    assert [item.name for item in match(folder, str(tmp_path / "p.txt")).items] == ["grid.png", "z.png"]


# Pixels.


def png_of_16_bit_colour(path, pixels):
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0))]
    chunks += [(b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    data = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(data))


def test_kinds_of_files_become_the_same_pixels(tmp_path):
    grey = np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6)
    rgb = np.stack([grey] * 3, -1)
    picture = Image.fromarray(rgb)
    alpha = picture.copy()
    alpha.putalpha(255)
    picture.save(tmp_path / "8.png")
    alpha.save(tmp_path / "alpha.png")
    picture.quantize(256).save(tmp_path / "palette.png")
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "grey16.png")
    png_of_16_bit_colour(tmp_path / "rgb16.png", rgb.astype(np.uint16) * 257)
    picture.save(tmp_path / "lossless.webp", lossless=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side: shown after a quarter turn clockwise
    picture.rotate(90, expand=True).save(tmp_path / "turned.webp", lossless=True, exif=exif)
    picture.rotate(90, expand=True).save(tmp_path / "turned.png", exif=exif)
    picture.save(tmp_path / "camera.jpg", "MPO", save_all=True, append_images=[picture], quality=100)
    assert size_of(tmp_path / "camera.jpg") == (6, 4)
    assert (read_pixels(tmp_path / "camera.jpg") * 255 - torch.from_numpy(grey)).abs().max() < 12
    (tmp_path / "camera.jpg").unlink()
    expected = torch.from_numpy(rgb).permute(2, 0, 1).float() / 255
    files = sorted(tmp_path.iterdir())
    assert len(files) == 9
    for file in files:
        assert size_of(file) == (6, 4), file.name
        assert torch.equal(read_pixels(file), expected), file.name
    picture.resize((60, 40)).save(tmp_path / "photo.jpg", quality=95)
    there = read_pixels(tmp_path / "photo.jpg")
    assert there.shape == (3, 40, 60) and (there.mean() - expected.mean()).abs() < 0.01


def test_transparency_lies_on_white(tmp_path):
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_pixels(tmp_path / "clear.png").unique().tolist() == [1]


def broken_files(folder):
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "good.png")
    (folder / "text.png").write_text("hello")
    (folder / "empty.jpg").write_bytes(b"")
    frames = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in (0, 99)]
    frames[0].save(folder / "moving.webp", save_all=True, append_images=frames[1:], lossless=True)


def test_names_are_matched_as_they_are_written(tmp_path):
    folder = paint(tmp_path / "in", {" a.png": 1, "b.png": 2, "\tc.PNG": 3})
    (folder / "b.png").rename(folder / "b.png ")
    names = [" a.png", "\tc.PNG", "b.png ", "A.png", "c.PNG"]
    (tmp_path / "m.jsonl").write_text("\n".join(json.dumps({"file": name, "prompt": "x"}) for name in names))
    found = match(folder, mapping=str(tmp_path / "m.jsonl"))
    assert [item.name for item in found.items] == names and set(found.sizes) == {
        " a.png",
        "\tc.PNG",
        "b.png ",
    }
    assert "a similar file is ' a.png'" in found.unreadable["A.png"]
    assert "a similar file is '\\tc.PNG', which differs from" in found.unreadable["c.PNG"]


MODES = {
    "cmyk.jpg": (("CMYK", "JPEG"), "mode CMYK (ink amounts"),
    "float.png": (("F", "TIFF"), "mode F (floating-point values"),
    "int32.png": (("I", "TIFF"), "mode I (32-bit values"),
    "ycbcr.png": (("YCbCr", "TIFF"), "mode YCbCr"),
    "lab.webp": (("LAB", "TIFF"), "mode LAB"),
    "portable.png": (("RGB", "PPM"), "its content is none of PNG, JPEG"),
    "postscript.png": (("RGB", "EPS"), "its content is none of PNG, JPEG"),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_without_defined_colours_are_refused_by_name(tmp_path, name):
    (mode, format), said = MODES[name]
    image = Image.new(mode, (4, 4)) if mode == "LAB" else Image.new("RGB", (4, 4), (9, 8, 7)).convert(mode)
    image.save(tmp_path / name, format)
    readers = (size_of, read_pixels)
    if mode == "YCbCr" and Image.open(tmp_path / name).mode == "RGB":
        # Pillow 12 calls it RGB and cannot decode it.
        readers, said = (read_pixels,), "truncated"
    for read in readers:
        with pytest.raises(ValueError, match=r"cannot be read as an image: ") as caught:
            read(tmp_path / name)
        assert said in str(caught.value) and name in str(caught.value)


def test_16_bit_grey_with_transparency_is_refused_and_8_bit_lies_on_white(tmp_path):
    grey = np.full((2, 2), 40, dtype=np.uint8)
    Image.fromarray(grey.astype(np.uint16)).save(tmp_path / "16.png", transparency=40)
    with pytest.raises(ValueError, match="mode I;16 with a transparent value is not supported"):
        read_pixels(tmp_path / "16.png")
    Image.fromarray(grey).save(tmp_path / "8.png", transparency=40)
    assert read_pixels(tmp_path / "8.png").unique().tolist() == [1]


def test_damage_is_found_even_if_a_reward_tolerates_truncation(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    data = {}
    for name in ("a.png", "a.jpg", "a.webp"):
        Image.fromarray(noise).save(tmp_path / name)
        data[name] = (tmp_path / name).read_bytes()
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    for name, content in data.items():
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match="damaged or cut off"):
            read_pixels(tmp_path / name)
    flipped = bytearray(data["a.png"])
    flipped[flipped.index(b"IDAT") + 30] ^= 1
    for content in (bytes(flipped), data["a.png"][:-12]):  # a wrong checksum; no end
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(ValueError, match="damaged or cut off"):
            read_pixels(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["text.png", "empty.jpg", "moving.webp"])
def test_where_no_file_can_be_read_no_model_is_loaded(tmp_path, monkeypatch, name):
    broken_files(tmp_path / "in")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loads.py").write_text("raise RuntimeError('a model was loaded')")
    (tmp_path / "m.jsonl").write_text(
        f'{{"file": "gone.png", "prompt": "x"}}\n{{"file": "{name}", "prompt": "y"}}'
    )
    with pytest.raises(ValueError, match=rf"no file in .*\n2 of 2 .*\n  gone.png: .*\n  {name}: "):
        score(tmp_path / "in", ["loads:score"], mapping=str(tmp_path / "m.jsonl"), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
