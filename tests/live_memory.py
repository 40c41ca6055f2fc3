"""How many bytes of tensors are alive at once while some code runs, seen from torch's own calls."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):
    """``peak``: the most bytes in storages made inside the ``with`` block that were alive together.

    ``calls``: operations seen.

    ``real``: the same without meta tensors, which hold nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        self._before: set[int] = set()
        self.peak = self.real = 0
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_iter((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._alive:
                self._before.add(x.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._before:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), not x.is_meta)
        self.peak = max(self.peak, sum(size for _, size, _ in self._alive.values()))
        self.real = max(self.real, sum(size for _, size, real in self._alive.values() if real))
        return out
