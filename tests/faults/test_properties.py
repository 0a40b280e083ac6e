"""Readers return something usable or raise a ValueError that names the file, for any input."""

import pytest
from hypothesis import settings

from faults.properties import PROPERTIES


@pytest.mark.parametrize("name", PROPERTIES)
def test_any_input(name):
    settings(max_examples=10 if name == "any_header" else 40)(PROPERTIES[name])()
