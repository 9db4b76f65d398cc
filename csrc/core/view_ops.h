// What each PyTorch view operator makes of a geometry.
//
// Pure integers: no torch, no Python, no I/O. Sizes, strides (also those of dimensions of size 1), offset and
// element type come out as PyTorch 2.13 computes them; what PyTorch refuses, or what leaves 64 bits, is
// answered by false. Nothing allocates.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

namespace tensorplay {

inline constexpr int kMaxViewDims = 16;

struct ElementType {
  int16_t dtype = 0;     // opaque, only compared
  int16_t partner = -1;  // of a complex type its real one, of a real one its complex one; -1: none
  int16_t itemsize = 1;
  bool is_complex = false;
  bool is_conj = false;
  bool is_neg = false;

  friend bool operator==(const ElementType&, const ElementType&) = default;
};

struct View {
  int dims = 0;
  std::array<int64_t, kMaxViewDims> sizes;    // the first `dims` are set
  std::array<int64_t, kMaxViewDims> strides;  // in elements; never negative
  int64_t offset = 0;                         // in elements
  ElementType element;

  friend bool operator==(const View& a, const View& b);
};

enum class ViewOp : uint8_t {
  kSelect,         // dim, index
  kNarrow,         // dim, start, length
  kSlice,          // dim, start, end, step
  kTranspose,      // dim0, dim1
  kT,              //
  kPermute,        // the dims
  kView,           // the sizes
  kFlatten,        // start_dim, end_dim
  kUnflatten,      // dim, then the sizes
  kUnsqueeze,      // dim
  kSqueeze,        // dim
  kSqueezeAll,     //
  kExpand,         // the sizes
  kDiagonal,       // offset, dim1, dim2
  kUnfold,         // dim, size, step
  kReal,           //
  kImag,           //
  kViewAsReal,     //
  kViewAsComplex,  //
  kViewDtype,      // dtype, partner, itemsize, is_complex
  kConj,           //
  kAsStrided,      // offset; sizes and strides are those of the result
};

// An operator with its arguments. Dimensions count from the front.
struct ViewCall {
  ViewOp op = ViewOp::kAsStrided;
  int count = 0;
  std::array<int64_t, kMaxViewDims> args;

  ViewCall() = default;
  explicit ViewCall(ViewOp named, std::initializer_list<int64_t> values = {});
  ViewCall(ViewOp named, std::span<const int64_t> values);

  std::span<const int64_t> values() const { return {args.data(), static_cast<size_t>(count)}; }
};

// Whether PyTorch takes the call, and what comes out. `to` is another object than `from`.
bool apply(const View& from, const ViewCall& call, View& to);

// The number of elements; false when it leaves 64 bits.
bool count_view(const View& view, int64_t& count);

// As x.view(dtype) and view_as_complex() hand over the type.
ViewCall view_dtype_call(const ElementType& element);

}  // namespace tensorplay
