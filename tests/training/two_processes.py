"""One of the processes that `accelerate launch` starts: trains a student, and writes the loss curve."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from compress.training.processes import is_main
from tests.training.test_loop import trained

if __name__ == "__main__":
    student, teacher, place = map(Path, sys.argv[1:])
    _, history = trained((student, teacher), place)
    if is_main():
        (place / "losses.json").write_text(json.dumps(history.losses))
