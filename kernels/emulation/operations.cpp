// What threads and warps do besides meeting: asynchronous copies, ldmatrix, mma, conversions of half types.
//
// mma sums in float32 in the order of the inner dimension; a GPU sums in another order.
//
// grid and block: those of the emulated launch.
// shared memory: every access is checked against its size and alignment.
// tile sizes: those of the instructions, 16x8x16 for mma and 8x8 for ldmatrix.

#include "operations.h"

#include <array>
#include <cmath>
#include <vector>

#include "fibers.h"
#include "hazards.h"

namespace emulation {

struct AsyncCopy {
    unsigned to;
    const void* from;                            // null: zeros
    unsigned bytes;
};

struct Copies {
    std::vector<std::vector<AsyncCopy>> groups;  // committed, oldest first
    std::vector<AsyncCopy> open;                 // not committed yet
};

static Copies copies[MAX_THREADS];

void copy_async(unsigned to, const void* from, unsigned bytes, bool valid) {
    if (reinterpret_cast<size_t>(from) % bytes)
        fail("an asynchronous copy from an address that is not a multiple of %u", bytes);
    unsigned char* const at = shared_bytes(to, bytes, "an asynchronous copy");
    write_shared(to, bytes);
    memset(at, 0xff, bytes);
    copies[block.current].open.push_back({to, valid ? from : nullptr, bytes});
}

void commit_copies() {
    Copies& mine = copies[block.current];
    mine.groups.push_back(std::move(mine.open));
    mine.open.clear();
}

void wait_copies(unsigned pending) {
    auto& groups = copies[block.current].groups;
    while (groups.size() > pending) {
        for (const AsyncCopy& copy : groups.front()) {
            write_shared(copy.to, copy.bytes);
            if (copy.from)
                memcpy(block.shared + copy.to, copy.from, copy.bytes);
            else
                memset(block.shared + copy.to, 0, copy.bytes);
        }
        groups.erase(groups.begin());
    }
}

void forget_copies() {
    for (unsigned i = 0; i < block.threads; ++i) {
        copies[i].groups.clear();
        copies[i].open.clear();
    }
}

void expect_no_copies() {
    for (const auto& group : copies[block.current].groups)
        if (!group.empty())
            fail("a thread ends before its asynchronous copies");
    if (!copies[block.current].open.empty())
        fail("a thread ends with copies that it did not commit");
}

static float float_of_bits(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static unsigned bits_of_float(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static float f16_to_float(unsigned short bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 31)
        return mantissa ? float_of_bits(0x7fc00000 | bits >> 15 << 31) : sign * INFINITY;
    return sign * (exponent ? ldexpf(float(1024 + mantissa), exponent - 25) : ldexpf(float(mantissa), -24));
}

float float_of_f16(unsigned short bits) {
    static const std::array<float, 65536> table = [] {
        std::array<float, 65536> made;
        for (unsigned i = 0; i < made.size(); ++i)
            made[i] = f16_to_float(i);
        return made;
    }();
    return table[bits];
}

static float float_of_bf16(unsigned short bits) { return float_of_bits(unsigned(bits) << 16); }

static unsigned short float_to_f16(float x) {
    const unsigned sign = bits_of_float(x) >> 31 << 15;
    const float size = std::fabs(x);
    if (std::isnan(x))
        return 0x7fff;
    if (size >= 65520.0f)
        return sign | 0x7c00;
    if (size < 6.103515625e-5f)                                      // subnormal: a multiple of 2^-24
        return sign | unsigned(nearbyintf(size * 16777216.0f));
    const unsigned bits = bits_of_float(size), half = bits >> 13, rest = bits & 0x1fff;
    return sign | (half - (112 << 10) + (rest > 0x1000 || (rest == 0x1000 && (half & 1))));
}

static unsigned short float_to_bf16(float x) {
    const unsigned bits = bits_of_float(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

unsigned pack_f16(float low, float high) { return float_to_f16(low) | unsigned(float_to_f16(high)) << 16; }
unsigned pack_bf16(float low, float high) { return float_to_bf16(low) | unsigned(float_to_bf16(high)) << 16; }

struct Multiply {
    float* c;
    const unsigned* a;
    unsigned b[2];
};

// Assembles A, B and c from the lanes, multiplies, and writes c back.  Word j of lane i holds two elements: of A, row
// i / 4 + 8 * (j % 2), columns 2 * (i % 4) + 8 * (j / 2) and the next; of B, rows 2 * (i % 4) + 8 * j and the next,
// column i / 4.
template <float decode(unsigned short)>
static void multiply_warp() {
    float a[16][16], b[16][8], c[16][8];
    for (int i = 0; i < LANES; ++i) {
        const Multiply& of = *static_cast<const Multiply*>(in_of_lane(i));
        const int row = i / 4, column = 2 * (i % 4);
        for (int e = 0; e < 2; ++e) {
            for (int j = 0; j < 4; ++j)
                a[row + 8 * (j % 2)][column + 8 * (j / 2) + e] = decode(of.a[j] >> 16 * e);
            for (int j = 0; j < 2; ++j) {
                b[column + 8 * j + e][row] = decode(of.b[j] >> 16 * e);
                c[row + 8 * j][column + e] = of.c[2 * j + e];
            }
        }
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column)
                c[row][column] += a[row][k] * b[k][column];
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j)
            static_cast<const Multiply*>(in_of_lane(i))->c[j] = c[i / 4 + 8 * (j / 2)][2 * (i % 4) + j % 2];
}

// Half e of word j of lane i gets element (i / 4, 2 * (i % 4) + e) of matrix j; transposed, the mirrored element.
template <bool TRANSPOSED>
static void load_warp() {
    unsigned banks = 0;                          // that the rows of a matrix lie in, of eight times 16 bytes
    for (int i = 0; i < LANES; ++i) {
        const unsigned start = *static_cast<const unsigned*>(in_of_lane(i)), bank = 1 << start / 16 % 8;
        shared_bytes(start, 16, "ldmatrix");
        read_shared_by(block.current / LANES * LANES + i, start, 16);
        banks = (i % 8 ? banks : 0) | bank;
        if (i % 8 == 7 && banks != 0xff)
            fail("ldmatrix reads rows that share banks of memory");
    }
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j) {
            unsigned short half[2];
            for (int e = 0; e < 2; ++e) {
                const int across = i / 4, along = 2 * (i % 4) + e;
                const int from = TRANSPOSED ? along : across, at = TRANSPOSED ? across : along;
                const unsigned start = *static_cast<const unsigned*>(in_of_lane(8 * j + from));
                memcpy(&half[e], block.shared + start + 2 * at, 2);
            }
            static_cast<unsigned*>(out_of_lane(i))[j] = half[0] | unsigned(half[1]) << 16;
        }
}

void load_matrices(unsigned (&r)[4], unsigned row) { warp_operation("ldmatrix", &row, r, load_warp<false>); }
void load_matrices_transposed(unsigned (&r)[4], unsigned row) {
    warp_operation("ldmatrix.trans", &row, r, load_warp<true>);
}

void multiply_add_f16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const Multiply in{c, a, {b0, b1}};
    warp_operation("mma", &in, nullptr, multiply_warp<float_of_f16>);
}

void multiply_add_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const Multiply in{c, a, {b0, b1}};
    warp_operation("mma", &in, nullptr, multiply_warp<float_of_bf16>);
}

}  // namespace emulation
