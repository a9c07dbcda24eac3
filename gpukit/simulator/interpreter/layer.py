"""Triton's interpreter made safe and right: which of its private names are replaced, and by what.

`install()` changes Triton's interpreter in this process: bf16 is rounded as a GPU rounds it, `@triton.autotune` runs
its first config, Triton 3.6 works with NumPy >= 2.4, every load, store and atomic is checked against the live tensors
before memory is touched (`MemoryFault`), and so are two programs on one address (`RaceFault`) and two threads of one program
(`WarpFault`). `_PATCHES` lists every
private name that this package uses. What is still unlike a GPU: differences_from_a_gpu.md.
"""

import contextlib
import importlib

import numpy as np
import triton

from gpukit.simulator.interpreter import arithmetic, executor, language, memory_ops, shortcuts, type_cache
from gpukit.simulator.interpreter.running import INTERPRETER

SUPPORTED = "3.6 to 3.9"
# (module, name in it, replacement made from the plain one). A name that must exist but is not replaced has None.
_PATCHES = (
    (INTERPRETER, "InterpretedFunction.run", executor.run),
    (INTERPRETER, "InterpretedFunction.__call__", executor.call),
    (INTERPRETER, "InterpretedFunction.rewrite", None),
    (INTERPRETER, "InterpretedFunction.rewritten_fn", None),
    (INTERPRETER, "GridExecutor._init_args_hst", None),
    (INTERPRETER, "GridExecutor._restore_args_dev", None),
    (INTERPRETER, "_patch_lang", None),
    (INTERPRETER, "_LangPatchScope.set_attr", None),
    (INTERPRETER, "_implicit_cvt", None),
    (INTERPRETER, "_get_np_dtype", type_cache.np_dtype),
    (INTERPRETER, "_interpreter.load", None),
    (INTERPRETER, "_interpreter.store", None),
    (INTERPRETER, "_ir.MEM_SEMANTIC.RELAXED", None),
    (INTERPRETER, "_ir.ATOMIC_OP.FADD", None),
    (INTERPRETER, "_ir.ROUNDING_MODE.RTZ", None),
    (INTERPRETER, "TensorHandle", None),
    (INTERPRETER, "interpreter_builder.set_grid_idx", None),
    (INTERPRETER, "interpreter_builder.set_grid_dim", None),
    (INTERPRETER, "InterpreterBuilder.create_masked_load", memory_ops.masked_load),
    (INTERPRETER, "InterpreterBuilder.create_masked_store", memory_ops.masked_store),
    (INTERPRETER, "InterpreterBuilder.create_atomic_rmw", memory_ops.synchronizing(memory_ops.atomic_rmw)),
    (INTERPRETER, "InterpreterBuilder.create_atomic_cas", memory_ops.synchronizing(memory_ops.atomic_cas)),
    (INTERPRETER, "InterpreterBuilder.create_addptr", memory_ops.carry(0)),
    (INTERPRETER, "InterpreterBuilder.create_bitcast", memory_ops.carry(0)),
    (INTERPRETER, "InterpreterBuilder.create_broadcast", memory_ops.carry(0)),
    (INTERPRETER, "InterpreterBuilder.create_expand_dims", memory_ops.carry(0)),
    (INTERPRETER, "InterpreterBuilder.create_reshape", memory_ops.synchronizing(memory_ops.carry(0))),
    (INTERPRETER, "InterpreterBuilder.create_trans", memory_ops.synchronizing(memory_ops.carry(0))),
    (INTERPRETER, "InterpreterBuilder.create_splat", memory_ops.carry(1)),
    (INTERPRETER, "InterpreterBuilder.create_select", memory_ops.carry_common(1, 2)),
    (INTERPRETER, "TensorDescHandle.materialize_pointers", memory_ops.pointers_of(descriptor=True)),
    (INTERPRETER, "_ir.PADDING_OPTION.PAD_ZERO", None),
    (INTERPRETER, "InterpreterBuilder.unary_op", arithmetic.elementwise),
    (INTERPRETER, "InterpreterBuilder.binary_op", arithmetic.elementwise),
    (INTERPRETER, "InterpreterBuilder.ternary_op", arithmetic.elementwise),
    (INTERPRETER, "InterpreterBuilder.create_int_to_ptr", memory_ops.int_to_ptr),
    (INTERPRETER, "InterpreterBuilder.create_fma", arithmetic.fma),
    (INTERPRETER, "InterpreterBuilder.cast_impl", arithmetic.cast),
    (INTERPRETER, "InterpreterBuilder.create_fp_to_fp", arithmetic.fp_to_fp),
    (INTERPRETER, "InterpreterBuilder.create_dot", memory_ops.synchronizing(arithmetic.dot)),
    (INTERPRETER, "InterpreterBuilder.create_erf", arithmetic.erf),
    (INTERPRETER, "InterpreterBuilder.create_extern_elementwise", arithmetic.extern_elementwise),
    (INTERPRETER, "InterpreterBuilder.create_inline_asm", arithmetic.inline_asm),
    (INTERPRETER, "InterpreterBuilder.create_umulhi", arithmetic.umulhi),
    (INTERPRETER, "interpreter_builder.options", arithmetic.options),
    (INTERPRETER, "_ir.INPUT_PRECISION.TF32", None),
    (INTERPRETER, "_ir.INPUT_PRECISION.IEEE", None),
    (INTERPRETER, "_ir.ATOMIC_OP.XCHG", None),
    (INTERPRETER, "interpreter_semantic", None),
    ("triton.language.semantic", "TritonSemantic.load", memory_ops.load_with_other),
    ("triton.language.semantic", "TritonSemantic.broadcast_impl_value", shortcuts.of_one_shape),
    ("triton.language.semantic", "TritonSemantic.cast", shortcuts.of_one_type),
    (INTERPRETER, "InterpreterBuilder.create_maxnumf", arithmetic.nan_dropping(np.fmax)),
    (INTERPRETER, "InterpreterBuilder.create_minnumf", arithmetic.nan_dropping(np.fmin)),
    (INTERPRETER, "ReduceScanOpInterface.to_tensor", arithmetic.reduced),
    (INTERPRETER, "ReduceOps.sum", arithmetic.reduce_sum),
    (INTERPRETER, "ReduceOps.min_max", arithmetic.reduce_min_max),
    (INTERPRETER, "ReduceOps.generic_reduce", language.combining_in_a_tree),
    (INTERPRETER, "ScanOps.generic_scan", language.combining),
    (INTERPRETER, "FunctionRewriter.ast_transformer", language.rewriter),
    (INTERPRETER, "FunctionRewriter._compile_and_exec", language.compiled),
    (INTERPRETER, "ScanOps.cumsum", arithmetic.scan(np.cumsum)),
    (INTERPRETER, "ScanOps.cumprod", arithmetic.scan(np.cumprod)),
    (INTERPRETER, "ReduceOps.apply_impl", memory_ops.synchronizing()),
    (INTERPRETER, "ScanOps.apply_impl", memory_ops.synchronizing()),
    ("triton.runtime.autotuner", "Autotuner.run", executor.first_config),
    ("triton.runtime.jit", "JITFunction.run", executor.counted_launch),
    ("triton.runtime.jit", "JITFunction.__call__", executor.device_function),
    *(
        ("triton.language.core", f"constexpr.__{name}__", language.left_of_a_tensor)
        for name in "add sub mul truediv floordiv mod and or gt ge lt le eq ne".split()
    ),
)
# Triton 3.9 has no block pointers.
_PATCHES_IF_THERE = (
    *(
        (INTERPRETER, f"InterpreterBuilder.create_{name}", memory_ops.synchronizing())
        for name in "barrier split gather histogram".split()
    ),
    *(
        (INTERPRETER, f"InterpreterBuilder.create_{name}", memory_ops.synchronizing(memory_ops.carry_common(0, 1)))
        for name in ("join", "cat")
    ),
    (INTERPRETER, "BlockPointerHandle.materialize_pointers", memory_ops.pointers_of(descriptor=False)),
    (INTERPRETER, "InterpreterBuilder.create_tensor_pointer_load", memory_ops.block_pointer_load),
)
# Triton 3.6 has no get_bf16, none has the others.
_ADDED = (
    (INTERPRETER, "InterpreterBuilder.get_bf16", arithmetic.get_bf16),
    (INTERPRETER, "InterpreterBuilder.create_descriptor_reduce", memory_ops.descriptor_reduce),
    (INTERPRETER, "InterpreterBuilder.create_dot_scaled", language.dot_scaled),
    (INTERPRETER, "interpreter_semantic.all_of", language.all_of),
    (INTERPRETER, "interpreter_semantic.any_of", language.any_of),
    (INTERPRETER, "interpreter_semantic.none_of", language.none_of),
    (INTERPRETER, "interpreter_semantic.one_truth", language.one_truth),
)
_installed: list[tuple[object, str, object]] = []
_ABSENT = object()


