"""Install the interpreter layer as soon as somebody imports Triton, without importing Triton now.

A notebook cell that launches a kernel of its own needs the layer as much as a check does: without it a wrong index
ends the notebook's process. Importing gpukit must stay cheap, so this waits for Triton's import. Standard library only.
"""

import importlib.abc
import importlib.util
import os
import sys
import warnings


class _AfterTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "triton":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                _install()

            spec.loader.exec_module = exec_module
        return spec


def _install() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter = importlib.import_module("gpukit.simulator.interpreter.layer")
    if not hasattr(interpreter, "install"):  # it is what imports Triton just now, so it does so at its own end
        interpreter.wanted = True
        return
    try:
        interpreter.install()
    except RuntimeError as error:  # an unknown Triton: whoever imports it may not need the layer
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def arm() -> None:
    """From now on importing Triton in interpreter mode installs the layer; if Triton is loaded, it is installed now."""
    if "triton" in sys.modules:
        _install()
    elif not any(isinstance(finder, _AfterTriton) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTriton())
