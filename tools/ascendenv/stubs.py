"""Builds stand-ins for the CANN libraries that torch_npu links against, from the symbols in torch_npu's own libraries.

torch_npu's wheel has nothing of CANN in it. Each symbol that its libraries need and that nothing else defines becomes a function here, in
the library that the wheel names; so do those that it looks up by name while it runs. They make one device, whose memory is the host's and
whose operators all fail: `ascendenv.simulate` computes them on the CPU instead. Not for a host with a real CANN.

It imports neither torch nor torch_npu, and needs gcc, g++, nm and readelf.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from ascendenv.errors import StubError

OWNERS = (
    (r"^acltdt", "libacl_tdt_channel"),
    (r"^(aclop|aclGetCompileopt|aclSetCompileopt)", "libacl_op_compiler"),
    (r"^Hccl", "libhccl"),
    (r"^(acl|Msprof|rt[A-Z])|_s$", "libascendcl"),
    (r"^_ZN?K?3atb", "libatb"),
    (r"^_ZNK?2ge(7Session|\d+GE|20CompiledGraphSummary)", "libge_runner"),
    (r"^_ZNK?2ge", "libgraph"),
)
"""Which library a symbol goes to, the first match; the linker does not care, a reader does."""

SYSTEM_LIBRARIES = (
    "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
)  # fmt: skip

COMPAT_LIBRARY = "libtorch_cuda_compat.so"
"""Only beside a CUDA build of torch: it and torch_npu register one setting of the allocator, and the second to do so ends the process."""

COMPAT_SOURCE = """#include <string>
#include <unordered_set>
namespace c10::CachingAllocator {
struct AcceleratorAllocatorConfig { static std::unordered_set<std::string>& getMutableKeys(); };
// A set of its own for each caller: nobody else's settings in it.
std::unordered_set<std::string>& AcceleratorAllocatorConfig::getMutableKeys() { return *new std::unordered_set<std::string>; }
}
"""

HEAD = "".join(f"#include <{name}.h>\n" for name in ("stdarg", "stddef", "stdio", "stdlib", "string"))

FAILURE = 561103
"""CANN's code for an operator that cannot be run."""
FAILS = re.compile(r"aclnn|aclopCompileAndExecute|Hccl(?!SetConfig)")
"""Functions that must not seem to have computed or sent something."""

SOC = "Ascend910B3"
_OBJECT = "*{0} = malloc(64); return 0;"
_TAKE = "*p = aligned_alloc(512, (n + 511) / 512 * 512); return *p ? 0 : 207001;"

