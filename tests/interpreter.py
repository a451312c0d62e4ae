"""Triton's interpreter, made as fast as its own rules allow.

Nothing here changes what a kernel computes or refuses. A type, once made, is looked up; operands that agree
skip what would make them agree; the check for integer overflow is one NumPy operation, not eight of the
interpreter's.
"""

import inspect
from functools import wraps

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

DIVIDES = 4  # the place of `div_or_mod`, which gives two small floats a wider type
NUMPY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def make_the_interpreter_fast() -> None:
    _patch_the_language_once()
    _remember_types()
    _pass_over_operands_that_agree()
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow


def _patch_the_language_once() -> None:
    # A launch patches the language; every helper that a kernel calls patches it again, to the same end.
    patch = interpreter._patch_lang  # noqa: SLF001
    seen = {}  # by the globals of a module, which stay

    def patch_unless_done(function):
        names = function.__globals__
        if id(names) not in seen:
            modules = [module for module in names.values() if inspect.ismodule(module)]
            seen[id(names)] = [module for module in modules if module in (interpreter.tl, core)]
        languages = seen[id(names)]
        done = languages and not any(core.is_builtin(module.arange) for module in languages)
        return None if done else patch(function)

    interpreter._patch_lang = patch_unless_done  # noqa: SLF001


def _remember_types() -> None:
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_type, equal = interpreter._get_np_dtype, core.dtype.__eq__  # noqa: SLF001
    blocks = {}
    shapes = {}
    tensors = {}
    numpy_types = {}

    def init_block(self, element_ty, shape) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = (element_ty.name, element_ty.is_const(), sizes)
        if (attributes := blocks.get(key)) is None:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)  # blocks of one shape share it
            attributes = blocks[key] = dict(vars(self))
        vars(self).update(attributes)

    def init_tensor(self, handle, type) -> None:  # noqa: A002
        scalar = type.scalar
        key = (scalar.name, scalar.is_const(), id(type.shape) if type.is_block() else None)
        if (attributes := tensors.get(key)) is None:
            make_tensor(self, handle, type)
            attributes = tensors[key] = {name: vars(self)[name] for name in ("dtype", "numel", "shape")}
        vars(self).update(attributes, handle=handle, type=type)

    def get_np_dtype(type):  # noqa: A002
        name = type.scalar.name
        if (dtype := numpy_types.get(name)) is None:
            dtype = numpy_types[name] = numpy_type(type)
        return dtype

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    interpreter._get_np_dtype = get_np_dtype  # noqa: SLF001


def _pass_over_operands_that_agree() -> None:
    check, broadcast = (TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value)

    def alike(lhs, rhs) -> bool:  # tensors of one type and shape share what says so
        tensors = isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor)
        return tensors and lhs.dtype is rhs.dtype and lhs.shape is rhs.shape

    @wraps(check)
    def check_unless_alike(self, lhs, rhs, *args, **options):
        if len(args) < DIVIDES and not options and alike(lhs, rhs) and not lhs.dtype.is_ptr():
            return lhs, rhs
        return check(self, lhs, rhs, *args, **options)

    @wraps(broadcast)
    def broadcast_unless_alike(self, lhs, rhs):
        return (lhs, rhs) if alike(lhs, rhs) else broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = check_unless_alike
    TritonSemantic.broadcast_impl_value = broadcast_unless_alike


def _check_overflow(self, lhs, rhs, binary_op) -> None:
    scalar = lhs.type.scalar
    if scalar.int_bitwidth < 64:
        both = (side.handle.data.astype(np.int64) for side in (lhs, rhs))
        wide = NUMPY[binary_op.__name__](*both)
        fits = wide.min() >= scalar.get_int_min_value() and wide.max() <= scalar.get_int_max_value()
        assert fits, f"{scalar} overflow detected for operation {binary_op.__name__}"
