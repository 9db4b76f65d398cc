#include "view_ops.h"

#include <algorithm>

namespace tensorplay {
namespace {

bool multiply(int64_t a, int64_t b, int64_t& product) {
  return !__builtin_mul_overflow(a, b, &product);
}

// sum += a * b
bool add_product(int64_t& sum, int64_t a, int64_t b) {
  int64_t product = 0;
  return multiply(a, b, product) && !__builtin_add_overflow(sum, product, &sum);
}

bool has_dim(const View& view, int64_t dim) {
  return dim >= 0 && dim < view.dims;
}

// A search makes millions of these; most of the room is unused.
void copy_used(const View& from, View& to) {
  to.dims = from.dims;
  to.offset = from.offset;
  to.element = from.element;
  for (int i = 0; i < from.dims; ++i) {
    to.sizes[i] = from.sizes[i];
    to.strides[i] = from.strides[i];
  }
}

void erase_dim(View& view, int64_t dim) {
  for (int64_t i = dim; i + 1 < view.dims; ++i) {
    view.sizes[i] = view.sizes[i + 1];
    view.strides[i] = view.strides[i + 1];
  }
  --view.dims;
}

bool insert_dim(View& view, int64_t dim, int64_t size, int64_t stride) {
  if (view.dims >= kMaxViewDims) return false;
  for (int64_t i = view.dims; i > dim; --i) {
    view.sizes[i] = view.sizes[i - 1];
    view.strides[i] = view.strides[i - 1];
  }
  view.sizes[dim] = size;
  view.strides[dim] = stride;
  ++view.dims;
  return true;
}

bool select(View& view, int64_t dim, int64_t index) {
  if (!has_dim(view, dim) || index < 0 || index >= view.sizes[dim]) return false;
  if (!add_product(view.offset, index, view.strides[dim])) return false;
  erase_dim(view, dim);
  return true;
}

bool slice(View& view, int64_t dim, int64_t start, int64_t end, int64_t step) {
  if (!has_dim(view, dim) || start < 0 || end < 0 || step < 1) return false;
  const int64_t size = view.sizes[dim];
  start = std::min(start, size);
  end = std::clamp(end, start, size);
  if (!add_product(view.offset, start, view.strides[dim])) return false;
  view.sizes[dim] = end == start ? 0 : (end - start - 1) / step + 1;
  return multiply(view.strides[dim], step, view.strides[dim]);
}

bool narrow(View& view, int64_t dim, int64_t start, int64_t length) {
  if (!has_dim(view, dim) || start < 0 || length < 0) return false;
  if (start > view.sizes[dim] || length > view.sizes[dim] - start) return false;
  return slice(view, dim, start, start + length, 1);
}

bool transpose(View& view, int64_t a, int64_t b) {
  if (!has_dim(view, a) || !has_dim(view, b)) return false;
  std::swap(view.sizes[a], view.sizes[b]);
  std::swap(view.strides[a], view.strides[b]);
  return true;
}

bool permute(const View& from, std::span<const int64_t> order, View& to) {
  if (order.size() != static_cast<size_t>(from.dims)) return false;
  uint32_t seen = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    if (!has_dim(from, order[i]) || (seen >> order[i] & 1) != 0) return false;
    seen |= uint32_t{1} << order[i];
    to.sizes[i] = from.sizes[order[i]];
    to.strides[i] = from.strides[order[i]];
  }
  return true;
}

bool equal_sizes(const View& view, std::span<const int64_t> sizes) {
  return std::equal(sizes.begin(), sizes.end(), view.sizes.begin(), view.sizes.begin() + view.dims);
}

// Strides of a tensor without elements that changes its shape: as if it were newly made.
bool fresh_strides(std::span<const int64_t> sizes, View& to) {
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    to.strides[i] = stride;
    if (!multiply(stride, std::max<int64_t>(sizes[i], 1), stride)) return false;
  }
  return true;
}

