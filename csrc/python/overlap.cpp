#include "overlap.h"

#include <vector>

#include "../core/overlap.h"
#include "call.h"
#include "values.h"

namespace tensorplay::python {
namespace {

// A region with what it spans.
struct OwnedRegion {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  long long offset = 0;
  long long itemsize = 0;
  long long origin_bytes = 0;

  Region region() const { return {sizes, strides, offset, itemsize, origin_bytes}; }
};

bool read_region(PyObject* object, OwnedRegion& into) {
  if (!PyTuple_Check(object)) {
    PyErr_Format(PyExc_TypeError, "a region is a tuple, not %.200s", Py_TYPE(object)->tp_name);
    return false;
  }
  PyObject* shape = nullptr;
  PyObject* stride = nullptr;
  if (!PyArg_ParseTuple(object,
                        "OOLL|L;a region is (shape, stride, storage_offset, itemsize[, origin_bytes])",
                        &shape, &stride, &into.offset, &into.itemsize, &into.origin_bytes) ||
      !read_geometry(shape, stride, into.sizes, into.strides)) {
    return false;
  }
  if (into.itemsize <= 0) {
    PyErr_SetString(PyExc_ValueError, "itemsize must be positive");
    return false;
  }
  return true;
}

bool read_regions(PyObject* sequence, std::vector<OwnedRegion>& into) {
  PyObject* fast = PySequence_Tuple(sequence);  // of our own: reading one must not change it
  if (fast == nullptr) return false;
  into.resize(static_cast<size_t>(PyTuple_GET_SIZE(fast)));
  bool good = true;
  for (size_t i = 0; good && i < into.size(); ++i) {
    good = read_region(PyTuple_GET_ITEM(fast, static_cast<Py_ssize_t>(i)), into[i]);
  }
  Py_DECREF(fast);
  return good;
}

std::vector<Region> spans_of(const std::vector<OwnedRegion>& owned) {
  std::vector<Region> regions;
  regions.reserve(owned.size());
  for (const OwnedRegion& each : owned) regions.push_back(each.region());
  return regions;
}

bool read_nbytes(PyObject* object, long long& into) {
  into = PyLong_AsLongLong(object);
  if (into == -1 && PyErr_Occurred() != nullptr) return false;
  if (into >= 0) return true;
  PyErr_SetString(PyExc_ValueError, "nbytes must not be negative");
  return false;
}

PyObject* overlap_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 2, 2, "overlap_of(a, b)")) return nullptr;
  return guarded([&]() -> PyObject* {
    OwnedRegion a;
    OwnedRegion b;
    if (!read_region(args[0], a) || !read_region(args[1], b)) return nullptr;
    // Nearly all pairs take a few microseconds; giving up the GIL could cost milliseconds.
    OverlapAnswer answer = overlap(a.region(), b.region(), Budget{256, 4096, 0});
    if (!answer.shared_bytes) {
      const WithoutGil released;
      answer = overlap(a.region(), b.region());
    }
    return Py_BuildValue("(NN)", interned(relation_name(answer.relation)),
                         optional_integer(answer.shared_bytes));
  });
}

PyObject* coverage_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 2, 2, "coverage_of(regions, nbytes)")) return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<OwnedRegion> owned;
    long long nbytes = 0;
    if (!read_regions(args[0], owned) || !read_nbytes(args[1], nbytes)) return nullptr;
    CoverageAnswer answer;
    {
      const WithoutGil released;
      answer = coverage(spans_of(owned), nbytes);
    }
    return Py_BuildValue("(NLL)", optional_integer(answer.bytes()), static_cast<long long>(answer.least),
                         static_cast<long long>(answer.most));
  });
}

PyObject* exclusive_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 3, 3, "exclusive_of(regions, index, nbytes)")) return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<OwnedRegion> owned;
    long long nbytes = 0;
    const Py_ssize_t index = PyLong_AsSsize_t(args[1]);
    if (index == -1 && PyErr_Occurred() != nullptr) return nullptr;
    if (!read_regions(args[0], owned) || !read_nbytes(args[2], nbytes)) return nullptr;
    if (index < 0 || static_cast<size_t>(index) >= owned.size()) {
      PyErr_SetString(PyExc_IndexError, "no region has this index");
      return nullptr;
    }
    std::optional<int64_t> bytes;
    {
      const WithoutGil released;
      bytes = exclusive_bytes(spans_of(owned), static_cast<size_t>(index), nbytes);
    }
    return optional_integer(bytes);
  });
}

PyMethodDef methods[] = {
    {"overlap_of", fast_call(overlap_of), METH_FASTCALL,
     "overlap_of(a, b, /)\n--\n\nAnswer how the bytes of two regions relate (disjoint, identical, "
     "first_in_second, second_in_first, partial, overlapping or too_hard) and how many they share, or None."},
    {"coverage_of", fast_call(coverage_of), METH_FASTCALL,
     "coverage_of(regions, nbytes, /)\n--\n\nAnswer how many bytes of a storage some regions reach: the "
     "number or None, and bounds of it."},
    {"exclusive_of", fast_call(exclusive_of), METH_FASTCALL,
     "exclusive_of(regions, index, nbytes, /)\n--\n\nAnswer how many bytes of a storage one region reaches "
     "and no other, or None."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_overlap_functions(PyObject* module) {
  return PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tensorplay::python
