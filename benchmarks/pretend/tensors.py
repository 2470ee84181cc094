"""A tensor that says it is on a GPU, and the rules of a GPU for every operator that it meets.

The numbers lie in `inner`, an ordinary tensor; operators run on it. Each operator that would launch a kernel counts as
the launches that it makes, views and allocations as none. Where CUDA would raise, wait or copy, so does this, or it
counts it.

Not here: streams, events, pinned memory (`benchmarks/pretend/cuda.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from kvbench.benchmarks.pretend.cuda import Machine
from kvbench.benchmarks.pretend.weights import kernels_of

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift",
             "lift_fresh", "_unsafe_view", "set_", "resize_", "requires_grad_"}  # fmt: skip
SHAPES_FROM_VALUES = {"nonzero", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive", "masked_select",
                      "bincount", "repeat_interleave.Tensor"}  # fmt: skip
FROM_ANOTHER = {"new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like"}
MACHINE: list[Machine] = []  # the one that is pretended, if any


class Pretended(Tensor):
    """A tensor of a pretended device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=torch.device("cuda", index), requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(MACHINE[-1], func, args, kwargs or {})

    # What torch answers without an operator.

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def set_(self, *to: Any) -> Pretended:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Pretended(self.inner.set_(*to), self.device.index)

    def record_stream(self, stream: Any) -> None:
        """Memory is never given away here."""

    def tolist(self) -> Any:
        wait(MACHINE[-1], self, "value read")
        return self.inner.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Pretended({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: Any) -> Pretended:
        return Pretended(self.inner.clone(), self.device.index)

    def __getitem__(self, at: Any) -> Any:
        return Tensor.__getitem__(self, self.sent(at))

    def __setitem__(self, at: Any, value: Any) -> None:
        Tensor.__setitem__(self, self.sent(at), value)

    def sent(self, at: Any) -> Any:
        """Lists among indices become tensors, copied to the device."""
        if isinstance(at, tuple):
            return tuple(self.sent(each) for each in at)
        return torch.tensor(at, device=self.device) if isinstance(at, list) else at


class Rules(TorchDispatchMode):
    """Inside, operators without a pretended tensor meet the rules too: allocations, copies to the device."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and to say so would load torch's compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(self.machine, func, args, kwargs or {})


def unwrapped(x: Any) -> Any:
    return x.inner if isinstance(x, Pretended) else x


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


@cache
def is_composite(func: Any) -> bool:
    """Whether torch would have taken the operator apart before it got here; its own attention stays whole."""
    made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return made_of_others and "scaled_dot_product_attention" not in func.name()


def wait(machine: Machine, x: Pretended, kind: str) -> None:
    """The thread waits for what its stream makes of `x`."""
    machine.note(kind, x.inner.nbytes)
    stream = machine.stream(x.device)
    stream.settle(next(machine.ticks))


def dispatch(machine: Machine, func: Any, args: Any, kwargs: Any) -> Any:
    """One operator, by a GPU's rules."""
    name = func._schema.name.removeprefix("aten::")
    leaves = tree_leaves((args, kwargs))
    far = [x for x in leaves if isinstance(x, Pretended)]
    device = kwargs.get("device")
    if (far or any(isinstance(x, torch.device) and is_cuda(x) for x in leaves)) and is_composite(func):
        with Rules(machine):
            return func.decompose(*args, **kwargs)
    if name == "_to_copy":
        return copied(machine, func, args, kwargs)
    if name == "copy_":
        return copy_(machine, args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
    if not far and not is_cuda(device):
        return on_host(machine, func, args, kwargs)
    check_devices(name, args, leaves, far)
    index = machine.index(device) if is_cuda(device) else far[0].device.index
    if name in ("_local_scalar_dense", "equal", "is_nonzero"):
        wait(machine, far[0], "value read")
        return func(*tree_map(unwrapped, args))
    if name in SHAPES_FROM_VALUES or f"{name}.{func._overloadname}" in SHAPES_FROM_VALUES:
        wait(machine, far[0], "shape from values")
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        send_indices(machine, far[0], args[1])
    if name == "_scaled_dot_product_flash_attention":
        return flash(machine, index, args, kwargs)
    if name == "_flash_attention_forward":
        return flash_of_prompt(machine, index, args, kwargs)
    if name == "_scaled_dot_product_efficient_attention":
        return efficient(machine, index, args, kwargs)
    if "for_cpu" in name:
        raise NotImplementedError(f"Could not run 'aten::{name}' with arguments from the 'CUDA' backend")
    inner_args = tree_map(unwrapped, args)
    inner_kwargs = {k: v for k, v in tree_map(unwrapped, kwargs).items() if k != "pin_memory"}
    if device is not None:
        inner_kwargs["device"] = torch.device("cpu")
    if machine.tape is not None and func._schema.is_mutable:  # what lies there stays until the graph is replayed
        machine.tape.add(lambda: func(*inner_args, **inner_kwargs), [])
        out = inner_kwargs.get("out", inner_args[0])
    else:
        out = func(*inner_args, **inner_kwargs)
        capture(machine, lambda: func(*inner_args, **inner_kwargs), [x.inner for x in far], out)
    if name in FROM_ANOTHER and device is not None and not is_cuda(device):
        return out  # made on the host after a tensor of the device
    if launches(func, name, far, out):
        machine.note("launch", n=kernels_of(name, args, kwargs))
    if func._schema.is_mutable:
        if kwargs.get("out") is not None:
            return kwargs["out"]
        if name.endswith("_"):
            return args[0]
    # A view of a tensor from outside inference mode is none of inference mode, and torch numbers its versions.
    with torch.inference_mode(far[0].is_inference()) if func.is_view else nullcontext():
        return tree_map(lambda x: Pretended(x, index) if isinstance(x, Tensor) else x, out)


def capture(machine: Machine, again: Callable[[], Any], taken: list[Tensor], out: Any) -> None:
    """Let the graph that is captured do this again, and write what it makes to where it lies now."""
    if machine.tape is None:
        return
    known = {x.untyped_storage().data_ptr() for x in taken}
    made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    is_new = all(x.untyped_storage().data_ptr() not in known for x in made)
    machine.tape.add(again, made if is_new else [])


def launches(func: Any, name: str, far: list[Pretended], out: Any) -> bool:
    """Whether the operator runs a kernel: it is no view, no allocation, and did not give back what it was given."""
    if func.is_view or name in NO_KERNEL or name.startswith(("view", "_reshape_alias")):
        return False
    if isinstance(out, Tensor) and not func._schema.is_mutable:
        address = out.untyped_storage().data_ptr()
        return not any(x.inner.untyped_storage().data_ptr() == address for x in far)
    return isinstance(out, Tensor | tuple | list) or out is None


def check_devices(name: str, args: Any, leaves: list[Any], far: list[Pretended]) -> None:
    """Raise as torch does where operands lie on several devices; single numbers of the host may come along."""
    devices = {str(x.device) for x in far}
    takes_indices = name in ("index", "index_put", "index_put_", "_index_put_impl_")
    if takes_indices and isinstance(args[0], Pretended):
        others = [x for x in (args[0], *args[2:3]) if isinstance(x, Tensor) and x.dim()]
        devices = {str(x.device) for x in others} | {str(x.device) for x in args[1] if isinstance(x, Pretended)}
    else:
        devices |= {str(x.device) for x in leaves if isinstance(x, Tensor) and not isinstance(x, Pretended) and x.dim()}
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(devices))}! (aten::{name})"
        )