// at::detail::computeStride (ATen/TensorUtils.cpp, torch 2.13). From the last dimension on, dimensions of the
// old shape that follow each other in memory form a chunk, and the new dimensions must fill chunk by chunk.
bool view_strides(const View& from, std::span<const int64_t> sizes, View& to) {
  if (from.dims == 0) {
    std::fill_n(to.strides.begin(), sizes.size(), 1);
    return true;
  }
  int next = static_cast<int>(sizes.size()) - 1;
  int64_t chunk_stride = from.strides[from.dims - 1];
  int64_t old_count = 1;
  int64_t new_count = 1;
  for (int dim = from.dims - 1; dim >= 0; --dim) {
    old_count *= from.sizes[dim];
    if (dim > 0) {
      int64_t joined = 0;
      const bool joins = multiply(old_count, chunk_stride, joined) && from.strides[dim - 1] == joined;
      if (joins || from.sizes[dim - 1] == 1) continue;
    }
    while (next >= 0 && (new_count < old_count || sizes[next] == 1)) {
      if (!multiply(new_count, chunk_stride, to.strides[next])) return false;
      new_count *= sizes[next--];
    }
    if (new_count != old_count) return false;
    if (dim > 0) chunk_stride = from.strides[dim - 1];
    old_count = 1;
    new_count = 1;
  }
  return next == -1;
}

bool view(const View& from, std::span<const int64_t> sizes, View& to) {
  if (sizes.size() > kMaxViewDims) return false;
  int64_t before = 0;
  int64_t after = 1;
  if (!count_view(from, before)) return false;
  bool empty = false;
  for (const int64_t size : sizes) {
    if (size < 0) return false;
    empty = empty || size == 0;
    if (!empty && !multiply(after, size, after)) return false;
  }
  if (before != (empty ? 0 : after)) return false;
  if (empty && equal_sizes(from, sizes)) return true;
  if (!(empty ? fresh_strides(sizes, to) : view_strides(from, sizes, to))) return false;
  std::copy(sizes.begin(), sizes.end(), to.sizes.begin());
  to.dims = static_cast<int>(sizes.size());
  return true;
}

// Both are views of the whole shape with one part of it replaced.
bool flatten(const View& from, int64_t first, int64_t last, View& to) {
  if (!has_dim(from, first) || !has_dim(from, last) || first > last) return false;
  if (first == last) return true;
  std::array<int64_t, kMaxViewDims> sizes{};
  size_t count = 0;
  int64_t merged = 1;
  for (int i = 0; i < from.dims; ++i) {
    if (i < first || i > last) {
      sizes[count++] = from.sizes[i];
      continue;
    }
    if (!multiply(merged, from.sizes[i], merged)) return false;
    if (i == last) sizes[count++] = merged;
  }
  return view(from, {sizes.data(), count}, to);
}

bool unflatten(const View& from, int64_t dim, std::span<const int64_t> parts, View& to) {
  if (!has_dim(from, dim) || parts.empty() || from.dims - 1 + parts.size() > kMaxViewDims) return false;
  int64_t product = 1;
  for (const int64_t part : parts) {
    if (part < 0 || !multiply(product, part, product)) return false;
  }
  if (product != from.sizes[dim]) return false;
  std::array<int64_t, kMaxViewDims> sizes{};
  auto out = std::copy_n(from.sizes.begin(), dim, sizes.begin());
  out = std::copy(parts.begin(), parts.end(), out);
  out = std::copy(from.sizes.begin() + dim + 1, from.sizes.begin() + from.dims, out);
  return view(from, {sizes.data(), static_cast<size_t>(out - sizes.begin())}, to);
}

bool unsqueeze(View& view, int64_t dim) {
  if (dim < 0 || dim > view.dims) return false;
  int64_t stride = 1;
  if (dim < view.dims && !multiply(view.sizes[dim], view.strides[dim], stride)) return false;
  return insert_dim(view, dim, 1, stride);
}

bool squeeze(View& view, int64_t dim) {
  if (!has_dim(view, dim)) return false;
  if (view.sizes[dim] == 1) erase_dim(view, dim);
  return true;
}

void squeeze_all(View& view) {
  for (int dim = view.dims - 1; dim >= 0; --dim) squeeze(view, dim);
}