def _resolve(module: str, path: str):
    """The owner of a private name, its last part and its value."""
    owner = importlib.import_module(module)
    *parents, last = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, last, getattr(owner, last)


def install() -> None:
    """Make Triton's interpreter in this process safe and right; a second call does nothing.

    Raises RuntimeError if this Triton lacks a name that the layer needs.
    """
    if _installed:
        return
    found = []
    for module, path, make in _PATCHES:
        try:
            found.append((*_resolve(module, path), make))
        except (ImportError, AttributeError) as exc:
            raise RuntimeError(
                f"gpukit's interpreter works with Triton {SUPPORTED}, and Triton {triton.__version__} has no "
                f"{module}.{path}: install a Triton in that range"
            ) from exc
    for module, path, make in _PATCHES_IF_THERE:
        with contextlib.suppress(AttributeError):
            found.append((*_resolve(module, path), make))
    for module, path, make in _ADDED:
        owner = getattr(importlib.import_module(module), path.split(".")[0])
        found.append((owner, path.split(".")[1], getattr(owner, path.split(".")[1], _ABSENT), make))
    for owner, name, plain, make in found:
        if make is not None:
            _installed.append((owner, name, plain))
            setattr(owner, name, make(plain))
    _forget_rewritten_functions()


def uninstall() -> None:
    """Put Triton's own interpreter back."""
    while _installed:
        owner, name, plain = _installed.pop()
        if plain is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, plain)
    _forget_rewritten_functions()


def _forget_rewritten_functions() -> None:
    """Triton keeps the text that it made of each kernel; with and without the layer it makes different ones."""
    _resolve(INTERPRETER, "InterpretedFunction.rewritten_fn")[2].clear()