def send_indices(machine: Machine, x: Pretended, indices: Any) -> None:
    """Indices of the host are copied, and a mask's shape is read."""
    for at in indices:
        if at is None:
            continue
        if not isinstance(at, Pretended):
            wait(machine, x, "copy from pageable memory")
        if at.dtype in (torch.bool, torch.uint8):
            wait(machine, x, "shape from values")


def flash(machine: Machine, index: int, args: Any, kwargs: Any) -> Any:
    """CUDA's flash attention by the CPU's: the same results in the same places."""
    q, k, v = (unwrapped(x) for x in args[:3])
    if q.dtype not in HALVES:
        raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, not {q.dtype}")
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "flash attention needs a contiguous last dimension"
    assert q.shape[1] == k.shape[1] == v.shape[1], "flash attention needs as many KV heads as query heads"
    machine.note("launch", n=2)
    causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal, scale=kwargs.get("scale"))
    return (Pretended(out, index), Pretended(lse, index), None, None, 0, 0, None, None, None)


# --- copies -----------------------------------------------------------------------------------


def copied(machine: Machine, func: Any, args: Any, kwargs: Any) -> Any:
    """`x.to(…)`: another dtype, another device, or both."""
    x, device = args[0], kwargs.get("device")
    target = x.device if device is None else torch.device(device)
    inner_kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
    inner = unwrapped(x)
    made = func(inner, **inner_kwargs)
    if isinstance(x, Pretended) and target.type == "cuda":
        capture(machine, lambda: func(inner, **inner_kwargs), [inner], made)
    if target.type != "cuda":
        if isinstance(x, Pretended):
            wait(machine, x, "copy to the host")
        return made
    index = machine.index(target)
    if not isinstance(x, Pretended):
        blocking = not kwargs.get("non_blocking")
        if machine.is_pinned(x) and not blocking and made.dtype == x.dtype:
            machine.note("copy from pinned memory", x.nbytes)
            machine.send(index, x, made, to_host=False)
        else:
            machine.note("copy from pageable memory", x.nbytes)
    else:
        machine.note("launch")
    return Pretended(made, index)


