"""Every test of this folder runs for each family of support/contract.py."""

from pathlib import Path

import pytest
from support.contract import CONTRACTS, Contract


@pytest.fixture(scope="session", params=CONTRACTS)
def contract(request) -> Contract:
    return CONTRACTS[request.param]


@pytest.fixture(scope="session")
def folder(contract, tmp_path_factory) -> Path:
    """A tiny model of the family with random weights, in diffusers layout."""
    return contract.save(tmp_path_factory.mktemp("model") / "base")
