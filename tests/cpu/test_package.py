"""An installed copy is complete: the wheel holds each module and the data that ships."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_wheel_holds_every_tracked_file_of_the_packages(tmp_path: Path) -> None:
    list_files = ["git", "ls-files", "-z", "data", "drafters", "infer", "train"]
    listing = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    # Built from a copy: a build folder in the checkout would carry files over from one build to the next.
    source = tmp_path / "source"
    tracked = [name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    for name in [*tracked, "pyproject.toml", "README.md", "LICENSE"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
    ]
    subprocess.run([*build, str(source)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("ssd_drafters-*.whl")
    missing = set(tracked) - set(zipfile.ZipFile(wheel).namelist())
    assert not missing, f"not in the wheel: {sorted(missing)}"
