// Finds hazards in shared memory: two threads use the same bytes, one of them writes, and nothing puts them in order.
//
// Threads of a block are in order where a barrier lies between, and those of a warp where __syncwarp does.  A kernel's
// results may be right all the same in the orders in which the emulation runs its threads; on a GPU they need not be.
//
// grid and block: those of the emulated launch.
// shared memory: four bytes are the unit.
// tile sizes: none.

#pragma once

namespace emulation {

void order_block();                              // a barrier of the block, or the start of another one
void order_warp();                               // __syncwarp of the current warp

// The current thread, or the given one of its block, reads or writes these bytes.  Ends the launch if that is a hazard.
void read_shared(unsigned offset, unsigned bytes);
void read_shared_by(int thread, unsigned offset, unsigned bytes);
void write_shared(unsigned offset, unsigned bytes);

}  // namespace emulation
