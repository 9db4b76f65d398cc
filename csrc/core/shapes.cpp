#include "shapes.h"

namespace tensorplay {
namespace {

// Runs of dimensions that follow each other in memory, ones aside.
struct Chunk {
  int64_t count;
  int64_t stride;
  int first;  // of the dimensions
  int last;
};

std::vector<Chunk> chunks_of(const View& state) {
  std::vector<Chunk> chunks;  // innermost first
  for (int dim = state.dims - 1; dim >= 0; --dim) {
    if (state.sizes[dim] == 1) continue;
    int64_t joined = 0;
    if (!chunks.empty() && !__builtin_mul_overflow(chunks.back().count, chunks.back().stride, &joined) &&
        joined == state.strides[dim]) {
      chunks.back().count *= state.sizes[dim];
      chunks.back().first = dim;
    } else {
      chunks.push_back({state.sizes[dim], state.strides[dim], dim, dim});
    }
  }
  std::reverse(chunks.begin(), chunks.end());
  return chunks;
}

void append_factors(const Shape& head, int64_t count, std::vector<Shape>& out) {
  if (head.count >= kMaxViewDims - 1) return;
  Shape whole = head;
  if (count > 1) whole.push(count);
  out.push_back(whole);
  for (int64_t factor = 2; factor <= count / 2; ++factor) {
    if (count % factor != 0) continue;
    Shape longer = head;
    longer.push(factor);
    append_factors(longer, count / factor, out);
  }
}

// Where the target suggests to cut a chunk, each as the cells inside of the cut.
struct Cuts {
  std::vector<int64_t> stepped;   // a stride of the target
  std::vector<int64_t> diagonal;  // what a diagonal leaves of one
  std::vector<int64_t> present;   // cut in the state
  Few all;                        // these, and what the target's sizes suggest
};

Cuts cuts_of(const Chunk& chunk, const View& state, const View& target) {
  Cuts cuts;
  const auto within = [&chunk](int64_t cut) {
    return cut > 1 && cut < chunk.count && chunk.count % cut == 0;
  };
  const auto add = [&](int64_t cut, std::vector<int64_t>* also = nullptr) {
    if (!within(cut)) return;
    cuts.all.add(cut);
    if (also != nullptr) also->push_back(cut);
  };
  int64_t trailing = 1;
  for (int i = target.dims - 1; i >= 0; --i) {
    if (target.sizes[i] == 0) break;
    if (!__builtin_mul_overflow(trailing, target.sizes[i], &trailing)) add(trailing);
    add(target.sizes[i]);
    if (chunk.count % target.sizes[i] == 0) add(chunk.count / target.sizes[i]);
  }
  int64_t inner = 1;
  for (int i = chunk.last; i > chunk.first; --i) add(inner *= state.sizes[i], &cuts.present);
  for (int i = 0; i < target.dims && chunk.stride > 0; ++i) {
    const auto wanted = target_stride(target, state, i);
    if (!wanted) continue;
    for (int other = 0; other < state.dims; ++other) {
      const int64_t left = *wanted - state.strides[other];
      if (left > 0 && left % chunk.stride == 0) add(left / chunk.stride, &cuts.diagonal);
    }
    if (*wanted % chunk.stride != 0) continue;
    const int64_t cells = *wanted / chunk.stride;
    add(cells, &cuts.stepped);
    int64_t outer = 0;
    if (!__builtin_mul_overflow(cells, target.sizes[i], &outer)) add(outer);
    for (int64_t part = 1; part <= 64 && part < cells; ++part) {  // of a diagonal over two parts of the chunk
      if ((cells - part) % part != 0 || !within(cells - part)) continue;
      add(part, &cuts.diagonal);
      add(cells - part, &cuts.diagonal);
    }
  }
  return cuts;
}

// Cut wherever it is possible after the cuts before, from the least on or from the greatest.
Shape cut_at(std::vector<int64_t> cuts, int64_t count, bool from_greatest) {
  Shape shape;
  std::sort(cuts.begin(), cuts.end());
  if (from_greatest) {
    int64_t left = count;
    for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut) {
      if (*cut == left || left % *cut != 0) continue;
      shape.push(left / *cut);
      left = *cut;
    }
    shape.push(left);
    return shape;
  }
  int64_t done = 1;
  for (const int64_t cut : cuts) {
    if (cut == done || cut % done != 0) continue;
    shape = shape.with(0, cut / done);
    done = cut;
  }
  return shape.with(0, count / done);
}

std::vector<Shape> parts_of(const Chunk& chunk, const Cuts& cuts) {
  constexpr size_t kMostParts = 48;
  std::vector<Shape> parts(1);
  parts[0].push(chunk.count);
  for (const bool diagonal : {false, true}) {
    for (const bool present : {false, true}) {
      std::vector<int64_t> chosen = cuts.stepped;
      if (diagonal) chosen.insert(chosen.end(), cuts.diagonal.begin(), cuts.diagonal.end());
      if (present) chosen.insert(chosen.end(), cuts.present.begin(), cuts.present.end());
      parts.push_back(cut_at(chosen, chunk.count, true));
      parts.push_back(cut_at(chosen, chunk.count, false));
    }
  }
  for (const int64_t cut : cuts.all) {
    parts.push_back(cut_at({cut}, chunk.count, true));
    for (const int64_t wider : cuts.all) {
      if (wider > cut && wider % cut == 0 && parts.size() < kMostParts) {
        parts.push_back(cut_at({cut, wider}, chunk.count, true));
      }
    }
  }
  return parts;
}

}  // namespace