WRITTEN = {
    "aclrtGetSocName": f'const char *aclrtGetSocName(void) {{ return "{SOC}"; }}',
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return ""; }',
    "snprintf_s": "int snprintf_s(char *d, size_t n, size_t c, const char *f, ...) "
    "{ va_list a; va_start(a, f); int r = vsnprintf(d, n, f, a); va_end(a); return r; }",
    "vsnprintf_s": "int vsnprintf_s(char *d, size_t n, size_t c, const char *f, va_list a) { return vsnprintf(d, n, f, a); }",
    "strcpy_s": "int strcpy_s(char *d, size_t n, const char *s) { if (strlen(s) >= n) return 34; strcpy(d, s); return 0; }",
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *n) { *n = 1; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int *d) { *d = 0; return 0; }",
    "aclrtGetDeviceInfo": "int aclrtGetDeviceInfo(unsigned d, int a, long *v) "
    "{ *v = a == 101 || a == 102 ? 20 : a == 201 ? 40 : a == 301 ? 64L << 30 : a == 302 ? 192 << 20 : 0; return 0; }",
    "aclGetDeviceCapability": "int aclGetDeviceCapability(unsigned d, int a, long *v) "
    "{ *v = a == 0 ? 20 : a == 1 ? 40 : 192 << 20; return 0; }",
    "aclrtGetCurrentContext": "int aclrtGetCurrentContext(void **c) { static char it[64]; *c = it; return 0; }",
    "aclrtGetMemInfo": "int aclrtGetMemInfo(int a, size_t *f, size_t *t) { *f = (size_t)2 << 30; *t = (size_t)64 << 30; return 0; }",
    "aclrtMalloc": f"int aclrtMalloc(void **p, size_t n, int policy) {{ {_TAKE} }}",
    "aclrtMallocAlign32": f"int aclrtMallocAlign32(void **p, size_t n, int policy) {{ {_TAKE} }}",
    "aclrtMallocHost": "int aclrtMallocHost(void **p, size_t n) { *p = malloc(n); return *p ? 0 : 207001; }",
    "aclrtFree": "int aclrtFree(void *p) { free(p); return 0; }",
    "aclrtFreeHost": "int aclrtFreeHost(void *p) { free(p); return 0; }",
    "aclrtMemcpy": "int aclrtMemcpy(void *d, size_t m, const void *s, size_t n, int k) { memmove(d, s, n); return 0; }",
    "aclrtMemcpyAsync": "int aclrtMemcpyAsync(void *d, size_t m, const void *s, size_t n, int k, void *q) { memmove(d, s, n); return 0; }",
    "aclrtMemcpyAsyncWithCondition": "int aclrtMemcpyAsyncWithCondition(void *d, size_t m, const void *s, size_t n, int k, void *q) "
    "{ memmove(d, s, n); return 0; }",
    "aclrtMemset": "int aclrtMemset(void *d, size_t m, int v, size_t n) { memset(d, v, n); return 0; }",
    "aclrtMemsetAsync": "int aclrtMemsetAsync(void *d, size_t m, int v, size_t n, void *q) { memset(d, v, n); return 0; }",
    "aclrtCreateStream": f"int aclrtCreateStream(void **q) {{ {_OBJECT.format('q')} }}",
    "aclrtCreateStreamWithConfig": f"int aclrtCreateStreamWithConfig(void **q, unsigned p, unsigned f) {{ {_OBJECT.format('q')} }}",
    "aclrtCreateEventWithFlag": f"int aclrtCreateEventWithFlag(void **e, unsigned f) {{ {_OBJECT.format('e')} }}",
    "aclrtCreateEventExWithFlag": f"int aclrtCreateEventExWithFlag(void **e, unsigned f) {{ {_OBJECT.format('e')} }}",
    "aclrtQueryEventStatus": "int aclrtQueryEventStatus(void *e, int *s) { *s = 1; return 0; }",
    "aclrtQueryEventWaitStatus": "int aclrtQueryEventWaitStatus(void *e, int *s) { *s = 1; return 0; }",
    "aclrtStreamQuery": "int aclrtStreamQuery(void *q, int *s) { *s = 0; return 0; }",
    "aclrtGetSysParamOpt": "int aclrtGetSysParamOpt(int o, long *v) { *v = 0; return 0; }",
    "aclrtCtxGetSysParamOpt": "int aclrtCtxGetSysParamOpt(int o, long *v) { *v = 0; return 0; }",
    "aclGetCompileoptSize": "size_t aclGetCompileoptSize(int o) { return 2; }",
    "aclGetCompileopt": 'int aclGetCompileopt(int o, char *v, size_t n) { strncpy(v, "0", n); return 0; }',
}
"""Functions whose answers are read. All others return 0, those of FAILS their code."""


def build(npu: Path, torch: Path, out: Path) -> dict[str, int]:
    """Write the libraries into `out`; the number of functions by library. npu, torch: the packages' folders. Raises StubError."""
    groups = _needed(npu, torch)
    _add_looked_up(npu, groups)
    out.mkdir(parents=True, exist_ok=True)
    for library, names in sorted(groups.items()):
        source = out / f"{library}.c"
        source.write_text(HEAD + "".join(_function(name) + "\n" for name in sorted(names)))
        options = ("-shared", "-fPIC", "-O1", "-w", "-fno-builtin", f"-Wl,-soname,{library}.so")
        _run("gcc", *options, "-o", str(out / f"{library}.so"), str(source))
        source.unlink()
    if (torch / "lib" / "libc10_cuda.so").exists():
        source = out / "torch_cuda_compat.cpp"
        source.write_text(COMPAT_SOURCE)
        _run("g++", "-std=c++17", "-shared", "-fPIC", "-O1", "-o", str(out / COMPAT_LIBRARY), str(source))
        source.unlink()
    return {library: len(names) for library, names in sorted(groups.items())}


