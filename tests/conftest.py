"""Settings of the test run, so that a test does not depend on how it was started."""

import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# Two busy cores: the time of one example says nothing. The same examples each time: a failure is a finding.
settings.register_profile(
    "g2rpo", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("g2rpo")


def pytest_configure() -> None:
    """A shell starts background jobs of a script with SIGINT ignored, and Python then raises no interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def no_secrets_of_other_modules():
    """Messages hide the secrets that a process has seen; those of one module are words of another."""
    yield
    if (secrets := sys.modules.get("g2rpo.runtime.secrets")) is not None:
        secrets._remembered.clear()
