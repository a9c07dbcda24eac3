"""The register of the twelfth set."""

from __future__ import annotations

from functools import partial

from gpukit.validation.new_kernels import case as form

CASES: dict[str, form.Case] = {}
case = partial(form.case, into=CASES)
