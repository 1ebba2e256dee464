"""The CUDA kernels compile for every architecture, and what the tile table promises of registers and memory holds."""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import nvrtc
import pytest

from mpiattn.backends import kernel_source, kernel_tiles
from mpiattn.backends.kernel_tiles import SHARED_LIMIT, TILES, attention_kernel
from mpiattn.backends.kernels import cast_kernel, hulls_kernel, partials_kernel
from mpiattn.sources import kernel_dir

pytestmark = pytest.mark.workshop

needs_nvrtc = pytest.mark.skipif(nvrtc.MISSING is not None, reason=str(nvrtc.MISSING))
DTYPES = {2: "bfloat16", 4: "float32"}
PARTIALS = ("merge", "add", "unnormalize", "normalize", "delta", "sink", "sink_gradient")


def built(kernels, architecture):
    """Reports of several kernels, compiled side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda kernel: nvrtc.build(kernel, architecture), kernels))


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("work", TILES)
def test_no_entry_of_the_tile_table_spills(work, architecture):
    kernels = [attention_kernel(work, DTYPES[size], dim, dim, 1, 0)[0]
               for size, table in TILES[work].items() for dim in table]
    for kernel, report in zip(kernels, built(kernels, architecture)):
        assert not report.spilled and not report.stack, kernel
        assert "warning" not in report.log.lower(), report.log


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_pages_spill_nothing(architecture):
    """Looking keys up in pages takes registers, most where the page size is no power of two.

    What kernel_tiles.py excepts is not tested: float32, the largest head dim, a query head for each KV head, sm_80.
    """
    kernels = [attention_kernel("decode", DTYPES[size], dim, dim, packed, 0, page_size=page)[0]
               for size, table in TILES["decode"].items() for dim in table
               for packed, page in ((8, 64), (1, 5)) if (architecture, size, dim, packed) != ("sm_80", 4, 256, 1)]
    for kernel, report in zip(kernels, built(kernels, architecture)):
        assert not report.spilled and not report.stack, kernel


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_89", "sm_100"])
def test_every_kernel_compiles(architecture):
    """On the architectures that the table was not made for; capped scores, odd dims, packed heads; small kernels."""
    kernels = [partials_kernel(name, dtype) for name in PARTIALS for dtype in ("float32", "float16", "bfloat16")]
    kernels += [cast_kernel("float16", "float32"), cast_kernel("bfloat16", "float16")]
    for work in TILES:
        kernels += [attention_kernel(work, *of)[0] for of in (("float16", 128, 64, 8, 2), ("float32", 60, 36, 3, 1))]
    kernels += [attention_kernel("decode", dtype, 128, 128, 8, 2, page_size=16)[0] for dtype in DTYPES.values()]
    kernels.append(hulls_kernel(3, kernel_tiles.tile("gradient_kv", 2, 128, 128)))
    for kernel, report in zip(kernels, built(kernels, architecture)):
        assert report.cubin[:4] == b"\x7fELF", kernel
        assert "warning" not in report.log.lower(), report.log


@needs_nvrtc
def test_the_compiler_says_what_is_wrong(monkeypatch):
    kernel, _ = attention_kernel("forward", "float16", 64, 64, 1, 0)
    wrong = kernel._replace(defines=tuple((name, 1024 if name == "SHARED_BYTES" else value)
                                          for name, value in kernel.defines))
    with pytest.raises(RuntimeError, match=r"kernel_tiles\.py"):
        nvrtc.build(wrong, "sm_80")


def test_every_tile_fits():
    for work, sizes in TILES.items():
        for size, table in sizes.items():
            assert max(table) == kernel_tiles.LARGEST_DIM
            for dim in table:
                kernel, cut = attention_kernel(work, DTYPES[size], dim, dim, 1, 0)
                assert kernel.shared_bytes <= SHARED_LIMIT, (work, size, dim)
                assert cut.rows % (16 * cut.warps) == 0 and cut.columns % 16 == 0


def test_a_kernel_is_one_text():
    """Every header is in it once, before its first use, and nothing else has to be found."""
    files = {path.name for path in (kernel_dir() / "cuda").iterdir()}
    used = set()
    for file in sorted(name for name in files if name.endswith(".cu")):
        text = kernel_source.expanded(file)
        assert re.findall(r'#include ["<](.+)[">]', text) in ([], ["instructions.h"])    # which only the emulation has
        used |= {name for name in files if kernel_source.path(name).read_text().split("\n")[0] in text}
    assert used == files


def test_a_changed_header_is_another_kernel(tmp_path, monkeypatch):
    """The key of what is compiled covers headers of headers, the constants and the compiler."""
    kernel, _ = attention_kernel("forward", "float16", 64, 64, 1, 0)
    other, _ = attention_kernel("forward", "float16", 64, 32, 1, 0)
    keys = [kernel_source.digest(*of) for of in ((kernel, "12.0"), (kernel, "13.0"), (other, "12.0"))]
    shutil.copytree(kernel_dir(), tmp_path / "kernels")
    monkeypatch.setattr(kernel_source, "kernel_dir", lambda: tmp_path / "kernels")
    with (tmp_path / "kernels" / "cuda" / "ptx.cuh").open("a") as header:
        header.write("// changed\n")
    kernel_source.expanded.cache_clear()
    keys.append(kernel_source.digest(kernel, "12.0"))
    kernel_source.expanded.cache_clear()
    assert len(set(keys)) == 4
