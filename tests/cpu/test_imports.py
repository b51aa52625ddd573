"""The shape of the house, read from the sources: imports run one way, `__init__.py` files are docstrings, the top
level is fixed.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The rooms in the order in which they stand on one another: a module may import its own room and those before it. A
# module belongs to the longest name that is a prefix of its own, so a single file can be a room.
ORDER = [
    "infer.kernels",
    "drafters.base",
    "drafters.targets",
    "drafters.eagle3_ssd",
    "drafters.formats",
    "drafters",
    "data.manifest",
    "data.chat",
    "data",
    # serving
    "infer.config",
    "infer.devices",
    "infer.recipe",
    "infer.tracing",
    "infer.text",
    "infer.ipc",
    "infer.draft",
    "infer.engine",
    "infer.evaluation",
    "infer.server",
    "infer",
    # a target writes a corpus through the engine
    "data.synthesis",
    "data.synthesize",
    # training
    "train.config",
    "train.monitor",
    "train.ops",
    "train.target_features",
    "train.objective",
    "train.validation",
    "train.costs",
    "train.report",
    "train.trainer.state",
    "train.parallel",
    "train.trainer",
    "train",
]
SERVING = {room for room in ORDER if room.startswith("infer") and room != "infer.kernels"} | {
    "data.synthesis",
    "data.synthesize",
}
MAY_IMPORT = {room: set(ORDER[:place]) for place, room in enumerate(ORDER)}
for room in ORDER:
    if room.startswith("train"):
        MAY_IMPORT[room] -= SERVING
PROJECT = {"data", "drafters", "infer", "train", "tests"}
TOP_LEVEL_FOLDERS = {".ci", ".github", "data", "drafters", "infer", "recipes", "tests", "train"}


def module_name(path: Path) -> str:
    """`infer/engine/verify.py` -> `infer.engine.verify`; a package's `__init__.py` -> the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for folder in ("data", "drafters", "infer", "train")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def imported_names(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Each name that an import anywhere in `source` may load: for `from a import b` it is `a.b`, whether b is a module
    or not.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str | None:
    """The room that a dotted name lies in, or None outside the project."""
    rooms = [room for room in {*MAY_IMPORT, "tests"} if name == room or name.startswith(room + ".")]
    return max(rooms, key=len, default=None)


def upward_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of `source` that its room does not allow."""
    room = room_of(module)
    assert room is not None, f"{module} lies in no room of {sorted(MAY_IMPORT)}"
    allowed = MAY_IMPORT[room] | {room, None}
    return [name for name in imported_names(source, module, is_package) if room_of(name) not in allowed]


@pytest.mark.parametrize(
    ("module", "source", "bad"),
    [
        (
            "infer.kernels.sampling.accept",
            "from drafters.base.errors import UserError",
            ["drafters.base.errors.UserError"],
        ),
        ("infer.kernels.sampling.accept", "from infer import engine", ["infer.engine"]),
        ("infer.kernels.sampling.accept", "from ... import engine", ["infer.engine"]),
        ("infer.kernels.sampling.accept", "from .sample import draw\nimport torch", []),
        ("drafters.targets.target", "def f():\n    import data.chat.render", ["data.chat.render"]),
        ("drafters.targets.target", "from infer import kernels\nfrom infer.kernels.sampling.sample import draw", []),
        ("data.chat.render", "from drafters.targets.target import load_target", []),
        ("data.chat.render", "from train.objective.unroll import unroll", ["train.objective.unroll.unroll"]),
        ("train.objective.unroll", "from infer.engine.engine import Engine", ["infer.engine.engine.Engine"]),
        ("infer.engine.engine", "import train.objective.unroll as u", ["train.objective.unroll"]),
        ("infer.engine.engine", "from tests.tiny import tiny_model", ["tests.tiny.tiny_model"]),
        ("infer.engine.engine", "import inference, database, training", []),
    ],
)
def test_the_check_finds_upward_imports(module: str, source: str, bad: list[str]) -> None:
    assert upward_imports(source, module) == bad


@pytest.mark.parametrize("module", SOURCES)
def test_imports_run_one_way(module: str) -> None:
    path = SOURCES[module]
    bad = upward_imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    room = room_of(module)
    assert room is not None, module
    assert not bad, f"{module} imports {bad}; {room} may import only {sorted(MAY_IMPORT[room])}"


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in SOURCES.items():
        names = imported_names(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
        graph[module] = {name if name in SOURCES else name.rpartition(".")[0] for name in names} & SOURCES.keys() - {
            module
        }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_every_package_has_an_init_that_is_a_docstring() -> None:
    for folder in {path.parent for path in SOURCES.values()}:
        init = folder / "__init__.py"
        assert init.is_file(), f"{folder.relative_to(ROOT)} has no __init__.py"
        body = ast.parse(init.read_text(encoding="utf-8")).body
        is_docstring = len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        assert is_docstring, f"{init.relative_to(ROOT)} holds more than a docstring"


def tracked_files() -> list[Path]:
    """The files that git knows; skips the test in a copy that is no git checkout."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [Path(name) for name in listing.stdout.split("\0") if name]


def test_top_level_is_fixed() -> None:
    folders = {path.parts[0] for path in tracked_files() if len(path.parts) > 1}
    assert folders <= TOP_LEVEL_FOLDERS, f"new folders at the top level: {sorted(folders - TOP_LEVEL_FOLDERS)}"


def test_the_project_does_not_refer_to_files_beside_it() -> None:
    text_suffixes = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ""}
    outside = "../" + "shared"
    for path in tracked_files():
        if path.parts[0] != "tests" and path.suffix in text_suffixes and (ROOT / path).is_file():
            assert outside not in (ROOT / path).read_text(encoding="utf-8"), f"{path} refers to {outside}"


def test_the_installed_packages_are_all_there_are() -> None:
    """A package that pyproject.toml does not list would be missing from an installed copy."""
    import tomllib

    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    )
    present = {module_name(path) for path in SOURCES.values() if path.name == "__init__.py"}
    assert listed == present
