"""Compiles Triton kernels ahead of time, for GPUs that are not here: no driver is needed.

A program of its own, because a process that interprets Triton kernels (TRITON_INTERPRET=1) cannot
compile them: `python emulator/triton_compiler.py` takes a Request as JSON and prints Compiled rows.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """cuda 90 is sm_90, hip gfx942 an MI300."""

    backend: str
    arch: int | str

    @property
    def warp_size(self) -> int:
        return 64 if self.backend == "hip" else 32

    @property
    def name(self) -> str:
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    @property
    def suffixes(self) -> tuple[str, str]:
        """What Triton calls the assembly and the binary."""
        return ("ptx", "cubin") if self.backend == "cuda" else ("amdgcn", "hsaco")


@dataclass(frozen=True)
class Request:
    """Which variants, by name, of a registry: a module with `variants()`.

    `options` are the compiler's, in place of the variants' own. `path` is where modules are looked
    for besides the installed ones, `folder` where the results go. Without `assembled` NVIDIA's
    assembler, which takes longer than all the rest, does not run.
    """

    registry: str
    names: Sequence[str]
    target: Target
    folder: str
    path: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    assembled: bool = False


@dataclass(frozen=True)
class Compiled:
    """The files of a variant's assembly and binary, and what a launch must know of it.

    NVIDIA's assembly is PTX. Its binary is empty where it was not asked for.
    """

    variant: str
    kernel: str
    assembly: str
    binary: str
    parameters: Sequence[str]
    threads: int
    shared_nbytes: int


def compile_variants(request: Request) -> list[Compiled]:
    """In another process. Triton's own cache, in the same folder, has what was compiled before."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(Path(request.folder) / "triton_cache")
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(asdict(request)),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"Triton for {request.target.name}: {done.stdout}{done.stderr}")
    return [Compiled(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def _compiled(request: Request, variant: Any) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget(request.target.backend, request.target.arch, request.target.warp_size)
    source = ASTSource(variant.function, dict(variant.signature), dict(variant.constexprs))
    options = {**variant.options_for(request.target.backend), **request.options}
    kernel = triton.compile(source, target=target, options=options)
    text, binary = (kernel.asm[suffix] for suffix in request.target.suffixes)
    if request.assembled and request.target.backend == "cuda":
        backend = make_backend(target)
        binary = backend.make_cubin(text, {}, backend.parse_options(options), target.arch)
    metadata = kernel.metadata
    # The emulator gives none.
    assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
    files = [_written(request, *pair) for pair in zip(request.target.suffixes, (text, binary))]
    parameters = [t for t in variant.signature.values() if t != "constexpr"]
    threads = metadata.num_warps * target.warp_size
    return Compiled(variant.name, metadata.name, *files, parameters, threads, metadata.shared)


def _skip_assembler(*call: Any) -> tuple[str, str]:
    """A hook of Triton's compiler: called with the stages, to change them, and for a key of its
    cache."""
    if call:
        stages = call[1]
        if "cubin" in stages:
            stages["cubin"] = lambda source, metadata: b""
    return "not assembled", "not assembled"


def _written(request: Request, suffix: str, data: str | bytes) -> str:
    raw = data.encode() if isinstance(data, str) else data
    digest = hashlib.sha256(raw).hexdigest()[:16]
    path = Path(request.folder) / f"triton_{request.target.name}_{digest}.{suffix}"
    if not path.exists():
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_bytes(raw)
        os.replace(beside, path)
    return str(path)


def main() -> None:
    given = json.loads(sys.stdin.read())
    request = Request(**given | {"target": Target(**given["target"])})
    sys.path[:0] = request.path
    from triton import knobs

    knobs.runtime.add_stages_inspection_hook = _skip_assembler
    known = {v.name: v for v in importlib.import_module(request.registry).variants()}
    rows = [_compiled(request, known[name]) for name in request.names]
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