// at::inferExpandGeometry (ATen/ExpandUtils.cpp, torch 2.13).
bool expand(const View& from, std::span<const int64_t> sizes, View& to) {
  const auto added = static_cast<int64_t>(sizes.size()) - from.dims;
  if (added < 0 || sizes.size() > kMaxViewDims) return false;
  to.dims = static_cast<int>(sizes.size());
  for (int i = to.dims - 1; i >= 0; --i) {
    int64_t size = 1;
    int64_t stride = 0;  // also of a new dimension of size 1 where there was none
    if (i >= added) {
      size = from.sizes[i - added];
      stride = from.strides[i - added];
    } else if (from.dims > 0 && !multiply(to.sizes[i + 1], to.strides[i + 1], stride)) {
      return false;
    }
    if (sizes[i] < 0 || (size != sizes[i] && size != 1)) return false;
    to.sizes[i] = sizes[i];
    to.strides[i] = size == sizes[i] ? stride : 0;
  }
  return true;
}

bool diagonal(View& view, int64_t offset, int64_t dim1, int64_t dim2) {
  if (!has_dim(view, dim1) || !has_dim(view, dim2) || dim1 == dim2) return false;
  if (offset == INT64_MIN) return false;
  const int64_t room1 = view.sizes[dim1] + std::min<int64_t>(offset, 0);
  const int64_t room2 = view.sizes[dim2] - std::max<int64_t>(offset, 0);
  const int64_t size = std::max<int64_t>(std::min(room1, room2), 0);
  const int64_t moved = offset >= 0 ? view.strides[dim2] : view.strides[dim1];
  if (size > 0 && !add_product(view.offset, offset >= 0 ? offset : -offset, moved)) return false;
  int64_t stride = 0;
  if (__builtin_add_overflow(view.strides[dim1], view.strides[dim2], &stride)) return false;
  erase_dim(view, std::max(dim1, dim2));
  erase_dim(view, std::min(dim1, dim2));
  return insert_dim(view, view.dims, size, stride);
}

bool unfold(View& view, int64_t dim, int64_t size, int64_t step) {
  if (size < 0 || step < 1) return false;
  if (view.dims == 0) return dim == 0 && size <= 1 && insert_dim(view, 0, size, 1);
  if (!has_dim(view, dim) || size > view.sizes[dim]) return false;
  const int64_t stride = view.strides[dim];
  view.sizes[dim] = (view.sizes[dim] - size) / step + 1;
  return multiply(stride, step, view.strides[dim]) && insert_dim(view, view.dims, size, stride);
}

bool has_real_partner(const View& view) {
  return view.element.is_complex && view.element.partner >= 0;
}

void make_real(ElementType& element) {
  std::swap(element.dtype, element.partner);
  element.itemsize = static_cast<int16_t>(element.itemsize / 2);
  element.is_complex = false;
  element.is_conj = false;
}

bool multiply_strides(View& view, int64_t factor) {
  for (int i = 0; i < view.dims; ++i) {
    if (!multiply(view.strides[i], factor, view.strides[i])) return false;
  }
  return multiply(view.offset, factor, view.offset);
}

bool divide_strides(View& view, int dims, int64_t divisor) {
  for (int i = 0; i < dims; ++i) {
    if (view.strides[i] % divisor != 0) return false;
    view.strides[i] /= divisor;
  }
  if (view.offset % divisor != 0) return false;
  view.offset /= divisor;
  return true;
}

bool view_as_real(View& view) {
  if (!has_real_partner(view) || view.element.is_conj) return false;
  make_real(view.element);
  return multiply_strides(view, 2) && insert_dim(view, view.dims, 2, 1);
}

// real() and imag(): a part of the same numbers without the conjugate bit; of the imaginary part the
// negative.
bool part_of_complex(View& view, int64_t part) {
  const bool negates = part == 1 && view.element.is_conj;
  view.element.is_conj = false;
  if (!view_as_real(view) || !select(view, view.dims - 1, part)) return false;
  view.element.is_neg = view.element.is_neg != negates;
  return true;
}

bool view_as_complex(View& view) {
  if (view.element.is_complex || view.element.partner < 0 || view.dims == 0) return false;
  const int last = view.dims - 1;
  if (view.sizes[last] != 2 || view.strides[last] != 1 || !divide_strides(view, last, 2)) return false;
  std::swap(view.element.dtype, view.element.partner);
  view.element.itemsize = static_cast<int16_t>(view.element.itemsize * 2);
  view.element.is_complex = true;
  --view.dims;
  return true;
}

