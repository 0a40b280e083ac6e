"""Readers return something usable or raise a ValueError that names the file, for any input."""

import pytest

from faults.properties import PROPERTIES


@pytest.mark.parametrize("name", PROPERTIES)
def test_any_input(name):
    PROPERTIES[name]()
