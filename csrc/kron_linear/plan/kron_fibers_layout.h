// How kernels of small factors (kron_linear_fibers.cu, kron_linear_fibers_bwd.cu) go through a chain of them.
#pragma once

#include <cmath>
#include <vector>

#include "kron_linear/fibers/kron_fibers.h"
#include "kron_plan.h"

namespace cuops {

struct KronFibersLayout {
  KronFibersChain chain{};
  KronFibersArray in{}, out{};  // of x and y
  std::vector<int> states;      // elements of a tile before each step, and after the last; yet to be placed in shared memory
  bool in_place = true;         // no step changes the size of its axis
  double products = 0;          // multiplications of a sample, or of the tile's columns of it

  double in_elements() const { return 1.0 * in.run * in.runs; }  // likewise
  double out_elements() const { return 1.0 * out.run * out.runs; }
};

// A weight of so many rows and columns, which starts at an element of shared memory.
KronFibersMatrix fibers_matrix(int at, int out, int in);

// What a tile costs: instructions of all warps and the most of one, cycles of shared memory, and cycles in which its block waits.
struct KronFibersCost {
  int threads;
  double words;       // of 32 bits, of an element of the sums
  double active = 1;  // the most warps of a block that have something to do
  double instructions = 0, longest = 0, shared = 0, waits = 0;

  // A pass by `warps` warps' worth of threads, so many of which a warp takes at a time, each with so many instructions, and
  // elements from or to shared memory.
  void add(double warps, double together, double each, double elements);

  // Cycles from start to end, with so many blocks on a multiprocessor.
  double round(double blocks) const;
};

// What the plans of the kernels differ in.
struct KronFibersKernel {
  bool gradient;
  int most_threads;
  int together;        // blocks of a gradient's launch up to which it adds up what these found, itself
  double moved;        // arrays of x's size, beside one of y's
  double start, load;  // ns of a launch; cycles until a tile is there
  int (*shared_elements)(const KronFibersLayout& layout, int threads);
  void (*add_steps)(const KronFibersLayout& layout, KronFibersCost* cost);
};

struct KronFibersPlan {
  KronFibersLayout layout;
  LaunchShape shape{};
  double nanoseconds = INFINITY, bytes = 0, operations = 0;
};

// The best tile; `nanoseconds` is infinite where there is no kernel for these factors.
KronFibersPlan plan_tiles(const KronProblem& problem, const KronDevice& device, const KronFibersKernel& kernel);

// The array as its rows are in memory.
KronFibersArray fibers_array(const KronFibersArray& array, const KronFibersChain& chain, const Rows& rows);

}  // namespace cuops
