"""`python3 DIRECTORY run ...` and `python3 DIRECTORY probe NAME`, wherever the directory was copied
to."""

import importlib
import importlib.util
import sys
from pathlib import Path

if __package__:
    _package = __package__
else:
    _package = "drillyard_acceptance"
    _here = Path(__file__).resolve().parent
    _spec = importlib.util.spec_from_file_location(
        _package, _here / "__init__.py", submodule_search_locations=[str(_here)]
    )
    assert _spec is not None and _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_package] = _module
    _spec.loader.exec_module(_module)
    # Its files must not shadow modules of the standard library.
    sys.path.pop(0)

sys.exit(importlib.import_module(f"{_package}.program").main())
