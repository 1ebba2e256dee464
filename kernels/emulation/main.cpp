// One kernel as a shared library: -DSOURCE is its file, -DKERNEL its name.
//
// emulate() is called as cuLaunchKernel: arguments are addresses of the kernel's arguments.  It returns nullptr, or what
// went wrong.

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
