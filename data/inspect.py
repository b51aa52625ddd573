"""`python -m data.inspect`: what training would see of a data set. The work is done in `data.inspection`."""

from __future__ import annotations

import sys

if __name__ == "inspect":  # data/ itself is on the path, and somebody wants the standard library's module of this name
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

    sys.exit(run_command(main))
