// Sums over the threads of a team that are posted for one row and collected while the next row is worked on.
#pragma once

#include "device/reduce.cuh"

namespace cuops {

template <class Acc>
struct MailboxMemory {
  static constexpr int kSlots = 6, kMostTeams = 16, kMostWarps = CUOPS_CLUSTERS ? 256 : 16;
  unsigned long long arrived[kMostTeams][kSlots];
  alignas(16) Acc sums[kSlots][kMostWarps][2];
};

// A team is a part of a warp, a block's warps of one threadIdx.y, or all blocks of a cluster. Two values are reduced at a time.
// Every warp writes its sums to each block of the team and signals its arrival on the receiver's barrier. Four slots take turns:
// a warp that posts for the row after next has seen what the others posted two rows before.
template <class Acc>
class Mailbox {
 public:
  unsigned index = blockIdx.x;    // of the block or cluster in the grid
  unsigned rank = 0, blocks = 1;  // of this block in the cluster, and all

  __device__ explicit Mailbox(MailboxMemory<Acc>& memory) : memory_(memory) {
#if CUOPS_CLUSTERS
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    if (blocks > 1) asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
    if (blockDim.x <= 32) return;
    if (threadIdx.x + threadIdx.y == 0) {
#pragma unroll 1
      for (unsigned team = 0; team < blockDim.y; ++team) {
#pragma unroll 1
        for (int slot = 0; slot < memory_.kSlots; ++slot) {
          asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&memory_.arrived[team][slot])),
                       "r"(blocks > 1 ? 1 : warps())
                       : "memory");
        }
      }
#if CUOPS_CLUSTERS
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    __syncthreads();
#if CUOPS_CLUSTERS
    if (blocks > 1) asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
  }

  // Whether the condition holds for any row of this warp: what a warp decides, it must decide as one.
  __device__ bool any(bool condition) const { return blockDim.x <= 32 ? __any_sync(0xffffffffu, condition) : condition; }

  __device__ void post(const Acc (&v)[2], bool active) {
    ready_[0] = pending_[0];
    ready_[1] = pending_[1];
    pending_[0] = v[0];
    pending_[1] = v[1];
    reduce_warp(pending_, true);
    if (blockDim.x <= 32 || !active) return;
    send(pending_, posted_++ & 3);
  }
  // What was posted before the last.
  __device__ void collect(Acc (&v)[2]) {
    if (blockDim.x <= 32) {
      v[0] = ready_[0];
      v[1] = ready_[1];
    } else {
      receive(v, collected_ & 3, collected_ >> 2 & 1, true);
      ++collected_;
    }
  }
  // At once, for the rare row: the sums, or the largest first value.
  __device__ void exchange(Acc (&v)[2], bool sum) {
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
  __device__ static Acc combine(Acc a, Acc b, bool sum) { return sum ? a + b : Max()(a, b); }
  __device__ static void reduce_warp(Acc (&v)[2], bool sum) {
    for (int k = 0; k < 2; ++k) {
      auto op = [&](Acc a, Acc b) { return combine(a, b, sum); };
      v[k] = blockDim.x >= 32 ? reduce_lanes(v[k], 32, op) : reduce_lanes(v[k], blockDim.x, op);
    }
  }

  __device__ void send(const Acc (&v)[2], int slot) {
    __syncwarp();  // what this warp reads of earlier rows, it has read
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if CUOPS_CLUSTERS
    if (blocks > 1 && threadIdx.x == 0) expect(slot);  // stores that arrived before are counted too
#endif
    if (lane >= blocks) return;
    unsigned long long* const arrived = &memory_.arrived[threadIdx.y][slot];
    Acc* const to = memory_.sums[slot][(threadIdx.y + rank) * warps() + warp];
#if CUOPS_CLUSTERS
    if (blocks > 1) {
      const unsigned there = address_in(lane, to), barrier = address_in(lane, arrived);
      if constexpr (sizeof(Acc) == 8) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(there),
                     "l"(__double_as_longlong(v[0])), "l"(__double_as_longlong(v[1])), "r"(barrier)
                     : "memory");
      } else {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(there),
                     "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(barrier)
                     : "memory");
      }
      return;
    }
#endif
    to[0] = v[0];
    to[1] = v[1];
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(shared_address(arrived)) : "memory");
  }

  __device__ void receive(Acc (&v)[2], int slot, unsigned parity, bool sum) {
    wait(&memory_.arrived[threadIdx.y][slot], parity);
    v[0] = v[1] = 0;
#pragma unroll 1
    for (unsigned i = threadIdx.x % 32; i < warps() * blocks; i += 32) {
      const Acc* const from = memory_.sums[slot][threadIdx.y * warps() + i];
      v[0] = combine(v[0], from[0], sum);
      v[1] = combine(v[1], from[1], sum);
    }
    reduce_warp(v, sum);
  }

#if CUOPS_CLUSTERS
  __device__ void expect(int slot) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&memory_.arrived[0][slot])),
                 "r"(static_cast<unsigned>(sizeof(Acc)) * 2 * warps() * blocks)
                 : "memory");
  }
#endif

  __device__ static void wait(unsigned long long* arrived, unsigned parity) {
    unsigned done = 0;
    while (!done) {
      asm volatile(
          "{\n\t.reg .pred p;\n\t"
#if CUOPS_CLUSTERS
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
#else
          "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n\t"
#endif
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(shared_address(arrived)), "r"(parity)
          : "memory");
    }
  }

  MailboxMemory<Acc>& memory_;
  Acc pending_[2] = {}, ready_[2] = {};
  unsigned posted_ = 0, collected_ = 0, exchanged_ = 0;
};

}  // namespace cuops
