#include "chain.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../core/chain.h"
#include "call.h"
#include "values.h"

namespace tensorplay::python {
namespace {

struct Partners {
  std::string_view complex;
  std::string_view real;
};
constexpr Partners kPartners[] = {
    {"complex32", "float16"}, {"complex64", "float32"}, {"complex128", "float64"}};

// The element types of one question, numbered as they come.
class TypeNames {
 public:
  int16_t number(std::string_view name) {
    const auto known = std::find(names_.begin(), names_.end(), name);
    if (known != names_.end()) return static_cast<int16_t>(known - names_.begin());
    names_.emplace_back(name);
    return static_cast<int16_t>(names_.size() - 1);
  }

  int16_t partner(std::string_view name) {
    for (const Partners& pair : kPartners) {
      if (name == pair.complex) return number(pair.real);
      if (name == pair.real) return number(pair.complex);
    }
    return -1;
  }

  const std::string& name(int64_t number) const { return names_[static_cast<size_t>(number)]; }

 private:
  std::vector<std::string> names_;
};

bool read_typed_geometry(PyObject* tuple, TypeNames& types, Geometry& out) {
  PyObject* sizes = nullptr;
  PyObject* strides = nullptr;
  long long offset = 0;
  int itemsize = 0;
  int is_complex = 0;
  int is_conj = 0;
  int is_neg = 0;
  const char* name = nullptr;
  if (!PyTuple_Check(tuple)) {
    PyErr_SetString(PyExc_TypeError, "a geometry is a tuple (shape, stride, storage_offset, itemsize, ...)");
    return false;
  }
  if (!PyArg_ParseTuple(tuple, "OOLippps", &sizes, &strides, &offset, &itemsize, &is_complex, &is_conj,
                        &is_neg, &name)) {
    return false;
  }
  if (!read_geometry(sizes, strides, out.sizes, out.strides)) return false;
  if (itemsize < 1 || itemsize > 64) {
    PyErr_SetString(PyExc_ValueError, "an element has 1 to 64 bytes");
    return false;
  }
  out.offset = offset;
  out.element.dtype = types.number(name);
  out.element.partner = types.partner(name);
  out.element.itemsize = static_cast<int16_t>(itemsize);
  out.element.is_complex = is_complex != 0;
  out.element.is_conj = is_conj != 0;
  out.element.is_neg = is_neg != 0;
  return true;
}

// The operator's name and its arguments by the names that PyTorch gives them.
PyObject* call_of(const ChainStep& step, const TypeNames& types) {
  const auto scalars = [&](const char* op, const char* a, const char* b, const char* c) {
    const auto at = [&](size_t i) { return static_cast<long long>(i < step.args.size() ? step.args[i] : 0); };
    PyObject* args = c != nullptr   ? Py_BuildValue("{s:L,s:L,s:L}", a, at(0), b, at(1), c, at(2))
                     : b != nullptr ? Py_BuildValue("{s:L,s:L}", a, at(0), b, at(1))
                     : a != nullptr ? Py_BuildValue("{s:L}", a, at(0))
                                    : PyDict_New();
    return Py_BuildValue("(sN)", op, args);
  };
  const auto list = [&](const char* op, const char* name) {
    return Py_BuildValue("(s{s:N})", op, name, integers(step.args));
  };
  switch (step.op) {
    case ViewOp::kSelect:
      return scalars("select", "dim", "index", nullptr);
    case ViewOp::kNarrow:
      return scalars("narrow", "dim", "start", "length");
    case ViewOp::kSlice:
      return Py_BuildValue("(s{s:L,s:L,s:L,s:L})", "slice", "dim", static_cast<long long>(step.args[0]),
                           "start", static_cast<long long>(step.args[1]), "end",
                           static_cast<long long>(step.args[2]), "step",
                           static_cast<long long>(step.args[3]));
    case ViewOp::kTranspose:
      return scalars("transpose", "dim0", "dim1", nullptr);
    case ViewOp::kT:
      return scalars("t", nullptr, nullptr, nullptr);
    case ViewOp::kPermute:
      return list("permute", "dims");
    case ViewOp::kView:
      return list("view", "size");
    case ViewOp::kFlatten:
      return scalars("flatten", "start_dim", "end_dim", nullptr);
    case ViewOp::kUnflatten:
      return Py_BuildValue("(s{s:L,s:N})", "unflatten", "dim", static_cast<long long>(step.args[0]), "sizes",
                           integers(DimSpan(step.args).subspan(1)));
    case ViewOp::kUnsqueeze:
      return scalars("unsqueeze", "dim", nullptr, nullptr);
    case ViewOp::kSqueeze:
      return scalars("squeeze", "dim", nullptr, nullptr);
    case ViewOp::kSqueezeAll:
      return scalars("squeeze", nullptr, nullptr, nullptr);
    case ViewOp::kExpand:
      return list("expand", "size");
    case ViewOp::kDiagonal:
      return scalars("diagonal", "offset", "dim1", "dim2");
    case ViewOp::kUnfold:
      return scalars("unfold", "dimension", "size", "step");
    case ViewOp::kReal:
      return scalars("real", nullptr, nullptr, nullptr);
    case ViewOp::kImag:
      return scalars("imag", nullptr, nullptr, nullptr);
    case ViewOp::kViewAsReal:
      return scalars("view_as_real", nullptr, nullptr, nullptr);
    case ViewOp::kViewAsComplex:
      return scalars("view_as_complex", nullptr, nullptr, nullptr);
    case ViewOp::kConj:
      return scalars("conj", nullptr, nullptr, nullptr);
    case ViewOp::kViewDtype:
      return Py_BuildValue("(s{s:N})", "view_dtype", "dtype", text(types.name(step.args[0])));
    case ViewOp::kAsStrided:
      break;
  }
  return Py_BuildValue("(s{s:N,s:N,s:L})", "as_strided", "size", integers(step.result.sizes), "stride",
                       integers(step.result.strides), "storage_offset",
                       static_cast<long long>(step.result.offset));
}

// (op, args, shape, stride, storage_offset, dtype), the last None where it stays.
PyObject* make_step(const ChainStep& step, int16_t dtype_before, const TypeNames& types) {
  PyObject* call = call_of(step, types);
  if (call == nullptr) return nullptr;
  const bool same = step.result.element.dtype == dtype_before;
  PyObject* made = Py_BuildValue("(OONNLN)", PyTuple_GET_ITEM(call, 0), PyTuple_GET_ITEM(call, 1),
                                 integers(step.result.sizes), integers(step.result.strides),
                                 static_cast<long long>(step.result.offset),
                                 same ? none() : text(types.name(step.result.element.dtype)));
  Py_DECREF(call);
  return made;
}

PyObject* make_answer(const ChainAnswer& answer, int16_t dtype, const TypeNames& types) {
  PyObject* steps = PyList_New(0);
  for (const ChainStep& step : answer.steps) {
    PyObject* made = steps == nullptr ? nullptr : make_step(step, dtype, types);
    if (made == nullptr || PyList_Append(steps, made) != 0) Py_CLEAR(steps);
    Py_XDECREF(made);
    if (steps == nullptr) return nullptr;
    dtype = step.result.element.dtype;
  }
  if (steps == nullptr) return nullptr;
  return Py_BuildValue("{s:N,s:N,s:i,s:L}", "steps", steps, "complete", boolean(answer.complete), "ruled_out",
                       answer.ruled_out, "nodes", static_cast<long long>(answer.nodes));
}

PyObject* infer(PyObject*, PyObject* args, PyObject* keywords) {
  static const char* names[] = {"base", "target", "max_ops", "max_nodes", "plain", nullptr};
  PyObject* base_tuple = nullptr;
  PyObject* target_tuple = nullptr;
  int max_ops = kMaxChainOps;
  long long max_nodes = kMaxChainNodes;
  int plain = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO|iLp", const_cast<char**>(names), &base_tuple,
                                   &target_tuple, &max_ops, &max_nodes, &plain)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    TypeNames types;
    Geometry base;
    Geometry target;
    if (!read_typed_geometry(base_tuple, types, base) || !read_typed_geometry(target_tuple, types, target))
      return nullptr;
    return make_answer(infer_chain(base, target, max_ops, max_nodes, plain != 0), base.element.dtype, types);
  });
}

PyMethodDef methods[] = {
    {"infer_chain", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(infer)),
     METH_VARARGS | METH_KEYWORDS,
     "infer_chain(base, target, max_ops=4, max_nodes=150000, plain=False)\n--\n\nAnswer the shortest chain "
     "of view "
     "operators "
     "from one geometry to another over the same storage; the shortest without unfold and diagonal where "
     "plain."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_chain_functions(PyObject* module) {
  return PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tensorplay::python
