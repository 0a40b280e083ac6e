"""The table of seeded faults fits the code, so that `tools/seed_faults.py` tests what it says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def checked() -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools" / "seed_faults.py", ROOT, "--side", "new", "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_text_occurs_once_and_each_test_exists():
    done = checked()
    table = (ROOT / "tools" / "seeded_faults.toml").read_text(encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{table.count('[[fault]]')} faults: each text occurs once")
