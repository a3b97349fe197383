// What the host tells the kernels of the Cross-Entropy Method. The kernels change the method's state in place.
#pragma once

#include "dtype.h"

namespace cuops {

// Finds the elites of each problem: the best finite scores, ties by index.
struct EliteSelectParams {
  const void* scores;  // (problems, n)
  int* indices;        // (problems, elites), ascending; -1 where there are fewer finite scores
  int* kept_indices;   // (problems, kept): the best of them, likewise
  int* counts;         // (problems, 3): finite elites; the best one; the same where it beats best_score, else -1
  double* summary;     // (problems, 4): best, mean and worst of the elites' scores, best so far
  double* best_score;  // (problems)
  int* kept_count;     // (problems): rows of `kept` that hold an elite
  long long* clock;    // steps since the start, seed of the next samples, seed of the method, steps in all
  long long n;         // samples of a problem
  int elites;
  int kept;
  DType dtype;  // of the scores
  bool maximize;
};
static_assert(sizeof(EliteSelectParams) == 88, "host and device must agree on the layout");

// Refits mean and standard deviation to the elites.
struct EliteMomentsParams {
  const void* population;  // (problems, n, d)
  const int* indices;      // as above, and so are the next three
  const int* kept_indices;
  const int* counts;
  const long long* clock;
  void* mu;      // (problems, d), as all of the state in the dtype of the sums
  void* sigma;   // (problems, d)
  void* best_x;  // (problems, d)
  void* kept;    // (problems, kept_rows, d)
  long long n, d;
  int elites;
  int kept_rows;
  unsigned tiles;                        // blocks of a problem, each with some of its columns
  DType dtype;                           // of the population
  double smoothing_mu, smoothing_sigma;  // weight of the new moments
  double decay, floor, ceiling;          // of sigma
  double noise, noise_decrease;          // added to the variance; what it loses each step
};
static_assert(sizeof(EliteMomentsParams) == 160, "host and device must agree on the layout");

}  // namespace cuops
