"""The CUDA kernels compile for every architecture, and what the tile table promises of registers and memory holds."""

import re
import shutil

import pytest

from mpiattn.backends.cuda import kernel_source, kernel_table, nvrtc, tile_table
from mpiattn.backends.cuda.extras import Extras, Rows
from mpiattn.backends.cuda.launches import cast_kernel, hulls_kernel, partials_kernel
from mpiattn.backends.cuda.tile_table import PROCESSORS, TILES, Blocks, attention_kernel, blocks_per_processor
from mpiattn.errors import ArgumentError, MpiattnError
from mpiattn.system.sources import kernel_dir

pytestmark = pytest.mark.workshop

needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
DTYPES = kernel_table.DTYPES
BIAS = Rows("float", 2, (1, 8, 64), (0, 4096, 64))
PARTIALS = (
    "merge",
    "merge_parts",
    "add",
    "add_splits",
    "add_key_sums",
    "unnormalize",
    "normalize",
    "delta",
    "sink",
    "sink_gradient",
)


@pytest.mark.draw(2)
@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("heads_per_kv", [1, 4, 7, 8])
def test_no_entry_of_the_tile_table_spills(heads_per_kv, architecture):
    entries = list(kernel_table.entries(architecture, heads_per_kv))
    for entry, report in zip(entries, nvrtc.build_all([kernel for *_, kernel, _ in entries], architecture)):
        assert not report.spilled and not report.stack, entry
        assert "warning" not in report.log.lower(), report.log


@pytest.mark.draw(1)
@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_pages_spill_nothing(architecture):
    """Looking keys up in pages takes registers, most where the page size is no power of two."""
    kernels = [
        attention_kernel("decode", Blocks(DTYPES[size], dim, dim, packed, 0, page), int(architecture[3:]))[0]
        for size, table in TILES["decode"].items()
        for dim in table
        for packed, page in ((8, 64), (1, 5))
    ]
    for kernel, report in zip(kernels, nvrtc.build_all(kernels, architecture)):
        assert not report.spilled and not report.stack, kernel


@pytest.mark.draw(1)
@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_89", "sm_100"])
def test_every_kernel_compiles(architecture):
    """On the architectures that the table was not made for; capped scores, odd dims, packed heads; small kernels."""
    number = int(architecture[3:])
    kernels = [partials_kernel(name, "float32") for name in PARTIALS]
    kernels += [
        partials_kernel(name, dtype, vector)
        for name in ("merge", "add", "delta", "out_of_delta")
        for dtype in ("float32", "float16", "bfloat16")
        for vector in (1, 8)
    ]
    kernels += [cast_kernel("float16", "float32"), cast_kernel("bfloat16", "float16", 4, False)]
    for work in TILES:
        kernels += [
            attention_kernel(work, Blocks(*of), number)[0]
            for of in (("float16", 128, 64, 8, 2), ("float32", 60, 36, 3, 1))
        ]
    kernels += [attention_kernel("decode", Blocks(dtype, 128, 128, 8, 2, 16), number)[0] for dtype in DTYPES.values()]
    kernels.append(hulls_kernel(3, tile_table.tile("gradient_kv", 2, 128, 128, number)))
    for kernel, report in zip(kernels, nvrtc.build_all(kernels, architecture)):
        assert report.cubin[:4] == b"\x7fELF", kernel
        assert "warning" not in report.log.lower(), report.log


@needs_nvrtc
@pytest.mark.draw(2)
@pytest.mark.parametrize("work", TILES)
@pytest.mark.parametrize(
    "extras",
    [
        Extras(BIAS, BIAS, False),
        Extras(BIAS._replace(element="bf16", width=1), BIAS._replace(width=1), True),
        Extras(BIAS, BIAS._replace(shape=(1, 8, 1)), False),
        Extras(None, None, True),
    ],
)
def test_a_bias_and_dropout_compile(work, extras):
    """Without warnings, such as of an argument that nobody reads; a bias in pairs moves few registers to memory."""
    blocks = Blocks("bfloat16", 128, 128, 4, options=extras.options(work))
    report = nvrtc.build(attention_kernel(work, blocks, 90)[0], "sm_90")
    assert "warning" not in report.log.lower(), report.log
    if not extras.dropout and not extras.sums_keys:
        assert report.spilled <= 128, report.spilled


@needs_nvrtc
def test_the_compiler_says_what_is_wrong():
    kernel, _ = attention_kernel("forward", Blocks("float16", 64, 64, 1), 80)
    wrong = kernel._replace(
        defines=tuple((name, 1024 if name == "SHARED_BYTES" else value) for name, value in kernel.defines)
    )
    with pytest.raises(MpiattnError, match=r"tile_table\.py"):
        nvrtc.build(wrong, "sm_80")


