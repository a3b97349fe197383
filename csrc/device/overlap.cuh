// Kernels that overlap with their neighbours on a stream, where LaunchShape::overlaps says so.
#pragma once

namespace cuops {

// Lets the kernel after this one be launched once all blocks have come here or are over; it waits in turn.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits for the kernel before this one, and lets the one after this be launched: to be called before what the kernel before has
// written is read, or what it reads is written. All kernels before that one are over by then. Blocks that stay until all rows are
// done do not `release` the next kernel, which would take room beside them, before they end.
__device__ inline void wait_for_previous(bool release = true) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (release) launch_dependents();
}

// For kernels of one block a multiprocessor: where most of these have none, the next kernel is launched beside them.
__device__ inline void wait_in_turn() { wait_for_previous(gridDim.x <= 64); }

}  // namespace cuops
