"""Install the interpreter layer as soon as somebody imports Triton, without importing Triton now.

A notebook cell that launches a kernel of its own needs the layer as much as a check does: without it a wrong index
ends the notebook's process. Importing gpukit must stay cheap, so this waits for Triton's import. Standard library only.
"""

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable

LAYER = "gpukit.simulator.interpreter.layer"


class _After:
    """Calls `then` once, when the module called `name` has been imported."""

    def __init__(self, name: str, then: Callable[[], None]):
        self.name, self.then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            # Still there: who asks may only want to know whether there is such a module, as transformers does.
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None and "exec_module" not in vars(spec.loader):
            load = spec.loader.exec_module

            def exec_module(module):
                if module.__name__ != self.name:  # one loader may serve several modules: pytest's does
                    load(module)
                    return
                del spec.loader.exec_module
                sys.meta_path.remove(self)
                load(module)
                self.then()

            spec.loader.exec_module = exec_module
        return spec


def _load() -> None:
    """Triton is there. If it is the layer that imports it just now, this changes nothing: `_install` comes at its end."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module(LAYER)


def _install() -> None:
    """The layer is there."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        try:
            sys.modules[LAYER].install()
        except RuntimeError as error:  # an unknown Triton: whoever imports it may not need the layer
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def arm() -> None:
    """From now on importing Triton in interpreter mode installs the layer; if Triton is loaded, it is installed now."""
    if LAYER not in sys.modules and not any(isinstance(finder, _After) for finder in sys.meta_path):
        sys.meta_path[:0] = [_After("triton", _load), _After(LAYER, _install)]
        if "triton" in sys.modules:
            _load()
