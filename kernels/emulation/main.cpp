// A shared library of one kernel: -DSOURCE is its file, -DKERNEL its name.
//
// emulate() launches the kernel, like cuLaunchKernel: `at` holds the addresses of the kernel's `count` arguments.  It
// returns nullptr, or a text that describes the error.
//
// grid, block (`threads`) and shared memory (`shared_bytes`) are arguments of emulate().
// tile sizes: constants of the compilation, as on a GPU.

#include "device.h"

#include SOURCE

namespace emulation {

struct Call {
    template <class... A>
    Call(void (*kernel)(A...), A... arguments) {
        kernel(arguments...);
    }
};

template <class... A>
constexpr int count_of(void (*)(A...)) {
    return sizeof...(A);
}

// Braces read the arguments in their order.
template <class... A>
void call(void (*kernel)(A...), void** at) {
    Call{kernel, *static_cast<A*>(*at++)...};
}

// Floats too small for a normal exponent count as 0 while this lives, as CuPy compiles kernels (-ftz=true).
struct FlushToZero {
#if defined(__SSE2__)
    static constexpr unsigned MODES = 0x8040;      // of results and of operands
    const unsigned before = __builtin_ia32_stmxcsr();
    FlushToZero() { __builtin_ia32_ldmxcsr(before | MODES); }
    ~FlushToZero() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
    static constexpr unsigned long MODES = 1ul << 24;
    unsigned long before;
    FlushToZero() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" : : "r"(before | MODES));
    }
    ~FlushToZero() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#endif
};

}  // namespace emulation

extern "C" __attribute__((visibility("default"))) const char* emulate(const unsigned* grid, unsigned threads,
                                                                      unsigned shared_bytes, int descending, void** at,
                                                                      int count) {
    if (count != emulation::count_of(KERNEL))
        return "the number of arguments is not the kernel's";
    const emulation::FlushToZero flush;
    return emulation::run_grid(
        {grid[0], grid[1], grid[2]}, threads, shared_bytes, descending,
        [](void** arguments) { emulation::call(KERNEL, arguments); }, at);
}
