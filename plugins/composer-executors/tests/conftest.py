"""Where fixtures of services are found: one file per service in `services/`, imported by the tests that use it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "services"))
