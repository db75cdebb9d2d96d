"""A PTX module as a C++ file: one function per kernel, one line per statement."""

from .operands import Scopes, cpp_name
from .source import Kernel, Module, Variable
from .translate import Translator

REGISTER_TYPE = {
    0: "bool",
    1: "std::uint8_t",
    2: "std::uint16_t",
    4: "std::uint32_t",
    8: "std::uint64_t",
}
# What a register holds before it is written: a result that depends on it is easy to see.
POISON = {0: "true", 1: "0xcd", 2: "0xcdcd", 4: "0xcdcdcdcd", 8: "0xcdcdcdcdcdcdcdcd"}


KERNEL = ['#define KERNEL extern "C" [[gnu::visibility("default")]]', ""]


def arrays(name: str, variables: list[Variable], qualifier: str) -> list[str]:
    """The variables of one space in one struct: one range tells whether an address is theirs."""
    lines = [f"{qualifier}struct {name.title()} {{"]
    for v in variables:
        initial = ", ".join(str(b) for b in v.data)
        declared = f"alignas({v.align}) unsigned char {cpp_name(v.name)}[{v.nbytes}]"
        lines.append(f"  {declared} = {{{initial}}};")
    return [*lines, f"}} {name} = {{}};"]


def shared_memory(nbytes: int) -> list[str]:
    if nbytes == 0:
        return ["  std::byte* const shared = nullptr;"]
    return [
        f"  alignas(128) static thread_local std::byte shared[{nbytes}];",
        "  static thread_local ptx::SharedMemory::State state;",
        "  const ptx::SharedMemory fresh(state, shared, sizeof shared);",
    ]


def local_memory(variables: list[Variable]) -> list[str]:
    lines = []
    for v in variables:
        name = "local_" + cpp_name(v.name)
        lines.append(f"  alignas({v.align}) unsigned char {name}[{v.nbytes}];")
        lines.append(f"  std::memset({name}, 0xcd, sizeof {name});")
    return lines


def own_memory(kernel: Kernel, scopes: Scopes, local: list[Variable]) -> str:
    """Ranges that a generic address may lie in and that are no global memory."""
    names = ["module", "constants", *("local_" + cpp_name(v.name) for v in local)]
    ranges = [f"{{ptx::address_of({name}), sizeof {name}}}" for name in names]
    if kernel.params:
        ranges.append(f"{{reinterpret_cast<u64>(args), {kernel.params_nbytes}}}")
    if scopes.shared_nbytes:
        ranges.append("{ptx::address_of(shared), sizeof shared}")
    if scopes.uses_dynamic and scopes.leaves_shared:
        ranges.append("{reinterpret_cast<u64>(emu::self().shared), ptx::kMostSharedNbytes}")
    return ", ".join(ranges)


def context(kernel: Kernel, scopes: Scopes, local: list[Variable]) -> list[str]:
    sizes = f"args, {kernel.params_nbytes}, shared, {scopes.shared_nbytes}"
    return [
        f"  const std::initializer_list<ptx::Range> own = {{{own_memory(kernel, scopes, local)}}};",
        f"  const ptx::Context c(kFile, {sizes}, own);",
    ]


def function(kernel: Kernel, module: Module) -> list[str]:
    translator = Translator(kernel, module)
    body = translator.body()
    scopes = translator.scopes
    local = [v for v in scopes.variables.values() if v.space == "local"]
    lines = ["", f"KERNEL void {kernel.name}(const void* args) {{"]
    lines += shared_memory(scopes.shared_nbytes) + local_memory(local)
    lines += context(kernel, scopes, local)
    for name, width in scopes.used.items():
        lines.append(f"  {REGISTER_TYPE[width]} {name} = {POISON[width]};")
    return [*lines, "  [[maybe_unused]] bool carry = false;", *body, "}"]


def emit(module: Module, file: str) -> str:
    by_space = {s: [v for v in module.variables if v.space == s] for s in ("global", "const")}
    lines = [f"// Made by emulator/ptx_to_cpp.py from {file}.", '#include "simt/ptx.h"', ""]
    lines += [*KERNEL, "namespace ptx {", "namespace {", f'constexpr const char* kFile = "{file}";']
    lines += arrays("module", by_space["global"], "")
    lines += arrays("constants", by_space["const"], "const ")
    lines += ["}  // namespace"]
    for kernel in module.kernels:
        lines += function(kernel, module)
    return "\n".join([*lines, "", "}  // namespace ptx", ""])
