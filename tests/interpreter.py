"""Triton's interpreter, made quicker for tests: what it computes stays as it is (`tests/test_interpreter.py`).

It works out types, shapes and casts anew at every operation, which takes ten times as long as the numbers. Here that is
looked up, or left out where nothing can come of it; whatever is not plain takes Triton's own way, errors too. A kernel
that says of a number what is not so, by `tl.multiple_of`, fails here; on a GPU it would read from elsewhere.

Not here: which kernels run in it (`tests/kernels`, `tests/pretend`).
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any


class Lasting:
    """The end of a launch, which leaves the language as it is."""

    def restore(self) -> None:
        pass


def of_plain(look_up: Callable[[Any], Any], plain: type) -> Callable[[Any], Any]:
    """The same function, which looks a plain type up once, and not in a table that it makes anew."""
    known = cache(look_up)
    return lambda kind: known(kind) if type(kind) is plain else look_up(kind)


def quicken() -> None:
    """Make the interpreter quicker, once and for the whole process, as soon as something has imported it."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "is_quick") or not hasattr(interpreter, "_patch_lang"):
        return
    interpreter._get_np_dtype = of_plain(interpreter._get_np_dtype, interpreter.tl.dtype)
    change_language_once(interpreter)
    remember_types(interpreter.tl)
    remember_fits(interpreter)
    skip_checks(interpreter)
    check_multiples(interpreter.TensorHandle)
    interpreter.is_quick = True


def whole(x: Any) -> int:
    """The number of a loop's bound, an array of one: Triton 3.6 asks numpy for it in a way that 2.4 refuses."""
    return int(x.handle.data.item())