def _needed(npu: Path, torch: Path) -> dict[str, set[str]]:
    """Symbols that nobody defines, by the library of CANN that they belong to; libraries that are only named stay empty."""
    own = sorted(npu.glob("**/*.so"))
    torch_libraries = {path.name: path for path in (torch / "lib").glob("*.so*")}
    known = {path.name for path in own} | set(torch_libraries)
    wanted: dict[str, Path] = {}
    defined: set[str] = set()
    groups: dict[str, set[str]] = {}
    for path in own:
        wanted.update((name, path) for name, kind in _symbols(path, "undefined").items() if kind == "U")
        defined |= set(_symbols(path, "defined"))
        for name in re.findall(r"\(NEEDED\).*\[(.+?)\]", _run("readelf", "-d", str(path))):
            if name not in known and _system_library(name) is None:
                groups.setdefault(name.removesuffix(".so"), set())
    others = [path for name, path in torch_libraries.items() if re.match(r"lib(torch|c10|shm)", name)]
    others += [found for name in SYSTEM_LIBRARIES if (found := _system_library(name)) is not None]
    for other in others:
        defined |= set(_symbols(other, "defined"))
    for name, path in sorted(wanted.items()):
        if name in defined or re.match(r"_?Py", name):
            continue
        library = _owner(name)
        if library not in groups:
            raise StubError(f"{name}, which {path.name} needs, belongs to no library among {', '.join(sorted(groups))}: extend OWNERS")
        groups[library].add(name)
    return groups


def _owner(name: str) -> str:
    return next((library for pattern, library in OWNERS if re.search(pattern, name)), "")


def _add_looked_up(npu: Path, groups: dict[str, set[str]]) -> None:
    """Functions that torch_npu finds by name: their names stand in its library."""
    text = (npu / "lib" / "libtorch_npu.so").read_bytes()
    names = {found.decode() for found in re.findall(rb"(?<=\0)(?:acl|Hccl)[A-Z0-9a-z]+(?=\0)", text)}
    linked = set().union(*groups.values())
    for name in names - linked:
        if name.startswith("aclnn"):
            groups.setdefault("libopapi", set()).add(name)
        elif name.startswith("Hccl"):
            groups.setdefault("libhccl", set()).add(name)
        else:
            # Which of the two is asked differs from function to function.
            groups.setdefault("libascendcl", set()).add(name)
            groups.setdefault("libacl_op_compiler", set()).add(name)


def _function(name: str, written: Mapping[str, str] = WRITTEN) -> str:
    return written.get(name) or f"long {name}(void) {{ return {FAILURE if FAILS.match(name) else 0}; }}"


def _symbols(path: Path, kind: str) -> dict[str, str]:
    """Letters of dynamic symbols by name, without versions."""
    rows: Iterable[list[str]] = (line.split() for line in _run("nm", "-D", f"--{kind}-only", str(path)).splitlines())
    return {row[-1].split("@")[0]: row[-2] for row in rows if len(row) >= 2}


def _system_library(name: str) -> Path | None:
    path = Path(_run("gcc", f"-print-file-name={name}").strip())
    return path if path.is_absolute() and path.exists() else None


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise StubError(f"{command[0]} is not on PATH: install gcc, g++ and binutils") from error
    except subprocess.CalledProcessError as error:
        raise StubError(f"{' '.join(command)}: {error.stderr.strip()}") from error
