"""Files with a planted payload: a pickle that creates a marker file if it is ever unpickled."""

import pickle
from pathlib import Path

import torch
from typer.testing import CliRunner

from g2rpo.cli.app import app


class Payload:
    """Creates the file `marker` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


def pickled(marker: Path, protocol: int = 2) -> bytes:
    """A pickle of a mapping to a tensor and the payload."""
    return pickle.dumps({"weight": [1.0], "more": Payload(marker)}, protocol)


def write_torch_file(path: Path, marker: Path) -> Path:
    """A file of torch.save, which is a zip with a pickle, with the payload beside a tensor."""
    torch.save({"weight": torch.zeros(2), "more": Payload(marker)}, path)
    return path


def refused(*words: str) -> str:
    """Runs a command that must end with one message and exit code 1 or 2, and returns its output."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code in (1, 2), (words, result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return " ".join(result.output.split())
