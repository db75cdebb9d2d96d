"""The triton kernel set, for GPUs of any make. Importing this package does not import triton.

| file                                  | what it has                                             |
| ------------------------------------- | ------------------------------------------------------- |
| kernel_set.py                         | TritonKernels: encode and decode_sum                    |
| plan.py                               | a layout as the kernels see it: a table of numbers      |
| registry.py, arguments.py             | every kernel and variant, and what they take            |
| launch.py                             | the one place that starts them                          |
| blocks.py, plain.py, topk*.py, idle.py | the kernels                                            |
| uniform.py, fp8.py, lm.py, sign.py    | how codecs with blocks differ                           |
| tile.py, values.py, codes.py, frame.py, padding.py, block.py, bits.py | the parts of kernels    |

**The registry.** `registry.variants(tile_elements)` lists everything that can be launched. A
Variant has

- `name`: of the variant, "encode_int4_128";
- `function`: the `@triton.jit` function; several variants share one;
- `arguments`: the names of its arguments, in order. All are int64 (`ARGUMENT_TYPE`, "i64"):
  addresses, counts and bits. None is specialized on its value;
- `constexprs`: the values of its other parameters, by name;
- `signature`: the types of all parameters, as `triton.compiler.ASTSource` takes them;
- `options_for(backend)`: the compiler's options: `num_warps`, no fusion of multiplies and adds, and
  for the backend "cuda" the number of registers; `options` are those that all backends share.

A grid has one dimension. The sizes of tiles and steps (registry.py) are constexprs and do not
change any result.

**The launch layer.** `TritonKernels(name, launch)` starts everything through
`launch(variant, programs, arguments)`, where `arguments` are plain integers. launch.py uses
Triton's own launcher. It serves devices and, if TRITON_INTERPRET=1 is set before the kernels are
imported, the interpreter. Another launcher may run the output of `triton.compile`.
"""

from __future__ import annotations

from functools import lru_cache

from zcomm.kernels.triton.kernel_set import TritonKernels


def missing(ordinal: int = 0) -> str:
    """Why the kernels are missing; "" if they are not. Triton compiles for any GPU it knows."""
    return _missing()


LEAST_VERSION = (3, 6)  # older ones divide with ftz, and those before 3.4 do not compile lm*


@lru_cache(maxsize=1)
def _missing() -> str:
    try:
        from triton import __version__ as version
        from triton.runtime import driver
    except ImportError as error:
        return f"triton cannot be imported: {error}; pip install 'zcomm[triton]'"
    if tuple(map(int, version.split(".")[:2])) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        return (
            f"triton {version} flushes subnormal quotients to zero, so bits would differ; expected "
            f"{least} or later, as newer builds of torch have"
        )
    try:
        driver.active.get_current_device()
    except Exception as error:  # a driver's libraries may raise anything
        return f"triton cannot use a GPU here: {error}"
    return ""


__all__ = ["TritonKernels", "missing"]
