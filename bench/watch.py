"""Watch torch on a device: its operations, and the bytes of live tensors."""

import functools
import weakref
from collections import Counter

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim"}  # the host reads their results' sizes


class Watch(TorchDispatchMode):
    """A context that counts operations by name in `names`, and the bytes `alive` on devices of one type, with their `peak`.

    `waits` lists operations that the host waits for: copies, and operations on fake tensors that return a number (then 1).
    `names`, `peak` and `waits` may be reset at any time. fake: also count fake tensors, except the whole ones that DTensor
    makes to learn shapes: they do not use memory on a GPU either.
    """

    def __init__(self, device: str, fake: bool = False):
        super().__init__()
        self.device, self.fake = device, fake
        self.sizes, self.refs, self.alive, self.peak, self.peak_at = {}, {}, 0, 0, ""
        self.names, self.waits, self.learning = Counter(), [], False

    def __enter__(self):
        self.resize = torch.UntypedStorage.resize_  # fsdp frees gathered tensors with it
        torch.UntypedStorage.resize_ = lambda storage, size: (self.resize(storage, size), self.note(storage))[0]
        self.learn = ShardingPropagator._propagate_tensor_meta_non_cached
        ShardingPropagator._propagate_tensor_meta_non_cached = lambda *args: self.learn_shapes(*args)
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self.resize
        ShardingPropagator._propagate_tensor_meta_non_cached = self.learn
        return super().__exit__(*exception)

    def learn_shapes(self, *args):
        """DTensor's own function, without counting its operations."""
        self.learning = True
        try:
            return self.learn(*args)
        finally:
            self.learning = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again with this rank's tensor
        kwargs, name = kwargs or {}, function.name()
        if self.learning:
            return function(*args, **kwargs)
        self.names[name] += 1
        devices = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        if name == "aten::_local_scalar_dense" and isinstance(args[0], FakeTensor):
            self.waits.append(f"{name} {'cuda' if 'cuda' in devices else 'cpu'}")
            return 1.0
        out = function(*args, **kwargs)
        tensors = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        moved = len(devices | {x.device.type for x in tensors}) > 1 and "copy" in name
        if name in WAITING or (moved and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))):
            self.waits.append(f"{name} {'to '.join(sorted(devices))}")
        for tensor in tensors:
            if tensor.device.type == self.device and (self.fake or not isinstance(tensor, FakeTensor)):
                self.note(tensor.untyped_storage())
        if self.alive > self.peak:
            self.peak, self.peak_at = self.alive, name
        return out

    def note(self, storage):
        """Count a storage at its current size."""
        key = storage._cdata
        if key not in self.refs:
            self.refs[key], self.sizes[key] = weakref.ref(storage, functools.partial(self.drop, key)), 0
        self.alive += storage.nbytes() - self.sizes[key]
        self.sizes[key] = storage.nbytes()

    def drop(self, key, ref):
        """Stop counting a storage."""
        if self.refs.get(key) is ref:
            self.alive -= self.sizes.pop(key)
            del self.refs[key]