Shape shape_of(const View& view) {
  Shape shape;
  for (int i = 0; i < view.dims; ++i) shape.push(view.sizes[i]);
  return shape;
}

std::optional<int64_t> target_stride(const View& target, const View& state, int dim) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(target.strides[dim], target.element.itemsize, &bytes)) return std::nullopt;
  if (bytes % state.element.itemsize != 0) return std::nullopt;
  return bytes / state.element.itemsize;
}

namespace {

// The number of elements of all other dimensions; 0 where it leaves 64 bits.
int64_t count_others(const Shape& shape, int dim) {
  int64_t product = 1;
  for (int i = 0; i < shape.count; ++i) {
    if (i != dim && __builtin_mul_overflow(product, shape.sizes[i], &product)) return 0;
  }
  return product;
}

// `shape` with the size of `dim` that gives `count` elements, where there is one.
void add_resized(Shape shape, int dim, int64_t count, std::vector<Shape>& shapes) {
  const int64_t others = count_others(shape, dim);
  if (others <= 0 || count % others != 0) return;
  shape.sizes[dim] = count / others;
  shapes.push_back(shape);
}

Shape without_ones(const Shape& shape) {
  Shape bare;
  for (const int64_t size : shape.values()) {
    if (size != 1) bare.push(size);
  }
  return bare;
}

void add_orders(const Shape& goal, std::vector<Shape>& shapes) {
  constexpr size_t kMostOrders = 720;
  Shape shape = goal;
  std::sort(shape.sizes.begin(), shape.sizes.begin() + goal.count);
  for (size_t orders = 0; orders < kMostOrders; ++orders) {
    shapes.push_back(shape);
    if (!std::next_permutation(shape.sizes.begin(), shape.sizes.begin() + goal.count)) return;
  }
}

// Lengths that a dimension under a diagonal can have: up to the next step outwards from the one inwards,
// which are strides of the target or ends of chunks; next to the other such dimension, by the diagonal's own
// stride.
Few lengths_under_diagonal(const View& state, const View& target) {
  Few steps;
  Few ends;
  for (const Chunk& chunk : chunks_of(state)) {
    int64_t end = 0;
    steps.add(chunk.stride);
    if (!__builtin_mul_overflow(chunk.count, chunk.stride, &end)) ends.add(end);
  }
  for (int i = 0; i < target.dims; ++i) {
    const auto stride = target_stride(target, state, i);
    int64_t end = 0;
    if (!stride) continue;
    ends.add(*stride);
    if (!__builtin_mul_overflow(target.sizes[i], *stride, &end)) steps.add(end);
  }
  const auto diagonal = target_stride(target, state, target.dims - 1);
  Few lengths;
  for (const int64_t step : steps) {
    if (step == 0) continue;
    for (const int64_t end : ends) lengths.add(end / step);
    if (diagonal) lengths.add(*diagonal / step - 1);
  }
  return lengths;
}

// The result of a diagonal is the last dimension; the two before it are as long or longer.
void add_before_diagonal(const View& state, const View& target, int64_t count, std::vector<Shape>& shapes) {
  constexpr int64_t kMostTried = 4096;
  const Shape goal = shape_of(target);
  const int last = goal.count - 1;
  const Shape kept = goal.without(last);
  const int64_t others = count_others(goal, last);
  if (others <= 0 || count % others != 0) return;
  const int64_t both = count / others;
  const auto add = [&](int64_t a) {
    if (a < std::max<int64_t>(goal.sizes[last], 1) || both % a != 0 || both / a < goal.sizes[last]) return;
    for (int i = 0; i <= kept.count; ++i) {
      for (int j = i + 1; j <= kept.count + 1; ++j) {
        shapes.push_back(kept.with(i, a).with(j, both / a));
        if (a != both / a) shapes.push_back(kept.with(i, both / a).with(j, a));
      }
    }
  };
  if (both > kMostTried) {
    for (const int64_t length : lengths_under_diagonal(state, target)) add(length);
    return;
  }
  for (int64_t a = 1; a <= both / a; ++a) add(a);
}

// Ones where expand stretches; of those in front also fewer.
void add_before_expand(const View& target, std::vector<Shape>& shapes) {
  constexpr size_t kMostOpen = 64;
  std::vector<Shape> open(1);
  for (int i = target.dims - 1; i >= 0; --i) {
    const int64_t size = target.sizes[i];
    const bool stretches = size == 0 || (size != 1 && target.strides[i] == 0);
    const size_t known = open.size();
    for (size_t k = 0; k < known; ++k) {
      if (stretches && open.size() < kMostOpen) open.push_back(open[k].with(0, size));
      open[k] = open[k].with(0, stretches ? 1 : size);
    }
  }
  for (Shape shape : open) {
    shapes.push_back(shape);
    while (shape.count > 0 && shape.sizes[0] == 1) {
      shape = shape.without(0);
      shapes.push_back(shape);
    }
  }
}

void add_before_type(const Shape& goal, std::vector<Shape>& shapes) {
  shapes.push_back(goal);
  shapes.push_back(goal.with(goal.count, 2));  // view_as_complex
  if (goal.count == 0) return;
  const int last = goal.count - 1;
  shapes.push_back(goal.without(last));  // view_as_real
  for (const int64_t ratio : {2, 4, 8, 16}) {
    Shape shape = goal;
    if (goal.sizes[last] % ratio == 0) {
      shape.sizes[last] = goal.sizes[last] / ratio;
      shapes.push_back(shape);
    }
    if (!__builtin_mul_overflow(goal.sizes[last], ratio, &shape.sizes[last])) shapes.push_back(shape);
  }
}

}  // namespace

