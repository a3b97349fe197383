// Kernels that overlap with their neighbours on a stream, where LaunchShape::overlaps says so.
#pragma once

namespace cuops {

// Waits for the kernel before this one, and lets the one after this be launched, which waits in turn: to be called before what
// the kernel before has written is read, or what it reads is written. All kernels before that one are over by then.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace cuops
