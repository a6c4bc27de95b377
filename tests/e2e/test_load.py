"""`make bench-load` on a tiny model: a server of its own, a crowd that leaves when it likes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_is_lost_and_the_result_says_so(tiny: Path, workload: Path, tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    options = {
        "--minutes": "0.04", "--streams": "8", "--max-tokens": "24", "--abort-share": "0.5",
        "--only": "fixed-paced", "--workload": str(workload), "--output": str(file),
        "--serve-options": "--threads 1",
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "benchmarks" / "load.py"), str(tiny)]
    command += [part for pair in options.items() for part in pair]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 lost" in done.stderr
    result = json.loads(file.read_text())
    assert {"kind", "machine", "versions", "revision", "arguments", "date"} <= set(result)
    (run,) = result["runs"]
    counts = run["requests"]
    assert counts["finished"] > 8
    assert counts["aborted"] > 8
    assert counts["sent"] == counts["finished"] + counts["aborted"]
    assert run["asked_again"]["asked"] == run["asked_again"]["identical"] > 5
    assert run["pages_in_use_at_end"] == 0
    assert run["tokens_per_event"] == 1.0  # with --pace
    assert run["drafted_steps_of_requests"] > 0
    assert run["open_files"]["most"] > 0
    assert run["warnings"] == []