bool view_dtype(View& view, const ElementType& element) {
  if (view.element.is_conj || view.element.is_neg) return false;
  const int64_t before = view.element.itemsize;
  const int64_t after = element.itemsize;
  view.element = element;
  if (before == after) return true;
  if (view.dims == 0) return false;
  const int last = view.dims - 1;
  if (view.strides[last] != 1) return false;
  if (before > after) {
    if (before % after != 0 || !multiply_strides(view, before / after)) return false;
    view.strides[last] = 1;
    return multiply(view.sizes[last], before / after, view.sizes[last]);
  }
  if (after % before != 0 || view.sizes[last] % (after / before) != 0) return false;
  view.sizes[last] /= after / before;
  return divide_strides(view, last, after / before);
}

}  // namespace

bool operator==(const View& a, const View& b) {
  return a.dims == b.dims && a.offset == b.offset && a.element == b.element &&
         std::equal(a.sizes.begin(), a.sizes.begin() + a.dims, b.sizes.begin()) &&
         std::equal(a.strides.begin(), a.strides.begin() + a.dims, b.strides.begin());
}

ViewCall::ViewCall(ViewOp named, std::initializer_list<int64_t> values)
    : ViewCall(named, std::span<const int64_t>(values.begin(), values.size())) {}

ViewCall::ViewCall(ViewOp named, std::span<const int64_t> values)
    : op(named), count(static_cast<int>(values.size())) {
  std::copy(values.begin(), values.end(), args.begin());
}

ViewCall view_dtype_call(const ElementType& element) {
  return ViewCall(ViewOp::kViewDtype, {element.dtype, element.partner, element.itemsize, element.is_complex});
}

bool count_view(const View& view, int64_t& count) {
  count = 1;
  for (int i = 0; i < view.dims; ++i) {
    if (view.sizes[i] == 0) {
      count = 0;
      return true;
    }
  }
  for (int i = 0; i < view.dims; ++i) {
    if (!multiply(count, view.sizes[i], count)) return false;
  }
  return true;
}

bool apply(const View& from, const ViewCall& call, View& to) {
  const auto& args = call.args;
  const std::span<const int64_t> values = call.values();
  copy_used(from, to);
  switch (call.op) {
    case ViewOp::kSelect:
      return select(to, args[0], args[1]);
    case ViewOp::kNarrow:
      return narrow(to, args[0], args[1], args[2]);
    case ViewOp::kSlice:
      return slice(to, args[0], args[1], args[2], args[3]);
    case ViewOp::kTranspose:
      return transpose(to, args[0], args[1]);
    case ViewOp::kT:
      return to.dims == 2 && transpose(to, 0, 1);
    case ViewOp::kPermute:
      return permute(from, values, to);
    case ViewOp::kView:
      return view(from, values, to);
    case ViewOp::kFlatten:
      return flatten(from, args[0], args[1], to);
    case ViewOp::kUnflatten:
      return unflatten(from, args[0], values.subspan(1), to);
    case ViewOp::kUnsqueeze:
      return unsqueeze(to, args[0]);
    case ViewOp::kSqueeze:
      return squeeze(to, args[0]);
    case ViewOp::kSqueezeAll:
      squeeze_all(to);
      return true;
    case ViewOp::kExpand:
      return expand(from, values, to);
    case ViewOp::kDiagonal:
      return diagonal(to, args[0], args[1], args[2]);
    case ViewOp::kUnfold:
      return unfold(to, args[0], args[1], args[2]);
    case ViewOp::kReal:
      return part_of_complex(to, 0);
    case ViewOp::kImag:
      return part_of_complex(to, 1);
    case ViewOp::kViewAsReal:
      return view_as_real(to);
    case ViewOp::kViewAsComplex:
      return view_as_complex(to);
    case ViewOp::kViewDtype:
      return view_dtype(to, {static_cast<int16_t>(args[0]), static_cast<int16_t>(args[1]),
                             static_cast<int16_t>(args[2]), args[3] != 0});
    case ViewOp::kConj:
      to.element.is_conj = !to.element.is_conj;
      return to.element.is_complex;
    case ViewOp::kAsStrided:
      return false;
  }
  return false;
}

}  // namespace tensorplay