def test_kernels_are_compiled_as_cupy_compiles_them(monkeypatch, tmp_path):
    """With the options that CuPy adds, or else other machine code would be judged than that which runs."""
    seen = []

    def compiled(kernel, architecture, options, cubin, log):
        seen.extend(options)
        cubin.parent.mkdir(parents=True)
        cubin.write_bytes(b"cubin")
        log.write_text("Used 9 registers, 0 bytes spill stores, 0 bytes spill loads, 0 bytes stack frame")

    monkeypatch.setattr(nvrtc, "_compile", compiled)
    monkeypatch.setattr(nvrtc, "_version", lambda: "13.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel, _ = attention_kernel("forward", Blocks("float16", 64, 64, 1), 80)
    for _ in range(2):
        assert nvrtc.build(kernel, "sm_80").registers == 9
    assert {"-ftz=true", "--device-as-default-execution-space", "-std=c++17", "--gpu-architecture=sm_80"} <= set(seen)
    assert len(seen) == len(set(seen)), "it was compiled twice"


def test_where_nvrtc_is_missing(monkeypatch):
    def missing():
        raise ArgumentError("it is not here")

    monkeypatch.setattr(nvrtc, "load", missing)
    with pytest.raises(ArgumentError, match="not here"):
        list(kernel_table.rows("sm_90"))
    assert nvrtc.missing() == "it is not here"


def test_every_tile_fits():
    """Shared memory of its architecture; tables for one that is not listed are those of the next smaller one."""
    for architecture, processor in PROCESSORS.items():
        for work, dtype, dim, kernel, cut in kernel_table.entries(f"sm_{architecture}", 1):
            assert kernel.shared_bytes <= processor.block_shared * 1024, (architecture, work, dtype, dim)
            assert blocks_per_processor(kernel, 255, architecture) >= 1, (architecture, work, dtype, dim)
            groups = cut.parts if work in ("forward, shared_kv", "decode, shared_kv") else cut.column_warps
            assert cut.rows % (16 * cut.warps // groups) == 0
            assert cut.columns // cut.column_warps % (8 if dtype == "float32" else 16) == 0
    assert all(max(by_dim) == tile_table.LARGEST_DIM for sizes in TILES.values() for by_dim in sizes.values())
    assert tile_table.table(121) == tile_table.table(120) == tile_table.table(89) != tile_table.table(90)


def test_blocks_of_a_multiprocessor():
    """As NVIDIA's occupancy calculator has them."""
    kernel = kernel_source.Kernel("forward", "forward.cu", (), 128, 66560)
    assert [
        blocks_per_processor(kernel, registers, architecture)
        for registers, architecture in ((255, 80), (255, 89), (255, 90), (128, 90))
    ] == [2, 1, 2, 3]
    assert blocks_per_processor(kernel._replace(shared_bytes=0, threads=32), 32, 86) == 16


def test_a_kernel_is_one_text():
    """Every header is in it once, before its first use, and nothing else has to be found."""
    files = {path.name for path in (kernel_dir() / "cuda").iterdir()}
    used = set()
    for file in sorted(name for name in files if name.endswith(".cu")):
        text = kernel_source.expanded(file)
        assert re.findall(r'#include ["<](.+)[">]', text) in ([], ["instructions.h"])  # which only the emulation has
        used |= {name for name in files if kernel_source.path(name).read_text().split("\n")[0] in text}
    assert used == files


def test_a_changed_header_is_another_kernel(tmp_path, monkeypatch):
    """The key of what is compiled covers headers of headers, the constants and the compiler."""
    kernel, _ = attention_kernel("forward", Blocks("float16", 64, 64, 1), 90)
    other, _ = attention_kernel("forward", Blocks("float16", 64, 32, 1), 90)
    keys = [kernel_source.digest(*of) for of in ((kernel, "12.0"), (kernel, "13.0"), (other, "12.0"))]
    shutil.copytree(kernel_dir(), tmp_path / "kernels")
    monkeypatch.setattr(kernel_source, "kernel_dir", lambda: tmp_path / "kernels")
    with (tmp_path / "kernels" / "cuda" / "ptx.cuh").open("a") as header:
        header.write("// changed\n")
    kernel_source.expanded.cache_clear()
    keys.append(kernel_source.digest(kernel, "12.0"))
    kernel_source.expanded.cache_clear()
    assert len(set(keys)) == 4
