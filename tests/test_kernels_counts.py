"""How many instructions the kernels take, read off their machine code: nothing that was won is lost unnoticed.

The limits are what the compiler of CUDA 13 makes of them, with a little room for other versions.
"""

import pytest
import sass

from mpiattn.backends.cuda import nvrtc

WHY = nvrtc.missing() or (None if sass.nvdisasm() else "nvdisasm is not here (extra cuda-compile)")
pytestmark = pytest.mark.workshop
needs_compiler = pytest.mark.skipif(WHY is not None, reason=str(WHY))

# Warp instructions of a tile, cycles (an estimate) of what follows the last tile; of bfloat16 with head dim 128.
LIMITS = {"forward": (1000, 12_000), "gradient_q": (600, 6_000), "gradient_kv": (930, 9_000)}


@needs_compiler
@pytest.mark.parametrize("work", LIMITS)
def test_instructions(work):
    tile, end = sass.attention(work, "bfloat16", 128, "sm_90")
    most, cycles = LIMITS[work]
    assert len(tile) <= most, sass.described(work, tile)
    assert sass.cycles(end) <= cycles, sass.described(work, end)


@needs_compiler
@pytest.mark.parametrize("page_size", [5, 64])
def test_a_lane_reads_the_page_table_once(page_size):
    """For the keys of a tile, and once more for the values."""
    tile, _ = sass.attention("decode", "bfloat16", 128, "sm_90", page_size)
    assert sass.counts(tile)["load"] == 2 and len(tile) <= 750, sass.described("decode", tile)


@needs_compiler
def test_merge_of_splits_and_cast():
    """Estimates of seconds on an H100."""
    code = sass.merge(99, "sm_90")
    assert sass.counts(code)["shuffle"] >= 18, "all 7 parts of a warp"
    assert 1e-6 < sass.merge_seconds(code) <= 10e-6, sass.described("merge", code)
    code = sass.cast("sm_90")
    assert sass.counts(code)["load"] == sass.counts(code)["store"] == 4, sass.described("cast", code)
    assert sass.cast_seconds(code, 8192 * 32 * 128) <= 100e-6, sass.described("cast", code)


def test_what_is_read_off():
    """A loop with a loop inside, a branch that is not taken in it, and what follows."""
    text = """
        /*0000*/                   IADD3 R1, R2, R3, RZ ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R6.64] ;
.L_x_2:
        /*0020*/                   HMMA.16816.F32.BF16 R8, R12, R16, R8 ;
        /*0030*/              @!P1 BRA `(.L_x_2) ;
        /*0040*/               @P2 BRA `(.L_x_3) ;
        /*0050*/                   FADD R8, R8, R9 ;
.L_x_3:
        /*0060*/               @P0 BRA `(.L_x_1) ;
        /*0070*/                   LDG.E.64 R20, desc[UR4][R6.64] ;
        /*0080*/                   FADD R20, R20, R8 ;
        /*0090*/                   STG.E desc[UR4][R6.64], R20 ;
        /*00a0*/                   EXIT ;
"""
    blocks = sass.blocks_of(text.splitlines())
    tile = sass.tile_loop(blocks, 5, 1)
    assert sass.counts(tile) == {"copy": 1, "mma": 5, "control": 7}
    end = sass.epilogue(blocks)
    assert sass.counts(end)["load"] == sass.counts(end)["store"] == 1
    assert sass.cycles(end) > sass.LATENCY["load"]


def test_what_is_never_reached_is_no_loop():
    """Lanes that part go on behind the end, and come back from there; so does the trap."""
    text = """
        /*0000*/                   BRA.DIV UR4, `(.L_x_8) ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/              @!P1 BRA `(.L_x_2) ;
        /*0040*/                   LDG.E R20, desc[UR4][R2.64] ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   LDG.E.64 R20, desc[UR4][R2.64] ;
        /*0070*/                   EXIT ;
.L_x_8:
        /*0080*/                   NOP ;
        /*0090*/                   BRA `(.L_x_1) ;
.L_x_9:
        /*00a0*/                   BRA `(.L_x_9) ;
"""
    blocks = sass.blocks_of(text.splitlines())
    assert sass.loops_of(blocks) == [(1, 1)]
    whole = sass.path(blocks, 0, len(blocks) - 1, lambda code: 3)
    assert [each.name for each in whole if each.kind == "load"] == ["LDG.E.128"] * 3 + ["LDG.E.64"]
