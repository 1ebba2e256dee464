// A shared library of one kernel: -DSOURCE is its file, -DKERNEL its name.
//
// emulate() launches the kernel, like cuLaunchKernel: `at` holds the addresses of the kernel's `count` arguments.  It
// returns nullptr, or a text that describes the error.
//
// grid, block (`threads`) and shared memory (`shared_bytes`) are arguments of emulate().
// tile sizes: constants of the compilation, as on a GPU.

#include "device.h"

#include SOURCE

#include <tuple>
#include <utility>

namespace emulation {

template <class... A>
struct Call {
    void (*kernel)(A...);
    std::tuple<A...> arguments;

    template <size_t... I>
    Call(void (*kernel)(A...), void** at, std::index_sequence<I...>)
        : kernel(kernel), arguments(*static_cast<A*>(at[I])...) {}

    static void run(void* self) { std::apply(static_cast<Call*>(self)->kernel, static_cast<Call*>(self)->arguments); }
};

template <class... A>
const char* launch(void (*kernel)(A...), Index grid, unsigned threads, size_t shared_bytes, bool descending, void** at,
                   int count) {
    if (count != sizeof...(A))
        return "the number of arguments is not the kernel's";
    Call<A...> call(kernel, at, std::index_sequence_for<A...>());
    return run_grid(grid, threads, shared_bytes, descending, Call<A...>::run, &call) ? nullptr : block.error.c_str();
}

}  // namespace emulation

extern "C" const char* emulate(const unsigned* grid, unsigned threads, unsigned shared_bytes, int descending, void** at,
                               int count) {
    return emulation::launch(KERNEL, {grid[0], grid[1], grid[2]}, threads, shared_bytes, descending, at, count);
}
