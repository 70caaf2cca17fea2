from dataclasses import dataclass
import torch
@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple
    dtype: torch.dtype
    @classmethod
    def from_tensor(cls, t): return cls(tuple(t.shape), t.dtype)