void shapes_before_last(const View& state, const View& target, std::vector<Shape>& shapes) {
  int64_t count = 0;
  int64_t target_count = 0;
  if (!count_view(state, count) || !count_view(target, target_count)) return;
  const Shape goal = shape_of(target);
  if (count == target_count) {
    add_orders(goal, shapes);  // before permute
    for (int i = 0; i < goal.count; ++i) {
      if (goal.sizes[i] == 1) shapes.push_back(goal.without(i));  // before unsqueeze
    }
    for (int i = 0; i <= goal.count; ++i) shapes.push_back(goal.with(i, 1));  // before squeeze
    // Before another view, which it frees from the strides of dimensions of size 1.
    shapes.push_back(without_ones(goal));
    shapes.push_back(without_ones(shape_of(state)));
  }
  if (target_count > 0 && count % target_count == 0) {  // before select
    for (int i = 0; i <= goal.count; ++i) shapes.push_back(goal.with(i, count / target_count));
  }
  for (int dim = 0; dim < goal.count; ++dim) add_resized(goal, dim, count, shapes);  // before slice
  if (goal.count >= 1) add_before_diagonal(state, target, count, shapes);
  if (goal.count >= 2) {  // before unfold, whose window is the last dimension
    const Shape kept = goal.without(goal.count - 1);
    for (int dim = 0; dim < kept.count; ++dim) add_resized(kept, dim, count, shapes);
  }
  add_before_expand(target, shapes);
  if (target.element != state.element) add_before_type(goal, shapes);
}

void shapes_by_factors(const View& state, std::vector<Shape>& shapes) {
  shapes.assign(1, Shape{});
  for (const Chunk& chunk : chunks_of(state)) {
    std::vector<Shape> longer;
    for (const Shape& head : shapes) append_factors(head, chunk.count, longer);
    shapes.swap(longer);
  }
}

void shapes_by_target(const View& state, const View& target, std::vector<Shape>& shapes) {
  int64_t count = 0;
  if (!count_view(state, count)) return;
  shapes.push_back(shape_of(target));
  if (count == 0) return;
  const std::vector<Chunk> chunks = chunks_of(state);
  for (size_t at = 0; at < chunks.size(); ++at) {
    for (const Shape& part : parts_of(chunks[at], cuts_of(chunks[at], state, target))) {
      for (const bool others_whole : {false, true}) {
        if (others_whole && chunks.size() == 1) continue;
        Shape shape;
        for (size_t other = 0; other < chunks.size(); ++other) {
          if (other == at) {
            for (const int64_t size : part.values()) shape.push(size);
          } else if (others_whole) {
            shape.push(chunks[other].count);
          } else {
            for (int i = chunks[other].first; i <= chunks[other].last; ++i) {
              if (state.sizes[i] != 1) shape.push(state.sizes[i]);
            }
          }
        }
        shapes.push_back(shape);
      }
    }
  }
}

void add_ones(int most, std::vector<Shape>& shapes) {
  size_t begin = 0;
  for (int ones = 0; ones < std::min(most, 3); ++ones) {
    const size_t end = shapes.size();
    for (size_t k = begin; k < end && shapes.size() < 2000; ++k) {
      if (shapes[k].count >= kMaxViewDims) continue;
      for (int at = 0; at <= shapes[k].count; ++at) {
        if (at > 0 && shapes[k].sizes[at - 1] == 1) continue;  // next to a one: the same shape
        shapes.push_back(shapes[k].with(at, 1));
      }
    }
    begin = end;
  }
}

}  // namespace tensorplay
