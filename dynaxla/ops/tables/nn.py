from importlib import import_module
from dynaxla.ops.spec import OpSpec, Support
def _rows():
    for n in ("convolution","pooling","attention","normalization","embedding","resampling","fft","linalg"):
        try: m=import_module("dynaxla.lowering.jax_rules."+n)
        except ModuleNotFoundError: continue
        for t in m.RULES: yield OpSpec(t, Support.JAX)
ROWS=tuple(_rows())
