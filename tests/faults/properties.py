"""Properties of readers for any input (hypothesis): they return something usable or raise a ValueError.

Each takes a folder to write into. `test_properties.py` runs them with a few examples, the campaign with more.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faults.jobs import Case, Job, Result
from faults.outcomes import OK, SILENT, TRACEBACK, Outcome
from faults.runs import Cases, World

TEXTS = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.just("prompt"), inner, max_size=3),
    max_leaves=6,
)


def _read(name: str, content: bytes) -> None:
    from g2rpo.data.prompts import read_prompts

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            prompts, _ = read_prompts(path)
        except ValueError as error:
            assert name in str(error), f"the file is not named: {error}"
            return
    for prompt in prompts:
        prompt.text.encode("utf-8")
        assert "\0" not in prompt.text and prompt.text.strip() == prompt.text != ""


@given(st.binary(max_size=60) | TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")))
def any_lines(content: bytes) -> None:
    """A txt or csv of any bytes has usable prompts or is refused by its name."""
    _read("any.txt", content)
    _read("any.csv", b"prompt,other\n" + content)


@given(st.lists(JSON, max_size=4))
def any_json_lines(records: list[object]) -> None:
    """So does a jsonl, and a json, of any values."""
    _read("any.jsonl", "\n".join(json.dumps(record) for record in records).encode())
    _read("any.json", json.dumps(records).encode())


@cache
def _fields() -> list[str]:
    from g2rpo.config.settings import Settings

    return sorted(name for name in Settings.model_fields if name not in ("family", "algorithm", "weights"))


@given(st.data())
def any_setting(data: st.DataObject) -> None:
    """A setting of any value is accepted with that value's type or refused by its key."""
    from g2rpo.config.load import load_settings

    key = data.draw(st.sampled_from(_fields()))
    value = data.draw(
        st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats()
        | TEXTS
        | st.lists(st.integers() | st.booleans() | TEXTS, max_size=3)
        | st.dictionaries(TEXTS, st.floats() | st.booleans(), max_size=2)
    )
    try:
        loaded = load_settings("tiny", {key: value})
    except ValueError as error:
        named = [key, *(["rewards"] if key.endswith("rewards") else [])]
        if key == "algorithm_options" and isinstance(value, dict):  # the message is about the options in it
            named += [name if name.isidentifier() else repr(name) for name in value]
        assert any(name in str(error) for name in named), f"{key} is not named: {error}"
        return
    kept = getattr(loaded, key, None)
    if isinstance(value, bool):
        assert not isinstance(kept, int | float) or isinstance(kept, bool), f"{key}={value} became {kept}"


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def any_recipe(text: str) -> None:
    """A recipe of any text is read or refused by its name."""
    from g2rpo.config.load import load_settings

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.toml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            load_settings(path)
        except ValueError as error:
            assert "any.toml" in str(error), f"the recipe is not named: {error}"


@cache
def _adapter() -> bytes:
    import random

    from faults.bad_adapters import good, save

    with tempfile.TemporaryDirectory() as folder:
        save(good(random.Random(0)), Path(folder) / "a.safetensors")
        return (Path(folder) / "a.safetensors").read_bytes()


@given(st.data())
def any_header(data: st.DataObject) -> None:
    """An adapter with any byte of its header changed, or cut off anywhere, is read or refused by its name."""
    from g2rpo.inference.names import check_model

    content = bytearray(_adapter())
    length = struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    end = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.safetensors"
        path.write_bytes(content[:end])
        try:
            check_model(str(path), "tiny")
        except ValueError as error:
            assert "any.safetensors" in str(error), f"the file is not named: {error}"


PROPERTIES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (any_lines, any_json_lines, any_setting, any_recipe, any_header)
}


def property_cases(world: World, count: int) -> Cases:
    """Each property once, with so many examples."""
    for number, name in enumerate(PROPERTIES):
        yield f"properties:{number}", _of(world, f"properties:{number}", name, count)


def _of(world: World, case: str, name: str, count: int) -> Callable[[Path], Case]:
    def run(folder: Path) -> Case:
        def examples() -> None:
            import hypothesis

            checks = list(HealthCheck)
            own = settings(max_examples=count, deadline=None, database=None, suppress_health_check=checks)
            hypothesis.seed(world.seed)(own(PROPERTIES[name]))()

        result: Result = yield Job([name], folder, function=examples, timeout=900)
        kind = f"{name}, {count} examples"
        if result.code == 0:
            return Outcome(case, kind, OK)
        verdict = SILENT if "AssertionError" in result.text else TRACEBACK
        return Outcome(case, kind, verdict, f"{result.traceback} {result.text[-600:]}")

    return run
