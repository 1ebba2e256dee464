"""The emulation of the CUDA language finds the bugs that it is made to find; here each is in one small kernel."""

import re

import numpy as np
import pytest

from mpiattn.backends.cuda.kernel_source import Kernel
from mpiattn.backends.testing import emulated
from mpiattn.errors import MpiattnError

pytestmark = [
    pytest.mark.workshop,
    pytest.mark.skipif(emulated.compiler() is None, reason="the emulation needs a C++ compiler"),
]

HAZARD = (
    "thread [0-9]+ (reads|writes to) shared memory at byte [0-9]+, which "
    "(thread [0-9]+ has|warp [0-9]+ has|several warps have) (read|written), and no barrier lies between"
)
SOURCE = """
#include "element.cuh"
#include "warp.cuh"

extern "C" __global__ void buggy(float* out, int bug) {
    const int i = threadIdx.x, warp = warp_index();
    if (bug == 1)
        shared_at<float>(2) = 0;
    if (bug == 2)
        shared_at<float4>(4 * 64) = float4{};
    if (bug == 3 && i == 7)
        *(&shared_at<float>(4 * 60).bytes() + 4 + i) = 0;
    if (bug == 4)
        i == 3 ? (void)__ballot_sync(ALL_LANES, true) : __syncwarp();
    if (bug == 5) {
        if (warp == 0)
            __syncthreads();
        return;
    }
    if (bug == 6 && i == 5)
        return;
    if (bug == 7 || bug == 8)
        copy_async_4(4 * i, out + i, true);
    if (bug == 8)
        commit_copies();
    if (bug == 9)
        copy_async_4(4 * i, (char*)(out + i) + 1, true);
    if (bug == 18)
        global_at<float2>(out + 2 * (i % 16) + 1) = float2{};
    if (bug == 10) {
        copy_async_4(4 * i, out + 63 - i, true);
        commit_copies();
        out[i] = shared_at<float>(4 * i);
        wait_copies<0>();
        return;
    }
    if (bug == 11 || bug == 12) {
        shared_at<float>(4 * i) = i;
        if (bug == 12)
            __syncwarp();
        out[i] = shared_at<float>(4 * (i ^ 1));
        return;
    }
    if (bug == 13)
        copy_async_4(4 * (63 - i), out, true), commit_copies();
    shared_at<float>(4 * i) = i;
    if (bug != 14)
        __syncthreads();
    const float other = shared_at<float>(4 * (63 - i));
    if (bug == 15)
        shared_at<float>(4 * i) = 0;
    if (bug == 16) {
        unsigned words[4];
        load_matrices(words, i % 8 * 16);
    }
    if (bug == 17) {
        unsigned words[4];
        load_matrices(words, i % 8 / 2 * 32);
    }
    if (bug == 16) {
        __syncwarp();
        shared_at<float>(4 * i) = 0;
    }
    out[i] = quad_sum(other);
}
"""


@pytest.fixture
def launch(backend, tmp_path):
    """Runs the kernel with a bug, on two warps and 256 bytes of shared memory; 0 is none."""
    (tmp_path / "buggy.cu").write_text(SOURCE)

    def run(bug, threads=64):
        out = np.zeros(64, np.float32)
        kernel = Kernel("buggy", str(tmp_path / "buggy.cu"), (), threads, 256)
        backend._run(kernel, (1, 1, 1), out, np.int32(bug))
        return out

    return run


def test_without_a_bug(launch):
    np.testing.assert_array_equal(launch(0), np.arange(63.0, -1, -1).reshape(16, 4).sum(axis=1).repeat(4))


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (1, r"an access at byte 2 of 256 of shared memory \(block 0,0,0, thread "),
        (2, "an access at byte 256 of 256 of shared memory"),
        (3, "a write behind the end of the shared memory"),
        (4, "threads that have to act together are at __"),
        (5, "every thread waits; some are at a barrier that others never reach"),
        (6, "every thread waits; some are at a barrier that others never reach"),
        (7, "a thread ends with copies that it did not commit"),
        (8, "a thread ends before its asynchronous copies"),
        (9, "an asynchronous copy from an address that is not a multiple of 4"),
        *((bug, HAZARD) for bug in (11, 13, 14, 15, 16)),
        (17, "ldmatrix reads rows that share banks of memory"),
        (18, "an access in global memory at an address that is not a multiple of 8"),
    ],
)
def test_what_is_an_error(launch, bug, message):
    with pytest.raises(MpiattnError) as failure:
        launch(bug)
    assert re.match(f"buggy: {message}", str(failure.value)), failure.value
    launch(0)  # a failure leaves nothing behind


def test_what_shows_in_results(launch):
    """What is read before it arrives is NaN."""
    assert np.isnan(launch(10)).all()


def test_what_is_in_order(launch):
    """Lanes of a warp after __syncwarp."""
    np.testing.assert_array_equal(launch(12), np.arange(64) ^ 1)


def test_a_block_of_no_whole_warps(launch):
    with pytest.raises(MpiattnError, match="multiple of 32"):
        launch(0, threads=33)
