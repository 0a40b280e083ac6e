"""The tools that protect the numbers: they find what differs, and their cases name every setting."""

import dataclasses
import json
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file
from support.methods import GRPO_METHODS

from g2rpo.config.settings import Settings

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import compare_checkouts
from checkouts import cases
from checkouts.difference import compare_folders
from checkouts.runs import digest, package_digest
from count_statements import count_packages, count_statements, table

LINE = {"step": 3, "nfe": 46, "loss": -0.1, "grad_norm": float("nan"), "seconds": 1.5, "seconds_update": 0.5}
ALPHA = 6.0


def save_png(path, pixels, text="a cat"):
    fields = PngImagePlugin.PngInfo()
    fields.add_itxt("prompt", text)
    Image.fromarray(pixels).save(path, pnginfo=fields)


def save_adapters(path, scale):
    """Rank 2; `scale` of alpha / rank is in B, the rest in the metadata."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 5), torch.randn(7, 2)
    alpha = ALPHA / scale
    save_file(
        {"x.lora_A.weight": a, "x.lora_B.weight": b * scale},
        path,
        {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": alpha, "transformer.r": 2})},
    )


@pytest.fixture
def folders(tmp_path):
    """Two equal folders with one file of each kind; times and the run folder differ."""
    for name in ("base", "new"):
        folder = tmp_path / name
        (folder / "run/samples").mkdir(parents=True)
        (folder / "cache").mkdir()
        times = {"seconds": len(name) * 1.0, "peak_memory_gb": len(name) / 10}
        (folder / "run/metrics.jsonl").write_text(json.dumps({"step": 0, "eval/a": 0.5}) + "\n"
                                                  + json.dumps(LINE | times) + "\n")  # fmt: skip
        (folder / "run/config.toml").write_text(f'out = "{name}"\nlr = 0.1\n')
        (folder / "run/comparison.md").write_text("| a | 0.12 |\n")
        (folder / "run/latest").write_text("step_000003\n")
        (folder / f"run/events.out.tfevents.{name}").write_text(name)
        save_file({"w": torch.arange(4.0), "nan": torch.tensor(float("nan"))}, folder / "run/x.safetensors")
        save_file({"w": torch.zeros(3, dtype=torch.bfloat16)}, folder / "cache/y.safetensors")
        save_adapters(folder / "run/lora.safetensors", 1.0 if name == "base" else ALPHA / 2)
        save_png(folder / "run/samples/0000.png", np.full((4, 5, 3), 7, dtype=np.uint8))
    return tmp_path / "base", tmp_path / "new"


def differences(folders, **options):
    return compare_folders(*folders, **options).differences


def test_equal_folders_are_equal(folders):
    found = compare_folders(*folders)
    assert found.differences == []
    # step, eval/a; step, nfe, loss, grad_norm. Tensors: w, nan, the product of the adapters.
    assert found.counts == {"iterations": 1, "metrics": 6, "tensors": 3, "images": 1, "files": 4}


def test_the_last_bit_of_a_metric_is_found(folders):
    file = folders[1] / "run/metrics.jsonl"
    file.write_text(file.read_text().replace("-0.1,", f"{np.nextafter(-0.1, 0)!r},".replace("np.float64", "")
                                             .replace("(", "").replace(")", "")))  # fmt: skip
    [found] = differences(folders)
    assert found == "run/metrics.jsonl, step 3, loss: BASE -0.1, NEW -0.09999999999999999"


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('"nfe": 46', '"nfe": 46.0', "nfe: BASE 46, NEW 46.0"),
        ('"nfe": 46, ', "", "nfe is missing in NEW"),
        ('"nfe": 46', '"nfe": 46, "more": 1', "more is only in NEW"),
        ('{"step": 0, "eval/a": 0.5}\n', "", "BASE 2 lines, NEW 1 lines"),
    ],
)
def test_other_changes_of_metrics_are_found(folders, old, new, found):
    file = folders[1] / "run/metrics.jsonl"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    assert any(found in one for one in differences(folders))


def test_the_last_bit_of_a_tensor_is_found(folders):
    changed = torch.arange(4.0)
    changed.view(torch.int32)[2] += 1
    save_file({"w": changed, "nan": torch.tensor(float("nan"))}, folders[1] / "run/x.safetensors")
    [found] = differences(folders)
    assert found == (
        "run/x.safetensors, w, 1 of 4 numbers, first [2]: BASE 2.0, NEW 2.000000238418579"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"w": torch.arange(4.0)}, "nan is missing in NEW"),
        ({"w": torch.arange(4.0).double(), "nan": torch.tensor(float("nan"))}, "torch.float64 [4]"),
        ({"w": -torch.arange(4.0).neg().abs(), "nan": torch.tensor(float("nan"))}, "first [0]"),  # -0.0
    ],
)
def test_other_changes_of_tensors_are_found(folders, tensors, found):
    save_file(tensors, folders[1] / "run/x.safetensors")
    assert found in "\n".join(differences(folders))


def test_adapters_are_compared_as_products_to_a_tolerance(folders):
    file = folders[1] / "run/lora.safetensors"
    save_adapters(file, 1.0 + 1e-5)
    assert differences(folders) == []  # alpha / rank in B or in the metadata
    torch.manual_seed(0)
    a, b = torch.randn(2, 5), torch.randn(7, 2)
    save_file({"x.lora_A.weight": a, "x.lora_B.weight": b * (ALPHA / 2) * (1 + 1e-5)}, file)
    [found] = differences(folders)
    assert "run/lora.safetensors, x" in found and "relative difference 1.0" in found


def test_adapters_of_a_checkpoint_are_compared_bit_for_bit(folders):
    for folder, value in zip(folders, (1.0, 1.0000001), strict=True):
        adapters = {"module.x.lora_A.default.weight": torch.tensor([value])}
        save_file(adapters, folder / "run__checkpoints__step_000003.safetensors")
    [found] = differences(folders)
    assert "step_000003.safetensors, module.x.lora_A.default.weight, 1 of 1 numbers" in found
    for folder in folders:
        save_file({}, folder / "run__checkpoints__step_000003.safetensors")
    assert "nothing is shown" in differences(folders)[0]


def test_the_last_bit_of_a_pixel_and_the_text_of_an_image_are_found(folders):
    pixels = np.full((4, 5, 3), 7, dtype=np.uint8)
    save_png(folders[1] / "run/samples/0000.png", pixels, "a dog")
    assert "equal pixels but other bytes" in differences(folders)[0]
    pixels[1, 2, 0] = 6
    save_png(folders[1] / "run/samples/0000.png", pixels)
    assert differences(folders) == ["run/samples/0000.png, pixel (1, 2, 0): BASE 7, NEW 6"]


def test_a_missing_file_and_an_additional_one_are_found(folders):
    (folders[1] / "run/samples/0000.png").unlink()
    (folders[1] / "run/groups.jsonl").write_text("{}\n")
    assert sorted(differences(folders)) == [
        "files: run/groups.jsonl is only in NEW",
        "files: run/samples/0000.png is missing in NEW",
    ]
    assert differences(folders, additional=True) == ["files: run/samples/0000.png is missing in NEW"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run/config.toml", 'out = "new"\nlr = 0.2\n'),
        ("run/comparison.md", "| b | 0.13 |\n"),
        ("run/latest", ""),
    ],
)
def test_changed_settings_tables_and_other_files_are_found(folders, name, text):
    (folders[1] / name).write_text(text)
    assert len(differences(folders)) == 1


def words():
    return " ".join(
        [cases.RECIPE.replace(" = ", "="), *(word for case in cases.all_cases() for word in case.words)]
    )


def choices():
    """Every value of every setting that is a choice, as `key=value`."""
    classes = (Settings, *GRPO_METHODS.values())
    hints = [hint for cls in classes for hint in typing.get_type_hints(cls).items()]
    for name, annotation in hints:
        if typing.get_origin(annotation) is typing.ClassVar:
            continue
        parts = typing.get_args(annotation) or (annotation,)
        for part in (annotation, *parts):
            if typing.get_origin(part) is typing.Literal:
                yield from (f"{name}={value}" for value in typing.get_args(part))
            if part is bool:
                yield from (f"{name}={value}" for value in ("true", "false"))


def test_the_cases_name_every_setting_and_every_value_of_a_choice():
    told = words()
    fields = [field for cls in GRPO_METHODS.values() for field in dataclasses.fields(cls)]
    for name in (*Settings.model_fields, *(field.name for field in fields)):
        assert f"{name}=" in told or name in cases.UNVARIED, name
    values = set(choices())
    assert {"update=per_step", "noise=orthogonal", "skip_flat=true"} <= values
    defaults = {f"{name}={str(field.default).lower()}" for name, field in Settings.model_fields.items()}
    defaults |= {f"{field.name}={str(field.default).lower()}" for field in fields}
    unvaried = {value for value in values if value.partition("=")[0] in cases.UNVARIED}
    assert sorted(value for value in values - defaults - unvaried if value not in told) == []


def test_the_cases_can_be_run_in_order():
    known: set[str] = set()
    for case in cases.all_cases():
        assert case.name not in known and set(case.needs()) <= known, case.name
        known.add(case.name)
    compared, needed = cases.selected(["lora_resumed"])
    assert [case.name for case in compared] == ["lora_resumed"]
    assert [case.name for case in needed] == ["lora_whole", "lora_begun", "lora_resumed"]
    with pytest.raises(ValueError, match="no case 'nothing'"):
        cases.selected(["nothing"])


COMMAND = """
import json, pathlib, sys
out = pathlib.Path("run")
out.mkdir()
(out / "metrics.jsonl").write_text(json.dumps({"step": 1, "nfe": 4, "loss": LOSS}) + "\\n")
print("in", sys.argv[1])
sys.exit(CODE)
"""


def checkout(folder, loss="0.1", code="0"):
    """A checkout whose command writes one line of metrics."""
    (folder / "g2rpo").mkdir(parents=True)
    (folder / "g2rpo/__init__.py").touch()
    (folder / "g2rpo/__main__.py").write_text(COMMAND.replace("LOSS", loss).replace("CODE", code))
    return str(folder)


def test_the_command_says_what_differs_and_keeps_the_results_of_base(tmp_path, capsys):
    base, same = checkout(tmp_path / "base"), checkout(tmp_path / "same")
    other = checkout(tmp_path / "other", "0.10000000000000002")
    failing = checkout(tmp_path / "failing", code="1")
    options = ["--only", "demo", "--work", str(tmp_path / "work")]
    assert compare_checkouts.main([base, same, *options]) == 0
    assert "EQUAL: 1 cases" in capsys.readouterr().out
    [ran] = (tmp_path / "work/base").glob("*/demo-*/outcome.json")
    before = ran.stat().st_mtime_ns
    assert compare_checkouts.main([base, other, *options]) == 1
    told = capsys.readouterr().out
    assert "run/metrics.jsonl, step 1, loss: BASE 0.1, NEW 0.10000000000000002" in told
    assert "DIFFERENT: 1 of 1 cases differ" in told and ran.stat().st_mtime_ns == before
    assert compare_checkouts.main([base, failing, *options]) == 1
    assert "NEW: exit code 1; the output ends with\n    in train" in capsys.readouterr().out
    assert compare_checkouts.main([failing, failing, *options]) == 1  # equal, but it shows nothing


def test_results_of_base_are_kept_by_package_and_case(tmp_path):
    (tmp_path / "g2rpo").mkdir()
    (tmp_path / "g2rpo/__init__.py").write_text("a = 1\n")
    first = package_digest(tmp_path)
    assert package_digest(tmp_path) == first
    (tmp_path / "g2rpo/__init__.py").write_text("a = 2\n")
    assert package_digest(tmp_path) != first
    assert len({digest(case) for case in cases.all_cases()}) == len(cases.all_cases())
    with pytest.raises(ValueError, match="holds no package g2rpo"):
        package_digest(tmp_path / "g2rpo")


def test_statements_are_counted_without_docstrings(tmp_path):
    source = '"""Doc."""\nimport os\nclass A:\n    """Doc."""\n    x: int = 1\n    """Doc."""\n'
    source += "    def f(self): return (\n  1)\n"
    assert count_statements(source) == 5  # import, class, x, def, return
    for folder, text in (("old", "a = 1\n"), ("new", "a = 1; b = 2\n")):
        (tmp_path / folder / "g2rpo/flow").mkdir(parents=True)
        (tmp_path / folder / "g2rpo/__init__.py").write_text("'''Doc.'''\n")
        (tmp_path / folder / "g2rpo/flow/sde.py").write_text(text)
    counts = count_packages(tmp_path / "new")
    assert counts == {"g2rpo": 0, "flow": 2}
    assert table(counts, count_packages(tmp_path / "old"))[-1].split() == ["total", "1", "2", "+1", "+100.0%"]
