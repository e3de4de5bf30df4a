"""`python3 DIRECTORY ...`, wherever the directory was copied to, and `python -m
drillyard.launch.agent ...`. Other programs that travel as a directory of source files have this
file, too: it calls `main` of their package.

When Python runs a directory, this file is in no package. So the directory is loaded as one under a
name of its own, which needs neither a certain directory name nor a change of the search path.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

if __package__:
    _package = importlib.import_module(__package__)
else:
    _here = Path(__file__).resolve().parent
    _spec = importlib.util.spec_from_file_location(
        "drillyard_program", _here / "__init__.py", submodule_search_locations=[str(_here)]
    )
    assert _spec is not None and _spec.loader is not None
    _package = importlib.util.module_from_spec(_spec)
    sys.modules[_package.__name__] = _package
    _spec.loader.exec_module(_package)
    # Its files must not shadow modules of the standard library.
    sys.path.pop(0)

sys.exit(_package.main())
