// Sums of losses that keep the graphs of several steps alive: what was added up, and whether it is proven
// that an optimizer stepped, or a backward ran, between the terms.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "graph.h"

namespace tensorplay {

// A sum of terms that each have a graph of their own, or several roots that have.
struct Accumulation {
  std::vector<size_t> roots;  // one: the sum; more: the terms themselves, as the items of a list
  uint64_t terms = 0;
  uint64_t released = 0;       // terms that a backward ran through already
  bool shares_places = false;  // some place in the model saved in each: they are terms of one kind of loss
  // One place saved another version of its parameter in each term: an optimizer's step lies between.
  bool weights_moved = false;

  bool spans_steps() const { return weights_moved || (terms > 2 && 0 < released && released < terms); }
};

// The sums of one element of terms of one kind, made by the same places in a model; and, where it is proven
// that they span steps, sums of more elements, sums of several kinds, and roots of one element and one kind.
// Reads at most `budget` nodes, what terms share once for each. Needs what walk_graph() needs.
std::vector<Accumulation> find_accumulations(std::span<const GraphRoot> roots, PythonSaved python_saved,
                                             uint64_t budget);

}  // namespace tensorplay
