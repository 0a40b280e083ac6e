"""`python -m tests.faults`; see campaign.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.campaign import main

if __name__ == "__main__":
    sys.exit(main())
