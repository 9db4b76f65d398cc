#include "chain.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

#include "chain_search.h"
#include "extent.h"

namespace tensorplay {
namespace {

ViewCall plain_permute(const View& from, const ViewCall& call) {
  int moved = 0;
  int first = -1;
  int last = -1;
  for (int i = 0; i < call.count; ++i) {
    if (call.args[i] == i) continue;
    ++moved;
    if (first < 0) first = i;
    last = i;
  }
  if (moved != 2) return call;
  return from.dims == 2 ? ViewCall(ViewOp::kT) : ViewCall(ViewOp::kTranspose, {first, last});
}

// flatten or unflatten, where the rest of the shape stays.
ViewCall plain_view(const View& from, const ViewCall& call) {
  int head = 0;
  while (head < from.dims && head < call.count && from.sizes[head] == call.args[head]) ++head;
  int tail = 0;
  while (tail < from.dims - head && tail < call.count - head &&
         from.sizes[from.dims - 1 - tail] == call.args[call.count - 1 - tail]) {
    ++tail;
  }
  const int old_part = from.dims - head - tail;
  const int new_part = call.count - head - tail;
  if (old_part >= 2 && new_part == 1) return ViewCall(ViewOp::kFlatten, {head, from.dims - 1 - tail});
  if (old_part != 1 || new_part < 2 || from.dims == 1) return call;
  ViewCall named(ViewOp::kUnflatten, {head});
  for (int i = 0; i < new_part; ++i) named.args[named.count++] = call.args[head + i];
  return named;
}

ViewCall plain_call(const View& from, const ViewCall& call) {
  switch (call.op) {
    case ViewOp::kSlice:
      if (call.args[3] != 1) return call;
      return ViewCall(ViewOp::kNarrow, {call.args[0], call.args[1], call.args[2] - call.args[1]});
    case ViewOp::kPermute:
      return plain_permute(from, call);
    case ViewOp::kView:
      return plain_view(from, call);
    default:
      return call;
  }
}

Geometry to_geometry(const View& view) {
  return {{view.sizes.begin(), view.sizes.begin() + view.dims},
          {view.strides.begin(), view.strides.begin() + view.dims},
          view.offset,
          view.element};
}

// Absent where the search has no room or no rule for it.
std::optional<View> to_view(const Geometry& geometry) {
  // Room for what the operators add on the way.
  if (geometry.sizes.size() > kMaxViewDims - kMaxChainOps) return std::nullopt;
  if (geometry.sizes.size() != geometry.strides.size() || geometry.offset < 0) return std::nullopt;
  if (geometry.element.itemsize < 1 ||
      !std::has_single_bit(static_cast<unsigned>(geometry.element.itemsize))) {
    return std::nullopt;
  }
  View view;
  view.dims = static_cast<int>(geometry.sizes.size());
  view.sizes.fill(0);
  view.strides.fill(0);
  for (int i = 0; i < view.dims; ++i) {
    if (geometry.sizes[i] < 0 || geometry.strides[i] < 0) return std::nullopt;
    view.sizes[i] = geometry.sizes[i];
    view.strides[i] = geometry.strides[i];
  }
  view.offset = geometry.offset;
  view.element = geometry.element;
  return view;
}

ChainStep step_of(const ViewCall& call, const View& result) {
  const auto args = call.values();
  return {call.op, {args.begin(), args.end()}, to_geometry(result)};
}

ChainStep as_strided(const Geometry& geometry) {
  return {ViewOp::kAsStrided, {geometry.offset}, geometry};
}

// as_strided keeps the element type, so what changes it comes before.
void append_types(const View& base, const ElementType& wanted, std::vector<ChainStep>& steps) {
  if (base.element == wanted) return;
  ElementType bare = wanted;
  bare.is_conj = false;
  bare.is_neg = false;
  const std::array calls{ViewCall(ViewOp::kConj), ViewCall(ViewOp::kReal), ViewCall(ViewOp::kImag),
                         view_dtype_call(bare), ViewCall(ViewOp::kViewAsComplex)};
  View once;
  for (const ViewCall& call : calls) {
    if (!apply(base, call, once) || once.element != wanted) continue;
    steps.push_back(step_of(call, once));
    return;
  }
  for (const ViewCall& call : calls) {
    if (!apply(base, call, once)) continue;
    for (const ViewCall& second : calls) {
      View twice;
      if (!apply(once, second, twice) || twice.element != wanted) continue;
      steps.push_back(step_of(call, once));
      steps.push_back(step_of(second, twice));
      return;
    }
  }
}

// The bytes up to the target's end, flat: any element type can be had of them.
bool append_flat(const View& base, const View& target, std::vector<ChainStep>& steps) {
  const auto range = cell_range({target.sizes.data(), static_cast<size_t>(target.dims)},
                                {target.strides.data(), static_cast<size_t>(target.dims)}, target.offset);
  int64_t bytes = 0;
  if (!range || __builtin_mul_overflow(range->end, target.element.itemsize, &bytes)) return false;
  View flat;
  flat.dims = 1;
  const int64_t unit = std::max(base.element.itemsize, target.element.itemsize);
  if (__builtin_add_overflow(bytes, unit - 1, &bytes)) return false;
  flat.sizes[0] = bytes / unit * (unit / base.element.itemsize);
  flat.strides[0] = 1;
  flat.element = base.element;
  steps.push_back(as_strided(to_geometry(flat)));
  const size_t before = steps.size();
  append_types(flat, target.element, steps);
  return steps.size() > before;
}

void append_as_strided(const View& base, const View& target, std::vector<ChainStep>& steps) {
  append_types(base, target.element, steps);
  if (steps.empty() && base.element != target.element && !append_flat(base, target, steps)) steps.clear();
  steps.push_back(as_strided(to_geometry(target)));
}

}  // namespace

ChainAnswer infer_chain(const Geometry& base, const Geometry& target, int max_ops, int64_t max_nodes,
                        bool plain) {
  ChainAnswer answer;
  const std::optional<View> from = to_view(base);
  const std::optional<View> to = to_view(target);
  int64_t count = 0;
  if (!from || !to || !count_view(*from, count) || !count_view(*to, count)) {
    answer.complete = false;
    answer.ruled_out = -1;
    answer.steps.push_back(as_strided(target));
    return answer;
  }
  if (*from == *to) return answer;
  ChainSearch search(*from, *to, max_nodes, plain);
  for (int ops = 1; ops <= std::min(max_ops, kMaxChainOps); ++ops) {
    const bool found = search.run(ops);
    answer.nodes = search.nodes();
    if (found) {
      View state = *from;
      for (const ViewCall& call : search.found()) {
        ViewCall named = plain_call(state, call);
        View next;
        View same;
        apply(state, call, next);
        if (!apply(state, named, same) || !(same == next)) named = call;
        answer.steps.push_back(step_of(named, next));
        state = next;
      }
      return answer;
    }
    answer.complete = !search.left_out();
    if (answer.complete) answer.ruled_out = ops;
  }
  append_as_strided(*from, *to, answer.steps);
  return answer;
}

}  // namespace tensorplay
