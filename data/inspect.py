"""Former name of the command `python -m data.inspection`, kept for one version; it warns and runs that command.

The old name shadows the standard library's `inspect` wherever data/ itself is on the path, as it is for scripts in
data/. Imported as `inspect`, this file therefore loads the standard library's module in its place.
"""

from __future__ import annotations

import sys

if __name__ == "inspect":
    import sysconfig
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    _spec = PathFinder.find_spec("inspect", [sysconfig.get_paths()["stdlib"]])
    assert _spec is not None and _spec.loader is not None, "the standard library has no module inspect"
    sys.modules["inspect"] = _module = module_from_spec(_spec)
    _spec.loader.exec_module(_module)

if __name__ == "__main__":
    from data.inspection import main
    from drafters.base.errors import run_command

    print(
        "warning: `python -m data.inspect` is now `python -m data.inspection`; the next version drops the old name",
        file=sys.stderr,
    )
    sys.exit(run_command(main))
