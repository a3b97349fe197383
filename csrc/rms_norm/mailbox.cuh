// Sums over the threads of a team that are posted for one row and collected while the next row is worked on.
#pragma once

#include "device/reduce.cuh"

namespace cuops {

struct MailboxMemory {
  static constexpr int kSlots = 6, kMostTeams = 16, kMostWarps = CUOPS_CLUSTERS ? 256 : 16;
  unsigned long long arrived[kMostTeams][kSlots];
  alignas(16) float sums[kSlots][kMostWarps][2];
};

// A team is a part of a warp, a block's warps of one threadIdx.y, or all blocks of a cluster. Two values are reduced at a time.
// Every warp writes its sums to each block of the team, whose barriers count them; in a block alone, each lane that reads them
// arrives there. Four slots take turns, and two for exchange(): a warp that posts for the row after next has seen what the others
// posted two rows before.
class Mailbox {
 public:
  unsigned index = blockIdx.x;                                // of the block or cluster in the grid
  unsigned rank = cluster_rank(), blocks = cluster_blocks();  // of this block in the cluster, and all

  __device__ explicit Mailbox(MailboxMemory& memory) : memory_(memory) {
    if (blocks > 1) index = cluster_index();
    if (blockDim.x <= 32) return;
    if (threadIdx.x + threadIdx.y == 0) {
#pragma unroll 1
      for (unsigned team = 0; team < blockDim.y; ++team) {
#pragma unroll 1
        for (int slot = 0; slot < memory_.kSlots; ++slot) {
          init_arrivals(&memory_.arrived[team][slot], blocks > 1 ? 1 : static_cast<int>(warps() * warps()));
        }
      }
#if CUOPS_CLUSTERS
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
    if (blocks > 1) cluster_barrier();
  }

  // Whether the condition holds for any row of this warp: what a warp decides, it must decide as one.
  __device__ bool any(bool condition) const { return blockDim.x <= 32 ? __any_sync(0xffffffffu, condition) : condition; }

  __device__ void post(const float (&v)[2], bool active) {
    ready_[0] = pending_[0];
    ready_[1] = pending_[1];
    pending_[0] = v[0];
    pending_[1] = v[1];
    reduce_warp(pending_, true);
    if (blockDim.x <= 32 || !active) return;
    send(pending_, posted_++ & 3);
  }
  // What was posted before the last.
  __device__ void collect(float (&v)[2]) {
    if (blockDim.x <= 32) {
      v[0] = ready_[0];
      v[1] = ready_[1];
    } else {
      receive(v, collected_ & 3, collected_ >> 2 & 1, true);
      ++collected_;
    }
  }
  // At once, for the rare row: the sums, or the largest first value.
  __device__ void exchange(float (&v)[2], bool sum) {
    reduce_warp(v, sum);
    if (blockDim.x <= 32) return;
    const int slot = 4 + (exchanged_ & 1);
    send(v, slot);
    receive(v, slot, exchanged_ >> 1 & 1, sum);
    ++exchanged_;
  }

 private:
  __device__ static unsigned warps() { return blockDim.x / 32; }

  // Of all values the sum, or of the first the largest.
  __device__ static float combine(float a, float b, bool sum) { return sum ? a + b : Max()(a, b); }
  __device__ static void reduce_warp(float (&v)[2], bool sum) {
    for (int k = 0; k < 2; ++k) {
      auto op = [&](float a, float b) { return combine(a, b, sum); };
      v[k] = blockDim.x >= 32 ? reduce_lanes(v[k], 32, op) : reduce_lanes(v[k], blockDim.x, op);
    }
  }

  __device__ void send(const float (&v)[2], int slot) {
    __syncwarp();  // what this warp reads of earlier rows, it has read
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if CUOPS_CLUSTERS
    if (blocks > 1 && threadIdx.x == 0)  // stores that arrived before are counted too
      arrive_expecting(&memory_.arrived[0][slot], static_cast<int>(sizeof(float) * 2 * warps() * blocks));
#endif
    if (lane >= (blocks > 1 ? blocks : warps())) return;  // of a block alone, each lane that reads arrives
    unsigned long long* const arrived = &memory_.arrived[threadIdx.y][slot];
    float* const to = memory_.sums[slot][(threadIdx.y + rank) * warps() + warp];
#if CUOPS_CLUSTERS
    if (blocks > 1) {
      const unsigned there = address_in(lane, to), barrier = address_in(lane, arrived);
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(there),
                   "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(barrier)
                   : "memory");
      return;
    }
#endif
    if (lane == 0) {
      to[0] = v[0];
      to[1] = v[1];
    }
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(shared_address(arrived)) : "memory");
  }

  __device__ void receive(float (&v)[2], int slot, unsigned parity, bool sum) {
    wait(&memory_.arrived[threadIdx.y][slot], parity);
    v[0] = v[1] = 0;
#pragma unroll 1
    for (unsigned i = threadIdx.x % 32; i < warps() * blocks; i += 32) {
      const float* const from = memory_.sums[slot][threadIdx.y * warps() + i];
      v[0] = combine(v[0], from[0], sum);
      v[1] = combine(v[1], from[1], sum);
    }
    reduce_warp(v, sum);
  }

  __device__ static void wait(unsigned long long* arrived, unsigned parity) {
#if CUOPS_CLUSTERS
    wait_for_sent(arrived, parity);
#else
    unsigned done = 0;
    while (!done) {
      asm volatile(
          "{\n\t.reg .pred p;\n\t"
          "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(shared_address(arrived)), "r"(parity)
          : "memory");
    }
#endif
  }

  MailboxMemory& memory_;
  float pending_[2] = {}, ready_[2] = {};
  unsigned posted_ = 0, collected_ = 0, exchanged_ = 0;
};

}  // namespace cuops