def copy_(machine: Machine, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """`target.copy_(source)` over any border."""
    to, x = unwrapped(target), unwrapped(source)
    if isinstance(target, Pretended) == isinstance(source, Pretended):
        if isinstance(target, Pretended):
            machine.note("launch")
    elif isinstance(source, Pretended):
        if non_blocking and machine.is_pinned(target):
            machine.note("copy to pinned memory", x.nbytes)
            machine.send(source.device.index, target, x.expand_as(target), to_host=True)
            return target
        wait(machine, source, "copy to the host")
    elif source.dim() == 0 and not machine.is_pinned(source):
        machine.note("launch")  # a number, which travels with the kernel
    elif non_blocking and machine.is_pinned(source):
        machine.note("copy from pinned memory", x.nbytes)
        machine.send(target.device.index, source, to, to_host=False)
        return target
    else:
        machine.note("copy from pageable memory", x.nbytes)
        machine.stream(target.device).settle(next(machine.ticks))
    if machine.tape is None:
        to.copy_(x)
    else:
        machine.tape.add(lambda: to.copy_(x), [])
    return target


def on_host(machine: Machine, func: Any, args: Any, kwargs: Any) -> Any:
    """An operator of the CPU's own; only pinned memory is of interest."""
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    return machine.pin(func(*args, **{k: v for k, v in kwargs.items() if k != "pin_memory"}))


# --- Triton -----------------------------------------------------------------------------------


def launch(machine: Machine, name: str, run: Any, args: Any, kwargs: Any) -> None:
    """A Triton kernel in its interpreter; it reads what lies on the current device or in pinned memory."""
    machine.note("launch")
    for x in (*args, *kwargs.values()):
        if isinstance(x, Pretended) and x.device.index != machine.current:
            raise RuntimeError(f"{name} is launched on cuda:{machine.current} with a tensor on {x.device}")
        if isinstance(x, Tensor) and not isinstance(x, Pretended):
            if not machine.is_pinned(x):
                raise ValueError(f"Pointer argument of {name} cannot be accessed from Triton (cpu tensor?)")
            machine.stream().land()
    inner, named = [unwrapped(x) for x in args], {k: unwrapped(x) for k, x in kwargs.items()}

    def go() -> None:
        with _disable_current_modes():
            run(*inner, **named)

    if machine.tape is None:
        go()
    else:
        machine.tape.add(go, [])


def flash_of_prompt(machine: Machine, index: int, args: Any, kwargs: Any) -> Any:
    """The operator below CUDA's flash attention, which takes (n, s, heads, d_h), groups of heads and a window."""
    q, k, v = (unwrapped(x).transpose(1, 2) for x in args[:3])
    if q.dtype not in HALVES:
        raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, not {q.dtype}")
    machine.note("launch", n=2)
    left, s, hidden = kwargs.get("window_size_left"), q.shape[2], None
    if left is not None and left >= 0:
        behind = torch.arange(s).unsqueeze(1) - torch.arange(s)
        hidden = torch.zeros(s, s, dtype=q.dtype).masked_fill_((behind < 0) | (behind > left), -torch.inf)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=hidden is None, attn_mask=hidden, scale=kwargs.get("scale")
    )
    return (Pretended(out.transpose(1, 2), index), Pretended(lse, index), None, None, None)


def efficient(machine: Machine, index: int, args: Any, kwargs: Any) -> Any:
    """CUDA's attention for float32, which knows no groups of heads and pads the log-sum-exps."""
    q, k, v = (unwrapped(x) for x in args[:3])
    hidden = None if args[3] is None else unwrapped(args[3])
    assert hidden is None or hidden.stride(-2) % 8 == 0, f"a mask's rows must be aligned: {hidden.stride()}"
    assert q.shape[1] == k.shape[1] == v.shape[1], "this attention needs as many KV heads as query heads"
    machine.note("launch")
    causal = args[6] if len(args) > 6 else kwargs.get("is_causal", False)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal, attn_mask=hidden, scale=kwargs.get("scale")
    )
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32))
    return (Pretended(out, index), Pretended(padded, index), None, None)