def change_language_once(interpreter: Any) -> None:
    """Change Triton's language once for each file of kernels.

    By itself the interpreter does at every launch and at every call of a device function, a sum's and a maximum's among
    them: a pass over some hundred names. Nobody in this process needs the language as it was.
    """
    patch, files = interpreter._patch_lang, set[int]()

    def once(fn: Any) -> Lasting:
        if id(fn.__globals__) not in files:
            patch(fn)
            interpreter.tl.tensor.__index__ = whole
            files.add(id(fn.__globals__))
        return Lasting()

    def put(where: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """A function of the language, told the interpreter's rules: without a table of its keywords made anew."""
        fn, rules = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = rules
            return fn(*args, **kwargs)

        scope.set_attr(where, name, call)

    interpreter._patch_lang, interpreter._patch_attr = once, put


def remember_types(tl: Any) -> None:
    """Make each type and each shape once; they are never written to."""
    core, scalar, pointer, block, tensor = tl.core, tl.dtype, tl.pointer_type, tl.block_type, tl.tensor
    unwrap, plain = core._unwrap_if_constexpr, frozenset((int, bool, float, str, scalar, pointer, block, tensor))

    def unwrapped(x: Any) -> Any:
        return x if type(x) in plain else unwrap(x)

    core._unwrap_if_constexpr = tl._unwrap_if_constexpr = unwrapped
    for kind in (scalar, pointer, block):
        kind.__eq__ = or_itself(kind.__eq__)
    integers, floats = frozenset((*scalar.SINT_TYPES, *scalar.UINT_TYPES)), frozenset(scalar.FP_TYPES)
    scalar.is_int = lambda kind: kind.name in integers
    scalar.is_floating = lambda kind: kind.name in floats

    begin, init = block.__init__, tensor.__init__
    types: dict[tuple[int, tuple[int, ...]], Any] = {}
    scalar.facts = None

    def one_of_each(cls: type, element: Any, shape: Any) -> Any:
        """The type of these elements and this shape, which may be made already; it keeps its elements' address."""
        sizes = shape.values if type(shape) is core.tuple else shape
        key = id(element), tuple([x.value if type(x) is core.constexpr else x for x in sizes])
        return types.get(key) or object.__new__(cls)

    def begin_once(kind: Any, element: Any, shape: Any) -> None:
        if not vars(kind):
            begin(kind, element, shape)
            types[id(element), tuple(kind.shape.values)] = kind

    def init_once(x: Any, handle: Any, kind: Any) -> None:
        if kind.facts is None:
            init(x, handle, kind)
            kind.facts = x.shape, x.numel, x.dtype
        else:
            x.handle, x.type = handle, kind
            x.shape, x.numel, x.dtype = kind.facts

    block.__new__, block.__init__, tensor.__init__ = one_of_each, begin_once, init_once


def check_multiples(handle: Any) -> None:
    """Look whether numbers are multiples of what `tl.multiple_of` says; by itself the interpreter only notes it."""
    note = handle.set_attr

    def checked(x: Any, name: str, values: Any) -> None:
        if name == "tt.divisibility" and (x.data % min(values)).any():
            raise ValueError(f"{x.data} are no multiples of {values}")
        note(x, name, values)

    handle.set_attr = checked


def or_itself(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda x, other: x is other or equal(x, other)


def remember_fits(interpreter: Any) -> None:
    """Look up whether numbers fit a type."""
    fits, plain, known = interpreter._validate_np_data_size, interpreter.tl.dtype, dict[tuple[int, str], bool]()

    def found(x: Any, kind: Any) -> bool:
        if type(kind) is not plain:
            return fits(x, kind)
        key = x.itemsize, kind.name
        if key not in known:
            known[key] = fits(x, kind)
        return known[key]

    interpreter._validate_np_data_size = found


def skip_checks(interpreter: Any) -> None:
    """Leave out what nothing comes of: checks of overflow that no one is told of, casts to the type that is there."""
    builder, rules, tl = interpreter.interpreter_builder, interpreter.interpreter_semantic, interpreter.tl
    if not builder.options.debug:  # the assertion behind the check is left out, too
        builder.options = replace(builder.options, sanitize_overflow=False)
    tensor, scalar, pointer, block = tl.tensor, tl.dtype, tl.pointer_type, tl.block_type
    check, broadcast, constant = rules.binary_op_type_checking_impl, rules.broadcast_impl_value, rules.scalar_constant
    cast, most = rules.cast, {id(tl.int32): 2**31, id(tl.int64): 2**63}

    def checked(
        lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Operands of one type and shape; those of one type are, and a small integer becomes one of a signed type."""
        left, right = type(lhs), type(rhs)
        if left is tensor and right is tensor:
            if lhs.dtype is rhs.dtype and type(lhs.dtype) is scalar and not div_or_mod:
                return broadcasted(lhs, rhs)
            if type(lhs.dtype) is pointer and allow_lhs_ptr and id(rhs.dtype) in most:
                return broadcasted(lhs, rhs)
        elif right is int and left is tensor and arithmetic_check and is_small(rhs, lhs.dtype):
            return broadcasted(lhs, number(rhs, lhs.dtype))
        elif left is int and right is tensor and arithmetic_check and is_small(lhs, rhs.dtype):
            return broadcasted(number(lhs, rhs.dtype), rhs)
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def is_small(x: int, kind: Any) -> bool:
        return id(kind) in most and -most[id(kind)] <= x < most[id(kind)]

    @lru_cache(4096)
    def number(x: int, kind: Any) -> Any:
        return constant(x, kind)

    def broadcasted(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        a, b = lhs.type, rhs.type
        if type(a) is block:
            if type(b) is not block:
                return lhs, splat(rhs, a)
            if a is not b and a.shape.values != b.shape.values:
                return broadcast(lhs, rhs)
        elif type(b) is block:
            return splat(lhs, b), rhs
        return lhs, rhs

    def splat(x: Any, like: Any) -> Any:
        kind = block(x.dtype, like.shape)
        return tensor(builder.create_splat(kind, x.handle), kind)

    def cast_if_other(x: Any, kind: Any, rounding: str | None = None) -> Any:
        return x if type(kind) is scalar and x.dtype is kind else cast(x, kind, rounding)

    rules.binary_op_type_checking_impl, rules.broadcast_impl_value, rules.cast = checked, broadcasted, cast_if_other
